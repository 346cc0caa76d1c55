"""Time, memory and efficiency of a setup, and the setup that a recipe describes. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import filterfalse
from math import prod
from typing import Any, NamedTuple

from composer3d.facts.errors import DeviceError
from composer3d.facts.hardware import Hardware
from composer3d.models.registry import architecture
from composer3d.models.shape import DecoderShape
from composer3d.models.table import NORMS_OVER_HEADS, Row
from composer3d.planner.calibrate import learned
from composer3d.planner.constants import SHIPPED, Constants
from composer3d.planner.intervals import (
    SHIPPED_SPREADS,
    Candidate,
    Interval,
    around,
    fits_probability,
    shares,
)
from composer3d.planner.matrices import newton_schulz_flops
from composer3d.planner.memory import GIB, RankMemory, predict_memory
from composer3d.planner.schedule import keeps_gradients_of_loss
from composer3d.planner.setup import (
    AttentionKernel,
    BatchSizes,
    BlockMatrices,
    Latents,
    Layout,
    Machine,
    Matrices,
    Precision,
    Recompute,
    Setup,
    Sizes,
    Software,
)
from composer3d.planner.stages import stages_by_rank
from composer3d.planner.time import StepTime, predict_time
from composer3d.planner.torch_facts import is_since_2_15
from composer3d.planner.traffic import DTYPE_BYTES
from composer3d.planner.trained import is_trained, trained_of
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.schema import Model, OptimTable, Recipe
from composer3d.recipe.stages import stage_ranges

# What a CUDA context and NCCL's buffers take at least, with few process groups.
_LEAST_CONTEXT_GIB = 1.5


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a setup costs.

    Attributes:
        time: the step's time, by part.
        memory: the peak of each pipeline rank, by kind.
        tokens_s: tokens per second and device.
        fits: whether the allocated memory and the contexts fit the device.
        fits_probability: how sure that is.
        time_spread: the spread of the errors of ``time`` and ``tokens_s``, as a share.
    """

    time: StepTime
    memory: tuple[RankMemory, ...]
    tokens_s: float
    fits: bool
    fits_probability: float
    time_spread: float

    def interval(self, value: float) -> Interval:
        """Return the 80% interval of a time, a rate or an MFU that was predicted."""
        return around(value, self.time_spread, SHIPPED_SPREADS.quantile)

    def memory_interval(self, value: float) -> Interval:
        """Return the 80% interval of a peak that was predicted."""
        return around(value, SHIPPED_SPREADS.ours, SHIPPED_SPREADS.memory_quantile)

    @property
    def peak_interval(self) -> Interval:
        """The 80% interval of ``peak_gib``."""
        return self.memory_interval(self.peak_gib)

    @property
    def largest_rank(self) -> int:
        """The pipeline rank that allocates most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].allocated_bytes)

    @property
    def allocated_gib(self) -> float:
        """The memory that this rank allocates, without what CUDA takes."""
        return self.memory[self.largest_rank].allocated_bytes / GIB

    @property
    def needed_gib(self) -> tuple[float, ...]:
        """The memory that each pipeline rank needs; ``fits`` compares it with the device's."""
        return tuple(map(_needed_gib, self.memory))

    @property
    def peak_gib(self) -> float:
        """The memory that the largest rank needs."""
        return max(self.needed_gib)


def predict(setup: Setup, constants: Constants = SHIPPED) -> Prediction:
    """Predict time and memory.

    Raises:
        PlanError: the schedule cannot run with these numbers.
        DeviceError: the device has no rate for the type of the products.
    """
    time, time_spread = learned(setup, predict_time(setup, constants))
    memory = tuple(predict_memory(setup, constants))
    return Prediction(
        time=time,
        memory=memory,
        tokens_s=_tokens_s(setup, time),
        fits=fits(setup, memory),
        fits_probability=fits_probability(
            max(map(_needed_gib, memory)), setup.machine.hardware.memory_gib
        ),
        time_spread=time_spread,
    )


def predict_speed(setup: Setup) -> Candidate:
    """Predict the tokens per second and device alone, as ``predict`` does, and how sure it is."""
    predicted = predict_time(setup)
    time, _ = learned(setup, predicted)
    return Candidate(_tokens_s(setup, time), shares(setup, predicted))


def _tokens_s(setup: Setup, time: StepTime) -> float:
    return setup.step_tokens / (time.step_s * setup.layout.world_size)


