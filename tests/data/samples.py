"""Corpora in memory, and the loaders that serve them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from composer3d.data import Batch, Blend, Corpus, Loader
from composer3d.facts.token_manifest import digest_of


def corpus_of(
    tokens: Sequence[int] | np.ndarray,
    *,
    end: int = 0,
    mask: Sequence[int] | np.ndarray | None = None,
    name: str = "test",
    dtype: str = "<u2",
) -> Corpus:
    """Make a corpus of these tokens. Its digest depends on the tokens, the mask and the name."""
    array = np.asarray(tokens, dtype)
    mask = None if mask is None else np.asarray(mask, np.uint8)
    digest = digest_of(array.tobytes() + (b"" if mask is None else mask.tobytes()) + name.encode())
    return Corpus(array, end, digest, int((array == end).sum()), name, mask)


def loader_of(corpus: Corpus | Blend, rank: int = 0, ranks: int = 1, **changed: Any) -> Loader:
    """Make the loader of a rank: of 8 rows of 4 tokens in a step, if nothing else is asked."""
    options: dict[str, Any] = {"seq_len": 4, "global_batch": 8, "seed": 3}
    return Loader(corpus, batch_rank=rank, batch_ranks=ranks, **options | changed)


def rows(batches: Sequence[Batch]) -> torch.Tensor:
    """Join the rows of batches: the tokens of each row, then its labels, then its positions."""
    return torch.cat(
        [torch.cat([b.tokens_BT, b.labels_BT, b.positions_BT], dim=1) for b in batches]
    )
