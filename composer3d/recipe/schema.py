"""The vocabulary of a recipe: one frozen dataclass for each TOML table.

A field is a key, its annotation is the type that is checked, its default is what an absent key means, and its text is
what ``composer3d check --schema`` prints. A key enters here with the feature that it drives.
"""

import unicodedata
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal

from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.spec.ranges import MOST_LAYERS, MOST_TOKENS, Range, above, between, key
from composer3d.spec.schedules import SCHEDULES

MOST_RANKS = 1 << 24  # processes of a world
MOST_STEPS = 10**9
AXIS = between(1, 1 << 20)
SEED: Range = (
    lambda value: value >= 0,
    "must be at least 0",
)  # its other end is that of all ints, 64 bits
STEPS_OR_NEVER = between(0, MOST_STEPS)
MINUTES_OR_NEVER = between(0, 60 * 24 * 365)
STEPS = between(1, MOST_STEPS)
SHARDS: Range = (
    lambda value: value == -1 or AXIS[0](value),
    f"{AXIS[1]}, or -1 for what is left of the world",
)
BETAS: Range = (
    lambda value: all(0 <= beta < 1 for beta in value),
    "must both be at least 0 and below 1",
)
PRESET: Range = (
    lambda value: value in PRESETS,
    f"is unknown; the presets are {', '.join(PRESETS)}",
)
MINUTES: Range = (lambda value: 0 < value <= 10_080, "must be above 0 and at most 10080, a week")
NAME_BYTES = 200  # of the 255 that a file system takes: the rest is for what is appended


def _is_text(value: str) -> bool:
    """Whether it holds no line break, no other control character and no lone surrogate, which UTF-8 cannot hold."""
    return not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in value)


def _names_a_folder(value: str) -> bool:
    if not value.strip() or value in (".", "..") or set(value) & set("/\\"):
        return False
    return _is_text(value) and len(value.encode()) <= NAME_BYTES


FOLDER_NAME: Range = (
    _names_a_folder,
    "names the folder of the run: it must not be empty, . or .., nor hold / or \\ or control characters, "
    f"and have at most {NAME_BYTES} bytes in UTF-8",
)
PATH: Range = (
    lambda value: 0 < len(value) <= 4096 and _is_text(value),
    "must be a path of 1 to 4096 characters, without control characters",
)


@dataclass(frozen=True, kw_only=True)
class RunTable:
    name: str = key("run", "name of the run; its folder is out_dir/name", FOLDER_NAME)
    steps: int = key(100, "optimizer steps of the whole run", STEPS)
    seed: int = key(0, "seed of the initial weights", SEED)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto takes cuda where there is one")
    out_dir: str = key(
        "runs", "folder that holds the folders of runs, relative to the working directory", PATH
    )
    timeout_minutes: float = key(
        10.0, "minutes a collective of training waits before the missing ranks are named", MINUTES
    )
    oversubscribe: bool = key(False, "allow more than 16 processes for each core of the CPU")


