"""Batches of a corpus with a mask: what is not learned has no label, whatever else is asked."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from composer3d.data import Blend, Corpus
from composer3d.models.contract import IGNORE_INDEX
from tests.data.samples import corpus_of, loader_of

END = 0
SEQ_LEN, ROWS = 8, 6
SIZES = {"seq_len": SEQ_LEN, "global_batch": ROWS}


def make_corpus(seed: int) -> Corpus:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 9, 12 * SEQ_LEN + 1)
    tokens[-1] = END
    return corpus_of(tokens, mask=generator.random(len(tokens)) < 0.5, name=f"corpus {seed}")


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("ranges", [None, [(0, 2), (6, 2)], [(2, 4)]], ids=str)
def test_only_learned_tokens_are_labels(packing: str, ranges: list[tuple[int, int]] | None) -> None:
    """Whole rows, and the parts of two ranks of context parallelism."""
    corpus = make_corpus(1)
    mask = corpus.mask
    assert isinstance(mask, np.ndarray)
    options = {**SIZES, "owned_ranges": ranges}
    masked, plain = (
        loader_of(part, packing=packing, **options) for part in (corpus, replace(corpus, mask=None))
    )
    # A corpus of the same size, whose tokens are their own places.
    places = loader_of(corpus_of(range(len(mask)), end=-1, dtype="<i8"), **options)
    for step in range(5):
        batch, other = masked[step], plain[step]
        is_learned = torch.from_numpy(mask[places[step].labels_BT.numpy()] == 1)
        expected = torch.where(is_learned, other.labels_BT, IGNORE_INDEX)
        assert torch.equal(batch.labels_BT, expected)
        assert 0 < (batch.labels_BT != IGNORE_INDEX).sum() < (other.labels_BT != IGNORE_INDEX).sum()
        assert torch.equal(batch.tokens_BT, other.tokens_BT)
        assert torch.equal(batch.positions_BT, other.positions_BT)


def test_a_blend_masks_only_the_parts_that_have_a_mask() -> None:
    masked, plain = make_corpus(1), replace(make_corpus(2), mask=None)
    batches = [
        loader_of(Blend((part, plain), (2.0, 1.0)), **SIZES)[0].labels_BT
        for part in (masked, replace(masked, mask=None))
    ]
    has_all = (batches[0] == batches[1]).all(1)
    assert has_all.sum() == ROWS // 3
    assert (batches[0][~has_all] == IGNORE_INDEX).any(1).all()
