"""Bytes by kind: against hand-computed figures of small setups."""

from dataclasses import replace
from math import prod

import pytest

from composer3d.planner.activations import unit_of
from composer3d.planner.constants import PRIORS
from composer3d.planner.memory import in_flight_profile, peak, predict_memory
from composer3d.planner.setup import Batch, Layout, Machine, Precision, Setup, Sizes, Software
from composer3d.planner.trained import Share
from composer3d.spec import hardware

PLAIN = replace(PRIORS, activation_share=1.0, context_gib=1e-9, slack_share=1.0)


def resized(sizes: Sizes, **fields: int) -> Sizes:
    """Return other sizes of a decoder with two feed-forward matrices, with its parameters."""
    new = replace(sizes, **fields)  # type: ignore[arg-type]
    return replace(
        new,
        attention_parameters=2 * new.dim * (new.query_width + new.kv_width),
        dense_parameters=2 * new.dim * new.ffn,
        embedding_parameters=new.vocab * new.dim,
        head_parameters=new.vocab * new.dim,
        expert_parameters=2 * new.dim * new.expert_width * new.experts,
        shared_parameters=new.experts * new.dim,
    )


SIZES = resized(
    Sizes(
        layers=8,
        dim=1024,
        heads=16,
        kv_heads=16,
        head_width=64,
        ffn=4096,
        vocab=1000,
        attention_parameters=0,
        dense_parameters=0,
        embedding_parameters=0,
        head_parameters=0,
        gated=False,
    )
)
BLOCK = 12 * 1024 * 1024


def setup_of(*, sizes: Sizes = SIZES, micro_batches: int = 8, **layout: object) -> Setup:
    row = hardware.by_name("A100-80GB")
    assert row is not None
    assert row.links is not None
    stages = int(layout.get("pp", 1)) * int(layout.get("stages_per_rank", 1))  # type: ignore[call-overload]
    blocks = (sizes.layers // stages,) * stages
    return Setup(
        sizes=sizes,
        layout=Layout(stage_blocks=blocks, **layout),  # type: ignore[arg-type]
        batch=Batch(seq_len=512, micro_batch=2, micro_batches=micro_batches),
        machine=Machine(row, 8, 2e11, 2e11, 2e10),
        precision=Precision(),
        software=Software(loss_copies=4.0, step_copies=0.0),
    )


def test_states_are_sharded_as_zero_says() -> None:
    total = 8 * BLOCK + 2 * 1000 * 1024
    whole = peak(setup_of(dp_shard=4, zero=0), PLAIN)
    assert (whole.weights, whole.gradients, whole.optimizer) == (2 * total, 2 * total, 12 * total)
    one = peak(setup_of(dp_shard=4, zero=1), PLAIN)
    assert (one.weights, one.gradients, one.optimizer) == (2 * total, 2 * total, 3 * total)
    two = peak(setup_of(dp_shard=4, zero=2), PLAIN)
    assert (two.weights, two.gradients, two.optimizer) == (2 * total, total / 2, 3 * total)
    three = peak(setup_of(dp_shard=4, zero=3), PLAIN)
    assert (three.weights, three.gradients, three.optimizer) == (0, total / 2, 3 * total)
    assert three.gathered >= 2 * 2 * BLOCK
    assert three.allocated_bytes < two.allocated_bytes < one.allocated_bytes


def test_replicas_do_not_shard() -> None:
    hsdp = peak(setup_of(dp_shard=4, dp_replicate=2, zero=3), PLAIN)
    fsdp = peak(setup_of(dp_shard=8, zero=3), PLAIN)
    assert hsdp.optimizer == 2 * fsdp.optimizer


def test_activations_of_a_block_are_those_of_the_paper() -> None:
    # Korthikanti et al. 2022, without dropout and with flash attention: 32 bytes for each element
    # of the stream (8 norms, 6 queries to values, 2 attention, 16 feed-forward).
    tokens = 2 * 512
    none = peak(setup_of(dp_shard=1, zero=0), PLAIN)
    assert none.activations == 8 * 32 * tokens * 1024
    full = peak(replace(setup_of(dp_shard=1, zero=0), recompute="full"), PLAIN)
    assert full.activations == 8 * 2 * tokens * 1024 + 32 * tokens * 1024


def test_tp_with_sequence_parallel_cuts_everything() -> None:
    one = peak(setup_of(zero=0), PLAIN)
    four = peak(setup_of(zero=0, tp=4), PLAIN)
    assert four.activations == one.activations / 4
    assert four.weights == one.weights / 4
    assert four.logits == one.logits / 4
    without = peak(setup_of(zero=0, tp=4, sequence_parallel=False), PLAIN)
    assert four.activations < without.activations < one.activations


def test_the_first_rank_of_1f1b_holds_pp_micro_batches() -> None:
    ranks = predict_memory(setup_of(zero=0, pp=4), PLAIN)
    per_micro_batch = 2 * 32 * 1024 * 1024 + 2 * 1024 * 1024  # two blocks, and the stage's output
    assert [rank.activations / per_micro_batch for rank in ranks] == [4, 3, 2, 1]
    assert ranks[0].logits == 0
    assert ranks[3].logits == 1024 * 1000 * 4
    gpipe = predict_memory(setup_of(zero=0, pp=4, schedule="GPipe"), PLAIN)
    assert gpipe[3].activations == 8 * per_micro_batch


def test_loss_in_parts_holds_one_part() -> None:
    whole = peak(setup_of(zero=0), PLAIN)
    parts = peak(replace(setup_of(zero=0), loss_chunks=4), PLAIN)
    assert parts.logits == whole.logits / 4 + 4 * 1000 * 1024


def test_experts_are_shared_by_ep() -> None:
    sizes = resized(SIZES, experts=8, experts_per_token=2, expert_width=4096, expert_blocks=8)
    alone = peak(setup_of(sizes=sizes, dp_shard=8, zero=1), PLAIN)
    shared = peak(setup_of(sizes=sizes, dp_shard=8, ep=8, zero=1), PLAIN)
    experts = 8 * 8 * 2 * 1024 * 4096
    assert alone.weights - shared.weights == pytest.approx(2 * experts * 7 / 8)
    # Optimizer states are spread over all ranks in both cases.
    assert alone.optimizer == pytest.approx(shared.optimizer)


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


def test_offload_leaves_states_on_the_host() -> None:
    setup = setup_of(dp_shard=4, zero=3)
    offloaded = peak(replace(setup, software=replace(setup.software, offloads=True)), PLAIN)
    assert offloaded.weights == offloaded.gradients == offloaded.optimizer == 0
    assert offloaded.activations == peak(setup, PLAIN).activations


def test_profiles_follow_the_schedule() -> None:
    first, *_, last = in_flight_profile("Interleaved1F1B", 4, 2, 12)
    most = max(sum(held for _, held in moment) for moment in first)
    assert most == (2 - 1) * 4 + 2 * 3 + 1
    assert max(sum(held for _, held in moment) for moment in last) == 4 + 1


def test_the_blocks_of_a_unit_are_gathered_and_reduced_together() -> None:
    own = replace(setup_of(dp_shard=4, zero=3), recompute="full")
    own = replace(own, software=replace(own.software, frees_by_block=True))
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
