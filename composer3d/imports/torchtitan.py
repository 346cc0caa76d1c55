"""Translate a TOML configuration of torchtitan 0.1 or 0.2."""

from typing import Any

from composer3d.imports.layout import Layout, set_layout
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

_NAMES: dict[str, tuple[str, ...]] = {
    "tp": ("parallelism.tensor_parallel_degree",),
    "pp": ("parallelism.pipeline_parallel_degree",),
    "cp": ("parallelism.context_parallel_degree",),
    "ep": ("parallelism.expert_parallel_degree",),
    "replicas": ("parallelism.data_parallel_replicate_degree",),
    "global": ("training.global_batch_size",),
    "accumulation": (),
    "schedule": ("parallelism.pipeline_parallel_schedule",),
    "world": (),
}


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a TOML configuration of torchtitan.

    Args:
        made: has the settings.
        gpus: the number of GPUs; None: what the mesh says.
    """
    # These have -1 for "not given" or "the rest", which is no size.
    for name in ("parallelism.data_parallel_shard_degree", "training.global_batch_size"):
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
    words = tuple(word for word in ("model.name", "model.flavor") if word in made.settings)
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
    names = dict(_NAMES)
    pp = made.number("parallelism.pipeline_parallel_degree") or 1
    shards = made.number("parallelism.data_parallel_shard_degree")
    replicas = made.number("parallelism.data_parallel_replicate_degree") or 1
    dp = shards * replicas if shards is not None else None
    names["dp"] = ("parallelism.data_parallel_shard_degree",) if shards is not None else ()

    zero, names["zero"] = 3, ()
    reshard = made.text("parallelism.fsdp_reshard_after_forward") or "default"
    if "parallelism.fsdp_reshard_after_forward" in made.settings:
        names["zero"] = ("parallelism.fsdp_reshard_after_forward",)
    if reshard == "never" or (reshard == "default" and pp > 1):
        zero = 1 if pp > 1 else 2
    if shards == 1 and (made.number("parallelism.context_parallel_degree") or 1) == 1:
        zero = 0 if replicas > 1 else zero  # DDP

    local = made.number("training.local_batch_size")
    if local is None and "training.local_batch_size" not in made.settings:
        local = 8
    names["micro"] = ("training.local_batch_size",) * ("training.local_batch_size" in made.settings)
    micro, steps = local, None
    batch = made.number("training.global_batch_size")
    if pp > 1 and local:
        # A rank's batch is cut into micro-batches of the pipeline.
        word = "parallelism.pipeline_parallel_microbatch_size"
        micro = made.number(word) or 1
        if local % micro:
            made.contradict(
                f"{made.words(word)} does not divide a local batch of {local}: 1 is used"
            )
            micro = 1
        if batch is None:
            steps = local // micro
            names["accumulation"] = names["micro"]
        names["micro"] = (word,) if word in made.settings else ()
    made.ignore("training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size")

    schedule, stages = _schedule(made, pp)
    set_layout(
        made,
        Layout(
            tp=made.number("parallelism.tensor_parallel_degree"),
            pp=made.number("parallelism.pipeline_parallel_degree"),
            cp=made.number("parallelism.context_parallel_degree"),
            ep=made.number("parallelism.expert_parallel_degree"),
            dp=dp,
            world=None,
            replicas=replicas,
            zero=zero,
            micro_batch=micro,
            accumulation=steps,
            global_batch=batch,
            schedule=schedule,
            virtual_stages=stages,
            names=names,
        ),
        gpus,
    )
    word = "parallelism.expert_tensor_parallel_degree"
    if word in made.settings:
        if made.number(word) == 1:
            made.harmless.append(made.words(word))
        else:
            made.lose("experts are never cut by tp: mesh.ep puts whole ones on its ranks", word)
    word = "parallelism.disable_loss_parallel"
    if word in made.settings:
        made.take("parallel.loss_parallel", not made.flag(word), word)
    method = made.text("parallelism.context_parallel_rotate_method")
    if (made.number("parallelism.context_parallel_degree") or 1) > 1:
        words = ("parallelism.context_parallel_rotate_method",) * (method is not None)
        ours = "ring" if method == "alltoall" else "allgather"
        made.take("parallel.cp_method", ours, *words)


def _schedule(made: Translation, pp: int) -> tuple[str, int | None]:
    name = made.text("parallelism.pipeline_parallel_schedule") or "1F1B"
    known = {schedule.lower(): schedule for schedule in SCHEDULES if schedule != "csv"}
    schedule = known.get(name.lower())
    if schedule is None and pp > 1:
        names = describe_type(ParallelTable.__dataclass_fields__["schedule"].type)
        made.lose(
            f'not there: parallel.schedule = "1F1B"; the schedules are {names}',
            "parallelism.pipeline_parallel_schedule",
        )
    chosen = schedule or "1F1B"
    per_stage = made.number("parallelism.pipeline_parallel_layers_per_stage")
    layers = made.values["model.n_layers"].value if "model.n_layers" in made.values else None
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
    return chosen, None


def _set_precision(made: Translation) -> None:
    if made.text("training.dtype") == "bfloat16":
        made.lose("parameters and optimizer are float32, compute is bfloat16", "training.dtype")
    if made.text("training.mixed_precision_reduce") == "bfloat16":
        made.take("precision.reduce", "bfloat16", "training.mixed_precision_reduce")
    converters = made.get("model.converters")
    names: Any = converters.value if converters is not None else []
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
    mode = made.text("activation_checkpoint.mode")
    option = made.settings.get("activation_checkpoint.selective_ac_option")
    made.ignore("activation_checkpoint.selective_ac_option")
    words = ("activation_checkpoint.mode",) * (mode is not None)
    if (mode or "selective") == "selective":
        text = str(option.value) if option is not None else "2"
        words += ("activation_checkpoint.selective_ac_option",) * (option is not None)
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
        made.take(key, mode, *words)
    else:
        made.lose(f"not there: {key} = selective", "activation_checkpoint.mode")
        made.take(key, "selective", *words)


def _set_optimizer(made: Translation) -> None:
    if made.text("optimizer.name") not in (None, "AdamW"):
        made.lose("the optimizer is AdamW", "optimizer.name")
    made.ignore("optimizer.name")
    made.assume("optim.lr", 8e-4, "the default of optimizer.lr")
    lr = made.values["optim.lr"].value if "optim.lr" in made.values else 8e-4
    beta1, beta2 = made.real("optimizer.beta1"), made.real("optimizer.beta2")
    words = tuple(one for one in ("optimizer.beta1", "optimizer.beta2") if one in made.settings)
    if words:
        betas = (0.9 if beta1 is None else beta1, 0.95 if beta2 is None else beta2)
        made.take("optim.betas", betas, *words)

    steps = made.values["run.steps"].value if "run.steps" in made.values else 10_000
    warmup = made.number("lr_scheduler.warmup_steps")
    if warmup is not None:
        made.take("optim.warmup", warmup, "lr_scheduler.warmup_steps")
    else:
        made.assume("optim.warmup", min(200, steps), "the default of lr_scheduler.warmup_steps")
    kind = made.text("lr_scheduler.decay_type") or "linear"
    ratio = made.real("lr_scheduler.decay_ratio")
    decay_words = tuple(
        one
        for one in ("lr_scheduler.decay_type", "lr_scheduler.decay_ratio")
        if one in made.settings
    )
    made.ignore(*decay_words)
    if ratio is not None:
        used = min(warmup if warmup is not None else 200, steps)
        decay = min(max(1, round(steps * min(max(ratio, 0.0), 1.0))), max(1, steps - used))
        made.take("optim.schedule", "wsd", *decay_words)
        made.take("optim.decay_steps", decay, "lr_scheduler.decay_ratio", note=f"of {steps} steps")
        if kind != "linear":
            made.lose("the decay of wsd is linear", "lr_scheduler.decay_type")
    else:
        schedule = "cosine" if kind == "cosine" else "linear"
        made.take(
            "optim.schedule", schedule, *decay_words, note="" if decay_words else "the default"
        )
        if kind == "sqrt":
            made.lose('not there: optim.schedule = "linear"', "lr_scheduler.decay_type")
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
        if every is not None:
            made.take("validation.every", every, "validation.enable", "validation.freq")
        if steps is not None and steps > 0:
            made.take("validation.steps", steps, "validation.steps")
