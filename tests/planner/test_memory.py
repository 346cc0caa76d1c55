"""The memory of our own runs: what FSDP's units hold, and what a gate keeps."""

from dataclasses import replace
from math import prod

import pytest

from composer3d.planner.activations import unit_of
from composer3d.planner.memory import RankMemory, memory_of_ranks, peak, predict_memory
from composer3d.planner.predict import fits, of_recipe
from composer3d.planner.trained import Share
from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import dry_run_of
from tests.planner.setups import device, recipe_of
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


def test_ranks_after_one_that_does_not_fit_are_not_predicted() -> None:
    setup = of_recipe(recipe_of("llama-175b-512-3d"), device("H100"))
    assert list(memory_of_ranks(setup)) == predict_memory(setup)
    assert fits(setup, memory_of_ranks(setup))

    memory_bytes = setup.machine.hardware.memory_gib * 2**30
    small, large = RankMemory(weights=1.0), RankMemory(weights=2 * memory_bytes)
    left = iter([small, large, small, small])
    assert not fits(setup, left)
    assert list(left) == [small, small]
    assert fits(setup, [small, small])
    # The context of the device counts, and the slack of the allocator does not.
    almost_all = RankMemory(weights=memory_bytes - 2**30)
    assert not fits(setup, [replace(almost_all, context=1.0)])
    assert fits(setup, [almost_all])  # as on a CPU
    assert fits(setup, [RankMemory(weights=memory_bytes / 2, slack=memory_bytes)])


BLOCKS = {
    "experts": ('model.architecture="moe"', 'model.preset="debug-bench-moe"'),
    "experts beside a shared one, in float32": (
        'model.architecture="moe"',
        'model.preset="debug-bench-moe"',
        "model.shared_ffn=384",
        'precision.compute="float32"',
    ),
    "clamped gates": (
        'model.architecture="gpt_oss"',
        'model.preset="gpt-oss-20b"',
        "model.dim=256",
        "model.ffn=256",
        "model.n_heads=4",
        "model.n_kv_heads=2",
        "model.experts=8",
        "model.window=0",
        "model.full_every=0",
    ),
    "norms of heads": ('model.preset="debug-bench"', "model.qk_norm=true"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_keeps_what_a_dry_run_counts(name: str, pool: Pool) -> None:
    def bytes_of(layers: int) -> tuple[float, int]:
        recipe = recipe_of(
            "debug-1-single",
            'run.device="cuda"',
            'precision.compute="bfloat16"',
            "data.seq_len=1024",
            "model.vocab=8192",  # so that the peak is in the loss
            *BLOCKS[name],
            f"model.n_layers={layers}",
        )
        (rank,) = predict_memory(of_recipe(recipe, device("H100")))
        return rank.activations, dry_run_of(pool, recipe).memory.activations

    (planned, counted), (of_fewer, counted_of_fewer) = bytes_of(4), bytes_of(2)
    assert planned - of_fewer == pytest.approx(counted - counted_of_fewer, rel=0.02)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_the_gate_of_a_shared_expert_keeps_what_a_dry_run_counts(
    tp: int, mode: str, pool: Pool
) -> None:
    def bytes_of(gate: str) -> tuple[float, int]:
        recipe = recipe_of(
            "debug-1-single",
            'model.architecture="moe"',
            'model.preset="debug-bench-moe"',
            "model.n_layers=3",
            "model.shared_ffn=384",
            f"model.shared_gate={gate}",
            f"mesh.tp={tp}",
            "data.seq_len=1024",
            'run.device="cuda"',
            'precision.compute="bfloat16"',
            f'memory.activation_checkpoint="{mode}"',
        )
        (rank,) = predict_memory(of_recipe(recipe, device("H100")))
        return rank.activations, dry_run_of(pool, recipe).memory.activations

    (planned, counted), (without, counted_without) = bytes_of("true"), bytes_of("false")
    assert planned - without == pytest.approx(counted - counted_without, rel=0.02)
