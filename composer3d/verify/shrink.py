"""Small recipes that stand for a large one: what a laptop runs, with every predicate that matters kept."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product

from composer3d.recipe.rules.layout import violations
from composer3d.recipe.schema import AXES, MeshTable, Model, Recipe
from composer3d.spec.errors import UserError
from composer3d.spec.schedules import micro_batches_wrong

LIMIT = 16  # processes on one machine


def shrink(full: Recipe) -> list[Recipe]:
    """Small recipes that stand for ``full``: one where its mesh fits a laptop, else one for every triple of its axes.

    Kept: which axes are above 1 (whole, up to 16 processes), grouped-query or not, key-value heads
    fewer than tp (one or several), equal to it or more, a vocabulary that tp does not divide, heads
    narrower or wider than the stream's, tied, norms and biases, a window of one token, within a
    chunk of the sequence, beyond it or over more than one back, a sequence of one token or of an
    odd number, packing, chunks of the loss, what is checkpointed, compiled or offloaded, layers
    that stages divide or not, an uneven explicit cut, as many micro-batches as the schedule takes,
    more than one of them, clipping (made active), a learning rate from 1e-4 to 1e-2, an epsilon of
    1e-12 or more. A schedule from a file keeps its stages and micro-batches.

    How FSDP cuts each kind of tensor (``sharding``) is kept as well: where no one recipe can, there are further ones,
    so that each kind is cut in one of them as it is in full.

    Raises UserError where the file of a schedule is for more pipeline ranks than a laptop runs.
    """
    wanted = sharding(full)
    smalls = [_shrink_to(full, mesh, wanted) for mesh in _meshes(full)]
    missing = wanted.items() - {item for small in smalls for item in sharding(small).items()}
    while missing:
        # What one shape cannot hold together, such as an even width of heads whose rows are not.
        more = [_shrink_to(full, mesh, dict(missing)) for mesh in _sharding_meshes(full)]
        best = max(more, key=lambda small: len(missing & sharding(small).items()), default=None)
        if best is None or missing.isdisjoint(sharding(best).items()):
            break
        smalls.append(best)
        missing -= sharding(best).items()
    return smalls


def sharding(recipe: Recipe) -> dict[str, str]:
    """How FSDP cuts what a tp rank has of each kind of tensor: "even", "short" or "none"; empty where it cuts nothing.

    "short": its last rank holds fewer rows than the first. "none": at least one holds no row.
    """
    shards = recipe.mesh.dp_shard * recipe.mesh.cp if recipe.parallel.zero else 1
    return _cuts(recipe.model, recipe.mesh.tp, shards) if shards > 1 else {}


def _cuts(model: Model, tp: int, shards: int) -> dict[str, str]:
    chunk, kv_rows = -(-model.vocab // tp), model.n_kv_heads * model.head_width
    rows = {
        "width": model.dim,
        "queries": model.n_heads * model.head_width // tp,
        "keys": kv_rows // tp
        if model.n_kv_heads % tp == 0
        else kv_rows,  # shared heads are whole on every rank
        "feed-forward": model.ffn // tp,
        "vocabulary": chunk,
        "last of the vocabulary": model.vocab - chunk * (tp - 1),
    }
    if model.qk_norm:
        rows["head"] = model.head_width
    return {kind: _cut(count, shards) for kind, count in rows.items()}


def _cut(rows: int, shards: int) -> str:
    if rows % shards == 0:
        return "even"
    return "short" if -(-rows // shards) * (shards - 1) < rows else "none"


def _meshes(full: Recipe) -> list[MeshTable]:
    mesh, fixed = full.mesh, full.parallel.schedule == "csv"
    if mesh.world_size <= LIMIT:
        return [mesh]
    if fixed and mesh.pp > LIMIT:
        raise UserError(
            f"verify runs at most {LIMIT} processes, and {full.parallel.schedule_csv} is for {mesh.pp} pipeline ranks, "
            f"which no smaller number can stand for; verify one for {LIMIT} ranks or fewer"
        )
    # Four pipeline ranks where there are more than two: only then has one neighbours on both sides. Four of tp where
    # several ranks share each of several key-value heads. Three shards where some are uneven: two divide most sizes.
    most = {"pp": mesh.pp if fixed else 4, "tp": _tp(full)}
    uneven = any(way != "even" for way in sharding(full).values())
    cut = {axis: min(most.get(axis, 2), getattr(mesh, axis)) for axis in AXES}
    # And three ranks of a ring: two forward no keys.
    ring = mesh.cp > 2 and full.parallel.cp_method == "ring"
    odd = {"cp": uneven or ring, "dp_shard": uneven}
    thirds = {
        axis: min(3, getattr(mesh, axis))
        for axis, wanted in odd.items()
        if wanted and cut[axis] > 1
    }
    if math.prod(cut.values()) > LIMIT and not fixed:
        # Three have more micro-batches than one, and fewer than ranks.
        cut["pp"] = min(3 if 1 < full.micro_batches < mesh.pp else 2, cut["pp"])
    wide = [axis for axis in AXES if cut[axis] > 1 and not (fixed and axis == "pp")]
    options = (
        [cut | dict.fromkeys(set(wide) - set(kept), 1) for kept in combinations(wide, number)]
        for number in (len(wide), 3, 2, 1, 0)
    )
    fit = next(
        sizes
        for sizes in options
        if sizes and all(math.prod(each.values()) <= LIMIT for each in sizes)
    )
    meshes = [_with_thirds(each, thirds) for each in fit]
    if ring and all(each.cp <= 2 for each in meshes):
        meshes.append(MeshTable(dp_shard=1, cp=3))
    return meshes


def _tp(full: Recipe) -> int:
    return 4 if full.mesh.tp > full.model.n_kv_heads > 1 else 2


def _with_thirds(sizes: dict[str, int], thirds: dict[str, int]) -> MeshTable:
    """A mesh that has three shards in place of two on as many axes as still fit."""
    kept = {axis: size for axis, size in thirds.items() if sizes[axis] > 1}
    options = (
        sizes | dict(chosen)
        for number in (2, 1, 0)
        for chosen in combinations(kept.items(), number)
    )
    return next(MeshTable(**each) for each in options if math.prod(each.values()) <= LIMIT)


def _sharding_meshes(full: Recipe) -> list[MeshTable]:
    """Meshes for what FSDP cuts: that of ``full`` where it is small, else other numbers of shards, small ones first."""
    mesh = full.mesh
    if mesh.world_size <= LIMIT:
        return [mesh]
    shards, parts = range(1, min(mesh.dp_shard, 8) + 1), range(1, min(mesh.cp, 4) + 1)
    sizes = product(shards, parts, {1, min(mesh.tp, _tp(full))})
    tables = [
        MeshTable(dp_shard=dp_shard, cp=cp, tp=tp)
        for dp_shard, cp, tp in sizes
        if dp_shard * cp > 1
    ]
    return sorted(
        (table for table in tables if table.world_size <= LIMIT), key=lambda table: table.world_size
    )


def _shrink_to(full: Recipe, mesh: MeshTable, wanted: Mapping[str, str]) -> Recipe:
    """A small recipe on ``mesh`` that cuts as many kinds of tensors as it can in the ways of ``wanted``."""
    each, layers = full.parallel.stages_per_rank, full.model.n_layers
    stages, of_full = (pp * each if pp > 1 else 1 for pp in (mesh.pp, full.mesh.pp))
    n_layers = stages * min(2, max(1, layers // of_full)) + (1 if layers % of_full else 0)
    cut = full.parallel.stages if mesh.pp > 1 else None
    if cut is not None:  # one or two layers a stage, uneven where it was
        cut = (cut if len(cut) == stages else (max(cut), *sorted(cut)))[:stages]
        cut = tuple(1 + (size > min(cut)) for size in cut)
    seq_len, window = _sequence(full, mesh)
    micro_batch = min(2, full.data.micro_batch)
    lr = min(1e-2, max(1e-4, full.optim.lr))
    small = replace(
        full,
        model=replace(
            _shape(full, mesh, wanted),
            n_layers=n_layers if cut is None else sum(cut),
            window=window,
        ),
        mesh=mesh,
        parallel=replace(full.parallel, stages=cut),
        memory=replace(full.memory, loss_chunks=min(3, full.memory.loss_chunks)),
        data=replace(
            full.data,
            seq_len=seq_len,
            micro_batch=micro_batch,
            global_batch=micro_batch * _micro_batches(full, mesh.pp) * mesh.batch_ranks,
        ),
        # An update that is too small would hide what is wrong with it; one that is too large, or an epsilon below the
        # rounding of a gradient that is zero, makes rounding grow to any size.
        optim=replace(
            full.optim,
            clip=0.1 if full.optim.clip > 0 else 0.0,
            lr=lr,
            min_lr=min(full.optim.min_lr, lr),
            eps=max(1e-12, full.optim.eps),
        ),
    )
    assert not violations(small), violations(small)
    return small


def _sequence(full: Recipe, mesh: MeshTable) -> tuple[int, int]:
    """The length of a sequence and the window: those of ``full`` where they are small."""
    zigzag, parallel = full.parallel.cp_balance == "zigzag", full.parallel.sequence_parallel
    chunks = mesh.cp * (2 if zigzag and mesh.cp > 1 else 1)
    unit = mesh.cp * math.lcm(chunks // mesh.cp, mesh.tp if parallel else 1)
    seq_len, window = full.data.seq_len, full.model.window
    small = -(-max(16, 8 * mesh.cp, 2 * unit) // unit) * unit
    if seq_len % 2 and unit % 2:
        small += unit * (1 - small % 2)
    if seq_len <= small and seq_len % unit == 0:
        small = seq_len
    if not 0 < window < seq_len or small == 1:
        return small, 0
    of_full = full.mesh.cp * (2 if zigzag and full.mesh.cp > 1 else 1)
    if small == seq_len and mesh.cp in (1, full.mesh.cp):
        return small, window
    if mesh.cp == 1:
        return small, min(window, 5, small - 1)
    if window <= seq_len // of_full:
        return small, min(window, 3)
    # Past the chunk before its own a token sees with a window of two more than a chunk.
    further = window > seq_len // of_full + 1
    return small, min(2 * (small // chunks) + 2 if further else small // chunks + 1, small - 1)


def _shape(full: Recipe, mesh: MeshTable, wanted: Mapping[str, str]) -> Model:
    """The smallest sizes that cut as many kinds of tensors as can be in the ways of ``wanted``, the first ones best."""
    model, parallel = full.model, full.parallel
    shards = mesh.dp_shard * mesh.cp if parallel.zero else 1

    def best(candidates: Iterable[Model], *kinds: str) -> Model:
        ways = {kind: wanted[kind] for kind in kinds if kind in wanted}
        least, chosen = math.inf, None
        for candidate in candidates:
            missed = len(ways.items() - _cuts(candidate, mesh.tp, shards).items())
            if missed < least:
                least, chosen = missed, candidate
            if not missed:
                break
        assert chosen is not None
        return chosen

    uneven = model.vocab % full.mesh.tp > 0
    small = best(_heads(full, mesh, shards if uneven else 1), "width", "queries", "keys", "head")
    # Twelve rows a rank, more, or less: the first that do.
    rows = (*range(12, 12 + 4 * shards), *range(11, 0, -1))
    small = best((replace(small, ffn=mesh.tp * each) for each in rows), "feed-forward")
    # At least 256, for bytes, where the full one holds them. Without tp, odd ones stand for what tp does not divide.
    first = min(256, model.vocab) + (uneven and mesh.tp == 1)
    sizes = range(first, 260 + 4 * mesh.tp * shards)
    legal = (size for size in sizes if mesh.tp == 1 or _is_cut_like(size, mesh.tp, uneven))
    return best(
        (replace(small, vocab=size) for size in legal), "vocabulary", "last of the vocabulary"
    )


def _is_cut_like(vocab: int, tp: int, uneven: bool) -> bool:
    """Whether tp divides a vocabulary, or leaves the last rank fewer rows than the others, as is wanted."""
    return (vocab % tp > 0) == uneven and -(-vocab // tp) * (tp - 1) < vocab


def _heads(full: Recipe, mesh: MeshTable, columns: int) -> Iterator[Model]:
    """Heads like those of ``full``: of small numbers, widths and streams, small ones first.

    ``columns``: what the width of the stream must be a multiple of.
    """
    model, tp = full.model, mesh.tp
    if model.n_kv_heads < full.mesh.tp and tp > 1:  # ranks share a key-value head
        n_kv_heads = max(min(2, model.n_kv_heads, tp // 2), tp * model.n_kv_heads // full.mesh.tp)
        each = min(2, model.n_heads // full.mesh.tp)
        numbers = [(tp * (each + more), n_kv_heads) for more in ((0, 1) if each > 1 else (0,))]
    else:
        ulysses = full.parallel.cp_method == "ulysses" and mesh.cp > 1
        each, step = (mesh.cp, mesh.cp) if ulysses else (2, 1)
        groups = (1,) if model.n_heads == model.n_kv_heads else (2, 3)
        of_rank = (each, each + step, 3 * each) if model.n_kv_heads > full.mesh.tp else (1,)
        numbers = [(tp * number * group, tp * number) for number in of_rank for group in groups]
    wider, shards = _sign(model.head_width * model.n_heads - model.dim), mesh.dp_shard * mesh.cp
    first = {0: 8, 1: 12, -1: 4}[wider]
    widths = (*range(first, first + 4 * shards + 2, 2), *range(first - 2, 0, -2))
    for (n_heads, n_kv_heads), width in product(numbers, widths):
        near = 8 * n_heads if wider > 0 else max(8 * n_heads, n_heads * width + 2)
        # Even ones first.
        dims = [
            dim
            for odd in (0, 1)
            for dim in (*range(near + odd, near + 4 * shards, 2), *range(2 + odd, near, 2))
        ]
        for dim in dims if wider else (n_heads * width,):
            if dim % columns == 0 and _sign(n_heads * width - dim) == wider:
                head_dim = width if wider else None
                yield replace(
                    model, n_heads=n_heads, n_kv_heads=n_kv_heads, dim=dim, head_dim=head_dim
                )


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _micro_batches(full: Recipe, pp: int) -> int:
    count, schedule = full.micro_batches, full.parallel.schedule
    if schedule == "csv" and pp > 1:
        return count
    wanted = count if count <= 8 else max(4, 2 * pp)
    if pp == 1:
        return wanted
    if (
        count < full.mesh.pp
    ):  # fewer than ranks, as they are in full, but not one in place of several
        wanted = min(count, max(2, pp - 1))
    near = (*range(wanted, min(1, wanted - 1), -1), *range(wanted, 2 * pp + 1))
    return next(number for number in near if micro_batches_wrong(schedule, number, pp, "") is None)
