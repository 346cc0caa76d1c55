"""Corpora: which files are read, in which order, which are held out, and which are refused."""

import gzip
import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from composer3d.data import documents, open_corpus, sources
from composer3d.data.documents import list_files
from composer3d.recipe import machine
from tests.data.token_folders import refuses

SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    return folder


def train(path: Path) -> sources.Corpus:
    return open_corpus("text", path, split="train")


def test_folder_is_read_in_order_of_relative_path(tmp_path: Path) -> None:
    files = {
        "b.txt": b"two",
        "a/z.md": b"one\xff",
        "c": b"",
        ".hidden": b"x",
        ".git/config": b"x",
        "a.d/y": b"zero",
    }
    corpus = train(write(tmp_path, files))
    # "." sorts before "/": whole paths are compared, not folder by folder.
    assert corpus.tokens.tobytes() == b"zero\0one\xff\0two\0"
    assert corpus.n_documents == 3
    assert corpus.tokens.dtype == np.uint8
    assert corpus.tokens.ndim == 1
    assert not corpus.tokens.flags.writeable


def test_jsonl_is_not_read_as_text(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"a", "b/c.jsonl.gz": b"{}"})
    with refuses(f"{tmp_path}/b/c.jsonl.gz: is JSONL, whose keys"):
        train(tmp_path)


def test_check_finds_the_jsonl_that_a_training_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a.txt": b"a", ".b/c.jsonl": b"", "d/.e.jsonl": b""})
    (tmp_path / "f.jsonl").mkdir()
    (tmp_path / "g").symlink_to("f.jsonl")
    os.mkfifo(tmp_path / "h.jsonl")
    assert train(tmp_path).n_documents == 1
    assert machine.find_jsonl(str(tmp_path)) is None
    write(tmp_path, {"d/i.JSONL.zst": b""})
    assert machine.find_jsonl(str(tmp_path)) == f"{tmp_path}/d/i.JSONL.zst"
    # Only training reads the whole list of a large folder.
    monkeypatch.setattr(machine, "_MOST_NAMES", 3)
    assert machine.find_jsonl(str(tmp_path)) is None


def test_a_file_or_a_hidden_folder_is_read_if_it_is_named(tmp_path: Path) -> None:
    write(tmp_path / ".corpus", {"a.txt": b"train", "b.txt": b"held out"})
    assert train(tmp_path / ".corpus").n_documents == 2
    corpus = open_corpus(
        "text",
        tmp_path / ".corpus/a.txt",
        split="validation",
        held_out_path=tmp_path / ".corpus/b.txt",
    )
    assert corpus.tokens.tobytes() == b"held out\0"
    assert train(tmp_path / ".corpus/a.txt").tokens.tobytes() == b"train\0"


def test_digest_follows_the_tokens(tmp_path: Path) -> None:
    first = train(write(tmp_path / "a", {"1": b"abc", "2": b"def"}))
    same = train(write(tmp_path / "b", {"x/1": b"abc", "x/2": b"def"}))
    changed = train(write(tmp_path / "c", {"1": b"abc", "2": b"dEf"}))
    cut_elsewhere = train(write(tmp_path / "d", {"1": b"ab", "2": b"cdef"}))
    assert first.digest == same.digest
    assert len({first.digest, changed.digest, cut_elsewhere.digest}) == 3


def test_python_splits_are_disjoint() -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    both = [
        file.relative_to(stdlib).as_posix()
        for file in list_files(stdlib, ".py", skip=sources._NOT_LIBRARY)
    ]
    names = {
        split: [name for name in both if sources._is_held_out(name) == (split != "train")]
        for split in SPLITS
    }
    outside = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not [name for name in both if outside & set(Path(name).parts)]
    assert {"argparse.py", "asyncio/events.py", "json/decoder.py"} <= set(both)
    assert 0.02 < len(names["validation"]) / len(both) < 0.1

    corpora = {split: open_corpus("python", None, split=split) for split in SPLITS}
    for split, corpus in corpora.items():
        texts = [(stdlib / name).read_bytes() for name in names[split]]
        assert corpus.tokens.tobytes() == b"".join(text + b"\0" for text in texts if text)
        assert corpus.n_documents == np.count_nonzero(corpus.tokens == 0)


def test_python_holds_out_by_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"m{i}.py" for i in range(60)]
    held_out = [name for name in names if sources._is_held_out(name)]
    assert held_out == ["m15.py", "m18.py", "m25.py", "m34.py"]
    write(
        tmp_path, {name: name.encode() for name in names} | {"test/m15.py": b"x", "m15.txt": b"x"}
    )
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = open_corpus("python", None, split="validation")
    assert corpus.tokens.tobytes() == b"".join(name.encode() + b"\0" for name in sorted(held_out))


