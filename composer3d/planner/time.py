"""The time of a step: computing, the collectives of each axis, the pipeline, the optimizer.

A block's forward is a chain: its products wait for the collectives of tp, cp and ep, while the
gathers of FSDP run beside them. The times of stages go through the schedule's own actions. What
happens once a step is added. No torch here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate, pairwise, product
from math import log2
from typing import NamedTuple

from composer3d.planner import compute
from composer3d.planner.collectives import (
    ExpertChoice,
    GroupShape,
    Operation,
    all_to_all_s,
    collective_s,
    send_s,
    token_exchange_s,
)
from composer3d.planner.compute import Work
from composer3d.planner.constants import SHIPPED, Constants
from composer3d.planner.pipeline import Compiled, length_s
from composer3d.planner.setup import BlockKind, BlockMatrices, Setup
from composer3d.planner.simulate import StageTimes

LengthOf = Callable[[Compiled, Sequence[StageTimes], Sequence[float]], float]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of a step and its parts, in seconds.

    Attributes:
        step_s: the whole step.
        compute_s: products, attention and memory traffic of the slowest rank, without waiting.
        recompute_s: the part of it that repeats forward.
        uneven_s: another part of it: how much longer the slowest rank takes for all but
            ``recompute_s`` than ranks do on average.
        products_s: another part of it: the matrix products of blocks, on average over the ranks.
        attention_s: another part of it: attention itself, without its projections, likewise.
        head_s: another part of it: the head and the loss, likewise.
        bubble_s: waiting for other pipeline ranks, and for their messages.
        exposed_s: visible time of collectives, by axis: tp, cp, ep, dp (FSDP is dp).
        optimizer_s: the optimizer's step, with what it sends.
        overhead_s: the host, and the slowest of many ranks.
        host_s: the part of it that is the host.
    """

    step_s: float
    compute_s: float
    recompute_s: float
    bubble_s: float
    exposed_s: dict[str, float] = field(default_factory=dict)
    optimizer_s: float
    overhead_s: float
    uneven_s: float = 0.0
    products_s: float = 0.0
    attention_s: float = 0.0
    head_s: float = 0.0
    host_s: float = 0.0


def groups(setup: Setup) -> dict[str, GroupShape]:
    """Return the group of each axis."""
    axes = ("tp", "cp", "fsdp", "dp_replicate", "pp", "ep", "efsdp")
    return {axis: GroupShape(*setup.layout.ranks_of(axis)) for axis in axes}


def predict_time(
    setup: Setup, constants: Constants = SHIPPED, length: LengthOf = length_s
) -> StepTime:
    """Predict the time of a step.

    Args:
        setup: what runs, on what.
        constants: the fitted constants.
        length: returns the length of a compiled schedule; a fit passes a faster approximation.

    Raises:
        PlanError: the schedule cannot run with these numbers.
    """
    layout, batch = setup.layout, setup.batch
    rate = compute.rates(setup, constants)
    axis_groups = groups(setup)
    micro_batches = batch.micro_batches

    stage_times = _stage_parts(setup, constants)
    busy = [
        sum(part.busy_s for stage, part in enumerate(stage_times) if layout.rank_of(stage) == rank)
        for rank in range(layout.pp)
    ]
    slowest = max(range(layout.pp), key=busy.__getitem__)
    busy_s = micro_batches * busy[slowest]
    pipeline_s = _pipeline_s(setup, constants, stage_times, axis_groups["pp"], length)

    exposed = {"tp": 0.0, "cp": 0.0, "ep": 0.0, "dp": 0.0}
    recompute_s = 0.0
    for stage, part in enumerate(stage_times):
        if layout.rank_of(stage) == slowest:
            recompute_s += micro_batches * part.recompute_s
            for axis, seconds in part.exposed.items():
                exposed[axis] += micro_batches * seconds
    in_blocks_s = sum(exposed.values())
    mean_s = micro_batches / layout.pp * sum(part.own_s for part in stage_times)

    tail_s = _gradient_tail_s(setup, constants, stage_times)
    exposed["dp"] += tail_s
    optimizer_s = _optimizer_s(setup, rate) + _matrices_s(setup, rate, constants)
    step_s = pipeline_s + tail_s + optimizer_s + constants.step_overhead_s
    doublings = log2(max(1.0, layout.world_size / 8))
    total_s = step_s * (1 + constants.straggler_share * doublings)
    return StepTime(
        step_s=total_s,
        compute_s=busy_s - in_blocks_s,
        recompute_s=recompute_s,
        bubble_s=pipeline_s - busy_s,
        exposed_s=exposed,
        optimizer_s=optimizer_s,
        overhead_s=constants.step_overhead_s + total_s - step_s,
        uneven_s=busy_s - in_blocks_s - recompute_s - mean_s,
        products_s=micro_batches / layout.pp * sum(part.work.products_s for part in stage_times),
        attention_s=micro_batches / layout.pp * sum(part.work.attention_s for part in stage_times),
        head_s=micro_batches / layout.pp * sum(part.work.head_s for part in stage_times),
        host_s=constants.step_overhead_s,
    )


