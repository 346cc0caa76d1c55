"""The planner for other programs: bytes against hand-computed figures, and zero bubbles."""

import random
from dataclasses import replace

import pytest

from composer3d.planner.compute import ffn_products
from composer3d.planner.constants import PRIORS
from composer3d.planner.pipeline import compiled, critical_path, length_s
from composer3d.planner.setup import BatchSizes, Machine
from composer3d.planner.simulate import StageTimes, simulate
from composer3d.planner.time import predict_time
from tests.planner.setups import device
from tools.planner.foreign import (
    ForeignLayout,
    ForeignSetup,
    ForeignSizes,
    ForeignSoftware,
    compiled_zero_bubble,
)
from tools.planner.memory import in_flight_profile, peak, predict_memory
from tools.planner.zero_bubble import zero_bubble_actions

PLAIN = replace(PRIORS, activation_share=1.0, context_gib=1e-9, slack_share=1.0)
SIZES = ForeignSizes(
    layers=8,
    dim=1024,
    heads=16,
    kv_heads=16,
    head_width=64,
    ffn=4096,
    vocab=1000,
    ffn_matrices=2,
)
BLOCK = 12 * 1024 * 1024


def setup_of(
    *, sizes: ForeignSizes = SIZES, micro_batches: int = 8, **layout: object
) -> ForeignSetup:
    stages = int(layout.get("pp", 1)) * int(layout.get("stages_per_rank", 1))  # type: ignore[call-overload]
    blocks = (sizes.layers // stages,) * stages
    return ForeignSetup(
        sizes=sizes,
        layout=ForeignLayout(stage_blocks=blocks, **layout),  # type: ignore[arg-type]
        batch=BatchSizes(seq_len=512, micro_batch=2, micro_batches=micro_batches),
        machine=Machine(device("A100-80GB"), 8, 2e11, 2e11, 2e10),
        software=ForeignSoftware(loss_copies=4.0, step_copies=0.0),
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
    sizes = replace(SIZES, experts=8, experts_per_token=2, expert_width=4096, expert_blocks=8)
    alone = peak(setup_of(sizes=sizes, dp_shard=8, zero=1), PLAIN)
    shared = peak(setup_of(sizes=sizes, dp_shard=8, ep=8, zero=1), PLAIN)
    experts = 8 * 8 * 2 * 1024 * 4096
    assert alone.weights - shared.weights == pytest.approx(2 * experts * 7 / 8)
    # Optimizer states are spread over all ranks in both cases.
    assert alone.optimizer == pytest.approx(shared.optimizer)


def test_tokens_that_are_sent_once_cost_less_time_and_memory() -> None:
    sizes = replace(SIZES, experts=64, experts_per_token=8, expert_width=512, expert_blocks=8)
    each = setup_of(sizes=sizes, dp_shard=64, ep=64, zero=1)
    once = replace(each, software=replace(each.software, sends_tokens_once=True))
    in_a_row = replace(once, software=replace(once.software, routes_to_neighbours=True))
    launches_s = 8 * 8 * 4 * 40e-6  # blocks, micro-batches, exchanges
    by_experts_s, by_nodes_s, by_one_node_s = (
        predict_time(setup, PRIORS).exposed_s["ep"] - launches_s for setup in (each, once, in_a_row)
    )
    # Independent experts are on 8 (1 - C(56, 8) / C(64, 8)) = 5.43 of 8 nodes; neighbours on one.
    assert by_nodes_s / by_one_node_s == pytest.approx(5.43, abs=0.01)
    assert by_experts_s / by_nodes_s > 8 / 5.43
    # Without a second copy of the tokens of 8 experts, in 16 bits.
    spared = peak(each, PLAIN).activations - peak(once, PLAIN).activations
    assert spared == 8 * 2 * (2 * 512) * 1024 * 8


def test_a_router_for_benchmarks_loads_all_experts_alike() -> None:
    sizes = replace(SIZES, experts=8, experts_per_token=2, expert_width=8192, expert_blocks=8)
    learned = setup_of(sizes=sizes, dp_shard=8, ep=8, zero=1)
    forced = replace(learned, software=replace(learned.software, balances_routing=True))
    rows = [ffn_products(setup, has_experts=True)[1].rows for setup in (learned, forced)]
    assert rows[1] == 2 * 512 * 2
    assert rows[0] == pytest.approx(1.15 * rows[1])


def test_a_pipeline_keeps_whole_gradients_until_the_end_of_a_step() -> None:
    held = 2 * BLOCK * 2  # two blocks of a middle stage in 16 bits
    ranks = predict_memory(setup_of(dp_shard=4, zero=2, pp=4), PLAIN)
    assert ranks[1].gradients == held
    assert predict_memory(setup_of(dp_shard=4, zero=1, pp=4), PLAIN)[1].gradients == held


def test_offload_leaves_states_on_the_host() -> None:
    setup = setup_of(dp_shard=4, zero=3)
    offloaded = peak(replace(setup, software=replace(setup.software, offloads=True)), PLAIN)
    assert offloaded.weights == offloaded.gradients == offloaded.optimizer == 0
    assert offloaded.activations == peak(setup, PLAIN).activations


def test_profiles_follow_the_schedule() -> None:
    layout = ForeignLayout(pp=4, stages_per_rank=2, schedule="Interleaved1F1B")
    first, *_, last = in_flight_profile(layout, 12)
    most = max(sum(held for _, held in moment) for moment in first)
    assert most == (2 - 1) * 4 + 2 * 3 + 1
    assert max(sum(held for _, held in moment) for moment in last) == 4 + 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_zero_bubble_is_complete_and_holds_what_it_may(in_flight: int) -> None:
    pp, count = 4, 12
    for rank, cells in enumerate(zero_bubble_actions(pp, count, in_flight)):
        assert sorted(str(cell[0]) for cell in cells) == sorted(
            f"{rank}{kind}{index}" for kind in "FIW" for index in range(count)
        )
        held = most = 0
        for (action,) in cells:
            held += {"F": 1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        assert most <= in_flight * pp - (in_flight - 1)


def test_more_memory_leaves_a_smaller_bubble() -> None:
    times = [StageTimes(1.0, 2.0, 1.0, 1.0)] * 4
    plain = length_s(compiled("1F1B", 4, 1, 12), times, [0.0] * 3)
    once = length_s(compiled_zero_bubble(4, 12, 1), times, [0.0] * 3)
    twice = length_s(compiled_zero_bubble(4, 12, 2), times, [0.0] * 3)
    assert plain == 3 * (12 + 3)
    # The paper's sections 2.2 and 3: (P-1)(F+I-W), and then nothing, as no rank waits for others.
    assert once == 3 * 12 + 3
    assert twice == 3 * 12


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_without_waiting_is_the_longest_span_of_a_rank(in_flight: int) -> None:
    chance = random.Random(in_flight)
    times = [StageTimes(*(chance.random() for _ in range(4))) for _ in range(4)]
    sends = [0.2 * chance.random() for _ in range(3)]
    rows = simulate(zero_bubble_actions(4, 9, in_flight), times, sends)
    spans = [row[-1].end_s - row[0].start_s for row in rows]
    nodes = compiled_zero_bubble(4, 9, in_flight)
    assert length_s(nodes, times, sends) == pytest.approx(max(spans), rel=1e-12)
    assert max(spans) < max(row[-1].end_s for row in rows)
    path = critical_path(nodes, times, sends)
    assert path.length_s(times, sends) == pytest.approx(max(spans), rel=1e-12)
    changed = [StageTimes(*(1.00001 * seconds for seconds in stage)) for stage in times]
    assert path.length_s(changed, sends) == pytest.approx(length_s(nodes, changed, sends), rel=1e-9)
