"""Folders of token files in a local object store, and what a test does to its requests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from s3fs import S3FileSystem

from composer3d.data import Batch, Blend, Corpus, open_corpus
from composer3d.data.staging import NodeCache
from composer3d.facts.remote import RemotePath
from tests.data.samples import loader_of
from tests.data.token_folders import write_tokens

N = 1_000
END = 50
# Cuts inside of samples, at their ends, and shards shorter than a sample.
CUTS = [1, 37, 74, 75, 76, 500, 990]
SEQ_LEN, ROWS = 37, 9


def write_shards(folder: Path, seed: int = 0, *, has_mask: bool = False) -> Path:
    """Write eight shards of documents of random lengths, the longest above a sample."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, END, N).astype("<u2")
    ids[generator.random(N) < 0.04] = END
    ids[[*(cut - 1 for cut in CUTS), -1]] = END
    mask = (generator.random(N) < 0.6).astype(np.uint8) if has_mask else None
    return write_tokens(folder, ids, cuts=CUTS, mask=mask)


def upload(folder: Path, store: RemotePath) -> RemotePath:
    """Copy a folder to the store, under its own name."""
    place = store / folder.name
    for path in sorted(folder.iterdir()):
        (place / path.name).write(path.read_bytes())
    return place


def opened(place: Path | RemotePath, cache: NodeCache | None = None) -> Corpus:
    return open_corpus("tokens", str(place), split="train", cache=cache)


def cache_of(folder: Path, most_bytes: int = 1 << 30) -> NodeCache:
    """Return the cache of a process that makes copies."""
    return NodeCache(folder, most_bytes, makes_copies=True)


def staged(cache: NodeCache) -> None:
    """Let a cache make its copies."""
    cache.start()
    assert cache.wait(60)


def batches_of(corpus: Corpus | Blend, steps: int = 6, **options: Any) -> list[Batch]:
    loader = loader_of(corpus, **{"seq_len": SEQ_LEN, "global_batch": ROWS, **options})
    return [next(loader) for _ in range(steps)]


def assert_equal(one: list[Batch], other: list[Batch]) -> None:
    for first, second in zip(one, other, strict=True):
        for tensor, same in zip(first, second, strict=True):
            assert tensor is same is None or torch.equal(tensor, same)


class Requests:
    """The requests of a block to the store.

    Attributes:
        calls: the names of all calls of S3.
        ranges: the file, the first byte and the number of bytes of each part that was read.
        most_at_once: the largest number of parts that were read at the same time.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []
        self.most_at_once = 0
        self._now = 0

    def begin(self, method: str, options: dict[str, Any]) -> None:
        self.calls.append(method)
        if "Range" in options:
            first, last = map(int, options["Range"].removeprefix("bytes=").split("-"))
            self.ranges.append((options["Key"].rpartition("/")[2], first, last + 1 - first))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)

    def end(self) -> None:
        self._now -= 1


@contextmanager
def requests(*, delay_s: float = 0.0) -> Iterator[Requests]:
    """Watch the requests of the block, and make each one late."""
    seen = Requests()
    call_s3 = S3FileSystem._call_s3

    async def watched(self: S3FileSystem, method: str, *arguments: Any, **options: Any) -> Any:
        # All run in the one thread of fsspec.
        seen.begin(method, options)
        try:
            await asyncio.sleep(delay_s)
            return await call_s3(self, method, *arguments, **options)
        finally:
            seen.end()

    with patch.object(S3FileSystem, "_call_s3", watched):
        yield seen
