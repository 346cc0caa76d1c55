"""How the tokens of a corpus are cut into samples.

By default, samples are cut every ``seq_len`` tokens, wherever that is. So a document may begin in
one sample and end in another. Samples of whole documents are put together so that none is cut that
fits. Both are pure functions of the corpus and of ``seq_len``.
"""

import heapq
from bisect import bisect_left, insort
from typing import NamedTuple, Protocol

import numpy as np

from composer3d.data.tokens import Corpus, document_bounds

# In place of a token: what fills up a sample.
FILLING = -1


class Rows(Protocol):
    """The samples of a corpus, by number."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Return the place in the corpus of each token of some samples.

        Args:
            samples: int64, (samples,): numbers from 0.

        Returns:
            int64, (samples, seq_len); ``FILLING`` for what fills up a sample. The next token of the
            corpus exists, unless a token is the last one of a document.
        """
        ...


class EvenRows(NamedTuple):
    """Samples that are cut every ``seq_len`` tokens.

    Attributes:
        n_samples: the number of samples.
        seq_len: the tokens of a sample.
    """

    n_samples: int
    seq_len: int

    @classmethod
    def of(cls, corpus: Corpus, seq_len: int) -> "EvenRows":
        """Cut a corpus. The last tokens, which do not fill a sample, are left out."""
        return cls((len(corpus.tokens) - 1) // seq_len, seq_len)

    def __len__(self) -> int:
        return self.n_samples

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Return places: int64, of the shape (samples, seq_len), as ``Rows.places`` does."""
        return samples[:, None] * self.seq_len + np.arange(self.seq_len)


class WholeDocumentRows:
    """Samples that cut no document, unless it is longer than a sample.

    Documents of more than ``seq_len`` tokens, with their ends, are cut every ``seq_len`` tokens.
    The pieces go to samples by best fit decreasing (Johnson 1973, "Near-optimal bin packing
    algorithms"): the longest piece first, and of equal ones the first of the corpus; each to the
    sample with the least space left in which it fits, and of equal ones to the oldest; or to a new
    sample, if it fits in none. Within a sample, pieces are in the order of the corpus.

    Args:
        bounds: the first token of each document, and at the end the number of tokens: int64,
            (documents + 1,), ascending from 0.
        seq_len: the tokens of a sample, with what fills it up.

    Attributes:
        seq_len: as above.
        n_cut: the number of documents that are longer than a sample.
        filled: the part of all samples that documents fill; the rest is filled up.
    """

    def __init__(self, bounds: np.ndarray, seq_len: int) -> None:
        self.seq_len = seq_len
        lengths = np.diff(bounds)
        self.n_cut = int((lengths > seq_len).sum())
        n_pieces = -(-lengths // seq_len)
        number_in_document = np.arange(n_pieces.sum()) - np.repeat(
            np.cumsum(n_pieces) - n_pieces, n_pieces
        )
        starts = np.repeat(bounds[:-1], n_pieces) + number_in_document * seq_len
        lengths = np.diff(np.append(starts, bounds[-1]))

        samples = _best_fit(lengths, seq_len)
        by_sample = np.argsort(samples, kind="stable")
        self._starts, self._lengths = starts[by_sample], lengths[by_sample]
        # The first piece of each sample, and the number of pieces.
        n_samples = int(samples.max(initial=-1)) + 1
        self._firsts = np.searchsorted(samples[by_sample], np.arange(n_samples + 1))
        self.filled = float(lengths.sum()) / max(1, n_samples * seq_len)

    @classmethod
    def of(cls, corpus: Corpus, seq_len: int) -> "WholeDocumentRows":
        """Cut a corpus. Tokens after its last end of a document are left out.

        Raises:
            DataError: a file of a folder of tokens is missing or damaged.
        """
        return cls(document_bounds(corpus), seq_len)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Return places: int64, of the shape (samples, seq_len), as ``Rows.places`` does."""
        places = np.full((len(samples), self.seq_len), FILLING, dtype=np.int64)
        for row, sample in zip(places, samples, strict=True):
            pieces = slice(self._firsts[sample], self._firsts[sample + 1])
            starts, lengths = self._starts[pieces], self._lengths[pieces]
            stops = np.cumsum(lengths)
            row[: stops[-1]] = np.arange(stops[-1]) + np.repeat(starts - (stops - lengths), lengths)
        return places


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the sample of each piece, as ``WholeDocumentRows`` says: int64, (pieces,)."""
    samples = np.empty(len(lengths), dtype=np.int64)
    n_samples = 0
    with_space: dict[int, list[int]] = {}  # samples by the space left in them; each a heap
    spaces: list[int] = []  # the keys of ``with_space``, in order
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            sample = heapq.heappop(with_space[space])
            if not with_space[space]:
                del with_space[space], spaces[at]
        else:
            space, sample = seq_len, n_samples
            n_samples += 1
        samples[piece] = sample
        left = space - length
        if left == 0:
            continue
        if left not in with_space:
            with_space[left] = []
            insort(spaces, left)
        heapq.heappush(with_space[left], sample)
    return samples
