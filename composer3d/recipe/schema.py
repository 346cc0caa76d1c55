"""The vocabulary of a recipe: one frozen dataclass for each TOML table.

Each field is a key. Its annotation is the type that is checked, its default is the value of an
absent key, and its text is what ``composer3d check --schema`` prints. A key is added only together
with the feature that reads it.
"""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal

from composer3d.facts.checkpointing import CHECKPOINTING, Checkpointing, parse_checkpointing
from composer3d.facts.ranges import (
    MOST_LAYERS,
    MOST_TOKENS,
    WHERE_LEGAL,
    Bounds,
    Column,
    InProof,
    Range,
    above,
    at_least,
    at_most,
    between,
    key,
    left_out,
    within,
    within_bounds,
)
from composer3d.facts.remote import URL_FORM, Place, RemotePath, is_valid_url
from composer3d.facts.schedules import SCHEDULES
from composer3d.facts.step_folders import LAST_STEP
from composer3d.facts.text import NAME_RULE, is_name
from composer3d.models import registry
from composer3d.models.llama.shape import ModelShape
from composer3d.models.table import ParameterTable
from composer3d.recipe.optimizers import DEFAULT, OPTIMIZERS, OptimizerFacts

# The mesh axes, outermost to innermost. Ranks that are adjacent on the innermost axis are adjacent
# in the world. Expert parallelism (ep) is no axis of its own: it groups the same ranks in another
# way (``runtime.mesh``).
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# The table of a draft, beside those of a recipe: points that the user must settle, each a key with
# a text. ``composer3d import`` writes it, and a recipe that has a point is refused.
OPEN_POINTS = "open"

MOST_RANKS = 1 << 24  # processes in a world
MOST_STEPS = LAST_STEP  # a run saves its last step
FLOAT8_MULTIPLE = 16  # Kernels take matrices whose sizes are multiples of it.


def _is_printable_text(value: str) -> bool:
    """Return whether the text has no line break, control character or lone surrogate.

    UTF-8 cannot encode a lone surrogate.
    """
    return not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in value)


_AXIS = between(1, 1 << 20)
_SHARDS = within_bounds(
    Bounds(1, 1 << 20, also=(-1,)), f"{_AXIS.requirement}, or -1 to use all remaining processes"
)
_STEPS = between(1, MOST_STEPS)
_STEPS_OR_NEVER = between(0, MOST_STEPS)
_MINUTES = within_bounds(
    Bounds(0, 10_080, is_above=True), "must be above 0 and at most 10080, a week"
)
_MINUTES_OR_NEVER = between(0, 60 * 24 * 365)
# The type sets the upper bound: every int of a recipe has 64 bits.
_SEED = within_bounds(Bounds(0, (1 << 63) - 1), "must be at least 0")
_STRAGGLER_FACTOR = within_bounds(
    Bounds(1.1, 100, also=(0,)), "must be from 1.1 to 100, or 0 to watch nothing"
)
_SPIKE_SIGMA = within_bounds(
    Bounds(2, 1000, also=(0,)),
    "must be from 2 to 1000, or 0 to let no finite value count as a spike",
)


def _first_and_last(most: int) -> Range:
    """Return the range of the first and the last of at most ``most`` steps."""
    return Range(
        lambda value: 1 <= value[0] <= value[1] <= MOST_STEPS and value[1] - value[0] < most,
        f"must be the first and the last step, counted from 1, and at most {most} steps in all",
    )


_RANKS = Range(
    lambda value: len(value) > 0 and min(value) >= 0 and len(set(value)) == len(value),
    "must be ranks, counted from 0, each of them once",
)
_BETAS = Range(
    lambda value: all(0 <= beta < 1 for beta in value),
    "must both be at least 0 and below 1",
)
_COEFFICIENTS = Range(
    lambda value: all(abs(number) <= 100 for number in value), "must be from -100 to 100"
)
_TITLE = OPTIMIZERS[DEFAULT].title


def _preset_range(architecture: str) -> Range:
    """Allow the presets of an architecture; the message also lists those of our other ones."""
    presets = registry.architecture(architecture).presets
    text = f"is unknown; the presets are {', '.join(presets) or 'none'}"
    for other in registry.OURS:
        if other != architecture:
            names = ", ".join(registry.architecture(other).presets)
            text += f'; with model.architecture = "{other}" they are {names}'
    return Range(lambda value: value in presets, text)


