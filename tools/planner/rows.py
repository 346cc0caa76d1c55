"""Reads published training runs from a CSV file, and says what each one ran on and with what.

A row gives the model, the devices and the layout as numbers, and the software as text. This module
turns that text into facts of ``tools.planner.foreign``: which attention kernel, what is fused,
what overlaps. The cost model sees the facts only.
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from composer3d.facts import hardware
from composer3d.facts.errors import UserError
from composer3d.facts.files import read_plain
from composer3d.facts.schedules import balanced_cut, micro_batch_requirement
from composer3d.models import registry
from composer3d.planner.constants import Constants
from composer3d.planner.memory import GIB, RankMemory
from composer3d.planner.pipeline import length_s
from composer3d.planner.predict import sizes_of_shape
from composer3d.planner.setup import (
    BatchSizes,
    Machine,
    Recompute,
    Sizes,
    Zero,
)
from composer3d.planner.time import LengthOf, predict_time
from tools.planner.foreign import (
    ForeignLayout,
    ForeignPrecision,
    ForeignSetup,
    ForeignSizes,
    ForeignSoftware,
)
from tools.planner.memory import predict_memory

MemoryMetric = Literal["allocated", "reserved", "device"]
Splits = Literal["usual", "by cost", "evenly"]

_FILE_BYTES = 64 << 20
_MOST = 10**9  # no number of a row is larger
_MOST_GPUS = 1 << 22
_MOST_STAGES = 4096
_MOST_MICRO_BATCHES = 1 << 17

REQUIRED = ("id", "source", "seq_len", "gpu", "n_gpus", "tp", "pp", "dp")
# A file has these columns, or one with the names of our presets, whose tables have all sizes.
_SIZES = ("n_layers", "hidden", "n_heads")
_PRESET = "preset"


class Skipped(NamedTuple):
    """A row that cannot be predicted, and why."""

    place: str
    id: str
    reason: str


class Other(NamedTuple):
    """What somebody else's planner predicted of a run, and published.

    Attributes:
        name: whose.
        tokens_s: tokens per second and device; None: not given.
        memory_gib: the peak that the row's metric counts; None: not given.
    """

    name: str
    tokens_s: float | None
    memory_gib: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run.

    Attributes:
        place: its file and line.
        family: the first word of the source. Sources of one family share software and machines.
        setup: what ran.
        tokens_s: measured tokens per second and device; None: not given.
        memory_gib: measured peak memory; None: not given.
        metric: what the memory counts.
        ran_out_of_memory: whether the run did not fit.
        recompute_is_stated: whether the row says what backward repeats. If not, nothing is
            assumed, and whether it fits cannot be judged.
        other: what somebody else predicted; None: nothing.
    """

    place: str
    id: str
    source: str
    family: str
    model: str
    gpu: str
    setup: ForeignSetup
    tokens_s: float | None
    memory_gib: float | None
    metric: MemoryMetric
    ran_out_of_memory: bool
    recompute_is_stated: bool
    other: Other | None = None

    @property
    def generation(self) -> str:
        """The generation of its GPU."""
        return self.setup.machine.hardware.generation

    @property
    def layout_class(self) -> str:
        """``pp`` with a pipeline, else ``tp`` with tensor parallelism, else ``fsdp``."""
        layout = self.setup.layout
        return "pp" if layout.pp > 1 else "tp" if layout.tp > 1 else "fsdp"


def read(path: str | Path) -> tuple[list[Row], list[Skipped]]:
    """Read a file with the columns of ``published.csv``.

    Returns:
        The rows that can be predicted, and the others.

    Raises:
        UserError: the file or a value is malformed; the message names the line.
    """
    try:
        text = read_plain(path, limit=_FILE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason})") from None
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    skipped: list[Skipped] = []
    try:
        names = reader.fieldnames or ()
        required = REQUIRED if _PRESET in names else (*REQUIRED, *_SIZES)
        missing = [name for name in required if name not in names]
        if missing:
            raise UserError(f"{path}:1: the columns {', '.join(missing)} are missing")
        for values in reader:
            place = f"{path}:{reader.line_num}"
            if None in values or None in values.values():
                raise UserError(f"{place}: the row does not have one value for each column")
            for correction in CORRECTIONS:
                if values["source"].startswith(correction.source):
                    values[correction.column] = correction.value
            found = _row(_Values(values, place))
            if isinstance(found, Row):
                rows.append(found)
            else:
                skipped.append(found)
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: {error}") from None
    return rows, skipped


