"""Translate a DeepSpeed configuration."""

from composer3d.imports.layout import read_layout, set_layout
from composer3d.imports.shared import note_adamw, note_whole_experts, set_dtype
from composer3d.imports.translation import Setting, Translation

# Keys that only a DeepSpeed configuration has.
MARKERS = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "torch_autocast",
    "bf16",
    "fp16",
)

# For a script of Megatron-DeepSpeed: the arguments that say the same.
AS_MEGATRON = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "zero_optimization.stage": "zero_stage",
    "bf16.enabled": "bf16",
    "bfloat16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "gradient_clipping": "clip_grad",
    "optimizer.params.lr": "lr",
    "optimizer.params.eps": "adam_eps",
    "optimizer.params.weight_decay": "weight_decay",
    "data_parallel_size": "data_parallel_size",
    "steps_per_print": "log_interval",
}

_ADAMS = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")
_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_LAYOUT = {
    "tp": "tensor_parallel.autotp_size",
    "pp": "pipeline_parallel_size",
    "cp": "sequence_parallel_size",
    "ep": "expert_parallel.autoep_size",
    "dp": "data_parallel_size",
    "zero": "zero_optimization.stage",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "global_batch": "train_batch_size",
}


def as_megatron(found: Setting) -> Setting | None:
    """Return the setting as an argument of Megatron-LM, or None if it has no such word."""
    name = AS_MEGATRON.get(found.name)
    return found._replace(name=name) if name is not None else None


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a DeepSpeed configuration.

    Args:
        made: has the settings.
        gpus: the number of GPUs; None: what the batch says.
    """
    made.copy_plain_words()
    layout = read_layout(made, _LAYOUT)
    if (layout.cp or 1) > 1:
        made.take("parallel.cp_method", "ulysses", "sequence_parallel_size")
    word = "expert_parallel.enabled"
    if word in made.settings and not made.flag(word):
        layout.set("ep", None, "expert_parallel.autoep_size")
    made.ignore(word, "expert_parallel.autoep_size")
    nodes, per_node = made.number("nnodes"), made.number("nproc_per_node")
    if per_node is not None:
        layout.set("world", per_node * (nodes or 1), "nnodes", "nproc_per_node")
    set_layout(made, layout, gpus)
    note_whole_experts(made, "expert_parallel.expert_tensor_parallel_size")
    _set_precision(made)
    _set_memory(made)
    _set_optimizer(made)


def _set_precision(made: Translation) -> None:
    half, narrow = ([word] if made.flag(word) else [] for word in ("fp16.enabled", "bf16.enabled"))
    words = ("torch_autocast.enabled", "torch_autocast.dtype")
    dtype = (made.text(words[1]) or "").lower().removeprefix("torch.")
    if made.flag(words[0]) and dtype in ("bfloat16", "bf16"):
        narrow += words
    elif made.flag(words[0]) and dtype in ("float16", "fp16", "half"):
        half += words
    elif made.flag(words[0]):
        made.ask("which dtype is not said", *words, ours="precision.compute")
    made.ignore(*words)
    set_dtype(made, half=tuple(half), narrow=tuple(narrow))
    dtype = (made.text("communication_data_type") or "").lower()
    if dtype in ("bf16", "bfp16", "bfloat16"):
        made.take("precision.reduce", "bfloat16", "communication_data_type")
    elif dtype not in ("", "fp32"):
        made.lose("gradients are sent in float32", "communication_data_type")
    made.ignore("communication_data_type")


def _set_memory(made: Translation) -> None:
    offloads = [
        name
        for name in (
            "zero_optimization.offload_optimizer.device",
            "zero_optimization.offload_param.device",
        )
        if (made.text(name) or "none").lower() in ("cpu", "nvme")
    ]
    if offloads:
        made.take("memory.cpu_offload", True, *offloads)
        if len(offloads) == 1 or "nvme" in made.words(*offloads):
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
    kind = made.text("optimizer.type")
    note_adamw(made, "optimizer.type", *_ADAMS)
    if "gradient_clipping" not in made.settings:
        made.assume("optim.clip", 0.0, "gradient_clipping is absent: no clipping")
    if kind is not None:
        made.assume("optim.betas", (0.9, 0.999), "the default of the optimizer")
        # DeepSpeed's own Adam has no decay unless it is given; torch's AdamW has.
        is_torch = kind.lower() == "adamw" and made.flag("optimizer.params.torch_adam")
        made.assume("optim.weight_decay", 0.01 if is_torch else 0.0, f"the default of {kind}")
        if "optimizer.params.lr" not in made.settings:
            made.assume("optim.lr", 1e-3, f"the default of {kind}")

    peak = made.real("scheduler.params.warmup_max_lr")
    lr = made.value("optim.lr")
    if peak is not None and lr is not None and peak != lr:
        made.contradict(
            f"{made.words('optimizer.params.lr')} and "
            f"{made.words('scheduler.params.warmup_max_lr')}: the scheduler's {peak} is used"
        )
    if peak is not None:
        made.take("optim.lr", peak, "scheduler.params.warmup_max_lr")
    name = made.text("scheduler.type")
    _set_warmup(made, name)
    if name is None:
        made.assume("optim.schedule", "constant", "there is no scheduler")
    elif name.lower() in _SCHEDULES:
        made.take("optim.schedule", _SCHEDULES[name.lower()], "scheduler.type")
    else:
        made.ask('not there: optim.schedule = "cosine"', "scheduler.type", ours="optim.schedule")
        made.drop("optim.schedule")
    made.take_number("run.steps", "scheduler.params.total_num_steps")
    word = "scheduler.params.cos_min_ratio"
    ratio = made.real(word)
    if name is not None and name.lower() == "warmupcosinelr":
        base = made.value("optim.lr", 3e-4)
        if ratio is not None:
            made.take("optim.min_lr", ratio * base, word)
        elif word not in made.settings:
            made.assume("optim.min_lr", 1e-4 * base, "1e-4 of the peak, the default")


def _set_warmup(made: Translation, scheduler: str | None) -> None:
    """Set what a scheduler does in its warmup if the file does not say it."""
    if scheduler is None or scheduler.lower() not in _SCHEDULES:
        return
    word = "scheduler.params.warmup_num_steps"
    if word not in made.settings:
        made.assume("optim.warmup", 1000, f"the default of {scheduler}")
    word = "scheduler.params.warmup_max_lr"
    if scheduler.lower() == "warmupdecaylr" and word not in made.settings:
        lr = made.words("optimizer.params.lr")
        if lr and made.value("optim.lr") != 1e-3:
            made.contradict(f"{lr}, but {scheduler} without warmup_max_lr has 0.001: {lr} is used")
    word = "scheduler.params.warmup_type"
    if word not in made.settings and made.value("optim.warmup", 0) > 0:
        made.lose(f"the warmup is linear, that of {scheduler} without warmup_type a logarithm")