def _stage_parts(setup: Setup, constants: Constants) -> list["_BlockTimes"]:
    """Return the times of each stage."""
    blocks = _times_of_kinds(setup, constants, set().union(*setup.block_kinds))
    stage_times: list[_BlockTimes] = []
    for stage, counts in enumerate(setup.block_kinds):
        part = _BlockTimes(Work(), 0.0, {})
        for kind, block in blocks.items():
            if counts[kind]:
                part = part.plus(block.times(counts[kind]))
        if stage == setup.layout.stages - 1:
            part = part.plus(_losses(setup, constants))
        stage_times.append(part)
    return stage_times


def _times_of_kinds(
    setup: Setup, constants: Constants, kinds: Iterable[BlockKind]
) -> dict[BlockKind, "_BlockTimes"]:
    """Return the times of a block of each kind."""
    return {
        kind: _block(
            replace(setup, recompute=kind.recompute),
            constants,
            has_experts=kind.has_experts,
            window=kind.window,
            predicts=kind.predicts,
        )
        for kind in sorted(kinds)
    }


def _losses(setup: Setup, constants: Constants) -> "_BlockTimes":
    """Return the times of the head and the loss, and of those of multi-token prediction."""
    head = compute.head_work(setup, constants)
    recompute_s, exposed = head.recompute_s, {}
    if not setup.layout.loss_parallel:
        # The logits are gathered, in as many parts as there are chunks.
        logits_bytes = setup.precision.activations * setup.tokens * setup.sizes.vocab
        group = groups(setup)["tp"]
        gather_s = collective_s(
            "all_gather", group, logits_bytes, setup.machine, constants, setup.loss_chunks
        )
        again_s = gather_s if setup.repeats_loss else 0.0
        exposed["tp"] = gather_s + again_s
        head = head._replace(forward_s=head.forward_s + gather_s, recompute_s=recompute_s + again_s)
    return _BlockTimes(head, recompute_s, exposed).times(1 + setup.sizes.mtp_layers)


class PartTimes(NamedTuple):
    """The seconds in which parts of a model run forward and backward of one micro-batch.

    Attributes:
        blocks: a block of each kind.
        losses: the head and the loss, and those of multi-token prediction.
    """

    blocks: dict[BlockKind, float]
    losses: float


def part_times(setup: Setup, constants: Constants = SHIPPED) -> PartTimes:
    """Return the times of the parts that make up the stages of a pipeline, however it is cut.

    Raises:
        DeviceError: the device has no rate for the type of the products.
    """
    # Blocks of a kind take the same time: those that are checkpointed, and the others.
    places, stages = range(min(2, setup.recomputed.every)), (0, setup.layout.stages - 1)
    kinds = {
        setup.kind_of(block, place, stage)
        for block, place, stage in product(range(setup.sizes.layers), places, stages)
    }
    blocks = _times_of_kinds(setup, constants, kinds)
    return PartTimes(
        {kind: block.busy_s for kind, block in blocks.items()}, _losses(setup, constants).busy_s
    )


