"""Translate a DeepSpeed configuration."""

from composer3d.imports.layout import Layout, set_layout
from composer3d.imports.megatron import refuse_half
from composer3d.imports.translation import Setting, Translation

# Keys that only a DeepSpeed configuration has.
MARKERS = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
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
_NAMES: dict[str, tuple[str, ...]] = {
    "tp": ("tensor_parallel.autotp_size",),
    "pp": ("pipeline_parallel_size",),
    "cp": ("sequence_parallel_size",),
    "ep": (),
    "dp": ("data_parallel_size",),
    "world": (),
    "replicas": (),
    "zero": ("zero_optimization.stage",),
    "schedule": (),
    "micro": ("train_micro_batch_size_per_gpu",),
    "accumulation": ("gradient_accumulation_steps",),
    "global": ("train_batch_size",),
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
    stage = made.number("zero_optimization.stage")
    if stage is not None and stage > 3:
        words = made.words("zero_optimization.stage")
        made.problems.append(f"{made.file}: {words}: must be 0, 1, 2 or 3")
        stage = None
    cp = made.number("sequence_parallel_size")
    if (cp or 1) > 1:
        made.take("parallel.cp_method", "ulysses", "sequence_parallel_size")
    dp = made.number("data_parallel_size")
    names = dict(_NAMES)
    if dp is None:
        names["dp"] = ()
    if stage is None:
        names["zero"] = ()
    set_layout(
        made,
        Layout(
            tp=made.number("tensor_parallel.autotp_size"),
            pp=made.number("pipeline_parallel_size"),
            cp=cp,
            ep=None,
            dp=dp,
            world=None,
            replicas=1,
            zero=stage or 0,
            micro_batch=made.number("train_micro_batch_size_per_gpu"),
            accumulation=made.number("gradient_accumulation_steps"),
            global_batch=made.number("train_batch_size"),
            schedule="1F1B",
            virtual_stages=None,
            names=names,
        ),
        gpus,
    )
    if "zero_optimization.zero_hpz_partition_size" in made.settings:
        made.lose(
            "parameters are sharded over all ranks of dp_shard; set mesh.dp_shard to the ranks of "
            "a node, and mesh.dp_replicate to the nodes",
            "zero_optimization.zero_hpz_partition_size",
        )
    _set_precision(made)
    _set_memory(made)
    _set_optimizer(made)


def _set_precision(made: Translation) -> None:
    is_half, is_narrow = made.flag("fp16.enabled"), made.flag("bf16.enabled")
    if is_half and is_narrow:
        made.contradict("fp16.enabled and bf16.enabled are both true: bfloat16 is used")
    elif is_half and "precision.compute" not in made.overridden:
        made.problems.append(refuse_half(made.file, made.words("fp16.enabled")))
    elif is_half:
        made.lose("no loss scaling: --set chooses the dtype", "fp16.enabled")
    if is_narrow:
        made.take("precision.compute", "bfloat16", "bf16.enabled")
    dtype = (made.text("communication_data_type") or "").lower()
    if dtype in ("bf16", "bfp16", "bfloat16"):
        made.take("precision.reduce", "bfloat16", "communication_data_type")
    elif dtype not in ("", "fp32"):
        made.lose("gradients are sent in float32", "communication_data_type")


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
    if kind is not None and kind.lower() not in _ADAMS:
        made.lose("the optimizer is AdamW", "optimizer.type")
    if "gradient_clipping" not in made.settings:
        made.assume("optim.clip", 0.0, "gradient_clipping is absent: no clipping")
    if kind is not None:
        made.assume("optim.betas", (0.9, 0.999), "the default of the optimizer")
        default = 0.01 if kind.lower() == "adamw" else 0.0
        made.assume("optim.weight_decay", default, f"the default of {kind}")

    peak = made.real("scheduler.params.warmup_max_lr")
    lr = made.values["optim.lr"].value if "optim.lr" in made.values else None
    if peak is not None and lr is not None and peak != lr:
        made.contradict(
            f"{made.words('optimizer.params.lr')} and "
            f"{made.words('scheduler.params.warmup_max_lr')}: the scheduler's {peak} is used"
        )
    if peak is not None:
        made.take("optim.lr", peak, "scheduler.params.warmup_max_lr")
    name = made.text("scheduler.type")
    total = made.number("scheduler.params.total_num_steps")
    if name is None:
        made.assume("optim.schedule", "constant", "there is no scheduler")
    elif name.lower() in _SCHEDULES:
        made.take("optim.schedule", _SCHEDULES[name.lower()], "scheduler.type")
    else:
        made.lose('not there: optim.schedule = "cosine"', "scheduler.type")
        made.drop("optim.schedule")
    if total is not None:
        made.take("run.steps", total, "scheduler.params.total_num_steps")
    ratio = made.real("scheduler.params.cos_min_ratio")
    if ratio is not None and name is not None and name.lower() == "warmupcosinelr":
        base = made.values["optim.lr"].value if "optim.lr" in made.values else 3e-4
        made.take("optim.min_lr", ratio * base, "scheduler.params.cos_min_ratio")
