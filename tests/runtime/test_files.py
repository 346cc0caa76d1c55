"""Files are written whole or not at all, and never through a link."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from composer3d.facts.files import NotPlainFileError
from composer3d.runtime import files
from composer3d.runtime.files import (
    OWN_MARK,
    open_own,
    publish,
    replace_own,
    require_replaceable,
    write_atomic,
)


@pytest.mark.timeout(10)  # opening a pipe would wait forever
def test_only_plain_files_are_opened_for_writing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(NotPlainFileError, match="plain file"):
            open_own(path)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    secret, link = tmp_path / "secret", tmp_path / "link"
    secret.write_text("secret")
    link.symlink_to(secret)
    with pytest.raises(NotPlainFileError, match="symbolic link"):
        open_own(link, append=True)
    write_atomic(link, "mine")
    assert secret.read_text() == "secret"
    assert not link.is_symlink()
    assert link.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "secret"]


@pytest.mark.parametrize("beginning", ["", "<!doctype html>\n"])
def test_only_a_file_of_ours_is_replaced(tmp_path: Path, beginning: str) -> None:
    path, rest = tmp_path / "a.html", '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    path.touch()
    for size in ("small", "larger"):
        replace_own(path, f"{beginning}{OWN_MARK}\n{rest}{size}")
        assert path.read_text() == f"{beginning}{OWN_MARK}\n{rest}{size}"
    theirs = f"{beginning}{rest}<!-- drawn by hand, not made by composer3d -->"
    for text in (theirs, beginning + rest, rest[:7]):
        path.write_text(text)
        with pytest.raises(FileExistsError, match="another file of this name is there"):
            replace_own(path, f"{beginning}{OWN_MARK}\n{rest}")
        assert path.read_text() == text


def test_whether_a_file_may_be_replaced_is_known_before(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    require_replaceable(path)
    assert not list(tmp_path.iterdir())
    replace_own(path, OWN_MARK)
    require_replaceable(path)
    os.mkfifo(tmp_path / "b.html")
    for theirs in (tmp_path, tmp_path / "b.html"):
        with pytest.raises(FileExistsError, match="another file of this name is there"):
            require_replaceable(theirs)
    with pytest.raises(OSError, match="File name too long"):
        require_replaceable(tmp_path / f"{'n' * 250}.html")  # a name beside it would be too long


def test_own_files_are_created_and_appended_to(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        with open_own(tmp_path / "log", append=True) as file:
            file.write(text)
    assert (tmp_path / "log").read_bytes() == b"onetwo"


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


def test_a_published_name_is_synced_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, final = tmp_path / "folder.tmp", tmp_path / "folder"
    staging.mkdir()
    (staging / "file").write_text("content")
    operations: list[tuple[str, object]] = []
    rename, fsync = os.rename, os.fsync

    def record_rename(source: Any, target: Any, **options: Any) -> None:
        operations.append(("rename", os.fspath(target)))
        rename(source, target, **options)

    def record_fsync(descriptor: int) -> None:
        operations.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "fsync", record_fsync)
    publish(staging, final)
    assert operations == [("rename", str(final)), ("fsync", tmp_path.stat().st_ino)]
    assert (final / "file").read_text() == "content"
    assert not staging.exists()


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
        open_own(path)


def test_a_signal_adds_its_line_while_another_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.LineFile(tmp_path / "log.txt", lambda _: None, lambda: True)
    write = files.append_whole

    def interrupted(path: Path, lines: bytes, **options: Any) -> None:
        monkeypatch.setattr(files, "append_whole", write)
        file.append(b"of the signal\n")
        write(path, lines, **options)

    monkeypatch.setattr(files, "append_whole", interrupted)
    thread = Thread(target=file.append, args=[b"of the loop\n"], daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert (tmp_path / "log.txt").read_text() == "of the signal\nof the loop\n"