class _BlockTimes(NamedTuple):
    """The times of some blocks for one micro-batch.

    Attributes:
        work: with the visible time of collectives.
        recompute_s: what is computed again, without collectives.
        exposed: the visible time of collectives by axis, which is a part of ``work``.
    """

    work: Work
    recompute_s: float
    exposed: dict[str, float]

    @property
    def busy_s(self) -> float:
        """The seconds of forward and backward."""
        return self.work.forward_s + self.work.backward_s

    @property
    def own_s(self) -> float:
        """The seconds of these without collectives, and without what is computed again."""
        return self.busy_s - self.recompute_s - sum(self.exposed.values())

    def times(self, count: int) -> "_BlockTimes":
        """Return the times of ``count`` such parts."""
        return _BlockTimes(
            Work(*(count * seconds for seconds in self.work)),
            count * self.recompute_s,
            {axis: count * seconds for axis, seconds in self.exposed.items()},
        )

    def plus(self, other: "_BlockTimes") -> "_BlockTimes":
        """Return the times of both parts."""
        axes = self.exposed.keys() | other.exposed.keys()
        return _BlockTimes(
            Work(*(a + b for a, b in zip(self.work, other.work, strict=True))),
            self.recompute_s + other.recompute_s,
            {axis: self.exposed.get(axis, 0.0) + other.exposed.get(axis, 0.0) for axis in axes},
        )


def _block(
    setup: Setup, constants: Constants, *, has_experts: bool, window: int, predicts: bool = False
) -> _BlockTimes:
    """Return the time of one block for one micro-batch, with its collectives.

    Those of the projection before a depth of multi-token prediction, and of its lookup in the
    embedding, are small beside them, and left out.
    """
    layout = setup.layout
    axis_groups = groups(setup)
    work = compute.block_work(
        setup, constants, has_experts=has_experts, window=window, predicts=predicts
    )
    forward_s, input_s, weight_s, recompute_s = work[:4]
    repeats = {"full": 1.0, "half_blocks": 0.5}.get(setup.recompute, 0.0)
    exposed: dict[str, float] = {}

    def add(axis: str, forward: float, backward: float, again: float | None = None) -> None:
        nonlocal forward_s, input_s, recompute_s
        if again is None:
            again = repeats * forward
        forward_s += forward
        input_s += backward
        recompute_s += again
        exposed[axis] = exposed.get(axis, 0.0) + forward + again + backward

    if layout.tp > 1:
        add("tp", *_tensor_s(setup, constants, axis_groups["tp"], repeats, has_experts=has_experts))
    if has_experts and layout.ep > 1:
        one_s = _exchange_s(setup, constants, axis_groups["ep"])
        add("ep", 2 * one_s, 2 * one_s)
    if layout.cp > 1:
        forward_cp, backward_cp = _context_s(setup, constants, axis_groups["cp"], window)
        add("cp", forward_cp, backward_cp)

    held = _held_parameters(setup, has_experts=has_experts)
    weight_s += compute.summing_s(setup, held, compute.rates(setup, constants))

    # What runs beside the products: gathers, and the reductions of each micro-batch.
    gather_s, reduce_s = _sharding_s(setup, constants, axis_groups, has_experts=has_experts)
    dp_s = 0.0
    if gather_s or reduce_s:
        before = forward_s
        forward_s = _beside(forward_s, gather_s, constants)
        dp_s += forward_s - before
        backward_s = input_s + weight_s + recompute_s
        backward_gather_s = gather_s if layout.zero == 3 and layout.pp == 1 else 0.0
        added = _beside(backward_s, backward_gather_s + reduce_s, constants) - backward_s
        dp_s += added
        weight_s += added
    exposed["dp"] = dp_s
    with_collectives = work._replace(
        forward_s=forward_s, input_s=input_s, weight_s=weight_s, recompute_s=recompute_s
    )
    return _BlockTimes(with_collectives, work.recompute_s, exposed)


def _beside(compute_s: float, collective_s: float, constants: Constants) -> float:
    """Return the time of computing with a collective beside it."""
    hidden_s = min(compute_s, collective_s)
    return max(
        compute_s + constants.interference * hidden_s,
        collective_s + (1 - constants.hidden_share) * compute_s,
    )


