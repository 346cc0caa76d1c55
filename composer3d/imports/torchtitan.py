"""Translate a configuration of torchtitan: a TOML file, or the JSON that it writes of a run."""

from typing import Any

from composer3d.imports.layout import read_layout, schedule_of, set_layout
from composer3d.imports.shared import (
    note_adamw,
    note_linear_decay,
    note_whole_experts,
    take_betas,
)
from composer3d.imports.translation import Translation
from composer3d.models import registry
from composer3d.recipe.schema import ParallelTable
from composer3d.recipe.values import describe_type

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
# Words that 0.1 and older versions have, and 0.2 has not.
_OLD_WORDS = (
    "training.compile",
    "training.batch_size",
    "training.warmup_steps",
    "model.tokenizer_path",
    "lr_scheduler.lr_min ",
)

_LAYOUT = {
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "replicas": "parallelism.data_parallel_replicate_degree",
    "global_batch": "training.global_batch_size",
}


# What the JSON has of a layer, by our field of the shape.
_LAYER: dict[str, tuple[str, ...]] = {
    "n_heads": ("attention", "n_heads"),
    "n_kv_heads": ("attention", "n_kv_heads"),
    "rope_theta": ("attention", "rope", "theta"),
    "ffn": ("feed_forward", "w1", "out_features"),
}
_MODEL = "model_spec.model"
_GROUP = "optimizer.param_groups"
_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"


