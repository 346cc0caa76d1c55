"""What values of a recipe must satisfy together: one small function and one row of ``RULES`` for each rule. Pure.

The first key of a row is the one at fault. A function decides by the keys of its row alone, so that none meets a value
that ``ranges`` has refused already (a zero to divide by).
"""

from collections.abc import Callable
from math import gcd

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import either, mention, value_of


def divisors(number: int, *, at_most: int = 65536) -> list[int]:
    return [each for each in range(1, min(number, at_most) + 1) if number % each == 0]


def _use(legal: list[int], near: int, shown: int = 8) -> str:
    """The way out: all legal values, or the nearest ones where they are many."""
    nearest = sorted(sorted(legal, key=lambda each: abs(each - near))[:shown])
    return ("use " if len(legal) <= shown else "use for example ") + either([str(each) for each in nearest])


def _heads_fill_dim(recipe: Recipe) -> str | None:
    """The head size is whole, and even: the rotary embedding turns its two halves."""
    dim, heads = recipe.model.dim, recipe.model.n_heads
    if dim % (2 * heads) == 0:
        return None
    legal = divisors(dim // 2) if dim % 2 == 0 else []
    way_out = _use(legal, heads) if legal else "use an even model.dim"
    fault = "must divide" if dim % heads else f"gives heads of {dim // heads}, an odd size that cannot be rotated, with"
    return f"{mention(recipe, 'model.n_heads')} {fault} {mention(recipe, 'model.dim')}; {way_out}"


def _kv_heads_serve_heads(recipe: Recipe) -> str | None:
    heads, kv_heads = recipe.model.n_heads, recipe.model.n_kv_heads
    if heads % kv_heads == 0:
        return None
    wrong = f"{mention(recipe, 'model.n_kv_heads')} must divide {mention(recipe, 'model.n_heads')}"
    return f"{wrong}; {_use(divisors(heads), kv_heads)}"


def _tp_divides(other: str) -> tuple[tuple[str, ...], Callable[[Recipe], str | None]]:
    """The row of one size that tensor parallelism cuts. The way out lists what divides all of them."""

    def check(recipe: Recipe) -> str | None:
        size, tp = value_of(recipe, other), recipe.mesh.tp
        if not isinstance(size, int) or size % tp == 0:
            return None
        shape = recipe.model
        legal = divisors(gcd(size, shape.n_heads, shape.n_kv_heads, shape.ffn, shape.vocab))
        return f"{mention(recipe, 'mesh.tp')} must divide {mention(recipe, other)}; {_use(legal, tp)}"

    return ("mesh.tp", other), check


def _tp_divides_sequence(recipe: Recipe) -> str | None:
    seq_len, tp = recipe.data.seq_len, recipe.mesh.tp
    if tp == 1 or not recipe.parallel.sequence_parallel or seq_len % tp == 0:
        return None
    near = either([str(each) for each in (seq_len // tp * tp, seq_len // tp * tp + tp) if each])
    return (
        f"{mention(recipe, 'data.seq_len')} must be a multiple of {mention(recipe, 'mesh.tp')} "
        f"with {mention(recipe, 'parallel.sequence_parallel')}; use {near}, or parallel.sequence_parallel = false"
    )


def _stages_have_layers(recipe: Recipe) -> str | None:
    if recipe.mesh.pp <= recipe.model.n_layers:
        return None
    few, many = mention(recipe, "mesh.pp"), mention(recipe, "model.n_layers")
    return f"{few} is more than {many}: a stage needs a layer; use at most {recipe.model.n_layers}"


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
    if rest or pp == 1 or recipe.parallel.schedule != "1F1B" or count >= pp:
        return None
    product = " x ".join(mention(recipe, key) for key in _BATCH)
    return (
        f"{mention(recipe, 'data.global_batch')} over {product} gives a rank {count} micro-batch{'es' * (count > 1)}, "
        f"but {mention(recipe, 'parallel.schedule')} needs at least {mention(recipe, 'mesh.pp')}; "
        f'use data.global_batch = {unit * pp}, or parallel.schedule = "GPipe", which takes fewer'
    )


def _replicas_are_no_shards(recipe: Recipe) -> str | None:
    mesh = recipe.mesh
    if recipe.parallel.zero != 0 or mesh.dp_shard == 1:
        return None
    return (
        f"{mention(recipe, 'parallel.zero')} keeps whole parameters, but {mention(recipe, 'mesh.dp_shard')} cuts them; "
        f"use mesh.dp_shard = 1 with mesh.dp_replicate = {recipe.batch_ranks}, or parallel.zero = 1 or 3"
    )


def _text_has_a_path(recipe: Recipe) -> str | None:
    if recipe.data.source != "text" or recipe.data.path is not None:
        return None
    return f"{mention(recipe, 'data.source')} needs data.path: a text file, or a folder of them"


def _held_out_text_has_a_path(recipe: Recipe) -> str | None:
    if recipe.data.source != "text" or recipe.validation.every == 0 or recipe.validation.path is not None:
        return None
    return (
        f"{mention(recipe, 'validation.every')} with {mention(recipe, 'data.source')} needs validation.path: "
        "held-out text, a file or a folder; give it, or use validation.every = 0"
    )


def _python_has_no(path: str) -> tuple[tuple[str, ...], Callable[[Recipe], str | None]]:
    def check(recipe: Recipe) -> str | None:
        if recipe.data.source != "python" or value_of(recipe, path) is None:
            return None
        source = mention(recipe, "data.source")
        return f'{mention(recipe, path)} is not read with {source}; remove it, or use data.source = "text"'

    return (path, "data.source"), check


def _warmup_ends(recipe: Recipe) -> str | None:
    if recipe.optim.warmup <= recipe.run.steps:
        return None
    return f"{mention(recipe, 'optim.warmup')} must be at most {mention(recipe, 'run.steps')}"


def _decay_follows_warmup(recipe: Recipe) -> str | None:
    if recipe.optim.decay is None or recipe.optim.decay > recipe.optim.warmup:
        return None
    return f"{mention(recipe, 'optim.decay')} must be above {mention(recipe, 'optim.warmup')}: the cosine starts there"


def _min_lr_is_lower(recipe: Recipe) -> str | None:
    if recipe.optim.min_lr <= recipe.optim.lr:
        return None
    return f"{mention(recipe, 'optim.min_lr')} must be at most {mention(recipe, 'optim.lr')}"


RULES: tuple[tuple[tuple[str, ...], Callable[[Recipe], str | None]], ...] = (
    (("model.n_heads", "model.dim"), _heads_fill_dim),
    (("model.n_kv_heads", "model.n_heads"), _kv_heads_serve_heads),
    _tp_divides("model.n_heads"),
    _tp_divides("model.n_kv_heads"),
    _tp_divides("model.ffn"),
    _tp_divides("model.vocab"),
    (("data.seq_len", "mesh.tp", "parallel.sequence_parallel"), _tp_divides_sequence),
    (("mesh.pp", "model.n_layers"), _stages_have_layers),
    (("data.global_batch", *_BATCH), _batch_divides),
    (("data.global_batch", *_BATCH, "parallel.schedule", "mesh.pp"), _enough_micro_batches),
    (("parallel.zero", "mesh.dp_shard", "mesh.dp_replicate"), _replicas_are_no_shards),
    (("data.source", "data.path"), _text_has_a_path),
    (("validation.every", "data.source", "validation.path"), _held_out_text_has_a_path),
    _python_has_no("data.path"),
    _python_has_no("validation.path"),
    (("optim.warmup", "run.steps"), _warmup_ends),
    (("optim.decay", "optim.warmup"), _decay_follows_warmup),
    (("optim.min_lr", "optim.lr"), _min_lr_is_lower),
)
