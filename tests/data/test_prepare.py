"""Token files decode to their source, and an interrupted prepare goes on where it was."""

import errno
import fcntl
import gzip
import json
import os
import re
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import count, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from composer3d import cli
from composer3d.data import documents, open_corpus, prepare, tokenizer
from composer3d.data.sources import Corpus
from composer3d.runtime import progress
from tests.data.conftest import END
from tests.data.prepare_command import PrepareCommand, write_texts
from tests.data.sample_chats import write_lines
from tests.data.token_folders import opened, reseal

TEXTS = [
    "def f(x):\r\n\treturn x\n",
    "héllo 日本語 😀\x00",
    f"it says {END} and <pad>",
    " ",
    "parser = " * 50,
]
NAMES = ["a.txt", "b/c.md", "b.d", "e", "f"]
# In the order of relative paths: "." sorts before "/".
IN_ORDER = [TEXTS[0], TEXTS[2], TEXTS[1], TEXTS[3], TEXTS[4]]


def write_files(folder: Path) -> Path:
    for name, text in [*zip(NAMES, TEXTS, strict=True), ("empty", "")]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def write_vocabulary(file: Path, model: Any) -> list[str]:
    """Write a tokenizer of a few words; return the options that name it."""
    Tokenizer(model).save(str(file))
    return ["--tokenizer", str(file)]


def documents_of(folder: Path) -> list[np.ndarray]:
    """Return the documents of a folder, each without its last token, which must end a document."""
    manifest = json.loads((folder / "tokens.json").read_text())
    tokens = np.fromfile(folder / "tokens.bin", dtype=manifest["dtype"])
    starts = np.fromfile(folder / "documents.bin", dtype="<i8")
    assert (starts[0], starts[-1]) == (0, len(tokens))
    assert len(tokens) == manifest["tokens"]
    assert set(tokens[starts[1:] - 1]) == {manifest["end_of_document"]}
    n_ends = np.count_nonzero(tokens == manifest["end_of_document"])
    assert n_ends == manifest["documents"] == len(starts) - 1
    return [tokens[start : stop - 1] for start, stop in pairwise(starts)]


def texts_of(folder: Path) -> list[str]:
    """Return the documents of a folder of byte tokens, in one shard or several."""
    corpus = opened(folder)
    all_tokens = corpus.tokens[np.arange(len(corpus.tokens))]
    *texts, after_last = bytes(all_tokens.tolist()).split(b"\0")
    assert not after_last
    return [text.decode() for text in texts]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["texts", "file", "lines", "folder of lines"])
def test_tokens_decode_to_the_source(
    command: PrepareCommand,
    tmp_path: Path,
    bpe: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 30)  # several batches of several documents
    source, expected = write_files(tmp_path / "in"), IN_ORDER
    if kind == "file":
        source, expected = source / "b" / "c.md", [TEXTS[1]]
    elif kind == "lines":
        source, expected = write_texts(tmp_path / "x.jsonl", [*TEXTS, ""]), TEXTS
    elif kind == "folder of lines":
        write_texts(tmp_path / "j" / "b.jsonl", TEXTS[:2])
        write_texts(tmp_path / "j" / "a" / "z.jsonl", TEXTS[2:])
        write_texts(tmp_path / "j" / ".hidden.jsonl", ["no"])
        source, expected = tmp_path / "j", TEXTS[2:] + TEXTS[:2]
    answer = command.run(source, "--tokenizer", str(bpe))
    coder = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    found = documents_of(tmp_path / "out")
    assert [coder.decode(ids.tolist(), skip_special_tokens=False) for ids in found] == expected
    assert answer["end_of_document"] == coder.token_to_id(END) == 1
    assert (answer["vocab"], answer["dtype"]) == (coder.get_vocab_size(), "uint16")
    assert answer["documents"] == len(expected)
    assert answer["tokens"] == sum(map(len, found)) + len(expected)
    assert not [name for name in names_in(tmp_path) if "tmp" in name]


