"""What a layout must satisfy: mesh, schedule, batch and precision together with the model. Pure; see ``joint``."""

from math import gcd, lcm

from composer3d.recipe.joint import Rule
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import divisors, either, mention, use, value_of
from composer3d.schedules import SCHEDULES, micro_batches_wrong
from composer3d.shape import ModelShape


def _tp_divides(other: str) -> Rule:
    """The row of one size that tensor parallelism cuts evenly. The way out lists what fits all of them."""

    def check(recipe: Recipe) -> str | None:
        size, tp = value_of(recipe, other), recipe.mesh.tp
        if not isinstance(size, int) or size % tp == 0:
            return None
        return f"{mention(recipe, 'mesh.tp')} must divide {mention(recipe, other)}; {use(_legal_tp(recipe.model), tp)}"

    return ("mesh.tp", other), check


def _legal_tp(shape: ModelShape) -> list[int]:
    return [tp for tp in divisors(gcd(shape.n_heads, shape.ffn)) if _kv_heads_fit(shape.n_kv_heads, tp)]


def _kv_heads_fit(kv_heads: int, tp: int) -> bool:
    """Whether every rank has as many key-value heads, or every head as many ranks that hold a copy of it."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _tp_fits_kv_heads(recipe: Recipe) -> str | None:
    shape, tp = recipe.model, recipe.mesh.tp
    if _kv_heads_fit(shape.n_kv_heads, tp):
        return None
    wrong = f"{mention(recipe, 'mesh.tp')} must divide {mention(recipe, 'model.n_kv_heads')} or be a multiple of it"
    return f"{wrong}; {use(_legal_tp(shape), tp)}"


def _every_rank_has_vocabulary(recipe: Recipe) -> str | None:
    vocab, tp = recipe.model.vocab, recipe.mesh.tp
    chunk = -(-vocab // tp)
    if chunk * (tp - 1) < vocab:
        return None
    return (
        f"{mention(recipe, 'mesh.tp')} cuts {mention(recipe, 'model.vocab')} into {-(-vocab // chunk)} chunks of "
        f"{chunk}, which leaves ranks without; use a smaller mesh.tp, or model.vocab = {chunk * tp}"
    )


def _uneven_vocabulary_has_even_columns(recipe: Recipe) -> str | None:
    """FSDP cuts the columns of what tp cuts into uneven rows, and takes even columns only."""
    dim, vocab, tp, mesh = recipe.model.dim, recipe.model.vocab, recipe.mesh.tp, recipe.mesh
    if vocab % tp == 0 or dim % (mesh.dp_shard * mesh.cp) == 0 or recipe.parallel.zero == 0:
        return None
    return (
        f"{mention(recipe, 'mesh.tp')} does not divide {mention(recipe, 'model.vocab')}, so "
        f"{mention(recipe, 'model.dim')} must be a multiple of {mention(recipe, 'mesh.dp_shard')} x "
        f"{mention(recipe, 'mesh.cp')}, which shard it; change them, or use model.vocab = {-(-vocab // tp) * tp}"
    )


def _sequence_divides(recipe: Recipe) -> str | None:
    """cp cuts a sequence into two chunks a rank, sequence parallelism what a rank has of it into tp parts."""
    seq_len, cp = recipe.data.seq_len, recipe.mesh.cp
    tp = recipe.mesh.tp if recipe.parallel.sequence_parallel else 1
    unit = cp * lcm(2 if cp > 1 else 1, tp)
    if seq_len % unit == 0:
        return None
    near = either([str(each) for each in (seq_len // unit * unit, seq_len // unit * unit + unit) if each])
    sequence = mention(recipe, "parallel.sequence_parallel")
    if cp == 1:
        what, way_out = mention(recipe, "mesh.tp") + f" with {sequence}", ", or parallel.sequence_parallel = false"
    else:
        what, way_out = f"{unit}: {mention(recipe, 'mesh.cp')} cuts it into {2 * cp} chunks", ""
        what += f", {mention(recipe, 'mesh.tp')} with {sequence} cuts a rank's two again" if tp > 1 else ""
    return f"{mention(recipe, 'data.seq_len')} must be a multiple of {what}; use {near}{way_out}"


def _stages_have_layers(recipe: Recipe) -> str | None:
    each, layers = recipe.parallel.stages_per_rank, recipe.model.n_layers
    if recipe.mesh.pp == 1 or recipe.mesh.pp * each <= layers:
        return None
    stages = mention(recipe, "mesh.pp") + (f", with {each} stages a rank," if each > 1 else "")
    way_out = f"use at most {layers // each}" if layers >= each else "use more layers or fewer parallel.virtual_stages"
    return f"{stages} is more than {mention(recipe, 'model.n_layers')}: a stage needs a layer; {way_out}"


def _schedule_takes_virtual_stages(recipe: Recipe) -> str | None:
    (least, most, _), wanted = SCHEDULES[recipe.parallel.schedule].stages, recipe.parallel.virtual_stages
    if wanted is None or least <= wanted <= most:
        return None
    need = f"{least}" if least == most else f"{least} or more"
    return (
        f"{mention(recipe, 'parallel.virtual_stages')} does not fit {mention(recipe, 'parallel.schedule')}, whose "
        f"ranks hold {need}; use {need}, or leave it out"
    )


def _cut_fits(recipe: Recipe) -> str | None:
    stages, layers = recipe.parallel.stages, recipe.model.n_layers
    if stages is None:
        return None
    each = recipe.parallel.stages_per_rank if recipe.mesh.pp > 1 else 1
    count, given = recipe.mesh.pp * each, mention(recipe, "parallel.stages")
    if len(stages) != count:
        ranks = f"{mention(recipe, 'mesh.pp')} with {each} a rank makes {count}"
        return f"{given} has {len(stages)} stages, but {ranks}; give {count} numbers, or leave it out"
    if min(stages) < 1:
        return f"{given} must give every stage a layer"
    if sum(stages) != layers:
        return f"{given} holds {sum(stages)} layers, but {mention(recipe, 'model.n_layers')}; make it add up"
    return None


_BATCH = ("data.micro_batch", "mesh.dp_replicate", "mesh.dp_shard")


def _batch_divides(recipe: Recipe) -> str | None:
    batch, unit = recipe.data.global_batch, recipe.data.micro_batch * recipe.batch_ranks
    if batch % unit == 0:
        return None
    product = " x ".join(mention(recipe, key) for key in _BATCH)
    near = either([str(each) for each in (batch // unit * unit, batch // unit * unit + unit) if each])
    return f"{mention(recipe, 'data.global_batch')} must be a multiple of {product}, which is {unit}; use {near}"


def _enough_micro_batches(recipe: Recipe) -> str | None:
    unit, pp = recipe.data.micro_batch * recipe.batch_ranks, recipe.mesh.pp
    count, rest = divmod(recipe.data.global_batch, unit)
    if rest or pp == 1:
        return None
    schedule, pipeline = recipe.parallel.schedule, mention(recipe, "mesh.pp")
    if (need := micro_batches_wrong(schedule, count, pp, pipeline)) is None:
        return None
    good = [each for each in range(1, count + 2 * pp + 1) if micro_batches_wrong(schedule, each, pp, "") is None]
    below, above = [each for each in good if each < count][-1:], [each for each in good if each > count][:1]
    way_out = either([str(unit * each) for each in (*below, *above)])
    way_out += ', or parallel.schedule = "GPipe", which takes fewer' if not below else ""
    product = " x ".join(mention(recipe, key) for key in _BATCH)
    return (
        f"{mention(recipe, 'data.global_batch')} over {product} gives a rank {count} micro-batch{'es' * (count > 1)}, "
        f"but {mention(recipe, 'parallel.schedule')} needs {need}; use data.global_batch = {way_out}"
    )


def _csv_has_a_file(recipe: Recipe) -> str | None:
    schedule, file = recipe.parallel.schedule, recipe.parallel.schedule_csv
    if (schedule == "csv") == (file is not None):
        return None
    if file is None:
        return f"{mention(recipe, 'parallel.schedule')} needs parallel.schedule_csv: the file of the schedule"
    return (
        f"{mention(recipe, 'parallel.schedule_csv')} is not read with {mention(recipe, 'parallel.schedule')}; "
        'remove it, or use parallel.schedule = "csv"'
    )


def _replicas_are_no_shards(recipe: Recipe) -> str | None:
    mesh = recipe.mesh
    if recipe.parallel.zero != 0 or mesh.dp_shard == 1:
        return None
    return (
        f"{mention(recipe, 'parallel.zero')} keeps whole parameters, but {mention(recipe, 'mesh.dp_shard')} cuts them; "
        f"use mesh.dp_shard = 1 with mesh.dp_replicate = {recipe.batch_ranks}, or parallel.zero = 1 or 3"
    )


def _pipeline_reduces_once(recipe: Recipe) -> str | None:
    if recipe.parallel.zero != 2 or recipe.mesh.pp == 1:
        return None
    return (
        f"{mention(recipe, 'parallel.zero')} reduces gradients after each micro-batch, but with "
        f"{mention(recipe, 'mesh.pp')} they stay whole until the last one; use parallel.zero = 1 or 3"
    )


def _compute_fits_params(recipe: Recipe) -> str | None:
    params, compute = recipe.precision.params, recipe.precision.computes_in
    if compute == params or (params, compute) == ("float32", "bfloat16"):
        return None
    legal = either([f'"{each}"' for each in (params, *(["bfloat16"] if params == "float32" else []))])
    return f"{mention(recipe, 'precision.compute')} does not fit {mention(recipe, 'precision.params')}; use {legal}"


def _split_backward_is_eager(recipe: Recipe) -> str | None:
    if not recipe.compile.enabled or recipe.mesh.pp == 1 or not SCHEDULES[recipe.parallel.schedule].splits:
        return None
    whole = either([f'"{name}"' for name, kind in SCHEDULES.items() if not kind.splits])
    return (
        f"{mention(recipe, 'compile.enabled')} makes one graph of a block's backward, which "
        f"{mention(recipe, 'parallel.schedule')} runs in two halves; use compile.enabled = false, or parallel.schedule "
        f"= {whole}"
    )


RULES: tuple[Rule, ...] = (
    _tp_divides("model.n_heads"),
    (("mesh.tp", "model.n_kv_heads", "model.n_heads", "model.ffn"), _tp_fits_kv_heads),
    _tp_divides("model.ffn"),
    (("mesh.tp", "model.vocab"), _every_rank_has_vocabulary),
    (
        ("mesh.tp", "model.vocab", "model.dim", "mesh.dp_shard", "mesh.cp", "parallel.zero"),
        _uneven_vocabulary_has_even_columns,
    ),
    (("data.seq_len", "mesh.tp", "mesh.cp", "parallel.sequence_parallel"), _sequence_divides),
    (("mesh.pp", "parallel.virtual_stages", "parallel.schedule", "model.n_layers"), _stages_have_layers),
    (("parallel.virtual_stages", "parallel.schedule"), _schedule_takes_virtual_stages),
    (("parallel.stages", "mesh.pp", "parallel.virtual_stages", "parallel.schedule", "model.n_layers"), _cut_fits),
    (("parallel.schedule_csv", "parallel.schedule"), _csv_has_a_file),
    (("data.global_batch", *_BATCH), _batch_divides),
    (("data.global_batch", *_BATCH, "parallel.schedule", "mesh.pp"), _enough_micro_batches),
    (("parallel.zero", "mesh.dp_shard", "mesh.dp_replicate"), _replicas_are_no_shards),
    (("parallel.zero", "mesh.pp"), _pipeline_reduces_once),
    (("precision.compute", "precision.params"), _compute_fits_params),
    (("compile.enabled", "parallel.schedule", "mesh.pp"), _split_backward_is_eager),
)
