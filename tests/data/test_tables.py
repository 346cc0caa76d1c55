"""Parquet files and saved ``datasets`` give the tokens of the same texts in JSONL."""

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from composer3d.data import documents, prepare, tables
from tests.data.prepare_command import PrepareCommand, write_texts

TEXTS = [f"text {number} héllo 日本語 " * (number % 7 + 1) for number in range(150)]
TEXTS[70] = ""  # no document


@pytest.fixture(scope="module")
def arrow() -> Any:
    return pytest.importorskip("pyarrow")


def write_parquet(file: Path, columns: dict[str, Any], **options: Any) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    file.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table(columns), file, **options)
    return file


def tokens_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.bin"))]


@pytest.fixture
def expected(command: PrepareCommand, tmp_path: Path) -> list[bytes]:
    command.run(write_texts(tmp_path / "x.jsonl", TEXTS), out="lines")
    return tokens_of(tmp_path / "lines")


def test_parquet_gives_the_tokens_of_jsonl(
    arrow: Any, command: PrepareCommand, tmp_path: Path, expected: list[bytes]
) -> None:
    kinds = [arrow.string(), arrow.large_string(), arrow.string_view()]
    kinds.append(arrow.dictionary(arrow.int32(), arrow.string()))
    for number, kind in enumerate(kinds):
        texts = TEXTS[30 * number :][:30]
        columns = {"text": texts[::-1], "a.body": arrow.array(texts).cast(kind)}
        write_parquet(tmp_path / "in" / f"{number}.parquet", columns, row_group_size=20)
    # Tables may stand beside JSONL.
    write_texts(tmp_path / "rest.jsonl", TEXTS[120:], "a.body")
    command.run(("in", "rest.jsonl"), "--field", "a.body")
    assert tokens_of(tmp_path / "out") == expected