def flattened(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a JSON of torchtitan without lists of objects.

    The layers of the model become their number, and what the table of words has of each. One group
    of parameters becomes keys of the optimizer, as older versions have them.
    """
    model = _at(tree, ("model_spec", "model"))
    if isinstance(model, dict) and isinstance(model.get("layers"), list):
        layers = model["layers"]
        facts: dict[str, Any] = {"dim": model.get("dim"), "vocab_size": model.get("vocab_size")}
        for name, path in _LAYER.items():
            found = {str(_at(layer, path)): _at(layer, path) for layer in layers}
            facts[name] = next(iter(found.values())) if len(found) == 1 else "several"
        if "'alpha'" in str(model):
            facts["lora"] = True
        spec = {**tree["model_spec"], "model": {**facts, "layers": len(layers)}}
        tree = {**tree, "model_spec": spec}
    groups = _at(tree, ("optimizer", "param_groups"))
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict):
        group = groups[0]
        options = dict(group.get("optimizer_kwargs") or {})
        betas = options.pop("betas", None)
        if group.get("pattern") == ".*" and isinstance(betas, list) and len(betas) == 2:
            rest = {key: one for key, one in tree["optimizer"].items() if key != "param_groups"}
            said = {"name": group.get("optimizer_name"), "beta1": betas[0], "beta2": betas[1]}
            tree = {**tree, "optimizer": {**rest, **said, **options}}
    return tree


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a configuration of torchtitan.

    Args:
        made: has the settings.
        gpus: the number of GPUs; None: what the mesh says.
    """
    # These have -1 for "not given", "the rest" or "all", which is no size.
    for name in (
        "parallelism.data_parallel_shard_degree",
        "training.global_batch_size",
        "training.num_tokens_per_train_step",
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
    flavor = made.text("model.flavor") or ""
    words = ("model.name", "model.flavor")
    made.ignore(*words)
    if made.model is not None or {"model.preset", "model.hf"} & made.overridden:
        return
    preset = FLAVORS.get(name, {}).get(flavor)
    if name == "llama3" and flavor.startswith("debugmodel"):
        for field, value in _DEBUG_LLAMA.items():
            made.take(f"model.{field}", value, *words)
    elif preset is None:
        made.problems.append(
            f"{made.file}: {made.words(*words) or 'no model.flavor'}: no model of ours; give the "
            "nearest with --model PRESET"
        )
        return
    else:
        made.take("model.preset", preset, *words)
    if name == "llama3":
        is_old = any(found.shown.startswith(_OLD_WORDS) for found in made.settings.values())
        if is_old and preset is None:
            made.ask("the sizes of this model have changed with the versions", "model.flavor")
        factor = 1.0 if is_old else 8.0
        made.drop("model.rope_factor")
        made.assume(
            "model.rope_factor",
            factor,
            "torchtitan 0.1 does not stretch positions" if is_old else "as in torchtitan 0.2",
        )
    elif flavor == "235B-A22B":
        made.take("model.rope_theta", 5_000_000.0, *words)
    _compare_model(made, preset)


def _compare_model(made: Translation, preset: str | None) -> None:
    """Ask about a size that is not that of the flavor: somebody has changed the model."""
    shape: Any = None
    for architecture in registry.OURS:
        shape = registry.architecture(architecture).presets.get(preset or "", shape)
    names = {"dim": "dim", "vocab_size": "vocab", "layers": "n_layers"}
    for theirs, ours in (names | {name: name for name in _LAYER}).items():
        word = f"{_MODEL}.{theirs}"
        found = made.get(word)
        default = made.value("model.n_heads", getattr(shape, "n_heads", None))
        expected = made.value(f"model.{ours}", getattr(shape, ours, None))
        if found is None or (ours == "ffn" and hasattr(shape, "experts")):
            continue
        if found.value != expected and not (found.value is None and expected == default):
            made.ask(f"the flavor has {expected}", word, ours=f"model.{ours}")
        made.ignore(word)


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
    steps_word = "parallelism.num_pp_microbatches"
    if _TOKENS in made.settings:
        layout.set("micro_batch", _samples(made, _TOKENS), _TOKENS)
        word = "training.num_tokens_per_train_step"
        if word in made.settings:
            layout.set("global_batch", _samples(made, word), word)
        elif pp > 1:
            layout.set("accumulation", made.number(steps_word) or 1, steps_word)
    elif pp > 1 and local:
        steps = made.number(steps_word)  # of 2024, when a rank's batch was cut into so many
        if steps and local % steps == 0:
            made.settings[micro_word] = made.settings[steps_word]._replace(value=local // steps)
        elif steps:
            made.ask(f"does not divide a local batch of {local}", steps_word)
        # A rank's batch is cut into micro-batches of the pipeline.
        micro = made.number(micro_word) or 1
        if local % micro:
            made.contradict(
                f"{made.words(micro_word)} does not divide a local batch of {local}: 1 is used",
                micro_word,
            )
            micro = 1
        layout.set("micro_batch", micro, micro_word)
        if layout.global_batch is None:
            layout.set("accumulation", local // micro, batch_word)
    made.ignore(batch_word, micro_word, steps_word)

    layout.set("schedule", _schedule(made, pp), "parallelism.pipeline_parallel_schedule")
    set_layout(made, layout, gpus)
    note_whole_experts(made, "parallelism.expert_tensor_parallel_degree")
    word = "parallelism.disable_loss_parallel"
    if word in made.settings:
        is_positive = "enable_loss_parallel" in made.settings[word].shown  # of 2024
        made.take("parallel.loss_parallel", made.flag(word) is is_positive, word)
    word = "parallelism.context_parallel_rotate_method"
    method = "ring" if made.text(word) == "alltoall" else "allgather"
    if (made.number("parallelism.context_parallel_degree") or 1) > 1:
        made.take("parallel.cp_method", method, word)


def _schedule(made: Translation, pp: int) -> str:
    name = made.text("parallelism.pipeline_parallel_schedule") or "1F1B"
    schedule = schedule_of(name)
    if schedule is None and pp > 1:
        names = describe_type(ParallelTable.__dataclass_fields__["schedule"].type)
        made.ask(
            f'not there: parallel.schedule = "1F1B"; the schedules are {names}',
            "parallelism.pipeline_parallel_schedule",
            ours="parallel.schedule",
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
        made.ask(
            "the layers of a preset are not counted here: set parallel.virtual_stages",
            "parallelism.pipeline_parallel_layers_per_stage",
            ours="parallel.virtual_stages",
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
            made.ask("float8 is the one converter that is there", "model.converters")
    if made.flag("training.enable_float8_linear"):
        made.take("precision.matmul", "float8", "training.enable_float8_linear")
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
    section = [name for name in made.settings if name.startswith("activation_checkpoint")]
    if mode_word not in made.settings and _is_resolved(made):
        # The JSON of 2026 has the fields of a class, and not its name: null is none.
        selects = any("force_recompute" in name for name in section)
        mode = "selective" if selects else "full" if len(section) > 1 else "none"
        note = f"the section has {len(section)} keys"
        budget = "activation_checkpoint.memory_budget"
        if budget in made.settings:
            made.ask("the compiler chooses: set memory.activation_checkpoint", budget, ours=key)
            mode = "selective"
        made.ignore(*section)
        made.take(key, mode, *(section[:1] if mode != "none" else ()), note=note)
        return
    if _is_resolved(made) and option is None and mode == "selective":
        made.take(key, "selective", mode_word, note="of operators, as since 2026")
        return
    budget = "activation_checkpoint.memory_budget"
    if mode != "memory_budget":
        made.ignore(budget)
    if mode == "selective":
        text = str(option.value) if option is not None else "2"
        if text == "op":
            made.take(key, "selective", *words)
        elif text.isdecimal() and 0 < len(text) < 5 and int(text):
            note = "" if option is not None else "the default"
            value = "full" if text == "1" else f"every {int(text)} blocks"
            made.take(key, value, *words, note=note)
        else:
            made.ask('neither op nor a number: "selective"', option_word, ours=key)
            made.take(key, "selective", *words)
    elif mode in ("full", "none"):
        made.take(key, mode, mode_word)
    else:
        made.ask(f'not there: {key} = "selective"', mode_word, ours=key)
        made.take(key, "selective", mode_word)
    made.ignore(option_word)


def _set_optimizer(made: Translation) -> None:
    note_adamw(made, "optimizer.name", "adamw")
    if _GROUP in made.settings:
        made.ask("the recipe has AdamW for all parameters, and these rates for none", _GROUP)
    made.assume("optim.lr", 8e-4, "the default of optimizer.lr")
    lr, steps = made.value("optim.lr", 8e-4), made.value("run.steps", 10_000)
    total = made.number("lr_scheduler.total_steps")
    if total:
        steps = total
        made.take("optim.decay", total, "lr_scheduler.total_steps")
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
        if kind not in ("linear", "cosine"):
            made.ask('not there: optim.schedule = "linear"', kind_word, ours="optim.schedule")
    factor = made.real("lr_scheduler.min_lr_factor")
    if factor is not None:
        made.take("optim.min_lr", factor * lr, "lr_scheduler.min_lr_factor", note=f"x {lr}")


def _is_resolved(made: Translation) -> bool:
    """Return whether the file is the JSON that torchtitan writes since 2026, with all values."""
    return any(name.startswith(f"{_MODEL}.") for name in made.settings)


def _samples(made: Translation, word: str) -> int | None:
    """Return the whole samples in a number of tokens."""
    tokens, length = made.number(word), made.value("data.seq_len", 2048)
    if tokens is None or length < 1:
        return None
    if tokens % length:
        made.ask(f"is no multiple of {length} tokens of a sample", word)
    return max(1, tokens // length)


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