_OURS = ", ".join(f'"{name}"' for name in registry.OURS)
ARCHITECTURE = Range(
    lambda value: 0 < len(value) <= 200 and _is_printable_text(value),
    f'must be {_OURS}, or "package.module:NAME" of at most 200 characters',
)
FOLDER_NAME = Range(
    is_name,
    f"cannot name the folder of the run: it {NAME_RULE}",
)
PATH = Range(
    lambda value: 0 < len(value) <= 4096 and _is_printable_text(value),
    "must be a path of 1 to 4096 characters, without control characters",
)
_FOLDER_OF_NODE = Range(
    lambda value: PATH.accepts(value) and "://" not in value,
    "must be a path of 1 to 4096 characters on a disk, without control characters",
)
PLACE = Range(
    lambda value: PATH.accepts(value) and ("://" not in value or is_valid_url(value)),
    f"must be a path, or the URL of a folder in an object store: {URL_FORM}",
)
_GLOBS = Range(
    lambda value: 0 < len(value) <= 256 and all(map(PATH.accepts, value)),
    'must be 1 to 256 globs, such as "blocks.*.attn.*"',
)


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """The run itself: its name, its length and the processes that it runs on."""

    name: str = key("run", "name of the run; its folder is out_dir/name", FOLDER_NAME)
    steps: int = key(100, "optimizer steps of the whole run", _STEPS)
    seed: int = key(
        0, "seed of the initial weights, and of torch's random numbers in each step", _SEED
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "device that trains; auto: cuda if this machine has it, else cpu"
    )
    out_dir: str = key(
        "runs", "folder with one folder per run, relative to the working directory", PATH
    )
    timeout_minutes: float = key(
        10.0, "minutes a training collective waits before the missing ranks are named", _MINUTES
    )
    deterministic: bool = key(
        False,
        "on GPUs: a resumed run on the same layout and hardware has the same bits; slower. On CPUs "
        "it always has",
    )
    oversubscribe: bool = key(False, "allow more than 16 processes per CPU core")
    rank_logs: bool = key(
        False, "also keep what each rank prints in a file of its own, logs/rank-N.log in the folder"
    )
    sync: bool = key(
        False,
        "also keep the run's files (metrics, events, log, recipe) beside its checkpoints in "
        "checkpoint.folder, each minute, and fetch them from there on another disk",
    )

    @property
    def folder(self) -> Path:
        """The folder of the run: its checkpoints, metrics, log and recipe."""
        return Path(self.out_dir) / self.name


