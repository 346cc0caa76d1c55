"""Translate a configuration of torchtitan: a TOML file, or the JSON that it writes of a run."""

from collections.abc import Sequence
from typing import Any

from composer3d.imports.layout import StatedLayout, read_layout, read_schedule, set_layout
from composer3d.imports.shared import note_parameters, read_dtype, take_betas
from composer3d.imports.translation import Translation
from composer3d.imports.words import PROGRAMS
from composer3d.models import registry
from composer3d.recipe.schema import OptimTable

_LAYER = PROGRAMS["torchtitan"].own["layer"]
_MODEL = "model_spec.model"
_GROUP = "optimizer.param_groups"
_MUON = "optimizer.muon."
_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
_LOCAL = "training.local_batch_size"
_MICRO = "parallelism.pipeline_parallel_microbatch_size"
_STEPS = "parallelism.num_pp_microbatches"
_CHECKPOINTING = "activation_checkpoint."


def flattened(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a JSON of torchtitan without lists of objects.

    The layers of the model become their number, and what the table of words has of each. One group
    of parameters becomes keys of the optimizer, as older versions have them. A group of DistMuon
    before it becomes ``optimizer.muon``.
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
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        said = _said_by_groups(groups)
        if said is not None:
            rest = {key: one for key, one in tree["optimizer"].items() if key != "param_groups"}
            tree = {**tree, "optimizer": {**rest, **said}}
    return tree


def _said_by_groups(groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return keys of the optimizer that say the same; None if there are none."""
    *before, last = groups or [{}]
    options = dict(last.get("optimizer_kwargs") or {})
    betas = options.pop("betas", None)
    if last.get("pattern") != ".*" or not isinstance(betas, list) or len(betas) != 2:
        return None
    said = {"name": last.get("optimizer_name"), "beta1": betas[0], "beta2": betas[1], **options}
    if not before:
        return said
    if len(before) > 1 or before[0].get("optimizer_name") != "DistMuon":
        return None
    matrices = dict(before[0].get("optimizer_kwargs") or {})
    return {**said, "muon": {**matrices, "pattern": before[0].get("pattern")}}


def _at(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a configuration of torchtitan."""
    made.take_plain_words()
    _set_model(made)
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
    preset = made.known.own["flavors"].get(name, {}).get(flavor)
    if name == "llama3" and flavor.startswith("debugmodel"):
        for field, value in made.known.own["debug_llama"].items():
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
        old = tuple(made.known.own["old_words"])
        is_old = any(found.shown.startswith(old) for found in made.settings.values())
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
    layout = read_layout(made)
    shard_word = "parallelism.data_parallel_shard_degree"
    shards = made.number(shard_word)
    if shards is not None:
        layout.set("dp", shards * (layout.replicas or 1), shard_word)
    reshard_word = "parallelism.fsdp_reshard_after_forward"
    reshard = made.text(reshard_word) or "default"
    layout.set("zero", _zero(layout, shards, reshard), reshard_word)
    if _TOKENS in made.settings:
        _set_batch_of_tokens(made, layout)
    else:
        _set_batch(made, layout)
    made.ignore(_LOCAL, _MICRO, _STEPS)
    read_schedule(made, layout, "parallelism.pipeline_parallel_schedule")
    _set_stages(made, layout)
    set_layout(made, layout, gpus)
    word = "parallelism.disable_loss_parallel"
    if word in made.settings:
        is_positive = "enable_loss_parallel" in made.settings[word].shown  # of 2024
        made.take("parallel.loss_parallel", made.flag(word) is is_positive, word)
    word = "parallelism.context_parallel_rotate_method"
    method = "ring" if made.text(word) == "alltoall" else "allgather"
    if (layout.cp or 1) > 1:
        made.take("parallel.cp_method", method, word)


def _zero(layout: StatedLayout, shards: int | None, reshard: str) -> int:
    """Return the level of ZeRO that FSDP2 has with such degrees."""
    has_pp = (layout.pp or 1) > 1
    if shards == 1 and (layout.cp or 1) == 1 and (layout.replicas or 1) > 1:
        return 0  # DDP
    if reshard == "never" or (reshard == "default" and has_pp):
        return 1 if has_pp else 2
    return 3


def _set_batch_of_tokens(made: Translation, layout: StatedLayout) -> None:
    """Set the batch of a file of 2026, which counts tokens."""
    layout.set("micro_batch", _samples(made, _TOKENS), _TOKENS)
    word = "training.num_tokens_per_train_step"
    if word in made.settings:
        layout.set("global_batch", _samples(made, word), word)
    elif (layout.pp or 1) > 1:
        layout.set("accumulation", made.number(_STEPS) or 1, _STEPS)


def _set_batch(made: Translation, layout: StatedLayout) -> None:
    """Set the batch of an older file, in which a pipeline cuts the batch of a rank."""
    local = made.number(_LOCAL) if _LOCAL in made.settings else 8
    layout.set("micro_batch", local, _LOCAL)
    if (layout.pp or 1) == 1 or not local:
        return
    steps = made.number(_STEPS)  # of 2024, when a rank's batch was cut into so many
    if steps and local % steps == 0:
        made.settings[_MICRO] = made.settings[_STEPS]._replace(value=local // steps)
    elif steps:
        made.ask(f"does not divide a local batch of {local}", _STEPS)
    micro = made.number(_MICRO) or 1
    if local % micro:
        made.contradict(
            f"{made.words(_MICRO)} does not divide a local batch of {local}: 1 is used", _MICRO
        )
        micro = 1
    layout.set("micro_batch", micro, _MICRO)
    if layout.global_batch is None:
        layout.set("accumulation", local // micro, _LOCAL)


def _set_stages(made: Translation, layout: StatedLayout) -> None:
    """Set the virtual stages of a pipeline that is cut after so many layers."""
    word, pp = "parallelism.pipeline_parallel_layers_per_stage", layout.pp or 1
    per_stage, layers = made.number(word), made.value("model.n_layers")
    key = "parallel.virtual_stages"
    if per_stage and layers and pp > 1:
        made.take(key, max(1, -(-layers // per_stage) // pp), word)
    elif per_stage and pp > 1:
        made.ask(f"the layers of a preset are not counted here: set {key}", word, ours=key)


def _set_precision(made: Translation) -> None:
    note_parameters(made, "training.dtype")
    word = "training.mixed_precision_reduce"
    if read_dtype(made, word) == "bfloat16":
        made.take("precision.reduce", "bfloat16", word)
    converters = made.get("model.converters")
    names: Any = converters.value if converters is not None else []
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]  # 0.1 cuts it so
    if isinstance(names, list) and names:
        if any("float8" in str(name) for name in names):
            note = "experts too, if there are any"  # torchtitan has converters for each
            made.take("precision.matmul", "float8", "model.converters", note=note)
        if any("float8" not in str(name) for name in names):
            made.ask("float8 is the one converter that is there", "model.converters")


def _set_memory(made: Translation) -> None:
    """Set activation checkpointing, which the versions say in several ways."""
    key, mode_word = "memory.activation_checkpoint", f"{_CHECKPOINTING}mode"
    option_word = f"{_CHECKPOINTING}selective_ac_option"
    mode = made.text(mode_word) or "selective"
    if _is_resolved(made) and mode_word not in made.settings:
        _set_memory_of_class(made, key)
    elif _is_resolved(made) and mode == "selective" and option_word not in made.settings:
        made.take(key, "selective", mode_word, note="of operators, as since 2026")
    else:
        if mode != "memory_budget":
            made.ignore(f"{_CHECKPOINTING}memory_budget")
        if mode == "selective":
            _set_selection(made, key, mode_word, option_word)
        elif mode in ("full", "none"):
            made.take(key, mode, mode_word)
        else:
            made.ask(f'not there: {key} = "selective"', mode_word, ours=key)
            made.take(key, "selective", mode_word)
        made.ignore(option_word)


def _set_memory_of_class(made: Translation, key: str) -> None:
    """Set it from the JSON of 2026: that has the fields of a class, and not its name."""
    section = [name for name in made.settings if name.startswith("activation_checkpoint")]
    selects = any("force_recompute" in name for name in section)
    mode = "selective" if selects else "full" if len(section) > 1 else "none"  # null is none
    budget = f"{_CHECKPOINTING}memory_budget"
    if budget in made.settings:
        made.ask(f"the compiler chooses: set {key}", budget, ours=key)
        mode = "selective"
    made.ignore(*section)
    note = f"the section has {len(section)} keys"
    made.take(key, mode, *(section[:1] if mode != "none" else ()), note=note)


def _set_selection(made: Translation, key: str, mode_word: str, option_word: str) -> None:
    """Set it from ``selective_ac_option``: operators, or every so many blocks."""
    option = made.settings.get(option_word)
    text = str(option.value) if option is not None else "2"
    words = (mode_word, option_word)
    if text.isdecimal() and 0 < len(text) < 5 and int(text):
        value = "full" if text == "1" else f"every {int(text)} blocks"
        made.take(key, value, *words, note="" if option is not None else "the default")
        return
    if text != "op":
        made.ask('neither op nor a number: "selective"', option_word, ours=key)
    made.take(key, "selective", *words)


def _set_optimizer(made: Translation) -> None:
    if _GROUP in made.settings:
        made.ask("the recipe has AdamW for all parameters, and these rates for none", _GROUP)
    if f"{_MUON}pattern" in made.settings:
        _set_muon(made)
    lr, steps = made.value("optim.lr"), made.value("run.steps")
    total = made.number("lr_scheduler.total_steps")
    if total:
        steps = total
        made.take("optim.decay", total, "lr_scheduler.total_steps")
    take_betas(made, ("optimizer.beta1", "optimizer.beta2"), (0.9, 0.95))

    warmup = made.number("lr_scheduler.warmup_steps")
    made.move("optim.warmup", "lr_scheduler.warmup_steps")
    made.assume("optim.warmup", min(200, steps), "the default of lr_scheduler.warmup_steps")
    kind_word, ratio_word = "lr_scheduler.decay_type", "lr_scheduler.decay_ratio"
    ratio = made.real(ratio_word)
    made.ignore(ratio_word)
    if ratio is not None:
        used = min(warmup if warmup is not None else 200, steps)
        decay = min(max(1, round(steps * min(max(ratio, 0.0), 1.0))), max(1, steps - used))
        if (made.text(kind_word) or "linear") != "linear":
            made.ask("the decay of wsd is linear", kind_word)
        made.take("optim.schedule", "wsd", kind_word, ratio_word)
        made.take("optim.decay_steps", decay, ratio_word, note=f"of {steps} steps")
    else:
        made.take("optim.schedule", made.choose(kind_word, "optim.schedule") or "linear", kind_word)
    factor = made.real("lr_scheduler.min_lr_factor")
    if factor is not None:
        made.take("optim.min_lr", factor * lr, "lr_scheduler.min_lr_factor", note=f"x {lr}")


def _set_muon(made: Translation) -> None:
    """Set the keys of Muon that do not move as they are."""
    made.take("optim.name", "muon", f"{_MUON}pattern")
    made.ask(
        "the recipe has Muon for the matrices of attention, feed-forward layers and experts",
        f"{_MUON}pattern",
        ours="optim.matrices",
    )
    word = f"{_MUON}adjust_lr_fn"
    made.take("optim.lr_scale", made.choose(word, "optim.lr_scale") or "original", word)
    word = f"{_MUON}weight_decay"
    decay = made.real(word)
    of_all = made.value("optim.weight_decay", OptimTable().weight_decay)
    if (0.1 if decay is None else decay) != of_all:  # theirs is 0.1 if absent
        made.ask(
            "matrices decay as all: give them a table of optim.groups", word, ours="optim.groups"
        )


def _is_resolved(made: Translation) -> bool:
    """Return whether the file is the JSON that torchtitan writes since 2026, with all values."""
    return any(name.startswith(f"{_MODEL}.") for name in made.settings)


def _samples(made: Translation, word: str) -> int | None:
    """Return the whole samples in a number of tokens."""
    tokens, length = made.number(word), made.value("data.seq_len")
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
