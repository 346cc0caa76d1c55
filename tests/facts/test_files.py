"""Only plain files of a bounded size are read."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from composer3d.facts.files import (
    FileTooLargeError,
    NotPlainFileError,
    open_plain,
    read_json,
    read_plain,
    refuse_foreign_link,
)


@pytest.mark.timeout(10)  # opening a pipe would wait forever
def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    pipe, inner, address = tmp_path / "pipe", tmp_path / "inner", tmp_path / "socket"
    os.mkfifo(pipe)
    inner.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        for path in (pipe, inner, address, Path("/dev/zero")):
            with pytest.raises(NotPlainFileError, match="plain file"):
                open_plain(path)


def test_a_file_above_its_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_plain(path, limit=5) == b"12345"
    with pytest.raises(FileTooLargeError, match="larger than 4 bytes"):
        read_plain(path, limit=4)
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(FileTooLargeError):
        read_plain(path, limit=1 << 20)
    # Files below /proc report a size of 0.
    with pytest.raises(FileTooLargeError):
        read_plain("/proc/self/status", limit=10)


def test_links_are_followed_only_on_request(tmp_path: Path) -> None:
    secret, link = tmp_path / "secret", tmp_path / "link"
    secret.write_text("secret")
    link.symlink_to(secret)
    assert read_plain(link, limit=10) == b"secret"
    with pytest.raises(NotPlainFileError, match="symbolic link"):
        read_plain(link, limit=10, follow_links=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NaN", "it holds NaN"),
        ('{"a": Infinity}', "it holds Infinity"),
        ('{"a": [1.5, -1e999]}', "it holds -1e999, which is beyond the range of a float"),
        ("1" * 400 + ".5", r"it holds 1{40}\.\.\. \(402 characters\), which is beyond"),
        ("1" * 39, "it holds an integer of 39 digits"),
        ("1" * 5000, "it holds an integer of 5,000 digits"),
        ("[" * 100_000, "it nests too deep"),
        ("[" * 102 + "]" * 102, "nests deeper than 100 levels"),
        ('{"a":' * 102 + "1" + "}" * 102, "'a' nests deeper than 100 levels"),
        (r'{"a": ["x", "\ud800"]}', "'a.1' has a lone surrogate"),
        (r'{"\uDFFFa": 1}', "has a key with a lone surrogate"),
        ('{"a": 1, "b": 2, "a": 1}', "it has the key 'a' twice"),
        ('[{"b": {"x": 1, "x": 2}}]', "it has the key 'x' twice"),
        ('{"' + "a" * 500 + '": 1, "' + "a" * 500 + '": 1}', r"it has the key 'a{80}\.\.\. \(500"),
        (r'{"\ud800": 1, "\ud800": 1}', r"it has the key '\\ud800' twice"),
        ("{", "property name"),
        (b"\xff", "can't decode byte 0xff"),
        (b'"\xed\xa0\x80"', "can't decode byte 0xed"),
        ('{"a\0": 1}', "Invalid control character"),
    ],
    ids=lambda value: str(value[:12]),
)
def test_json_is_strict(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=words) as caught:
        read_json(path)
    assert len(str(caught.value)) < 200


def test_json_within_its_bounds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    # transformers writes this length of a tokenizer that has none.
    text = '{"model_max_length": 1000000000000000019884624838656, "a": "\\ud83d\\ude00"}'
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_bytes(text.encode(encoding))
        assert read_json(path) == {"model_max_length": int(1e30), "a": "\U0001f600"}
    path.write_text("[" * 101 + "]" * 101)
    assert len(read_json(path)) == 1


def test_an_impossible_path_is_a_value_error(tmp_path: Path) -> None:
    for name in ("a\0b", "a\ud800b"):
        with pytest.raises(ValueError):  # noqa: PT011
            open_plain(tmp_path / name)


def test_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    refuse_foreign_link(link)  # it does not exist
    link.symlink_to(tmp_path)
    refuse_foreign_link(link)  # this user made it
    refuse_foreign_link(tmp_path)
    owner = os.lstat(link).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root's links are trusted: give this one to another user
        os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(NotPlainFileError, match="symbolic link of another user"):
        refuse_foreign_link(link)


def test_an_interrupt_right_after_the_opening_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_file = os.fdopen

    def interrupted(*args: Any) -> Any:
        opened_file(*args).close()
        raise KeyboardInterrupt

    path = tmp_path / "file"
    path.write_bytes(b"12345")
    monkeypatch.setattr(os, "fdopen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_plain(path)
