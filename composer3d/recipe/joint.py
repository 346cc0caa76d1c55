"""What values of the model, the data and the optimizer must satisfy together. Pure: a function and a row for each rule.

The first key of a row is the one at fault. A function decides by the keys of its row alone, so that none meets a value
that ``ranges`` has refused already (a zero to divide by).
"""

from collections.abc import Callable
from typing import Any

from composer3d.recipe.schema import DataTable, Recipe
from composer3d.recipe.values import divisors, either, mention, show, use, value_of

Rule = tuple[tuple[str, ...], Callable[[Recipe], str | None]]


def _heads_fill_dim(recipe: Recipe) -> str | None:
    """The head size, where it is not given, is whole, and even: the rotary embedding turns its two halves."""
    dim, heads = recipe.model.dim, recipe.model.n_heads
    if recipe.model.head_dim is not None or dim % (2 * heads) == 0:
        return None
    legal = divisors(dim // 2) if dim % 2 == 0 else []
    way_out = use(legal, heads) if legal else "use an even model.dim"
    fault = "must divide" if dim % heads else f"gives heads of {dim // heads}, an odd size that cannot be rotated, with"
    return f"{mention(recipe, 'model.n_heads')} {fault} {mention(recipe, 'model.dim')}; {way_out}"


def _kv_heads_serve_heads(recipe: Recipe) -> str | None:
    heads, kv_heads = recipe.model.n_heads, recipe.model.n_kv_heads
    if heads % kv_heads == 0:
        return None
    wrong = f"{mention(recipe, 'model.n_kv_heads')} must divide {mention(recipe, 'model.n_heads')}"
    return f"{wrong}; {use(divisors(heads), kv_heads)}"


def _rope_has_a_middle(recipe: Recipe) -> str | None:
    if recipe.model.rope_high_freq > recipe.model.rope_low_freq:
        return None
    return f"{mention(recipe, 'model.rope_high_freq')} must be above {mention(recipe, 'model.rope_low_freq')}"


def _ring_has_no_window(recipe: Recipe) -> str | None:
    if recipe.mesh.cp == 1 or not 0 < recipe.model.window < recipe.data.seq_len:
        return None
    return (
        f"{mention(recipe, 'model.window')} hides tokens of {mention(recipe, 'data.seq_len')}, and the ring of "
        f"{mention(recipe, 'mesh.cp')} shows them all; use mesh.cp = 1, or model.window = 0"
    )


def _vocabulary_holds_bytes(recipe: Recipe) -> str | None:
    if recipe.model.vocab >= 256 or recipe.data.source == "tokens":  # token files say what they need: see load
        return None
    return f"{mention(recipe, 'model.vocab')} must be at least 256: the tokens of the data are bytes"


PATHS = {  # what data.path and validation.path are, by the sources that read them
    "text": "a text file or a folder of them",
    "jsonl": "a .jsonl file or a folder of them",
    "tokens": "a folder that composer3d prepare made",
}


def _source_has_a_path(recipe: Recipe) -> str | None:
    if recipe.data.source not in PATHS or recipe.data.path is not None:
        return None
    return f"{mention(recipe, 'data.source')} needs data.path: {PATHS[recipe.data.source]}"


def _held_out_source_has_a_path(recipe: Recipe) -> str | None:
    if recipe.data.source not in PATHS or recipe.validation.every == 0 or recipe.validation.path is not None:
        return None
    return (
        f"{mention(recipe, 'validation.every')} with {mention(recipe, 'data.source')} needs validation.path, held-out "
        f"data: {PATHS[recipe.data.source]}; give it, or use validation.every = 0"
    )


def _decay_follows_warmup(recipe: Recipe) -> str | None:
    if recipe.optim.decay is None or recipe.optim.decay > recipe.optim.warmup:
        return None
    return f"{mention(recipe, 'optim.decay')} must be above {mention(recipe, 'optim.warmup')}: the decay starts there"


def _wsd_decay_fits(recipe: Recipe) -> str | None:
    optim = recipe.optim
    end, last = ("run.steps", recipe.run.steps) if optim.decay is None else ("optim.decay", optim.decay)
    room = last - optim.warmup
    blamed_already = room < 0 or (room == 0 and optim.decay is not None)  # the end is not after the warmup
    if optim.schedule != "wsd" or optim.decay_steps is None or optim.decay_steps <= room or blamed_already:
        return None
    steps, warmup = mention(recipe, "optim.decay_steps"), mention(recipe, "optim.warmup")
    way_out = f"use at most {room}" if room else "shorten the warmup"
    return f"{steps} after {warmup} would end beyond {mention(recipe, end)}; {way_out}"


def _at_most(key: str, bound: str) -> Rule:
    def check(recipe: Recipe) -> str | None:
        values: Any = (value_of(recipe, key), value_of(recipe, bound))
        return None if values[0] <= values[1] else f"{mention(recipe, key)} must be at most {mention(recipe, bound)}"

    return (key, bound), check


def _not_read(key: str, default: object, switch: str, off: tuple[str, ...], remedy: str) -> Rule:
    """``key`` keeps its default where ``switch`` is one of ``off``, which does not read it."""

    def check(recipe: Recipe) -> str | None:
        if value_of(recipe, switch) not in off or value_of(recipe, key) == default:
            return None
        return f"{mention(recipe, key)} is not read with {mention(recipe, switch)}; {remedy}"

    return (key, switch), check


_PYTHON = ("data.source", ("python",), f"remove it, or use data.source = {either([show(source) for source in PATHS])}")
_JSONL = ("data.source", ("python", "text", "tokens"), 'remove it, or use data.source = "jsonl"')
_WSD = ("optim.schedule", ("cosine", "linear", "constant"), 'remove it, or use optim.schedule = "wsd"')
_CONSTANT = ("optim.schedule", ("constant",))

RULES: tuple[Rule, ...] = (
    (("model.n_heads", "model.dim", "model.head_dim"), _heads_fill_dim),
    (("model.n_kv_heads", "model.n_heads"), _kv_heads_serve_heads),
    (("model.rope_high_freq", "model.rope_low_freq"), _rope_has_a_middle),
    (("model.window", "mesh.cp", "data.seq_len"), _ring_has_no_window),
    (("model.vocab", "data.source"), _vocabulary_holds_bytes),
    (("data.source", "data.path"), _source_has_a_path),
    (("validation.every", "data.source", "validation.path"), _held_out_source_has_a_path),
    _not_read("data.field", DataTable.field, *_JSONL),
    _not_read("data.path", None, *_PYTHON),
    _not_read("validation.path", None, *_PYTHON),
    _at_most("optim.warmup", "run.steps"),
    (("optim.decay", "optim.warmup"), _decay_follows_warmup),
    _not_read("optim.decay", None, *_CONSTANT, "remove it, or use a schedule that decays"),
    _not_read("optim.min_lr", 0.0, *_CONSTANT, "use 0, or a schedule that decays"),
    _not_read("optim.decay_steps", None, *_WSD),
    (("optim.decay_steps", "optim.warmup", "optim.decay", "run.steps", "optim.schedule"), _wsd_decay_fits),
    _at_most("optim.min_lr", "optim.lr"),
)