def test_byte_zero_is_refused_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"fine", "b.bin": b"abc\0def"})
    with refuses(r"b\.bin: byte 0 at offset 3 ") as caught:
        train(tmp_path)
    assert str(tmp_path / "b.bin") in caught.value.lines[0]


NOTHING: dict[str, tuple[Any, dict[str, bytes], str]] = {
    "no folder": ("text", {}, "cannot be read: No such file"),
    "a hidden file": ("text", {"in/.hidden": b"x"}, "no text .*: no files found"),
    "empty files": ("text", {"in/a": b"", "in/b": b""}, "no text .*: all 2 files are empty"),
    "an empty file": ("text", {"in": b""}, "no text .*: all 1 files are empty"),
    "no JSONL": ("jsonl", {"in/a.txt": b"x"}, "no text .*: no files found"),
    "empty lines": (
        "jsonl",
        {"in/a.jsonl": b'{"text": ""}\n\n'},
        "no text for corpus .*: all 1 files are empty",
    ),
}


@pytest.mark.parametrize(("source", "files", "problem"), NOTHING.values(), ids=NOTHING)
def test_nothing_to_read_is_refused(
    tmp_path: Path, source: Any, files: dict[str, bytes], problem: str
) -> None:
    write(tmp_path, files)
    with refuses(f"/in: {problem}"):
        open_corpus(source, tmp_path / "in", split="train")


@pytest.mark.parametrize(("source", "name"), [("text", "a"), ("jsonl", "a.jsonl")])
def test_a_read_that_fails_halfway_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, name: str
) -> None:
    write(tmp_path, {name: b"x"})

    class Broken(io.BytesIO):
        def fileno(self) -> int:
            return os.open(os.devnull, os.O_RDONLY)

        def read(self, *_: object) -> Any:
            raise OSError(5, "Input/output error")  # as from read(2), without a file name

        readline = read

    monkeypatch.setattr(documents, "open_plain", lambda file: Broken())
    with refuses(rf"^\S+/{name}: cannot be read: Input/output error; make"):
        open_corpus(source, tmp_path, split="train")


def test_a_folder_that_may_not_be_entered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a": b"x", "in/b": b"x"})
    # Root may enter any folder, so permissions would not do.
    monkeypatch.setattr(documents.os, "access", lambda path, mode: not str(path).endswith("in"))
    with refuses(r"^\S+/in: may not be entered; allow it, or"):
        train(tmp_path)


def test_jsonl_is_read_line_by_line_in_order_of_relative_path(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "b.jsonl": b'\n{"text": "h\\u00e9", "id": [1]}\r\n  \n'
            b'{"text": ""}\n{"id": 2, "text": "last line"}',
            "a/z.jsonl": '\ufeff{"text": "first \U0001f600\\n"}\n'.encode(),
            "a/notes.txt": b"not this",
            ".c.jsonl": b'{"text": "nor this"}',
        },
    )
    corpus = open_corpus("jsonl", tmp_path, split="train")
    assert corpus.tokens.tobytes() == "first \U0001f600\n\0hé\0last line\0".encode()
    assert corpus.n_documents == 3
    packed = b'{"text": "packed"}'
    (tmp_path / "a/y.JSONL.gz").write_bytes(gzip.compress(packed))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(packed))
    with_packed = open_corpus("jsonl", tmp_path, split="train")
    expected = b"packed\0" + corpus.tokens.tobytes() + b"packed\0"
    assert with_packed.tokens.tobytes() == expected
    for source in ("jsonl", "text"):  # the size of the text is not known before
        assert machine.count_bytes(source, str(tmp_path), "text", enough=1000) is None
    one = open_corpus("jsonl", None, split="validation", held_out_path=tmp_path / "a" / "z.jsonl")
    assert one.tokens.tobytes() == "first \U0001f600\n\0".encode()
    (tmp_path / "t.txt").write_bytes(b"first")
    write(tmp_path, {"j": b'{"body": "first"}'})  # a JSONL file may have any name
    assert (
        open_corpus("jsonl", tmp_path / "j", split="train", field="body").digest
        == train(tmp_path / "t.txt").digest
    )


