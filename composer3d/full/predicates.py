"""Predicates: facts that a small recipe must share with the full one. No torch here.

``shrink`` makes a recipe small and says what it keeps. This list checks that independently. A
predicate is a fact of a recipe that decides which code runs, or the shape of what ranks send. Its
value in the full recipe must be its value in at least one of the small recipes.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

from composer3d.dryrun.replay import keys
from composer3d.facts.errors import UserError
from composer3d.facts.limits import JOB, PartLimits
from composer3d.facts.ranges import AS_IT_IS
from composer3d.facts.schedules import fewest_micro_batches, micro_batch_requirement
from composer3d.facts.units import units_of_blocks
from composer3d.planner.matrices import MatrixUnit, limited_rounds, messages_of_results
from composer3d.planner.schedule import recipe_actions
from composer3d.planner.stages import checkpointed_stages_of_ranks, stage_layers
from composer3d.planner.traffic import rounds_of_matrices
from composer3d.planner.trained import is_trained
from composer3d.recipe.schema import AXES, MeshTable, ParallelTable, Recipe
from composer3d.recipe.stages import n_stages_of
from composer3d.recipe.values import FIELDS, divisors, value_of, variant
from composer3d.verify.blocks import by_stage, kinds_of_blocks, kinds_of_predicting_blocks
from composer3d.verify.cuts import cuts_of_tensors
from composer3d.verify.limits import limits_of_proof
from composer3d.verify.shrink import LIMIT, shrink_to, violations_of_small


class Predicate(NamedTuple):
    """A fact of a recipe that decides how its step is computed.

    Attributes:
        of: returns its value in a recipe; None: it decides nothing there.
        keys: the recipe keys that it reads, for messages.
        left_out: why it may be lost, if no proof can keep it; "": some proof must keep it.
        of_proof: returns its value in a proof, whose limits are lower; None: as ``of``.
    """

    of: Callable[[Recipe], Hashable]
    keys: str
    left_out: str = ""
    of_proof: Callable[[Recipe], Hashable] | None = None


class LostPredicate(NamedTuple):
    """A predicate whose value in the full recipe no proof has.

    Attributes:
        name: what the predicate is called, in words.
        keys: the keys that decide it.
        full: its value in the full recipe.
        small: its values in the proofs.
        left_out: as in ``Predicate``.
    """

    name: str
    keys: str
    full: Hashable
    small: tuple[Hashable, ...]
    left_out: str

    def __str__(self) -> str:
        values = " and ".join(dict.fromkeys(map(str, self.small)))
        return f"{self.name} ({self.keys}): {self.full} in the job, {values} in the proof"


def differences(full: Recipe, small_recipes: Sequence[Recipe]) -> list[LostPredicate]:
    """Return the predicates whose value in ``full`` none of ``small_recipes`` has.

    Keys that a proof may not change are compared, too: these must be equal in all small recipes.
    """
    found = []
    for name, predicate in PREDICATES.items():
        wanted = predicate.of(full)
        values = tuple((predicate.of_proof or predicate.of)(small) for small in small_recipes)
        if wanted is not None and wanted not in values:
            found.append(LostPredicate(name, predicate.keys, wanted, values, predicate.left_out))
    found += _lost_cuts(full, small_recipes)
    found += _lost_actions(full, small_recipes)
    for key, entry in FIELDS.items():
        if entry.metadata["in_proof"] is AS_IT_IS and not _is_resized(key):
            wanted, values = _kept(full, key), tuple(_kept(small, key) for small in small_recipes)
            if any(value != wanted for value in values):
                found.append(LostPredicate("the value", key, wanted, values, ""))
    return found


def completed(full: Recipe, small_recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return further small recipes that keep predicates which ``small_recipes`` lose."""
    chosen = list(small_recipes)
    missing = {d.name for d in differences(full, chosen) if not d.left_out}
    candidates = list(_candidates(full)) if missing else []
    while missing:
        left = [({d.name for d in differences(full, [*chosen, c])}, c) for c in candidates]
        rest, best = min(left, key=lambda one: len(one[0] & missing), default=(missing, None))
        if best is None or missing <= rest:
            break
        chosen.append(best)
        missing &= rest
    return chosen[len(small_recipes) :]


