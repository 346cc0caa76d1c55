"""Token files decode to their source, and an interrupted prepare leaves nothing behind."""

import errno
import json
import os
import re
import signal
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from composer3d import cli
from composer3d.data import open_corpus, prepare, tokenizer

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


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, None),
        (signal.SIGTERM, 143, None),
        (RuntimeError("crash"), None, None),
        (
            OSError(errno.EROFS, "Read-only file system"),
            2,
            "cannot be written: Read-only file system; give another -o",
        ),
    ],
    ids=repr,
)
def test_an_interrupted_prepare_leaves_nothing_and_can_be_repeated(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Any,
    status: int,
    message: str | None,
) -> None:
    source, out = write_texts(tmp_path / "in"), tmp_path / "new" / "out"
    (source / "b" / "c.md").unlink()
    whole = prepare.read_documents

    def interrupted(files: list[Path], field: None, *, longest: int) -> Iterator[Any]:
        documents = whole(files, field, longest=longest)
        yield next(documents)
        assert [path.name.startswith("out.tmp-") for path in out.parent.iterdir()] == [True]
        if isinstance(error, signal.Signals):
            os.kill(os.getpid(), error)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_BATCH_BYTES", 1)
        patch.setattr(prepare, "read_documents", interrupted)
        arguments = ["prepare", str(source), "-o", str(out), "--tokenizer", "bytes"]
        before = signal.getsignal(signal.SIGTERM)
        if status is None:
            with pytest.raises(RuntimeError, match="crash"):
                cli.main(arguments)
        elif status == 143:
            with pytest.raises(SystemExit, match="143"):
                cli.main(arguments)
        else:
            assert cli.main(arguments) == status
        assert signal.getsignal(signal.SIGTERM) is before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if message is None else 1)
    assert all(message in line for line in lines)
    assert list(out.parent.iterdir()) == []
    leftover = out.parent / "out.tmp-killed"  # as SIGKILL leaves it
    leftover.mkdir()
    assert cli.main(arguments) == 0
    assert f"{leftover} is left of a prepare that was killed" in capsys.readouterr().err
    assert open_corpus("tokens", out, split="train").n_documents == 4


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

    def slow(folder: Path, facts: dict[str, Any]) -> None:
        write_lines(tmp_path / "out" / "of_the_first", ["b"])
        whole(folder, facts)

    monkeypatch.setattr(prepare, "write_manifest", slow)
    assert (
        cli.main(["prepare", str(source), "-o", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    )
    message = f"{tmp_path / 'out'} cannot be written: Directory not empty; give another -o\n"
    assert capsys.readouterr() == ("", message)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["of_the_first", "out", "x.jsonl"]


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
    assert set(seen[:-3]) == set(inodes.values())
    assert seen[-3:] == [out.stat().st_ino, "rename", tmp_path.stat().st_ino]


def test_progress_is_printed_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "x.jsonl", ["a" * 999_980] * 3)
    for seconds, expected in (
        (60.0, []),
        (0.0, ["1 documents, 999,981 tokens, 1 of 3 MB, 0:00:20 left"]),
    ):
        # A clock that advances 10 s from one document to the next.
        clock = SimpleNamespace(monotonic=count(0, 10).__next__)
        monkeypatch.setattr(prepare, "time", clock)
        monkeypatch.setattr(prepare, "_BATCH_BYTES", 1)
        monkeypatch.setattr(prepare, "_PROGRESS_S", seconds)
        assert (
            cli.main(
                ["prepare", str(source), "-o", str(tmp_path / str(seconds)), "--tokenizer", "bytes"]
            )
            == 0
        )
        assert capsys.readouterr().err.splitlines()[:1] == expected


def test_a_leftover_of_a_name_with_brackets_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "x.jsonl", ["a"])
    for leftover in ("o[1].tmp-ours", "o1.tmp-not-ours"):
        (tmp_path / leftover).mkdir()
    assert (
        cli.main(["prepare", str(source), "-o", str(tmp_path / "o[1]"), "--tokenizer", "bytes"])
        == 0
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path / 'o[1].tmp-ours'} is left of")


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, [], "in does not exist; give a text file, a .jsonl file or a folder of one kind"),
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
            r"--field body is only read with JSONL, and \S+/in holds no .jsonl file; remove it",
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
        ({"in/a.txt.gz": b"x"}, [], "in/a.txt.gz: a .gz file is not read as text; decompress it"),
        (
            {"in/a.parquet": b"x"},
            [],
            "in/a.parquet: a .parquet file is not read as text; convert it to JSONL",
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
    monkeypatch.setattr(tokenizer, "_DOCUMENT_BYTES", 5)
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
    assert line.endswith("b.jsonl.gz: a .gz file is not read as text; decompress it")


def test_a_path_that_is_too_long_or_empty_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, tmp_path / ("x" * 300), tmp_path / "out", "--tokenizer", "bytes")
    assert line.endswith(
        "xxx does not exist; give a text file, a .jsonl file or a folder of one kind"
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