def fits(setup: Setup, memory: Iterable[RankMemory]) -> bool:
    """Return whether every rank fits its device. Those after one that does not are not read."""
    return needed_share(setup, memory) <= 1


def needed_share(setup: Setup, memory: Iterable[RankMemory]) -> float:
    """Return the largest share of its device that a rank needs, up to the first that is above 1."""
    largest = 0.0
    for rank in memory:
        largest = max(largest, _needed_gib(rank) / setup.machine.hardware.memory_gib)
        if largest > 1:
            break
    return largest


def _needed_gib(rank: RankMemory) -> float:
    """Return what a rank allocates, with the least that CUDA's context takes, if it has one.

    The allocator's slack does not count: short of memory, it returns what it does not use.
    """
    return rank.allocated_bytes / GIB + (_LEAST_CONTEXT_GIB if rank.context else 0.0)


def mfu(setup: Setup, flops_per_token: float, tokens_s: float) -> float | None:
    """Return the model FLOPs utilization, or None if the device's peak is not known.

    Args:
        setup: the setup.
        flops_per_token: model FLOPs of ``models.counts``, causal or not, as the caller likes.
        tokens_s: tokens per second and device.
    """
    precision = setup.precision
    peak = setup.machine.hardware.peaks.get(precision.weight_products or precision.matrix)
    return flops_per_token * tokens_s / peak if peak else None


class _Attention(NamedTuple):
    """The kernels of attention whose rates are those of the recipe's.

    What was published of FlashAttention 3 and of kernels as fast is one row of the rates. cuDNN's
    is as fast: on an H100, forward and backward with the heads of Llama 3 8B take 3% less time than
    that row says (docs/gpu.md).

    Attributes:
        causal: of all keys up to a query's own.
        windows: of windows.
    """

    causal: AttentionKernel
    windows: AttentionKernel


def _attention(recipe: Recipe, hardware: Hardware) -> _Attention:
    parallel, generation = recipe.parallel, hardware.generation
    if generation == "cpu":
        return _Attention("unfused", "unfused")
    if parallel.attention_kernel != "torch":
        return _Attention("flash3", "flash3")
    # torch chooses cuDNN's kernel for whole sequences, and composer3d on Hopper for blocks
    # (``kernels.kernel_of``). It takes no documents, and its backward may give other bits in each
    # call. Sinks are added to blocks.
    is_whole = recipe.mesh.cp == 1 or parallel.cp_method == "ulysses"
    is_block = not is_whole or recipe.model.has_sinks
    has_cudnn = generation == "hopper" or (generation == "blackwell" and not is_block)
    is_half = recipe.precision.computes_in in ("bfloat16", "float16")
    fits = recipe.model.head_width <= 128 and is_half and recipe.data.packing == "none"
    if has_cudnn and fits and not recipe.run.deterministic:
        return _Attention("flash3", "flash2")
    return _Attention("flash2", "flash2")