def _tensor_s(
    setup: Setup, constants: Constants, group: GroupShape, repeats: float, *, has_experts: bool
) -> tuple[float, float, float]:
    """Return the visible seconds of tp in a block: of forward, of backward, and of its repetition.

    ``repeats`` is the share of forward that checkpointing repeats.
    """
    layout, sizes, software = setup.layout, setup.sizes, setup.software

    def collectives_s(operation: Operation, width: float) -> float:
        moved = setup.precision.activations * setup.tokens * width
        return collective_s(operation, group, moved, setup.machine, constants)

    latents = sizes.latents
    gathered = [sizes.dim]
    if latents is not None:
        gathered = [latents.query or sizes.dim, latents.keys]
    if layout.sequence_parallel:
        gathers_s = sum(collectives_s("all_gather", width) for width in gathered)
        sum_s = collectives_s("reduce_scatter", sizes.dim)
        ffn_s = collectives_s("all_gather", sizes.dim) + sum_s
        # Backward scatters what forward gathers, and takes as long.
        attention_s = (gathers_s + sum_s,) * 2
    else:
        sum_s = ffn_s = collectives_s("all_reduce", sizes.dim)
        attention_s = (sum_s, sum(collectives_s("all_reduce", width) for width in gathered))

    def visible_s(overlapped: tuple[str, str], of_attention_s: float, of_ffn_s: float) -> float:
        exposed = constants.tp_exposed if software.overlaps_tp in overlapped else 1.0
        # Attention has one pair of collectives, and the feed-forward layer another: also a shared
        # expert. Experts on ranks of their own need none; cut by tp, they cannot overlap theirs.
        ffn_exposed = exposed if not has_experts or sizes.shared_width else 0.0
        ffn_exposed += float(has_experts and layout.expert_tp)
        return exposed * of_attention_s + ffn_exposed * of_ffn_s

    in_forward, in_backward = ("forward", "both"), ("backward", "both")
    forward_s = visible_s(in_forward, attention_s[0], ffn_s)
    again_s = repeats * forward_s
    if software.stops_recompute_early:
        # The last sum of a block is not repeated. To keep products does not keep what collectives
        # have made of them.
        of_repetition = 1.0 if setup.recompute == "matrix" else repeats
        again_s = of_repetition * visible_s(in_forward, attention_s[0], ffn_s - sum_s)
    return forward_s, visible_s(in_backward, attention_s[1], ffn_s), again_s


def _exchange_s(setup: Setup, constants: Constants, group: GroupShape) -> float:
    """Return the seconds in which all tokens of a micro-batch travel to the ranks of experts."""
    sizes, software = setup.sizes, setup.software
    rows = setup.tokens * (1 if software.sends_tokens_once else sizes.experts_per_token)
    sent = setup.precision.activations * rows * sizes.dim / setup.layout.tp
    if not software.sends_tokens_once:
        return all_to_all_s(group, sent, setup.machine, constants)
    routing = ExpertChoice(sizes.experts, sizes.experts_per_token, software.routes_to_neighbours)
    return token_exchange_s(group, sent, routing, setup.machine, constants)


def _context_s(
    setup: Setup, constants: Constants, group: GroupShape, window: int
) -> tuple[float, float]:
    """Return the visible seconds of context parallelism in forward and backward of a block.

    ``window`` is that of its attention, beside which a ring sends all keys and values. Latents may
    take their place.
    """
    layout, sizes, machine = setup.layout, setup.sizes, setup.machine
    width = setup.precision.activations
    # With fewer heads of keys than ranks of tp, each rank has a whole one.
    kv_width = max(sizes.head_width, sizes.kv_width / layout.tp)
    kv_bytes = width * setup.tokens * 2 * kv_width
    if layout.sends_latents and sizes.latents is not None:
        kv_bytes = width * setup.tokens * sizes.latents.keys
    if layout.cp_method == "ulysses":
        # Queries, keys, values and the output change from tokens to heads; backward as often.
        moved = width * setup.tokens * 2 * (sizes.query_width / layout.tp + kv_width)
        one_s = all_to_all_s(group, moved, machine, constants)
        return one_s, one_s
    if layout.cp_method == "allgather":
        all_bytes = kv_bytes * layout.cp
        gather_s = collective_s("all_gather", group, all_bytes, machine, constants)
        # Gradients of keys and values are summed in float32.
        wide_bytes = all_bytes * max(width, 4) / width
        reduce_s = collective_s("reduce_scatter", group, wide_bytes, machine, constants)
        return gather_s, gather_s + reduce_s
    # A ring: each hop runs beside the attention of the block that came before.
    hop_s = send_s(group, kv_bytes, machine, constants)
    forward_s, backward_s = compute.attend_s(setup, compute.rates(setup, constants), window)
    visible_forward = _beside(forward_s, (layout.cp - 1) * hop_s, constants) - forward_s
    # Backward also passes the gradients of keys and values on, in float32.
    hops = 1 + max(width, 4) / width
    visible_backward = _beside(backward_s, (layout.cp - 1) * hop_s * hops, constants) - backward_s
    return visible_forward, visible_backward


