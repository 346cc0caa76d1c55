"""Translate a YAML configuration of nanotron."""

import re

from composer3d.imports.layout import read_layout, set_layout
from composer3d.imports.shared import padded, read_dtype, set_dtype, take_betas
from composer3d.imports.translation import Translation
from composer3d.models.llama.huggingface_rope import STRETCH_FIELDS, STRETCH_KEYS

_MODEL = "model.model_config"
_RATE = "optimizer.learning_rate_scheduler"


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a YAML configuration of nanotron."""
    made.take_plain_words()
    _set_model(made)
    _set_layout(made, gpus)
    _set_optimizer(made)
    _set_run(made)


def _set_model(made: Translation) -> None:
    act = (made.text(f"{_MODEL}.hidden_act") or "silu").lower()
    heads = made.value("model.n_heads")
    made.move("model.n_kv_heads", f"{_MODEL}.num_key_value_heads")
    if heads is not None:
        made.assume("model.n_kv_heads", heads, "num_key_value_heads is absent: all heads")

    tp = made.number("parallelism.tp") or 1
    unit = (made.number("model.make_vocab_size_divisible_by") or 1) * tp
    vocab = made.number(f"{_MODEL}.vocab_size")
    made.ignore("model.make_vocab_size_divisible_by")
    if vocab is not None:
        rows = padded(vocab, unit)
        note = f"padded to a multiple of {unit}" if rows != vocab else ""
        made.take("model.vocab", rows, f"{_MODEL}.vocab_size", note=note)

    is_gelu = act != "silu" or f"{_MODEL}.is_starcoder2_config" in made.settings
    if is_gelu and made.model is None:
        made.ask(
            "the recipe is a Llama of the same sizes, with SwiGLU and RMSNorm",
            f"{_MODEL}.hidden_act",
        )
    made.ignore(f"{_MODEL}.hidden_act")
    made.move("model.norm_eps", f"{_MODEL}.rms_norm_eps")
    made.move("model.rope_theta", f"{_MODEL}.rope_theta")
    _set_stretch(made)
    _set_shared_expert(made)
    _set_dtype(made)


def _set_shared_expert(made: Translation) -> None:
    prefix = f"{_MODEL}.moe_config."
    width = made.number(prefix + "shared_expert_intermediate_size")
    if made.flag(prefix + "enable_shared_expert") and width is not None:
        words = (prefix + "enable_shared_expert", prefix + "shared_expert_intermediate_size")
        made.take("model.shared_ffn", width, *words)


def _set_dtype(made: Translation) -> None:
    word = "model.dtype"
    dtype = read_dtype(made, word)
    if dtype in ("float16", "bfloat16"):
        set_dtype(made, {word: dtype})
    elif dtype is not None:
        made.take("precision.compute", "float32", word)
        if dtype != "float32":
            made.lose("the dtypes are bfloat16 and float32: float32", word)


def _set_stretch(made: Translation) -> None:
    """Take over stretched positions. "dynamic" ones are not: their context stands elsewhere."""
    prefix = f"{_MODEL}.rope_scaling."
    options = {name.removeprefix(prefix): name for name in made.settings if prefix in name}
    if not options:
        return
    kinds = [options[name] for name in ("rope_type", "type") if name in options]
    scaling = made.text(kinds[0]) if kinds else None
    known = {}
    if scaling in ("llama3", "linear", "yarn"):
        known = {STRETCH_KEYS[field]: f"model.{field}" for field in STRETCH_FIELDS[scaling]}
    factor, scores = (made.real(options.get(key, "")) for key in ("factor", "attention_factor"))
    is_known = factor is not None and options.keys() <= known.keys() | {"rope_type", "type"}
    if is_known and factor == 1 and scores in (None, 1):
        # A factor of 1 stretches nothing, so the other values do not matter.
        made.harmless += [made.settings[name].shown for name in options.values()]
        made.ignore(*options.values())
        return
    if not is_known or factor == 1:
        made.ask(
            "positions are not stretched; set model.rope_scaling and the keys of its kind",
            *options.values(),
            ours="model.rope_factor",
        )
        return
    if scaling != "llama3":
        made.take("model.rope_scaling", scaling, *kinds)
    for name, key in known.items():
        if name in options:
            made.move(key, options[name])
    made.ignore(*options.values())
    if "model.rope_context" in {*known.values()} - made.values.keys():
        _infer_context(made, kinds, is_yarn=scaling == "yarn")


def _infer_context(made: Translation, kinds: list[str], *, is_yarn: bool) -> None:
    """Set the context before a stretch that does not say it, as ``huggingface_rope`` reads it."""
    word = f"{_MODEL}.max_position_embeddings"
    longest = made.number(word) if is_yarn else None
    if longest is not None:
        made.take("model.rope_context", longest, word, note="the context before the stretch")
        return
    made.ask(
        "no context before the stretch; set model.rope_context, or the recipe has its default",
        *kinds,
        ours="model.rope_context",
    )


def _set_layout(made: Translation, gpus: int | None) -> None:
    layout = read_layout(made)
    word = "parallelism.pp_engine"
    layout.set("schedule", made.choose(word, "parallel.schedule") or "GPipe", word)
    set_layout(made, layout, gpus)
    mode = (made.text("parallelism.tp_mode") or "ALL_REDUCE").upper()
    if (made.number("parallelism.tp") or 1) > 1:
        made.take("parallel.sequence_parallel", mode == "REDUCE_SCATTER", "parallelism.tp_mode")
    made.ignore("parallelism.tp_mode")


def _set_optimizer(made: Translation) -> None:
    factory = "optimizer.optimizer_factory"
    take_betas(made, (f"{factory}.adam_beta1", f"{factory}.adam_beta2"), (0.9, 0.95))
    word = "optimizer.clip_grad"
    if word in made.settings and made.real(word) is None:
        made.take("optim.clip", 0.0, word, note="no clipping")
    made.move("optim.clip", word)

    _set_decay(made)
    made.move("optim.min_lr", f"{_RATE}.min_decay_lr")
    if f"{_RATE}.lr_decay_style" in made.settings:
        peak = made.value("optim.lr", 3e-4)
        made.assume("optim.min_lr", peak, "min_decay_lr is absent: the peak, so no decay")


def _set_decay(made: Translation) -> None:
    """Set the schedule: wsd if the decay begins after the warmup."""
    style, warmup = f"{_RATE}.lr_decay_style", made.value("optim.warmup", 0)
    words = (f"{_RATE}.lr_decay_starting_step", f"{_RATE}.lr_decay_steps")
    start, steps = (made.number(word) for word in words)
    made.ignore(*words)
    if start is not None and start > warmup:
        if (made.text(style) or "linear") != "linear":
            made.ask("the decay of wsd is linear", style)
        made.take("optim.schedule", "wsd", style, *words)
        if steps is not None:
            made.take("optim.decay", start + steps, *words)
            made.take("optim.decay_steps", steps, *words)
        return
    made.take("optim.schedule", made.choose(style, "optim.schedule") or "linear", style)
    if steps is not None and steps > 0:
        made.take("optim.decay", warmup + steps, *words, note="after the warmup")


def _set_run(made: Translation) -> None:
    name = made.text("general.run")
    if name is not None:
        cleaned = re.sub(r"%\w+?(?=_|-|%|$)|[^\w.-]", "", name).strip("_-.")[:100]
        if cleaned:
            made.take("run.name", cleaned, "general.run")
    made.ignore("general.run")
    found = made.settings.get("tokens.val_check_interval")
    made.ignore("tokens.val_check_interval", "tokens.limit_val_batches")
    if found is not None and found.value not in (-1, None):
        every = made.number("tokens.val_check_interval")
        steps = made.number("tokens.limit_val_batches")
        if every and steps:
            made.take("validation.every", every, "tokens.val_check_interval")
            made.take("validation.steps", steps, "tokens.limit_val_batches")
