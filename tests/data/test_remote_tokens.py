"""Token files in an object store give the batches of those on a disk, or a clear error."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from s3fs import S3FileSystem

from composer3d.data import BatchesAhead, Blend, ahead, open_corpus, staging, tokens
from composer3d.data.rows import WholeDocumentRows
from composer3d.data.tokens import ShardedTokens, find_damage, read_together
from composer3d.facts import remote as facts_remote
from composer3d.facts import token_manifest
from composer3d.facts.errors import DataError, RankDataError
from composer3d.facts.remote import RemotePart, RemotePath
from composer3d.facts.token_manifest import read_manifest
from tests.data.remote_folders import (
    END,
    ROWS,
    SEQ_LEN,
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
from tests.data.samples import loader_of
from tests.data.token_folders import refuses, reseal
from tools.object_store import new_folder

CHUNK = 512


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which chunks a start verifies is random: tests that need it say so.
    monkeypatch.setattr(tokens, "_MOST_REMOTE_CHUNKS", 0)
    monkeypatch.setattr(token_manifest, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(staging, "_LOOK_EVERY_S", 0.0)


@pytest.fixture
def store() -> RemotePath:
    """A folder of the store for one test."""
    return new_folder()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "tokens")


@pytest.fixture
def remote(local: Path, store: RemotePath) -> RemotePath:
    return upload(local, store)


PACKINGS = ["none", "documents", "whole_documents"]


@pytest.mark.parametrize("copies", ["no copies", "some", "all"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("has_mask", [False, True])
def test_batches_are_those_of_the_disk(
    tmp_path: Path, store: RemotePath, packing: str, has_mask: bool, copies: str
) -> None:
    folder = write_shards(tmp_path / "masked", has_mask=has_mask)
    place = upload(folder, store)
    sets: dict[str, Any] = {"packing": packing}
    expected = batches_of(opened(folder), **sets)
    assert expected[0].documents_BT is not None or packing == "none"
    cache = None
    if copies != "no copies":
        # The largest shard does not fit into the bound of some.
        cache = cache_of(tmp_path / "cache", 700 if copies == "some" else 1 << 20)
    corpus = opened(place, cache)
    if cache is not None:
        staged(cache)
        names = {path.name for path in (tmp_path / "cache").rglob("*.bin")}
        assert len(names) == {"some": 10 if has_mask else 5, "all": 16 if has_mask else 8}[copies]
    assert corpus.digest == opened(folder).digest
    with requests() as seen:
        assert_equal(batches_of(corpus, **sets), expected)
    assert bool([name for name, *_ in seen.ranges if "documents" not in name]) == (copies != "all")
    # With context parallelism, a rank reads a part of each row.
    ranges = [(0, 5), (30, 5)]
    assert_equal(
        batches_of(corpus, owned_ranges=ranges, **sets),
        batches_of(opened(folder), owned_ranges=ranges, **sets),
    )


def test_a_blend_of_disk_and_store_has_the_batches_of_the_disk(
    tmp_path: Path, store: RemotePath
) -> None:
    folders = [write_shards(tmp_path / f"part{seed}", seed, has_mask=seed == 1) for seed in (1, 2)]
    remote = upload(folders[0], store)
    weights = (2.0, 1.0)
    expected = batches_of(Blend(tuple(map(opened, folders)), weights), 8, packing="documents")
    blend = Blend((opened(remote), opened(folders[1])), weights)
    assert_equal(batches_of(blend, 8, packing="documents"), expected)


def test_a_batch_reads_each_range_once_and_all_at_once(
    remote: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MOST_GAP_BYTES", 0)
    loader = loader_of(opened(remote), seq_len=SEQ_LEN, global_batch=ROWS, packing="documents")
    with requests(delay_s=0.05) as seen:
        next(loader)
    # Tokens and labels, and the ends of documents, are in the same ranges.
    assert seen.calls == ["get_object"] * len(seen.ranges)
    assert sum(size for _, _, size in seen.ranges) <= 2 * ROWS * (SEQ_LEN + 1)
    assert seen.most_at_once == len(seen.ranges) > 1


def test_ranges_near_each_other_are_one_and_any_places_may_be_asked_for(
    local: Path, remote: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk, corpus = opened(local), opened(remote)
    assert isinstance(corpus.tokens, ShardedTokens)
    generator = np.random.default_rng(5)
    for index in (
        np.arange(N),
        np.arange(N)[::-1],
        generator.integers(0, N, (3, 40)),
        np.array([999, 0, 0, 500, 499, 999]),
        # A range within another one.
        np.concatenate([np.arange(510, 600), np.arange(550, 560), [505]]),
        np.array(7),
        np.empty(0, dtype=np.int64),
    ):
        assert corpus.tokens[index].tolist() == on_disk.tokens[index].tolist()
    with requests() as seen:
        corpus.tokens[np.array([501, 600, 989])]
    assert seen.ranges == [("tokens-00006.bin", 2, 978)]
    monkeypatch.setattr(tokens, "_MOST_GAP_BYTES", 38)
    with requests() as seen:
        corpus.tokens[np.array([989, 600, 501, 521, 580])]
    spans = [(1, 22), (80, 101), (489, 490)]
    assert seen.ranges == [("tokens-00006.bin", 2 * a, 2 * (b - a)) for a, b in spans]


def test_an_open_reads_the_manifest_one_list_and_two_chunks(
    remote: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MOST_REMOTE_CHUNKS", 2)
    with requests() as seen:
        opened(remote)
    begin, rest = seen.calls[:3], seen.calls[3:]
    assert begin == ["head_object", "get_object", "list_objects_v2"]
    # One of tokens is compared with the file of documents, of which the size is asked for.
    assert set(rest) <= {"get_object", "head_object"}
    assert 2 <= len(rest) <= 2 * 4


def test_whole_documents_read_their_files_together(local: Path, remote: RemotePath) -> None:
    corpus = opened(remote)
    with requests(delay_s=0.05) as seen:
        rows = WholeDocumentRows.of(corpus, SEQ_LEN)
    assert len(rows) == len(WholeDocumentRows.of(opened(local), SEQ_LEN))
    assert seen.most_at_once > 1
    assert {name.partition("-")[0] for name, *_ in seen.ranges} == {"documents"}


DAMAGE: dict[str, tuple[Callable[[RemotePath], None], str]] = {
    "missing": (RemotePath.remove, r"is missing, but tokens.json says \d+ bytes; make"),
    "truncated": (
        lambda path: path.write(path.read(1 << 20)[:-1]),
        r"has \d+ bytes, but tokens.json says \d+ bytes; make",
    ),
    "too long": (
        lambda path: path.write(path.read(1 << 20) + b"\0"),
        r"has \d+ bytes, but tokens.json says \d+ bytes; make",
    ),
}


@pytest.mark.parametrize("name", ["tokens-00006.bin", "documents-00000.bin", "tokenizer.json"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_an_object_of_another_size_is_refused_at_the_start(
    remote: RemotePath, name: str, kind: str
) -> None:
    damage, message = DAMAGE[kind]
    damage(remote / name)
    with refuses(rf"tokens/{re.escape(name)} {message}"):
        opened(remote)
    for full in (False, True):
        problems = find_damage(read_manifest(remote), full=full)
        assert [re.search(message, line) is not None for line in problems] == [True]


@pytest.mark.parametrize("kind", ["missing", "truncated"])
def test_an_object_that_changes_during_a_run_is_refused(remote: RemotePath, kind: str) -> None:
    corpus = opened(remote)
    DAMAGE[kind][0](remote / "tokens-00006.bin")
    with pytest.raises(RankDataError, match=r"tokens/tokens-00006\.bin cannot be read: "):
        corpus.tokens[np.array([0, 989])]


def flip(path: RemotePath, at: int, mask: int = 1) -> None:
    content = bytearray(path.read(1 << 20))
    content[at] ^= mask
    path.write(bytes(content))


def test_full_finds_a_flipped_bit_in_any_object(local: Path, remote: RemotePath) -> None:
    manifest = read_manifest(remote)
    assert find_damage(manifest, full=True) == []
    for name in ("tokens-00006.bin", "documents-00005.bin", "tokenizer.json"):
        flip(remote / name, -1)
        problems = find_damage(manifest, full=True)
        assert f"{remote}/{name} is damaged between bytes " in problems[0]
        assert find_damage(manifest, full=False) == []
        (remote / name).write((local / name).read_bytes())
    assert find_damage(manifest, full=True) == []


def test_a_token_outside_of_the_vocabulary_is_refused_when_it_is_read(remote: RemotePath) -> None:
    flip(remote / "tokens-00006.bin", 2 * 7 + 1)
    corpus = opened(remote)
    corpus.tokens[np.array([506, 508])]
    message = (
        rf"tokens-00006\.bin is damaged: it holds \d+ for token 507 .* vocabulary of {END + 1}"
    )
    with pytest.raises(RankDataError, match=message):
        corpus.tokens[np.array([0, 507])]


def test_a_mask_of_other_bytes_is_refused_when_it_is_read(
    tmp_path: Path, store: RemotePath
) -> None:
    place = upload(write_shards(tmp_path / "masked", has_mask=True), store)
    flip(place / "mask-00006.bin", 7, 2)
    corpus = opened(place)
    assert corpus.mask is not None
    with pytest.raises(
        RankDataError, match=r"mask-00006\.bin is damaged: it holds \d for token 507"
    ):
        corpus.mask[np.array([507])]


def test_masks_of_an_older_folder_are_found_at_the_start(
    tmp_path: Path, store: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that looks at sizes only leaves the masks of before."""
    monkeypatch.setattr(tokens, "_MOST_REMOTE_CHUNKS", 2)
    place = upload(write_shards(tmp_path / "masked", has_mask=True), store)
    for path in (tmp_path / "masked").glob("mask-*"):
        (place / path.name).write(bytes(path.stat().st_size))
    with refuses(r"mask-0000\d\.bin is damaged between bytes"):
        opened(place)


