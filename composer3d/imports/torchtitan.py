"""Translate a TOML configuration of torchtitan 0.1 or 0.2."""

from typing import Any

from composer3d.imports.layout import read_layout, set_layout
from composer3d.imports.shared import (
    note_adamw,
    note_linear_decay,
    note_whole_experts,
    take_betas,
)
from composer3d.imports.translation import Translation
from composer3d.recipe.schema import ParallelTable
from composer3d.recipe.values import describe_type
from composer3d.spec.schedules import SCHEDULES

# The presets of torchtitan's flavors, by its name of the model.
FLAVORS: dict[str, dict[str, str]] = {
    "llama3": {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3-405b"},
    "qwen3": {
        "0.6B": "qwen3-0.6b",
        "1.7B": "qwen3-1.7b",
        "4B": "qwen3-4b",
        "8B": "qwen3-8b",
        "14B": "qwen3-14b",
        "32B": "qwen3-32b",
        "30B-A3B": "qwen3-30b-a3b",
        "235B-A22B": "qwen3-235b-a22b",
    },
}
# From torchtitan/models/llama3: a vocabulary of its test tokenizer, and no grouped queries.
_DEBUG_LLAMA = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 16,
    "n_kv_heads": 16,
    "ffn": 768,
    "vocab": 2048,
    "rope_theta": 500_000.0,
}
# Words that 0.1 has and 0.2 has not.
_OLD_WORDS = ("training.compile", "model.tokenizer_path", "lr_scheduler.lr_min")