def _candidates(full: Recipe) -> Iterable[Recipe]:
    """Yield small recipes on meshes of few ranks, with other micro-batches and other stages."""
    mesh = full.mesh
    # A schedule from a file fixes the number of pipeline ranks. DualPipeV has actions of a middle
    # rank that four ranks do not have.
    most = 1 if full.parallel.schedule == "csv" else 5
    for pp in sorted({min(mesh.pp, size) for size in range(1, most + 1)}):
        for axis in (None, "dp_shard", "tp", "cp"):
            if axis is not None and getattr(mesh, axis) == 1:
                continue
            sizes = {"pp": pp, "dp_shard": 1} | ({axis: 2} if axis else {})
            for small in _small_on(full, MeshTable(**sizes)):
                yield small
                yield from _with_micro_batches(small)
                yield from _with_stages(small)
    for small_mesh in _meshes_of_stages(mesh):
        yield from _small_on(full, small_mesh)


def _small_on(full: Recipe, mesh: MeshTable) -> list[Recipe]:
    """Return the small recipe on a mesh; none if the rules refuse it."""
    try:
        return [shrink_to(full, mesh)]
    except UserError:
        return []


def _meshes_of_stages(mesh: MeshTable) -> Iterator[MeshTable]:
    """Yield meshes without a pipeline that have several axes, and each size of ep, to try."""
    sizes = [sorted({1, min(2, size), min(4, size)}) for size in (mesh.dp_shard, mesh.cp, mesh.tp)]
    for dp_shard, cp, tp in product(*sizes):
        ranks = dp_shard * cp * tp
        if 1 < ranks <= LIMIT:
            for ep in divisors(ranks) if mesh.ep > 1 else (1,):
                yield MeshTable(dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)


def _with_micro_batches(small: Recipe) -> Iterable[Recipe]:
    """Yield a recipe with other numbers of micro-batches that its schedule takes."""
    pp = small.mesh.pp
    for number in range(1, 3 * pp + 1):
        if pp > 1 and micro_batch_requirement(small.parallel.schedule, number, pp, "") is not None:
            continue
        other = small.with_micro_batches(number)
        if not violations_of_small(other):
            yield other


