"""Blend corpora by weights, in an order that is a pure function of the number of a sample.

Global sample g is taken from one of the corpora. The corpus is chosen by the divisor method of
Webster and Sainte-Laguë: the next sample goes to the corpus with the smallest (2 n + 1) / weight,
where n is the number of its samples so far. After any number of samples, each of k corpora has its
exact share of them, up to 1/2 + weight k / 2 samples, where the weights sum to 1. Nothing is drawn
at random, and nothing is remembered: the state after any number of samples is computed.
"""

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from composer3d.data.tokens import Corpus
from composer3d.facts.errors import DataError
from composer3d.facts.token_manifest import digest_of


@dataclass(frozen=True, eq=False)
class Blend:
    """Corpora and their weights.

    Attributes:
        corpora: at least one.
        weights: the weight of each, above 0. Only their ratios matter.

    Raises:
        DataError: the corpora end documents with different tokens.
    """

    corpora: tuple[Corpus, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        for corpus in self.corpora:
            if corpus.end_of_document != self.end_of_document:
                raise DataError(
                    f"{corpus.name} ends documents with token {corpus.end_of_document}, but "
                    f"{self.corpora[0].name} with {self.end_of_document}; prepare them with the "
                    "same --tokenizer and --eod"
                )

    @property
    def name(self) -> str:
        """The names of all corpora, for messages."""
        return f"blend of {', '.join(corpus.name for corpus in self.corpora)}"

    @property
    def end_of_document(self) -> int:
        """The token that ends each document of every corpus."""
        return self.corpora[0].end_of_document

    @property
    def digest(self) -> str:
        """The digest of the corpora and of the ratios of their weights, in hexadecimal."""
        return self._digest([corpus.digest for corpus in self.corpora])

    @property
    def older_digest(self) -> str:
        """What checkpoints of an older composer3d have in place of ``digest``."""
        return self._digest([corpus.older_digest for corpus in self.corpora])

    def _digest(self, digests: list[str]) -> str:
        entries = list(map(list, zip(digests, whole_weights(self.weights), strict=True)))
        return digest_of(json.dumps(entries).encode())


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers with the ratios of ``weights``, read as decimals."""
    exact = [Fraction(str(weight)) for weight in weights]
    unit = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    divisor = int(np.gcd.reduce(np.array(whole, dtype=object)))
    return tuple(weight // divisor for weight in whole)


def samples_before(weights: Sequence[int], count: int) -> list[int]:
    """Return how many of the first ``count`` global samples each corpus gives.

    Args:
        weights: whole numbers, at least 1.
        count: at least 0. The time does not depend on it.
    """
    if len(weights) == 1:
        return [count]
    # The n-th sample of a corpus has the time (2 n + 1) / weight, and samples are in the order of
    # their times. Count those up to a time that is reached a little before ``count`` samples.
    total, early = sum(weights), max(count - len(weights), 0)
    counts = [(2 * weight * early + total) // (2 * total) for weight in weights] if early else []
    counts = counts or [0] * len(weights)
    for source in _merge(weights, counts, count - sum(counts)):
        counts[source] += 1
    return counts


def sources_of(weights: Sequence[int], first: int, count: int) -> np.ndarray:
    """Return the corpus of each of the global samples ``first`` to ``first + count - 1``.

    Returns:
        int64, (count,): places in ``weights``.
    """
    if len(weights) == 1:
        return np.zeros(count, dtype=np.int64)
    return np.array(_merge(weights, samples_before(weights, first), count), dtype=np.int64)


def _merge(weights: Sequence[int], counts: Sequence[int], count: int) -> list[int]:
    """Return the corpora of the next samples, after ``counts`` samples of each corpus."""
    times = [
        (Fraction(2 * done + 1, weight), source)
        for source, (done, weight) in enumerate(zip(counts, weights, strict=True))
    ]
    heapq.heapify(times)
    steps = [Fraction(2, weight) for weight in weights]
    chosen = []
    for _ in range(count):
        time, source = times[0]  # of equal times, the corpus that is listed first
        heapq.heapreplace(times, (time + steps[source], source))
        chosen.append(source)
    return chosen
