"""The memory of our own runs: what FSDP's units hold."""

from dataclasses import replace
from math import prod

import pytest

from composer3d.planner.activations import unit_of
from composer3d.planner.memory import peak
from composer3d.planner.trained import Share
from tests.tools.test_planner_foreign import BLOCK, PLAIN, setup_of


@pytest.mark.parametrize(
    "axes", [{"dp_shard": 4}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 4}]
)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_each_element_of_an_expert_is_held_by_one_rank(axes: dict[str, int], ep: int) -> None:
    """The ranks of tp, which have whole experts, shard them as the ranks of cp do."""
    setup = setup_of(**axes, ep=ep, zero=3)
    ranks = prod(axes.values())
    dense, experts = 64.0 * 1024 / axes.get("tp", 1), 128.0 * 1024 / ep
    unit = unit_of(setup, dense, experts, Share(1.0, 1.0))
    assert unit.elements == dense + experts
    assert unit.shard == unit.trained_shard == (64 + 128) * 1024 / ranks


def test_the_blocks_of_a_unit_are_gathered_and_reduced_together() -> None:
    own = replace(setup_of(dp_shard=4, zero=3), recompute="full")
    one, two, four, eight = (
        peak(replace(own, layout=replace(own.layout, fsdp_blocks=blocks)), PLAIN)
        for blocks in (1, 2, 4, 8)
    )
    for few, many, blocks in ((one, two, 1), (two, four, 2)):
        # The unit that runs and the next one, or the gradients and the buffer of one.
        added = many.allocated_bytes - few.allocated_bytes
        assert added >= 2 * 2 * blocks * BLOCK
        assert many.weights == few.weights
        assert many.optimizer == few.optimizer
    # No other unit is gathered ahead.
    assert four.allocated_bytes < eight.allocated_bytes
