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
from composer3d.facts.token_manifest import digest_of_manifest
from composer3d.runtime import progress

END = "<|endoftext|>"
TEXTS = [
    "def f(x):\r\n\treturn x\n",
    "héllo 日本語 😀\x00",
    f"it says {END} and <pad>",
    " ",
    "parser = " * 50,
]
FILES = {
    "a.txt": TEXTS[0],
    "b/c.md": TEXTS[1],
    "b.d": TEXTS[2],
    "e": TEXTS[3],
    "f": TEXTS[4],
    "empty": "",
}
# In the order of relative paths: "." sorts before "/".
IN_ORDER = [TEXTS[0], TEXTS[2], TEXTS[1], TEXTS[3], TEXTS[4]]


def write_texts(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def write_lines(file: Path, texts: list[str], field: str = "text") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(json.dumps({"id": 1, field: text}) for text in texts) + "\n")
    return file


def run(
    capsys: pytest.CaptureFixture[str], source: Path, out: Path, *options: str
) -> dict[str, Any]:
    """Run prepare; return its JSON."""
    assert cli.main(["prepare", str(source), "-o", str(out), "--json", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    answer: dict[str, Any] = json.loads(lines[-1])
    assert answer.pop("ok") is True
    return answer


def refused(capsys: pytest.CaptureFixture[str], source: Path, out: Path, *options: str) -> str:
    """Run prepare, which must fail and leave nothing; return the one line that refuses."""
    before = sorted(out.parent.iterdir())
    assert cli.main(["prepare", str(source), "-o", str(out), "--json", *options]) == 2
    shown = capsys.readouterr()
    assert sorted(out.parent.iterdir()) == before
    (line,) = shown.err.splitlines()
    assert json.loads(shown.out) == {"ok": False, "errors": [line]}
    return line


def documents_of(folder: Path) -> list[np.ndarray]:
    """Return the documents of a folder, each without its last token, which must end a document."""
    manifest = json.loads((folder / "tokens.json").read_text())
    tokens = np.fromfile(folder / "tokens.bin", dtype=manifest["dtype"])
    starts = np.fromfile(folder / "documents.bin", dtype="<i8")
    assert (starts[0], starts[-1]) == (0, len(tokens))
    assert len(tokens) == manifest["tokens"]
    assert set(tokens[starts[1:] - 1]) == {manifest["end_of_document"]}
    assert (
        np.count_nonzero(tokens == manifest["end_of_document"])
        == manifest["documents"]
        == len(starts) - 1
    )
    return [tokens[start : stop - 1] for start, stop in pairwise(starts)]


@pytest.mark.parametrize("kind", ["texts", "file", "lines", "folder of lines"])
def test_tokens_decode_to_the_source(
    tmp_path: Path,
    bpe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 30)  # several batches of several documents
    source, expected = write_texts(tmp_path / "in"), IN_ORDER
    if kind == "file":
        source, expected = source / "b" / "c.md", [TEXTS[1]]
    elif kind == "lines":
        source, expected = write_lines(tmp_path / "x.jsonl", [*TEXTS, ""]), TEXTS
    elif kind == "folder of lines":
        write_lines(tmp_path / "j" / "b.jsonl", TEXTS[:2])
        write_lines(tmp_path / "j" / "a" / "z.jsonl", TEXTS[2:])
        write_lines(tmp_path / "j" / ".hidden.jsonl", ["no"])
        source, expected = tmp_path / "j", TEXTS[2:] + TEXTS[:2]
    answer = run(capsys, source, tmp_path / "out", "--tokenizer", str(bpe))
    coder = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    decoded = [
        coder.decode(ids.tolist(), skip_special_tokens=False)
        for ids in documents_of(tmp_path / "out")
    ]
    assert decoded == expected
    assert answer["end_of_document"] == coder.token_to_id(END) == 1
    assert (answer["vocab"], answer["dtype"]) == (coder.get_vocab_size(), "uint16")
    assert (answer["documents"], answer["tokens"]) == (
        len(expected),
        sum(map(len, documents_of(tmp_path / "out"))) + len(expected),
    )
    assert sorted(path.name for path in tmp_path.iterdir() if "tmp" in path.name) == []


def test_byte_tokens_equal_those_of_a_source_read_as_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [text.replace("\0", "") for text in TEXTS]
    lines = write_lines(tmp_path / "x.jsonl", texts, "body")
    direct = open_corpus("jsonl", lines, split="train", field="body")
    assert direct.tokens.tobytes() == b"".join(text.encode() + b"\0" for text in texts)
    answer = run(capsys, lines, tmp_path / "out", "--tokenizer", "bytes", "--field", "body")
    corpus = open_corpus("tokens", tmp_path / "out", split="train")
    assert isinstance(corpus.tokens.base, np.memmap) or isinstance(corpus.tokens, np.memmap)
    assert not corpus.tokens.flags.writeable
    assert np.array_equal(corpus.tokens, direct.tokens)
    assert corpus.n_documents == direct.n_documents == answer["documents"] == 5
    assert answer["vocab"] == 256


def test_a_large_vocabulary_takes_four_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"</s>": 0, "<eos>": 3, "low": 65_535, "high": 65_536}
    Tokenizer(models.WordLevel(words, unk_token="</s>")).save(str(tmp_path / "t.json"))
    (tmp_path / "a").write_text("high")
    answer = run(capsys, tmp_path / "a", tmp_path / "out", "--tokenizer", str(tmp_path / "t.json"))
    assert (answer["vocab"], answer["dtype"], answer["end_of_document"]) == (65_537, "uint32", 0)
    assert np.fromfile(tmp_path / "out" / "tokens.bin", dtype="<u4").tolist() == [65_536, 0]
    assert open_corpus("tokens", tmp_path / "out", split="train").tokens.tolist() == [65_536, 0]
    del words["high"]
    Tokenizer(models.WordLevel(words, unk_token="</s>")).save(str(tmp_path / "t.json"))
    (tmp_path / "a").write_text("low")
    named = ["--eod", "<eos>", "--tokenizer", str(tmp_path / "t.json")]
    answer = run(capsys, tmp_path / "a", tmp_path / "small", *named)
    assert (answer["vocab"], answer["dtype"], answer["end_of_document"]) == (65_536, "uint16", 3)
    assert open_corpus("tokens", tmp_path / "small", split="train").tokens.tolist() == [65_535, 3]


def test_the_same_source_gives_the_same_digest(
    tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_lines(tmp_path / "x.jsonl", TEXTS)
    digests = []
    for out, batch in (("a", 1), ("b", 1000)):
        monkeypatch.setattr(prepare, "_BATCH_BYTES", batch)
        run(capsys, lines, tmp_path / out, "--tokenizer", str(bpe))
        digests.append(open_corpus("tokens", tmp_path / out, split="train").digest)
    run(
        capsys,
        write_lines(tmp_path / "y.jsonl", TEXTS[1:]),
        tmp_path / "c",
        "--tokenizer",
        str(bpe),
    )
    assert digests[0] == digests[1] != open_corpus("tokens", tmp_path / "c", split="train").digest


INTERRUPTS = {
    "Ctrl-C": (KeyboardInterrupt(), 130),
    "SIGTERM": (signal.SIGTERM, 143),
    "a bug": (RuntimeError("crash"), None),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), 2),
}