def of_recipe(
    recipe: Recipe,
    hardware: Hardware,
    devices_per_node: int = 8,
    nic_bytes_s: float | None = None,
) -> Setup:
    """Return the setup that a resolved recipe describes.

    Args:
        recipe: the recipe.
        hardware: the device that it runs on.
        devices_per_node: devices that share a node.
        nic_bytes_s: one direction of the network for each device; None: what the row says.

    Raises:
        DeviceError: the links of the device are not known.
    """
    mesh, parallel, memory = recipe.mesh, recipe.parallel, recipe.memory
    sizes = sizes_of(recipe)
    if hardware.links is None:
        raise DeviceError(f"{hardware.name} has no links; give them in a file for --gpu")
    domain = hardware.links.domain
    stages_per_rank = parallel.stages_per_rank if mesh.pp > 1 else 1
    attention = _attention(recipe, hardware)
    recompute: dict[str, Recompute] = {"none": "none", "selective": "matrix", "full": "full"}
    return Setup(
        sizes=sizes,
        layout=Layout(
            tp=mesh.tp,
            sequence_parallel=parallel.sequence_parallel or mesh.tp == 1,
            loss_parallel=parallel.loss_parallel or mesh.tp == 1,
            cp=mesh.cp,
            cp_method=parallel.cp_method,
            cp_balanced=parallel.is_balanced,
            sends_latents=recipe.sends_latents,
            ep=mesh.ep,
            dp_shard=mesh.dp_shard,
            dp_replicate=mesh.dp_replicate,
            zero=parallel.zero,
            fsdp_blocks=parallel.fsdp_blocks,
            pp=mesh.pp,
            stages_per_rank=stages_per_rank,
            schedule=parallel.schedule,
            schedule_csv=parallel.schedule_csv,
            csv_ranks=_csv_ranks(recipe),
            stage_blocks=tuple(map(len, stage_ranges(recipe))),
        ),
        batch=BatchSizes(
            seq_len=recipe.data.seq_len,
            micro_batch=recipe.data.micro_batch,
            micro_batches=recipe.micro_batches,
        ),
        machine=Machine(
            hardware=hardware,
            # A rack whose NVLink joins more devices than a node is one node to its collectives.
            devices_per_node=max(devices_per_node, domain if domain > 8 else 1),
            ring_bytes_s=hardware.links.ring_bytes_s,
            all_reduce_bytes_s=hardware.links.all_reduce_bytes_s,
            nic_bytes_s=nic_bytes_s or hardware.links.nic_bytes_s,
            latency_s=hardware.links.latency_s,
            nic_latency_s=hardware.links.nic_latency_s,
        ),
        precision=_precision(recipe),
        software=Software(
            attention=attention.causal,
            attention_of_windows=attention.windows,
            fuses_elementwise=recipe.compile.enabled,
            fuses_loss=recipe.compile.enabled and mesh.tp == 1,
            fuses_norms=hardware.generation != "cpu",
            since_torch_2_15=is_since_2_15(),
            stops_recompute_early=True,
            # Backward fuses its gathers, but not its reductions; no time of it is priced.
            overlaps_tp="forward" if parallel.async_tp else "none",
            overlaps_sends=True,
            offloads=memory.cpu_offload,
        ),
        recompute=recompute[memory.checkpointing.mode],
        recomputed=memory.checkpointing.blocks,
        loss_chunks=memory.loss_chunks,
        repeats_loss=memory.loss_chunks > 1
        and not keeps_gradients_of_loss(mesh.pp, parallel, recipe.micro_batches),
        matrices=_matrices(recipe.model, recipe.optim, _wide(recipe)),
        trained=trained_of(recipe),
    )


def _csv_ranks(recipe: Recipe) -> tuple[int, ...]:
    """Return the pipeline rank of each stage if the schedule is a file; otherwise nothing."""
    if recipe.parallel.schedule != "csv":
        return ()
    held = stages_by_rank(recipe)
    ranks = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    return tuple(ranks[stage] for stage in sorted(ranks))


def sizes_of(recipe: Recipe) -> Sizes:
    """Return the sizes of a recipe's model."""
    return sizes_of_shape(recipe.model, recipe.model.architecture)


@cache
def sizes_of_shape(shape: DecoderShape, architecture_name: str) -> Sizes:
    """Return the sizes of a model, from the table of parameters of its architecture."""
    table = architecture(architecture_name).table_of(shape)

    def is_attention(row: Row) -> bool:
        return row.name.startswith(f"{table.attention}.")

    def is_expert(row: Row) -> bool:
        return row.style == "experts"

    kinds = [rows for rows, _ in table.block_kinds]
    with_experts = next((rows for rows in kinds if any(map(is_expert, rows))), ())
    dense = next((rows for rows in kinds if not any(map(is_expert, rows))), ())
    feed_forward = [row for row in kinds[0] if not is_attention(row) and row.is_matrix]
    inner = sum(row.style == "column" for row in feed_forward)
    expert_blocks = getattr(shape, "moe_layers", shape.n_layers) if shape.experts else 0
    expert_blocks += shape.mtp_layers
    norms = [row for row in kinds[0] if row.style == "norm" and not is_attention(row)]
    return Sizes(
        layers=shape.all_layers,
        dim=shape.dim,
        heads=shape.n_heads,
        kv_heads=shape.n_kv_heads,
        head_width=shape.head_width,
        ffn=shape.ffn,
        vocab=shape.vocab,
        attention_parameters=_elements(filter(is_attention, kinds[0])),
        dense_parameters=_elements(filterfalse(is_attention, dense)),
        embedding_parameters=_elements(table.first),
        head_parameters=_elements(row for row in table.last if row.style != "embedding"),
        expert_parameters=_elements(filter(is_expert, with_experts)),
        shared_parameters=_elements(
            row for row in with_experts if not is_attention(row) and not is_expert(row)
        ),
        # A gate makes two matrices before the last one. Layers of experts alone have no columns.
        ffn_matrices=2 if inner == 1 else 3,
        latents=_latents(shape),
        norms=len({row.module for row in norms}),  # a LayerNorm has two rows
        # What a norm before a layer returns is read by the layer's products.
        norms_after=any(row.is_unread for row in norms),
        wide_norms=getattr(shape, "wide_norms", False),
        norms_heads=shape.qk_norm,
        norms_over_heads=any(row.style in NORMS_OVER_HEADS for row in kinds[0]),
        tied=shape.tied,
        windows=tuple(map(shape.window_of, range(shape.all_layers))) if any(shape.windows) else (),
        experts=shape.experts,
        experts_per_token=shape.experts_per_token if shape.experts else 0,
        expert_width=shape.expert_width if shape.experts else 0,
        shared_width=getattr(shape, "shared_ffn", 0),
        shared_gate=getattr(shape, "shared_gate", False),
        clamps_gates=hasattr(shape, "gate_limit"),
        expert_blocks=expert_blocks,
        expert_every=getattr(shape, "moe_every", 1),
        mtp_layers=shape.mtp_layers,
    )