def tokens_s(row: Row, constants: Constants, length: LengthOf = length_s) -> float:
    """Predict tokens per second and device."""
    setup = row.setup
    time = predict_time(setup, constants, length)
    # The last round is followed by what a step has once.
    once_s = time.optimizer_s + constants.step_overhead_s
    step_s = setup.rounds * time.step_s - (setup.rounds - 1) * once_s
    return setup.step_tokens / (step_s * setup.layout.world_size)


def memory_gib(row: Row, constants: Constants) -> float:
    """Predict the memory that the row's metric counts."""
    return memory_of(row, predict_memory(row.setup, constants))


def memory_of(row: Row, ranks: Sequence[RankMemory]) -> float:
    """Return the memory that the row's metric counts, of predicted ranks."""
    if row.metric == "device":
        return max(rank.device_bytes for rank in ranks) / GIB
    if row.metric == "reserved":
        return max(rank.reserved_bytes for rank in ranks) / GIB
    return max(rank.allocated_bytes for rank in ranks) / GIB


class _Values:
    """The texts of one row, and the conversion of each with its place in errors."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.place = place
        self._values = values

    def text(self, column: str) -> str:
        return str(self._values.get(column, "")).strip()

    def number(self, column: str) -> float | None:
        """Return a positive number, or None if the column is empty or says n/a."""
        text = self.text(column)
        if not text or text.startswith("n/a"):
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= _MOST:
            raise UserError(
                f"{self.place}: {column} must be a number from 0 to {_MOST:,}, got {text[:80]!r}"
            )
        return value

    def whole(self, column: str, default: int = 0, most: int = _MOST) -> int:
        value = self.number(column)
        if value is None:
            return default
        if value != int(value) or value > most:
            raise UserError(
                f"{self.place}: {column} must be a whole number of at most {most:,}, "
                f"got {self.text(column)[:80]!r}"
            )
        return int(value)

    def flag(self, column: str) -> bool:
        return self.whole(column) == 1


def _row(values: _Values) -> Row | Skipped:
    place, name = values.place, values.text("id")
    device = hardware.by_name(values.text("gpu"))
    if device is None:
        known = ", ".join(row.name for row in hardware.DEVICES)
        reason = f"the gpu {values.text('gpu')[:60]!r} is unknown; known are {known}"
        return Skipped(place, name, reason)
    facts = software_facts(values.text("framework"), values.text("notes"))
    try:
        setup = _setup(values, device, facts)
    except UserError as error:
        raise UserError([f"{place}: {error}" if place not in str(error) else str(error)]) from None
    if isinstance(setup, str):
        return Skipped(place, name, setup)
    source = values.text("source")
    tokens_s = values.number("tok_s_gpu_norm") or values.number("tok_s_gpu")
    memory_gib = values.number("mem_gib")
    ran_out = values.flag("oom")
    if not tokens_s and not memory_gib and not ran_out:
        return Skipped(place, name, "neither tokens/s nor memory is given")
    return Row(
        place=place,
        id=name,
        source=source,
        family=family_of(source),
        model=values.text("model"),
        gpu=device.name,
        setup=setup,
        tokens_s=tokens_s or None,
        memory_gib=memory_gib or None,
        metric=_metric(values.text("mem_metric")),
        ran_out_of_memory=ran_out,
        recompute_is_stated=_states_recompute(values.text("recompute")),
        other=_other(values),
    )


def _other(values: _Values) -> Other | None:
    name = values.text("predicted_by")
    numbers = (values.number(f"predicted_{what}") for what in ("tok_s_gpu", "mem_gib"))
    return Other(name, *(number or None for number in numbers)) if name else None


def family_of(source: str) -> str:
    """Return the first word of a source, in lower case."""
    words = re.findall(r"[A-Za-z0-9-]+", source)
    return words[0].lower() if words else "unnamed"


def _states_recompute(text: str) -> bool:
    return bool(text) and "not stated" not in text.lower()


def _metric(text: str) -> MemoryMetric:
    text = text.lower()
    if "nvidia-smi" in text or text == "gb as printed":
        return "device"
    if "reserved" in text:
        return "reserved"
    return "allocated"


# --- software ---


class Facts(NamedTuple):
    """What the text about the software says.

    Attributes:
        software: kernels and overlap.
        splits: how layers are cut into stages: of equal cost, with the head's; evenly, the first
            ones with one more; or as is the custom.
        sums_wide: whether gradients are summed in float32 over micro-batches.
        communicates_wide: whether gradients are reduced in float32.
        copies_gradients: whether the optimizer keeps a copy of the gradients of its own.
        gathers_context: whether cp gathers keys and values before attention, and has no ring.
    """

    software: ForeignSoftware
    splits: Splits
    sums_wide: bool
    communicates_wide: bool
    copies_gradients: bool
    gathers_context: bool


def software_facts(framework: str, notes: str) -> Facts:
    """Return the facts that a description of the software implies.

    The words are those with which publications describe their software; where they say nothing,
    the defaults of that software at that time hold.
    """
    text = framework.lower()

    def says(*words: str) -> bool:
        """Return whether a word begins with one of ``words``; a short one must be the whole."""
        ends = {word: "(?![a-z0-9])" if len(word) <= 3 else "" for word in words}
        return any(
            re.search(rf"(?<![a-z0-9]){re.escape(word)}{end}", text) for word, end in ends.items()
        )

    # It runs kernels of Transformer Engine under torch's own FSDP and pipelines.
    automodel = says("nemo automodel")
    te = says(
        "megatron-core", "megatron core", "nemo", "te", "transformer engine", "megatron-bridge"
    )
    core = te and not automodel
    alone = says("no overlap")
    compiled = says("compile", "xla", "jax", "maxtext", "liger")
    if says("no flashattention") or (says("megatron-lm") and not says("flash")):
        attention = "unfused"
    elif says("torch 1.13"):
        attention = "flash1"
    elif says("flexattn"):
        attention = "flash2"
    elif te or (compiled and not says("compile")) or says("fa3", "fa4"):
        attention = "flash3"
    else:
        attention = "flash2"
    fused = core or compiled or says("megatron", "fused", "meta internal")
    software = ForeignSoftware(
        attention=attention,  # type: ignore[arg-type]
        fuses_elementwise=fused,
        fuses_loss=compiled or core or says("composer"),
        loss_copies=0.3 if says("liger") else 2.0 if says("composer") else 12.0,
        fuses_weight_gradients=core or says("megatron-lm"),
        dropout=attention == "unfused",
        stops_recompute_early=says("composer", "torchtitan", "nemo automodel"),
        bucket_bytes=2e9 if says("deepspeed", "megatron-deepspeed") else 0.0,
        # Transformer Engine 2 has a cache of them (get_dummy_wgrad); its Adam needs no temporaries.
        keeps_blank_gradients=core and says("te 2."),
        step_copies=_step_copies(is_core=core, is_wide=says("internevo", "hybrid zero")),
        overlaps_tp=_overlap_of_tp(is_core=core and not alone, is_old=says("async", "megatron-lm")),
        overlaps_sends=(te and not alone) or says("meta internal"),
        overlaps_gradients=not (alone or says("megatron-deepspeed")),
        overlaps_gathers=core and not alone,
        gathers_tensors=says("internevo", "hybrid zero"),
        launches_synchronously="cuda_launch_blocking=1" in notes.lower(),
        # Both are of https://github.com/deepseek-ai/DeepEP.
        sends_tokens_once=says("deepep", "hybridep"),
        balances_routing="balanced gate" in notes.lower() or "force-balance" in notes.lower(),
        # NeMo AutoModel's class FakeBalancedGate gives token t the k experts from k t on.
        routes_to_neighbours="fake balanced gate" in notes.lower(),
    )
    return Facts(
        software=software,
        splits="by cost" if says("nanotron") else "evenly" if automodel else "usual",
        sums_wide=(core and not says("nemo")) or says("sail-sg"),
        communicates_wide=(core and not says("nemo")) or says("mp mode default"),
        copies_gradients=says("megatron-deepspeed"),
        gathers_context=says("meta internal"),  # arXiv 2407.21783, section 3.3.2
    )


def _step_copies(*, is_core: bool, is_wide: bool) -> float:
    return 0.0 if is_core else 12.0 if is_wide else 4.0


def _overlap_of_tp(*, is_core: bool, is_old: bool) -> Literal["both", "backward", "none"]:
    return "both" if is_core else "backward" if is_old else "none"


# --- the setup ---


class Correction(NamedTuple):
    """A fact that a source states elsewhere than in the row.

    Attributes:
        source: the beginning of the source's name.
        column: the column whose value is replaced.
        value: the right value.
        reason: where the right value comes from.
    """

    source: str
    column: str
    value: str
    reason: str


CORRECTIONS = (
    Correction(
        "InternEvo",
        "gpu",
        "A800-80GB",
        "the cluster of these tables has A800 GPUs, whose NVLink is 200 GB/s in one direction",
    ),
    Correction("InternEvo", "intra_node", "NVLink 200GB/s uni", "as above"),
    Correction(
        "SimuMax B200",
        "framework",
        "megatron-core 0.14, TE 2.11, torch 2.10, no overlap",
        "docs/b200/b200_real_repro_guide.md, section 3.3: no collective overlaps, and its launcher "
        "says neither --overlap-grad-reduce nor --overlap-param-gather",
    ),
)


def _setup(values: _Values, device: hardware.Hardware, facts: Facts) -> ForeignSetup | str:
    sizes = _sizes(values)
    if isinstance(sizes, str):
        return sizes
    seq_len = values.whole("seq_len")
    gpus = values.whole("n_gpus", most=_MOST_GPUS)
    tp, pp, dp = (values.whole(axis, 1, most=_MOST_GPUS) for axis in ("tp", "pp", "dp"))
    cp, ep = values.whole("cp", 1, most=_MOST_GPUS), values.whole("ep", 1, most=_MOST_GPUS)
    if 0 in (seq_len, gpus, tp, pp, dp, cp, ep):
        raise UserError(f"{values.place}: seq_len, n_gpus, tp, pp, dp, cp and ep must be above 0")
    if tp * pp * dp * cp != gpus:
        raise UserError(
            f"{values.place}: tp x pp x dp x cp = {tp * pp * dp * cp} is not n_gpus = {gpus}"
        )
    micro_batch = values.whole("mbs", 1) or 1
    count, samples = values.whole("n_microbatches"), values.whole("gbs")
    if not count:
        count = max(1, samples // (dp * micro_batch))
    rounds, rest = divmod(samples, dp * micro_batch * count)
    if rest or not rounds:
        rounds = 1
    schedule, stages_per_rank, in_flight = _schedule(values, pp, sizes.layers)
    stages = pp * stages_per_rank
    if stages > _MOST_STAGES or count > _MOST_MICRO_BATCHES:
        raise UserError(
            f"{values.place}: {stages} stages and {count} micro-batches are more than "
            f"{_MOST_STAGES} and {_MOST_MICRO_BATCHES}"
        )
    if schedule == "1F1B" and pp > 1 and count < pp:
        schedule = "GPipe"  # with so few micro-batches, both run the same order
    need = micro_batch_requirement(schedule, count, pp, f"pp = {pp}")
    if need is not None and pp > 1:
        return f"{schedule} has {count} micro-batches, but needs {need}"
    if sizes.layers + 2 < stages:
        return f"{sizes.layers} layers do not fill {stages} stages"
    sharding = values.text("sharding")
    zero = _zero(sharding)
    shards = values.whole("shard_group", 0) or dp
    shards = min(shards, dp)
    if dp % shards:
        raise UserError(f"{values.place}: shard_group = {shards} must divide dp = {dp}")
    recompute = _recompute(values.text("recompute"))
    software = facts.software
    if "offload" in sharding.lower():
        software = replace(software, offloads=True)
    if gpus < 160:  # the note says "at >= 20 nodes"
        software = replace(software, launches_synchronously=False)
    return ForeignSetup(
        sizes=sizes,
        layout=ForeignLayout(
            tp=tp,
            sequence_parallel=values.flag("sp"),
            cp=cp,
            cp_method="allgather" if facts.gathers_context else "ring",
            ep=ep,
            expert_tp=values.whole("etp", tp) > 1,
            dp_shard=shards if zero else dp,
            dp_replicate=dp // shards if zero else 1,
            zero=zero,
            pp=pp,
            stages_per_rank=stages_per_rank,
            schedule=schedule,
            in_flight=in_flight,
            stage_blocks=_stage_blocks(sizes, stages, facts.splits),
        ),
        batch=BatchSizes(seq_len=seq_len, micro_batch=micro_batch, micro_batches=count),
        machine=_machine(values, device),
        precision=_precision(values.text("precision"), zero, facts, software.offloads),
        software=software,
        recompute=recompute,
        rounds=rounds,
    )


def _sizes(values: _Values) -> Sizes | str:
    preset = values.text(_PRESET)
    if preset:
        return _sizes_of_preset(preset) or f"the preset {preset[:60]!r} is unknown"
    layers, dim, heads = (values.whole(name) for name in ("n_layers", "hidden", "n_heads"))
    if not (layers and dim and heads):
        return "n_layers, hidden or n_heads is missing"
    if max(layers, heads) > 1 << 16 or dim > 1 << 22:
        raise UserError(
            f"{values.place}: n_layers = {layers}, hidden = {dim} or n_heads = {heads} is too large"
        )
    experts = values.whole("n_experts")
    dense_blocks = values.whole("n_dense_layers")
    return ForeignSizes(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=values.whole("n_kv_heads") or heads,
        head_width=values.whole("head_dim") or max(1, dim // heads),
        ffn=values.whole("ffn") or 4 * dim,
        ffn_matrices=3 if values.flag("gated") else 2,
        vocab=values.whole("vocab") or 50_432,
        tied=values.flag("tied_emb"),
        experts=experts,
        experts_per_token=values.whole("topk") or 1,
        expert_width=values.whole("moe_ffn") or values.whole("ffn") or 4 * dim,
        shared_width=values.whole("shared_ffn"),
        expert_blocks=max(0, layers - dense_blocks) if experts else 0,
    )


@cache
def _sizes_of_preset(preset: str) -> Sizes | None:
    """Return the sizes of a preset of one of our architectures, or None if there is none."""
    for name in registry.OURS:
        shape = registry.architecture(name).presets.get(preset)
        if shape is not None:
            return sizes_of_shape(shape, name)
    return None


def _schedule(values: _Values, pp: int, layers: int) -> tuple[str, int, int]:
    """Return the schedule, the stages of a rank, and the in-flight factor of zero bubble."""
    text = values.text("schedule").lower()
    virtual = values.whole("vp", 0, most=1 << 16)
    if pp == 1:
        return "1F1B", 1, 1
    if "zb" in text or "zero bubble" in text:
        return "ZeroBubble", 1, 2 if "2p" in text else 1
    if "interleav" in text and virtual != 1:
        return "Interleaved1F1B", virtual or max(2, (layers + 2) // pp), 1
    if "gpipe" in text:
        return "GPipe", 1, 1
    return "1F1B", 1, 1


@cache
def _stage_blocks(sizes: Sizes, stages: int, splits: Splits) -> tuple[int, ...]:
    """Return the blocks of each stage.

    Even if the layers divide; with embedding and head as one layer each if that divides; else full
    stages and a shorter last one.
    """
    layers = sizes.layers
    if splits == "evenly":
        return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    if splits == "by cost" and stages > 1:
        block = float(sizes.attention_parameters + sizes.dense_parameters)
        cut = balanced_cut(0.0, [block] * layers, float(sizes.head_parameters), stages)
        return tuple(len(blocks) for blocks in cut)
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0:
        blocks = [(layers + 2) // stages] * stages
        blocks[0] -= 1
        blocks[-1] -= 1
        return tuple(blocks)
    most = math.ceil(layers / stages)
    return tuple(max(0, min(most, layers - most * stage)) for stage in range(stages))


def _zero(sharding: str) -> Zero:
    text = sharding.lower()
    if "no reshard" in text or "zero-2" in text or "shard_grad_op" in text:
        return 2
    if "full_shard" in text or "zero-3" in text or "fsdp" in text:
        return 3
    if "zero-1" in text or "distributed optimizer" in text:
        return 1
    return 0


def _recompute(text: str) -> Recompute:
    text = text.lower()
    if "every 2nd" in text and "layer" in text:
        return "half_blocks"
    if "per-op" in text:
        return "half_matrix"
    if "core attention" in text:
        return "attention"
    if "minimal" in text:
        return "matrix"
    if "selective" in text:
        return "attention"
    return "full" if text.startswith("full") else "none"


def _precision(text: str, zero: int, facts: Facts, offloads: bool) -> ForeignPrecision:
    text = text.lower()
    matrix = "fp8" if "fp8" in text or "float8" in text else "bfloat16"
    sums_wide = facts.sums_wide or "fp32 grad" in text
    if "no master" in text:
        # The parameters themselves are in 16 bits, and so are the two moments.
        return ForeignPrecision(matrix=matrix, optimizer=6.0 if zero == 3 else 4.0)
    # FSDP keeps no copy in 16 bits: it gathers one from the float32 shards.
    return ForeignPrecision(
        matrix=matrix,
        weights=2.0,
        gradients=4.0 if sums_wide or zero == 3 else 2.0,
        extra_gradients=2.0 if "fp32 grad" in text and facts.copies_gradients else 0.0,
        optimizer=16.0 if facts.copies_gradients else 12.0,
        reduced=4.0 if sums_wide or facts.communicates_wide else 2.0,
        gathered=2.0,
    )


# The links of a node as text: "NVLink3/NVSwitch 300GB/s uni", "NVLink3 (4 links inter-GPU ...)".
_ONE_WAY = re.compile(r"([0-9]{1,5}(?:\.[0-9]+)?) ?GB/s uni", re.IGNORECASE)
_LINKS = re.compile(r"\(([0-9]{1,3}) links")
_LINK_BYTES_S = 25e9  # an NVLink of generation 2 to 4 in one direction
_WATTS = re.compile(r"([0-9]{2,5}) ?W\b")


def _machine(values: _Values, device: hardware.Hardware) -> Machine:
    links = device.links
    if links is None:
        raise UserError(f"{values.place}: the links of {device.name} are unknown")
    text = values.text("intra_node")
    one_way = _ONE_WAY.search(text)
    count = _LINKS.search(text)
    share = 1.0
    if count:
        share = int(count[1]) * _LINK_BYTES_S / links.ring_bytes_s
    elif one_way:
        share = float(one_way[1]) * 1e9 / links.nvlink_bytes_s
    gbit = values.text("inter_gbit_per_gpu")
    numbers = re.findall(r"[0-9.]+", gbit) if not gbit.startswith("n/a") else []
    nic = float(numbers[0]) / 8 * 1e9 if numbers else links.nic_bytes_s
    watts = _WATTS.search(values.text("gpu_variant"))
    power = min(1.0, int(watts[1]) / device.power_w) if watts and device.power_w else 1.0
    domain = max(values.whole("gpus_per_node", 8) or 8, links.domain if links.domain > 8 else 1)
    return Machine(
        hardware=device,
        devices_per_node=domain,
        ring_bytes_s=links.ring_bytes_s * min(1.0, share),
        all_reduce_bytes_s=links.all_reduce_bytes_s * min(1.0, share),
        nic_bytes_s=nic,
        power_share=power,
    )
