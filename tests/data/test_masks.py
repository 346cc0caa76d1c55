"""Batches of a corpus with a mask: what is not learned has no label, whatever else is asked."""

from typing import Any

import numpy as np
import pytest
import torch

from composer3d.data import Blend, Corpus, Loader
from composer3d.models.contract import IGNORE_INDEX

END = 0
SEQ_LEN, ROWS = 8, 6


def make_corpus(seed: int, *, has_mask: bool = True) -> Corpus:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 9, 12 * SEQ_LEN + 1).astype(np.uint16)
    tokens[-1] = END
    mask = (generator.random(len(tokens)) < 0.5).astype(np.uint8) if has_mask else None
    return Corpus(tokens, END, f"corpus {seed}", int((tokens == END).sum()), f"corpus {seed}", mask)


def make_loader(corpus: Corpus | Blend, **changed: Any) -> Loader:
    options: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "global_batch": ROWS,
        "seed": 3,
        "batch_rank": 0,
        "batch_ranks": 1,
    }
    return Loader(corpus, **options | changed)


def without_mask(corpus: Corpus) -> Corpus:
    return Corpus(
        corpus.tokens, corpus.end_of_document, corpus.digest, corpus.n_documents, corpus.name
    )


def positions_of(corpus: Corpus) -> Corpus:
    """Return a corpus of the same size, whose tokens are their own places."""
    return Corpus(np.arange(len(corpus.tokens)), -1, corpus.digest, 1, corpus.name)


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("ranges", [None, [(0, 2), (6, 2)], [(2, 4)]], ids=str)
def test_only_learned_tokens_are_labels(packing: str, ranges: list[tuple[int, int]] | None) -> None:
    """Whole rows, and the parts of two ranks of context parallelism."""
    corpus = make_corpus(1)
    mask = corpus.mask
    assert isinstance(mask, np.ndarray)
    options = {"packing": packing, "owned_ranges": ranges}
    masked, plain = make_loader(corpus, **options), make_loader(without_mask(corpus), **options)
    places = make_loader(positions_of(corpus), owned_ranges=ranges)
    for step in range(5):
        batch, other = masked[step], plain[step]
        is_learned = torch.from_numpy(mask[places[step].labels_BT.numpy()] == 1)
        expected = torch.where(is_learned, other.labels_BT, IGNORE_INDEX)
        assert torch.equal(batch.labels_BT, expected)
        assert 0 < (batch.labels_BT != IGNORE_INDEX).sum() < (other.labels_BT != IGNORE_INDEX).sum()
        assert torch.equal(batch.tokens_BT, other.tokens_BT)
        assert torch.equal(batch.positions_BT, other.positions_BT)


def test_a_blend_masks_only_the_parts_that_have_a_mask() -> None:
    masked, plain = make_corpus(1), make_corpus(2, has_mask=False)
    batches = [
        make_loader(Blend((part, plain), (2.0, 1.0)))[0].labels_BT
        for part in (masked, without_mask(masked))
    ]
    has_all = (batches[0] == batches[1]).all(1)
    assert has_all.sum() == ROWS // 3
    assert (batches[0][~has_all] == IGNORE_INDEX).any(1).all()


def test_a_run_goes_on_with_the_same_labels_on_other_ranks() -> None:
    corpus = make_corpus(1)
    whole = make_loader(corpus)
    next(whole)
    state = whole.state_dict()
    assert state.keys() == make_loader(without_mask(corpus)).state_dict().keys()
    expected = next(whole).labels_BT
    parts = []
    for rank in range(3):
        part = make_loader(corpus, batch_rank=rank, batch_ranks=3)
        part.load_state_dict(state)
        parts.append(next(part).labels_BT)
    assert torch.equal(torch.cat(parts), expected)
