"""What each value of a recipe must satisfy alone: a check for each key. Pure."""

from collections.abc import Callable

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import mention, value_of

# A check gives the message, or None where the value is good.


def _at_least(bound: int) -> Callable[[Recipe, str], str | None]:
    def check(recipe: Recipe, key: str) -> str | None:
        value = value_of(recipe, key)
        good = isinstance(value, int | float) and value >= bound
        return None if good else f"{mention(recipe, key)} must be at least {bound}"

    return check


def _one_or_more_if_given(recipe: Recipe, key: str) -> str | None:
    return None if value_of(recipe, key) is None else _at_least(1)(recipe, key)


def _above_zero(recipe: Recipe, key: str) -> str | None:
    value = value_of(recipe, key)
    good = isinstance(value, int | float) and value > 0
    return None if good else f"{mention(recipe, key)} must be above 0"


def _shards(recipe: Recipe, key: str) -> str | None:
    if recipe.mesh.dp_shard >= 1 or recipe.mesh.dp_shard == -1:
        return None
    return f"{mention(recipe, key)} must be at least 1, or -1 for what is left of the world"


def _head_dim(recipe: Recipe, key: str) -> str | None:
    width = recipe.model.head_dim
    if width is None or (width >= 2 and width % 2 == 0):
        return None
    return f"{mention(recipe, key)} must be even and at least 2: the rotary embedding turns its two halves"


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
    "model.vocab": _at_least(1),
    "model.rope_theta": _above_zero,
    "model.norm_eps": _above_zero,
    "model.head_dim": _head_dim,
    "model.window": _at_least(0),
    "model.rope_factor": _at_least(1),
    "model.rope_low_freq": _above_zero,
    "model.rope_high_freq": _above_zero,
    "model.rope_context": _at_least(1),
    "mesh.pp": _at_least(1),
    "mesh.dp_replicate": _at_least(1),
    "mesh.dp_shard": _shards,
    "mesh.cp": _at_least(1),
    "mesh.tp": _at_least(1),
    "parallel.virtual_stages": _one_or_more_if_given,
    "memory.loss_chunks": _at_least(1),
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
    "optim.decay_steps": _one_or_more_if_given,
    "optim.min_lr": _at_least(0),
    "checkpoint.every": _at_least(0),
    "checkpoint.keep": _at_least(1),
    "metrics.every": _at_least(1),
    "validation.every": _at_least(0),
    "validation.steps": _at_least(1),
}
