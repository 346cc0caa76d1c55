"""Translate a YAML configuration of nanotron."""

import re

from composer3d.imports.layout import read_layout, set_layout
from composer3d.imports.shared import note_adamw, note_linear_decay, set_dtype, take_betas
from composer3d.imports.translation import Translation

_MODEL = "model.model_config"
_RATE = "optimizer.learning_rate_scheduler"

_LAYOUT = {
    "tp": "parallelism.tp",
    "pp": "parallelism.pp",
    "cp": "parallelism.context_parallel_size",
    "ep": "parallelism.expert_parallel_size",
    "dp": "parallelism.dp",
    "zero": "optimizer.zero_stage",
    "micro_batch": "tokens.micro_batch_size",
    "accumulation": "tokens.batch_accumulation_per_replica",
}


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a YAML configuration of nanotron.

    Args:
        made: has the settings.
        gpus: the number of GPUs; None: the product of the mesh.
    """
    made.copy_plain_words()
    _set_model(made)
    _set_layout(made, gpus)
    _set_optimizer(made)
    _set_run(made)


def _set_model(made: Translation) -> None:
    act = (made.text(f"{_MODEL}.hidden_act") or "silu").lower()
    heads = made.value("model.n_heads")
    groups = made.number(f"{_MODEL}.num_key_value_heads")
    if groups is not None:
        made.take("model.n_kv_heads", groups, f"{_MODEL}.num_key_value_heads")
    elif heads is not None:
        made.assume("model.n_kv_heads", heads, "num_key_value_heads is absent: all heads")

    tp = made.number("parallelism.tp") or 1
    unit = (made.number("model.make_vocab_size_divisible_by") or 1) * tp
    vocab = made.number(f"{_MODEL}.vocab_size")
    made.ignore("model.make_vocab_size_divisible_by")
    if vocab is not None:
        padded = -(-max(1, vocab) // unit) * unit
        note = f"padded to a multiple of {unit}" if padded != vocab else ""
        made.take("model.vocab", padded, f"{_MODEL}.vocab_size", note=note)

    is_gelu = act != "silu" or f"{_MODEL}.is_starcoder2_config" in made.settings
    if is_gelu and made.model is None:
        made.ask(
            "the recipe is a Llama of the same sizes, with SwiGLU and RMSNorm",
            f"{_MODEL}.hidden_act",
        )
    made.ignore(f"{_MODEL}.hidden_act")
    made.take_real("model.norm_eps", f"{_MODEL}.rms_norm_eps")
    made.take_real("model.rope_theta", f"{_MODEL}.rope_theta")
    if made.model is None:
        made.assume("model.norm_eps", 1e-6, "the default of rms_norm_eps")
        made.assume("model.rope_theta", 10_000.0, "the default of rope_theta")
    _set_stretch(made)

    shared = made.number(f"{_MODEL}.moe_config.shared_expert_intermediate_size")
    if made.flag(f"{_MODEL}.moe_config.enable_shared_expert") and shared is not None:
        made.take(
            "model.shared_ffn",
            shared,
            f"{_MODEL}.moe_config.enable_shared_expert",
            f"{_MODEL}.moe_config.shared_expert_intermediate_size",
        )
    dtype = (made.text("model.dtype") or "bfloat16").lower().removeprefix("torch.")
    is_half, is_narrow = dtype in ("float16", "half"), dtype == "bfloat16"
    if is_narrow and "model.dtype" not in made.settings:
        made.assume("precision.compute", "bfloat16", "the default of model.dtype")
    elif is_half or is_narrow:
        words = ("model.dtype",)
        set_dtype(made, half=words * is_half, narrow=words * is_narrow)
    elif dtype == "float32":
        made.take("precision.compute", "float32", "model.dtype")
    else:
        made.lose("the dtypes are bfloat16 and float32: float32", "model.dtype")


def _set_stretch(made: Translation) -> None:
    """Take over stretched positions of the kind llama3; other kinds are not there."""
    prefix = f"{_MODEL}.rope_scaling."
    options = {name.removeprefix(prefix): name for name in made.settings if prefix in name}
    if not options:
        return
    kinds = [made.text(options[name]) for name in ("type", "rope_type") if name in options]
    factor = made.real(options["factor"]) if "factor" in options else None
    if "llama3" not in kinds or factor is None:
        made.ask(
            "only the kind llama3 is there: positions are not stretched",
            *options.values(),
            ours="model.rope_factor",
        )
        return
    made.take("model.rope_factor", factor, options["factor"])
    for name, key in (
        ("low_freq_factor", "model.rope_low_freq"),
        ("high_freq_factor", "model.rope_high_freq"),
    ):
        if name in options:
            made.take_real(key, options[name])
    name = "original_max_position_embeddings"
    if name in options:
        made.take_number("model.rope_context", options[name])
    made.ignore(*options.values())


def _set_layout(made: Translation, gpus: int | None) -> None:
    engine = (made.text("parallelism.pp_engine") or "afab").lower()
    if engine not in ("1f1b", "afab"):
        made.ask('neither 1f1b nor afab: "1F1B"', "parallelism.pp_engine", ours="parallel.schedule")
    layout = read_layout(made, _LAYOUT)
    schedule = "GPipe" if engine == "afab" else "1F1B"
    layout.set("schedule", schedule, "parallelism.pp_engine")
    set_layout(made, layout, gpus)
    mode = (made.text("parallelism.tp_mode") or "ALL_REDUCE").upper()
    if (made.number("parallelism.tp") or 1) > 1:
        made.take("parallel.sequence_parallel", mode == "REDUCE_SCATTER", "parallelism.tp_mode")
    made.ignore("parallelism.tp_mode")
    if made.flag("parallelism.recompute_layer"):
        made.take("memory.activation_checkpoint", "full", "parallelism.recompute_layer")


def _set_optimizer(made: Translation) -> None:
    factory = "optimizer.optimizer_factory"
    note_adamw(made, f"{factory}.name", "adamw")
    made.ignore("optimizer.accumulate_grad_in_fp32")
    take_betas(made, (f"{factory}.adam_beta1", f"{factory}.adam_beta2"), (0.9, 0.95))
    clip = made.real("optimizer.clip_grad")
    if clip is not None:
        made.take("optim.clip", clip, "optimizer.clip_grad")
    elif "optimizer.clip_grad" in made.settings:
        made.take("optim.clip", 0.0, "optimizer.clip_grad", note="no clipping")

    peak, warmup = made.value("optim.lr", 3e-4), made.value("optim.warmup", 0)
    if (made.text(f"{_RATE}.lr_warmup_style") or "linear") != "linear":
        made.ask("the warmup is linear", f"{_RATE}.lr_warmup_style")
    made.ignore(f"{_RATE}.lr_warmup_style")
    style = made.text(f"{_RATE}.lr_decay_style") or "linear"
    steps = made.number(f"{_RATE}.lr_decay_steps")
    start = made.number(f"{_RATE}.lr_decay_starting_step")
    words = (f"{_RATE}.lr_decay_starting_step", f"{_RATE}.lr_decay_steps")
    style_word = f"{_RATE}.lr_decay_style"
    made.ignore(*words)
    if start is not None and start > warmup:
        made.take("optim.schedule", "wsd", style_word, *words)
        note_linear_decay(made, style, style_word)
        if steps is not None:
            made.take("optim.decay", start + steps, *words)
            made.take("optim.decay_steps", steps, *words)
    else:
        made.take("optim.schedule", "cosine" if style == "cosine" else "linear", style_word)
        if style not in ("linear", "cosine"):
            made.ask('not there: optim.schedule = "linear"', style_word, ours="optim.schedule")
        if steps is not None and steps > 0:
            made.take("optim.decay", warmup + steps, *words, note="after the warmup")
    made.take_real("optim.min_lr", f"{_RATE}.min_decay_lr")
    if style_word in made.settings:
        made.assume("optim.min_lr", peak, "min_decay_lr is absent: the peak, so no decay")


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