NEEDED = r'must be a JSON object such as \{"body": "\.\.\."\}: '


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            b"plain text",
            f"{NEEDED}Expecting value: line 1 column 1.*; correct the line, or name the "
            "key of the text with",
        ),
        (b'{"body": "\xff"}', f"{NEEDED}'utf-8' codec can't decode byte 0xff"),
        (b"[" * 200_000, NEEDED),
        (b"9" * 5_000, f"{NEEDED}Exceeds the limit"),
        (b'["body"]', rf'{NEEDED}got \["body"\]'),
        (b'{"text": "a", "id": 1}', rf'{NEEDED}got \{{"text": "a", "id": 1\}}; correct'),
        (
            json.dumps({"body": list(range(99))}).encode(),
            rf'{NEEDED}got \{{"body": \[0, 1, [0-9, ]{{50,}}\.\.\. \(396 characters\); correct',
        ),
        (
            b'{"body": "ab\\ud800"}',
            f"{NEEDED}'utf-8' codec can't encode character .* in position 2: surrogates",
        ),
        (b'{"body": "a\\u0000"}', "byte 0 at offset 1 would end a document there; remove"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_line_that_holds_no_text_is_refused_with_its_place(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    write(
        tmp_path,
        {"a.jsonl": b'{"body": "fine"}\n', "b.jsonl": b'{"body": "fine"}\n\n' + line + b"\n"},
    )
    with refuses(rf"b\.jsonl:3: {problem}") as caught:
        open_corpus("jsonl", tmp_path, split="train", field="body")
    assert caught.value.lines[0].startswith(f"{tmp_path / 'b.jsonl'}:3: ")
    assert len(caught.value.lines) == 1
    assert len(caught.value.lines[0]) < 500


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Callable[[int, str], Path]]:
    """Make nested folders. They are removed with rm: Python cannot recurse that deep."""

    def make(levels: int, name: str) -> Path:
        here = os.getcwd()
        os.chdir(tmp_path)
        try:
            for _ in range(levels):
                os.mkdir(name)
                os.chdir(name)
            Path("a.txt").write_bytes(b"deep")
        finally:
            os.chdir(here)
        return tmp_path / name

    yield make
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


@pytest.fixture
def usual_recursion() -> Iterator[None]:
    """Python's own limit of recursion: torch raises it in a process that compiles."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("usual_recursion")
def test_folders_may_be_nested_deeper_than_python_recurses(
    deep: Callable[[int, str], Path],
) -> None:
    path = deep(1100, "d")
    assert train(path).tokens.tobytes() == b"deep\0"
    assert machine.count_bytes("text", str(path), "text", enough=10) == len(b"deep\0")


def test_folders_beyond_the_longest_path_are_refused(deep: Callable[[int, str], Path]) -> None:
    with refuses(
        r" characters\): cannot be read: File name too long; "
        r"make it readable or move it away$"
    ):
        train(deep(30, "d" * 200))


@pytest.mark.timeout(10)  # opening a pipe would wait forever
@pytest.mark.parametrize(("source", "suffix"), [("text", ""), ("jsonl", ".jsonl")])
def test_a_pipe_is_refused(tmp_path: Path, source: Any, suffix: str) -> None:
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    with refuses(rf"/pipe{suffix}: cannot be read: is a named pipe, not a plain file; make it"):
        open_corpus(source, pipe, split="train")
    write(tmp_path, {f"a{suffix}": b'{"text": "a"}'})
    # In a folder, a pipe is skipped.
    assert open_corpus(source, tmp_path, split="train").n_documents == 1


def test_a_line_is_read_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"text": "a" * 50}).encode() + b"\n"
    write(tmp_path, {"a.jsonl": line * 2 + b'{"text": "' + b"a" * 100})
    monkeypatch.setattr(documents, "_LINE_BYTES", len(line))
    with refuses(
        rf"/a\.jsonl:3: the line is longer than {len(line)} bytes, .*; cut it into several$"
    ):
        open_corpus("jsonl", tmp_path, split="train")


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    """Its text would be missing, and nothing would say so."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / ".hidden").symlink_to("missing")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert len(list_files(tmp_path)) == 2
    (tmp_path / "c.txt").symlink_to("missing")
    with refuses(r"c\.txt: is a link that leads nowhere; restore the file"):
        list_files(tmp_path)
    assert list_files(tmp_path, ".jsonl") == []


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"x", "b": b"y"})
    remaining = documents.read_documents(list_files(tmp_path), None)
    assert next(remaining).text == b"x"
    (tmp_path / "b").unlink()
    with refuses(r"/b: cannot be read: No such file or directory; make it"):
        next(remaining)


def test_a_text_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        file.truncate(1 << 40)
    with refuses(
        r"/a: one document has 1_099_511_627_776 bytes, but at most 4_294_967_296 are read"
    ):
        train(tmp_path)


def test_the_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    write(tmp_path, {"a.JSONL": b'{"text": "first"}', "b.jsonl": b'{"text": "second"}'})
    corpus = open_corpus("jsonl", str(tmp_path), split="train")
    assert bytes(corpus.tokens) == b"first\0second\0"
    assert machine.count_bytes("jsonl", str(tmp_path), "text", enough=1000) == len(corpus.tokens)
