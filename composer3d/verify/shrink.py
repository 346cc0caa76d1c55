"""Shrink a large recipe to small ones that a laptop can run and that represent it in a proof."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import combinations, islice, product
from typing import Any

from composer3d.facts.errors import UserError
from composer3d.facts.ranges import AS_IT_IS, InProof
from composer3d.facts.schedules import fewest_micro_batches, micro_batch_requirement
from composer3d.facts.units import units_of_blocks
from composer3d.models.registry import architecture
from composer3d.planner.stages import checkpointed_stages_of_ranks
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.rules import Violation, settle, violations
from composer3d.recipe.schema import AXES, MeshTable, Model, Recipe
from composer3d.recipe.stages import n_stages_of, stage_ranges
from composer3d.recipe.values import FIELDS, divisors, value_of, variant
from composer3d.verify.blocks import (
    MOST_DEPTHS,
    Blocks,
    by_stage,
    few_blocks,
    kinds_of_blocks,
    kinds_of_predicting_blocks,
)
from composer3d.verify.cuts import Cut, cut_of_rows, cuts_of_tensors

LIMIT = 16  # processes on one machine
HERE_LIMIT = 1024  # processes of a job that proves its own mesh; one process is the reference

# How the recipe's tables say that a proof keeps each key; the others stay as they are. [model] and
# [mesh], the sequence and the number of samples are the work of this module.
_IN_PROOF: dict[str, InProof] = {
    key: entry.metadata["in_proof"]
    for key, entry in FIELDS.items()
    if entry.metadata["in_proof"] is not AS_IT_IS
}
# If every N-th block is another one, a small stage may have this many layers to keep all kinds of
# blocks, and one more where stages differ; or as many as make the second number in all stages.
_MOST_OF_STAGE = 8
_MOST_OF_MODEL = 32
_LEAST_LATENT_HEAD = 6  # width of a small head with latents; of it, all but two are rotated
_LEAST_LATENT = 6  # the preferred width of a small latent
_GIVING_WAY = [key for key, kept in _IN_PROOF.items() if kept.gives_way]
# A small model has no window in place of one that holds the whole sequence.
_UNUSED_WITHOUT_WINDOWS = "model.rope_local_theta"


def shrink(full: Recipe) -> list[Recipe]:
    """Make small recipes that together represent ``full``.

    One recipe suffices if its mesh fits a laptop with every large axis cut. Otherwise there is one
    for every triple of the axes above 1, or every pair or single axis if triples are too large.
    More than two ranks of cp may need one more. The recipes keep these properties:

    - the mesh: which axes are above 1, and the whole mesh up to ``LIMIT`` processes;
    - heads: grouped-query or not; fewer key-value heads than tp (one or several), as many, or more;
      with Ulysses, one or several on a rank of tp and cp; heads that together are narrower or wider
      than the residual stream, or as wide;
    - the model: a vocabulary that tp does not divide, or an odd one; tied embeddings, norms and
      biases;
    - latents: whether ranks of cp send them, or keys and values;
    - experts: several on a rank or one; one expert of a token or several; groups; shared experts;
      dense layers, and stages of nothing else; whether ranks of ep are also ranks of tp or of
      data; whether several ranks shard each expert;
    - the sequence: one token, or an odd number of tokens; packing;
    - the window: one token, at most one chunk of the sequence, or a window that reaches one chunk
      or several chunks back;
    - blocks that differ by their number, in window, positions or experts: every kind, and no other
      (``lost_kinds`` are those that take more layers than a proof has time for); in each stage, the
      kinds that a stage of ``full`` has; and whether all stages begin at the same place of the
      pattern. Where fewer stages, or stages of at most 8 layers (or 32 in all), cannot have this,
      the stages come as near to those of ``full`` as they can;
    - FSDP: one block of a unit or several, and one unit of a stage or several;
    - memory: chunks of the loss, activation checkpointing, compilation and offload; if only the
      first stages are checkpointed, about their share of all stages, and whether a pipeline rank
      has checkpointed stages alone, some, or none;
    - float8 products, which are emulated in float64;
    - the pipeline: layers that the stages divide or not; an uneven explicit cut; one micro-batch or
      several, and as few as the schedule takes or more; the stages and micro-batches of a schedule
      from a file;
    - which parameters train, and which have rates of their own (``frozen``);
    - the optimizer: clipping (to 0.1, so that it is active), a learning rate from 1e-4 to 1e-2, and
      an epsilon of 1e-12 or more.

    The recipes also keep how FSDP cuts the tensors of linear layers (``_fsdp_cuts``). If one recipe
    cannot have all cuts, there are further recipes, so that at least one of them has each cut of
    ``full``. Where no small mesh can cut a tensor so, at least one recipe cuts another tensor so,
    if it can: FSDP cuts all tensors alike (``full.predicates`` compares the cuts of all).

    Raises:
        UserError: the file of a schedule is for more pipeline ranks than ``LIMIT``; or the rules of
            recipes refuse a small one.
        PlanError: the plan of a user's own architecture does not fit its model.
    """
    cuts = _fsdp_cuts(full)
    small_recipes = [_shrink_to(full, mesh, cuts) for mesh in _meshes(full)]
    kept = {item for small in small_recipes for item in _fsdp_cuts(small).items()}
    missing = cuts.items() - kept

    # Some cuts exclude each other in one shape, such as an even width of heads and uneven rows.
    while missing:
        candidates = [_shrink_to(full, mesh, dict(missing)) for mesh in _meshes_of_shards(full)]
        best = max(
            candidates, key=lambda small: len(missing & _fsdp_cuts(small).items()), default=None
        )
        if best is None or missing.isdisjoint(_fsdp_cuts(best).items()):
            break
        small_recipes.append(best)
        missing -= _fsdp_cuts(best).items()
    return small_recipes + _with_other_cuts(full, small_recipes)


def _with_other_cuts(full: Recipe, small_recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return further small recipes with each cut that no tensor of ``small_recipes`` has.

    The tensors of the feed-forward layer get it, as any number of rows is right for them.
    """
    shown = {cut for small in small_recipes for cut in cuts_of_tensors(small).values()}
    found: list[Recipe] = []
    for cut in sorted({*cuts_of_tensors(full).values()} - shown):
        candidates = (
            _shrink_to(full, mesh, {"feed-forward": cut}) for mesh in _meshes_of_shards(full)
        )
        with_cut = (small for small in candidates if cut in cuts_of_tensors(small).values())
        found += islice(with_cut, 1)
    return found


