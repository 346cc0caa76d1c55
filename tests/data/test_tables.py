"""Parquet files and saved ``datasets`` give the tokens of the same texts in JSONL."""

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from composer3d import cli
from composer3d.data import documents, prepare, tables

TEXTS = [f"text {number} héllo 日本語 " * (number % 7 + 1) for number in range(150)]
TEXTS[70] = ""  # no document


@pytest.fixture(scope="module")
def arrow() -> Any:
    return pytest.importorskip("pyarrow")


def write_lines(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def write_parquet(file: Path, columns: dict[str, Any], **options: Any) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    file.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table(columns), file, **options)
    return file


def command(source: Path, out: Path, *options: str) -> list[str]:
    return ["prepare", str(source), "-o", str(out), "--tokenizer", "bytes", *options]


def tokens_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.bin"))]


@pytest.fixture
def expected(tmp_path: Path) -> list[bytes]:
    lines = write_lines(tmp_path / "x.jsonl", TEXTS)
    assert cli.main(command(lines, tmp_path / "lines")) == 0
    return tokens_of(tmp_path / "lines")


@pytest.mark.parametrize(
    "column", ["string", "large_string", "string_view", "dictionary"], ids=lambda name: name
)
def test_parquet_gives_the_tokens_of_jsonl(
    arrow: Any, tmp_path: Path, expected: list[bytes], column: str
) -> None:
    kind = (
        arrow.dictionary(arrow.int32(), arrow.string())
        if column == "dictionary"
        else getattr(arrow, column)()
    )
    texts = arrow.array(TEXTS).cast(kind)
    source = write_parquet(
        tmp_path / "x.parquet", {"id": range(len(TEXTS)), "text": texts}, row_group_size=80
    )
    assert cli.main(command(source, tmp_path / "out")) == 0
    assert tokens_of(tmp_path / "out") == expected


def test_a_column_of_another_name_and_a_folder_of_files(
    arrow: Any, tmp_path: Path, expected: list[bytes]
) -> None:
    for name, texts in (("a", TEXTS[:100]), ("b", TEXTS[100:])):
        write_parquet(tmp_path / "in" / f"{name}.parquet", {"a.body": texts, "text": texts[::-1]})
    assert cli.main(command(tmp_path / "in", tmp_path / "out", "--field", "a.body")) == 0
    assert tokens_of(tmp_path / "out") == expected
    # Tables may stand beside JSONL.
    write_lines(tmp_path / "rest.jsonl", TEXTS[100:])
    sources = [str(write_parquet(tmp_path / "c.parquet", {"text": TEXTS[:100]}))]
    sources += [str(tmp_path / "rest.jsonl"), "-o", str(tmp_path / "mixed")]
    assert cli.main(["prepare", *sources, "--tokenizer", "bytes"]) == 0
    assert tokens_of(tmp_path / "mixed") == expected


def test_a_saved_dataset_gives_the_tokens_of_jsonl(
    arrow: Any, tmp_path: Path, expected: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    source = tmp_path / "set"
    mixed = datasets.Dataset.from_dict({"body": TEXTS[::-1], "id": list(range(len(TEXTS)))})
    # In another order than it was made, and in two files.
    mixed.select(range(len(TEXTS) - 1, -1, -1)).save_to_disk(str(source), num_shards=2)
    assert cli.main(command(source, tmp_path / "out", "--field", "body")) == 0
    assert tokens_of(tmp_path / "out") == expected

    datasets.DatasetDict({"test": mixed, "train": mixed}).save_to_disk(str(tmp_path / "splits"))
    assert cli.main(command(tmp_path / "splits", tmp_path / "no")) == 2
    error = f"holds several splits (test, train); give one of them, such as {tmp_path}/splits/test"
    assert error in capsys.readouterr().err
    # Nothing outside of the folder is read.
    state = json.loads((source / "state.json").read_text())
    state["_data_files"][0]["filename"] = str(tmp_path / "out" / "tokens.bin")
    (source / "state.json").write_text(json.dumps(state))
    assert cli.main(command(source, tmp_path / "no", "--field", "body")) == 2
    assert "tokens.bin', which is no file of the folder" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [40, 130])  # of a group: some groups are passed over, or none
