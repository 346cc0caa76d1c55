"""What a folder of token files holds: the lengths of its documents, and some of them as text.

The files may be damaged: nothing is trusted that is read from them.
"""

import contextlib
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from composer3d.data.prompt_tokenizer import PromptTokenizer, make_prompt_tokenizer
from composer3d.facts.errors import DataError
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import TOKENIZER, Shard, TokenManifest, digest_of

_BLOCK_STARTS = 1 << 20  # starts of documents that are read at a time
_START_BYTES = 8
_SAMPLE_TOKENS = 100  # of a document that are decoded
_SAMPLE_CHARACTERS = 300  # of its text that are shown
_MASKED_SAMPLE = 4  # times as much of a document with a mask: the answer may follow a long prompt


class Lengths(NamedTuple):
    """The lengths of all documents, in tokens, with the one that ends each document.

    Attributes:
        shortest: the least length.
        longest: the largest length.
        histogram: entry k counts the documents of 2^k to 2^(k + 1) - 1 tokens.
    """

    shortest: int
    longest: int
    histogram: list[int]


class Sample(NamedTuple):
    """A document.

    Attributes:
        document: its number, from 0.
        tokens: its length in tokens.
        text: its first characters, on one line. In a folder with masks, « and » stand around what
            is learned, and special tokens are shown.
        learned: the number of its tokens that are learned; None in a folder without masks.
    """

    document: int
    tokens: int
    text: str
    learned: int | None = None


def measure_lengths(manifest: TokenManifest) -> Lengths:
    """Return the lengths of all documents, in bounded memory.

    Raises:
        DataError: a file cannot be read, or the starts of documents do not ascend.
    """
    counts = np.zeros(64, dtype=np.int64)
    shortest, longest = manifest.tokens, 0
    for shard in manifest.shards:
        for first in range(0, shard.documents, _BLOCK_STARTS):
            lengths = _lengths(manifest, shard, first, _BLOCK_STARTS)
            shortest = min(shortest, int(lengths.min()))
            longest = max(longest, int(lengths.max()))
            exponents = np.frexp(lengths.astype(np.float64))[1] - 1
            counts += np.bincount(exponents, minlength=len(counts))
    return Lengths(shortest, longest, counts[: int(np.flatnonzero(counts)[-1]) + 1].tolist())


def decode_samples(manifest: TokenManifest, count: int) -> list[Sample]:
    """Return ``count`` documents, from the first to the last at even distances, as text.

    Raises:
        DataError: a file cannot be read, or the tokenizer fails. It runs in a process of its own.
    """
    content = None
    if manifest.tokenizer_digest is not None:
        content = manifest.read(TOKENIZER)
        if digest_of(content) != manifest.tokenizer_digest:
            raise DataError(f"{manifest.folder / TOKENIZER} is damaged")
    numbers = np.unique(np.linspace(0, manifest.documents - 1, count).round().astype(np.int64))
    if content is None:
        opened = PromptTokenizer()
    else:
        opened = make_prompt_tokenizer("its tokenizer.json cannot be used", content)
    with contextlib.closing(opened) as decoder:
        return [_decode(manifest, decoder, int(number)) for number in numbers]


def as_report(lengths: Lengths, manifest: TokenManifest) -> dict[str, Any]:
    """Return the lengths as JSON values."""
    return {
        "mean": manifest.tokens / manifest.documents,
        "shortest": lengths.shortest,
        "longest": lengths.longest,
        "histogram": [
            {"from": 1 << exponent, "to": (2 << exponent) - 1, "documents": count}
            for exponent, count in enumerate(lengths.histogram)
        ],
    }


def _lengths(manifest: TokenManifest, shard: Shard, first: int, count: int) -> np.ndarray:
    """Return the lengths of documents of a shard, from document ``first`` on: int64."""
    count = min(count, shard.documents - first)
    starts = _read(manifest, shard.documents_file, first * _START_BYTES, count + 1, "<i8")
    if starts[0] < 0 or starts[-1] > shard.tokens or (starts[1:] <= starts[:-1]).any():
        raise DataError(
            f"{manifest.folder / shard.documents_file} does not cut {shard.tokens} tokens into "
            f"{shard.documents} documents in order"
        )
    return np.diff(starts)


def _decode(manifest: TokenManifest, decoder: PromptTokenizer, number: int) -> Sample:
    """Return document ``number`` of the folder."""
    within = number
    for shard in manifest.shards:
        if within < shard.documents:
            break
        within -= shard.documents
    (length,) = _lengths(manifest, shard, within, 1).tolist()
    start = int(_read(manifest, shard.documents_file, within * _START_BYTES, 1, "<i8")[0])
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    shown = min(length - 1, _SAMPLE_TOKENS)  # without the token that ends the document
    if shard.mask_file is not None:
        return _decode_masked(manifest, decoder, shard, number, start, length)
    tokens = _read(manifest, shard.tokens_file, start * dtype.itemsize, shown, dtype)
    text = decoder.decode(tokens.tolist())
    if len(text) > _SAMPLE_CHARACTERS or shown < length - 1:
        text = text[:_SAMPLE_CHARACTERS] + "..."
    return Sample(number, length, one_line(text))


def _decode_masked(
    manifest: TokenManifest,
    decoder: PromptTokenizer,
    shard: Shard,
    number: int,
    start: int,
    length: int,
) -> Sample:
    """Return document ``number``, which has a mask and ``length`` tokens from ``start`` on."""
    assert shard.mask_file is not None
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    mask = _read(manifest, shard.mask_file, start, length, "u1")
    shown = min(length - 1, _MASKED_SAMPLE * _SAMPLE_TOKENS)
    tokens = _read(manifest, shard.tokens_file, start * dtype.itemsize, shown, dtype)
    # The runs of tokens that are learned, or that are not.
    bounds = [0, *(np.flatnonzero(np.diff(mask[:shown])) + 1).tolist(), shown]
    text = ""
    for begin, end in pairwise(bounds):
        part = decoder.decode(tokens[begin:end].tolist(), skips_special=False)
        text += f"«{part}»" if begin < end and mask[begin] else part
    limit = _MASKED_SAMPLE * _SAMPLE_CHARACTERS
    if len(text) > limit or shown < length - 1:
        text = text[:limit] + "..."
    return Sample(number, length, one_line(text), int(np.count_nonzero(mask)))


def _read(
    manifest: TokenManifest, name: str, offset: int, count: int, dtype: np.dtype[Any] | str
) -> np.ndarray:
    """Read ``count`` numbers from a file of the folder. Raises DataError as ``open``."""
    content = manifest.read(name, offset, count * np.dtype(dtype).itemsize)
    return np.frombuffer(content, dtype=dtype)
