"""Which tokens a rank holds, and cutting tensors that way."""

import pytest
import torch
import torch.distributed as dist

from composer3d.parallel.context import ownership
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from tests.parallel.context.attention import group_of_all, random


def shard_and_unshard(balanced: bool) -> list[int]:
    """Cut tensors along several dimensions and join them again; return this rank's positions."""
    with pool_world():
        size, group = dist.get_world_size(), group_of_all()
        positions_BT = torch.arange(4 * size).repeat(2, 1)
        own_positions_BT = ownership.shard_sequence(positions_BT, 1, group, balanced=balanced)
        assert torch.equal(own_positions_BT[0], own_positions_BT[1])
        for dim, whole in (
            (1, positions_BT),
            (2, random(2, 3, 4 * size - 3, 5, seed=0)),
            (0, positions_BT.T),
        ):
            length = whole.shape[dim]
            shard = ownership.shard_sequence(whole, dim, group, balanced=balanced, fill=7)
            joined = ownership.unshard_sequence(shard, dim, group, balanced=balanced, length=length)
            assert torch.equal(joined, whole)
            padded = ownership.unshard_sequence(shard, dim, group, balanced=balanced)
            assert (padded.narrow(dim, length, padded.shape[dim] - length) == 7).all()
        return own_positions_BT[0].tolist()


@pytest.mark.parametrize(
    ("balanced", "positions"),
    [
        (True, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_shards_have_the_documented_order_and_join_again(
    pool: Pool, balanced: bool, positions: list[list[int]]
) -> None:
    assert pool.run(shard_and_unshard, {"balanced": balanced}, world_size=3) == positions


def check_refusals() -> None:
    with pool_world():
        group = group_of_all()
        with pytest.raises(
            ValueError, match="5 tokens cannot be cut into 4 equal chunks; give a value for `fill`"
        ):
            ownership.shard_sequence(torch.ones(5), 0, group)
        with pytest.raises(ValueError, match="5 tokens cannot be cut into 2 equal chunks"):
            ownership.shard_sequence(torch.ones(5), 0, group, balanced=False)
        with pytest.raises(ValueError, match="5 tokens a rank are not two chunks"):
            ownership.unshard_sequence(torch.ones(5), 0, group)
        with pytest.raises(ValueError, match=r"x would lose its gradient: use x\.detach\(\)"):
            ownership.unshard_sequence(torch.ones(4, requires_grad=True), 0, group)


def test_lengths_that_do_not_divide_are_refused(pool: Pool) -> None:
    pool.run(check_refusals, {}, world_size=2)


def shard_over_one_rank() -> None:
    with pool_world():
        shard = ownership.shard_sequence(torch.ones(5), 0, group_of_all())
        assert shard.shape == (5,)
        for tokens in (1, 5):
            whole = torch.arange(tokens)
            assert torch.equal(ownership.unshard_sequence(whole, 0, group_of_all()), whole)


def test_one_rank_cuts_no_chunks(pool: Pool) -> None:
    assert pool.run(shard_over_one_rank, {}, world_size=1) == [None]  # it raised nothing