def _held_parameters(setup: Setup, *, has_experts: bool) -> float:
    """Return the parameters of one block on one rank, before they are sharded over data ranks."""
    layout, sizes = setup.layout, setup.sizes
    if not has_experts:
        return sizes.attention_on_rank(layout.tp) + sizes.dense_parameters / layout.tp
    experts = sizes.expert_parameters / layout.ep / (layout.tp if layout.expert_tp else 1)
    dense = sizes.attention_on_rank(layout.tp) + sizes.shared_parameters / layout.tp
    return dense + experts


def _sharding_s(
    setup: Setup, constants: Constants, axis_groups: dict[str, GroupShape], *, has_experts: bool
) -> tuple[float, float]:
    """Return the seconds of a block's gather and of its reduction, for one micro-batch.

    They are its share of those of its unit, whose blocks share a collective.
    """
    layout, precision, machine = setup.layout, setup.precision, setup.machine
    blocks = layout.blocks_of_unit
    ranks = axis_groups["fsdp"].ranks
    if layout.zero < 2 or ranks * layout.dp_replicate == 1:
        return 0.0, 0.0
    held = _held_parameters(setup, has_experts=has_experts)
    parts = [(held, axis_groups["fsdp"])]
    if has_experts:
        experts = setup.sizes.expert_parameters / layout.ep
        experts /= layout.tp if layout.expert_tp else 1
        parts = [(held - experts, axis_groups["fsdp"]), (experts, axis_groups["efsdp"])]
    gather_s = reduce_s = replicas_s = 0.0
    for of_block, group in parts:
        parameters = blocks * of_block
        gather_s += collective_s(
            "all_gather", group, precision.gathered * parameters, machine, constants
        )
        reduce_s += _scattered_s(setup, constants, group, parameters)
        replicas = axis_groups["dp_replicate"]
        shard_bytes = precision.reduced * parameters / group.ranks
        replicas_s += collective_s("all_reduce", replicas, shard_bytes, machine, constants)
    gather_s, reduce_s, replicas_s = (
        seconds / blocks for seconds in (gather_s, reduce_s, replicas_s)
    )
    once = setup.batch.micro_batches
    if layout.zero == 2:
        gather_s /= once
    if layout.pp > 1:
        reduce_s /= once
    # Replicas sum once a step.
    return gather_s, reduce_s + replicas_s / once


def _scattered_s(setup: Setup, constants: Constants, group: GroupShape, parameters: float) -> float:
    """Return the seconds in which gradients are summed over ``group``, a shard for each rank."""
    precision, machine = setup.precision, setup.machine
    if precision.exchanged:
        return all_to_all_s(group, precision.exchanged * parameters, machine, constants)
    return collective_s("reduce_scatter", group, precision.reduced * parameters, machine, constants)


def _pipeline_s(
    setup: Setup,
    constants: Constants,
    parts: list[_BlockTimes],
    group: GroupShape,
    length: LengthOf,
) -> float:
    """Return the seconds of all micro-batches, from the schedule's own actions."""
    layout, micro_batches = setup.layout, setup.batch.micro_batches
    works = [part.work for part in parts]
    if layout.pp == 1:
        return micro_batches * sum(work.forward_s + work.backward_s for work in works)
    times, sends_s = _actions_s(setup, constants, works, group)
    return _simulated_s(setup, times, sends_s, length)


