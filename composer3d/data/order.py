"""Which sample of which corpus a global sample is: the order in which a run sees its data.

Each epoch of a corpus has a permutation of its own. Of a blend, global sample g is taken from one
of the corpora. The corpus is chosen by the divisor method of Webster and Sainte-Laguë: the next
sample goes to the corpus with the smallest (2 n + 1) / weight, where n is the number of its samples
so far. After any number of samples, each of k corpora has its exact share of them, up to
1/2 + weight k / 2 samples, where the weights sum to 1. Nothing is drawn at random, and nothing is
remembered: the state after any number of samples is computed.

The order of a run never changes, because a checkpoint has the number of a step and not the samples.
So a new kind of order gets a new name, and the older ones stay.
"""

import hashlib
import heapq
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

# "feistel" computes the place of any sample alone. "shuffle" holds a permutation of all samples in
# memory, 8 bytes a sample; runs that began with it go on with it.
Order = Literal["feistel", "shuffle"]
ORDERS: tuple[str, ...] = get_args(Order)

_ROUNDS = 8

# The multipliers of splitmix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number
# Generators").
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def sample_order(
    n_samples: int, seed: int, first: int, count: int, order: Order = "feistel"
) -> np.ndarray:
    """Return the corpus samples behind the global samples ``first`` to ``first + count - 1``.

    Global sample g belongs to epoch g // n_samples. Each epoch has its own permutation of the
    corpus.

    Args:
        n_samples: samples in the corpus.
        seed: at least 0.
        first: the first global sample.
        count: the number of samples.
        order: the kind of permutation.

    Returns:
        Indices of corpus samples: int64, shape (count,).
    """
    epochs, places = np.divmod(np.arange(first, first + count), n_samples)
    result = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        if order == "shuffle":
            result[in_epoch] = _permutation(n_samples, seed, int(epoch))[places[in_epoch]]
        else:
            result[in_epoch] = permute(places[in_epoch], n_samples, _round_keys(seed, int(epoch)))
    return result


def permute(places: np.ndarray, n: int, keys: tuple[int, ...]) -> np.ndarray:
    """Apply a keyed permutation of 0 to n - 1 to some numbers, without a table.

    A Feistel network permutes the numbers of b bits, where 2^b is at least n (Luby and Rackoff
    1988, "How to construct pseudorandom permutations from pseudorandom functions"). Its halves
    have b // 2 and the other bits. A result of n or more enters the network again, until it is
    below n: cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). This
    takes less than two passes on average. The time and the memory do not depend on n.

    Args:
        places: int64, from 0 to n - 1.
        n: at least 1.
        keys: one for each round, of 64 bits.

    Returns:
        int64, in the shape of ``places``.
    """
    bits = max(2, (n - 1).bit_length())
    values = places.astype(np.uint64)
    walking = np.ones(values.shape, dtype=bool)
    while walking.any():
        values[walking] = _feistel(values[walking], bits, keys)
        walking = values >= np.uint64(n)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: tuple[int, ...]) -> np.ndarray:
    """Permute the numbers of ``bits`` bits: uint64 in, uint64 out."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << high_bits) - 1)
    high, low = values >> np.uint64(low_bits), values & low_mask
    # Each round changes one half by a function of the other, so it can be undone.
    for round_number, key in enumerate(keys):
        if round_number % 2 == 0:
            low = low ^ (_mix(high, key) & low_mask)
        else:
            high = high ^ (_mix(low, key) & high_mask)
    return (high << np.uint64(low_bits)) | low


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """Return 64 bits that depend on all bits of each value and of the key (splitmix64)."""
    x = values + np.uint64(key)  # arrays of uint64 wrap around
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


@lru_cache(maxsize=2)  # a batch may take samples of two epochs
def _permutation(n_samples: int, seed: int, epoch: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(n_samples)


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