def test_a_saved_dataset_gives_the_tokens_of_jsonl(
    arrow: Any, command: PrepareCommand, tmp_path: Path, expected: list[bytes]
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    source = tmp_path / "set"
    mixed = datasets.Dataset.from_dict({"body": TEXTS[::-1], "id": list(range(len(TEXTS)))})
    # In another order than it was made, and in two files.
    mixed.select(range(len(TEXTS) - 1, -1, -1)).save_to_disk(str(source), num_shards=2)
    command.run(source, "--field", "body")
    assert tokens_of(tmp_path / "out") == expected

    datasets.DatasetDict({"test": mixed, "train": mixed}).save_to_disk(str(tmp_path / "splits"))
    error = f"holds several splits (test, train); give one of them, such as {tmp_path}/splits/test"
    assert error in command.refusal("splits", out="no")
    # Nothing outside of the folder is read.
    state = json.loads((source / "state.json").read_text())
    state["_data_files"][0]["filename"] = str(tmp_path / "out" / "tokens.bin")
    (source / "state.json").write_text(json.dumps(state))
    line = command.refusal(source, "--field", "body", out="no")
    assert "tokens.bin', which is no file of the folder" in line


def test_an_interrupted_prepare_goes_on_in_the_middle_of_a_table(
    arrow: Any,
    command: PrepareCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = write_parquet(tmp_path / "x.parquet", {"text": TEXTS}, row_group_size=40)
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 100)
    options = ["--shard-tokens", "1500"]
    command.run(source, *options, out="whole")
    read = documents.read_rows

    def interrupted(*arguments: Any, **options: Any) -> Any:
        for row in read(*arguments, **options):
            if row.number == 120:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(documents, "read_rows", interrupted)
        command.errors(130, source, *options)
    first_rows = []

    def noted(*arguments: Any, first: int) -> Any:
        first_rows.append(first)
        return read(*arguments, first=first)

    monkeypatch.setattr(documents, "read_rows", noted)
    command.run(source, *options)
    # Groups are passed over, and rows of the next one.
    assert 80 < first_rows[0] < 120
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, "it has no column 'text'; name one of its columns with --field: 'body'"),
        ({"text": [1]}, "its column 'text' holds int64, not text; name another one with --field"),
        ({"text": ["a", None]}, "row 2 has no text (its 'text' is null); remove the row"),
        ({"text": ["a" * 11]}, "row 1 has 11 bytes, but at most 10 are read into memory"),
        ({"text": ["a", "b\0"]}, " row 2: byte 0 at offset 1 would end a document there"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_table_without_texts_is_refused(
    arrow: Any,
    command: PrepareCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(tables, "_LONGEST_BYTES", 10)
    assert message in command.refusal(write_parquet(tmp_path / "x.parquet", columns))


def test_damaged_tables_are_refused_with_one_line(
    arrow: Any, command: PrepareCommand, tmp_path: Path
) -> None:
    whole = write_parquet(tmp_path / "whole.parquet", {"text": TEXTS}).read_bytes()
    source = tmp_path / "x.parquet"
    for content in (b"", whole[: len(whole) // 2], whole[:100] + whole[120:]):
        source.write_bytes(content)
        line = command.refusal(source)
        assert line.startswith(f"{source}: ")
        assert "copy it again" in line

    # A page with a checksum is compared with it.
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    whole = write_parquet(source, {"text": TEXTS}, **options).read_bytes()
    assert b"text 17 h" in whole
    source.write_bytes(whole.replace(b"text 17 h", b"text 18 h"))
    assert "copy it again" in command.refusal(source)


def test_a_process_that_dies_or_asks_for_all_memory_is_reported(
    arrow: Any, command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * (1 << 20)
    source = write_parquet(tmp_path / "x.parquet", {"text": [text] * 66})
    assert source.stat().st_size < 1 << 20
    monkeypatch.setattr(tables, "_MEMORY", 100 << 20)
    line = command.refusal(source)
    assert "too much memory" in line or "ends with status" in line
    monkeypatch.setattr(tables, "_MEMORY", 1 << 20)  # not even Python can run
    assert command.refusal(source).startswith(f"{source}: ")


def test_a_row_group_need_not_fit_into_memory(
    arrow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number}{'x' * (128 << 10)}" for number in range(1200)]
    options = {"row_group_size": len(texts), "write_batch_size": 8, "use_dictionary": False}
    source = write_parquet(tmp_path / "x.parquet", {"text": texts}, **options)
    monkeypatch.setattr(tables, "_MEMORY", 140 << 20)  # the texts have 150 MiB
    with open(source, "rb") as content:
        rows = tables.read_rows("parquet", source, content, "text", first=0)
        assert [row.text for row in rows] == [text.encode() for text in texts]


@pytest.mark.parametrize("kind", ["parquet", "short rows", "gz", "blank lines"])
def test_a_small_file_does_not_become_endless_text(
    arrow: Any,
    command: PrepareCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The real limit begins at 64 MiB of text, which would take long here."""
    monkeypatch.setattr(documents, "_FREE_TEXT", 100_000)
    text = "" if kind == "short rows" else "a" * 1000
    line = b"\n" if kind == "blank lines" else json.dumps({"text": text}).encode() + b"\n"
    lines = line * (4_000_000 // len(line))
    if kind in ("gz", "blank lines"):
        source = tmp_path / "x.jsonl.gz"
        source.write_bytes(gzip.compress(lines))
    else:
        source = tmp_path / "x.parquet"
        write_parquet(source, {"text": [text] * (200_000 if kind == "short rows" else 4_000)})
    assert re.fullmatch(
        rf"{source}: its [\d,]+ bytes hold more than [\d,]+ bytes of text, over 100 times as many, "
        r"as in a file that is made to fill the disk; if you trust it, raise --max-expansion of "
        r"prepare \(now 100\)",
        command.refusal(source),
    )
    if kind in ("parquet", "gz"):
        command.run(source, "--max-expansion", "5000")


def test_a_missing_package_is_named(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "x.parquet").write_bytes(b"x")
    assert command.refusal("x.parquet") == (
        f"{tmp_path}/x.parquet: reading it needs the package pyarrow; install it with "
        "pip install 'composer3d[data]', or convert it to JSONL"
    )
    (tmp_path / "set").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "set" / name).write_text("{}")
    line = command.refusal("set")
    assert "needs the package datasets; install it with pip install 'composer3d[datasets]'" in line


def test_a_changed_table_is_refused(
    arrow: Any, command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet(tmp_path / "x.parquet", {"text": TEXTS})
    identify = documents.identify

    def changed(*arguments: Any) -> Any:
        return identify(*arguments)._replace(size=1)

    monkeypatch.setattr(prepare, "identify", changed)
    assert "x.parquet: has changed since prepare began" in command.refusal(source)