def test_byte_tokens_equal_those_of_a_source_read_as_bytes(
    command: PrepareCommand, tmp_path: Path
) -> None:
    texts = [text.replace("\0", "") for text in TEXTS]
    lines = write_texts(tmp_path / "x.jsonl", texts, "body")
    direct = open_corpus("jsonl", lines, split="train", field="body")
    assert direct.tokens.tobytes() == b"".join(text.encode() + b"\0" for text in texts)
    answer = command.run("x.jsonl", "--field", "body")
    corpus = opened(tmp_path / "out")
    assert isinstance(corpus.tokens.base, np.memmap) or isinstance(corpus.tokens, np.memmap)
    assert not corpus.tokens.flags.writeable
    assert np.array_equal(corpus.tokens, direct.tokens)
    assert corpus.n_documents == direct.n_documents == answer["documents"] == 5
    assert corpus.end_of_document == direct.end_of_document == 0
    assert answer["vocab"] == 256


@pytest.mark.parametrize(
    ("top", "options", "dtype", "end"),
    [(65_536, [], "uint32", 0), (65_535, ["--eod", "<eos>"], "uint16", 3)],
)
def test_a_large_vocabulary_takes_four_bytes(
    command: PrepareCommand, tmp_path: Path, top: int, options: list[str], dtype: str, end: int
) -> None:
    words = {"</s>": 0, "<eos>": 3, "top": top}
    named = write_vocabulary(tmp_path / "t.json", models.WordLevel(words, unk_token="</s>"))
    (tmp_path / "a").write_text("top")
    answer = command.run("a", *named, *options)
    facts = (answer["vocab"], answer["dtype"], answer["end_of_document"])
    assert facts == (top + 1, dtype, end)
    assert np.fromfile(tmp_path / "out" / "tokens.bin", dtype=dtype).tolist() == [top, end]
    assert opened(tmp_path / "out").tokens.tolist() == [top, end]


@pytest.mark.parametrize("kind", ["text", "answers"])
def test_the_digest_does_not_depend_on_the_shards(
    command: PrepareCommand, tmp_path: Path, kind: str
) -> None:
    def prepared(lines: list[dict[str, str]], out: str, *options: str) -> Corpus:
        write_lines(tmp_path / "x.jsonl", lines)
        command.errors(0, "x.jsonl", "--kind", kind, *options, out=out)
        return opened(tmp_path / out)

    def change(**content: str) -> None:
        reseal(tmp_path / "1", lambda manifest: manifest["content"].update(content))

    texts = [text.strip("\0") for text in TEXTS[:2]]
    lines = [{"prompt": f"a {n}", "answer": text, "text": text} for n, text in enumerate(texts)]
    found = {}
    for tokens in ("1", "60", "100000"):
        found[tokens] = prepared(lines * 3, tokens, "--shard-tokens", tokens)
        assert cli.main(["inspect", str(tmp_path / tokens), "--full"]) == 0
    assert len({corpus.digest for corpus in found.values()}) == 1
    assert len({corpus.older_digest for corpus in found.values()}) == 3

    # Other documents, in another order, or cut otherwise, are other data.
    others = (lines * 2, lines[::-1] * 3, [*lines * 2, lines[1], lines[0]])
    for number, changed in enumerate(others):
        assert prepared(changed, f"changed{number}").digest != found["1"].digest
    # A digest that is not of these documents is found by inspect, and one of other files is not
    # used.
    change(digest=json.loads((tmp_path / "1/tokens.json").read_text())["content"]["files"])
    assert cli.main(["inspect", str(tmp_path / "1"), "--full"]) == 1
    change(files="0" * 32)
    corpus = opened(tmp_path / "1")
    assert corpus.digest == corpus.older_digest == found["1"].older_digest


def interrupt_at(monkeypatch: pytest.MonkeyPatch, error: Any, n_documents: int) -> None:
    """Raise ``error`` in prepare when it has read ``n_documents``, all of which are encoded."""
    whole = prepare.read_documents

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield from islice(whole(*arguments, **options), n_documents)
        if isinstance(error, signal.Signals):
            os.kill(os.getpid(), error)
        raise error

    monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
    monkeypatch.setattr(prepare, "read_documents", interrupted)