_LAYOUT = {
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "replicas": "parallelism.data_parallel_replicate_degree",
    "global_batch": "training.global_batch_size",
}


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a TOML configuration of torchtitan.

    Args:
        made: has the settings.
        gpus: the number of GPUs; None: what the mesh says.
    """
    # These have -1 for "not given", "the rest" or "all", which is no size.
    for name in (
        "parallelism.data_parallel_shard_degree",
        "training.global_batch_size",
        "validation.steps",
    ):
        found = made.settings.get(name)
        if found is not None and found.value == -1:
            made.ignore(name)
            made.settings.pop(name)
    _set_model(made)
    made.copy_plain_words()
    made.assume("precision.compute", "bfloat16", "the default of mixed_precision_param")
    made.assume("run.steps", 10_000, "the default of training.steps")
    made.assume("data.seq_len", 2048, "the default of training.seq_len")
    _set_layout(made, gpus)
    _set_precision(made)
    _set_memory(made)
    _set_optimizer(made)
    _set_run(made)


def _set_model(made: Translation) -> None:
    name = made.text("model.name") or "llama3"
    flavor = made.text("model.flavor") or "debugmodel"
    words = ("model.name", "model.flavor")
    made.ignore(*words)
    if made.model is not None or "model.preset" in made.overridden:
        return
    preset = FLAVORS.get(name, {}).get(flavor)
    if name == "llama3" and flavor.startswith("debugmodel"):
        for field, value in _DEBUG_LLAMA.items():
            made.take(f"model.{field}", value, *words)
    elif preset is None:
        made.problems.append(
            f"{made.file}: {made.words(*words)}: no model of ours; give the nearest with "
            "--model PRESET"
        )
        return
    else:
        made.take("model.preset", preset, *words)
    if name == "llama3":
        is_old = any(word in made.settings for word in _OLD_WORDS)
        factor = 1.0 if is_old else 8.0
        made.drop("model.rope_factor")
        made.assume(
            "model.rope_factor",
            factor,
            "torchtitan 0.1 does not stretch positions" if is_old else "as in torchtitan 0.2",
        )
    elif flavor == "235B-A22B":
        made.take("model.rope_theta", 5_000_000.0, *words)


# --- the layout ---


def _set_layout(made: Translation, gpus: int | None) -> None:
    layout = read_layout(made, _LAYOUT)
    pp, replicas = layout.pp or 1, layout.replicas or 1
    shard_word = "parallelism.data_parallel_shard_degree"
    shards = made.number(shard_word)
    if shards is not None:
        layout.set("dp", shards * replicas, shard_word)

    reshard_word = "parallelism.fsdp_reshard_after_forward"
    reshard = made.text(reshard_word) or "default"
    zero = 3
    if reshard == "never" or (reshard == "default" and pp > 1):
        zero = 1 if pp > 1 else 2
    if shards == 1 and (layout.cp or 1) == 1:
        zero = 0 if replicas > 1 else zero  # DDP
    layout.set("zero", zero, reshard_word)

    batch_word = "training.local_batch_size"
    micro_word = "parallelism.pipeline_parallel_microbatch_size"
    local = made.number(batch_word) if batch_word in made.settings else 8
    layout.set("micro_batch", local, batch_word)
    if pp > 1 and local:
        # A rank's batch is cut into micro-batches of the pipeline.
        micro = made.number(micro_word) or 1
        if local % micro:
            made.contradict(
                f"{made.words(micro_word)} does not divide a local batch of {local}: 1 is used"
            )
            micro = 1
        layout.set("micro_batch", micro, micro_word)
        if layout.global_batch is None:
            layout.set("accumulation", local // micro, batch_word)
    made.ignore(batch_word, micro_word)

    layout.set("schedule", _schedule(made, pp), "parallelism.pipeline_parallel_schedule")
    set_layout(made, layout, gpus)
    note_whole_experts(made, "parallelism.expert_tensor_parallel_degree")
    word = "parallelism.disable_loss_parallel"
    if word in made.settings:
        made.take("parallel.loss_parallel", not made.flag(word), word)
    word = "parallelism.context_parallel_rotate_method"
    method = "ring" if made.text(word) == "alltoall" else "allgather"
    if (made.number("parallelism.context_parallel_degree") or 1) > 1:
        made.take("parallel.cp_method", method, word)


def _schedule(made: Translation, pp: int) -> str:
    name = made.text("parallelism.pipeline_parallel_schedule") or "1F1B"
    known = {schedule.lower(): schedule for schedule in SCHEDULES if schedule != "csv"}
    schedule = known.get(name.lower())
    if schedule is None and pp > 1:
        names = describe_type(ParallelTable.__dataclass_fields__["schedule"].type)
        made.lose(
            f'not there: parallel.schedule = "1F1B"; the schedules are {names}',
            "parallelism.pipeline_parallel_schedule",
        )
    per_stage = made.number("parallelism.pipeline_parallel_layers_per_stage")
    layers = made.value("model.n_layers")
    if per_stage and layers and pp > 1:
        made.take(
            "parallel.virtual_stages",
            max(1, -(-layers // per_stage) // pp),
            "parallelism.pipeline_parallel_layers_per_stage",
        )
    elif per_stage and pp > 1:
        made.lose(
            "the layers of a preset are not counted here: set parallel.virtual_stages",
            "parallelism.pipeline_parallel_layers_per_stage",
        )
    return schedule or "1F1B"


def _set_precision(made: Translation) -> None:
    if made.text("training.dtype") == "bfloat16":
        made.lose("parameters and optimizer are float32, compute is bfloat16", "training.dtype")
    if made.text("training.mixed_precision_reduce") == "bfloat16":
        made.take("precision.reduce", "bfloat16", "training.mixed_precision_reduce")
    converters = made.get("model.converters")
    names: Any = converters.value if converters is not None else []
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]  # 0.1 cuts it so
    if isinstance(names, list) and names:
        if any("float8" in str(name) for name in names):
            made.take("precision.matmul", "float8", "model.converters")
        if any("float8" not in str(name) for name in names):
            made.lose("float8 is the one converter that is there", "model.converters")
    for word in ("training.compile", "compile.enable"):
        if word in made.settings:
            made.take("compile.enabled", made.flag(word), word)
    word = "parallelism.enable_async_tensor_parallel"
    if made.flag(word):
        made.take("parallel.async_tp", True, word)


def _set_memory(made: Translation) -> None:
    key = "memory.activation_checkpoint"
    mode_word, option_word = (
        "activation_checkpoint.mode",
        "activation_checkpoint.selective_ac_option",
    )
    mode, option = made.text(mode_word) or "selective", made.settings.get(option_word)
    words = (mode_word, option_word)
    if mode == "selective":
        text = str(option.value) if option is not None else "2"
        if text == "op":
            made.take(key, "selective", *words)
        elif text.isdecimal() and 0 < len(text) < 5 and int(text):
            note = "" if option is not None else "the default"
            value = "full" if text == "1" else f"every {int(text)} blocks"
            made.take(key, value, *words, note=note)
        else:
            made.lose('neither op nor a number: "selective"', *words)
            made.take(key, "selective", *words)
    elif mode in ("full", "none"):
        made.take(key, mode, mode_word)
    else:
        made.lose(f"not there: {key} = selective", mode_word)
        made.take(key, "selective", mode_word)
    made.ignore(option_word)


def _set_optimizer(made: Translation) -> None:
    note_adamw(made, "optimizer.name", "adamw")
    made.assume("optim.lr", 8e-4, "the default of optimizer.lr")
    lr, steps = made.value("optim.lr", 8e-4), made.value("run.steps", 10_000)
    take_betas(made, ("optimizer.beta1", "optimizer.beta2"), (0.9, 0.95))

    warmup = made.number("lr_scheduler.warmup_steps")
    if warmup is not None:
        made.take("optim.warmup", warmup, "lr_scheduler.warmup_steps")
    else:
        made.assume("optim.warmup", min(200, steps), "the default of lr_scheduler.warmup_steps")
    kind_word, ratio_word = "lr_scheduler.decay_type", "lr_scheduler.decay_ratio"
    kind, ratio = made.text(kind_word) or "linear", made.real(ratio_word)
    made.ignore(kind_word, ratio_word)
    if ratio is not None:
        used = min(warmup if warmup is not None else 200, steps)
        decay = min(max(1, round(steps * min(max(ratio, 0.0), 1.0))), max(1, steps - used))
        made.take("optim.schedule", "wsd", kind_word, ratio_word)
        made.take("optim.decay_steps", decay, ratio_word, note=f"of {steps} steps")
        note_linear_decay(made, kind, kind_word)
    else:
        made.take("optim.schedule", "cosine" if kind == "cosine" else "linear", kind_word)
        if kind == "sqrt":
            made.lose('not there: optim.schedule = "linear"', kind_word)
    factor = made.real("lr_scheduler.min_lr_factor")
    if factor is not None:
        made.take("optim.min_lr", factor * lr, "lr_scheduler.min_lr_factor", note=f"x {lr}")


def _set_run(made: Translation) -> None:
    keep = made.number("checkpoint.keep_latest_k")
    if keep is not None:
        made.take("checkpoint.keep", keep or 1_000_000, "checkpoint.keep_latest_k")
    mode = made.text("checkpoint.async_mode")
    if mode is not None:
        made.take("checkpoint.async_save", mode != "disabled", "checkpoint.async_mode")
    word = "checkpoint.enable"
    if word in made.settings and not made.flag(word):
        made.lose("a run always saves, at its end at least (checkpoint.every)", word)
    every, steps = made.number("validation.freq"), made.number("validation.steps")
    if made.flag("validation.enable"):
        every = 10 if every is None else every  # their default
        made.take("validation.every", every, "validation.enable", "validation.freq")
        if steps is not None and steps > 0:
            made.take("validation.steps", steps, "validation.steps")
        else:
            made.assume("validation.steps", 10, "theirs reads the whole data")
