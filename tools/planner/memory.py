"""The memory of other programs, in bytes by kind.

The order of their steps is not known, so the largest parts of all kinds are added. The activations
in flight follow from the schedule's own actions: a forward adds those of its stage, a backward (or
its weight half) removes them.
"""

from functools import cache

from composer3d.planner.compute import head_product
from composer3d.planner.constants import SHIPPED, Constants
from composer3d.planner.memory import RankMemory, with_unseen
from composer3d.planner.time import stage_parameters
from tools.planner.foreign import ForeignLayout, ForeignSetup


def predict_memory(setup: ForeignSetup, constants: Constants = SHIPPED) -> list[RankMemory]:
    """Predict the peak of each pipeline rank.

    Raises:
        PlanError: the schedule cannot run with these numbers.
    """
    return [_rank(setup, constants, rank) for rank in range(setup.layout.pp)]


def peak(setup: ForeignSetup, constants: Constants = SHIPPED) -> RankMemory:
    """Return the pipeline rank that needs most."""
    return max(predict_memory(setup, constants), key=lambda rank: rank.device_bytes)


def _rank(setup: ForeignSetup, constants: Constants, rank: int) -> RankMemory:
    layout, sizes, precision = setup.layout, setup.sizes, setup.precision
    software = setup.software
    stages = [stage for stage in range(layout.stages) if layout.rank_of(stage) == rank]
    parameters = stage_parameters(setup)
    dense = sum(parameters[stage][0] for stage in stages)
    experts = sum(parameters[stage][1] for stage in stages)

    shards = layout.dp_shard * layout.cp
    expert_shards = max(
        1, layout.dp_shard * layout.cp * (1 if layout.expert_tp else layout.tp) // layout.ep
    )
    whole = dense + experts
    shard = dense / shards + experts / expert_shards

    block = (sizes.attention_parameters + sizes.dense_parameters) / layout.tp
    if sizes.expert_blocks:
        block = (sizes.attention_parameters + sizes.shared_parameters) / layout.tp
        block += sizes.expert_parameters / layout.ep / (layout.tp if layout.expert_tp else 1)
    is_first, is_last = 0 in stages, layout.stages - 1 in stages
    edge = (sizes.embedding_parameters * is_first + sizes.head_parameters * is_last) / layout.tp

    gathered = 0.0
    if layout.zero == 3:
        weights = 0.0  # the master copy of the optimizer is the shard
        gradients = precision.gradients * shard
        # The block that runs and the next one; a whole gradient, and its copies for the reduction.
        gathered = precision.gathered * (2 * block + edge)
        gathered += (2.0 + precision.reduced + 2 * precision.exchanged) * block
        if layout.pp > 1:  # gradients stay whole until the last micro-batch
            gathered += precision.gathered * (whole - block) + precision.gradients * (whole - block)
    elif layout.zero == 2:
        weights = precision.weights * whole
        # With a pipeline, they stay whole until the last micro-batch.
        gradients = precision.gradients * (whole if layout.pp > 1 else shard)
        gathered = (2.0 + precision.reduced + 2 * precision.exchanged) * 2 * block
    else:
        weights = precision.weights * whole
        gradients = (precision.gradients + precision.extra_gradients) * whole
    updated = shard if layout.zero >= 1 else whole
    optimizer = precision.optimizer * updated
    if software.offloads:
        weights = gradients = optimizer = 0.0

    buffers = software.bucket_bytes if layout.batch_ranks > 1 else 0.0
    if layout.tp > 1 and layout.sequence_parallel:
        buffers += 2.0 * setup.tokens * sizes.dim
    if software.keeps_blank_gradients:
        buffers += precision.weights * block
    activations = constants.activation_share * _activations(setup, rank, stages)
    logits = 0.0
    if is_last:
        product = head_product(setup)
        columns = product.columns if layout.loss_parallel else float(sizes.vocab)
        logits = product.rows * columns * software.loss_copies / setup.loss_chunks
        if setup.loss_chunks > 1:
            logits += 4.0 * sizes.head_parameters / layout.tp
    # Temporaries of the optimizer come when activations are gone.
    copies = 0.0 if software.offloads else software.step_copies * updated
    used = RankMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        buffers=buffers,
        activations=activations,
        logits=logits,
        step_copies=max(0.0, copies - activations - logits - gathered),
    )
    return with_unseen(used, constants)


def block_activations(setup: ForeignSetup, *, has_experts: bool) -> float:
    """Return the bytes that backward needs of one block and micro-batch, if nothing is repeated.

    After Korthikanti et al. 2022 (arXiv 2205.05198), equation 2, for the operators of this block.
    """
    sizes, layout, software = setup.sizes, setup.layout, setup.software
    is_gated = sizes.ffn_matrices == 3
    tokens = setup.tokens / layout.tp
    stream = setup.tokens * sizes.dim / (layout.tp if layout.sequence_parallel else 1)
    kept = 8.0 * stream  # the input and the output of both norms
    kept += tokens * (2 * sizes.query_width + 4 * sizes.kv_width)  # queries, keys, values
    kept += 2 * tokens * sizes.query_width  # the output of attention
    if software.attention == "unfused":
        kept += 2.0 * stream * software.dropout  # masks
        kept += _scores_bytes(setup)
    elif is_gated and not software.fuses_elementwise:
        kept += tokens * 2 * (sizes.query_width + sizes.kv_width)  # before the rotation
    width: float = sizes.ffn
    if has_experts:
        width = sizes.expert_width * sizes.experts_per_token + sizes.shared_width
        # Sent and received tokens. Those that were sent once are copied as they arrive.
        copies = 1 if software.sends_tokens_once else 2
        kept += copies * 2.0 * tokens * sizes.dim * sizes.experts_per_token
    if is_gated:
        kept += tokens * width * (6 if software.fuses_elementwise else 8)
    else:
        kept += tokens * width * 4
    return kept


