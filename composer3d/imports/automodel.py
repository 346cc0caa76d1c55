"""Translate a YAML configuration of NeMo Automodel, as far as it says the layout and the batch."""

from composer3d.imports.layout import read_layout, schedule_of, set_layout
from composer3d.imports.translation import Translation

_AXES = ("tp", "pp", "cp", "ep", "dp", "dp_replicate")
_LAYOUT = {
    "tp": "distributed.tp_size",
    "pp": "distributed.pp_size",
    "cp": "distributed.cp_size",
    "ep": "distributed.ep_size",
    "replicas": "distributed.dp_replicate_size",
    "dp": "distributed.dp_size",
    "global_batch": "step_scheduler.global_batch_size",
}
_STRATEGIES = {"fsdp2": 3, "fsdp2manager": 3, "ddp": 0, "ddpmanager": 0}
_OPTIMIZERS = ("adamw", "flashadamw")


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a YAML configuration of NeMo Automodel.

    Args:
        made: has the settings.
        gpus: the number of GPUs; None: what the mesh says.
    """
    for name in (f"distributed.{axis}_size" for axis in _AXES):
        found = made.settings.get(name)
        if found is not None and str(found.value).lower() in ("none", "null"):
            made.ignore(name)
            made.settings.pop(name)
    made.copy_plain_words()
    _set_model(made)
    _set_layout(made, gpus)
    _set_optimizer(made)


def _set_model(made: Translation) -> None:
    words = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path")
    if made.model is None and not {"model.preset", "model.hf"} & made.overridden:
        made.problems.append(
            f"{made.file}: {made.words(*words) or 'the model'}: is not read; give the nearest "
            "preset with --model, or its folder with --set model.hf=DIR"
        )
    if made.words(*words):
        made.lose("weights are not read; start from them with model.hf or checkpoint.init", *words)
    dtype = (made.text("model.torch_dtype") or "auto").lower().removeprefix("torch.")
    if dtype in ("bfloat16", "bf16"):
        made.lose("parameters and optimizer are float32, compute is bfloat16", "model.torch_dtype")
    elif dtype not in ("auto", "float32", "fp32"):
        made.ask("parameters and optimizer are float32", "model.torch_dtype")
    made.ignore("model.torch_dtype")
    made.assume("precision.compute", "bfloat16", "the default of their FSDP")
    length = made.number("packed_sequence.packed_sequence_size")
    if length:
        made.take("data.seq_len", length, "packed_sequence.packed_sequence_size")
    if "compile.enabled" in made.settings:
        made.take("compile.enabled", made.flag("compile.enabled"), "compile.enabled")
    if made.flag("fp8.enabled"):
        made.take("precision.matmul", "float8", "fp8.enabled")


def _set_layout(made: Translation, gpus: int | None) -> None:
    layout = read_layout(made, _LAYOUT)
    word = "distributed.strategy"
    strategy = (made.text(word) or "fsdp2").lower().rpartition(".")[2]
    if strategy not in _STRATEGIES:
        made.ask("not fsdp2 or ddp: parallel.zero = 3", word, ours="parallel.zero")
    layout.set("zero", _STRATEGIES.get(strategy, 3), word)
    micro_word, batch_word = (
        "distributed.pipeline.pp_microbatch_size",
        "step_scheduler.local_batch_size",
    )
    if (layout.pp or 1) > 1:
        layout.set("micro_batch", made.number(micro_word) or 1, micro_word)
        name = made.text("distributed.pipeline.pp_schedule") or "1f1b"
        layout.set("schedule", schedule_of(name), "distributed.pipeline.pp_schedule")
        if layout.schedule is None:
            made.ask(
                'not there: parallel.schedule = "1F1B"',
                "distributed.pipeline.pp_schedule",
                ours="parallel.schedule",
            )
            layout.schedule = "1F1B"
    else:
        layout.set("micro_batch", made.number(batch_word), batch_word)
    made.ignore(micro_word, batch_word, "distributed.pipeline.pp_schedule")
    set_layout(made, layout, gpus)
    word = "distributed.activation_checkpointing"
    if word in made.settings:
        made.take("memory.activation_checkpoint", "full" if made.flag(word) else "none", word)


def _set_optimizer(made: Translation) -> None:
    word = "optimizer._target_"
    found = made.get(word)
    name = str(found.value).rpartition(".")[2].lower() if found is not None else "adamw"
    decay = made.value("optim.weight_decay", 0.0)
    is_adamw = name in _OPTIMIZERS or (name == "fusedadam") or (name == "adam" and decay == 0)
    if not is_adamw:
        made.ask("the optimizer of the recipe is AdamW, whose weight decay is decoupled", word)
    made.ignore(word)
    made.assume("optim.clip", 1.0, "the default of clip_grad_norm.max_norm")
    style = (made.text("lr_scheduler.lr_decay_style") or "constant").lower()
    if style in ("cosine", "linear", "constant"):
        made.take("optim.schedule", style, "lr_scheduler.lr_decay_style")
    else:
        made.ask(
            'not there: optim.schedule = "cosine"',
            "lr_scheduler.lr_decay_style",
            ours="optim.schedule",
        )