# What interrupts prepare, and the status with which it ends. None: the error is raised.
INTERRUPTS = {
    "Ctrl-C": (KeyboardInterrupt(), 130),
    "SIGTERM": (signal.SIGTERM, 143),
    "a bug": (RuntimeError("crash"), None),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), 2),
}


@pytest.mark.parametrize(
    ("error", "status", "shard_tokens"),
    [
        *((error, status, 1) for error, status in INTERRUPTS.values()),
        (KeyboardInterrupt(), 130, 10**6),  # no shard is finished
    ],
    ids=[*INTERRUPTS, "Ctrl-C in the first shard"],
)
def test_an_interrupted_prepare_goes_on(
    command: PrepareCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Any,
    status: int | None,
    shard_tokens: int,
) -> None:
    source, out = write_texts(tmp_path / "x.jsonl", TEXTS[2:] * 6), tmp_path / "new" / "out"
    options = ["--processes", "2", "--shard-tokens", str(shard_tokens)]
    command.run(source, *options, out="whole")
    before = signal.getsignal(signal.SIGTERM)
    arguments = command.arguments(source, *options, out=out)
    with monkeypatch.context() as patch:
        interrupt_at(patch, error, 14)
        if status is None:
            with pytest.raises(RuntimeError, match="crash"):
                cli.main(arguments)
        elif status == 143:
            with pytest.raises(SystemExit, match="143"):
                cli.main(arguments)
        else:
            assert cli.main(arguments) == status
    assert signal.getsignal(signal.SIGTERM) is before
    errors = command.capsys.readouterr().err
    if shard_tokens > 1:
        assert names_in(out.parent) == []
        assert "keeps" not in errors
    else:
        (left,) = out.parent.iterdir()
        assert left.name == "out.partial"
        unchanged = {path.stat().st_ino for path in left.glob("tokens-*.bin")}
        kept = len(unchanged)
        assert 5 < kept <= 14
        assert f"{left} keeps {kept} finished parts; run the same command again to" in errors

    # The output does not depend on the interrupt, nor on the number of processes.
    assert cli.main([*arguments, "--processes", "1", "--json"]) == 0
    shown = command.capsys.readouterr()
    assert contents(out) == contents(tmp_path / "whole")
    assert names_in(out.parent) == ["out"]
    if shard_tokens == 1:
        assert f"out.partial: goes on after {kept} of {kept} finished parts" in shown.err
        assert json.loads(shown.out.splitlines()[-1])["resumed_bytes"] > 0
        assert unchanged <= {path.stat().st_ino for path in out.iterdir()}


AGAIN = ["--shard-tokens", "3", "--processes", "1"]