def _latents(shape: DecoderShape) -> Latents | None:
    latent: Any = shape
    if not hasattr(shape, "kv_rank"):
        return None
    return Latents(
        query=latent.query_rank,
        key=latent.kv_rank,
        rotated=latent.rope_dim,
        plain=latent.plain_dim,
        value=latent.value_dim,
    )


def _elements(rows: Iterable[Row]) -> int:
    return sum(row.elements for row in rows if row.is_matrix)


def model_flops_per_token(recipe: Recipe) -> float:
    """Return the model FLOPs of a token, from the counts of the recipe's architecture."""
    return architecture(recipe.model.architecture).count_flops(recipe.model, recipe.data.seq_len)


def _wide(recipe: Recipe) -> float:
    """Return the bytes of an element of parameters, of summed gradients and of optimizer state."""
    return 8.0 if recipe.precision.params == "float64" else 4.0


def _precision(recipe: Recipe) -> Precision:
    """Return the widths of FSDP's mixed precision: shards and sums wide, gathers narrow."""
    wide = _wide(recipe)
    computes_in = recipe.precision.computes_in
    narrow = float(DTYPE_BYTES[computes_in])
    matrix = "float32" if computes_in == "float64" else computes_in
    # In float64, float8 is emulated.
    is_float8 = recipe.precision.matmul == "float8" and computes_in == "bfloat16"
    return Precision(
        matrix="fp8" if is_float8 else matrix,
        weight_products=matrix if is_float8 else None,
        weights=narrow,
        gradients=wide,
        optimizer=(1.0 + recipe.optim.optimizer.copies(is_matrix=False)) * wide,
        reduced=wide,
        exchanged=2.0 if recipe.precision.reduces_in == "bfloat16" else 0.0,
        gathered=narrow,
    )


@cache
def _matrices(model: Model, optim: OptimTable, wide_bytes: float) -> Matrices | None:
    """Return what an optimizer of matrices computes in a step.

    ``wide_bytes`` is the width of parameters and of their state.
    """
    chosen = architecture(model.architecture)
    names = matrices_of(chosen, model, optim)
    if not names:
        return None
    table = chosen.table_of(model)
    places = {"first": 0, "last": model.all_layers - 1}
    places |= {f"blocks.{layer}": layer for layer in range(model.all_layers)}
    blocks = [BlockMatrices()] * model.all_layers
    largest = BlockMatrices()
    for unit, rows in table.units():
        for row in rows:
            name = f"{unit}.{row.name}"
            if name in names and not row.tied_to and is_trained(optim, name):
                flops = optim.newton_schulz_steps * newton_schulz_flops(row.shape)
                of_experts = row.elements if row.style == "experts" else 0
                own = BlockMatrices(row.elements, flops, of_experts)
                blocks[places[unit]] = blocks[places[unit]].plus(own)
                of_one = prod(row.shape[:-2])
                largest = max(largest, BlockMatrices(row.elements // of_one, flops / of_one))
    dtype = optim.newton_schulz_dtype
    return Matrices(
        blocks=tuple(blocks),
        largest=largest,
        dtype=dtype,
        element_bytes=DTYPE_BYTES[dtype],
        saved_bytes=wide_bytes
        * (optim.optimizer.copies(is_matrix=False) - optim.optimizer.copies(is_matrix=True)),
    )