class PipelineTimes(NamedTuple):
    """What a simulation of the pipeline needs.

    Attributes:
        stages: the times of each stage for one micro-batch.
        sends_s: the seconds of a message over each boundary between stages.
    """

    stages: list[StageTimes]
    sends_s: list[float]


def pipeline_times(setup: Setup, constants: Constants = SHIPPED) -> PipelineTimes:
    """Predict the times of the actions of a pipeline, which ``predict_time`` simulates.

    Raises:
        DeviceError: the device has no rate for the type of the products.
    """
    works = [part.work for part in _stage_parts(setup, constants)]
    return _actions_s(setup, constants, works, groups(setup)["pp"])


def _actions_s(
    setup: Setup, constants: Constants, works: list[Work], group: GroupShape
) -> PipelineTimes:
    """Return the times of the actions of each stage, and of the messages between them."""
    # Each rank of tp sends its part.
    message = setup.precision.activations * setup.tokens * setup.sizes.dim / setup.layout.tp
    boundaries = _boundary_s(setup, constants, group, message)
    blocking_s = 0.0 if setup.software.overlaps_sends else max(boundaries)
    times = [
        StageTimes(
            work.forward_s + 0.5 * blocking_s,
            work.backward_s + 0.5 * blocking_s,
            work.input_s + work.recompute_s + 0.5 * blocking_s,
            work.weight_s,
        )
        for work in works
    ]
    return PipelineTimes(times, [max(0.0, hop_s - 0.5 * blocking_s) for hop_s in boundaries])


def _boundary_s(
    setup: Setup, constants: Constants, group: GroupShape, message_bytes: float
) -> list[float]:
    """Return the seconds of a message over each boundary between stages."""
    layout, machine = setup.layout, setup.machine
    inside_s = send_s(GroupShape(group.ranks, 1), message_bytes, machine, constants)
    between_s = send_s(
        GroupShape(group.ranks, machine.devices_per_node), message_bytes, machine, constants
    )
    found = []
    for stage in range(layout.stages - 1):
        here = layout.rank_of(stage) * group.stride
        there = layout.rank_of(stage + 1) * group.stride
        same = here // machine.devices_per_node == there // machine.devices_per_node
        found.append(inside_s if same else between_s)
    return found


def _simulated_s(
    setup: Setup, times: list[StageTimes], sends: list[float], length: LengthOf
) -> float:
    """Simulate the schedule, or, of very many micro-batches, its start and its steady state."""
    layout, count = setup.layout, setup.batch.micro_batches

    def steps(micro_batches: int) -> float:
        return length(layout.compiled(micro_batches), times, sends)

    small = 3 * layout.pp
    if layout.schedule == "csv" or count <= small + layout.pp or count % layout.pp:
        return steps(count)
    # Each further round of pp micro-batches takes the same time.
    longer = steps(small)
    rounds = (count - small) // layout.pp
    return longer + rounds * (longer - steps(small - layout.pp))


def stage_parameters(setup: Setup) -> list[tuple[float, float]]:
    """Return the parameters that a rank of each stage holds before sharding: dense, of experts."""
    layout, sizes = setup.layout, setup.sizes
    found = []
    for stage, (count, with_experts) in enumerate(
        zip(layout.stage_blocks, setup.expert_blocks, strict=True)
    ):
        dense: float = (count - with_experts) * sizes.dense_parameters
        dense += with_experts * sizes.shared_parameters
        if stage == 0:
            dense += sizes.embedding_parameters
        is_last = stage == layout.stages - 1
        if is_last and not (sizes.tied and layout.stages == 1):
            dense += sizes.head_parameters
        experts = with_experts * sizes.expert_parameters / layout.ep
        if layout.expert_tp:
            experts /= layout.tp
        whole = count * sizes.attention_on_rank(layout.tp)
        if is_last:
            whole += sizes.mtp_layers * sizes.merge_parameters
        found.append((whole + dense / layout.tp, experts))
    return found