@dataclass(frozen=True, kw_only=True)
class Model(ModelShape):
    """The shape, and where it and the first weights come from. A preset, or config.json, gives what a text does not."""

    preset: str | None = key(
        None, "a published model: an unknown name lists all; the other keys override it", PRESET
    )
    hf: str | None = key(
        None,
        "a folder in Hugging Face's form: config.json is the shape, its weights the first ones",
        PATH,
    )


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """Sizes of the mesh axes, outermost first. Their product is the world size."""

    pp: int = key(1, "pipeline stages", AXIS)
    dp_replicate: int = key(1, "replicas that all-reduce gradients (HSDP)", AXIS)
    dp_shard: int = key(
        -1, "ranks that shard parameters (FSDP); -1 takes what is left of the world", SHARDS
    )
    cp: int = key(1, "context parallel ranks: each holds a part of every sequence", AXIS)
    tp: int = key(1, "tensor parallel ranks", AXIS)

    @property
    def world_size(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def batch_ranks(self) -> int:
        """Ranks that hold different samples: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard


AXES = tuple(axis.name for axis in fields(MeshTable))  # outermost to innermost


@dataclass(frozen=True, kw_only=True)
class ParallelTable:
    zero: Literal[0, 1, 2, 3] = key(
        3,
        "0: replicas; 1: shards, gathered and reduced once a step; 2: reduced each micro-batch; 3: gathered each too",
    )
    sequence_parallel: bool = key(
        True, "with tp > 1, shard the residual stream along the sequence between layers"
    )
    loss_parallel: bool = key(
        True, "with tp > 1, keep logits sharded over the vocabulary in the loss"
    )
    cp_method: Literal["ring", "allgather", "ulysses"] = key(
        "ring",
        "with cp > 1: keys and values go round, are all gathered, or heads are cut and not the sequence",
    )
    cp_balance: Literal["zigzag", "contiguous"] = key(
        "zigzag",
        "parts of a sequence: an early and a late chunk each, so that ranks compute alike; or one chunk",
    )
    schedule: Literal[
        "GPipe",
        "1F1B",
        "LoopedBFS",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
        "csv",
    ] = key("1F1B", "pipeline schedule, with pp > 1; csv: the one in parallel.schedule_csv")
    schedule_csv: str | None = key(
        None, "file of a schedule: a line of actions, such as 0F0 or 1B3, for each pp rank", PATH
    )
    virtual_stages: int | None = key(
        None,
        "stages of each pp rank; absent: what the schedule needs, 1 or 2",
        between(1, MOST_LAYERS),
    )
    stages: tuple[int, ...] | None = key(
        None, "layers of each stage in order; absent: an even cut by parameters"
    )

    @property
    def stages_per_rank(self) -> int:
        """Stages that each pipeline rank holds, with pp > 1."""
        return self.virtual_stages or SCHEDULES[self.schedule].stages[2]


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    activation_checkpoint: Literal["none", "selective", "full"] = key(
        "none",
        "what backward computes again: nothing, all but what the model's plan saves, or every block",
    )
    loss_chunks: int = key(
        1,
        "parts of a micro-batch whose logits are made one by one, and again in backward; above 1 "
        "the gradient of the head is summed in float32, which takes memory in backward",
        between(1, 1 << 16),
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and optimizer in the host's memory")


@dataclass(frozen=True, kw_only=True)
class CompileTable:
    enabled: bool = key(False, "compile each block with torch.compile")


@dataclass(frozen=True, kw_only=True)
class PrecisionTable:
    params: Literal["float32", "float64"] = key(
        "float32", "dtype of parameters, their gradients and the optimizer"
    )
    compute: Literal["float32", "float64", "bfloat16"] | None = key(
        None,
        "dtype of forward and backward; absent: as params. Gradients are reduced in the dtype of params",
    )

    @property
    def computes_in(self) -> str:
        return self.compute or self.params


@dataclass(frozen=True, kw_only=True)
class DataTable:
    source: Literal["python", "text", "jsonl", "tokens"] = key(
        "python",
        "python: the standard library's sources; text, jsonl: bytes of data.path; tokens: made by prepare",
    )
    path: str | None = key(
        None,
        "text or JSONL: a file, or a folder read in sorted order; tokens: prepare's folder",
        PATH,
    )
    field: str = key("text", "key of the text in each line of a JSONL file")
    seq_len: int = key(256, "tokens in a sample", between(1, MOST_TOKENS))
    global_batch: int = key(8, "samples in an optimizer step, over all ranks", between(1, 1 << 30))
    micro_batch: int = key(1, "samples that a rank runs at once", between(1, 1 << 20))
    packing: Literal["none", "documents"] = key(
        "none",
        "documents: attention and positions stop at the end of a document; none: a sample is one sequence",
    )
    seed: int = key(0, "seed of the order of samples", SEED)


@dataclass(frozen=True, kw_only=True)
class OptimTable:
    lr: float = key(3e-4, "peak learning rate of AdamW", above(0, 10))
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW betas", BETAS)
    eps: float = key(1e-8, "AdamW epsilon", above(0, 1))
    weight_decay: float = key(0.1, "decay of matrices; vectors (norms) have none", between(0, 10))
    clip: float = key(1.0, "largest global gradient norm; 0 does not clip", between(0, 10**9))
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key(
        "cosine", "learning rate after the warmup"
    )
    warmup: int = key(0, "steps of linear warmup", STEPS_OR_NEVER)
    decay: int | None = key(
        None, "step whose learning rate is min_lr, counted from 1; absent: run.steps", STEPS
    )
    decay_steps: int | None = key(
        None, "steps of wsd's linear decay, the last before its end; absent: a tenth", STEPS
    )
    min_lr: float = key(0.0, "learning rate at the end of the decay", between(0, 10))


@dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    every: int = key(
        500,
        "steps between checkpoints; 0: steps alone cause none. The end of a run always saves",
        STEPS_OR_NEVER,
    )
    every_minutes: float = key(
        15.0,
        "minutes after which a checkpoint is due, whatever the steps; 0: never",
        MINUTES_OR_NEVER,
    )
    keep: int = key(2, "newest checkpoints that are kept", between(1, 1_000_000))
    async_save: bool = key(
        False, "write in the background: a save stops training only while its tensors are copied"
    )
    timeout_minutes: float = key(
        60.0, "minutes a save or load on one rank may take longer than on another", MINUTES
    )
    resume: str = key(
        "auto",
        "auto: the newest checkpoint of this run; none: start anew; or a checkpoint's folder",
        PATH,
    )


@dataclass(frozen=True, kw_only=True)
class MetricsTable:
    every: int = key(10, "steps between console lines and TensorBoard points", STEPS)
    tensorboard: bool = key(True, "write TensorBoard's event files into the run's folder")


@dataclass(frozen=True, kw_only=True)
class ValidationTable:
    every: int = key(
        0, "steps between validations, and one at the end; 0 never validates", STEPS_OR_NEVER
    )
    steps: int = key(4, "global batches in a validation", between(1, 1_000_000))
    path: str | None = key(None, "held-out data of the same source; python holds out its own", PATH)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe, resolved: every table complete, ``model`` with its shape, ``mesh.dp_shard`` a number.

    Only ``train.build``, ``verify`` and the commands see it whole; everybody else is passed the table it needs.
    """

    run: RunTable
    model: Model
    mesh: MeshTable
    parallel: ParallelTable
    memory: MemoryTable
    precision: PrecisionTable
    compile: CompileTable
    data: DataTable
    optim: OptimTable
    checkpoint: CheckpointTable
    metrics: MetricsTable
    validation: ValidationTable

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one rank runs in an optimizer step."""
        return self.data.global_batch // (self.data.micro_batch * self.mesh.batch_ranks)


TABLES: dict[str, Any] = {table.name: table.type for table in fields(Recipe)}
