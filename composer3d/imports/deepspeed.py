"""Translate a DeepSpeed configuration."""

from composer3d.imports.layout import read_layout, read_world, set_layout
from composer3d.imports.shared import read_dtype, set_dtype
from composer3d.imports.translation import Translation

_OFFLOADS = (
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
)


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a DeepSpeed configuration."""
    made.take_plain_words()
    layout = read_layout(made)
    if (layout.cp or 1) > 1:
        made.take("parallel.cp_method", "ulysses", "sequence_parallel_size")
    word = "expert_parallel.enabled"
    if word in made.settings and not made.flag(word):
        layout.set("ep", None, "expert_parallel.autoep_size")
    made.ignore(word, "expert_parallel.autoep_size")
    read_world(made, layout, gpus)
    set_layout(made, layout, gpus)
    _set_precision(made)
    _set_memory(made)
    _set_optimizer(made)
    scheduler = made.text("scheduler.type")
    if scheduler is not None:
        _set_scheduler(made, scheduler)
    made.move("run.steps", "scheduler.params.total_num_steps")


def _set_precision(made: Translation) -> None:
    switches = {"fp16.enabled": "float16", "bf16.enabled": "bfloat16"}
    dtypes = {word: dtype for word, dtype in switches.items() if made.flag(word)}
    words = ("torch_autocast.enabled", "torch_autocast.dtype")
    dtype = read_dtype(made, words[1])
    if made.flag(words[0]) and dtype in ("float16", "bfloat16"):
        dtypes |= dict.fromkeys(words, dtype)
    elif made.flag(words[0]):
        made.ask("which dtype is not said", *words, ours="precision.compute")
    made.ignore(*words)
    set_dtype(made, dtypes)
    dtype = read_dtype(made, "communication_data_type")
    if dtype == "bfloat16":
        made.take("precision.reduce", "bfloat16", "communication_data_type")
    elif dtype not in (None, "float32"):
        made.lose("gradients are sent in float32", "communication_data_type")
    made.ignore("communication_data_type")


def _set_memory(made: Translation) -> None:
    devices = {name: (made.text(name) or "none").lower() for name in _OFFLOADS}
    offloads = [name for name, device in devices.items() if device in ("cpu", "nvme")]
    if offloads:
        made.take("memory.cpu_offload", True, *offloads)
        if len(offloads) == 1 or "nvme" in devices.values():
            made.lose(
                "memory.cpu_offload keeps all of parameters, gradients and optimizer in the host's "
                "memory",
                *offloads,
            )
    options = [name for name in made.settings if name.startswith("activation_checkpointing.")]
    if options:
        made.take("memory.activation_checkpoint", "full", *options[:1], note="the section is there")
        made.lose("options of activation checkpointing: the inputs of blocks are kept", *options)


def _set_optimizer(made: Translation) -> None:
    found = made.settings.get("optimizer.type")
    kind = found.value if found is not None else None
    if isinstance(kind, str) and kind != "auto":
        made.assume("optim.betas", (0.9, 0.999), "the default of the optimizer")
        # DeepSpeed's own Adam has no decay unless it is given; torch's AdamW has.
        is_torch = kind.lower() == "adamw" and made.flag("optimizer.params.torch_adam")
        made.assume("optim.weight_decay", 0.01 if is_torch else 0.0, f"the default of {kind}")
        if "optimizer.params.lr" not in made.settings:
            made.assume("optim.lr", 1e-3, f"the default of {kind}")
    peak, lr = made.real("scheduler.params.warmup_max_lr"), made.value("optim.lr")
    if peak is not None and lr is not None and peak != lr:
        made.contradict(
            f"{made.words('optimizer.params.lr')} and "
            f"{made.words('scheduler.params.warmup_max_lr')}: the scheduler's {peak} is used"
        )
    made.move("optim.lr", "scheduler.params.warmup_max_lr")


def _set_scheduler(made: Translation, name: str) -> None:
    """Set the schedule, and what it does if the file does not say it."""
    made.take_choice("optim.schedule", "scheduler.type")
    kind, params = name.lower(), "scheduler.params."
    if kind not in made.known.choices["scheduler.type"]:
        return
    if params + "warmup_num_steps" not in made.settings:
        made.assume("optim.warmup", 1000, f"the default of {name}")
    lr = made.words("optimizer.params.lr")
    says_peak = params + "warmup_max_lr" in made.settings
    if kind == "warmupdecaylr" and not says_peak and lr and made.value("optim.lr") != 1e-3:
        made.contradict(f"{lr}, but {name} without warmup_max_lr has 0.001: {lr} is used")
    if params + "warmup_type" not in made.settings and made.value("optim.warmup", 0) > 0:
        made.lose(f"the warmup is linear, that of {name} without warmup_type a logarithm")
    if kind == "warmupcosinelr":
        ratio, peak = made.real(params + "cos_min_ratio"), made.value("optim.lr", 3e-4)
        if ratio is not None:
            made.take("optim.min_lr", ratio * peak, params + "cos_min_ratio")
        elif params + "cos_min_ratio" not in made.settings:
            made.assume("optim.min_lr", 1e-4 * peak, "1e-4 of the peak, the default")
