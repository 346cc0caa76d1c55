"""The order of samples is a function of (seed, step), on every layout and after every restart."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from composer3d.data import Blend, Corpus, loader, sample_order
from composer3d.data.order import Order
from composer3d.models.contract import IGNORE_INDEX
from tests.data.samples import corpus_of, loader_of, rows
from tests.data.token_folders import refuses

SEQ_LEN = 4
# 19 samples of 4 tokens. Each sample starts with another token.
CORPUS = corpus_of(range(1, 78))


def test_labels_are_the_inputs_shifted() -> None:
    batch = next(loader_of(CORPUS))
    starts = CORPUS.tokens[sample_order(19, 3, 0, 8) * SEQ_LEN]
    for name, offset in [("tokens_BT", 0), ("labels_BT", 1)]:
        expected = torch.tensor(
            [[int(start) + offset + t for t in range(SEQ_LEN)] for start in starts]
        )
        assert torch.equal(getattr(batch, name), expected)
    assert torch.equal(batch.positions_BT, torch.arange(SEQ_LEN).expand(8, SEQ_LEN))
    for tensor in (batch.tokens_BT, batch.labels_BT, batch.positions_BT):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


def test_batches_share_no_memory() -> None:
    batches = loader_of(CORPUS)
    first = next(batches)
    first.positions_BT.zero_()
    first.tokens_BT.zero_()
    assert next(batches).positions_BT[0].tolist() == [0, 1, 2, 3]
    assert CORPUS.tokens[0] == 1


def documents_of(seed: int, *, has_mask: bool) -> Corpus:
    """Make a corpus of short documents, in which about half of the tokens are learned."""
    generator = np.random.default_rng(seed)
    tokens = [*generator.integers(0, 5, 96), 0]
    mask = generator.random(97) < 0.5
    return corpus_of(tokens, mask=mask if has_mask else None, name=f"documents {seed}")


MASKED, PLAIN = documents_of(1, has_mask=True), documents_of(2, has_mask=False)
# What is read, and the options of its loader.
CASES: dict[str, tuple[Corpus | Blend, dict[str, Any]]] = {
    "even": (CORPUS, {}),
    "blend": (Blend((CORPUS, MASKED, PLAIN), (0.5, 0.3, 0.2)), {}),
    "documents": (MASKED, {"packing": "documents"}),
    "whole documents": (Blend((MASKED, PLAIN), (2.0, 1.0)), {"packing": "whole_documents"}),
}


@pytest.mark.parametrize("ranges", [[(0, 1), (3, 1)], [(1, 2)]], ids=str)  # two ranks of cp
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(("corpus", "options"), CASES.values(), ids=CASES)
def test_all_layouts_see_the_same_batches(
    corpus: Corpus | Blend, options: dict[str, Any], ranks: int, ranges: list[tuple[int, int]]
) -> None:
    alone = loader_of(corpus, **options)
    together = [
        loader_of(corpus, rank, ranks, owned_ranges=ranges, **options) for rank in range(ranks)
    ]
    columns = [column for first, count in ranges for column in range(first, first + count)]
    for step in range(8):
        whole, parts = alone[step], [loader[step] for loader in together]
        assert torch.equal(
            torch.cat([part.tokens_BT for part in parts]), whole.tokens_BT[:, columns]
        )
        assert torch.equal(
            torch.cat([part.labels_BT for part in parts]), whole.labels_BT[:, columns]
        )
        positions_BT = torch.cat([part.positions_BT for part in parts])
        assert torch.equal(positions_BT, whole.positions_BT[:, columns])
        documents = [part.documents_BT for part in parts if part.documents_BT is not None]
        if whole.documents_BT is None:
            assert documents == []
        else:
            assert torch.equal(torch.cat(documents), whole.documents_BT)


@pytest.mark.parametrize("ranges", [[(0, 1), (3, 1)], [(1, 2)]], ids=str)  # two ranks of cp
@pytest.mark.parametrize(("corpus", "options"), CASES.values(), ids=CASES)
def test_tokens_ahead_are_shifted_before_the_cut(
    corpus: Corpus | Blend, options: dict[str, Any], ranges: list[tuple[int, int]]
) -> None:
    """Within the document and the row of each position, whichever rank holds the token ahead."""
    plain = loader_of(corpus, **options)
    part = loader_of(corpus, owned_ranges=ranges, mtp_layers=2, **options)
    columns = [column for first, count in ranges for column in range(first, first + count)]
    n_labels = 0
    for step in range(4):
        whole, batch = plain[step], part[step]
        assert torch.equal(batch.tokens_BT, whole.tokens_BT[:, columns])
        assert torch.equal(batch.labels_BT, whole.labels_BT[:, columns])
        assert torch.equal(batch.positions_BT, whole.positions_BT[:, columns])
        documents_BT, ahead_B2KT = whole.documents_BT, batch.ahead_B2KT
        assert ahead_B2KT is not None
        assert ahead_B2KT.shape == (len(whole.tokens_BT), 2, 2, len(columns))
        for row, depth, place in np.ndindex(len(whole.tokens_BT), 2, len(columns)):
            here, further = columns[place], columns[place] + depth + 1
            expected = [0, IGNORE_INDEX]
            if further < SEQ_LEN and (
                documents_BT is None or documents_BT[row, here] == documents_BT[row, further]
            ):
                expected = [whole.tokens_BT[row, further], whole.labels_BT[row, further]]
            assert ahead_B2KT[row, :, depth, place].tolist() == expected
            n_labels += expected[1] != IGNORE_INDEX
    assert n_labels > 4
    assert plain[0].ahead_B2KT is None


# 19 samples, 8 in a step: step 2 crosses into the second epoch.
@pytest.mark.parametrize(("done", "before", "after"), [(0, 1, 1), (2, 2, 4), (3, 4, 1), (1, 8, 2)])
@pytest.mark.parametrize(("corpus", "options"), CASES.values(), ids=CASES)
def test_a_run_resumes_exactly(
    corpus: Corpus | Blend, options: dict[str, Any], done: int, before: int, after: int
) -> None:
    saved = loader_of(corpus, before - 1, before, **options)
    for _ in range(done):
        next(saved)
    resumed = [loader_of(corpus, rank, after, **options) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(saved.state_dict())
    alone = loader_of(corpus, **options)
    for step in range(done, done + 4):
        assert torch.equal(rows([next(each) for each in resumed]), rows([alone[step]]))
    assert resumed[0].state_dict() == saved.state_dict() | {"next_step": done + 4}
    begun = loader_of(corpus, next_step=done, **options)
    assert torch.equal(rows([next(begun)]), rows([alone[done]]))


def test_what_a_state_holds() -> None:
    state = {
        "next_step": 0,
        "digest": CORPUS.digest,
        "seq_len": SEQ_LEN,
        "global_batch": 8,
        "order": "feistel",
        "order_seed": 3,
    }
    assert loader_of(CORPUS).state_dict() == state
    # A composer3d that does not know these samples refuses this order, and has no seed.
    whole = loader_of(MASKED, packing="whole_documents").state_dict()
    assert whole == state | {"digest": MASKED.digest, "order": "feistel of whole documents"}


def test_a_run_keeps_the_order_that_it_began_with() -> None:
    state = {
        "next_step": 1,
        "digest": CORPUS.digest,
        "seq_len": SEQ_LEN,
        "global_batch": 8,
        "seed": 3,
    }
    resumed = loader_of(CORPUS)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state  # as older versions read it
    firsts = (next(resumed).tokens_BT[:, 0] - 1) // SEQ_LEN
    assert firsts.tolist() == sample_order(19, 3, 8, 8, "shuffle").tolist()
    assert firsts.tolist() != sample_order(19, 3, 8, 8).tolist()


def test_a_state_can_be_loaded_after_batches_were_drawn() -> None:
    batches = loader_of(CORPUS)
    expected = rows(list(islice(batches, 3)))
    batches.load_state_dict(loader_of(CORPUS, next_step=1).state_dict())
    assert torch.equal(rows(list(islice(batches, 2))), expected[8:])
    assert batches.state_dict()["next_step"] == 3


CHANGED = corpus_of([*range(1, 77), 33])
# What is changed in a state, and what refuses it.
OTHER_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "order": ({"order": "sorted"}, 'order of samples "sorted", and this composer3d knows'),
    "data": (
        {"digest": CHANGED.digest},
        f"test has digest {CORPUS.digest}, .* with {CHANGED.digest}: the data has changed since",
    ),
    "seq_len": ({"seq_len": 8}, r"data\.seq_len = 4, but the checkpoint was made with 8"),
    "global_batch": ({"global_batch": 16}, r"data\.global_batch = 8, but .* made with 16"),
    "seed": ({"order_seed": 4}, r"data\.seed = 3, but the checkpoint was made with 4"),
}


@pytest.mark.parametrize(("changed", "message"), OTHER_STATES.values(), ids=OTHER_STATES)
def test_the_state_of_another_run_is_refused(changed: dict[str, Any], message: str) -> None:
    state = loader_of(CORPUS).state_dict()
    with refuses(message):
        loader_of(CORPUS).load_state_dict(state | changed)


@pytest.mark.parametrize(("n_tokens", "n_samples"), [(5, 1), (8, 1), (9, 2)])
def test_samples_of_a_corpus(n_tokens: int, n_samples: int) -> None:
    batch = next(loader_of(corpus_of(range(n_tokens)), global_batch=3))
    assert batch.tokens_BT.shape == (3, SEQ_LEN)
    assert set(batch.tokens_BT[:, 0].tolist()) == {SEQ_LEN * sample for sample in range(n_samples)}


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with refuses(r"corpus test has 4 tokens: too few for data\.seq_len = 4, which needs 5"):
        loader_of(corpus_of(range(4)))


def test_a_rank_gathers_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int]] = []

    def spy(n_samples: int, seed: int, first: int, count: int, order: Order) -> np.ndarray:
        drawn.append((first, count))
        return sample_order(n_samples, seed, first, count, order)

    monkeypatch.setattr(loader, "sample_order", spy)
    batches = loader_of(CORPUS, 3, 4)
    assert drawn == []
    assert next(batches).tokens_BT.shape == (2, SEQ_LEN)
    next(batches)
    assert drawn == [(6, 2), (14, 2)]


def test_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    numpy_before = np.random.get_state(legacy=False)
    next(loader_of(CORPUS))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert repr(np.random.get_state(legacy=False)) == repr(numpy_before)