def _with_stages(small: Recipe) -> Iterable[Recipe]:
    """Yield a recipe with stages of equal numbers of blocks, and with more on the first one.

    With two blocks more, it has several units of FSDP of which one has several blocks.
    """
    count = n_stages_of(small)
    if count == 1:
        return
    few = max(1, small.model.n_layers // count)
    for more in range(3):
        stages = (few + more, *(few,) * (count - 1))
        other = variant(small, {"model.n_layers": sum(stages), "parallel.stages": stages})
        if not violations_of_small(other):
            yield other


# --- what a proof may change ---

_RESIZED_TABLES = ("run", "checkpoint", "metrics", "validation", "reliability", "init")
_RESIZED = frozenset(
    {
        *(f"mesh.{axis}" for axis in (*AXES, "ep")),
        *("parallel.stages", "parallel.fsdp_blocks", "optim.train", "optim.groups"),
        *("optim.matrices", "data.seq_len", "data.global_batch", "memory.activation_checkpoint"),
    }
)


def _is_resized(key: str) -> bool:
    """Return whether a proof may change a key, so that predicates are compared instead."""
    table = key.partition(".")[0]
    return table == "model" or table in _RESIZED_TABLES or key in _RESIZED


def _kept(recipe: Recipe, key: str) -> Any:
    return value_of(recipe, key)


def _lost_cuts(full: Recipe, small_recipes: Sequence[Recipe]) -> Iterator[LostPredicate]:
    """Yield the kinds of parameters whose rows FSDP shards in a way that no proof has."""
    proofs = [cuts_of_tensors(small) for small in small_recipes]
    shown = {cut for cuts in proofs for cut in cuts.values()}
    for name, cut in cuts_of_tensors(full).items():
        values = tuple(cuts.get(name, "whole") for cuts in proofs)
        # FSDP cuts all tensors alike, whatever they are for.
        if cut not in values and not (cut == "even" and cut in shown):
            left_out = "a proof cuts another tensor so" if cut in shown else ""
            keys = "model.*, mesh.dp_shard, mesh.cp, mesh.tp"
            yield LostPredicate(f"shards of {name}", keys, cut, values, left_out)


def _lost_actions(full: Recipe, small_recipes: Sequence[Recipe]) -> Iterator[LostPredicate]:
    """Yield the kinds of actions of a pipeline that none of the proofs runs."""
    if full.mesh.pp == 1:
        return
    wanted, *proofs = (
        _kinds_of_actions(each.mesh.pp, each.parallel, each.micro_batches)
        for each in (full, *small_recipes)
    )
    for position, kind, before in sorted(wanted - set().union(*proofs)):
        name = f"the {position} {kind} of a stage after {before or 'nothing'}"
        keys_of = "parallel.schedule, data.global_batch, data.micro_batch, mesh.pp"
        yield LostPredicate(name, keys_of, "runs", ("does not",) * len(proofs), "")


@cache
def _kinds_of_actions(
    pp: int, parallel: ParallelTable, micro_batches: int
) -> frozenset[tuple[str, str, str]]:
    """Return the actions of all pipeline ranks as ``replay.Key`` tells them apart, by any stage."""
    if pp == 1:
        return frozenset()
    rows = recipe_actions(pp, parallel, micro_batches)
    found = (key for row in rows for key in keys([action for cell in row for action in cell]))
    return frozenset((key.position, key.kind, key.before) for key in found)


# --- predicates ---


def _few(number: int, most: int = 3) -> str:
    """Return a number as text; from ``most`` on, all are the same."""
    return str(number) if number < most else f"{most} or more"


def _relation(one: float, other: float) -> str:
    return "less" if one < other else "equal" if one == other else "more"


def _parity(number: int) -> str:
    return "odd" if number % 2 else "even"


def _divides(divisor: int, number: int) -> str:
    return "even" if number % divisor == 0 else "uneven"


def _together(one: str, other: str) -> Callable[[Recipe], Hashable]:
    """Return the predicate that both axes have several ranks; they may be the same axis."""

    def of(recipe: Recipe) -> Hashable:
        sizes = (getattr(recipe.mesh, one), getattr(recipe.mesh, other))
        return "both" if min(sizes) > 1 else None

    return of


def _micro_batches_of_ranks(recipe: Recipe) -> Hashable:
    if recipe.mesh.pp == 1:
        return None
    return _relation(recipe.micro_batches, recipe.mesh.pp)


def _more_than_fewest(recipe: Recipe) -> Hashable:
    mesh, schedule = recipe.mesh, recipe.parallel.schedule
    if mesh.pp == 1 or schedule == "csv":
        return None
    return "more" if recipe.micro_batches > fewest_micro_batches(schedule, mesh.pp) else None


def _window(recipe: Recipe) -> Hashable:
    window, seq_len = recipe.model.window, recipe.data.seq_len
    if not 0 < window < seq_len:
        return "none"
    if recipe.mesh.cp == 1:
        return "one token" if window == 1 else "some tokens"
    chunk = seq_len // recipe.sequence_chunks
    if window <= chunk:
        return "one token" if window == 1 else "within a chunk"
    return "one chunk back" if window <= chunk + 1 else "several chunks back"


def _kv_heads(recipe: Recipe) -> Hashable:
    tp, heads = recipe.mesh.tp, recipe.model.n_kv_heads
    if tp == 1:
        return None
    return f"{_relation(heads, tp)}, {'one' if heads == 1 else 'several'}"


def _kv_heads_of_ulysses(recipe: Recipe) -> Hashable:
    mesh = recipe.mesh
    if mesh.cp == 1 or recipe.parallel.cp_method != "ulysses":
        return None
    return "several" if recipe.model.n_kv_heads > mesh.tp * mesh.cp else "one"


def _of_experts(of: Callable[[Any, Recipe], Hashable]) -> Callable[[Recipe], Hashable]:
    """Return a predicate of models with experts."""
    return lambda recipe: of(recipe.model, recipe) if recipe.model.experts else None


def _groups_of_experts(model: Any, _: Recipe) -> Hashable:
    groups, chosen = getattr(model, "expert_groups", 1), getattr(model, "groups_per_token", 1)
    if groups == 1:
        return None
    return f"{'one' if chosen == 1 else 'several'} of more" if chosen < groups else "all"


def _ep_and_others(_: Any, recipe: Recipe) -> Hashable:
    mesh = recipe.mesh
    if mesh.ep == 1:
        return None
    shared = "shared by efsdp" if mesh.efsdp > 1 else "whole"
    tp = "" if mesh.tp == 1 else f", {_relation(mesh.ep, mesh.tp)} than or as tp"
    return shared + tp


def _kinds(recipe: Recipe) -> Hashable:
    return tuple(
        tuple(sorted(set(kinds_of(recipe.model, recipe.data.seq_len))))
        for kinds_of in (kinds_of_blocks, kinds_of_predicting_blocks)
    )


def _kinds_by_stage(recipe: Recipe) -> Hashable:
    kinds = kinds_of_blocks(recipe.model, recipe.data.seq_len)
    if len(set(kinds)) == 1 or recipe.mesh.pp == 1:
        return None
    layers = map(len, _blocks_of_stages(recipe))
    return tuple(sorted(tuple(sorted(each)) for each in by_stage(kinds, layers)))


def _blocks_over_stages(recipe: Recipe) -> Hashable:
    """Return whether stages have equal numbers of blocks, those of multi-token prediction apart."""
    if recipe.mesh.pp == 1:
        return None
    return "even" if len(set(map(len, _blocks_of_stages(recipe)))) == 1 else "uneven"


def _blocks_of_stages(recipe: Recipe) -> list[list[int]]:
    """Return the blocks of each stage, without those of multi-token prediction."""
    n_layers = recipe.model.n_layers
    return [[block for block in stage.blocks if block < n_layers] for stage in stage_layers(recipe)]


def _checkpointed(recipe: Recipe) -> Hashable:
    """Return how blocks are checkpointed, and in which of its stages a pipeline rank does so."""
    how = recipe.memory.checkpointing.in_first(None)
    names = {frozenset({True}): "all", frozenset({False}): "no", frozenset({True, False}): "some"}
    ranks = sorted(names[each] for each in checkpointed_stages_of_ranks(recipe))
    return f'"{how}" on {" or ".join(ranks)} stages of a rank'


def _units(recipe: Recipe) -> Hashable:
    """Return whether FSDP units have several blocks, and whether stages have several such units."""
    units = _units_of_stages(recipe)
    if all(len(unit) == 1 for of_stage in units for unit in of_stage):
        return "units of one block"
    most = max(map(len, units))
    return f"units of several blocks, {'several' if most > 1 else 'one'} a stage"


def _kinds_of_units(recipe: Recipe) -> Hashable:
    """Return that a unit has several kinds of blocks, if one has. Units of one kind need no proof.

    Any proof of units of several blocks has what these do.
    """
    kinds = kinds_of_blocks(recipe.model, recipe.data.seq_len)
    units = (unit for of_stage in _units_of_stages(recipe) for unit in of_stage)
    return "several" if any(len({kinds[block] for block in unit}) > 1 for unit in units) else None


def _units_of_stages(recipe: Recipe) -> list[list[list[int]]]:
    """Return the units of each stage. Blocks of multi-token prediction, units too, are left out."""
    size = recipe.parallel.fsdp_blocks
    return [units_of_blocks(blocks, size) for blocks in _blocks_of_stages(recipe)]


def _frozen_blocks(recipe: Recipe) -> Hashable:
    if recipe.optim.train is None:
        return None
    trains = (
        any(row.trains and is_trained(recipe.optim, f"blocks.{number}.{row.name}") for row in rows)
        for number, rows in enumerate(recipe.parameters.blocks)
    )
    return "none" if all(trains) else "some"


def _latents(recipe: Recipe) -> Hashable:
    return recipe.sends_latents if "kv_rank" in vars(recipe.model) and recipe.mesh.cp > 1 else None


def _by_limits(of: Callable[[Recipe, PartLimits], Hashable], keys: str) -> Predicate:
    """Return a predicate that is compared with the limits of a job and with those of a proof."""
    return Predicate(
        lambda recipe: of(recipe, JOB),
        keys,
        of_proof=lambda recipe: of(recipe, limits_of_proof(recipe)),
    )


def _of_matrices(what: str) -> Predicate:
    """Return the predicate that there are several of what ``_repeated`` finds. One needs no proof.

    Args:
        what: one of the results of ``_repeated``.
    """

    def of(recipe: Recipe, limits: PartLimits) -> Hashable:
        if not recipe.optim.optimizer.has_matrices:
            return None
        return "several" if what in _repeated(recipe, limits.elements_per_round) else None

    return _by_limits(of, "optim.name, model.*, mesh.*")


_ROUNDS, _UNITS, _PARTS, _RESULTS = "rounds", "units", "parts", "results"


@lru_cache(maxsize=32)  # that of the job is asked for again with each small recipe
def _repeated(recipe: Recipe, elements_per_round: int) -> frozenset[str]:
    """Return of what there are several in the matrices of a pipeline rank.

    Rounds; units of one owner in a round; parts of matrices from one rank to an owner, or of
    results from an owner to one rank, in a message.
    """
    n_ranks = recipe.mesh.world_size // recipe.mesh.pp
    found = set()
    with limited_rounds(elements_per_round):
        for pp_rank in range(recipe.mesh.pp):
            rounds = rounds_of_matrices(recipe, pp_rank)
            found |= {_ROUNDS} if len(rounds) > 1 else set()
            for units in rounds:
                found |= _repeated_in_round(units, n_ranks)
    return frozenset(found)


def _repeated_in_round(units: Sequence[MatrixUnit], n_ranks: int) -> set[str]:
    messages = messages_of_results(units, n_ranks)
    named: dict[str, list[list[Hashable]]] = {
        _UNITS: [[unit.owner for unit in units]],
        _PARTS: [[(rank, unit.owner) for unit in units for rank, _ in unit.senders()]],
        _RESULTS: [[(part.unit.owner, part.rank) for part in message] for message in messages],
    }
    return {what for what, lists in named.items() if any(map(_has_repeats, lists))}


def _has_repeats(values: Sequence[Hashable]) -> bool:
    return len(set(values)) < len(values)


def _rows(recipe: Recipe, limits: PartLimits) -> Hashable:
    """Return that gradients in host memory have several rows, if they have."""
    mesh, parallel = recipe.mesh, recipe.parallel
    if not recipe.memory.cpu_offload:
        return None
    shards = mesh.tp * (mesh.dp_shard * mesh.cp if parallel.zero else 1)
    largest = max(row.elements for row in recipe.parameters.kinds.values())
    return "several" if largest / shards >= limits.row else None


def _bands(recipe: Recipe, limits: PartLimits) -> Hashable:
    """Return that a window is wider than a band of queries, if it is."""
    window = recipe.model.window
    is_wide = limits.band < window < recipe.data.seq_len
    return "wider" if is_wide and recipe.mesh.cp > 1 else None


def _model_field(name: str) -> Callable[[Recipe], Hashable]:
    return lambda recipe: getattr(recipe.model, name, None)


PREDICATES: Mapping[str, Predicate] = {
    # Axes.
    **{
        f"ranks of {axis}": Predicate(_together(axis, axis), f"mesh.{axis}")
        for axis in (*AXES, "ep")
    },
    **{
        f"{one} together with {other}": Predicate(
            _together(one, other), f"mesh.{one}, mesh.{other}"
        )
        for place, one in enumerate((*AXES, "ep"))
        for other in (*AXES, "ep")[place + 1 :]
    },
    "pipeline ranks between others": Predicate(
        lambda r: _few(r.mesh.pp) if r.mesh.pp > 1 else None, "mesh.pp"
    ),
    "ranks that share a sequence": Predicate(
        lambda r: _few(r.mesh.cp) if r.mesh.cp > 1 else None, "mesh.cp"
    ),
    # Heads and widths.
    "key-value heads against tp": Predicate(_kv_heads, "model.n_kv_heads, mesh.tp"),
    "key-value heads of a rank of Ulysses": Predicate(
        _kv_heads_of_ulysses, "model.n_kv_heads, mesh.tp, mesh.cp, parallel.cp_method"
    ),
    "query heads of a key-value head": Predicate(
        lambda r: "several" if r.model.n_heads > r.model.n_kv_heads else "one",
        "model.n_heads, model.n_kv_heads",
    ),
    "all heads against the residual stream": Predicate(
        lambda r: _relation(r.model.n_heads * r.model.head_width, r.model.dim),
        "model.n_heads, model.head_dim, model.dim",
    ),
    "vocabulary over tp": Predicate(
        lambda r: _divides(r.mesh.tp, r.model.vocab) if r.mesh.tp > 1 else None,
        "model.vocab, mesh.tp",
    ),
    "what latent attention sends": Predicate(_latents, "model.kv_rank, mesh.cp"),
    "tied embeddings": Predicate(lambda r: r.model.tied, "model.tied"),
    "norms of heads": Predicate(_model_field("qk_norm"), "model.qk_norm"),
    "architecture": Predicate(_model_field("architecture"), "model.architecture"),
    "depths of prediction": Predicate(
        lambda r: _few(r.model.mtp_layers, 2) if r.model.mtp_layers else None, "model.mtp_layers"
    ),
    # Experts.
    "experts of a rank": Predicate(
        _of_experts(lambda m, r: "several" if m.experts > r.mesh.ep else "one"),
        "model.experts, mesh.ep",
    ),
    "experts of a token": Predicate(
        _of_experts(lambda m, _: _few(m.experts_per_token, 2)), "model.experts_per_token"
    ),
    "groups of experts": Predicate(_of_experts(_groups_of_experts), "model.expert_groups"),
    "shared experts": Predicate(
        _of_experts(lambda m, _: bool(getattr(m, "shared_ffn", 0))), "model.shared_ffn"
    ),
    "experts over other axes": Predicate(
        _of_experts(_ep_and_others), "mesh.ep, mesh.tp, mesh.dp_shard, mesh.cp"
    ),
    # The sequence.
    "tokens of a sequence": Predicate(
        lambda r: "one" if r.data.seq_len == 1 else _parity(r.data.seq_len), "data.seq_len"
    ),
    "window": Predicate(_window, "model.window, data.seq_len, mesh.cp, parallel.cp_balance"),
    # Blocks, stages and units.
    "kinds of blocks": Predicate(
        _kinds, "model.full_every, model.nope_every, model.dense_layers, model.moe_every"
    ),
    "kinds of blocks of a stage": Predicate(
        _kinds_by_stage, "model.n_layers, mesh.pp, parallel.stages"
    ),
    "blocks over stages": Predicate(
        _blocks_over_stages,
        "model.n_layers, mesh.pp, parallel.virtual_stages, parallel.stages",
    ),
    "checkpointed blocks": Predicate(_checkpointed, "memory.activation_checkpoint, mesh.pp"),
    "frozen blocks": Predicate(_frozen_blocks, "optim.train"),
    "units of FSDP": Predicate(_units, "parallel.fsdp_blocks, model.n_layers"),
    "kinds of blocks of a unit of FSDP": Predicate(
        _kinds_of_units, "parallel.fsdp_blocks, model.full_every, model.dense_layers"
    ),
    # What is computed in parts.
    "rounds of matrices": _of_matrices(_ROUNDS),
    "matrices of an owner in a round": _of_matrices(_UNITS),
    "parts of matrices from a rank to an owner in a message": _of_matrices(_PARTS),
    "parts of results from an owner to a rank in a message": _of_matrices(_RESULTS),
    "rows of gradients in host memory": _by_limits(_rows, "memory.cpu_offload, model.*"),
    "window against a band of queries": _by_limits(_bands, "model.window, mesh.cp"),
    # Micro-batches.
    "micro-batches": Predicate(
        lambda r: _few(r.micro_batches, 2), "data.global_batch, data.micro_batch"
    ),
    "micro-batches against pipeline ranks": Predicate(
        _micro_batches_of_ranks, "data.global_batch, data.micro_batch, mesh.pp"
    ),
    "micro-batches against the fewest of the schedule": Predicate(
        _more_than_fewest, "data.global_batch, data.micro_batch, mesh.pp, parallel.schedule"
    ),
    "samples of a micro-batch": Predicate(
        lambda r: _few(r.data.micro_batch, 2), "data.micro_batch"
    ),
}