@pytest.mark.parametrize("kind", ["text", "answers"])
def test_the_digest_does_not_depend_on_the_shards(tmp_path: Path, bpe: Path, kind: str) -> None:
    def prepare_folder(folder: Path, *options: str) -> None:
        command = ["prepare", str(source), "-o", str(folder), "--kind", kind]
        assert cli.main([*command, "--tokenizer", str(bpe), *options]) == 0

    lines = [{"prompt": f"a {n}", "answer": text, "text": text} for n, text in enumerate(TEXTS[:2])]
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines * 3))
    found = {}
    for shard_tokens in ("1", "60", "100000"):
        folder = tmp_path / shard_tokens
        prepare_folder(folder, "--shard-tokens", shard_tokens)
        found[shard_tokens] = open_corpus("tokens", folder, split="train")
        assert cli.main(["inspect", str(folder), "--full"]) == 0
    assert len({corpus.digest for corpus in found.values()}) == 1
    assert len({corpus.older_digest for corpus in found.values()}) == 3

    # Other documents, in another order, or cut otherwise, are other data.
    for number, changed in enumerate(
        (lines * 2, lines[::-1] * 3, [*lines * 2, lines[1], lines[0]])
    ):
        source.write_text("".join(json.dumps(line) + "\n" for line in changed))
        prepare_folder(tmp_path / f"changed{number}")
        corpus = open_corpus("tokens", tmp_path / f"changed{number}", split="train")
        assert corpus.digest != found["1"].digest
    # A digest that is not of these documents is found by inspect, and one of other files is not
    # used.
    path = tmp_path / "1" / "tokens.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["digest"] = manifest["content"]["files"]
    manifest["digest"] = digest_of_manifest(manifest)
    path.write_text(json.dumps(manifest))
    assert cli.main(["inspect", str(path.parent), "--full"]) == 1
    manifest["content"]["files"] = "0" * 32
    manifest["digest"] = digest_of_manifest(manifest)
    path.write_text(json.dumps(manifest))
    corpus = open_corpus("tokens", path.parent, split="train")
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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("error", "status"), INTERRUPTS.values(), ids=INTERRUPTS)
@pytest.mark.parametrize("shard_tokens", [1, 10**6])
def test_an_interrupted_prepare_goes_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Any,
    status: int | None,
    shard_tokens: int,
) -> None:
    source, out = write_lines(tmp_path / "x.jsonl", TEXTS[2:] * 20), tmp_path / "new" / "out"
    options = ["--tokenizer", "bytes", "--processes", "2", "--shard-tokens", str(shard_tokens)]
    run(capsys, source, tmp_path / "whole", *options)
    before = signal.getsignal(signal.SIGTERM)
    command = ["prepare", str(source), "-o", str(out), *options]
    with monkeypatch.context() as patch:
        interrupt_at(patch, error, 30)
        if status is None:
            with pytest.raises(RuntimeError, match="crash"):
                cli.main(command)
        elif status == 143:
            with pytest.raises(SystemExit, match="143"):
                cli.main(command)
        else:
            assert cli.main(command) == status
    assert signal.getsignal(signal.SIGTERM) is before
    errors = capsys.readouterr().err
    if shard_tokens > 1:  # no shard is finished
        assert list(out.parent.iterdir()) == []
        assert "keeps" not in errors
    else:
        (left,) = out.parent.iterdir()
        assert left.name == "out.partial"
        kept = len(list(left.glob("tokens-*.bin")))
        assert 20 < kept <= 30
        assert f"{left} keeps {kept} finished parts; run the same command again to" in errors
        unchanged = {path: path.stat().st_ino for path in left.glob("tokens-*.bin")}

    # The output does not depend on the interrupt, nor on the number of processes.
    assert cli.main([*command, "--processes", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert contents(out) == contents(tmp_path / "whole")
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    if shard_tokens == 1:
        assert f"out.partial: goes on after {kept} of {kept} finished parts" in shown.err
        assert json.loads(shown.out.splitlines()[-1])["resumed_bytes"] > 0
        inodes = {path.stat().st_ino for path in out.iterdir()}
        assert set(unchanged.values()) <= inodes


@pytest.fixture
def left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """What is left of a prepare of four files, interrupted after two and a half of them."""
    for name in "abcd":
        write_lines(tmp_path / "in" / f"{name}.jsonl", [f"{name}{number}" for number in range(10)])
    with monkeypatch.context() as patch:
        interrupt_at(patch, KeyboardInterrupt(), 25)
        assert cli.main(again(tmp_path)) == 130
    capsys.readouterr()
    return tmp_path / "out.partial"


def again(folder: Path, **changed: str) -> list[str]:
    options = {"--tokenizer": "bytes", "--shard-tokens": "3", "--processes": "1", **changed}
    named = [text for pair in options.items() for text in pair]
    return ["prepare", str(folder / "in"), "-o", str(folder / "out"), *named]


def pieces_of(left: Path) -> int:
    return len((left / "journal.jsonl").read_text().splitlines()) - 1


def test_a_changed_file_costs_only_the_shards_from_it_on(
    tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = pieces_of(left)
    assert kept > 20
    write_lines(tmp_path / "in" / "c.jsonl", ["other"])
    write_lines(tmp_path / "in" / "d.jsonl", ["another"])
    assert cli.main(again(tmp_path)) == 0
    assert f"goes on after 20 of {kept} finished parts" in capsys.readouterr().err
    texts = [bytes(document.tolist()) for document in shards_of(tmp_path / "out")]
    assert texts[:20] == [f"{name}{number}".encode() for name in "ab" for number in range(10)]
    assert texts[20:] == [b"other", b"another"]


def shards_of(folder: Path) -> list[np.ndarray]:
    """Return the documents of a folder of several shards of byte tokens."""
    corpus = open_corpus("tokens", folder, split="train")
    all_tokens = corpus.tokens[np.arange(len(corpus.tokens))]
    *texts, after_last = bytes(all_tokens.tolist()).split(b"\0")
    assert not after_last
    return [np.frombuffer(text, dtype=np.uint8) for text in texts]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "in" / "a.jsonl").touch(),
            "was begun with another source, or its first files have changed; give the same",
        ),
        (
            lambda folder: write_lines(folder / "in" / "A.jsonl", ["x"]),
            "was begun with another source, or its first files have changed; give the same",
        ),
        ({"--shard-tokens": "4"}, r"other options \(shard tokens\); give the same, or remove it"),
        ({"--field": "body"}, r"was begun with another tokenizer or other options \(field\);"),
        ({"--tokenizer": "BPE"}, r"other options \(tokenizer, eod\); give the same, or remove"),
        (
            lambda folder: (folder / "out.partial" / "journal.jsonl").write_text("[]\n"),
            r"its journal.jsonl cannot be used \(a line of it is not an object\); remove the",
        ),
        (
            lambda folder: (folder / "out.partial" / "journal.jsonl").unlink(),
            "out.partial is in the way: prepare works in a folder of that name",
        ),
        (
            lambda folder: (
                (folder / "out.partial").rename(folder / "moved")
                and (folder / "out.partial").symlink_to("moved")
            ),
            "out.partial is in the way: prepare works in a folder of that name",
        ),
    ],
    ids=["touched", "a file before", "shards", "field", "tokenizer", "journal", "none", "a link"],
)
def test_what_another_prepare_has_left_is_not_used(
    tmp_path: Path,
    left: Path,
    bpe: Path,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    message: str,
) -> None:
    options = {}
    if callable(change):
        change(tmp_path)
    else:
        options = {name: str(bpe) if value == "BPE" else value for name, value in change.items()}
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(again(tmp_path, **options)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", ["cut journal", "missing shard", "cut shard", "strange line"])
def test_what_a_crash_has_damaged_is_made_again(
    tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    kept = pieces_of(left)
    journal = left / "journal.jsonl"
    expected = 10
    if damage == "cut journal":
        os.truncate(journal, journal.stat().st_size - 1)
        expected = kept - 1
    elif damage == "missing shard":
        (left / "tokens-00010.bin").unlink()
    elif damage == "cut shard":
        os.truncate(left / "documents-00010.bin", 8)
    else:
        journal.write_bytes(journal.read_bytes() + b'{"end": 3}\n')
        assert cli.main(again(tmp_path)) == 2
        assert "journal.jsonl cannot be used" in capsys.readouterr().err
        return
    assert cli.main(again(tmp_path)) == 0
    assert f"goes on after {expected} of" in capsys.readouterr().err
    assert len(shards_of(tmp_path / "out")) == 40
    assert cli.main(["inspect", str(tmp_path / "out"), "--full"]) == 0


@pytest.mark.parametrize("name", ["in", "link"])
def test_a_prepare_into_its_own_source_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [str(number) for number in range(30)])
    (tmp_path / "link").symlink_to("in")
    out = tmp_path / "in" / "deep" / "out"
    command = ["prepare", str(tmp_path / name), "-o", str(out), "--tokenizer", "bytes"]
    command += ["--shard-tokens", "3", "--processes", "1"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, KeyboardInterrupt(), 20)
        assert cli.main(command) == 130
    assert cli.main(command) == 0
    assert "goes on after" in capsys.readouterr().err
    texts = [bytes(document.tolist()) for document in shards_of(out)]
    assert texts == [str(number).encode() for number in range(30)]


def test_a_prepare_at_work_is_not_disturbed(
    tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(left / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(again(tmp_path)) == 2
    assert "out.partial is in use by another prepare; wait for" in capsys.readouterr().err
    assert cli.main(again(tmp_path)) == 0


def test_a_file_that_changes_while_prepare_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / name).write_text(name)
    whole = prepare.identify

    def slow(file: Path, kind: Any) -> Any:
        found = whole(file, kind)
        file.write_text("later")
        return found

    monkeypatch.setattr(prepare, "identify", slow)
    line = refused(capsys, tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes")
    assert line.endswith("in/a: has changed since prepare began; run the same command again")


@pytest.mark.parametrize("name", ["a", "a.jsonl", "a.jsonl.gz"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
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
    line = refused(capsys, tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes")
    assert line.endswith(f"in/{name}: has changed since prepare began; run the same command again")


@pytest.mark.parametrize("shard_tokens", ["50", "1000000"])
def test_the_output_does_not_depend_on_the_processes(
    tmp_path: Path,
    bpe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shard_tokens: str,
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 100)
    source = write_lines(tmp_path / "x.jsonl", [text * 9 for text in TEXTS] * 5)
    for processes in ("1", "3"):
        named = ["--tokenizer", str(bpe), "--processes", processes, "--shard-tokens", shard_tokens]
        answer = run(capsys, source, tmp_path / processes, *named)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert (answer["shards"] > 1) == (shard_tokens == "50")
    coder = Tokenizer.from_file(str(bpe))
    corpus = open_corpus("tokens", tmp_path / "3", split="train")
    ids = corpus.tokens[np.arange(len(corpus.tokens))].tolist()
    text = coder.decode(ids, skip_special_tokens=False)
    assert text == "".join(text * 9 + END for text in TEXTS) * 5


def test_dropout_is_off(tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(bpe.read_text())
    content["model"]["dropout"] = 0.5
    (tmp_path / "t.json").write_text(json.dumps(content))
    source = write_lines(tmp_path / "x.jsonl", TEXTS)
    for out, coder in (("with", tmp_path / "t.json"), ("without", bpe)):
        run(capsys, source, tmp_path / out, "--tokenizer", str(coder))
    found = [(tmp_path / out / "tokens.bin").read_bytes() for out in ("with", "without")]
    assert found[0] == found[1]


def test_the_first_error_of_the_source_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "\\u0000"}\n{"text": "b"}\n{}\n')
    line = refused(
        capsys, tmp_path / "x.jsonl", tmp_path / "out", "--tokenizer", "bytes", "--processes", "4"
    )
    assert "x.jsonl:2: byte 0 at offset 0" in line


def compress(path: Path, content: bytes) -> None:
    if path.suffix == ".gz":
        # Two members, as pigz and concatenation make them.
        half = len(content) // 2
        path.write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    else:
        coder = pytest.importorskip("zstandard").ZstdCompressor()
        half = len(content) // 2
        path.write_bytes(coder.compress(content[:half]) + coder.compress(content[half:]))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_sources_are_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:
    plain = write_lines(tmp_path / "plain" / "x.jsonl", [f"text {n}" for n in range(50)])
    run(capsys, plain, tmp_path / "expected", "--tokenizer", "bytes", "--shard-tokens", "20")
    source = tmp_path / f"x.jsonl{suffix}"
    compress(source, plain.read_bytes())
    out = tmp_path / "out"
    options = ["--tokenizer", "bytes", "--shard-tokens", "20"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, KeyboardInterrupt(), 30)
        assert cli.main(["prepare", str(source), "-o", str(out), *options]) == 130
    answer = run(capsys, source, out, *options)  # goes on in the middle of the file
    assert contents(out) == contents(tmp_path / "expected")
    assert answer["source_bytes"] == source.stat().st_size
    (tmp_path / "t").mkdir()
    compress(tmp_path / "t" / f"a.txt{suffix}", b"hello")
    run(capsys, tmp_path / "t", tmp_path / "text", "--tokenizer", "bytes")
    assert [bytes(text.tolist()) for text in documents_of(tmp_path / "text")] == [b"hello"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "text"])
def test_a_damaged_compressed_source_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, damage: str
) -> None:
    # A text that is cut would pass for a whole one; a line of JSONL would not.
    source = tmp_path / (f"x.txt{suffix}" if damage == "cut" else f"x.jsonl{suffix}")
    lines = b"".join(b'{"text": "%d"}\n' % (n * n * 7919) for n in range(1000))
    compress(source, lines)
    content = bytearray(source.read_bytes())
    if damage == "cut":
        content = content[:-20]
    elif damage == "flipped":
        content[len(content) // 4] ^= 0xFF
    else:
        content = bytearray(lines)
    source.write_bytes(content)
    line = refused(capsys, source, tmp_path / "out", "--tokenizer", "bytes")
    assert re.search(rf"{source.name}(: cannot be decompressed: |:\d+: )", line), line


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_decompression_bomb_is_refused_in_little_memory(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    kind: str,
) -> None:
    monkeypatch.setattr(documents, "_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(documents, "_LONGEST_COMPRESSED_TEXT", 1 << 20)
    source = tmp_path / f"x.{kind}{suffix}"
    compress(source, b" " * (64 << 20))
    assert source.stat().st_size < 200_000
    tracemalloc.start()
    try:
        line = refused(capsys, source, tmp_path / "out", "--tokenizer", "bytes")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    place = f"{source}:1: the line is longer" if kind == "jsonl" else f"{source}: one document has"
    assert line.startswith(place)
    assert peak < 48 << 20


def test_a_missing_zstandard_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    line = refused(capsys, tmp_path / "x.jsonl.zst", tmp_path / "out", "--tokenizer", "bytes")
    assert line.endswith(
        "x.jsonl.zst: reading .zst needs the package zstandard; install it with "
        "pip install 'composer3d[data]', or decompress the file"
    )


@pytest.mark.parametrize("shard_tokens", [50, 10**6])
def test_a_split_holds_out_documents_by_their_text(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shard_tokens: int,
) -> None:
    texts = [f"text {number}" for number in range(400)]
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 100)
    options = ["--tokenizer", "bytes", "--shard-tokens", str(shard_tokens), "--split", "0.1"]
    sides = []
    for order in (texts, texts[::-1] + texts):  # other places, and each twice
        source = write_lines(tmp_path / f"{len(order)}.jsonl", order)
        out = tmp_path / f"out {len(order)}"
        with monkeypatch.context() as patch:
            interrupt_at(patch, KeyboardInterrupt(), 200)
            assert cli.main(["prepare", str(source), "-o", str(out), *options]) == 130
        assert cli.main(["prepare", str(source), "-o", str(out), *options, "--json"]) == 0
        counts = json.loads(capsys.readouterr().out.splitlines()[-1])["splits"]
        found = {}
        for name in ("train", "validation"):
            found[name] = [bytes(text.tolist()).decode() for text in shards_of(out / name)]
            assert counts[name]["documents"] == len(found[name])
            assert cli.main(["inspect", str(out / name), "--full"]) == 0
        # Each side keeps the order of the source.
        assert found["train"] == [text for text in order if text in set(found["train"])]
        assert sorted(found["train"] + found["validation"]) == sorted(order)
        assert not set(found["train"]) & set(found["validation"])
        sides.append(set(found["validation"]))
    assert sides[0] == sides[1]
    assert 20 < len(sides[0]) < 60
    capsys.readouterr()


def test_a_split_without_a_document_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "x.jsonl", ["a"])
    command = ["prepare", str(source), "-o", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert cli.main([*command, "--split", "0.001"]) == 2
    error = "--split 0.001 leaves no document for validation; use another --split, or give more"
    shown = capsys.readouterr().err
    assert error in shown
    # The same command would fail again, and another may not go on from its files.
    assert "run the same command again" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    for wrong in ("0", "1", "nan", "x", "-1"):
        assert cli.main([*command, f"--split={wrong}"]) == 2
    assert "argument --split: must be above 0 and below 1, got 0" in capsys.readouterr().err


def test_several_sources_are_read_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ba":
        write_lines(tmp_path / f"{name}.jsonl", [name])
    write_lines(tmp_path / "in" / "c.jsonl", ["c"])
    sources = [str(tmp_path / name) for name in ("b.jsonl", "in", "a.jsonl")]
    out = ["-o", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert cli.main(["prepare", *sources, *out]) == 0
    assert [bytes(text.tolist()) for text in documents_of(tmp_path / "out")] == [b"b", b"c", b"a"]
    (tmp_path / "t.txt").write_text("t")
    out[1] += "2"
    assert cli.main(["prepare", *sources, str(tmp_path / "t.txt"), *out]) == 2
    error = "one is text and the other is JSONL or a table; give sources of one kind"
    assert error in capsys.readouterr().err


def test_an_existing_folder_is_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "x.jsonl", ["a"])
    run(capsys, source, tmp_path / "out", "--tokenizer", "bytes")
    line = refused(capsys, source, tmp_path / "out", "--tokenizer", "bytes")
    assert line == f"{tmp_path / 'out'} exists; remove it, or give another -o"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "exists" in refused(capsys, source, tmp_path / "dangling", "--tokenizer", "bytes")


def test_the_second_of_two_at_once_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, whole = write_lines(tmp_path / "x.jsonl", ["a"]), prepare.write_manifest

    def slow(folder: Path, facts: dict[str, Any], files: dict[str, Any]) -> None:
        write_lines(tmp_path / "out" / "of_the_first", ["b"])
        whole(folder, facts, files)

    monkeypatch.setattr(prepare, "write_manifest", slow)
    assert (
        cli.main(["prepare", str(source), "-o", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    )
    message = f"{tmp_path / 'out'} cannot be written: Directory not empty; give another -o\n"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith(message)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["of_the_first"]


def test_all_files_are_on_disk_before_the_folder_is_renamed(
    tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (seen.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "rename", lambda old, new: (seen.append("rename"), rename(old, new)))
    out = tmp_path / "out"
    run(capsys, write_texts(tmp_path / "in"), out, "--tokenizer", str(bpe))
    inodes = {path.name: path.stat().st_ino for path in out.iterdir()}
    assert set(inodes) == {"tokens.bin", "documents.bin", "tokenizer.json", "tokens.json"}
    assert set(seen[:-3]) >= set(inodes.values())
    assert seen[-3:] == [out.stat().st_ino, "rename", tmp_path.stat().st_ino]


def test_progress_is_printed_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "x.jsonl", ["a" * 999_980] * 3)
    for seconds, expected in (
        (60.0, []),
        (
            0.0,
            ["prepare: 1 of 3 MB, 0:00:10 so far, about 0:00:20 left, 1 documents, 999,981 tokens"],
        ),
    ):
        # A clock that advances 10 s from one document to the next.
        clock = SimpleNamespace(monotonic=count(0, 10).__next__)
        monkeypatch.setattr(progress, "time", clock)
        monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
        monkeypatch.setattr(progress, "_LINE_EVERY_S", seconds)
        assert (
            cli.main(
                ["prepare", str(source), "-o", str(tmp_path / str(seconds)), "--tokenizer", "bytes"]
            )
            == 0
        )
        assert capsys.readouterr().err.splitlines()[:1] == expected


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
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
            {"in/a": b"x"},
            ["--eod", ""],
            "composer3d: an argument is empty; give it a value, or leave it out",
        ),
        (
            {"in/a": b"x", "in/b.json": b"{}"},
            [],
            r"in/b.json: a .json file is not read as text; rename it to .jsonl if",
        ),
        (
            {"in/a.jsonl": b"{}", "in/b.NDJSON": b"{}"},
            [],
            "in/b.NDJSON: a .ndjson file is not read as text; rename it",
        ),
        (
            {"in/a.txt.gz": b"x"},
            [],
            r"in/a.txt.gz: cannot be decompressed: Not a gzipped file \(b'x'\); copy it again",
        ),
        ({"in/a.xz": b"x"}, [], "in/a.xz: a .xz file is not read as text; decompress it"),
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
            {"in/a.jsonl": b'{"body": "a"}'},
            [],
            r'in/a.jsonl:1: must be a JSON object such as \{"text": "..."\}: got \{"body": '
            r'"a"\}; correct the line, or',
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
            {"in/a": b"x"},
            ["--tokenizer", "BPE", "--eod", "</s>"],
            r"--tokenizer \S+: it has no </s> to end a document; name one of its tokens with --eod",
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
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_source_or_option_is_refused(
    tmp_path: Path,
    bpe: Path,
    capsys: pytest.CaptureFixture[str],
    files: dict[str, bytes],
    options: list[str],
    message: str,
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    options = [str(bpe) if option == "BPE" else option for option in options]
    if "--tokenizer" not in options:
        options += ["--tokenizer", "bytes"]
    assert re.search(message, refused(capsys, tmp_path / "in", tmp_path / "out", *options))


def test_a_tokenizer_without_an_end_of_document_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Tokenizer(models.WordLevel({"a": 0, "q": 1}, unk_token="q")).save(str(tmp_path / "t.json"))
    (tmp_path / "a").write_text("a")
    line = refused(
        capsys, tmp_path / "a", tmp_path / "out", "--tokenizer", str(tmp_path / "t.json")
    )
    assert "it has no <|end_of_text|>, <|endoftext|>, </s>," in line
    assert line.endswith("to end a document; name one of its tokens with --eod")
    run(
        capsys,
        tmp_path / "a",
        tmp_path / "out",
        "--tokenizer",
        str(tmp_path / "t.json"),
        "--eod",
        "q",
    )
    assert documents_of(tmp_path / "out")[0].tolist() == [0]


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        (
            models.WordLevel({"a": 0, "</s>": 1}),
            "z",
            r"/b or soon after: --tokenizer \S+: WordLevel error: .*; give one",
        ),
        (
            models.BPE({"a": 0, "</s>": 1}, []),
            "zz",
            r"/b: no character of it has a token in \S+; remove the document",
        ),
        (
            models.WordLevel({"a": 0, "</s>": 1}, unk_token="</s>"),
            "z",
            "/b: its tokens hold </s>, which would end a document there; name another token with "
            "--eod, or remove the document$",
        ),
    ],
    ids=["an error", "no token", "the unknown is the end"],
)
def test_text_that_a_tokenizer_cannot_represent_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    text: str,
    message: str,
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
    Tokenizer(model).save(str(tmp_path / "t.json"))
    (tmp_path / "in").mkdir()
    for name, content in (("a", "a"), ("b", text)):
        (tmp_path / "in" / name).write_text(content)
    named = ["--tokenizer", str(tmp_path / "t.json")]
    assert re.search(message, refused(capsys, tmp_path / "in", tmp_path / "out", *named))
    if isinstance(model, models.BPE):
        (tmp_path / "in" / "b").write_text(" \n")  # blank, so nothing is lost
        run(capsys, tmp_path / "in", tmp_path / "out", *named)
        assert [document.tolist() for document in documents_of(tmp_path / "out")] == [[0], []]


def test_a_document_that_would_take_all_memory_is_refused(
    tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "big.txt", "wb") as file:
        file.truncate((16 << 20) + 1)
    named = ["--tokenizer", str(bpe)]
    assert refused(capsys, tmp_path / "big.txt", tmp_path / "out", *named) == (
        f"{tmp_path / 'big.txt'}: one document has 16_777_217 bytes, but at most 16_777_216 are "
        "read into memory; cut it into several documents, each in a file or JSONL line of its own"
    )
    monkeypatch.setattr(tokenizer, "DOCUMENT_BYTES", 5)
    lines = write_lines(tmp_path / "x.jsonl", ["abcde", "abcdef"])
    assert f"{lines}:3: one document has 6 bytes" in refused(
        capsys, lines, tmp_path / "out", *named
    )
    run(capsys, lines, tmp_path / "bytes", "--tokenizer", "bytes")
    run(capsys, write_lines(lines, ["abcde"]), tmp_path / "out", *named)


def test_a_field_makes_a_file_of_any_name_jsonl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.json", "a.ndjson", "a"):
        source = write_lines(tmp_path / name, ["a", "b"])
        run(capsys, source, tmp_path / f"{name} out", "--tokenizer", "bytes", "--field", "text")
        assert len(documents_of(tmp_path / f"{name} out")) == 2
    (tmp_path / "b.jsonl.gz").write_bytes(b"x")
    line = refused(
        capsys, tmp_path / "b.jsonl.gz", tmp_path / "out", "--tokenizer", "bytes", "--field", "text"
    )
    assert "b.jsonl.gz: cannot be decompressed: Not a gzipped file" in line


def test_a_path_that_is_too_long_or_empty_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, tmp_path / ("x" * 300), tmp_path / "out", "--tokenizer", "bytes")
    assert line.endswith(
        "xxx does not exist; give a text file, a .jsonl or .parquet file, or a folder of one kind"
    )
    source = write_lines(tmp_path / "x.jsonl", ["a"])
    line = refused(capsys, source, tmp_path / ("x" * 300), "--tokenizer", "bytes")
    assert line.endswith("xxx cannot be written: File name too long; give another -o")
    assert cli.main(["prepare", "", "-o", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    assert "an argument is empty" in capsys.readouterr().err


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of memory is read from Linux's /proc",
)
def test_memory_does_not_grow_with_the_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def memory_mib(key: str) -> int:
        return (
            next(
                int(line.split()[1])
                for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith(key)
            )
            // 1024
        )

    line = json.dumps({"text": "x" * 2_000}).encode() + b"\n"
    with open(tmp_path / "big.jsonl", "wb") as file:
        for _ in range(25):
            file.write(line * 1_000)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory_mib("VmRSS")
    answer = run(capsys, tmp_path / "big.jsonl", tmp_path / "out", "--tokenizer", "bytes")
    assert answer["tokens"] == 25_000 * 2_001
    # tokens.bin has 95 MiB, of which the digest takes 64 MiB at a time.
    assert memory_mib("VmHWM") - before < 90
