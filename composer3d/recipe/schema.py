"""The vocabulary of a recipe: one frozen dataclass for each TOML table.

A field is a key, its annotation is the type that is checked, its default is what an absent key means, and its text is
what ``composer3d check --schema`` prints. A key enters here with the feature that it drives.
"""

from dataclasses import Field, dataclass, field, fields
from math import prod
from typing import Any, Literal

from composer3d.schedules import SCHEDULES
from composer3d.shape import ModelShape


def key(default: Any, doc: str) -> Any:
    """A key of a table with its default and one line of documentation."""
    return field(default=default, metadata={"doc": doc})


def doc_of(entry: Field[Any]) -> str:
    return str(entry.metadata.get("doc", ""))


@dataclass(frozen=True, kw_only=True)
class RunTable:
    name: str = key("run", "name of the run; its folder is out_dir/name")
    steps: int = key(100, "optimizer steps of the whole run")
    seed: int = key(0, "seed of the initial weights")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto takes cuda where there is one")
    out_dir: str = key("runs", "folder that holds the folders of runs, relative to the working directory")


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    preset: str | None = key(None, "a published model: an unknown name lists them all; the other keys override it")
    dim: int | None = key(None, "width of the residual stream")
    n_layers: int | None = key(None, "number of blocks")
    n_heads: int | None = key(None, "query heads")
    n_kv_heads: int | None = key(None, "key-value heads")
    ffn: int | None = key(None, "width of the gated feed-forward")
    vocab: int | None = key(None, "size of the vocabulary")
    rope_theta: float | None = key(None, "base of the rotary embedding")
    norm_eps: float | None = key(None, "epsilon of RMSNorm")
    head_dim: int | None = key(None, "width of a head; absent: dim / n_heads")
    tied: bool | None = key(None, "embedding and head are one parameter")
    qk_norm: bool | None = key(None, "RMSNorm of queries and keys by head, as in Qwen 3")
    qkv_bias: bool | None = key(None, "biases of the query, key and value projections, as in Qwen 2")
    window: int | None = key(None, "sliding window: a token sees itself and window - 1 before it; 0: all")
    rope_factor: float | None = key(None, "stretch of long rotary wavelengths, as in Llama 3.1; 1 does nothing")
    rope_low_freq: float | None = key(None, "wavelengths above rope_context / this are stretched in full")
    rope_high_freq: float | None = key(None, "wavelengths below rope_context / this are not stretched")
    rope_context: int | None = key(None, "context length that the model had before the stretch")


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """Sizes of the mesh axes, outermost first. Their product is the world size."""

    pp: int = key(1, "pipeline stages")
    dp_replicate: int = key(1, "replicas that all-reduce gradients (HSDP)")
    dp_shard: int = key(-1, "ranks that shard parameters (FSDP); -1 takes what is left of the world")
    cp: int = key(1, "context parallel ranks: each holds a part of every sequence")
    tp: int = key(1, "tensor parallel ranks")

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
    schedule: Literal[
        "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "csv"
    ] = key("1F1B", "pipeline schedule, with pp > 1; csv: the one in parallel.schedule_csv")
    schedule_csv: str | None = key(None, "file of a schedule: a line of actions, such as 0F0 or 1B3, for each pp rank")
    virtual_stages: int | None = key(None, "stages of each pipeline rank; absent: what the schedule needs, 1 or 2")
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
    loss_chunks: int = key(1, "parts of a micro-batch whose logits are made one after another, and again in backward")
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
    seq_len: int = key(256, "tokens in a sample")
    global_batch: int = key(8, "samples in an optimizer step, over all ranks")
    micro_batch: int = key(1, "samples that a rank runs at once")
    packing: Literal["none", "documents"] = key(
        "none", "documents: attention and positions stop at the end of a document; none: a sample is one sequence"
    )
    seed: int = key(0, "seed of the order of samples")


@dataclass(frozen=True, kw_only=True)
class OptimTable:
    lr: float = key(3e-4, "peak learning rate of AdamW")
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW betas")
    eps: float = key(1e-8, "AdamW epsilon")
    weight_decay: float = key(0.1, "decay of matrices; vectors (norms) have none")
    clip: float = key(1.0, "largest global gradient norm; 0 does not clip")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key("cosine", "learning rate after the warmup")
    warmup: int = key(0, "steps of linear warmup")
    decay: int | None = key(None, "step whose learning rate is min_lr, counted from 1; absent: run.steps")
    decay_steps: int | None = key(None, "steps of wsd's linear decay, the last ones before its end; absent: a tenth")
    min_lr: float = key(0.0, "learning rate at the end of the decay")


@dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    every: int = key(0, "steps between checkpoints; 0 saves only at the end of the run")
    keep: int = key(2, "newest checkpoints that are kept")
    resume: str = key("auto", "auto: the newest checkpoint of this run; none: start anew; or a checkpoint's folder")


@dataclass(frozen=True, kw_only=True)
class MetricsTable:
    every: int = key(10, "steps between console lines and TensorBoard points")
    tensorboard: bool = key(True, "write TensorBoard files into the run's folder")


@dataclass(frozen=True, kw_only=True)
class ValidationTable:
    every: int = key(0, "steps between validations, and one at the end; 0 never validates")
    steps: int = key(4, "global batches in a validation")
    path: str | None = key(None, "held-out data of the same source; python holds out its own")


TABLES: dict[str, type] = {
    "run": RunTable,
    "model": ModelTable,
    "mesh": MeshTable,
    "parallel": ParallelTable,
    "memory": MemoryTable,
    "precision": PrecisionTable,
    "compile": CompileTable,
    "data": DataTable,
    "optim": OptimTable,
    "checkpoint": CheckpointTable,
    "metrics": MetricsTable,
    "validation": ValidationTable,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe, resolved: every table complete, ``model`` a shape, ``mesh.dp_shard`` a number.

    Only ``train.build``, ``verify`` and the commands see it whole; everybody else is passed the table it needs.
    """

    run: RunTable
    model: ModelShape
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
    def batch_ranks(self) -> int:
        return self.mesh.batch_ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one rank runs in an optimizer step."""
        return self.data.global_batch // (self.data.micro_batch * self.batch_ranks)
