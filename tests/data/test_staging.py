"""Copies of token files on a node: what they hold, their bound, and who may have put them there."""

import errno
import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer3d.data import staging, tokens
from composer3d.data.staging import NodeCache
from composer3d.facts import token_manifest
from composer3d.facts.errors import RankDataError
from composer3d.facts.remote import RemotePath
from composer3d.facts.token_manifest import read_manifest
from tests.data.remote_folders import (
    N,
    assert_equal,
    batches_of,
    cache_of,
    opened,
    requests,
    staged,
    upload,
    write_shards,
)
from tests.data.token_folders import refuses, write_tokens
from tools.object_store import new_folder

CHUNK = 512
SIZE = 980  # bytes of the largest shard
ALL = np.arange(N)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which chunks a start verifies is random: tests that need it say so.
    monkeypatch.setattr(tokens, "_MOST_REMOTE_CHUNKS", 0)
    monkeypatch.setattr(token_manifest, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(staging, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(staging, "_ASK_EVERY_S", 0.01)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "tokens")


@pytest.fixture
def remote(local: Path) -> RemotePath:
    return upload(local, new_folder())


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The folder that a user names for copies."""
    return tmp_path / "disk"


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what the copies have told."""
    return [record for record in caplog.records if record.module == "staging"]


def copies_in(disk: Path) -> dict[str, Path]:
    return {path.name: path for path in disk.rglob("*.bin")}


def test_copies_have_the_bytes_of_the_folder_and_the_next_job_uses_them(
    local: Path, remote: RemotePath, disk: Path
) -> None:
    cache = cache_of(disk)
    opened(remote, cache)
    staged(cache)
    copies = copies_in(disk)
    assert sorted(copies) == [f"tokens-{number:05}.bin" for number in range(8)]
    for name, path in copies.items():
        assert path.read_bytes() == (local / name).read_bytes()
        own, digest = path.parent.parent, path.parent
        assert own.name == f"composer3d-{os.geteuid()}"
        assert digest.name == read_manifest(local).digest
        assert own.stat().st_mode & 0o777 == digest.stat().st_mode & 0o777 == 0o700
    again = cache_of(disk)
    with requests() as seen:
        corpus = opened(remote, again)
        n_of_start = len(seen.calls)
        staged(again)
        assert corpus.tokens[ALL].tolist() == opened(local).tokens[ALL].tolist()
    assert len(seen.calls) == n_of_start
    assert copies_in(disk) == copies


def test_a_run_begins_with_the_store_and_goes_on_with_the_copies(
    remote: RemotePath, disk: Path
) -> None:
    cache = cache_of(disk)
    corpus = opened(remote, cache)
    with requests() as seen:
        before = corpus.tokens[ALL]
    assert len(seen.ranges) == 8
    staged(cache)
    with requests() as seen:
        after = corpus.tokens[ALL]
    assert seen.calls == []
    assert before.tolist() == after.tolist()


def test_a_slow_disk_is_copied_too(local: Path, disk: Path) -> None:
    cache = cache_of(disk)
    corpus = opened(local, cache)
    expected = opened(local).tokens[ALL].tolist()
    assert corpus.tokens[ALL].tolist() == expected
    assert isinstance(corpus.tokens, tokens.ShardedTokens)
    assert not any(found.is_copy for found in corpus.tokens._maps.values())
    staged(cache)
    assert corpus.tokens[ALL].tolist() == expected
    assert all(found.is_copy for found in corpus.tokens._maps.values())
    assert len(corpus.tokens._maps) == 8


def test_a_folder_of_one_shard_is_copied_too(tmp_path: Path, disk: Path) -> None:
    folder = write_tokens(tmp_path / "one", np.arange(N, dtype="<u2"))
    cache = cache_of(disk)
    corpus = opened(folder, cache)
    staged(cache)
    assert list(copies_in(disk)) == ["tokens.bin"]
    assert corpus.tokens[ALL].tolist() == list(range(N))


def test_the_bound_counts_all_copies_of_the_user(
    local: Path, remote: RemotePath, tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="composer3d")
    other = write_shards(tmp_path / "other", 1)
    first = cache_of(disk)
    opened(other, first)
    staged(first)
    used = sum(path.stat().st_size for path in copies_in(disk).values())
    assert used == 2 * N
    assert not told(caplog)

    # The first five shards have 152 bytes, and the next one does not fit any more.
    second = cache_of(disk, used + 999)
    corpus = opened(remote, second)
    staged(second)
    digest = read_manifest(local).digest
    own = sorted(path.name for path in disk.rglob(f"{digest}/*.bin"))
    assert own == [f"tokens-{number:05}.bin" for number in range(5)]
    (record,) = told(caplog)
    assert "near the bound of" in record.message
    assert corpus.tokens[ALL].tolist() == opened(local).tokens[ALL].tolist()


def test_folders_are_copied_in_turn(tmp_path: Path, disk: Path) -> None:
    folders = [write_shards(tmp_path / f"part{seed}", seed) for seed in (1, 2)]
    cache = cache_of(disk, 2 * 152)
    for folder in folders:
        opened(folder, cache)
    staged(cache)
    for folder in folders:
        assert len(list(disk.rglob(f"{read_manifest(folder).digest}/*.bin"))) == 5


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize("harm", [damage, shorten, link, Path.unlink])
def test_a_copy_that_was_harmed_is_not_read_and_made_again(
    local: Path, remote: RemotePath, disk: Path, harm: Any
) -> None:
    first = cache_of(disk)
    opened(remote, first)
    staged(first)
    path = copies_in(disk)["tokens-00006.bin"]
    harm(path)
    second = cache_of(disk)
    corpus = opened(remote, second)
    expected = opened(local).tokens[ALL].tolist()
    assert corpus.tokens[ALL].tolist() == expected
    staged(second)
    assert path.read_bytes() == (local / path.name).read_bytes()
    assert not path.is_symlink()
    assert corpus.tokens[ALL].tolist() == expected


@pytest.mark.parametrize("harm", [shorten, link, Path.unlink])
def test_a_copy_that_is_harmed_during_a_run_is_not_read(
    local: Path, remote: RemotePath, disk: Path, harm: Any
) -> None:
    cache = cache_of(disk)
    corpus = opened(remote, cache)
    staged(cache)
    assert corpus.tokens[np.array([0])] == opened(local).tokens[np.array([0])]
    harm(copies_in(disk)["tokens-00006.bin"])
    with requests() as seen:
        assert corpus.tokens[ALL].tolist() == opened(local).tokens[ALL].tolist()
    assert [name for name, *_ in seen.ranges] == ["tokens-00006.bin"]


def test_a_damaged_object_gets_no_copy_and_ends_the_run(remote: RemotePath, disk: Path) -> None:
    path = remote / "tokens-00003.bin"
    path.write(bytes([7, 0]))
    cache = cache_of(disk)
    corpus = opened(remote, cache)
    corpus.tokens[ALL]  # 7 is in the vocabulary: a range tells nothing
    with requests() as seen:
        staged(cache)
    # It was read twice: a part may be damaged on its way.
    assert [name for name, *_ in seen.ranges].count("tokens-00003.bin") == 2
    assert len(copies_in(disk)) == 3
    message = r"tokens-00003\.bin is damaged between bytes 0 and 512: its digest there is not"
    with pytest.raises(RankDataError, match=message):
        corpus.tokens[np.array([0])]


def test_what_was_damaged_on_its_way_is_read_again(
    local: Path, remote: RemotePath, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, done = RemotePath.read_range, threading.Event()

    def wrong_once(self: RemotePath, begin: int, size: int) -> bytes:
        content = right(self, begin, size)
        if self.name == "tokens-00006.bin" and begin == CHUNK and not done.is_set():
            done.set()
            return bytes(size)
        return content

    monkeypatch.setattr(RemotePath, "read_range", wrong_once)
    cache = cache_of(disk)
    opened(remote, cache)
    staged(cache)
    assert done.is_set()
    name = "tokens-00006.bin"
    assert copies_in(disk)[name].read_bytes() == (local / name).read_bytes()


def test_a_full_disk_ends_the_copies_and_not_the_run(
    local: Path, remote: RemotePath, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    right, written = staging.write_atomic, []

    def fill(path: Path, content: Any) -> None:
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        right(path, content)

    monkeypatch.setattr(staging, "write_atomic", fill)
    cache = cache_of(disk)
    corpus = opened(remote, cache)
    staged(cache)
    assert len(copies_in(disk)) == 2
    (record,) = told(caplog)
    assert record.levelname == "WARNING"
    assert "no more token files are copied: is full" in record.message
    assert_equal(batches_of(corpus), batches_of(opened(local)))


def test_a_store_that_fails_ends_the_copies_and_not_the_run(
    remote: RemotePath, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(self: RemotePath, begin: int, size: int) -> bytes:
        raise OSError(errno.EIO, "it is too busy", str(self))

    cache = cache_of(disk)
    corpus = opened(remote, cache)
    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "read_range", fail)
        staged(cache)
    assert "it is too busy" in caplog.text
    assert not list(disk.rglob("*.tmp"))
    corpus.tokens[ALL]


def test_what_a_killed_job_has_left_is_removed_and_not_counted(
    remote: RemotePath, disk: Path
) -> None:
    first = cache_of(disk)
    opened(remote, first)
    digest = read_manifest(remote).digest
    left = disk / f"composer3d-{os.geteuid()}" / digest / f".tokens-00000.bin.{'0f' * 16}.tmp"
    left.write_bytes(bytes(10**6))
    second = cache_of(disk, 2 * N)
    opened(remote, second)
    staged(second)
    assert not left.exists()
    assert len(copies_in(disk)) == 8


def test_two_jobs_do_not_copy_a_file_at_once(
    remote: RemotePath, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, most, made = [0], [0], []
    right = staging.write_atomic

    def watched(path: Path, content: Any) -> None:
        now[0] += 1
        most[0] = max(most[0], now[0])
        made.append(path.name)
        time.sleep(0.01)
        right(path, content)
        now[0] -= 1

    monkeypatch.setattr(staging, "write_atomic", watched)
    caches = [cache_of(disk) for _ in range(3)]
    for cache in caches:
        opened(remote, cache)
    for cache in caches:
        cache.start()
    assert all(cache.wait(60) for cache in caches)
    assert most == [1]
    assert sorted(made) == sorted(copies_in(disk))


def test_a_job_that_holds_the_lock_holds_up_the_copies_and_not_the_run(
    remote: RemotePath, disk: Path
) -> None:
    cache = cache_of(disk)
    corpus = opened(remote, cache)
    with open(disk / f"composer3d-{os.geteuid()}" / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache.start()
        assert not cache.wait(0.1)
        corpus.tokens[ALL]
        assert not copies_in(disk)
        cache.close()
        assert cache.wait(0)
    assert not copies_in(disk)


def test_only_one_rank_of_a_node_makes_copies_and_all_read_them(
    remote: RemotePath, disk: Path
) -> None:
    other = NodeCache(disk, 1 << 20, makes_copies=False)
    corpus = opened(remote, other)
    other.start()
    assert other.wait(0)
    assert not copies_in(disk)
    first = cache_of(disk)
    opened(remote, first)
    staged(first)
    with requests() as seen:
        corpus.tokens[ALL]
    assert seen.calls == []


def test_a_foreign_folder_is_refused(
    local: Path, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = disk / f"composer3d-{os.geteuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    disk.mkdir()
    own.symlink_to(elsewhere)
    with refuses(r"data\.cache_dir: .*/composer3d-\d+ is no folder, or a link to one; remove it"):
        cache_of(disk)
    own.unlink()
    own.write_text("")
    with refuses("File exists"):
        cache_of(disk)
    own.unlink()
    own.mkdir()
    own.chmod(0o770)
    with refuses("may be written to by others"):
        cache_of(disk)
    own.chmod(0o700)
    digest = own / read_manifest(local).digest
    digest.symlink_to(elsewhere)
    with refuses("is no folder, or a link to one"):
        opened(local, cache_of(disk))
    digest.unlink()
    cache = cache_of(disk)

    for mode in (0o777, 0o770):
        disk.chmod(mode)
        with refuses("others may replace files in"):
            cache_of(disk)
    disk.chmod(0o1777)
    cache_of(disk)
    disk.chmod(0o700)

    status = own.lstat()

    class Foreign:
        st_mode, st_uid = status.st_mode, status.st_uid + 1

    monkeypatch.setattr(Path, "lstat", lambda self: Foreign)
    with refuses(r"belongs to another user \(uid \d+\)"):
        cache.add(read_manifest(local))


def test_a_root_that_is_replaced_by_a_link_is_not_followed(
    remote: RemotePath, disk: Path, tmp_path: Path
) -> None:
    cache = cache_of(disk)
    corpus = opened(remote, cache)
    home = tmp_path / "home"
    home.mkdir()
    (home / f".draft.{'0' * 32}.tmp").write_text("of the user")
    root = next(disk.iterdir())
    root.rename(tmp_path / "moved")
    root.symlink_to(home)
    staged(cache)
    assert [path.name for path in home.iterdir()] == [f".draft.{'0' * 32}.tmp"]
    with refuses("is no folder, or a link to one"):
        batches_of(corpus)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(r"data\.cache_dir: .*/file/x Not a directory"):
        cache_of(tmp_path / "file" / "x")
