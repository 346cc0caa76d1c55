"""What the values of a recipe must satisfy, alone and together. Pure: no file, no place, no world.

``violations`` is read by ``load``, which adds where each value came from, and by whoever proposes layouts, so that what
is proposed is what a recipe accepts. A rule is one small function and one row of a table below.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import either, show


@dataclass(frozen=True)
class Violation:
    """One broken rule. ``others`` are the further keys that it reads; ``message`` writes a key as ``mention`` does."""

    key: str
    message: str
    others: tuple[str, ...] = ()


def violations(recipe: Recipe) -> list[Violation]:
    """Every rule that ``recipe`` breaks. ``mesh.dp_shard`` may still be -1; rules that read it are then passed over."""
    alone = [Violation(key, message) for key, check in RANGES.items() if (message := check(recipe, key))]
    unusable = {violation.key for violation in alone}
    if recipe.mesh.dp_shard == -1:
        unusable.add("mesh.dp_shard")
    together = [
        Violation(keys[0], message, keys[1:])
        for keys, check in RULES
        if unusable.isdisjoint(keys) and (message := check(recipe))
    ]
    return alone + together


def value_of(recipe: Recipe, key: str) -> object:
    table, name = key.split(".")
    return getattr(getattr(recipe, table), name)


def mention(recipe: Recipe, key: str) -> str:
    """A key with its value, as messages write it: ``mesh.tp = 4``."""
    return f"{key} = {show(value_of(recipe, key))}"


def divisors(number: int, *, at_most: int = 65536) -> list[int]:
    return [each for each in range(1, min(number, at_most) + 1) if number % each == 0]


def _use(legal: list[int], near: int, shown: int = 8) -> str:
    """The way out: all legal values, or the nearest ones where they are many."""
    nearest = sorted(sorted(legal, key=lambda each: abs(each - near))[:shown])
    return ("use " if len(legal) <= shown else "use for example ") + either([str(each) for each in nearest])


# One value alone. A check gives the message, or None where the value is good.


def _at_least(bound: int) -> Callable[[Recipe, str], str | None]:
    def check(recipe: Recipe, key: str) -> str | None:
        value = value_of(recipe, key)
        good = isinstance(value, int | float) and value >= bound
        return None if good else f"{mention(recipe, key)} must be at least {bound}"

    return check


def _above_zero(recipe: Recipe, key: str) -> str | None:
    value = value_of(recipe, key)
    good = isinstance(value, int | float) and value > 0
    return None if good else f"{mention(recipe, key)} must be above 0"


def _shards(recipe: Recipe, key: str) -> str | None:
    if recipe.mesh.dp_shard >= 1 or recipe.mesh.dp_shard == -1:
        return None
    return f"{mention(recipe, key)} must be at least 1, or -1 for what is left of the world"


def _only_one_cp(recipe: Recipe, key: str) -> str | None:
    if recipe.mesh.cp == 1:
        return None
    return f"{mention(recipe, key)} is refused: context parallelism is not in this version; use 1"


def _holds_bytes(recipe: Recipe, key: str) -> str | None:
    if recipe.model.vocab >= 256:
        return None
    return f"{mention(recipe, key)} must be at least 256: the tokens of the data are bytes"


def _betas(recipe: Recipe, key: str) -> str | None:
    if all(0 <= beta < 1 for beta in recipe.optim.betas):
        return None
    return f"{mention(recipe, key)} must both be at least 0 and below 1"


def _folder_name(recipe: Recipe, key: str) -> str | None:
    name = recipe.run.name
    if name.strip() and name not in (".", "..") and not set(name) & set("/\\\0"):
        return None
    return f"{mention(recipe, key)} names the folder of the run: it must not be empty, . or .., nor hold / or \\"


RANGES: dict[str, Callable[[Recipe, str], str | None]] = {
    "run.name": _folder_name,
    "run.steps": _at_least(1),
    "run.seed": _at_least(0),
    "model.dim": _at_least(1),
    "model.n_layers": _at_least(1),
    "model.n_heads": _at_least(1),
    "model.n_kv_heads": _at_least(1),
    "model.ffn": _at_least(1),
    "model.vocab": _holds_bytes,
    "model.rope_theta": _above_zero,
    "model.norm_eps": _above_zero,
    "mesh.pp": _at_least(1),
    "mesh.dp_replicate": _at_least(1),
    "mesh.dp_shard": _shards,
    "mesh.cp": _only_one_cp,
    "mesh.tp": _at_least(1),
    "data.seq_len": _at_least(1),
    "data.global_batch": _at_least(1),
    "data.micro_batch": _at_least(1),
    "data.seed": _at_least(0),
    "optim.lr": _above_zero,
    "optim.betas": _betas,
    "optim.eps": _above_zero,
    "optim.weight_decay": _at_least(0),
    "optim.clip": _at_least(0),
    "optim.warmup": _at_least(0),
    "optim.min_lr": _at_least(0),
    "checkpoint.every": _at_least(0),
    "checkpoint.keep": _at_least(1),
    "metrics.every": _at_least(1),
    "validation.every": _at_least(0),
    "validation.steps": _at_least(1),
}


# Values together. The first key of a row is the one at fault. A function decides by the keys of its row alone, so that
# none meets a value that RANGES has refused already (a zero to divide by).


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
