"""Corpora that are blended by weights. ``order`` says which sample each of them gives."""

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
