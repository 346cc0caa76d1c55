"""Which keys of a ring no query of a rank sees: a formula, compared with every pair of tokens."""

from itertools import product

import pytest

from composer3d.full.witness import _sees
from composer3d.parallel.context.ownership import owned_ranges
from composer3d.parallel.context.tiles import NO_WINDOW, NOT_CAUSAL


@pytest.mark.parametrize("window", [NO_WINDOW, NOT_CAUSAL, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("starts", [(), (4,), (3, 5), (8,), (1, 9, 11)])
def test_the_nearest_tokens_of_two_ranges_say_whether_a_query_sees_a_key(
    window: int, starts: tuple[int, ...]
) -> None:
    def is_seen(query: int, key: int) -> bool:
        is_one_document = not any(min(query, key) < start <= max(query, key) for start in starts)
        if window == NOT_CAUSAL:
            return is_one_document
        return is_one_document and key <= query and (window == NO_WINDOW or query - key < window)

    ranges = [
        (rank, each)
        for rank, is_balanced in product(range(3), (True, False))
        for each in owned_ranges(rank, 3, 4, balanced=is_balanced)
    ]
    compared = 0
    for (rank, query), (other, key) in product(ranges, ranges):
        if rank == other or query.length != key.length:
            continue  # not of the keys of another rank, in one order
        tokens = [range(each.position, each.position + each.length) for each in (query, key)]
        assert _sees(query, key, window, starts) == any(
            is_seen(one, another) for one, another in product(*tokens)
        )
        compared += 1
    assert compared == 30