def shrink_on_own_mesh(full: Recipe) -> Recipe:
    """Make a small recipe on the mesh of ``full`` itself, whatever its size up to ``HERE_LIMIT``.

    It keeps what ``shrink`` keeps, apart from cuts of FSDP that one recipe cannot have together.

    Raises:
        UserError: the mesh is larger.
    """
    if full.mesh.world_size > HERE_LIMIT:
        raise UserError(
            f"verify --here proves a mesh of at most {HERE_LIMIT:,} processes, and this one has "
            f"{full.mesh.world_size:,}; prove a smaller dp_shard or dp_replicate on a part of the "
            "machine, check all of it with composer3d doctor, and the layout with composer3d "
            "verify without --here"
        )
    return shrink_to(full, full.mesh)


def shrink_to(full: Recipe, mesh: MeshTable) -> Recipe:
    """Make a small recipe on a mesh of any size.

    It keeps what ``shrink`` keeps, apart from cuts of FSDP that one recipe cannot have together.
    """
    return _shrink_to(full, mesh, _fsdp_cuts(full))


def lost_kinds(full: Recipe, small_recipes: Iterable[Recipe]) -> list[str]:
    """Return, in words, the kinds of blocks of ``full`` that none of ``small_recipes`` has."""
    lost = []
    for kinds_of, name in (
        (kinds_of_blocks, "blocks"),
        (kinds_of_predicting_blocks, "blocks of multi-token prediction"),
    ):
        kept = {
            kind for small in small_recipes for kind in kinds_of(small.model, small.data.seq_len)
        }
        all_kinds = {*kinds_of(full.model, full.data.seq_len)}
        lost += [f"{name} {kind}" for kind in sorted(all_kinds - kept)]
    return lost


def _fsdp_cuts(recipe: Recipe) -> dict[str, Cut]:
    """Return how FSDP cuts a tp rank's rows of each kind of tensor; empty if it shards nothing."""
    shards = recipe.mesh.dp_shard * recipe.mesh.cp if recipe.parallel.zero else 1
    return _cuts_of_model(recipe.model, recipe.mesh.tp, shards) if shards > 1 else {}