def _first_unit_s(setup: Setup, constants: Constants, axis_groups: dict[str, GroupShape]) -> float:
    """Return the visible seconds of a step that a first unit of several blocks adds.

    Nothing runs until all of them are gathered, and when their gradients are reduced, nothing is
    left to run. Of a first unit of one block, nothing is counted.
    """
    has_experts = setup.sizes.expert_blocks > 0
    one_block = replace(setup, layout=replace(setup.layout, fsdp_blocks=1))
    of_unit, of_block = (
        sum(_sharding_s(each, constants, axis_groups, has_experts=has_experts))
        for each in (setup, one_block)
    )
    added_s = setup.layout.blocks_of_unit * of_unit - of_block
    return setup.batch.micro_batches * added_s


def _largest_rank(setup: Setup) -> tuple[float, float]:
    """Return the parameters, dense and of experts, of the pipeline rank that holds most."""
    layout = setup.layout
    held = [[0.0, 0.0] for _ in range(layout.pp)]
    for stage, (dense, experts) in enumerate(stage_parameters(setup)):
        rank = layout.rank_of(stage)
        held[rank][0] += dense
        held[rank][1] += experts
    dense, experts = max(held, key=sum)
    return dense, experts


def _gradient_tail_s(setup: Setup, constants: Constants, parts: list[_BlockTimes]) -> float:
    """Return the visible seconds of what moves once a step: gradients, and updated parameters."""
    layout, precision, machine = setup.layout, setup.precision, setup.machine
    software = setup.software
    axis_groups = groups(setup)
    replicas = axis_groups["dp_replicate"]
    if layout.zero >= 2:
        # The embedding's gather is the first thing of a step, and its reduction the last.
        sizes = setup.sizes
        held = sizes.embedding_parameters / layout.tp
        fsdp = axis_groups["fsdp"]
        seconds = collective_s(
            "all_gather", fsdp, precision.gathered * held, machine, constants
        ) + _scattered_s(setup, constants, fsdp, held)
        shard_bytes = precision.reduced * held / fsdp.ranks
        replicas_s = collective_s("all_reduce", replicas, shard_bytes, machine, constants)
        seconds *= setup.batch.micro_batches if layout.pp == 1 else 1
        return seconds + replicas_s + _first_unit_s(setup, constants, axis_groups)

    dense, experts = _largest_rank(setup)
    reduce_s = gather_s = 0.0
    units_of_stage = layout.units_of_stage(max(layout.stage_blocks))
    units_on_rank = max(1, units_of_stage * layout.stages_per_rank)
    for held, shard in ((dense, axis_groups["fsdp"]), (experts, axis_groups["efsdp"])):
        if not held:
            continue
        if layout.zero == 1:
            reduce_s += _scattered_s(setup, constants, shard, held)
            reduce_s += collective_s(
                "all_reduce",
                replicas,
                precision.reduced * held / shard.ranks,
                machine,
                constants,
            )
            # A block has about nine tensors.
            messages = units_on_rank * (9 if software.gathers_tensors else 1)
            gather_s += collective_s(
                "all_gather", shard, precision.gathered * held, machine, constants, messages
            )
        else:
            everyone = GroupShape(shard.ranks * layout.dp_replicate, shard.stride)
            reduce_s += collective_s(
                "all_reduce", everyone, precision.reduced * held, machine, constants
            )
    # The reduction runs behind the last micro-batch's backward of this rank, the gather behind the
    # first one's forward. With several stages a rank, those of a stage run behind the others'
    # turns, each of pp micro-batches.
    turns = layout.pp if layout.stages_per_rank > 1 else 1
    if software.overlaps_gradients:
        last = max(part.work.backward_s for part in parts) * layout.stages_per_rank
        reduce_s = _behind(last, reduce_s, turns, layout.stages_per_rank, constants)
    if software.overlaps_gathers:
        first = max(part.work.forward_s for part in parts) * layout.stages_per_rank
        gather_s = _behind(first, gather_s, turns, layout.stages_per_rank, constants)
    return reduce_s + gather_s


