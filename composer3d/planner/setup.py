"""The inputs of a prediction: facts about a model, a layout, the software and the machine.

Every field is a fact that a person can look up, and that a recipe or a device sets. Facts in which
other programs differ are class attributes with the value of ours; ``tools.planner.foreign`` makes
them fields. None names a framework or a publication, so that a constant of the cost model cannot
belong to one. No torch here.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from composer3d.facts.checkpointing import EVERY_BLOCK, CheckpointedBlocks
from composer3d.facts.errors import PlanError
from composer3d.facts.hardware import Hardware
from composer3d.facts.schedules import SCHEDULES, rank_of
from composer3d.facts.units import units_of_blocks
from composer3d.planner.pipeline import Compiled, compiled
from composer3d.planner.trained import EVERYTHING, Trained

AttentionKernel = Literal["unfused", "flash1", "flash2", "flash3"]
ContextMethod = Literal["ring", "allgather", "ulysses"]
Recompute = Literal["none", "attention", "matrix", "half_matrix", "half_blocks", "full"]
Zero = Literal[0, 1, 2, 3]


class Latents(NamedTuple):
    """The widths of latent attention (DeepSeek), whose down-projections tp does not cut.

    Attributes:
        query: the latent of queries; 0: they come from the stream.
        key: the latent of keys and values.
        rotated: the rotated part of a key, which all heads share.
        plain: the rest of a head's key.
        value: a head's value. For attention it is padded to the width of a key.
    """

    query: int
    key: int
    rotated: int
    plain: int
    value: int

    @property
    def down(self) -> int:
        """The outputs of all down-projections."""
        return self.query + self.keys

    @property
    def keys(self) -> int:
        """The numbers of a token from which its keys and values follow."""
        return self.key + self.rotated


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The shape of a decoder, as far as its cost depends on it.

    Parameters are those of matrices: norms and biases cost next to nothing.

    Attributes:
        attention_parameters: of the projections of queries, keys, values and outputs of a block.
        dense_parameters: of a feed-forward layer without experts.
        embedding_parameters: of what stands before the blocks.
        head_parameters: of the head, also if they are the embedding's.
        expert_parameters: of all experts of a block, without the shared one.
        shared_parameters: of the router and the shared expert of a block.
        ffn_matrices: the matrices of a feed-forward layer; a gated one (SwiGLU) has three.
        norms: the norms of the residual stream in a block.
        norms_after: whether the last of them comes after the feed-forward layer (OLMo 2).
        wide_norms: whether norms, those of each head's query and key too, compute in float32
            (Gemma 3).
        norms_heads: whether each head's query and key are normalised (Qwen 3).
        norms_over_heads: whether queries and keys are normalised over all heads (OLMo 2).
        latents: those of latent attention; None: queries, keys and values come from the stream.
        windows: the sliding window of each block's attention in tokens, 0: none. Empty: no block
            has one.
        expert_blocks: the number of blocks with experts, depths of multi-token prediction among
            them, which always have experts if any block does.
        expert_every: among the other blocks, every so many-th has experts, and of these the last
            ones: with 1 all dense blocks come first.
        mtp_layers: the last so many blocks are depths of multi-token prediction. Each has another
            norm and another projection before it, and its own pass of the head after it. They read
            the embedding on the last stage.
        expert_width: the width of one expert.
        shared_width: the width of the expert that computes every token; 0: none.
        shared_gate: whether a gate weighs its output (Qwen 2).
        clamps_gates: whether experts clamp their gate, of which backward computes all but the input
            again (gpt-oss).
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocab: int
    attention_parameters: int
    dense_parameters: int
    embedding_parameters: int
    head_parameters: int
    expert_parameters: int = 0
    shared_parameters: int = 0
    tied: bool = False
    windows: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    shared_gate: bool = False
    clamps_gates: bool = False
    expert_blocks: int = 0
    expert_every: int = 1
    mtp_layers: int = 0
    ffn_matrices: int = 3
    norms: int = 2
    norms_after: bool = False
    wide_norms: bool = False
    norms_heads: bool = False
    norms_over_heads: bool = False
    latents: Latents | None = None

    def has_experts(self, block: int) -> bool:
        """Return whether a block, counted from 0, has experts."""
        if self.predicts(block):
            return self.expert_blocks > 0
        every, main = self.expert_every, self.layers - self.mtp_layers
        later = main // every - (block + 1) // every
        return (block + 1) % every == 0 and later < self.expert_blocks - self.mtp_layers

    def window_of(self, block: int) -> int:
        """Return the sliding window of a block, counted from 0, in tokens; 0: none."""
        return self.windows[block] if self.windows else 0

    def predicts(self, block: int) -> bool:
        """Return whether a block, counted from 0, is a depth of multi-token prediction."""
        return block >= self.layers - self.mtp_layers

    @property
    def merge_parameters(self) -> int:
        """The projection of an embedding and a hidden state before such a block."""
        return 2 * self.dim * self.dim

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage reads the embedding."""
        return self.tied or self.mtp_layers > 0

    @property
    def last_embedding_parameters(self) -> int:
        """Those of the embedding that the last stage holds besides its head."""
        return 0 if self.tied or not self.mtp_layers else self.embedding_parameters

    @property
    def query_width(self) -> int:
        """The width of the queries of all heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """The width of all keys, or of all values."""
        return self.kv_heads * self.head_width

    @property
    def whole_parameters(self) -> int:
        """Those of ``attention_parameters`` that tp does not cut."""
        return self.dim * self.latents.down if self.latents else 0

    def attention_on_rank(self, tp: int) -> float:
        """Return those of ``attention_parameters`` that each of ``tp`` ranks holds."""
        whole = self.whole_parameters
        return whole + (self.attention_parameters - whole) / tp

    @property
    def parameters(self) -> int:
        """The parameters of the whole model, without norms and biases."""
        dense_blocks = self.layers - self.expert_blocks
        blocks = self.layers * self.attention_parameters + dense_blocks * self.dense_parameters
        blocks += self.expert_blocks * (self.expert_parameters + self.shared_parameters)
        blocks += self.mtp_layers * self.merge_parameters
        head = 0 if self.tied else self.head_parameters
        return blocks + self.embedding_parameters + head


class AxisRanks(NamedTuple):
    """The ranks of an axis: ``first + stride * i``.

    Attributes:
        size: their number.
        stride: the distance between two neighbours.
    """

    size: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the mesh axes, and how each axis shares the work.

    Attributes:
        cp_balanced: whether each rank of cp holds an early and a late part of a sequence.
        sends_latents: whether ring and all-gather send latents in place of keys and values.
        stage_blocks: the blocks of each pipeline stage, in order.
        zero: 0 replicates over dp_shard; 1 shards optimizer state; 2 also gradients; 3 parameters.
        fsdp_blocks: consecutive blocks of a stage that FSDP gathers and reduces together.
        schedule: a name of ``facts.schedules``.
        schedule_csv: the file of the schedule "csv".
        csv_ranks: the pipeline rank of each stage in that file.
        expert_tp: whether tp cuts each expert.
    """

    tp: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = True
    cp: int = 1
    cp_method: ContextMethod = "ring"
    cp_balanced: bool = True
    sends_latents: bool = False
    ep: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    zero: Zero = 3
    fsdp_blocks: int = 1
    pp: int = 1
    stages_per_rank: int = 1
    schedule: str = "1F1B"
    schedule_csv: str | None = None
    csv_ranks: tuple[int, ...] = ()
    stage_blocks: tuple[int, ...] = ()

    expert_tp = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.batch_ranks * self.cp * self.tp * self.pp

    @property
    def batch_ranks(self) -> int:
        """The ranks that hold different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def replicas(self) -> int:
        """The ranks that hold the same shards of parameters, in the optimizer's step."""
        return self.dp_replicate * (1 if self.zero else self.dp_shard * self.cp)

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def blocks_of_unit(self) -> float:
        """The blocks of a unit of FSDP, on average: the last one of a stage may have fewer."""
        units = sum(map(self.units_of_stage, self.stage_blocks))
        return sum(self.stage_blocks) / units if units else 1.0

    def units_of_stage(self, blocks: int) -> int:
        """Return the number of FSDP's units of a stage of ``blocks`` blocks, without its ends."""
        return len(units_of_blocks(range(blocks), self.fsdp_blocks))

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        if self.schedule == "csv":
            return self.csv_ranks[stage]
        return rank_of(stage, self.pp, v_shaped=SCHEDULES[self.schedule].v_shaped)

    def compiled(self, micro_batches: int) -> Compiled:
        """Compile the schedule for a number of micro-batches.

        Raises:
            PlanError: the schedule cannot run with these numbers, or its file cannot be read.
        """
        return compiled(
            self.schedule, self.pp, self.stages_per_rank, micro_batches, self.schedule_csv
        )

    def ranks_of(self, axis: str) -> AxisRanks:
        """Return the number and the distance of the ranks of an axis, or of axes together.

        Args:
            axis: a name of ``traffic.Axis``, or ``dp_shard``.
        """
        shards = self.dp_shard * self.cp
        inner = self.tp * shards
        # Experts are spread over neighbouring ranks: those of tp, then cp, then dp_shard. If tp
        # cuts each expert, without those of tp.
        expert_stride, expert_ranks = (self.tp, shards) if self.expert_tp else (1, inner)
        expert_shards = max(1, expert_ranks // self.ep)
        size, stride = {
            "pp": (self.pp, inner * self.dp_replicate),
            "dp_replicate": (self.dp_replicate, inner),
            "dp_shard": (self.dp_shard, self.tp * self.cp),
            "fsdp": (shards, self.tp),
            "replicas": (self.dp_replicate * shards, self.tp),
            "efsdp": (expert_shards, expert_stride * self.ep),
            "expert_replicas": (self.dp_replicate * expert_shards, expert_stride * self.ep),
            "cp": (self.cp, self.tp),
            "tp": (self.tp, 1),
            "ep": (self.ep, expert_stride),
            "sequence": (self.cp * self.tp, 1),
            "stage": (inner * self.dp_replicate, 1),
            "world": (self.world_size, 1),
        }[axis]
        return AxisRanks(size, stride)


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The work of one optimizer step.

    Attributes:
        micro_batch: samples that a rank processes at once.
        micro_batches: micro-batches that a rank runs in a step.
    """

    seq_len: int
    micro_batch: int = 1
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The widths of values in bytes, and the type of the matrix products of blocks.

    Attributes:
        matrix: the type of the matrix products, a key of ``Hardware.peaks``.
        weight_products: the type of the products that make weight gradients, and of MFU's peak;
            None: that of ``matrix``.
        weights: bytes per parameter of the copy that forward reads.
        gradients: bytes per parameter of the gradients that are summed over micro-batches.
        optimizer: bytes per parameter of the optimizer: moments, and the master copy, if the
            weights are not one.
        reduced: bytes per parameter of the gradient's reduction.
        exchanged: bytes per parameter of the gradients that ranks exchange by an all-to-all, and
            then add up; 0: a reduce-scatter sums them on their way, in ``reduced`` bytes.
        gathered: bytes per parameter of a gather.
    """

    matrix: str = "bfloat16"
    weight_products: str | None = None
    weights: float = 2.0
    gradients: float = 2.0
    optimizer: float = 12.0
    reduced: float = 2.0
    exchanged: float = 0.0
    gathered: float = 2.0

    @property
    def activations(self) -> float:
        """Bytes of an element of the residual stream, which ranks of tp, cp, ep and pp send."""
        return 4.0 if self.matrix in ("float32", "tf32") else 2.0


@dataclass(frozen=True, kw_only=True)
class Software:
    """What the kernels and the runtime can do.

    Attributes:
        attention: unfused writes scores to memory; flash1, flash2 and flash3 are the generations
            of FlashAttention and of kernels as fast as they are.
        attention_of_windows: likewise, for windows; None: the same.
        fuses_elementwise: whether norms, activations, rotations and residual additions run as few
            fused kernels (by a compiler or by hand).
        fuses_norms: whether a norm keeps only its input for backward. Otherwise it also keeps two
            copies in float32.
        since_torch_2_15: what torch 2.15 changed (``torch_facts.is_since_2_15``).
        fuses_loss: whether the loss never writes all logits in float32.
        fuses_weight_gradients: whether the product that makes a weight's gradient adds to the sum.
        dropout: whether residual streams have dropout.
        stops_recompute_early: whether recomputation ends when the last saved tensor is there: the
            last product of a block is not repeated.
        overlaps_tp: in which passes the collectives of tp run beside products. "backward": the
            gradients of inputs travel while those of weights are computed. "both": products and
            collectives are cut into parts that overlap. "forward": the same, in forward only.
        overlaps_sends: whether a rank computes while it sends to the next pipeline rank.
        overlaps_gradients: whether gradients are reduced during backward.
        overlaps_gathers: whether a sharded optimizer gathers parameters during the next forward.
        gathers_tensors: whether a sharded optimizer gathers tensor by tensor, not in large buckets.
        launches_synchronously: whether the host waits for every kernel.
        offloads: whether parameters and optimizer live in host memory.
        sends_tokens_once: whether a token travels once to each node with some of its experts, and
            from there over the fast links once to each rank. Otherwise it is sent once for each of
            its experts.
        balances_routing: whether the router gives all experts equally many tokens, whatever the
            tokens are, as a benchmark's does.
        routes_to_neighbours: whether such a router gives a token neighbouring experts, and the next
            token the next ones. Otherwise the experts of a token are independent.
    """

    attention: AttentionKernel = "flash2"
    attention_of_windows: AttentionKernel | None = None
    fuses_elementwise: bool = False
    fuses_loss: bool = False
    fuses_norms: bool = True
    since_torch_2_15: bool = False
    stops_recompute_early: bool = False
    overlaps_tp: Literal["none", "forward", "backward", "both"] = "none"
    overlaps_sends: bool = False
    offloads: bool = False

    fuses_weight_gradients = False
    dropout = False
    overlaps_gradients = True
    overlaps_gathers = False
    gathers_tensors = False
    launches_synchronously = False
    sends_tokens_once = False
    balances_routing = False
    routes_to_neighbours = False


class Machine(NamedTuple):
    """The devices and the links between them.

    Attributes:
        hardware: the row of the device.
        devices_per_node: devices that share a node and its fast links.
        ring_bytes_s: measured bus bandwidth of a ring inside a node.
        all_reduce_bytes_s: the same for all-reduce, which switches may compute.
        nic_bytes_s: one direction between nodes, for each device.
        power_share: the power limit as a share of the datasheet's.
        latency_s: of a small all-reduce inside a node, for each doubling of its ranks; None: what
            is usual for NCCL.
        nic_latency_s: the same between nodes.
    """

    hardware: Hardware
    devices_per_node: int
    ring_bytes_s: float
    all_reduce_bytes_s: float
    nic_bytes_s: float
    power_share: float = 1.0
    latency_s: float | None = None
    nic_latency_s: float | None = None


class BlockKind(NamedTuple):
    """What tells a block from another one.

    Attributes:
        has_experts: whether its feed-forward layer has experts.
        recompute: what backward repeats.
        window: the sliding window of its attention in tokens; 0: none.
        predicts: whether it is a depth of multi-token prediction.
    """

    has_experts: bool
    recompute: Recompute
    window: int
    predicts: bool = False


class BlockMatrices(NamedTuple):
    """The matrices of a block that an optimizer works on as a whole.

    Attributes:
        elements: of all of them.
        flops: to orthogonalise them once.
        of_experts: the elements of those that are matrices of experts.
    """

    elements: int = 0
    flops: float = 0.0
    of_experts: int = 0

    def plus(self, other: "BlockMatrices") -> "BlockMatrices":
        """Return the matrices of both."""
        return BlockMatrices(
            self.elements + other.elements,
            self.flops + other.flops,
            self.of_experts + other.of_experts,
        )


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The matrices that an optimizer orthogonalises in each step.

    Attributes:
        blocks: those of each block. What other parts of the model have counts for the block beside
            them.
        largest: the largest one. It is one rank's work.
        dtype: in which they are computed, and travel.
        element_bytes: of that dtype.
        saved_bytes: by how much the state of an element is smaller than that of other parameters,
            which ``Precision.optimizer`` says.
    """

    blocks: tuple[BlockMatrices, ...]
    largest: BlockMatrices
    dtype: str
    element_bytes: int
    saved_bytes: float


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that a prediction reads.

    Attributes:
        recompute: what backward computes again. ``attention``: scores and their weighted sum.
            ``matrix``: everything but products and attention. ``half_matrix``: also every second
            product. ``half_blocks``: every second block, whole. ``full``: each block, whole.
        recomputed: the blocks for which ``recompute`` holds. The others repeat nothing.
        loss_chunks: the number of parts of a micro-batch whose logits exist at once.
        repeats_loss: backward computes the logits of several parts again.
        matrices: those that the optimizer orthogonalises; None: none.
        trained: the parameters that train. Only ``moments`` reads it: the gradients and the state
            of the optimizer are theirs. Activations and time are those of training all.

    Raises:
        PlanError: ``layout.stage_blocks`` does not have a number for each stage, or its sum is not
            ``sizes.layers``.
    """

    sizes: Sizes
    layout: Layout
    batch: BatchSizes
    machine: Machine
    precision: Precision = Precision()
    software: Software = Software()
    recompute: Recompute = "none"
    recomputed: CheckpointedBlocks = EVERY_BLOCK
    loss_chunks: int = 1
    repeats_loss: bool = False
    matrices: Matrices | None = None
    trained: Trained = EVERYTHING

    def __post_init__(self) -> None:
        layout, sizes = self.layout, self.sizes
        if len(layout.stage_blocks) != layout.stages or sum(layout.stage_blocks) != sizes.layers:
            raise PlanError(
                f"stages of {layout.stage_blocks} blocks are not {layout.stages} stages of a model "
                f"with {sizes.layers} blocks"
            )

    @property
    def expert_blocks(self) -> tuple[int, ...]:
        """The number of blocks with experts in each stage."""
        return _expert_blocks(self.sizes, self.layout.stage_blocks)

    def kind_of(self, block: int, place: int, stage: int) -> BlockKind:
        """Return the kind of a block of the model, counted from 0, at ``place`` in its stage."""
        return _kind_of(self.sizes, block, self.recompute, self.recomputed.has(place, stage))

    @property
    def block_kinds(self) -> tuple[Counter[BlockKind], ...]:
        """The number of blocks of each kind in each stage."""
        return _block_kinds(self.sizes, self.layout.stage_blocks, self.recompute, self.recomputed)

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch on one rank of cp."""
        return self.batch.micro_batch * self.batch.seq_len // self.layout.cp

    @property
    def step_tokens(self) -> int:
        """The tokens of a step, over all ranks."""
        batch = self.batch
        return batch.micro_batch * batch.micro_batches * batch.seq_len * self.layout.batch_ranks


@cache
def _expert_blocks(sizes: Sizes, stage_blocks: tuple[int, ...]) -> tuple[int, ...]:
    ends = tuple(accumulate(stage_blocks, initial=0))
    return tuple(sum(map(sizes.has_experts, range(*stage))) for stage in pairwise(ends))


def _kind_of(sizes: Sizes, block: int, recompute: Recompute, is_recomputed: bool) -> BlockKind:
    return BlockKind(
        has_experts=bool(sizes.expert_blocks) and sizes.has_experts(block),
        recompute=recompute if is_recomputed else "none",
        window=sizes.window_of(block),
        predicts=sizes.predicts(block),
    )


@cache
def _block_kinds(
    sizes: Sizes,
    stage_blocks: tuple[int, ...],
    recompute: Recompute,
    recomputed: CheckpointedBlocks,
) -> tuple[Counter[BlockKind], ...]:
    ends = tuple(accumulate(stage_blocks, initial=0))
    return tuple(
        Counter(
            _kind_of(sizes, block, recompute, recomputed.has(place, stage))
            for place, block in enumerate(range(*blocks))
        )
        for stage, blocks in enumerate(pairwise(ends))
    )