def _cuts_of_model(model: Model, tp: int, shards: int) -> dict[str, Cut]:
    vocab_chunk = -(-model.vocab // tp)
    kv_rows = model.n_kv_heads * model.head_width
    if model.n_kv_heads % tp == 0:
        # Otherwise tp does not shard the key-value heads, and each tp rank holds all of them.
        kv_rows //= tp
    rows = {
        "width": model.dim,
        "queries": model.n_heads * model.head_width // tp,
        "keys": kv_rows,
        "feed-forward": model.ffn // tp,
        "vocabulary": vocab_chunk,
        "last of the vocabulary": model.vocab - vocab_chunk * (tp - 1),
    }
    if model.qk_norm:
        rows["head"] = model.head_width
    rows |= _rows_of_latents(model, tp)
    return {kind: cut_of_rows(count, shards) for kind, count in rows.items()}


def _rows_of_latents(model: Model, tp: int) -> dict[str, int]:
    """Return the rows of latent attention's own tensors, "keys" included; empty without latents."""
    latent: Any = model
    if not _has_latents(model):
        return {}
    rows = {
        "keys": latent.n_heads * (latent.plain_dim + latent.value_dim) // tp,
        "latents": latent.kv_rank + latent.rope_dim,
        "latent of keys": latent.kv_rank,
    }
    return rows | ({"latent of queries": latent.query_rank} if latent.query_rank else {})


def _has_latents(model: Model) -> bool:
    return "kv_rank" in _field_names(model)


# The small meshes.


def _meshes(full: Recipe) -> list[MeshTable]:
    """Return the meshes of the small recipes.

    This is the mesh of ``full`` if it is small, or else one mesh with all its axes cut. If that is
    too large, it is one mesh for every triple of the axes, or else every pair or single axis. cp
    and dp_shard get three ranks where two would not show all cases.

    Raises UserError if a schedule from a file has too many pipeline ranks.
    """
    mesh = full.mesh
    keeps_pp = full.parallel.schedule == "csv"  # the file fixes the number of pipeline ranks
    if mesh.world_size <= LIMIT:
        return [mesh]
    if keeps_pp and mesh.pp > LIMIT:
        raise UserError(
            f"verify runs at most {LIMIT} processes, and {full.parallel.schedule_csv} is for "
            f"{mesh.pp} pipeline ranks, which no smaller number can stand for; verify a schedule "
            f"for {LIMIT} ranks or fewer"
        )

    sizes = _small_sizes(full)
    wide_axes = [axis for axis in AXES if sizes[axis] > 1 and not (keeps_pp and axis == "pp")]
    choices = _first_that_fit(sizes, wide_axes)

    # Two ranks of cp do not show in which order parts of the sequence, or of the heads, are joined,
    # nor does a rank forward the keys that it received: take three.
    has_many_of_cp = mesh.cp > 2
    # Two shards divide most sizes: take three if some sizes are uneven in ``full``.
    is_uneven = any(cut != "even" for cut in _fsdp_cuts(full).values())
    axes_of_three = ["cp"] if has_many_of_cp else []
    if is_uneven and mesh.dp_shard > 2:
        axes_of_three.append("dp_shard")

    meshes = [_with_ep(full, _widen_to_three(choice, axes_of_three)) for choice in choices]
    if has_many_of_cp and all(small.cp <= 2 for small in meshes):
        meshes.append(MeshTable(dp_shard=1, cp=3))
    if mesh.ep > 1 and all(_ep_relations(small) != _ep_relations(mesh) for small in meshes):
        meshes += [
            small
            for small in _meshes_of_shards(full)
            if _ep_relations(small) == _ep_relations(mesh)
        ][:1]
    return meshes


def _small_sizes(full: Recipe) -> dict[str, int]:
    """Return the size of each axis, cut to 2, or to 3 or 4 where two ranks do not show all cases.

    With a schedule from a file, pp is not cut.
    """
    mesh, keeps_pp = full.mesh, full.parallel.schedule == "csv"
    sizes = {axis: min(2, getattr(mesh, axis)) for axis in AXES}
    sizes["tp"] = min(_small_tp(full), mesh.tp)
    # With four pipeline ranks, some have neighbours on both sides.
    sizes["pp"] = mesh.pp if keeps_pp else min(4, mesh.pp)
    if math.prod(sizes.values()) > LIMIT and not keeps_pp:
        # With three ranks there can be several micro-batches, but fewer than ranks.
        has_few_micro_batches = 1 < full.micro_batches < mesh.pp
        sizes["pp"] = min(3 if has_few_micro_batches else 2, sizes["pp"])
    return sizes


def _with_ep(full: Recipe, small: MeshTable) -> MeshTable:
    """Give ``small`` the ep that relates to its other axes most as in ``full``.

    dp_shard is doubled, and pp cut to 2, if that helps and fits. With one expert on a rank, four
    ranks of ep are enough experts for a small model; for that, dp_shard may be doubled twice.
    """
    if full.mesh.ep == 1:
        return small
    wanted = _ep_relations(full.mesh)
    is_single = full.model.experts == full.mesh.ep
    enough = min(4, full.model.experts)
    meshes = [small]
    if small.pp > 2 and full.parallel.schedule != "csv":
        meshes.append(replace(small, pp=2))
    for mesh, factor in product(tuple(meshes), (2, 4) if is_single else (2,)):
        widened = replace(mesh, dp_shard=factor * mesh.dp_shard)
        if full.mesh.dp_shard >= widened.dp_shard and widened.world_size <= LIMIT:
            meshes.append(widened)
    candidates = []
    for mesh in meshes:
        ranks = mesh.dp_shard * mesh.cp * mesh.tp
        candidates += [
            replace(mesh, ep=ep) for ep in divisors(ranks) if ep > 1 and ep <= full.model.experts
        ]

    def likeness(mesh: MeshTable) -> int:
        alike = sum(a == b for a, b in zip(_ep_relations(mesh), wanted, strict=True))
        return alike + (is_single and mesh.ep >= enough)

    # ``max`` takes the first of the best: few changes of the mesh, then few ranks of ep.
    return max(candidates, key=likeness, default=small)


def _ep_relations(mesh: MeshTable) -> tuple[bool, ...]:
    """Describe how ep relates to the other axes; a small mesh should keep all of this."""
    sequence_ranks = mesh.cp * mesh.tp
    return (
        mesh.pp > 1 and mesh.efsdp > 1,
        mesh.tp > 1,
        mesh.efsdp > 1,
        mesh.ep > mesh.tp,
        mesh.ep > sequence_ranks,
        mesh.ep < mesh.tp,
        mesh.ep % mesh.tp == 0,
    )


def _small_tp(full: Recipe) -> int:
    """Return how many tp ranks show all cases.

    These are 4 if several tp ranks share each of several key-value heads, or if ep cuts tp, and
    otherwise 2.
    """
    mesh = full.mesh
    shares_heads = mesh.tp > full.model.n_kv_heads > 1
    return 4 if shares_heads or 1 < mesh.ep < mesh.tp else 2


def _first_that_fit(sizes: dict[str, int], wide_axes: list[str]) -> list[dict[str, int]]:
    """Choose the wide axes that keep their sizes; the others get size 1.

    Returns the choice of all axes if it has at most ``LIMIT`` processes. Otherwise returns every
    choice of three axes, or else of two, one or none: the first number for which all choices fit.
    """
    for number in (len(wide_axes), 3, 2, 1, 0):
        choices = []
        for kept_axes in combinations(wide_axes, number):
            dropped_axes = set(wide_axes) - set(kept_axes)
            choices.append(sizes | dict.fromkeys(dropped_axes, 1))
        if choices and all(math.prod(choice.values()) <= LIMIT for choice in choices):
            return choices
    raise AssertionError("a mesh of the kept axes alone has at most LIMIT processes")


def _widen_to_three(sizes: dict[str, int], axes: list[str]) -> MeshTable:
    """Make a mesh with three ranks instead of two on as many of ``axes`` as ``LIMIT`` allows."""
    wide_axes = [axis for axis in axes if sizes[axis] > 1]
    for number in (2, 1, 0):
        for widened_axes in combinations(wide_axes, number):
            widened = sizes | dict.fromkeys(widened_axes, 3)
            if math.prod(widened.values()) <= LIMIT:
                return MeshTable(**widened)
    raise AssertionError("the mesh that is not widened has at most LIMIT processes")


def _meshes_of_shards(full: Recipe) -> list[MeshTable]:
    """Return the meshes on which further recipes can have the missing cuts, smallest first.

    This is the mesh of ``full`` if it is small, or else all small meshes of dp_shard, cp and tp.
    """
    mesh = full.mesh
    if mesh.world_size <= LIMIT:
        return [mesh]
    meshes = [
        _with_ep(full, MeshTable(dp_shard=dp_shard, cp=cp, tp=tp))
        for dp_shard, cp, tp in product(
            range(1, min(mesh.dp_shard, 8) + 1),
            range(1, min(mesh.cp, 4) + 1),
            {1, min(mesh.tp, _small_tp(full))},
        )
        if dp_shard * cp > 1 and dp_shard * cp * tp <= LIMIT
    ]
    return sorted(meshes, key=lambda small: small.world_size)


# The small recipe on a mesh.


def _resized(shape: Model, **sizes: Any) -> Model:
    """Return ``shape`` with other ``sizes``. Sizes that its architecture lacks are ignored."""
    names = _field_names(shape)
    return replace(shape, **{name: size for name, size in sizes.items() if name in names})


def _shrink_to(full: Recipe, mesh: MeshTable, cuts: Mapping[str, Cut]) -> Recipe:
    """Make a small recipe on ``mesh`` that keeps as many of ``cuts`` as possible."""
    stages = _small_stages(full, mesh)
    seq_len, window = _sequence(full, mesh)
    sizes = {
        **_expert_sizes(full, mesh),
        "n_layers": _layers(full, mesh) if stages is None else sum(stages),
        "window": window,
        "full_every": 0,
        "nope_every": 0,
        "mtp_layers": min(full.model.mtp_layers, MOST_DEPTHS),
    }
    shape = _resized(_shape(full, mesh, cuts), **sizes)
    if not _has_kinds_of_blocks(full, mesh, shape, stages):
        blocks = _blocks_of_all_kinds(full, mesh)
        shape = _resized(shape, n_layers=sum(blocks.stages), **blocks.sizes)
        stages = blocks.stages if mesh.pp > 1 else None

    values = {key: row.of(value_of(full, key)) for key, row in _IN_PROOF.items()}
    kept = variant(full, values)
    batch = kept.data.micro_batch * _micro_batches(full, mesh.pp) * mesh.batch_ranks
    optim = kept.optim
    if optim.train is not None:
        # It needs torch, for which a wrong argument of ``verify`` should not wait.
        from composer3d.verify.frozen import train_in_small

        in_stages = replace(
            kept, model=shape, mesh=mesh, parallel=replace(kept.parallel, stages=stages)
        )
        names = train_in_small(optim.train, full.model, shape, stage_ranges(in_stages))
        optim = replace(optim, train=names)
    if optim.groups is not None:
        from composer3d.verify.frozen import groups_in_small

        optim = replace(optim, groups=groups_in_small(optim, full.model, shape))
    if optim.matrices is not None:
        optim = replace(optim, matrices=_kinds_of_matrices(full))

    small = replace(
        kept,
        model=shape,
        mesh=mesh,
        parallel=replace(kept.parallel, stages=stages),
        data=replace(kept.data, seq_len=seq_len, global_batch=batch),
        optim=optim,
    )
    small = _with_stages_checkpointed(full, small)
    small = settle(small, [*_GIVING_WAY, _UNUSED_WITHOUT_WINDOWS])
    for violation in violations_of_small(small):
        raise UserError(f"verify cannot make this recipe small: {violation.reason(small)}")
    return small


def violations_of_small(small: Recipe) -> list[Violation]:
    """Return the violations of a small recipe, apart from sizes that float8 kernels do not take.

    A proof emulates these products.
    """
    return violations(without_float8(small))


def without_float8(recipe: Recipe) -> Recipe:
    """Return the recipe with products in the dtype of all else that is computed."""
    return replace(recipe, precision=replace(recipe.precision, matmul="compute"))


def _kinds_of_matrices(full: Recipe) -> tuple[str, ...]:
    """Return globs of the parameters that ``optim.matrices`` chooses, in a block of any number."""
    names = matrices_of(architecture(full.model.architecture), full.model, full.optim)
    return tuple(sorted({re.sub(r"^blocks\.[^.]*", "blocks.*", name) for name in names}))


def _with_stages_checkpointed(full: Recipe, small: Recipe) -> Recipe:
    """Return ``small`` with about the same share of its stages checkpointed as in ``full``.

    It keeps whether pipeline ranks checkpoint all of their stages, some or none. Without a pipeline
    there is one stage, and its blocks are checkpointed.
    """
    checkpointing = full.memory.checkpointing
    if checkpointing.blocks.stages is None:
        return small
    count = n_stages_of(small)
    share = checkpointing.blocks.stages * count / n_stages_of(full)
    fewer = sorted(range(1, count), key=lambda number: abs(number - share))
    values = [str(checkpointing.in_first(number)) for number in fewer]
    values = values or [str(checkpointing.in_first(None))]
    choices = [variant(small, {"memory.activation_checkpoint": value}) for value in values]
    kinds = checkpointed_stages_of_ranks(full)
    alike = (one for one in choices if checkpointed_stages_of_ranks(one) == kinds)
    return next(alike, choices[0])


def _count_stages(full: Recipe, pp: int) -> int:
    return pp * full.parallel.stages_per_rank if pp > 1 else 1


def _layers(full: Recipe, mesh: MeshTable) -> int:
    """Return few layers a stage, plus one layer if ``full`` cannot cut its layers evenly."""
    extra = 1 if full.model.n_layers % _count_stages(full, full.mesh.pp) else 0
    layers = _count_stages(full, mesh.pp) * _layers_of_stages(full) + extra
    # At least one layer with experts, after one without.
    expert_sizes = _expert_sizes(full, mesh)
    dense_layers = expert_sizes.get("dense_layers", 0)
    return max(layers, dense_layers + 1, expert_sizes.get("moe_every", 1))


def _layers_of_stages(full: Recipe) -> int:
    """Return the number of layers of a small stage, without an explicit cut of ``full``."""
    full_layers = max(1, full.model.n_layers // _count_stages(full, full.mesh.pp))
    return _layers_of_stage(full, full_layers)


def _layers_of_stage(full: Recipe, layers: int) -> int:
    """Return one or two layers for a stage of ``layers``, or three if it has several units.

    The units of FSDP then have two blocks and one.
    """
    size = full.parallel.fsdp_blocks
    has_units = size > 1 and len(units_of_blocks(range(layers), size)) > 1
    return 1 + _IN_PROOF["parallel.fsdp_blocks"].of(size) if has_units else min(2, layers)


def _small_stages(full: Recipe, mesh: MeshTable) -> tuple[int, ...] | None:
    """Return the number of layers of each stage, or None without an explicit cut or a pipeline.

    A stage has few layers if it is as small as the smallest stage of ``full``, and one more
    otherwise. Few is one; if FSDP's units have several blocks, it is as ``_layers_of_stage`` says.
    """
    stages = full.parallel.stages
    if stages is None or mesh.pp == 1:
        return None
    stages = _some_stages(stages, _count_stages(full, mesh.pp))
    few = _layers_of_stage(full, min(stages)) if full.parallel.fsdp_blocks > 1 else 1
    return _few_layers(stages, few)


def _some_stages(stages: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return ``count`` of the stages: all in their order, or else the largest and the smallest."""
    return stages if len(stages) == count else (max(stages), *sorted(stages))[:count]


def _few_layers(stages: tuple[int, ...], few: int) -> tuple[int, ...]:
    """Return ``few`` layers for each stage of the smallest ones, and one more for the others."""
    return tuple(few + 1 if layers > min(stages) else few for layers in stages)


def _at_most(stages: tuple[int, ...], few: int) -> tuple[int, ...]:
    """Return the layers of each stage, but ``few`` for those that have more."""
    return tuple(min(layers, few) for layers in stages)


def _has_kinds_of_blocks(
    full: Recipe, mesh: MeshTable, shape: Model, stages: tuple[int, ...] | None
) -> bool:
    """Return whether a small model has the kinds of blocks of ``full``, in its stages, too.

    With fewer stages than ``full`` has sets of kinds, only the kinds of all blocks are compared.
    """
    kinds = kinds_of_blocks(full.model, full.data.seq_len)
    small_kinds = kinds_of_blocks(shape, full.data.seq_len)
    if set(kinds) != set(small_kinds):
        return False
    count = _count_stages(full, mesh.pp)
    kinds_of_stages = by_stage(kinds, _stages(full))
    if len(set(kinds)) == 1 or len(kinds_of_stages) > count:
        return True
    small = replace(full, model=shape, mesh=mesh, parallel=replace(full.parallel, stages=stages))
    return by_stage(small_kinds, _stages(small)) == kinds_of_stages


def _stages(recipe: Recipe) -> tuple[int, ...]:
    """Return the number of layers of each stage, whether the recipe's cut is explicit or not.

    Those of multi-token prediction are left out, as in ``parallel.stages``.
    """
    *stages, last = map(len, stage_ranges(recipe))
    return (*stages, last - recipe.model.mtp_layers)


def _blocks_of_all_kinds(full: Recipe, mesh: MeshTable) -> Blocks:
    """Choose the blocks of a small model that has all kinds of blocks of ``full``.

    With a pipeline, the cut is always explicit: a cut by parameters leaves few blocks beside the
    head.
    """
    model, seq_len = full.model, full.data.seq_len
    count = _count_stages(full, mesh.pp)
    most = max(_MOST_OF_STAGE, _MOST_OF_MODEL // count)
    if count == 1:
        least = _layers(full, mesh)
        numbers = range(least, max(least, min(most, model.n_layers)) + 1)
        return few_blocks(model, seq_len, (model.n_layers,), tuple((layers,) for layers in numbers))

    full_stages = _stages(full)
    stages = _some_stages(full_stages, count)
    least = _layers_of_stage(full, min(stages))

    def cuts_like(stages: tuple[int, ...]) -> list[tuple[int, ...]]:
        cuts = {_few_layers(stages, few) for few in range(least + 1, most + 1)}
        # A stage that is shorter than others may lack kinds of blocks. It can stay as short.
        cuts |= {_at_most(stages, few) for few in range(min(stages) + 1, most + 2)}
        return sorted(
            (cut for cut in cuts if sum(cut) <= model.n_layers), key=lambda c: (sum(c), c)
        )

    # Dense blocks come first: their end may be within the second stage, whatever its length.
    leading = (*full_stages[: count - 1], min(full_stages))
    cuts = (_few_layers(stages, least), *cuts_like(stages), *cuts_like(leading))
    return few_blocks(model, seq_len, full_stages, cuts)


def _sequence(full: Recipe, mesh: MeshTable) -> tuple[int, int]:
    """Return the small sequence length and window (0: none), as in ``full`` if that is small."""
    chunks = replace(full, mesh=mesh).sequence_chunks
    # The length must be a multiple of this.
    unit = mesh.cp * math.lcm(chunks // mesh.cp, mesh.tp if full.parallel.sequence_parallel else 1)

    seq_len, window = full.data.seq_len, full.model.window
    small_len = -(-max(16, 8 * mesh.cp, 2 * unit) // unit) * unit
    if seq_len % 2 and unit % 2:
        # Keep an odd length odd.
        small_len += unit * (1 - small_len % 2)
    if seq_len <= small_len and seq_len % unit == 0:
        small_len = seq_len

    if not 0 < window < seq_len or small_len == 1:
        return small_len, 0
    if small_len == seq_len and mesh.cp in (1, full.mesh.cp):
        return small_len, window
    if mesh.cp == 1:
        return small_len, min(window, 5, small_len - 1)

    small_chunk, full_chunk = small_len // chunks, seq_len // full.sequence_chunks
    if window <= full_chunk:
        return small_len, min(window, 3)
    # With a window of chunk + 2 tokens, the first token of a chunk sees past the previous chunk.
    reaches_two_back = window > full_chunk + 1
    small_window = 2 * small_chunk + 2 if reaches_two_back else small_chunk + 1
    return small_len, min(small_window, small_len - 1)


def _micro_batches(full: Recipe, pp: int) -> int:
    """Return a small number of micro-batches that the schedule accepts.

    It is above 1 if the number of ``full`` is, and above the fewest that the schedule takes for its
    ranks if the number of ``full`` is.
    """
    count, schedule = full.micro_batches, full.parallel.schedule
    if schedule == "csv" and pp > 1:
        return count
    wanted = count if count <= 8 else max(4, 2 * pp)
    if pp == 1:
        return wanted
    if count < full.mesh.pp:
        # Keep fewer micro-batches than ranks, but several if there are several.
        wanted = min(count, max(2, pp - 1))
    elif count > fewest_micro_batches(schedule, full.mesh.pp):
        wanted = max(wanted, fewest_micro_batches(schedule, pp) + 1)
    smallest = min(2, wanted)
    candidates = (*range(wanted, smallest - 1, -1), *range(wanted, 2 * pp + 1))
    return next(
        number for number in candidates if micro_batch_requirement(schedule, number, pp, "") is None
    )


# The small model.


def _shape(full: Recipe, mesh: MeshTable, cuts: Mapping[str, Cut]) -> Model:
    """Return a small model with as many of ``cuts`` as possible.

    Its sizes are chosen one after another: heads and width, feed-forward, vocabulary.
    """
    model = full.model
    shards = mesh.dp_shard * mesh.cp if full.parallel.zero else 1

    def best(candidates: Iterable[Model], *kinds: str) -> Model:
        """Return the first candidate that misses the fewest cuts of these kinds."""
        wanted = {kind: cuts[kind] for kind in kinds if kind in cuts}
        fewest_missed, chosen = math.inf, None
        for candidate in candidates:
            missed = len(wanted.items() - _cuts_of_model(candidate, mesh.tp, shards).items())
            if missed < fewest_missed:
                fewest_missed, chosen = missed, candidate
            if missed == 0:
                break
        assert chosen is not None
        return chosen

    is_uneven = model.vocab % full.mesh.tp > 0
    dim_multiple = math.lcm(shards if is_uneven else 1, _expert_shards(full, mesh))
    heads = _heads(full, mesh, dim_multiple)
    small = best(heads, "width", "queries", "keys", "head")
    if _has_latents(model):
        of_keys = _with_latents(full, mesh, small, 4 * shards)
        small = best(of_keys, "latents", "latent of keys")
        ranks = range(_LEAST_LATENT, _LEAST_LATENT + 4 * shards)
        if getattr(model, "query_rank", 0):
            small = best((_resized(small, query_rank=rank) for rank in ranks), "latent of queries")

    # Try 12 feed-forward rows per tp rank first, then more, then fewer.
    rows_per_rank = (*range(12, 12 + 4 * shards), *range(11, 0, -1))
    widths = [mesh.tp * rows for rows in rows_per_rank]
    if model.experts and "expert_ffn" not in _field_names(model):
        # It is the width of experts, too.
        unit = _expert_unit(full, mesh)
        widths = [width for width in widths if width % unit == 0] or [unit]
    small = best((replace(small, ffn=width) for width in widths), "feed-forward")

    # Take at least 256 tokens, the number of bytes, if the full vocabulary has as many. Without tp,
    # one token more stands for a vocabulary that tp does not divide.
    first = min(256, model.vocab) + (1 if is_uneven and mesh.tp == 1 else 0)
    vocabs = [
        vocab
        for vocab in range(first, 260 + 4 * mesh.tp * shards)
        if mesh.tp == 1 or _is_vocab_cut(vocab, mesh.tp, is_uneven)
    ]
    if mesh.tp > 1 or not is_uneven:
        # An odd vocabulary stays odd, and an even one even, unless a cut needs another.
        vocabs.sort(key=lambda vocab: (vocab - model.vocab) % 2)
    return best(
        (replace(small, vocab=vocab) for vocab in vocabs), "vocabulary", "last of the vocabulary"
    )


def _with_latents(full: Recipe, mesh: MeshTable, small: Model, count: int) -> list[Model]:
    """Return ``small`` with latents of keys of about ``count`` widths to try, the best first.

    Ranks of cp send what they send in ``full``, latents or keys and values, if ``mesh`` has cp.
    """
    # A latent as wide as the keys and values of a rank is never sent.
    most = 2 * small.n_kv_heads * small.head_width // mesh.tp
    ranks = (*range(_LEAST_LATENT, most + count), *range(_LEAST_LATENT - 1, 0, -1))
    models = [_resized(small, kv_rank=rank) for rank in ranks]
    alike = [
        model
        for model in models
        if replace(full, mesh=mesh, model=model).sends_latents == full.sends_latents
    ]
    return alike or models


def _expert_shards(full: Recipe, mesh: MeshTable) -> int:
    """The number of ranks that shard each expert."""
    return mesh.efsdp if full.model.experts and full.parallel.zero else 1


def _expert_unit(full: Recipe, mesh: MeshTable) -> int:
    """The width of a small expert is a multiple of this.

    Four elements: so that a float32 proof runs the kernel of training.
    """
    return math.lcm(_expert_shards(full, mesh), 4)


def _expert_sizes(full: Recipe, mesh: MeshTable) -> dict[str, Any]:
    """The fields of a shape with experts that it has; empty if ``full`` has none of them."""
    model: Any = full.model
    names = _field_names(model)
    if not model.experts or "experts_per_token" not in names:
        return {}
    all_groups, groups_per_token = (
        getattr(model, name, 1) for name in ("expert_groups", "groups_per_token")
    )
    groups = min(4, all_groups)
    chosen_groups = min(groups_per_token, groups)
    if groups_per_token < all_groups:
        chosen_groups = min(2, groups_per_token, groups - 1)
    per_token = min(2, model.experts_per_token)

    several = model.experts > full.mesh.ep
    unit = math.lcm(groups, mesh.ep)
    experts = model.experts
    if experts > 16 or experts % unit or (experts > mesh.ep) != several:
        # A token chooses some of them, so there are more than ``per_token``.
        of_each = 2 if several else 1
        least = max(min(4, model.experts), of_each * mesh.ep, of_each * groups)
        experts = -(-least // unit) * unit

    all_dense = getattr(model, "dense_layers", 0)
    dense_layers = min(1, all_dense)
    layers_per_stage = full.model.n_layers // _count_stages(full, full.mesh.pp)
    if mesh.pp > 1 and all_dense >= layers_per_stage:
        # A pipeline rank without experts. Small stages have as many layers (``_layers``).
        dense_layers = _layers_of_stage(full, layers_per_stage)

    width = _expert_unit(full, mesh)
    sizes = {
        "experts": experts,
        "experts_per_token": per_token,
        "expert_groups": groups,
        "groups_per_token": chosen_groups,
        "expert_ffn": width * -(-10 // width),
        "shared_ffn": 10 * mesh.tp if getattr(model, "shared_ffn", 0) else 0,
        "dense_layers": dense_layers,
        "moe_every": min(2, getattr(model, "moe_every", 1)),
    }
    return {name: size for name, size in sizes.items() if name in names}


def _field_names(shape: Model) -> set[str]:
    return {entry.name for entry in fields(shape)}


def _is_vocab_cut(vocab: int, tp: int, is_uneven: bool) -> bool:
    """Return whether tp divides ``vocab`` (or not, if ``is_uneven``) and its last rank has rows."""
    return (vocab % tp > 0) == is_uneven and -(-vocab // tp) * (tp - 1) < vocab


def _heads(full: Recipe, mesh: MeshTable, dim_multiple: int) -> Iterator[Model]:
    """Yield small models to try, with few and narrow heads that keep the relations in ``full``.

    The preferred ones come first. The width of the residual stream is a multiple of
    ``dim_multiple``.
    """
    model = full.model
    shards = mesh.dp_shard * mesh.cp
    # 1: all heads together are wider than the residual stream; -1: narrower; 0: as wide.
    wider = _sign(model.head_width * model.n_heads - model.dim)

    first_width = {0: 8, 1: 12, -1: 4}[wider]
    widths = (
        *range(first_width, first_width + 4 * shards + 2, 2),
        *range(first_width - 2, 0, -2),
    )
    for (n_heads, n_kv_heads), width in product(_numbers_of_heads(full, mesh), widths):
        if _has_latents(model) and width < _LEAST_LATENT_HEAD:
            continue
        for dim in _stream_widths(n_heads, width, wider, shards):
            if dim % dim_multiple == 0 and _sign(n_heads * width - dim) == wider:
                yield _resized(
                    model,
                    n_heads=n_heads,
                    n_kv_heads=n_kv_heads,
                    dim=dim,
                    head_dim=width if wider else None,
                    **_parts_of_a_head(model, width),
                )


def _parts_of_a_head(model: Model, width: int) -> dict[str, int]:
    """Return the widths of the parts of a small head with latents; empty without latents."""
    if not _has_latents(model):
        return {}
    value_dim = width - 1 if model.value_width < model.head_width else width
    return {"rope_dim": _LEAST_LATENT_HEAD - 2, "value_dim": value_dim}


def _stream_widths(n_heads: int, width: int, wider: int, shards: int) -> list[int]:
    """Return the widths of the residual stream to try, the best first.

    All heads together must be wider than it (``wider`` = 1), narrower (-1) or as wide (0).
    """
    if wider == 0:
        return [n_heads * width]
    near = 8 * n_heads if wider > 0 else max(8 * n_heads, n_heads * width + 2)
    # Even widths come before odd ones. In each group, ``near`` and above come before smaller ones.
    return [
        dim
        for odd in (0, 1)
        for dim in (*range(near + odd, near + 4 * shards, 2), *range(2 + odd, near, 2))
    ]


def _numbers_of_heads(full: Recipe, mesh: MeshTable) -> list[tuple[int, int]]:
    """Return numbers of heads and of key-value heads to try, the best first.

    Their relation to tp is the same as in ``full``.
    """
    model, tp = full.model, mesh.tp
    if model.n_kv_heads < full.mesh.tp and tp > 1:
        # Several tp ranks share a key-value head.
        n_kv_heads = max(min(2, model.n_kv_heads, tp // 2), tp * model.n_kv_heads // full.mesh.tp)
        per_rank = min(2, model.n_heads // full.mesh.tp)
        choices = [per_rank, per_rank + 1] if per_rank > 1 else [per_rank]
        return [(tp * heads, n_kv_heads) for heads in choices]

    kv_heads_per_rank = [1]
    if model.n_kv_heads > full.mesh.tp:
        few, step = 2, 1
        if full.parallel.cp_method == "ulysses" and mesh.cp > 1:
            # Ulysses distributes the heads of a tp rank over the cp ranks.
            several = model.n_kv_heads > full.mesh.tp * full.mesh.cp
            few, step = (2 if several else 1) * mesh.cp, mesh.cp
        kv_heads_per_rank = [few, few + step, 3 * few]
    queries_per_kv_head = [1] if model.n_heads == model.n_kv_heads else [2, 3]
    return [
        (tp * kv_heads * queries, tp * kv_heads)
        for kv_heads in kv_heads_per_rank
        for queries in queries_per_kv_head
    ]


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
