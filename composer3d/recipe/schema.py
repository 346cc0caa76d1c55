"""The vocabulary of a recipe: one frozen dataclass for each TOML table.

A field is a key, its annotation is the type that is checked, its default is what an absent key means, and its text is
what ``composer3d check --schema`` prints. A key enters here with the feature that it drives.
"""

from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal

from composer3d.schedules import SCHEDULES
from composer3d.shape import ABOVE_0, FROM_0, FROM_1, PRESETS, ModelShape, Range, key

SHARDS: Range = (lambda value: value >= 1 or value == -1, f"{FROM_1[1]}, or -1 for what is left of the world")
BETAS: Range = (lambda value: all(0 <= beta < 1 for beta in value), "must both be at least 0 and below 1")
PRESET: Range = (lambda value: value in PRESETS, f"is unknown; the presets are {', '.join(PRESETS)}")
FOLDER_NAME: Range = (
    lambda value: value.strip() and value not in (".", "..") and not set(value) & set("/\\\0"),
    "names the folder of the run: it must not be empty, . or .., nor hold / or \\",
)


@dataclass(frozen=True, kw_only=True)
class RunTable:
    name: str = key("run", "name of the run; its folder is out_dir/name", FOLDER_NAME)
    steps: int = key(100, "optimizer steps of the whole run", FROM_1)
    seed: int = key(0, "seed of the initial weights", FROM_0)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto takes cuda where there is one")
    out_dir: str = key("runs", "folder that holds the folders of runs, relative to the working directory")


@dataclass(frozen=True, kw_only=True)
class Model(ModelShape):
    """The shape, and where it and the first weights come from. A preset, or config.json, gives what a text does not."""

    preset: str | None = key(None, "a published model: an unknown name lists all; the other keys override it", PRESET)
    hf: str | None = key(None, "a folder in Hugging Face's form: config.json is the shape, its weights the first ones")


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """Sizes of the mesh axes, outermost first. Their product is the world size."""

    pp: int = key(1, "pipeline stages", FROM_1)
    dp_replicate: int = key(1, "replicas that all-reduce gradients (HSDP)", FROM_1)
    dp_shard: int = key(-1, "ranks that shard parameters (FSDP); -1 takes what is left of the world", SHARDS)
    cp: int = key(1, "context parallel ranks: each holds a part of every sequence", FROM_1)
    tp: int = key(1, "tensor parallel ranks", FROM_1)

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
        3, "0: replicas; 1: shards, gathered and reduced once a step; 2: reduced each micro-batch; 3: gathered each too"
    )
    sequence_parallel: bool = key(True, "with tp > 1, shard the residual stream along the sequence between layers")
    loss_parallel: bool = key(True, "with tp > 1, keep logits sharded over the vocabulary in the loss")
    cp_method: Literal["ring", "allgather", "ulysses"] = key(
        "ring", "with cp > 1: keys and values go round, are all gathered, or heads are cut and not the sequence"
    )
    cp_balance: Literal["zigzag", "contiguous"] = key(
        "zigzag", "parts of a sequence: an early and a late chunk each, so that ranks compute alike; or one chunk"
    )
    schedule: Literal[
        "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "csv"
    ] = key("1F1B", "pipeline schedule, with pp > 1; csv: the one in parallel.schedule_csv")
    schedule_csv: str | None = key(None, "file of a schedule: a line of actions, such as 0F0 or 1B3, for each pp rank")
    virtual_stages: int | None = key(None, "stages of each pp rank; absent: what the schedule needs, 1 or 2", FROM_1)
    stages: tuple[int, ...] | None = key(None, "layers of each stage in order; absent: an even cut by parameters")

    @property
    def stages_per_rank(self) -> int:
        """Stages that each pipeline rank holds, with pp > 1."""
        return self.virtual_stages or SCHEDULES[self.schedule].stages[2]


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    activation_checkpoint: Literal["none", "selective", "full"] = key(
        "none", "what backward computes again: nothing, all but what the model's plan saves, or every block"
    )
    loss_chunks: int = key(
        1,
        "parts of a micro-batch whose logits are made one by one, and again in backward; above 1 "
        "the gradient of the head is summed in float32, which takes memory in backward",
        FROM_1,
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and optimizer in the host's memory")


@dataclass(frozen=True, kw_only=True)
class CompileTable:
    enabled: bool = key(False, "compile each block with torch.compile")


@dataclass(frozen=True, kw_only=True)
class PrecisionTable:
    params: Literal["float32", "float64"] = key("float32", "dtype of parameters, their gradients and the optimizer")
    compute: Literal["float32", "float64", "bfloat16"] | None = key(
        None, "dtype of forward and backward; absent: as params. Gradients are reduced in the dtype of params"
    )

    @property
    def computes_in(self) -> str:
        return self.compute or self.params


@dataclass(frozen=True, kw_only=True)
class DataTable:
    source: Literal["python", "text", "jsonl", "tokens"] = key(
        "python", "python: the standard library's sources; text, jsonl: bytes of data.path; tokens: made by prepare"
    )
    path: str | None = key(None, "text or JSONL: a file, or a folder read in sorted order; tokens: prepare's folder")
    field: str = key("text", "key of the text in each line of a JSONL file")
    seq_len: int = key(256, "tokens in a sample", FROM_1)
    global_batch: int = key(8, "samples in an optimizer step, over all ranks", FROM_1)
    micro_batch: int = key(1, "samples that a rank runs at once", FROM_1)
    packing: Literal["none", "documents"] = key(
        "none", "documents: attention and positions stop at the end of a document; none: a sample is one sequence"
    )
    seed: int = key(0, "seed of the order of samples", FROM_0)


@dataclass(frozen=True, kw_only=True)
class OptimTable:
    lr: float = key(3e-4, "peak learning rate of AdamW", ABOVE_0)
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW betas", BETAS)
    eps: float = key(1e-8, "AdamW epsilon", ABOVE_0)
    weight_decay: float = key(0.1, "decay of matrices; vectors (norms) have none", FROM_0)
    clip: float = key(1.0, "largest global gradient norm; 0 does not clip", FROM_0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key("cosine", "learning rate after the warmup")
    warmup: int = key(0, "steps of linear warmup", FROM_0)
    decay: int | None = key(None, "step whose learning rate is min_lr, counted from 1; absent: run.steps")
    decay_steps: int | None = key(None, "steps of wsd's linear decay, the last before its end; absent: a tenth", FROM_1)
    min_lr: float = key(0.0, "learning rate at the end of the decay", FROM_0)


@dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    every: int = key(0, "steps between checkpoints; 0 saves only at the end of the run", FROM_0)
    keep: int = key(2, "newest checkpoints that are kept", FROM_1)
    async_save: bool = key(False, "write in the background: a save stops training only while its tensors are copied")
    resume: str = key("auto", "auto: the newest checkpoint of this run; none: start anew; or a checkpoint's folder")


@dataclass(frozen=True, kw_only=True)
class MetricsTable:
    every: int = key(10, "steps between console lines and TensorBoard points", FROM_1)
    tensorboard: bool = key(True, "write TensorBoard files into the run's folder")


@dataclass(frozen=True, kw_only=True)
class ValidationTable:
    every: int = key(0, "steps between validations, and one at the end; 0 never validates", FROM_0)
    steps: int = key(4, "global batches in a validation", FROM_1)
    path: str | None = key(None, "held-out data of the same source; python holds out its own")


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
