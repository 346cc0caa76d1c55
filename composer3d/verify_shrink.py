"""Small recipes that stand for a large one: what a laptop runs, with every predicate that matters kept."""

import math
from dataclasses import replace
from itertools import combinations

from composer3d.errors import UserError
from composer3d.recipe.rules import violations
from composer3d.recipe.schema import AXES, MeshTable, Model, Recipe
from composer3d.schedules import micro_batches_wrong

LIMIT = 16  # processes on one machine


def shrink(full: Recipe) -> list[Recipe]:
    """Small recipes that stand for ``full``: one where its mesh fits a laptop, else one for every triple of its axes.

    Kept: which axes are above 1 (whole, up to 16 processes), grouped-query or not, key-value heads fewer than tp (one
    or several), equal to it or more, a vocabulary that tp does not divide, heads narrower or wider than the stream's,
    tied, norms and biases, a window below the sequence, packing, chunks of the loss, what is checkpointed, compiled or
    offloaded, layers that stages divide or not, an uneven explicit cut, as many micro-batches as the schedule takes,
    more than one of them, clipping (made active). A schedule from a file keeps its stages and micro-batches.

    Raises UserError where the file of a schedule is for more pipeline ranks than a laptop runs.
    """
    return [_shrink_to(full, mesh) for mesh in _meshes(full)]


def _meshes(full: Recipe) -> list[MeshTable]:
    mesh, shape, fixed = full.mesh, full.model, full.parallel.schedule == "csv"
    if mesh.world_size <= LIMIT:
        return [mesh]
    if fixed and mesh.pp > LIMIT:
        raise UserError(
            f"verify runs at most {LIMIT} processes, and {full.parallel.schedule_csv} is for {mesh.pp} pipeline ranks, "
            f"which no smaller number can stand for; verify one for {LIMIT} ranks or fewer"
        )
    # Four pipeline ranks where there are more than two: only then has one neighbours on both sides. Four of tp where
    # several ranks share each of several key-value heads.
    most = {"pp": mesh.pp if fixed else 4, "tp": 4 if mesh.tp > shape.n_kv_heads > 1 else 2}
    cut = {axis: min(most.get(axis, 2), getattr(mesh, axis)) for axis in AXES}
    if math.prod(cut.values()) > LIMIT and not fixed:
        cut["pp"] = min(2, cut["pp"])
    wide = [axis for axis in AXES if cut[axis] > 1 and not (fixed and axis == "pp")]
    options = (
        [MeshTable(**cut | dict.fromkeys(set(wide) - set(kept), 1)) for kept in combinations(wide, number)]
        for number in (len(wide), 3, 2, 1, 0)
    )
    return next(tables for tables in options if tables and all(table.world_size <= LIMIT for table in tables))


def _shrink_to(full: Recipe, mesh: MeshTable) -> Recipe:
    each, layers = full.parallel.stages_per_rank, full.model.n_layers
    stages, of_full = (pp * each if pp > 1 else 1 for pp in (mesh.pp, full.mesh.pp))
    n_layers = stages * min(2, max(1, layers // of_full)) + (1 if layers % of_full else 0)
    cut = full.parallel.stages if mesh.pp > 1 else None
    if cut is not None:  # one or two layers a stage, uneven where it was
        cut = (cut if len(cut) == stages else (max(cut), *sorted(cut)))[:stages]
        cut = tuple(1 + (size > min(cut)) for size in cut)
    unit = mesh.cp * math.lcm(2, mesh.tp)
    micro_batch = min(2, full.data.micro_batch)
    small = replace(
        full,
        model=_shape(full, mesh, n_layers if cut is None else sum(cut)),
        mesh=mesh,
        parallel=replace(full.parallel, stages=cut),
        memory=replace(full.memory, loss_chunks=min(3, full.memory.loss_chunks)),
        data=replace(
            full.data,
            seq_len=-(-max(16, 8 * mesh.cp, 2 * unit) // unit) * unit,
            micro_batch=micro_batch,
            global_batch=micro_batch * _micro_batches(full, mesh.pp) * mesh.batch_ranks,
        ),
        optim=replace(full.optim, clip=0.1 if full.optim.clip > 0 else 0.0),
    )
    assert not violations(small), violations(small)
    return small


def _shape(full: Recipe, mesh: MeshTable, n_layers: int) -> Model:
    model, tp, shards = full.model, mesh.tp, mesh.dp_shard * mesh.cp
    if model.n_kv_heads < full.mesh.tp and tp > 1:  # ranks share a key-value head
        n_kv_heads = max(min(2, model.n_kv_heads, tp // 2), tp * model.n_kv_heads // full.mesh.tp)
        n_heads = tp * min(2, model.n_heads // full.mesh.tp)
    else:
        each = mesh.cp if full.parallel.cp_method == "ulysses" and mesh.cp > 1 else 2
        n_kv_heads = tp * (each if model.n_kv_heads > full.mesh.tp else 1)
        n_heads = n_kv_heads * min(2, model.n_heads // model.n_kv_heads)
    full_heads = model.head_width * model.n_heads
    return replace(
        model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        # Of a vocabulary that tp does not divide, dp_shard and cp cut the columns, evenly.
        dim=8 * n_heads * (shards if model.vocab % full.mesh.tp else 1),
        ffn=tp * 12,
        # At least 256, for bytes; no tp divides 257.
        vocab=257 if model.vocab % full.mesh.tp else -(-256 // tp) * tp,
        n_layers=n_layers,
        head_dim=None if full_heads == model.dim else 12 if full_heads > model.dim else 4,
        window=5 if 0 < model.window < full.data.seq_len else 0,
    )


def _micro_batches(full: Recipe, pp: int) -> int:
    count, schedule = full.micro_batches, full.parallel.schedule
    if schedule == "csv" and pp > 1:
        return count
    wanted = count if count <= 8 else max(4, 2 * pp)
    if pp == 1:
        return wanted
    if count < full.mesh.pp:
        wanted = min(count, pp - 1)  # fewer than stages, as they are in full
    near = (*range(wanted, 0, -1), *range(wanted, 2 * pp + 1))
    return next(number for number in near if micro_batches_wrong(schedule, number, pp, "") is None)