def _behind(
    compute_s: float, collective_s: float, turns: int, stages: int, constants: Constants
) -> float:
    """Return the visible seconds of a collective that runs behind computing.

    Args:
        compute_s: of one micro-batch on all stages of a rank.
        collective_s: of all stages of the rank.
        turns: the micro-batches of a stage that follow each other.
        stages: of the rank.
        constants: the shares that can be hidden.
    """
    one = _beside(compute_s / stages, collective_s / stages, constants) - compute_s / stages
    if stages == 1:
        return one
    window_s = turns * compute_s * (stages - 1) / stages
    rest_s = collective_s * (stages - 1) / stages
    return one + _beside(window_s, rest_s, constants) - window_s


def _optimizer_s(setup: Setup, rate: compute.ComputeRates) -> float:
    """Return the seconds of the norm, the clipping and the optimizer's step."""
    layout, precision = setup.layout, setup.precision
    dense, experts = _largest_rank(setup)
    sharded = dense / layout.ranks_of("fsdp").size + experts / layout.ranks_of("efsdp").size
    updated = sharded if layout.zero >= 1 else dense + experts
    reduced = sharded if layout.zero >= 2 else dense + experts
    # The optimizer reads and writes its state, and reads gradients several times.
    state_bytes = precision.optimizer * updated
    state_bytes -= max(saved_by_matrices(setup, held) for held in matrices_of_ranks(setup))
    moved = 2 * state_bytes + updated * (2 * precision.gradients + 10.0)
    moved += reduced * (precision.gradients + 4.0)
    seconds = moved / rate.memory
    if setup.software.offloads:
        links = setup.machine.hardware.links
        host_bytes_s = 0.33 * links.host_bytes_s if links else 20e9
        seconds += updated * 28.0 / host_bytes_s
    return seconds


def _matrices_s(setup: Setup, rate: compute.ComputeRates, constants: Constants) -> float:
    """Return the seconds in which an optimizer orthogonalises matrices (``planner.matrices``).

    The ranks of a stage share the work evenly, but one matrix is the work of one rank. Each part
    travels to its owner once, and the result to all that hold it.
    """
    matrices, layout = setup.matrices, setup.layout
    if matrices is None:
        return 0.0
    group = GroupShape(*layout.ranks_of("stage"))
    held = BlockMatrices(*map(max, zip(*matrices_of_ranks(setup), strict=True)))
    computed_flops = max(held.flops / group.ranks, matrices.largest.flops)
    matrix = "float32" if matrices.dtype == "float64" else matrices.dtype
    flops_s = setup.machine.hardware.matrix_rate(matrix) * rate.share
    to_owners, back = 0.0, 0.0
    of_others = held.elements - held.of_experts
    for elements, axis, tp in ((of_others, "fsdp", layout.tp), (held.of_experts, "efsdp", 1)):
        shards = layout.ranks_of(axis).size
        parts = tp * (shards if layout.zero else 1)
        replicas = layout.dp_replicate * (1 if layout.zero else shards)
        # What a rank holds whole, it computes: nothing travels to the owner, nor back to it.
        to_owners += elements * (parts > 1)
        back += elements * (replicas - (parts == 1))
    seconds = computed_flops / flops_s
    for travelling in (to_owners, back):
        sent_bytes = matrices.element_bytes * travelling / group.ranks
        seconds += all_to_all_s(group, sent_bytes, setup.machine, constants)
    return seconds


def saved_by_matrices(setup: Setup, held: BlockMatrices) -> float:
    """Return the bytes by which the state of matrices is smaller than ``Precision.optimizer`` says.

    ``held`` are those that the ranks of a pipeline rank hold together. The result is for one rank.
    """
    layout = setup.layout
    if setup.matrices is None:
        return 0.0
    shard = held.elements * layout.replicas / layout.ranks_of("stage").size
    return setup.matrices.saved_bytes * shard


def matrices_of_ranks(setup: Setup) -> list[BlockMatrices]:
    """Return the matrices that the ranks of each pipeline rank hold together."""
    layout, matrices = setup.layout, setup.matrices
    if matrices is None:
        return [BlockMatrices()] * layout.pp
    held = [BlockMatrices()] * layout.pp
    ends = accumulate(layout.stage_blocks, initial=0)
    for stage, (begin, end) in enumerate(pairwise(ends)):
        rank = layout.rank_of(stage)
        held[rank] = reduce(BlockMatrices.plus, matrices.blocks[begin:end], held[rank])
    return held