def _scores_bytes(setup: ForeignSetup) -> float:
    """Return the bytes of attention scores that backward needs: probabilities, and dropout's."""
    per_score = 5.0 if setup.software.dropout else 4.0
    return per_score * setup.tokens * setup.sizes.heads / setup.layout.tp * setup.batch.seq_len


def _activations(setup: ForeignSetup, rank: int, stages: list[int]) -> float:
    """Return the bytes of all activations in flight at a rank's peak."""
    sizes, layout = setup.sizes, setup.layout
    full = {
        has_experts: block_activations(setup, has_experts=has_experts)
        for has_experts in (False, True)
    }
    outputs = _product_outputs(setup)
    stream = setup.tokens * sizes.dim / (layout.tp if layout.sequence_parallel else 1)
    by_stage: dict[int, float] = {}
    for stage, count in enumerate(layout.stage_blocks):
        if stage in stages:
            with_experts = setup.expert_blocks[stage]
            kept = (count - with_experts) * full[False] + with_experts * full[True]
            if setup.recompute == "full":
                repeated = sum(setup.recomputed.has(place, stage) for place in range(count))
                kept = kept * (1 - repeated / max(1, count)) + 2.0 * stream * repeated
            elif setup.recompute == "attention":
                if setup.software.attention == "unfused":
                    kept -= _scores_bytes(setup) * count
            elif setup.recompute == "half_blocks":
                kept = 0.5 * kept + stream * count
            elif setup.recompute in ("matrix", "half_matrix"):
                kept = 2.0 * stream + 2.0 * setup.tokens * sizes.query_width / layout.tp
                kept += outputs * (0.5 if setup.recompute == "half_matrix" else 1.0)
                kept *= count
            by_stage[stage] = kept
    if layout.pp > 1:  # the output of a stage stays until its gradient arrives
        by_stage = {stage: kept + 2.0 * stream for stage, kept in by_stage.items()}
    most = _most_in_flight(setup, rank, by_stage)
    if setup.recompute in ("full", "half_blocks", "half_matrix", "matrix"):
        most += full[bool(sizes.expert_blocks)]  # the block that backward has repeated
    return most


def _product_outputs(setup: ForeignSetup) -> float:
    """Return the bytes of the outputs of a block's products. Those of rows are not cut by tp."""
    sizes = setup.sizes
    width: float = sizes.ffn
    if sizes.expert_blocks:
        width = sizes.expert_width * sizes.experts_per_token + sizes.shared_width
    cut = sizes.query_width + 2 * sizes.kv_width + width * (sizes.ffn_matrices - 1)
    return 2.0 * setup.tokens * (cut / setup.layout.tp + 2 * sizes.dim)


def _most_in_flight(setup: ForeignSetup, rank: int, by_stage: dict[int, float]) -> float:
    """Walk through a rank's actions, and return the most bytes that are held at once."""
    layout = setup.layout
    if layout.pp == 1:
        return sum(by_stage.values())
    rounds = 3 * layout.pp
    count = min(setup.batch.micro_batches, rounds)
    if layout.schedule == "csv" or setup.batch.micro_batches % layout.pp:
        count = setup.batch.micro_batches
    profile = in_flight_profile(layout, count)[rank]
    if layout.schedule in ("GPipe", "LoopedBFS"):
        return setup.batch.micro_batches * sum(by_stage.values())
    return max(sum(held * by_stage[stage] for stage, held in moment) for moment in profile)


@cache
def in_flight_profile(
    layout: ForeignLayout, micro_batches: int
) -> list[list[tuple[tuple[int, int], ...]]]:
    """Return, for each rank, the largest sets of micro-batches in flight: (stage, number)."""
    profiles = []
    for cells in layout.cells(micro_batches):
        held: dict[int, int] = {}
        moments: set[tuple[tuple[int, int], ...]] = set()
        for cell in cells:
            for action in cell:
                if action.kind == "F":
                    held[action.stage] = held.get(action.stage, 0) + 1
            moments.add(tuple(sorted(held.items())))
            for action in cell:
                if action.kind in "BW":
                    held[action.stage] -= 1
        profiles.append(_without_smaller(moments))
    return profiles


def _without_smaller(
    moments: set[tuple[tuple[int, int], ...]],
) -> list[tuple[tuple[int, int], ...]]:
    """Drop the moments in which another one holds at least as many of every stage."""
    kept: list[tuple[tuple[int, int], ...]] = []
    for moment in sorted(moments, key=lambda moment: -sum(held for _, held in moment)):
        counts = dict(moment)
        if not any(
            all(dict(larger).get(stage, 0) >= held for stage, held in counts.items())
            for larger in kept
        ):
            kept.append(moment)
    return kept