def test_a_damaged_file_of_documents_is_refused(remote: RemotePath) -> None:
    corpus = opened(remote)
    flip(remote / "documents-00006.bin", 8)
    with refuses(r"documents-00006\.bin is damaged between bytes 0 and 512"):
        batches_of(corpus, packing="whole_documents")


def test_no_value_of_a_remote_manifest_is_trusted(local: Path, store: RemotePath) -> None:
    def rename(manifest: dict[str, Any]) -> None:
        manifest["files"]["../secret"] = manifest["files"].pop("tokens-00000.bin")

    reseal(local, rename)
    with refuses(r"tokens\.json cannot be used \(files "):
        opened(upload(local, store))
    (store / "tokens" / "tokens.json").remove()
    with refuses(r"has no tokens\.json; give a folder that composer3d prepare made"):
        opened(store / "tokens")


@pytest.mark.parametrize("url", ["s3://", "s3://user:word@bucket/x", "s3://bucket/../x"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with refuses("must be KIND://BUCKET/PATH"):
        open_corpus("tokens", url, split="train")


def test_a_resume_goes_on_exactly(local: Path, remote: RemotePath) -> None:
    expected = batches_of(opened(local), 9)
    first = BatchesAhead(
        loader_of(opened(remote), seq_len=SEQ_LEN, global_batch=ROWS), torch.device("cpu")
    )
    assert_equal([next(first) for _ in range(4)], expected[:4])
    resumed = BatchesAhead(
        loader_of(opened(local), seq_len=SEQ_LEN, global_batch=ROWS), torch.device("cpu")
    )
    resumed.load_state_dict(first.state_dict())
    assert_equal([next(resumed) for _ in range(5)], expected[4:])
    first.load_state_dict(first.state_dict())
    assert_equal([next(first) for _ in range(5)], expected[4:])
    first.close()
    resumed.close()


@pytest.mark.parametrize("n_ahead", [1, 4])
def test_a_late_store_does_not_hold_up_the_steps(
    local: Path, remote: RemotePath, n_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read takes 50 ms, and now and then four times as long. A step takes 75 ms."""
    reads = iter([0.05] * 8 + [0.2] + [0.05] * 50)

    def read_late(parts: Sequence[RemotePart]) -> list[bytes]:
        time.sleep(next(reads))
        contents = [(local / part.path.name).read_bytes() for part in parts]
        return [
            content[part.begin : part.begin + part.size]
            for part, content in zip(parts, contents, strict=True)
        ]

    monkeypatch.setattr(tokens, "read_parts", read_late)
    if n_ahead == 1:
        monkeypatch.setattr(ahead, "_AHEAD_OF_STORE", 1)
    loader = loader_of(opened(remote), seq_len=SEQ_LEN, global_batch=ROWS)
    batches = BatchesAhead(loader, torch.device("cpu"))
    waits_s = []
    for _ in range(12):
        begin_s = time.monotonic()
        next(batches)
        waits_s.append(time.monotonic() - begin_s)
        time.sleep(0.075)
    batches.close()
    assert waits_s[0] >= 0.05
    # One batch ahead is enough for reads that take less than a step, but not for a longer one.
    assert (max(waits_s[1:]) > 0.1) == (n_ahead == 1)


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function after whose call there is no server any more."""

    def end() -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        forget_connections()

    yield end
    forget_connections()


def forget_connections() -> None:
    facts_remote._system.cache_clear()
    S3FileSystem.clear_instance_cache()


def test_a_store_that_ends_is_a_clear_error(remote: RemotePath, gone: Callable[[], None]) -> None:
    corpus = opened(remote)
    corpus.tokens[np.array([0])]
    gone()
    with pytest.raises(RankDataError, match=r"06\.bin cannot be read: .*; look at the connection"):
        corpus.tokens[np.array([600])]


def test_arrays_in_memory_and_in_a_store_are_read_together(remote: RemotePath) -> None:
    corpus = opened(remote)
    index = np.array([[3, 990], [500, 4]])
    memory = np.arange(10)
    first, second = read_together([(memory, np.array([[1], [2]])), (corpus.tokens, index)])
    assert first.tolist() == [1, 2]
    assert second.tolist() == corpus.tokens[index].reshape(-1).tolist()


def test_the_error_of_another_store_kind_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DataError, match=r"needs gcsfs: pip install composer3d\[gs\]"):
        read_manifest("gs://bucket/folder")
