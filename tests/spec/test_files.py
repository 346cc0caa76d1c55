"""What is read is a plain file of a bounded size; what is written goes through no link."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer3d.runtime.files import open_own, write_atomic
from composer3d.spec.files import (
    FileTooLargeError,
    NotPlainFileError,
    open_plain,
    read_json,
    read_plain,
    refuse_foreign_link,
)


@pytest.mark.timeout(10)  # opening a pipe would wait forever
def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    pipe, inner, address = tmp_path / "pipe", tmp_path / "inner", tmp_path / "socket"
    os.mkfifo(pipe)
    inner.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        for path in (pipe, inner, address, Path("/dev/zero")):
            with pytest.raises(NotPlainFileError, match="plain file"):
                open_plain(path)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(NotPlainFileError, match="plain file"):
            open_own(path)


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
    with pytest.raises(FileTooLargeError):  # its size is 0 to stat
        read_plain("/proc/self/status", limit=10)


def test_links_are_followed_only_where_that_is_asked(tmp_path: Path) -> None:
    secret, link = tmp_path / "secret", tmp_path / "link"
    secret.write_text("secret")
    link.symlink_to(secret)
    assert read_plain(link, limit=10) == b"secret"
    with pytest.raises(NotPlainFileError, match="symbolic link"):
        read_plain(link, limit=10, follow_links=False)
    with pytest.raises(NotPlainFileError, match="symbolic link"):
        open_own(link, append=True)
    write_atomic(link, "mine")
    assert secret.read_text() == "secret"
    assert not link.is_symlink()
    assert link.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "secret"]


def test_own_files_are_created_and_appended_to(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        with open_own(tmp_path / "log", append=True) as file:
            file.write(text)
    assert (tmp_path / "log").read_bytes() == b"onetwo"


@pytest.mark.parametrize(
    "text", ["NaN", '{"a": Infinity}', "[" * 100_000, "1" * 5000, "{", b"\xff".decode("latin-1")]
)
def test_json_is_strict(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):  # noqa: PT011  # its kind is what a caller relies on
        read_json(path)


def test_a_path_that_no_system_has_is_a_value_error(tmp_path: Path) -> None:
    for name in ("a\0b", "a\ud800b"):
        with pytest.raises(ValueError):  # noqa: PT011
            open_plain(tmp_path / name)


def test_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    refuse_foreign_link(link)  # there is none
    link.symlink_to(tmp_path)
    refuse_foreign_link(link)  # of this user
    refuse_foreign_link(tmp_path)
    owner = os.lstat(link).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root's links are trusted: give this one away
        os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(NotPlainFileError, match="symbolic link of another user"):
        refuse_foreign_link(link)


def test_content_in_pieces_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_atomic(target, (piece for piece in (b"one", b"two")))
    assert target.read_bytes() == b"onetwo"

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomic(target, broken())
    assert target.read_bytes() == b"onetwo"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
