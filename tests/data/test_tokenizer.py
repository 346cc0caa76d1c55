"""A tokenizer.json that panics, never ends or takes all memory is refused with one line.

It ends its own process only.
"""

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from composer3d import cli
from composer3d.data.documents import Document
from composer3d.data.special_tokens import read_own_ends
from composer3d.data.tokenizer import open_tokenizer
from composer3d.facts.errors import DataError
from tests.data.token_folders import refuses


def write(folder: Path, **changed: Any) -> str:
    """Write a tokenizer.json of three words, with other values of the keys in ``changed``."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1, "<unk>": 2}, "unk_token": "<unk>"}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
    }
    content |= {"pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}
    (folder / "t.json").write_text(json.dumps(content | changed))
    return str(folder / "t.json")


def document(text: bytes) -> Document:
    return Document("a.txt", text, len(text))


def split(regex: str) -> dict[str, Any]:
    """A pre-tokenizer that splits texts at a pattern."""
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def multiply(number: int) -> dict[str, Any]:
    """A normalizer that replaces each "a" by many."""
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * number}


CHARSMAP = base64.b64encode(b"\4\0\0\0\1\2\3\4abc").decode()
AT_LOAD = {
    "a panic at its first text": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
        "it panics: index out of bounds",
    ),
    "chunks of nothing": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "it panics: chunk size must be",
    ),
    "all memory": (
        {"normalizer": {"type": "Sequence", "normalizers": [multiply(100)] * 6}},
        "(its process ended with status -6 when it is loaded: it takes too much memory|it "
        "takes too much memory)",
    ),
    "ids beyond any vocabulary": (
        {"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1, "</s>": 1}, "unk_token": "a"}},
        "it has token ids up to 4,294,967,295; use one below 16,777,216",
    ),
    "no end": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
        "it has no <.end_of_text.>,",
    ),
    "no regex": (
        {"pre_tokenizer": split("(")},
        "Cannot instantiate Tokenizer from buffer: Oniguruma error",
    ),
}
AT_TEXT = {
    "a pattern that gives up": (
        {"pre_tokenizer": split("(x+x+)+y")},
        b"x" * 100,
        "it panics: Onig: Regex search error",
    ),
    "all memory": (
        {"normalizer": multiply(1_000_000)},
        b"a" * 10_000,
        "(its process ended with status -6 on 10,000 bytes of text: it takes|it takes) too "
        "much memory",
    ),
}


@pytest.mark.parametrize(("changed", "message"), AT_LOAD.values(), ids=AT_LOAD)
def test_a_tokenizer_that_fails_at_load_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **changed)
    with refuses(rf"^--tokenizer {path}: {message}") as caught:
        open_tokenizer(path, None)
    assert len(caught.value.lines) == 1
    assert not children()


@pytest.mark.parametrize(("changed", "text", "message"), AT_TEXT.values(), ids=AT_TEXT)
def test_a_tokenizer_that_fails_on_a_text_is_refused(
    tmp_path: Path, changed: dict[str, Any], text: bytes, message: str
) -> None:
    coder = open_tokenizer(write(tmp_path, **changed), None)
    try:
        assert coder.encode([document(b"b")])[0].tolist() == [2, 1]
        with pytest.raises(
            DataError, match=rf"^a.txt or soon after: --tokenizer \S+: {message}"
        ) as caught:
            coder.encode([document(text)])
    finally:
        coder.close()
    assert len(caught.value.lines) == 1
    assert not children()


def test_a_text_that_takes_for_ever_is_refused_by_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer3d.data.tokenizer._ENCODE_S", 0.0)
    coder = open_tokenizer(write(tmp_path, pre_tokenizer=split(r"(?<r>a\g<r>*)+z")), None)
    try:
        begin = time.monotonic()
        with pytest.raises(
            DataError,
            match="it takes more than 0 s of processor time on 260 bytes of text; a pattern",
        ):
            coder.encode([document(b"x" * 200 + b"a" * 60)])
        # Enough for a busy machine. Without the limit, it would not end.
        assert time.monotonic() - begin < 60
    finally:
        coder.close()


def test_prepare_refuses_with_one_line_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write(tmp_path, pre_tokenizer=split("(x+x+)+y"))
    (tmp_path / "a.txt").write_text("x" * 100)
    out = tmp_path / "out"
    assert (
        cli.main(["prepare", str(tmp_path / "a.txt"), "-o", str(out), "--tokenizer", tokenizer])
        == 2
    )
    # With the output of the process: a panic of Rust writes to standard error.
    out_text, err = capfd.readouterr()
    assert out_text == ""
    assert len(err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "t.json"]


def test_tokens_are_those_of_the_library(bpe: Path, tmp_path: Path) -> None:
    texts = ["def f(x):\n\treturn x\n", "", "héllo 日本語 😀", " \n ", "parser = " * 50]
    content = json.loads(bpe.read_text())
    content["model"]["dropout"] = 0.5  # which would make tokens random
    (tmp_path / "t.json").write_text(json.dumps(content))
    coder = open_tokenizer(str(tmp_path / "t.json"), None)
    try:
        for first in range(2):  # a process takes several batches
            batch = [document(text.encode()) for text in texts[first:] if text]
            tokens, lengths, mask = coder.encode(batch)[:3]
            assert mask is None
            reference = Tokenizer.from_file(str(bpe))
            reference.no_truncation()
            reference.no_padding()
            expected = [[*reference.encode(text).ids, coder.end] for text in texts[first:] if text]
            assert lengths.tolist() == list(map(len, expected))
            assert tokens.tolist() == [
                token for tokens_of_text in expected for token in tokens_of_text
            ]
            assert tokens.dtype == np.dtype("<u2")
    finally:
        coder.close()
    assert not children()


# Files beside a tokenizer.json, and the names or numbers of tokens that they say end a text.
BESIDE: dict[str, tuple[dict[str, Any], tuple[str | int, ...]]] = {
    "none": ({}, ()),
    "a name": ({"tokenizer_config.json": {"eos_token": "b"}}, ("b",)),
    "an object": ({"tokenizer_config.json": {"eos_token": {"content": "b"}}}, ("b",)),
    "null": ({"tokenizer_config.json": {"eos_token": None}}, ()),
    "the map": ({"special_tokens_map.json": {"eos_token": "b"}}, ("b",)),
    "the first of numbers": ({"generation_config.json": {"eos_token_id": [1, 2]}}, (1,)),
    "a number": ({"config.json": {"eos_token_id": 1, "x": 1}}, (1,)),
    "all": (
        {
            "tokenizer_config.json": {"eos_token": "c"},
            "special_tokens_map.json": {"eos_token": "b"},
            "config.json": {"eos_token_id": 0},
        },
        ("c", "b", 0),
    ),
}


@pytest.mark.parametrize(("files", "ends"), BESIDE.values(), ids=BESIDE)
def test_files_beside_a_tokenizer_name_its_ends(
    tmp_path: Path, files: dict[str, Any], ends: tuple[str | int, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_own_ends(tmp_path / "tokenizer.json") == ends
    # The other files are not of this one.
    assert read_own_ends(tmp_path / "t.json") == ()


def test_a_document_ends_as_the_tokenizer_says(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "</s>": 3, "[UNK]": 4}
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")).save(str(file))

    def end_of(path: Path, end: str | None = None) -> int:
        opened = open_tokenizer(str(path), end)
        opened.close()
        return opened.end

    assert end_of(file) == vocab["</s>"]
    # The second number of a file ends turns. A name is not looked up among usual ones.
    for config, end in (({"eos_token_id": [1, 2]}, "b"), ({"eos_token_id": 99}, "")):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if end:
            assert end_of(tmp_path) == end_of(file) == vocab[end]
        else:
            with refuses("it has no 99 to end a document; name one of its tokens with"):
                end_of(tmp_path)
        assert end_of(tmp_path, "c") == vocab["c"]


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "x.tiktoken", "readme"]
)
def test_a_folder_with_another_tokenizer_is_named_with_the_way_out(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(DataError) as caught:
        open_tokenizer(str(tmp_path), None)
    (line,) = caught.value.lines
    if name == "readme":
        assert "is a folder, not a plain file; give bytes, the path of a tokenizer.json, or" in line
    else:
        assert f"the folder has {name}, which is not read, and no tokenizer.json;" in line
        assert f'AutoTokenizer.from_pretrained("{tmp_path}").save_pretrained("FOLDER")' in line


def test_a_wrong_file_beside_the_tokenizer_is_named(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    for content, problem in (("[", "Expecting value"), ("[]", "it is no object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with refuses(rf"tokenizer_config.json: cannot be used: {problem}"):
            open_tokenizer(str(tmp_path), None)
    opened = open_tokenizer(str(tmp_path), "<pad>")
    opened.close()


@pytest.mark.timeout(10)  # opening a pipe would wait forever
def test_a_tokenizer_is_a_plain_file_of_a_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    for name, message in (
        ("pipe", "is a named pipe, not a plain file"),
        ("large", "is larger than 67,108,864 bytes"),
    ):
        with refuses(rf"^--tokenizer \S+/{name}: {message}.*; give bytes"):
            open_tokenizer(str(tmp_path / name), None)


def children() -> list[str]:
    """Return this process's tokenizer processes that run, or that nobody has waited for."""
    processes = []
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and (
                not command.read_bytes() or b"tokenizer_worker" in command.read_bytes()
            ):
                processes.append(child)
    return processes