def test_an_interrupted_prepare_goes_on_in_the_middle_of_a_table(
    arrow: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: int,
) -> None:
    source = write_parquet(tmp_path / "x.parquet", {"text": TEXTS}, row_group_size=rows)
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 100)
    options = ["--shard-tokens", "1500"]
    assert cli.main(command(source, tmp_path / "whole", *options)) == 0
    read = documents.read_rows

    def interrupted(*arguments: Any, **options: Any) -> Any:
        for row in read(*arguments, **options):
            if row.number == 120:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(documents, "read_rows", interrupted)
        assert cli.main(command(source, tmp_path / "out", *options)) == 130
    first_rows = []

    def noted(*arguments: Any, first: int) -> Any:
        first_rows.append(first)
        return read(*arguments, first=first)

    monkeypatch.setattr(documents, "read_rows", noted)
    assert cli.main(command(source, tmp_path / "out", *options)) == 0
    assert first_rows[0] > 80
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "whole")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, "it has no column 'text'; name one of its columns with --field: 'body'"),
        ({"text": [1]}, "its column 'text' holds int64, not text; name another one with --field"),
        ({"text": [b"a"]}, "its column 'text' holds binary, not text; name another one"),
        ({"text": ["a", None]}, "row 2 has no text (its 'text' is null); remove the row"),
        ({"text": ["a" * 11]}, "row 1 has 11 bytes, but at most 10 are read into memory"),
        ({"text": ["a", "b\0"]}, " row 2: byte 0 at offset 1 would end a document there"),
        ({"text": [""]}, "all files are empty; give a path that holds text"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_table_without_texts_is_refused(
    arrow: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(tables, "_LONGEST_BYTES", 10)
    source = write_parquet(tmp_path / "x.parquet", columns)
    assert cli.main(command(source, tmp_path / "out")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def test_damaged_tables_are_refused_with_one_line(
    arrow: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_parquet(tmp_path / "whole.parquet", {"text": TEXTS}).read_bytes()
    source = tmp_path / "x.parquet"
    for content in (b"", b"PAR1", whole[:-1], whole[: len(whole) // 2], whole[:100] + whole[120:]):
        source.write_bytes(content)
        assert cli.main(command(source, tmp_path / "out")) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{source}: ")
        assert "copy it again" in line
        assert not (tmp_path / "out.partial").exists()

    # A page with a checksum is compared with it.
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    whole = write_parquet(source, {"text": TEXTS}, **options).read_bytes()
    assert b"text 17 h" in whole
    source.write_bytes(whole.replace(b"text 17 h", b"text 18 h"))
    assert cli.main(command(source, tmp_path / "out")) == 2
    assert "copy it again" in capsys.readouterr().err


def test_a_process_that_dies_or_asks_for_all_memory_is_reported(
    arrow: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * (1 << 20)
    source = write_parquet(tmp_path / "x.parquet", {"text": [text] * 130})
    assert source.stat().st_size < 1 << 20
    monkeypatch.setattr(tables, "_MEMORY", 100 << 20)
    assert cli.main(command(source, tmp_path / "out")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "too much memory" in line or "ends with status" in line
    monkeypatch.setattr(tables, "_MEMORY", 1 << 20)  # not even Python can run
    assert cli.main(command(source, tmp_path / "out")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{source}: ")


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


@pytest.mark.parametrize("kind", ["parquet", "short rows", "gz", "zst", "blank lines"])
def test_a_small_file_does_not_become_endless_text(
    arrow: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """The real limit begins at 64 MiB of text, which would take long here."""
    monkeypatch.setattr(documents, "_FREE_TEXT", 100_000)
    text = "" if kind == "short rows" else "a" * 1000
    line = b"\n" if kind == "blank lines" else json.dumps({"text": text}).encode() + b"\n"
    lines = line * (4_000_000 // len(line))
    source = tmp_path / {"gz": "x.jsonl.gz", "zst": "x.jsonl.zst"}.get(kind, "x.parquet")
    if kind in ("gz", "blank lines"):
        source = tmp_path / "x.jsonl.gz"
        source.write_bytes(gzip.compress(lines))
    elif kind == "zst":
        zstandard = pytest.importorskip("zstandard")
        source.write_bytes(zstandard.compress(lines))
    else:
        write_parquet(source, {"text": [text] * (200_000 if kind == "short rows" else 4_000)})
    assert cli.main(command(source, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(
        rf"{source}: its [\d,]+ bytes hold more than [\d,]+ bytes of text, over 100 times as many, "
        r"as in a file that is made to fill the disk; if you trust it, raise --max-expansion of "
        r"prepare \(now 100\)\n",
        error,
    )
    assert not (tmp_path / "out").exists()
    if kind in ("parquet", "gz"):
        arguments = command(source, tmp_path / "out", "--max-expansion", "5000")
        assert cli.main(arguments) == 0


def test_a_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "x.parquet").write_bytes(b"x")
    assert cli.main(command(tmp_path / "x.parquet", tmp_path / "out")) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}/x.parquet: reading it needs the package pyarrow; install it with "
        "pip install 'composer3d[data]', or convert it to JSONL\n"
    )
    (tmp_path / "set").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "set" / name).write_text("{}")
    assert cli.main(command(tmp_path / "set", tmp_path / "out")) == 2
    assert "needs the package datasets; install it with pip install 'composer3d[datasets]'" in (
        capsys.readouterr().err
    )


def test_a_changed_table_is_refused(
    arrow: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet(tmp_path / "x.parquet", {"text": TEXTS})
    identify = documents.identify

    def changed(*arguments: Any) -> Any:
        return identify(*arguments)._replace(size=1)

    monkeypatch.setattr(prepare, "identify", changed)
    assert cli.main(command(source, tmp_path / "out")) == 2
    assert "x.parquet: has changed since prepare began" in capsys.readouterr().err
