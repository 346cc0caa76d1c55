"""The one enumerator of layouts: every variant of a recipe that its own rules accept.

A variant changes the mesh, the schedule, the micro-batch, ``zero`` and checkpointing. What a recipe
refuses is never proposed, because the same rules judge both. No torch here.

The covering matrix of proofs (``tools/prove/matrix``) draws its layouts at random, over more keys
than these. It makes them with ``variant`` and judges them with ``is_legal``, as ``layouts`` does. A
test checks that ``layouts`` finds every layout of the matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from composer3d.recipe.rules import violations
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import divisors, variant

Schedule = Literal[
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
]  # fmt: skip

# Sequences up to this length fit one rank; longer ones may be cut by cp.
_LONG_SEQUENCE = 16_384
_MOST_STAGES_PER_RANK = 8


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The values that an enumeration tries.

    Attributes:
        schedules: pipeline schedules.
        checkpoints: values of ``memory.activation_checkpoint``.
        zeros: values of ``parallel.zero``; with a pipeline, the rules refuse 2.
        micro_batches: values of ``data.micro_batch``. Twice the largest is tried, too, on layouts
            that have it and are fast (``levers``).
        tp_over_nodes: whether tp may cross nodes.
        any_mesh: whether to try meshes that are legal but seldom fast: cp with short sequences, any
            number of replicas, and fewer micro-batches than pipeline ranks.
        further_checkpoints, loss_chunks, fsdp_blocks, cp_methods: values of these keys that are not
            enumerated, but tried on layouts that they may make one of the fastest (``levers``).
    """

    schedules: tuple[Schedule, ...] = ("1F1B", "Interleaved1F1B")
    checkpoints: tuple[str, ...] = ("none", "selective", "full")
    zeros: tuple[Literal[0, 1, 2, 3], ...] = (1, 2, 3)
    micro_batches: tuple[int, ...] = (1, 2, 4)
    tp_over_nodes: bool = False
    any_mesh: bool = False
    further_checkpoints: tuple[str, ...] = ("every 2 blocks", "every 4 blocks")
    loss_chunks: tuple[int, ...] = (1, 4, 16)
    fsdp_blocks: tuple[int, ...] = (1, 2, 4)
    cp_methods: tuple[str, ...] = ("ring", "allgather", "ulysses")


def is_legal(recipe: Recipe) -> bool:
    """Return whether the rules of recipes accept a recipe."""
    return not violations(recipe)


def layouts(
    recipe: Recipe, gpus: int, devices_per_node: int, choices: Choices | None = None
) -> Iterator[Recipe]:
    """Yield each legal variant of a recipe on ``gpus`` devices.

    Args:
        recipe: the recipe; its model, batch and sequence stay.
        gpus: the number of devices; all are used.
        devices_per_node: devices that share a node.
        choices: the values to try.
    """
    choices = choices or Choices()
    for mesh_sizes in _meshes(recipe, gpus, devices_per_node, choices):
        mesh = replace(recipe.mesh, **mesh_sizes)
        for micro_batch in choices.micro_batches:
            # The batch rules are checked first: they refuse most.
            if recipe.data.global_batch % (micro_batch * mesh.batch_ranks):
                continue
            count = recipe.data.global_batch // (micro_batch * mesh.batch_ranks)
            if mesh.pp > 1 and count < mesh.pp and not choices.any_mesh:
                continue
            data = replace(recipe.data, micro_batch=micro_batch)
            for schedule, stages in _schedules(recipe, mesh.pp, choices):
                for zero in choices.zeros:
                    if zero == 2 and mesh.pp > 1:
                        continue
                    parallel = replace(
                        recipe.parallel,
                        schedule=schedule,
                        schedule_csv=None,
                        virtual_stages=stages,
                        stages=None,
                        zero=zero,
                    )
                    found = replace(recipe, mesh=mesh, data=data, parallel=parallel)
                    yield from _with_checkpoints(found, choices)


def _with_checkpoints(recipe: Recipe, choices: Choices) -> Iterator[Recipe]:
    """Yield a recipe with each mode of checkpointing that the rules accept."""
    for mode in choices.checkpoints:
        found = variant(recipe, {"memory.activation_checkpoint": mode})
        if is_legal(found):
            yield found


def _meshes(
    recipe: Recipe, gpus: int, devices_per_node: int, choices: Choices
) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes, whose product is ``gpus``."""
    model = recipe.model
    for tp in divisors(gpus):
        if model.n_heads % tp or (tp > devices_per_node and not choices.tp_over_nodes):
            continue
        for pp in divisors(gpus // tp):
            if pp > model.n_layers:
                continue
            for cp in divisors(gpus // (tp * pp)):
                if cp > 1 and not (choices.any_mesh or _is_worth_cp(recipe, cp)):
                    continue
                batch_ranks = gpus // (tp * pp * cp)
                if recipe.data.global_batch % batch_ranks:
                    continue
                replica_counts = divisors(batch_ranks)
                if not choices.any_mesh:
                    replica_counts = _replicas(batch_ranks, prod((tp, cp)), devices_per_node)
                for replicas in replica_counts:
                    sizes = {
                        "tp": tp,
                        "pp": pp,
                        "cp": cp,
                        "dp_replicate": replicas,
                        "dp_shard": batch_ranks // replicas,
                    }
                    for ep in _expert_ranks(recipe, sizes):
                        yield {**sizes, "ep": ep}


def _is_worth_cp(recipe: Recipe, cp: int) -> bool:
    """Return whether sequences are long, or the recipe cuts them already, and parts are long."""
    if recipe.data.seq_len < _LONG_SEQUENCE and recipe.mesh.cp == 1:
        return False
    return recipe.data.seq_len // cp >= _LONG_SEQUENCE // 4


def _replicas(batch_ranks: int, inner: int, devices_per_node: int) -> list[int]:
    """Return numbers of replicas: one, or so many that shards stay within 1, 8 or 32 nodes."""
    found = {1}
    for nodes in (1, 8, 32):
        shards = max(1, nodes * devices_per_node // inner)
        if shards > 1 and batch_ranks % shards == 0:
            found.add(batch_ranks // shards)
    return sorted(found)


def _expert_ranks(recipe: Recipe, sizes: dict[str, int]) -> list[int]:
    experts = recipe.model.experts
    if not experts:
        return [1]
    ranks = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    return [ep for ep in divisors(experts) if ranks % ep == 0]


def _schedules(recipe: Recipe, pp: int, choices: Choices) -> Iterator[tuple[Schedule, int | None]]:
    """Yield schedules, and the stages of each rank; None: the least that the schedule needs."""
    if pp == 1:
        yield "1F1B", None
        return
    for schedule in choices.schedules:
        if schedule == "Interleaved1F1B":
            for stages in (2, 4, _MOST_STAGES_PER_RANK):
                if pp * stages <= recipe.model.n_layers:
                    yield schedule, stages
        else:
            yield schedule, None
