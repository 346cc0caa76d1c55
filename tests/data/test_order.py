"""The order of samples: a permutation in each epoch, of any size, that never changes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer3d.data.order import Order, permute, sample_order
from composer3d.verify.data import sample_at

KEYS = tuple(range(8))

# A checkpoint holds a step, not an order. With another permutation under the same name, a resumed
# run would see samples twice.
KNOWN: dict[Order, list[int]] = {
    "feistel": [1, 6, 4, 3, 2, 0, 7, 5, 6, 1, 2, 5, 4, 0, 3, 7, 5, 2, 3, 7],
    "shuffle": [2, 4, 3, 6, 5, 0, 1, 7, 1, 3, 7, 6, 0, 4, 2, 5, 5, 2, 6, 0],
}


@pytest.mark.parametrize("order", KNOWN)
def test_an_order_never_changes(order: Order) -> None:
    assert sample_order(8, 0, 0, 20, order).tolist() == KNOWN[order]


@pytest.mark.parametrize("order", KNOWN)
def test_each_epoch_is_a_permutation_of_its_own(order: Order) -> None:
    epochs = [sample_order(50, 7, 50 * epoch, 50, order) for epoch in range(3)]
    for samples in epochs:
        assert sorted(samples) == list(range(50))
    others = [*epochs, sample_order(50, 8, 0, 50, order), np.arange(50)]
    assert len({samples.tobytes() for samples in others}) == 5


@settings(deadline=None, max_examples=50)
@given(
    n_samples=st.integers(1, 40),
    seed=st.integers(0, 2**63),
    first=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 60)),
    order=st.sampled_from(["feistel", "shuffle"]),
)
def test_order_does_not_depend_on_how_a_range_is_cut(
    n_samples: int, seed: int, first: int, cuts: list[int], order: Order
) -> None:
    whole = sample_order(n_samples, seed, first, sum(cuts), order)
    starts = first + np.cumsum([0, *cuts])
    parts = [
        sample_order(n_samples, seed, int(start), cut, order)
        for start, cut in zip(starts, cuts, strict=False)
    ]
    assert whole.dtype == np.int64
    assert whole.tolist() == [number for part in parts for number in part]
    for epoch in range(-(-first // n_samples), (first + sum(cuts)) // n_samples):
        at = epoch * n_samples - first
        assert sorted(whole[at : at + n_samples]) == list(range(n_samples))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 255, 256, 257, 100_003])
def test_a_permutation_has_each_number_once(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, KEYS)), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 5, 50, 4097, 15 * 10**12 // 8192])
def test_the_order_is_the_one_that_proofs_compute(n: int) -> None:
    first = 2 * n - 3
    expected = [sample_at(place % n, n, 5, place // n) for place in range(first, first + 6)]
    assert sample_order(n, 5, first, 6).tolist() == expected


def test_an_order_of_trillions_of_tokens_takes_no_memory() -> None:
    n = 15 * 10**12 // 8192
    tracemalloc.start()
    order = sample_order(n, 0, n // 2, 2048)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(order.tolist())) == 2048
    assert peak_bytes < 1 << 20


def test_samples_are_spread_like_random_ones() -> None:
    n, bins = 1 << 16, 64
    order = permute(np.arange(n), n, KEYS)
    # Chi-squared of the place against the sample, and of the distances of neighbours: with 64 x 64
    # and 64 cells, random ones are below these limits with a probability above 0.9999.
    table, _, _ = np.histogram2d(np.arange(n), order, bins=bins)
    cells = n / bins**2
    assert ((table - cells) ** 2 / cells).sum() < 3969 + 4 * np.sqrt(2 * 3969)
    steps, _ = np.histogram(np.diff(order) % n, bins=bins, range=(0, n))
    cells = (n - 1) / bins
    assert ((steps - cells) ** 2 / cells).sum() < 63 + 4 * np.sqrt(2 * 63)