@pytest.fixture
def left(command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left of a prepare of four files, interrupted after two and a half of them."""
    for name in "abcd":
        write_texts(tmp_path / "in" / f"{name}.jsonl", [f"{name}{number}" for number in range(5)])
    with monkeypatch.context() as patch:
        interrupt_at(patch, KeyboardInterrupt(), 13)
        command.errors(130, "in", *AGAIN)
    return tmp_path / "out.partial"


def pieces_of(left: Path) -> int:
    return len((left / "journal.jsonl").read_text().splitlines()) - 1


def test_a_changed_file_costs_only_the_shards_from_it_on(
    command: PrepareCommand, tmp_path: Path, left: Path
) -> None:
    kept = pieces_of(left)
    assert kept > 10
    write_texts(tmp_path / "in" / "c.jsonl", ["other"])
    write_texts(tmp_path / "in" / "d.jsonl", ["another"])
    assert f"goes on after 10 of {kept} finished parts" in command.errors(0, "in", *AGAIN)
    unchanged = [f"{name}{number}" for name in "ab" for number in range(5)]
    assert texts_of(tmp_path / "out") == [*unchanged, "other", "another"]


def put_a_link_in_place(folder: Path) -> None:
    (folder / "out.partial").rename(folder / "moved")
    (folder / "out.partial").symlink_to("moved")


ANOTHER_SOURCE = "was begun with another source, or its first files have changed; give the same"
IN_THE_WAY = "out.partial is in the way: prepare works in a folder of that name"
# A change of the files, or the options of the next command, and what refuses it.
ANOTHER_PREPARE: dict[str, tuple[Any, str]] = {
    "touched": (lambda folder: (folder / "in" / "a.jsonl").touch(), ANOTHER_SOURCE),
    "a file before": (lambda folder: write_texts(folder / "in/A.jsonl", ["x"]), ANOTHER_SOURCE),
    "shards": (
        ["--shard-tokens", "4"],
        r"other options \(shard tokens\); give the same, or remove it",
    ),
    "field": (["--field", "body"], r"was begun with another tokenizer or other options \(field\);"),
    "tokenizer": (
        ["--tokenizer", "BPE"],
        r"other options \(tokenizer, eod\); give the same, or remove",
    ),
    "journal": (
        lambda folder: (folder / "out.partial" / "journal.jsonl").write_text("[]\n"),
        r"its journal.jsonl cannot be used \(a line of it is not an object\); remove the",
    ),
    "none": (lambda folder: (folder / "out.partial" / "journal.jsonl").unlink(), IN_THE_WAY),
    "a link": (put_a_link_in_place, IN_THE_WAY),
}


@pytest.mark.parametrize(("change", "message"), ANOTHER_PREPARE.values(), ids=ANOTHER_PREPARE)
def test_what_another_prepare_has_left_is_not_used(
    command: PrepareCommand, tmp_path: Path, left: Path, bpe: Path, change: Any, message: str
) -> None:
    options = []
    if callable(change):
        change(tmp_path)
    else:
        options = [str(bpe) if option == "BPE" else option for option in change]
    before = sorted(tmp_path.rglob("*"))
    line = command.refusal("in", *AGAIN, *options)
    assert re.search(message, line), line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", ["cut journal", "missing shard", "cut shard", "strange line"])
def test_what_a_crash_has_damaged_is_made_again(
    command: PrepareCommand, tmp_path: Path, left: Path, damage: str
) -> None:
    journal = left / "journal.jsonl"
    expected = 7
    if damage == "cut journal":
        expected = pieces_of(left) - 1
        os.truncate(journal, journal.stat().st_size - 1)
    elif damage == "missing shard":
        (left / "tokens-00007.bin").unlink()
    elif damage == "cut shard":
        os.truncate(left / "documents-00007.bin", 8)
    else:
        journal.write_bytes(journal.read_bytes() + b'{"end": 3}\n')
        assert "journal.jsonl cannot be used" in command.refusal("in", *AGAIN)
        return
    assert f"goes on after {expected} of" in command.errors(0, "in", *AGAIN)
    assert len(texts_of(tmp_path / "out")) == 20
    assert cli.main(["inspect", str(tmp_path / "out"), "--full"]) == 0


@pytest.mark.parametrize("name", ["in", "link"])
def test_a_prepare_into_its_own_source_goes_on(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    texts = [str(number) for number in range(12)]
    write_texts(tmp_path / "in" / "a.jsonl", texts)
    (tmp_path / "link").symlink_to("in")
    out = tmp_path / "in" / "deep" / "out"
    with monkeypatch.context() as patch:
        interrupt_at(patch, KeyboardInterrupt(), 8)
        command.errors(130, name, *AGAIN, out=out)
    assert "goes on after" in command.errors(0, name, *AGAIN, out=out)
    assert texts_of(out) == texts


def test_a_prepare_at_work_is_not_disturbed(command: PrepareCommand, left: Path) -> None:
    with open(left / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = command.refusal("in", *AGAIN)
    assert "out.partial is in use by another prepare; wait for" in line
    command.run("in", *AGAIN)


@pytest.mark.parametrize("name", ["a", "a.jsonl", "a.jsonl.gz"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "in" / name
    file.parent.mkdir()
    content = b'{"text": "a"}\n'
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    batches = prepare._batches

    def slow(documents: Any) -> Any:
        for batch in batches(documents):
            os.utime(file, ns=(0, 0))
            yield batch

    monkeypatch.setattr(prepare, "_batches", slow)
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
    assert command.refusal("in").endswith(
        f"in/{name}: has changed since prepare began; run the same command again"
    )


def test_the_output_does_not_depend_on_the_processes(
    command: PrepareCommand, tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 100)
    source = write_texts(tmp_path / "x.jsonl", [text * 9 for text in TEXTS] * 3)
    for processes in ("1", "3"):
        named = ["--tokenizer", str(bpe), "--processes", processes, "--shard-tokens", "50"]
        answer = command.run(source, *named, out=processes)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert answer["shards"] > 5
    corpus = opened(tmp_path / "3")
    ids = corpus.tokens[np.arange(len(corpus.tokens))].tolist()
    text = Tokenizer.from_file(str(bpe)).decode(ids, skip_special_tokens=False)
    assert text == "".join(text * 9 + END for text in TEXTS) * 3


def test_the_first_error_of_the_source_is_reported(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "\\u0000"}\n{"text": "b"}\n{}\n')
    line = command.refusal("x.jsonl", "--processes", "4")
    assert "x.jsonl:2: byte 0 at offset 0" in line


def compress(path: Path, content: bytes) -> Path:
    """Write two members, as pigz and concatenation make them."""
    if path.suffix == ".gz":
        compressed = gzip.compress
    else:
        compressed = pytest.importorskip("zstandard").ZstdCompressor().compress
    half = len(content) // 2
    path.write_bytes(compressed(content[:half]) + compressed(content[half:]))
    return path


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_sources_are_read(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    plain = write_texts(tmp_path / "plain" / "x.jsonl", [f"text {n}" for n in range(50)])
    options = ["--shard-tokens", "20"]
    command.run(plain, *options, out="expected")
    source = compress(tmp_path / f"x.jsonl{suffix}", plain.read_bytes())
    with monkeypatch.context() as patch:
        interrupt_at(patch, KeyboardInterrupt(), 30)
        command.errors(130, source, *options)
    answer = command.run(source, *options)  # goes on in the middle of the file
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert answer["source_bytes"] == source.stat().st_size
    command.run(compress(tmp_path / f"a.txt{suffix}", b"hello"), out="text")
    assert texts_of(tmp_path / "text") == ["hello"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "text"])
def test_a_damaged_compressed_source_is_refused(
    command: PrepareCommand, tmp_path: Path, suffix: str, damage: str
) -> None:
    # A text that is cut would pass for a whole one; a line of JSONL would not.
    source = tmp_path / (f"x.txt{suffix}" if damage == "cut" else f"x.jsonl{suffix}")
    lines = b"".join(b'{"text": "%d"}\n' % (n * n * 7919) for n in range(1000))
    content = bytearray(compress(source, lines).read_bytes())
    if damage == "cut":
        content = content[:-20]
    elif damage == "flipped":
        content[len(content) // 4] ^= 0xFF
    else:
        content = bytearray(lines)
    source.write_bytes(content)
    line = command.refusal(source)
    assert re.search(rf"{source.name}(: cannot be decompressed: |:\d+: )", line), line


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "txt"), (".zst", "jsonl")])
def test_a_decompression_bomb_is_refused_in_little_memory(
    command: PrepareCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    kind: str,
) -> None:
    monkeypatch.setattr(documents, "_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(documents, "_LONGEST_COMPRESSED_TEXT", 1 << 20)
    source = compress(tmp_path / f"x.{kind}{suffix}", b" " * (64 << 20))
    assert source.stat().st_size < 200_000
    tracemalloc.start()
    try:
        line = command.refusal(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    place = f"{source}:1: the line is longer" if kind == "jsonl" else f"{source}: one document has"
    assert line.startswith(place)
    assert peak < 48 << 20


def test_a_missing_zstandard_is_named(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert command.refusal("x.jsonl.zst").endswith(
        "x.jsonl.zst: reading .zst needs the package zstandard; install it with "
        "pip install 'composer3d[data]', or decompress the file"
    )


def test_a_split_holds_out_documents_by_their_text(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text {number}" for number in range(200)]
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 100)
    sides = []
    # Shards of a few documents, and one; other places, and each document twice.
    for shard_tokens, order in (("100", texts), ("1000000", texts[::-1] + texts)):
        options = ["--shard-tokens", shard_tokens, "--split", "0.1"]
        source = write_texts(tmp_path / f"{len(order)}.jsonl", order)
        out = tmp_path / f"out {len(order)}"
        with monkeypatch.context() as patch:
            interrupt_at(patch, KeyboardInterrupt(), 100)
            command.errors(130, source, *options, out=out)
        counts = command.run(source, *options, out=out)["splits"]
        found = {}
        for name in ("train", "validation"):
            found[name] = texts_of(out / name)
            assert counts[name]["documents"] == len(found[name])
            assert cli.main(["inspect", str(out / name), "--full"]) == 0
        # Each side keeps the order of the source.
        assert found["train"] == [text for text in order if text in set(found["train"])]
        assert sorted(found["train"] + found["validation"]) == sorted(order)
        assert not set(found["train"]) & set(found["validation"])
        sides.append(set(found["validation"]))
        command.capsys.readouterr()
    assert sides[0] == sides[1]
    assert 10 < len(sides[0]) < 30


def test_a_split_without_a_document_is_refused(command: PrepareCommand, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["a"])
    shown = command.errors(2, source, "--split", "0.001")
    error = "--split 0.001 leaves no document for validation; use another --split, or give more"
    assert error in shown
    # The same command would fail again, and another may not go on from its files.
    assert "run the same command again" not in shown
    assert names_in(tmp_path) == ["x.jsonl"]
    for wrong in ("0", "1", "-1"):
        error = f"argument --split: must be above 0 and below 1, got {wrong}"
        assert error in command.errors(2, source, f"--split={wrong}")
    for wrong in ("nan", "x"):
        error = f"argument --split: must be a number, got {wrong}"
        assert error in command.errors(2, source, f"--split={wrong}")


def test_several_sources_are_read_in_their_order(command: PrepareCommand, tmp_path: Path) -> None:
    for name in ("b.jsonl", "in/c.jsonl", "a.jsonl"):
        write_texts(tmp_path / name, [name])
    command.run(("b.jsonl", "in", "a.jsonl"))
    assert texts_of(tmp_path / "out") == ["b.jsonl", "in/c.jsonl", "a.jsonl"]
    (tmp_path / "t.txt").write_text("t")
    line = command.refusal(("b.jsonl", "t.txt"), out="no")
    assert "one is text and the other is JSONL or a table; give sources of one kind" in line


@pytest.mark.parametrize("second", ["a/x.txt", "a/../a", "link"])
def test_two_sources_with_the_same_file_are_refused(
    command: PrepareCommand, tmp_path: Path, second: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.txt").write_text("some words")
    (tmp_path / "link").symlink_to("a")
    first, other = tmp_path / "a", os.path.join(tmp_path, second)
    line = command.refusal((first, other))
    assert line.startswith(f"{tmp_path}/a/x.txt: is in {first} and in {Path(other)}, so that its ")


def test_an_existing_folder_is_never_replaced(command: PrepareCommand, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "x.jsonl", ["a"])
    command.run(source)
    assert command.refusal(source) == f"{tmp_path / 'out'} exists; remove it, or give another -o"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "exists" in command.refusal(source, out="dangling")


def test_the_second_of_two_at_once_is_refused(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, whole = write_texts(tmp_path / "x.jsonl", ["a"]), prepare.write_manifest

    def slow(folder: Path, facts: dict[str, Any], files: dict[str, Any]) -> None:
        write_texts(tmp_path / "out" / "of_the_first", ["b"])
        whole(folder, facts, files)

    monkeypatch.setattr(prepare, "write_manifest", slow)
    assert cli.main(command.arguments(source)) == 2
    shown = command.capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith(
        f"{tmp_path / 'out'} cannot be written: Directory not empty; give another -o\n"
    )
    assert names_in(tmp_path / "out") == ["of_the_first"]


def test_all_files_are_on_disk_before_the_folder_is_renamed(
    command: PrepareCommand, tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (seen.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "rename", lambda old, new: (seen.append("rename"), rename(old, new)))
    out = tmp_path / "out"
    command.run(write_files(tmp_path / "in"), "--tokenizer", str(bpe))
    inodes = {path.name: path.stat().st_ino for path in out.iterdir()}
    assert set(inodes) == {"tokens.bin", "documents.bin", "tokenizer.json", "tokens.json"}
    assert set(seen[:-3]) >= set(inodes.values())
    assert seen[-3:] == [out.stat().st_ino, "rename", tmp_path.stat().st_ino]


def test_progress_is_printed_now_and_then(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that advances 10 s from one document to the next.
    clock = SimpleNamespace(monotonic=count(0, 10).__next__)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    source = write_texts(tmp_path / "x.jsonl", ["a" * 999_980] * 3)
    assert command.errors(0, source).splitlines()[0] == (
        "prepare: 1 of 3 MB, 0:00:10 so far, about 0:00:20 left, 1 documents, 999,981 tokens"
    )


# The files of a source, the options, and what refuses them.
WRONG: list[tuple[dict[str, bytes], list[str], str]] = [
    ({}, [], "in does not exist; give a text file, a .jsonl or .parquet file, or a folder of"),
    ({"in/.a": b"x"}, [], "in: no files found; give a path that holds text"),
    ({"in/a": b"", "in/b": b""}, [], "in: all files are empty; give a path that holds text"),
    (
        {"in/a.jsonl": b"{}", "in/README": b"x"},
        [],
        r"in holds JSONL and other files, such as \S+README; give a folder of one kind",
    ),
    (
        {"in/a": b"x"},
        ["--field", "body"],
        r"--field body is only read with JSONL and tables, and \S+/in holds neither a .jsonl "
        "nor a .parquet file; remove it",
    ),
    (
        {"in/a": b"x"},
        ["--eod", "</s>"],
        "--eod </s> is not used with --tokenizer bytes, because byte 0 ends a document;",
    ),
    (
        {"in/a": b"x", "in/b.NDJSON": b"{}"},
        [],
        "in/b.NDJSON: a .ndjson file is not read as text; rename it to .jsonl if",
    ),
    (
        {"in/a.txt.gz": b"x"},
        [],
        r"in/a.txt.gz: cannot be decompressed: Not a gzipped file \(b'x'\); copy it again",
    ),
    ({"in/a.xz": b"x"}, [], "in/a.xz: a .xz file is not read as text; decompress it"),
    *(
        ({f"in/a{end}": b"x"}, [], f"in/a{end}: a {kind} file is not read as text; unpack it, and")
        for end, kind in ((".TAR.gz", ".tar"), (".tar.zst", ".tar"), (".tgz", ".tgz"))
    ),
    ({"in/a.zip": b"x"}, ["--field", "x"], "in/a.zip: a .zip file is not read as text; unpack it"),
    (
        {"in/a.arrow": b"x"},
        [],
        "in/a.arrow: a .arrow file is not read as text; give the folder that save_to_disk of",
    ),
    ({"in/a": b"x\0y"}, [], "in/a: byte 0 at offset 1 would end a document there;"),
    (
        {"in/a.jsonl": b'\n{"text": "a\\u0000"}'},
        [],
        "in/a.jsonl:2: byte 0 at offset 1 would end a document there;",
    ),
    (
        {"in/a": b"x"},
        ["--tokenizer", "no.json"],
        "--tokenizer no.json: No such file or directory; give bytes, or the path",
    ),
    (
        {"in/a": b"x"},
        ["--tokenizer", __file__],
        r"--tokenizer \S+: Cannot instantiate Tokenizer from buffer: .*; give bytes",
    ),
    (
        {"in/a": b"fine", "in/b": b"ab\xff"},
        ["--tokenizer", "BPE"],
        "in/b: byte 0xff at offset 2 is not UTF-8; convert",
    ),
    (
        {"in/a.jsonl": b'{"text": "no"}\n{"text": "x q"}\n{"text": "so"}'},
        ["--tokenizer", "BPE", "--eod", "q"],
        "in/a.jsonl:2: its tokens hold q, which would end a document there; name another token",
    ),
]


@pytest.mark.parametrize(
    ("files", "options", "message"),
    WRONG,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_source_or_option_is_refused(
    command: PrepareCommand,
    tmp_path: Path,
    bpe: Path,
    files: dict[str, bytes],
    options: list[str],
    message: str,
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    named = [str(bpe) if option == "BPE" else option for option in options]
    assert re.search(message, command.refusal("in", *named))


WORDS = {"a": 0, "</s>": 1}
UNKNOWN: dict[str, tuple[Any, str, str]] = {
    "an error": (
        models.WordLevel(WORDS),
        "z",
        r"/b or soon after: --tokenizer \S+: WordLevel error: .*; give one",
    ),
    "no token": (
        models.BPE(WORDS, []),
        "zz",
        r"/b: no character of it has a token in \S+; remove the document",
    ),
}


@pytest.mark.parametrize(("model", "text", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_text_that_a_tokenizer_cannot_represent_is_refused(
    command: PrepareCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    text: str,
    message: str,
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
    named = write_vocabulary(tmp_path / "t.json", model)
    (tmp_path / "in").mkdir()
    for name, content in (("a", "a"), ("b", text)):
        (tmp_path / "in" / name).write_text(content)
    assert re.search(message, command.refusal("in", *named))
    if isinstance(model, models.BPE):
        (tmp_path / "in" / "b").write_text(" \n")  # blank, so nothing is lost
        command.run("in", *named)
        assert [document.tolist() for document in documents_of(tmp_path / "out")] == [[0], []]


def test_a_document_that_would_take_all_memory_is_refused(
    command: PrepareCommand, tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "big.txt", "wb") as file:
        file.truncate((16 << 20) + 1)
    named = ["--tokenizer", str(bpe)]
    assert command.refusal("big.txt", *named) == (
        f"{tmp_path / 'big.txt'}: one document has 16_777_217 bytes, but at most 16_777_216 are "
        "read into memory; cut it into several documents, each in a file or JSONL line of its own"
    )
    monkeypatch.setattr(tokenizer, "DOCUMENT_BYTES", 5)
    lines = write_texts(tmp_path / "x.jsonl", ["abcde", "abcdef"])
    assert f"{lines}:3: one document has 6 bytes" in command.refusal(lines, *named)
    command.run(lines, out="bytes")
    command.run(write_texts(lines, ["abcde"]), *named)


def test_a_field_makes_a_file_of_any_name_jsonl(command: PrepareCommand, tmp_path: Path) -> None:
    for name in ("a.json", "a.ndjson", "a"):
        command.run(write_texts(tmp_path / name, ["a", "b"]), "--field", "text", out=f"{name} out")
        assert len(documents_of(tmp_path / f"{name} out")) == 2


def test_a_path_that_is_too_long_or_empty_is_refused(
    command: PrepareCommand, tmp_path: Path
) -> None:
    assert command.refusal("x" * 300).endswith(
        "xxx does not exist; give a text file, a .jsonl or .parquet file, or a folder of one kind"
    )
    source = write_texts(tmp_path / "x.jsonl", ["a"])
    assert command.refusal(source, out="x" * 300).endswith(
        "xxx cannot be written: File name too long; give another -o"
    )
    assert cli.main(["prepare", "", "-o", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    assert "an argument is empty" in command.capsys.readouterr().err


def memory_mib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(key))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of memory is read from Linux's /proc",
)
def test_memory_does_not_grow_with_the_source(command: PrepareCommand, tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 2_000}).encode() + b"\n"
    with open(tmp_path / "big.jsonl", "wb") as file:
        for _ in range(25):
            file.write(line * 1_000)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory_mib("VmRSS")
    assert command.run("big.jsonl")["tokens"] == 25_000 * 2_001
    # tokens.bin has 95 MiB, of which the digest takes 64 MiB at a time.
    assert memory_mib("VmHWM") - before < 90
