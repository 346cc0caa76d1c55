"""The order of samples is a function of (seed, step), on every layout and after every restart."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from composer3d.data import loader, sample_order
from composer3d.data.order import Order
from tests.data.samples import corpus_of, loader_of, rows
from tests.data.token_folders import refuses

SEQ_LEN = 4
# 19 samples of 4 tokens. Each sample starts with another token.
CORPUS = corpus_of(range(1, 78))


def steps_of_ranks(ranks: int, n_steps: int, state: dict | None = None) -> torch.Tensor:
    """Return the rows of ``n_steps`` steps on all ranks. In each step, rank 0 comes first."""
    loaders = [loader_of(CORPUS, rank, ranks) for rank in range(ranks)]
    for rank_loader in loaders:
        if state is not None:
            rank_loader.load_state_dict(state)
    return rows([next(rank_loader) for _ in range(n_steps) for rank_loader in loaders])


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


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_ranks_together_have_the_same_rows_in_the_same_order(ranks: int) -> None:
    assert torch.equal(steps_of_ranks(ranks, 6), steps_of_ranks(1, 6))


# 19 samples, 8 in a step: step 2 crosses into the second epoch.
@pytest.mark.parametrize("done", [0, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 4), (4, 1)])
def test_resume_continues_exactly(done: int, before: int, after: int) -> None:
    saved = loader_of(CORPUS, before - 1, before)
    for _ in range(done):
        next(saved)
    state = saved.state_dict()
    assert state == {
        "next_step": done,
        "digest": CORPUS.digest,
        "seq_len": SEQ_LEN,
        "global_batch": 8,
        "order": "feistel",
        "order_seed": 3,
    }
    assert torch.equal(steps_of_ranks(after, 4, state), steps_of_ranks(1, done + 4)[done * 8 :])
    assert torch.equal(rows([next(loader_of(CORPUS, next_step=done))]), steps_of_ranks(1, 1, state))


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
