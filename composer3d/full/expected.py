"""What a rank of the job must send, and over which ranks each gradient must be summed. No torch.

Nothing here comes from the code that sends: the traffic is that of ``planner.traffic``, the ranks
are those of ``places``, and the sums of gradients follow from which ranks see other tokens.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from composer3d.full import places
from composer3d.models.table import Row
from composer3d.planner.stages import stage_layers, stages_by_rank
from composer3d.planner.traffic import DTYPE_BYTES, Flow, cut_of, flows, rows_for_experts
from composer3d.planner.trained import is_trained
from composer3d.recipe.schema import Recipe


class CallsAndBytes(NamedTuple):
    """The number of calls of an operation, and the bytes that a rank sends in all of them."""

    calls: int
    sent_bytes: float


# The key is the ranks of a group, and an operation.
Traffic = dict[tuple[tuple[int, ...], str], CallsAndBytes]


def traffic(recipe: Recipe, rank: int) -> Traffic:
    """Return what the first rank of a pipeline rank sends in a step, without pipeline messages.

    ``messages`` has those between pipeline ranks. What cp sends in a ring also counts as received.
    """
    found: dict[tuple[tuple[int, ...], str], CallsAndBytes] = defaultdict(
        lambda: CallsAndBytes(0, 0.0)
    )
    pp_rank = rank // (recipe.mesh.world_size // recipe.mesh.pp)

    def add(operation: str, flow: Flow) -> None:
        key = places.members(flow.axis, rank, recipe.mesh), operation
        before = found[key]
        found[key] = CallsAndBytes(before.calls + flow.count, before.sent_bytes + flow.sent_bytes)

    for flow in flows(recipe, pp_rank):
        if flow.axis == "pp":
            continue
        add(flow.operation, flow)
        if flow.operation == "send":
            add("recv", flow)
    return dict(found)


def uneven_exchange(recipe: Recipe, rank: int) -> tuple[tuple[int, ...], str] | None:
    """Return the key of the exchange over ep, if ep does not divide its rows; else None.

    Then the bytes of ``traffic`` are a mean, and no rank may send just as many.
    """
    ep = recipe.mesh.ep
    is_uneven = bool(recipe.model.experts) and rows_for_experts(recipe) % ep > 0
    return (places.members("ep", rank, recipe.mesh), "all_to_all") if is_uneven else None


def maxima(recipe: Recipe, rank: int) -> int:
    """Return how many collectives of a micro-batch take a maximum: those of logits, over tp.

    All others sum.
    """
    pp_rank = rank // (recipe.mesh.world_size // recipe.mesh.pp)
    counts = [one.count for one in flows(recipe, pp_rank) if one.purpose == "maxima of logits"]
    return sum(counts) // recipe.micro_batches


class ScheduledMessage(NamedTuple):
    """A message of a step between two pipeline ranks.

    Attributes:
        sender, receiver: pipeline ranks.
        stage: the stage that computed its content.
        micro_batch: number of the micro-batch.
        kind: "activations" or "gradients".
    """

    sender: int
    receiver: int
    stage: int
    micro_batch: int
    kind: str


def messages(recipe: Recipe) -> Iterator[ScheduledMessage]:
    """Yield each message that the stages of one pipeline must send in a step, in no order."""
    rank_of = {stage: rank for rank, held in enumerate(stages_by_rank(recipe)) for stage in held}
    for stage in range(len(rank_of) - 1):
        before, after = rank_of[stage], rank_of[stage + 1]
        if before == after:
            continue
        for micro_batch in range(recipe.micro_batches):
            yield ScheduledMessage(before, after, stage, micro_batch, "activations")
            yield ScheduledMessage(after, before, stage + 1, micro_batch, "gradients")


def elements_of_message(recipe: Recipe) -> int:
    """Return the elements of a message between stages: a rank's shard of one micro-batch."""
    mesh = recipe.mesh
    cuts = mesh.cp * (mesh.tp if recipe.parallel.sequence_parallel else 1)
    return recipe.data.micro_batch * (recipe.data.seq_len // cuts) * recipe.model.dim


def dtype_bytes(recipe: Recipe) -> int:
    """Return the bytes per element of a message between stages."""
    return DTYPE_BYTES[recipe.precision.computes_in]


def tied_messages(recipe: Recipe) -> Counter[tuple[int, int]]:
    """Return how many messages of tied parameters go from one pipeline rank to another."""
    held = stages_by_rank(recipe)
    last = max(map(max, held))
    ends = tuple(next(r for r, stages in enumerate(held) if end in stages) for end in (0, last))
    tied = {row.tied_to for row in recipe.parameters.last if row.tied_to}
    found: Counter[tuple[int, int]] = Counter()
    if ends[0] != ends[1]:
        for name in tied:
            found[ends[0], ends[1]] += 1
            found[ends[1], ends[0]] += is_trained(recipe.optim, name)
    return found


def gradients(recipe: Recipe, rank: int) -> dict[str, tuple[int, ...] | None]:
    """Return the ranks over which the gradient of each parameter of a rank must be summed.

    The value is None for a frozen parameter. Ranks of dp_replicate, dp_shard and cp see other
    tokens. Ranks of tp see the same tokens; but if they compute on parts of the sequence or of the
    heads, each has a part of the gradient of a parameter that tp does not cut. An expert sees the
    tokens of its whole ep group, because they are sent to it; its gradient is summed over the other
    groups.
    """
    held = stages_by_rank(recipe)[rank // (recipe.mesh.world_size // recipe.mesh.pp)]
    layers, table, found = stage_layers(recipe), recipe.parameters, {}
    for stage in held:
        units = {f"blocks.{layer}": table.blocks[layer] for layer in layers[stage].blocks}
        if layers[stage].has_first:
            units["first"] = table.first
        if layers[stage].has_last:
            units["last"] = table.last
        for unit, rows in units.items():
            for row in rows:
                if not row.tied_to:
                    name = f"{unit}.{row.name}"
                    found[name] = _ranks_of_sum(recipe, row, rank)
                    if not (row.trains and is_trained(recipe.optim, name)):
                        found[name] = None
    return found


def _ranks_of_sum(recipe: Recipe, row: Row, rank: int) -> tuple[int, ...] | None:
    tp = recipe.mesh.tp
    sequence_parallel = recipe.parallel.sequence_parallel
    cut = cut_of(row, recipe.model, tp=tp, sequence_parallel=sequence_parallel)
    if cut == "experts":
        return places.members("expert_replicas", rank, recipe.mesh)
    axis = "stage" if cut == "whole_partial" and tp > 1 else "replicas"
    return places.members(axis, rank, recipe.mesh)