@dataclass(frozen=True, kw_only=True)
class Model(ModelShape):
    """The shape of the model, and the source of the shape and of the initial weights.

    The preset, or config.json in the folder ``hf``, gives each field of the shape that the recipe
    does not give.
    """

    architecture: str = key(
        registry.DEFAULT,
        f'{_OURS}, or "package.module:NAME" of your own; the other keys are the fields of '
        "its shape",
        ARCHITECTURE,
    )
    preset: str | None = key(
        None,
        "published model that gives the shape; other keys override its fields; an unknown name "
        "lists all presets",
        _preset_range(registry.DEFAULT),
    )
    hf: str | None = key(
        None,
        "folder in Hugging Face format, or hf://ORGANISATION/NAME[@REVISION]: config.json gives "
        "the shape, and training starts from its weights",
        PATH,
    )


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """Sizes of the mesh axes, outermost first. Their product, without ep, is the world size."""

    pp: int = key(1, "pipeline parallel ranks", _AXIS)
    dp_replicate: int = key(1, "replicas that all-reduce gradients (HSDP)", _AXIS)
    dp_shard: int = key(
        -1, "ranks that shard parameters (FSDP); -1: all remaining processes", _SHARDS
    )
    cp: int = key(1, "context parallel ranks: each holds a part of every sequence", _AXIS)
    tp: int = key(1, "tensor parallel ranks", _AXIS)
    ep: int = key(
        1,
        "ranks that share the experts of each layer, a part of dp_shard x cp x tp: no further "
        "processes",
        _AXIS,
    )

    @property
    def world_size(self) -> int:
        """The number of processes. It is meaningless while ``dp_shard`` is -1."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def efsdp(self) -> int:
        """Ranks that shard each expert: (dp_shard x cp x tp) / ep."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def batch_ranks(self) -> int:
        """Ranks that hold different samples: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, kw_only=True)
class ParallelTable:
    """How the ranks of each axis share the work."""

    zero: Literal[0, 1, 2, 3] = key(
        3,
        "0: replicate parameters; 1: shard them, gather and reduce once a step; "
        "2: reduce after each micro-batch; 3: also gather for each micro-batch",
        column=Column("zero", {"3": 3, "0": 0, "1": 1, "2": 2}),
    )
    fsdp_blocks: int = key(
        1,
        "consecutive blocks of a stage that FSDP gathers and reduces together, as one unit; the "
        "last unit of a stage may have fewer",
        between(1, MOST_LAYERS),
        words="units of {} blocks",
        in_proof=at_most(2),
        # With units of two blocks, a stage then has a smaller unit too.
        column=Column("unit", {"1 block": 1, "2 blocks": 2}),
    )
    sequence_parallel: bool = key(
        True,
        "with tp > 1: shard the residual stream along the sequence between layers",
        column=Column("sequence", {"parallel": True, "whole": False}),
        optional=True,
    )
    loss_parallel: bool = key(
        True,
        "with tp > 1: keep logits sharded over the vocabulary in the loss",
        column=Column("loss", {"parallel": True, "whole": False}),
    )
    async_tp: bool = key(
        False,
        "with tp > 1 and compiled blocks, on GPUs: send parts of a layer's input or output while "
        "other parts are multiplied",
        # The same layout without it sends and computes the same, on a CPU as well.
        in_proof=left_out(False, "which needs GPUs"),
        optional=True,
    )
    cp_method: Literal["ring", "allgather", "ulysses"] = key(
        "ring",
        "with cp > 1; ring: send keys and values around a ring; allgather: gather all of them; "
        "ulysses: shard attention over heads instead of the sequence",
        column=Column("cp method", {name: name for name in ("ring", "allgather", "ulysses")}),
    )
    attention_kernel: Literal["torch", "flash3", "flash4"] = key(
        "torch",
        "kernels of attention on GPUs; flash3, flash4: those of a package of FlashAttention that "
        "is installed, by torch's own registry",
        # It replaces operators, and changes neither what they are given nor what they return.
        in_proof=left_out("torch", "which needs GPUs"),
        optional=True,
    )
    cp_balance: Literal["zigzag", "contiguous"] = key(
        "zigzag",
        "with cp > 1; zigzag: a rank holds an early and a late chunk of each sequence, so that all "
        "ranks do equal work; contiguous: a rank holds one chunk",
        column=Column("cp balance", {name: name for name in ("zigzag", "contiguous")}),
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
    ] = key("1F1B", "pipeline schedule, with pp > 1; csv: the file in parallel.schedule_csv")
    schedule_csv: str | None = key(
        None,
        "file of a pipeline schedule: one line of actions, such as 0F0 or 1B3, per pipeline rank; "
        "relative to the working directory, or else to the recipe",
        PATH,
    )
    virtual_stages: int | None = key(
        None,
        "stages of each pipeline rank; absent: the least that the schedule needs, 1 or 2",
        between(1, MOST_LAYERS),
    )
    stages: tuple[int, ...] | None = key(
        None, "layers of each stage, in order; absent: stages of about equal parameter count"
    )

    @property
    def stages_per_rank(self) -> int:
        """Stages that each pipeline rank holds, with pp > 1."""
        return self.virtual_stages or SCHEDULES[self.schedule].stages.default_per_rank

    @property
    def is_balanced(self) -> bool:
        """Whether ranks of cp hold two chunks each of a sequence, in zigzag order."""
        return self.cp_balance == "zigzag"


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Techniques that save memory at the price of time."""

    activation_checkpoint: str = key(
        "none",
        "what backward recomputes; none: nothing; selective: all but the operators in the model's "
        "save list; full: all of each block; every N blocks: all of the first of every N blocks of "
        "a pipeline stage; all but none may end with 'in the first M stages', to hold for these",
        CHECKPOINTING,
        words="checkpoint {}",
        column=Column(
            "checkpoint",
            {name: name for name in ("none", "full", "selective")}
            | {"first stage": "full in the first 1 stages"},
        ),
    )
    loss_chunks: int = key(
        1,
        "number of chunks of a micro-batch; logits are computed one chunk at a time, with their "
        "gradients; above 1 the head's gradient is summed in float32, which costs memory",
        between(1, 1 << 16),
        words="loss in {} chunks",
        in_proof=at_most(3),
        column=Column("chunks", {"1": 1, "3": 3}),
    )
    cpu_offload: bool = key(
        False,
        "keep parameters, gradients and optimizer state in host memory",
        words="offload",
        column=Column("offload", {"no": False, "yes": True}),
    )

    @property
    def checkpointing(self) -> Checkpointing:
        """What ``activation_checkpoint`` says.

        Raises:
            ValueError: the value is out of its range, which the rules of recipes refuse.
        """
        found = parse_checkpointing(self.activation_checkpoint)
        if found is None:
            raise ValueError(
                f"memory.activation_checkpoint = {self.activation_checkpoint!r} "
                f"{CHECKPOINTING.requirement}"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class CompileTable:
    """Whether blocks are compiled."""

    enabled: bool = key(
        False,
        "compile each block with torch.compile",
        words="compile",
        column=Column("compile", {"no": False, "yes": True}),
        optional=True,
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionTable:
    """The dtypes of parameters and of computation."""

    params: Literal["float32", "float64"] = key(
        "float32", "dtype of parameters, gradients, their sums, and optimizer state"
    )
    compute: Literal["float32", "float64", "bfloat16"] | None = key(
        None,
        "dtype of forward and backward; absent: the dtype of params",
        words="mixed",
        column=Column("mixed", {"no": None, "yes": "bfloat16"}),
    )
    matmul: Literal["compute", "float8"] = key(
        "compute",
        "products of the linear layers of blocks, experts included; compute: in the dtype of "
        "forward and backward; float8: outputs and input gradients in float8, weight gradients in "
        "the dtype of compute",
        words="emulated {}",
        optional=True,
    )
    reduce: Literal["float32", "bfloat16"] | None = key(
        None,
        "dtype in which gradients are sent to the ranks that shard them; they are always summed in "
        "the dtype of params; absent: the dtype of params",
        words="gradients in {}",
        in_proof=WHERE_LEGAL,
        optional=True,
    )

    @property
    def computes_in(self) -> str:
        """The dtype of forward and backward."""
        return self.compute or self.params

    @property
    def reduces_in(self) -> str:
        """The dtype in which gradients are sent to the ranks that shard them."""
        return self.reduce or self.params


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A table of data.sources: a part of the training data.

    Attributes:
        path: as data.path.
        weight: the part's share of the samples is its weight, divided by the sum of all weights.
    """

    path: str
    weight: float


_MOST_SOURCES = 128
_SOURCES = Range(
    lambda value: (
        1 <= len(value) <= _MOST_SOURCES
        and all(PLACE.accepts(source.path) for source in value)
        and all(1e-6 <= source.weight <= 1e6 for source in value)
    ),
    f"must be 1 to {_MOST_SOURCES} tables, each with a path of 1 to 4096 characters, without "
    "control characters, or a URL such as s3://BUCKET/FOLDER, and a weight from 0.000001 to "
    "1_000_000",
)


@dataclass(frozen=True, kw_only=True)
class DataTable:
    """The training data, and how it becomes batches."""

    source: Literal["python", "text", "jsonl", "tokens"] = key(
        "python",
        "python: source files of the standard library; text, jsonl: bytes of the files in "
        "data.path; tokens: files made by composer3d prepare",
    )
    path: str | None = key(
        None,
        "text and jsonl: a file, or a folder read in sorted order; tokens: the output folder of "
        "composer3d prepare, or its URL, such as s3://BUCKET/FOLDER",
        PLACE,
    )
    sources: tuple[DataSource, ...] | None = key(
        None,
        "in place of path: several of them, each with the share of its weight in the samples",
        _SOURCES,
    )
    cache_dir: str | None = key(
        None,
        "folder on a disk of each node, where the run copies token files to and reads them from; "
        "absent: they are read where they are",
        _FOLDER_OF_NODE,
    )
    cache_gib: float = key(
        64.0,
        "bound of all copies of token files in data.cache_dir, in GiB a node; what exceeds it is "
        "read where it is",
        above(0, 1 << 30),
    )
    field: str = key("text", "key of the text in each line of a JSONL file")
    seq_len: int = key(256, "tokens in a sample", between(1, MOST_TOKENS))
    global_batch: int = key(8, "samples in an optimizer step, over all ranks", between(1, 1 << 30))
    micro_batch: int = key(
        1,
        "samples that a rank processes at once",
        between(1, 1 << 20),
        in_proof=at_most(2),
        column=Column("micro-batch", {"1": 1, "2": 2}),
    )
    packing: Literal["none", "documents", "whole_documents"] = key(
        "none",
        "documents: attention and positions restart at each document; whole_documents: also, no "
        "sample cuts a document that fits into it; none: a sample is one sequence",
        words="packing {}",
        column=Column("packing", {name: name for name in ("none", "documents")}),
    )
    seed: int = key(0, "seed of the order of samples", _SEED)
    other_tokenizer: bool = key(
        False,
        "train although the tokenizer of the data is not that of the weights (model.hf or "
        "checkpoint.init); false: refuse it",
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the training data; none for the source "python"."""
        if self.sources is not None:
            return tuple(source.path for source in self.sources)
        return () if self.path is None else (self.path,)


@dataclass(frozen=True, kw_only=True)
class OptimGroup:
    """A table of optim.groups: parameters with a learning rate or a weight decay of their own.

    Attributes:
        train: globs of their names.
        lr_factor: their learning rate is that of others of their kind, times this.
        weight_decay: that of each of them, vectors too; None: the usual one.
    """

    train: tuple[str, ...]
    lr_factor: float = 1.0
    weight_decay: float | None = None


_MOST_GROUPS = 64
_GROUPS = Range(
    lambda value: (
        1 <= len(value) <= _MOST_GROUPS
        and all(_GLOBS.accepts(group.train) for group in value)
        and all(0 < group.lr_factor <= 1000 for group in value)
        and all(group.weight_decay is None or 0 <= group.weight_decay <= 10 for group in value)
    ),
    f"must be 1 to {_MOST_GROUPS} tables, each with train (1 to 256 globs), and maybe lr_factor "
    "(above 0 and at most 1000) and weight_decay (from 0 to 10)",
)


def _groups_in_proof(groups: tuple[OptimGroup, ...] | None) -> tuple[OptimGroup, ...] | None:
    """Keep the rates where errors neither hide nor grow, as ``in_proof`` of optim.lr does."""
    if groups is None:
        return None
    return tuple(replace(group, lr_factor=min(4.0, max(0.25, group.lr_factor))) for group in groups)


_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
_NEWTON_SCHULZ_STEPS = 5

# How far a proof lets rounding grow in five steps, and singular values of 1 in one. The usual
# coefficients let them grow 850-fold, and to 1.2: these limits leave room for some others.
_LARGEST_GROWTH = 5000
_LARGEST_SINGULAR_VALUE = 2


def _newton_schulz_in_proof(
    coefficients: tuple[float, float, float],
) -> tuple[float, float, float]:
    """Keep coefficients whose steps do not let rounding grow; otherwise the usual ones.

    Rounding grows by the slope of a step. If the singular values grow as well, as those of Newton
    and Schulz do not, the bound of a few steps is above the update itself: any error would hide.
    """
    a, b, c = coefficients
    growth, largest = 1.0, 1.0
    for _ in range(_NEWTON_SCHULZ_STEPS):
        values = [largest * index / 100 for index in range(101)]
        growth *= max(abs(a + 3 * b * x**2 + 5 * c * x**4) for x in values)
        largest = max(abs(a * x + b * x**3 + c * x**5) for x in values)
        if growth > _LARGEST_GROWTH or largest > _LARGEST_SINGULAR_VALUE:
            return _NEWTON_SCHULZ
    return coefficients


_TWO_GROUPS = (
    OptimGroup(train=("blocks.0.*", "*.embed.weight"), lr_factor=0.5),
    OptimGroup(train=("*norm.weight", "blocks.*.wq.weight"), lr_factor=2.0, weight_decay=0.5),
)


@dataclass(frozen=True, kw_only=True)
class OptimTable:
    """The optimizer and its learning rate schedule.

    Attributes:
        name: the optimizer's row of ``recipe.optimizers``.
    """

    name: Literal["adamw", "muon"] = key(
        "adamw",
        "optimizer; muon: Muon for the matrices of blocks, AdamW for all other parameters",
        words="{}",
        column=Column("optimizer", {"adamw": None, "muon": "muon"}),
    )
    lr: float = key(
        3e-4,
        f"peak learning rate of {_TITLE}",
        above(0, 10),
        # A very small update would hide its own error. A very large one lets rounding grow.
        in_proof=within(1e-4, 1e-2),
    )
    betas: tuple[float, float] = key((0.9, 0.95), f"{_TITLE} betas", _BETAS)
    eps: float = key(
        1e-8,
        f"{_TITLE} epsilon",
        above(0, 1),
        # Below the rounding of a gradient that should be zero, rounding would grow to any size.
        in_proof=at_least(1e-12),
    )
    weight_decay: float = key(
        0.1, "weight decay of matrices; vectors, such as norm weights, have none", between(0, 10)
    )
    matrices: tuple[str, ...] | None = key(
        None,
        "muon: globs of the names of its matrices. Absent: those of attention, feed-forward layers "
        "and experts",
        _GLOBS,
    )
    matrix_lr: float | None = key(
        None,
        "muon: peak learning rate of its matrices; absent: lr",
        above(0, 10),
        in_proof=InProof(lambda lr: lr if lr is None else min(1e-2, max(1e-4, lr))),
    )
    lr_scale: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "muon: factor of the learning rate of a matrix. match_rms_adamw: 0.2 sqrt of its longer "
        "side; original: sqrt of rows / columns, at least 1",
    )
    momentum: float = key(0.95, "muon: momentum of its matrices", between(0, 0.9999))
    nesterov: bool = key(True, "muon: Nesterov momentum")
    newton_schulz: tuple[float, float, float] = key(
        _NEWTON_SCHULZ,
        "muon: coefficients of Newton-Schulz",
        _COEFFICIENTS,
        in_proof=InProof(_newton_schulz_in_proof),
    )
    newton_schulz_steps: int = key(
        _NEWTON_SCHULZ_STEPS,
        "muon: steps of Newton-Schulz",
        between(1, 99),
        # Each step lets rounding grow fourfold: after 20 of them, any error would hide in it.
        in_proof=at_most(_NEWTON_SCHULZ_STEPS),
    )
    newton_schulz_dtype: Literal["bfloat16", "float32", "float64"] = key(
        "bfloat16", "muon: dtype of Newton-Schulz, in which matrices travel as well"
    )
    groups: tuple[OptimGroup, ...] | None = key(
        None,
        "parameters with rates of their own: tables of train (globs of their names), lr_factor and "
        "weight_decay. The first that has a parameter counts for it",
        _GROUPS,
        words="groups",
        in_proof=InProof(_groups_in_proof),
        column=Column("groups", {"none": None, "two": _TWO_GROUPS}),
    )
    clip: float = key(
        1.0,
        "largest global gradient norm; 0: no clipping",
        between(0, 10**9),
        in_proof=InProof(lambda clip: 0.1 if clip > 0 else 0.0),  # so that it is active
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key(
        "cosine", "learning rate after the warmup"
    )
    warmup: int = key(0, "steps of linear warmup", _STEPS_OR_NEVER)
    decay: int | None = key(
        None,
        "step, counted from 1, that reaches min_lr; absent: run.steps",
        _STEPS,
        optional=True,
    )
    decay_steps: int | None = key(
        None, "steps of wsd's linear decay, which ends at decay; absent: a tenth of decay", _STEPS
    )
    min_lr: float = key(
        0.0,
        "learning rate at the end of the decay",
        between(0, 10),
        in_proof=WHERE_LEGAL,
        optional=True,
    )
    train: tuple[str, ...] | None = key(
        None,
        "globs of the names of the parameters that are trained; the others stay as they are. "
        "Absent: all are trained",
        _GLOBS,
    )

    @property
    def optimizer(self) -> OptimizerFacts:
        """What is said of the optimizer without its code."""
        return OPTIMIZERS[self.name]


@dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    """When checkpoints are written, how many are kept, and which one is loaded."""

    every: int = key(
        500,
        "steps between checkpoints; 0: no checkpoint by step count. The end of a run always saves",
        _STEPS_OR_NEVER,
    )
    every_minutes: float = key(
        15.0, "minutes between checkpoints, at any step; 0: never", _MINUTES_OR_NEVER
    )
    keep: int = key(2, "number of newest checkpoints to keep", between(1, 1_000_000))
    async_save: bool = key(
        False, "write in the background: a save stops training only to copy its tensors"
    )
    timeout_minutes: float = key(
        60.0, "minutes a save or load may take longer on one rank than on another", _MINUTES
    )
    resume: str = key(
        "auto",
        "auto: the newest checkpoint of this run; none: start anew; or the folder of a checkpoint, "
        "or of another run, which stands for its newest whole checkpoint",
        PLACE,
    )
    init: str | None = key(
        None,
        "folder of a checkpoint, or of another run, whose weights alone start this run at step 0; "
        "a run with checkpoints of its own goes on from those",
        PLACE,
    )
    folder: str | None = key(
        None,
        "folder in an object store in which checkpoints stand, under the name of the run: "
        "s3://BUCKET/FOLDER; absent: they stand in the folder of the run",
        Range(is_valid_url, f"must be the URL of a folder in an object store: {URL_FORM}"),
    )


# Services that get the metrics: each is a key of [metrics], and has a folder in that of the run.
TRACKERS = ("wandb", "mlflow", "prometheus")


@dataclass(frozen=True, kw_only=True)
class MetricsTable:
    """What a run reports."""

    every: int = key(10, "steps between console lines and TensorBoard points", _STEPS)
    tensorboard: bool = key(True, "write TensorBoard event files to the folder of the run")
    wandb: bool = key(False, "send the metrics to Weights & Biases; needs composer3d[wandb]")
    mlflow: bool = key(False, "send the metrics to MLflow; needs composer3d[mlflow]")
    prometheus: int | None = key(
        None,
        "port of 127.0.0.1 on rank 0's machine, from which Prometheus reads the metrics; needs "
        "composer3d[prometheus]; absent: none",
        between(1, 65535),
    )
    timeline_steps: tuple[int, int] | None = key(
        None,
        "with pp > 1: the first and the last step whose actions are timed, for composer3d timeline "
        "--measured; absent: none",
        _first_and_last(100),
    )
    profile_steps: tuple[int, int] | None = key(
        None,
        "the first and the last step that torch's profiler records, for Perfetto; absent: none",
        _first_and_last(20),
    )
    profile_ranks: tuple[int, ...] = key(
        (0,), "with profile_steps: the ranks whose steps are recorded", _RANKS
    )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The services that get the metrics."""
        return tuple(name for name in TRACKERS if getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ValidationTable:
    """When the loss on held-out data is measured, and on which data."""

    every: int = key(
        0,
        "steps between validations; above 0, the end of the run validates too; 0: never",
        _STEPS_OR_NEVER,
    )
    steps: int = key(4, "global batches in a validation", between(1, 1_000_000))
    path: str | None = key(
        None, "held-out data, read as data.source says; python holds out a part of its files", PLACE
    )


@dataclass(frozen=True, kw_only=True)
class ReliabilityTable:
    """What a run does about failures, and what it watches in its own ranks."""

    restarts: int = key(
        0,
        "times that composer3d train starts its ranks again after a rank was lost or raised an "
        "error; torchrun has --max-restarts",
        between(0, 1_000_000),
    )

    # Bad steps.
    on_bad_step: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "after a step whose loss or gradient norm is not finite, or is a spike; stop: end the run; "
        "skip: leave out its batch; rollback: load the newest checkpoint, and leave out all "
        "batches since",
    )
    max_bad_steps: int = key(
        3, "with skip: number of bad steps in a row that ends the run", between(1, 1_000_000)
    )
    max_rollbacks: int = key(
        3,
        "with rollback: how often a run may go back; the next bad step ends it",
        between(1, 10**6),
    )
    spike_sigma: float = key(
        0.0,
        "a loss or gradient norm is a spike if it is this many standard deviations above the mean "
        "of the good steps before; 0: never",
        _SPIKE_SIGMA,
    )
    spike_window: int = key(
        128, "how many good steps the mean is taken of, at least half of them", between(8, 1000)
    )

    # Stragglers.
    straggler_factor: float = key(
        1.3,
        "on CPUs: a rank is named if its own time is this many times that of its peers, twice in a "
        "row over straggler_window steps; 0: never",
        _STRAGGLER_FACTOR,
    )
    straggler_window: int = key(
        6, "steps of which the lower quartile of a rank's own time is taken", between(3, 1000)
    )

    # Corruption.
    digest_every: int = key(
        0,
        "with data-parallel ranks: steps between comparisons of what replicas must hold and "
        "compute bitwise; 0: never",
        _STEPS_OR_NEVER,
        in_proof=InProof(lambda _: 0),  # It checks no layout.
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole, resolved recipe: all tables are complete, and ``mesh.dp_shard`` is not -1.

    Only ``training``, ``verify``, the commands and ``convert.assets`` receive the whole recipe. The
    layers below them, such as ``parallel`` and ``data``, receive only the tables that they need.
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
    reliability: ReliabilityTable

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.mesh.world_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one rank runs in an optimizer step."""
        return self.data.global_batch // (self.data.micro_batch * self.mesh.batch_ranks)

    def with_micro_batches(self, number: int) -> "Recipe":
        """Return this recipe with ``number`` micro-batches a step. No rule is checked."""
        rows = self.data.micro_batch * number * self.mesh.batch_ranks
        return replace(self, data=replace(self.data, global_batch=rows))

    @property
    def sequence_chunks(self) -> int:
        """How many equal chunks cp cuts a sequence into: one or two for each rank, or 1 without."""
        return 2 * self.mesh.cp if self.mesh.cp > 1 and self.parallel.is_balanced else self.mesh.cp

    @property
    def sends_latents(self) -> bool:
        """Whether ranks of cp send latents in place of keys and values."""
        return self.mesh.cp > 1 and self.model.sends_latents(
            tp=self.mesh.tp,
            cp_method=self.parallel.cp_method,
            is_float8=self.precision.matmul == "float8",
        )

    @property
    def checkpoint_folder(self) -> Place:
        """The folder of the run's checkpoints, on a disk or in an object store.

        Raises OSError if the name of the run cannot stand in a URL, which a rule refuses.
        """
        if self.checkpoint.folder is None:
            return self.run.folder / "checkpoints"
        return RemotePath(self.checkpoint.folder) / self.run.name

    @property
    def parameters(self) -> ParameterTable:
        """The table of the model's parameters.

        Raises PlanError as ``Architecture.table_of``.
        """
        return registry.architecture(self.model.architecture).table_of(self.model)


TABLES: dict[str, Any] = {table.name: table.type for table in fields(Recipe)}


# The keys of [model] that are not fields of a shape.
MODEL_KEYS = ("architecture", "preset", "hf")


def model_table(architecture: str) -> type:
    """Return the dataclass of the table [model]: the fields of a shape, and ``MODEL_KEYS``.

    Args:
        architecture: "llama", or "package.module:NAME" of a user's own, which is imported already.

    Raises:
        ModelError: as ``registry.architecture``.
    """
    return Model if architecture == registry.DEFAULT else _model_table(architecture)


class _PickledByName:
    """Pickle a table by its values, because pickle cannot find a class that is made at run time."""

    def __reduce__(self) -> Any:
        table: Any = self  # an instance of a dataclass that derives from this class
        values = {entry.name: getattr(table, entry.name) for entry in fields(table)}
        return _make_model, (values,)


def _make_model(values: Mapping[str, Any]) -> Any:
    # The pickle comes from another process of this job, which was allowed to import.
    registry.import_architecture(values["architecture"])
    return model_table(values["architecture"])(**values)


@cache
def _model_table(architecture: str) -> type:
    chosen = registry.architecture(architecture)
    entries = []
    for entry in fields(Model):
        if entry.name in MODEL_KEYS:
            metadata = dict(entry.metadata)
            if entry.name == "preset":
                metadata["range"] = _preset_range(architecture)
            entries.append(
                (entry.name, entry.type, field(default=entry.default, metadata=metadata))
            )
    return make_dataclass(
        "Model", entries, bases=(_PickledByName, chosen.shape), frozen=True, kw_only=True
    )
