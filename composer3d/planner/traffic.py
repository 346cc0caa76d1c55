"""The collectives of a training step, by axis: how often, and how many bytes. No torch here.

Each formula says what the code in ``parallel`` does, and names its source there. All numbers are
those of one rank with the coordinate 0 on every axis but pp; ranks differ in pp only, apart from a
vocabulary that tp cuts unevenly.

Symbols: B samples of a micro-batch, T tokens of a sample, M micro-batches of a step, C model width,
e bytes of an element in computation, p bytes of a parameter, g bytes of a gradient on its way to
the ranks that shard it, w bytes of a wide element (4, or 8 in float64).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from composer3d.facts.box import Box
from composer3d.facts.flags import N_FLAGS
from composer3d.facts.schedules import Cell
from composer3d.facts.units import units_of_blocks
from composer3d.models.registry import architecture
from composer3d.models.shape import DecoderShape
from composer3d.models.table import NORMS_OVER_HEADS, Row
from composer3d.planner.matrices import (
    CutParameter,
    MatrixUnit,
    messages_of_results,
    rounds_of_units,
)
from composer3d.planner.schedule import active_stages, keeps_gradients_of_loss, recipe_actions
from composer3d.planner.stages import StageLayers, stage_layers, stages_by_rank
from composer3d.planner.trained import is_trained
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.schema import MeshTable, Recipe

# The groups of ranks that communicate. "fsdp" is dp_shard x cp; "efsdp" is what ep leaves of
# dp_shard x cp x tp. Without sharding (zero = 0), gradients are summed over "replicas", those of
# experts over "expert_replicas". "sequence" is cp x tp, "stage" all ranks but pp's, and "world" is
# all ranks.
Axis = Literal[
    "pp",
    "dp_replicate",
    "fsdp",
    "replicas",
    "efsdp",
    "expert_replicas",
    "cp",
    "tp",
    "ep",
    "sequence",
    "stage",
    "world",
]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Phase = Literal["forward", "backward", "step"]

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_COUNT_BYTES = 8  # int64 numbers of rows, and float64 sums


# As ``parallel.grad_norm.PARTS``, which needs torch.
_PARTS = 8


@dataclass(frozen=True)
class Traffic:
    """The calls of one operation on one axis in a step.

    Attributes:
        count: calls.
        bytes: bytes that one rank sends, over all calls: the least that any algorithm needs, which
            rings reach.
        payload_bytes: bytes of the whole tensor, over all calls: the output of an all-gather, the
            input of the others.
    """

    count: int
    bytes: float
    payload_bytes: int


@dataclass(frozen=True)
class Flow:
    """The calls of one operation for one purpose.

    Attributes:
        axis: the ranks that take part.
        operation: the collective, or a send to one other rank.
        phase: when: in forward, in backward (what it recomputes included), or once in a step.
        purpose: what is sent, in words.
        count: calls in a step.
        payload_bytes: as in ``Traffic``.
        group_size: the number of ranks that take part; 2 for a send.
        kept_bytes: of the payload of an all-to-all, what stays on the rank. None: an even share.
        receiver: the pipeline rank that a message of pp goes to.
    """

    axis: Axis
    operation: Operation
    phase: Phase
    purpose: str
    count: int
    payload_bytes: int
    group_size: int
    kept_bytes: int | None = None
    receiver: int | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a step."""
        if self.kept_bytes is not None:
            return float(self.payload_bytes - self.kept_bytes)
        others = (self.group_size - 1) / self.group_size
        match self.operation:
            case "send":
                return float(self.payload_bytes)
            case "all_reduce":  # a reduce-scatter, and an all-gather of the result
                return 2 * self.payload_bytes * others
            case _:
                return self.payload_bytes * others


def traffic(recipe: Recipe, pp_rank: int = 0) -> dict[Axis, dict[Operation, Traffic]]:
    """Return the traffic of a rank in a step, by axis and operation.

    Args:
        recipe: a resolved recipe.
        pp_rank: the pipeline rank.

    Raises:
        PlanError: the recipe's schedule cannot run.
    """
    found: dict[Axis, dict[Operation, Traffic]] = defaultdict(dict)
    for flow in flows(recipe, pp_rank):
        before = found[flow.axis].get(flow.operation, Traffic(0, 0.0, 0))
        found[flow.axis][flow.operation] = Traffic(
            before.count + flow.count,
            before.bytes + flow.sent_bytes,
            before.payload_bytes + flow.payload_bytes,
        )
    return dict(found)


def flows(recipe: Recipe, pp_rank: int = 0) -> list[Flow]:
    """Return the same as ``traffic``, by purpose and phase."""
    return _RankTraffic(recipe, pp_rank).flows()


def rounds_of_matrices(recipe: Recipe, pp_rank: int = 0) -> list[tuple[MatrixUnit, ...]]:
    """Return the rounds in which a pipeline rank brings matrices to their owners, if any."""
    return _RankTraffic(recipe, pp_rank).rounds_of_matrices()


def rows_for_experts(recipe: Recipe) -> int:
    """Return how many rows a rank sends to experts in a micro-batch: each of its tokens K times."""
    tokens = recipe.data.micro_batch * (recipe.data.seq_len // recipe.mesh.cp) // recipe.mesh.tp
    return tokens * recipe.model.experts_per_token


# How tp cuts a parameter: by rows, by columns, not at all (every rank has the whole gradient), not
# at all (each rank has a part of the gradient's sum), or as experts, which tp never cuts.
Cut = Literal["rows", "columns", "whole", "whole_partial", "experts"]


def cut_of(row: Row, shape: DecoderShape, *, tp: int, sequence_parallel: bool) -> Cut:
    """Return how tp cuts a parameter, as ``parallel.tensor.styles`` does.

    With fewer key-value heads than tp ranks, every rank holds all key-value heads.
    """
    match row.style:
        case "experts":
            return "experts"
        case "row":
            return "columns"
        case "norm" | "whole":
            return "whole_partial" if sequence_parallel else "whole"
        case "router" | "head_norm":
            return "whole_partial" if row.trains else "whole"
        case "kv_column" | "kv_column_norm":
            return "rows" if shape.n_kv_heads % tp == 0 else "whole_partial"
        case _:
            return "rows"


def sharded_shape(row: Row, cut: Cut, mesh: MeshTable) -> tuple[list[int], int]:
    """Return what the first rank of tp and ep holds of a parameter, and the dim that FSDP shards.

    Args:
        row: the row of the parameter.
        cut: how tp or ep cuts it, as ``cut_of`` returns.
        mesh: the sizes of the axes.
    """
    size, dim = list(row.shape), 0
    match cut:
        case "rows":
            # A vocabulary that tp cuts unevenly is sharded by columns.
            dim = 1 if size[0] % mesh.tp and len(size) > 1 else 0
            size[0] = -(-size[0] // mesh.tp)
        case "columns":
            size[1] //= mesh.tp
        case "experts":
            dim, size[0] = 1, size[0] // mesh.ep
    return size, dim


class _Parameter(NamedTuple):
    """One parameter of a unit.

    Attributes:
        row: its row in the model's table.
        cut: what tensor parallelism does with it.
        is_frozen: whether ``optim.train`` leaves it out, so that it has no gradient.
    """

    row: Row
    cut: Cut
    is_frozen: bool


class _Unit(NamedTuple):
    """A unit of FSDP: the parameters that it gathers and reduces at once.

    ``drops`` says whether zero = 3 drops them after forward, and ``backward_reads`` whether
    backward needs them (``parallel.data.fsdp.apply``).
    """

    name: str
    parameters: list[_Parameter]
    drops: bool
    backward_reads: bool = True


class _Gathers(NamedTuple):
    """How often a unit is gathered in a step."""

    forward: int
    backward: int


class _RankTraffic:
    """The traffic of one pipeline rank."""

    def __init__(self, recipe: Recipe, pp_rank: int) -> None:
        self.recipe, self.pp_rank = recipe, pp_rank
        self.mesh, self.parallel = recipe.mesh, recipe.parallel
        self.shape, self.table = recipe.model, recipe.parameters
        held = stages_by_rank(recipe)
        layers = stage_layers(recipe)
        self.stages = [layers[stage] for stage in held[pp_rank]]
        self.n_stages = len(layers)
        self.rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}

        self.m = recipe.micro_batches
        self.cells = recipe_actions(self.mesh.pp, self.parallel, self.m)[pp_rank]
        self.e = DTYPE_BYTES[recipe.precision.computes_in]
        self.p = DTYPE_BYTES[recipe.precision.params]
        self.g = DTYPE_BYTES[recipe.precision.reduces_in]
        self.w = max(4, self.e)
        # Tokens of a micro-batch on the ranks of one tp group together.
        self.tokens = recipe.data.micro_batch * (recipe.data.seq_len // self.mesh.cp)
        self.checkpointing = recipe.memory.checkpointing
        self._flows: list[Flow] = []

    def flows(self) -> list[Flow]:
        for stage in self.stages:
            self._tensor(stage)
            self._context(stage)
            self._experts(stage)
            self._pipeline(stage)
            self._data(stage)
        self._partial_gradients()
        self._ties()
        self._matrices()
        self._world()
        return self._flows

    def _add(
        self,
        axis: Axis,
        operation: Operation,
        phase: Phase,
        purpose: str,
        count: int,
        bytes_of_one: float,
        group_size: int,
        kept_bytes: int | None = None,
        receiver: int | None = None,
    ) -> None:
        if count and group_size > 1:
            self._flows.append(
                Flow(
                    axis,
                    operation,
                    phase,
                    purpose,
                    count,
                    payload_bytes=round(count * bytes_of_one),
                    group_size=group_size,
                    kept_bytes=kept_bytes,
                    receiver=receiver,
                )
            )

    def _add_message(
        self, phase: Phase, purpose: str, count: int, bytes_of_one: float, receiver: int
    ) -> None:
        """Add messages to the rank of another pipeline rank with the same other coordinates."""
        self._add("pp", "send", phase, purpose, count, bytes_of_one, 2, receiver=receiver)

    # --- tp ---

    def _tensor(self, stage: StageLayers) -> None:
        """Collectives of ``parallel.tensor``: of activations, of the loss, of partial gradients.

        With sequence parallelism, attention and feed-forward each gather their input and
        reduce-scatter their output (B T/cp C e bytes); latent attention gathers latents, of other
        widths than C; backward has the transposes. A layer of
        experts has none, but its shared expert does. Without sequence parallelism, each output is
        all-reduced in forward, and each input's gradient in backward. A norm over all heads
        all-reduces a number of each token (B T/cp w bytes), and its gradient.

        A checkpointed block runs its forward again, up to the last tensor that backward needs. The
        collective of its last output comes after that, and is not repeated.
        """
        tp = self.mesh.tp
        if tp == 1:
            return
        blocks = self.table.blocks
        units: list[Sequence[Row]] = [blocks[layer] for layer in stage.blocks]
        units += [self.table.first] * stage.has_first
        if stage.has_last:
            last = self.table.last
            units.append([row for row in last if row.style != "embedding"])
            # Each depth of multi-token prediction reads the embedding, and has a loss of its own.
            of_depth = [row for row in last if row.style in ("embedding", "head")]
            units += [of_depth] * self.shape.mtp_layers
        recomputed = [blocks[layer] for layer in self._recomputed(stage)]
        gathers, gathers_again = (
            sum(map(_gathers, rows_of_units), Counter[int]())
            for rows_of_units in (units, recomputed)
        )
        width = self.shape.dim
        sums = Counter({width: sum(map(_sums, units))})
        sums_again = Counter(
            {width: sum(_sums([row for row in rows if not row.is_unread]) for rows in recomputed)}
        )

        def add(operation: Operation, phase: Phase, purpose: str, calls: Counter[int]) -> None:
            for width, count in calls.items():
                one_bytes = self.tokens * width * self.e
                self._add("tp", operation, phase, purpose, count * self.m, one_bytes, tp)

        if self.parallel.sequence_parallel:
            add("all_gather", "forward", "activations", gathers)
            add("reduce_scatter", "forward", "activations", sums)
            add("reduce_scatter", "backward", "gradients of activations", gathers)
            add("all_gather", "backward", "gradients of activations", sums)
            add("all_gather", "backward", "recomputed activations", gathers_again)
            add("reduce_scatter", "backward", "recomputed activations", sums_again)
        else:
            add("all_reduce", "forward", "activations", sums)
            add("all_reduce", "backward", "gradients of activations", gathers)
            add("all_reduce", "backward", "recomputed activations", sums_again)
        norms, norms_again = sum(map(_wide_norms, units)), sum(map(_wide_norms, recomputed))
        norm_flows: tuple[tuple[Phase, str, int], ...] = (
            ("forward", "means of norms", norms),
            ("backward", "gradients of means of norms", norms),
            ("backward", "recomputed means of norms", norms_again),
        )
        for phase, purpose, calls in norm_flows:
            numbers_bytes = self.tokens * self.w
            self._add("tp", "all_reduce", phase, purpose, calls * self.m, numbers_bytes, tp)
        if stage.has_last:
            self._loss()

    def _recomputed(self, stage: StageLayers) -> list[int]:
        """Return the blocks of a stage that backward computes again, in full or in part."""
        return [
            layer
            for place, layer in enumerate(stage.blocks)
            if self.checkpointing.mode_of(place, stage.stage) != "none"
        ]

    def _fully_recomputed(self, stage: StageLayers) -> list[int]:
        return self._recomputed(stage) if self.checkpointing.mode == "full" else []

    def _loss(self) -> None:
        """Collectives of ``tensor.vocab.cross_entropy``, or of gathered logits.

        With several chunks, backward computes each chunk's logits and loss again, unless forward
        has computed their gradients.
        """
        tp, chunks = self.mesh.tp, self.recipe.memory.loss_chunks
        losses = (1 + self.shape.mtp_layers) * self.m
        chunk_tokens = -(-self.tokens // chunks)
        parts = -(-self.tokens // chunk_tokens)
        repeats = chunks > 1 and not keeps_gradients_of_loss(self.mesh.pp, self.parallel, self.m)
        phases: list[Phase] = ["forward", "backward"] if repeats else ["forward"]
        for phase in phases:
            if self.parallel.loss_parallel:
                for purpose, numbers in (("maxima of logits", 1), ("sums of the softmax", 2)):
                    one_bytes = self.tokens * numbers * self.w / parts
                    self._add("tp", "all_reduce", phase, purpose, parts * losses, one_bytes, tp)
            else:
                columns = -(-self.shape.vocab // tp) * tp
                one_bytes = self.tokens * columns * self.e / parts
                self._add("tp", "all_gather", phase, "logits", parts * losses, one_bytes, tp)

    def _partial_gradients(self) -> None:
        """One all-reduce a step of gradients that are parts of a sum over tp, after FSDP's.

        They are those of parameters that every tp rank holds whole: norms under sequence
        parallelism, routers, head norms, and key-value projections with fewer heads than ranks.
        """
        elements = 0
        for stage in self.stages:
            for unit in self._units(stage):
                for parameter in unit.parameters:
                    if parameter.cut == "whole_partial" and not parameter.is_frozen:
                        shards, _ = self._shard_sizes(parameter)
                        elements += self._gathered_elements(parameter, shards) // shards
        if elements:
            words = "gradients of uncut parameters"
            self._add("tp", "all_reduce", "step", words, 1, elements * self.p, self.mesh.tp)

    # --- cp ---

    def _context(self, stage: StageLayers) -> None:
        """Messages of ``parallel.context``, for every block.

        KV is the size of a rank's keys and values, Q that of its queries, dKV that of the gradients
        in the wide dtype. Selective checkpointing keeps what attention returns; full checkpointing
        sends the messages of forward again. Latents take the place of KV, if they are sent.
        """
        cp, tp, shape = self.mesh.cp, self.mesh.tp, self.shape
        if cp == 1:
            return
        kv_heads = shape.n_kv_heads // tp if shape.n_kv_heads % tp == 0 else 1
        elements_of_head = self.tokens * shape.head_width
        kv_elements = 2 * kv_heads * elements_of_head
        q_elements = shape.n_heads // tp * elements_of_head
        content = "keys and values"
        if self.recipe.sends_latents:
            kv_elements, content = self.tokens * shape.latent_width, "latents"
        calls = len(stage.blocks) * self.m
        calls_again = len(self._fully_recomputed(stage)) * self.m
        # The purpose of a flow, with its calls.
        own: tuple[Phase, str, int] = ("backward", content, calls)
        forwards: list[tuple[Phase, str, int]] = [
            ("forward", content, calls),
            ("backward", f"recomputed {content}", calls_again),
        ]

        match self.parallel.cp_method:
            case "ring":
                for phase, purpose, count in (*forwards, own):
                    self._add(
                        "cp", "send", phase, purpose, count * (cp - 1), kv_elements * self.e, 2
                    )
                dkv_bytes, purpose = kv_elements * self.w, f"gradients of {content}"
                self._add("cp", "send", "backward", purpose, calls * (cp - 1), dkv_bytes, 2)
            case "allgather":
                gathered_bytes = cp * kv_elements * self.e
                for phase, purpose, count in (*forwards, own):
                    self._add("cp", "all_gather", phase, purpose, count, gathered_bytes, cp)
                dkv_bytes, purpose = cp * kv_elements * self.w, f"gradients of {content}"
                self._add("cp", "reduce_scatter", "backward", purpose, calls, dkv_bytes, cp)
            case "ulysses":
                for phase, purpose, count in (*forwards, ("backward", "gradients", calls)):
                    words = purpose.replace("keys and values", "queries, keys and values")
                    qkv_bytes = (q_elements + kv_elements) * self.e
                    self._add("cp", "all_to_all", phase, words, count, qkv_bytes, cp)
                    words = purpose.replace("keys and values", "outputs")
                    self._add("cp", "all_to_all", phase, words, count, q_elements * self.e, cp)

    # --- ep ---

    def _experts(self, stage: StageLayers) -> None:
        """All-to-alls of ``parallel.expert.dispatch``, with tokens spread evenly over experts.

        A rank's tokens go to K experts each, which is B T/(cp tp) K C e bytes, and come back. The
        all-reduce of the balance loss counts the experts of each sequence. With packed documents, a
        row has room for 16 of them (``models.layers.moe``), or a higher power if it holds more.
        """
        layers = [layer for layer in stage.blocks if self._has_experts(layer)]
        if not layers:
            return
        shape, mesh, packing = self.shape, self.mesh, self.recipe.data.packing
        calls = len(layers) * self.m
        rows_bytes = rows_for_experts(self.recipe) * shape.dim * self.e
        calls_again = self.m * sum(map(self._has_experts, self._fully_recomputed(stage)))
        forwards: list[tuple[Phase, str, int]] = [
            ("forward", "", calls),
            ("backward", "recomputed ", calls_again),
        ]
        # A block that is computed again has these.
        counts_bytes = shape.experts * _COUNT_BYTES
        self._add("ep", "all_to_all", "forward", "counts", calls, counts_bytes, mesh.ep)
        for phase, words, count in forwards:
            for purpose in ("tokens for experts", "outputs of experts"):
                self._add("ep", "all_to_all", phase, words + purpose, count, rows_bytes, mesh.ep)
            if getattr(shape, "balance_loss", 0.0):
                sequences = self.recipe.data.micro_batch * (1 if packing == "none" else 16)
                sums_bytes = sequences * shape.experts * _COUNT_BYTES
                purpose, size = f"{words}counts of sequences", mesh.cp * mesh.tp
                self._add("sequence", "all_reduce", phase, purpose, count, sums_bytes, size)
        for purpose in ("gradients of outputs", "gradients of tokens"):
            self._add("ep", "all_to_all", "backward", purpose, calls, rows_bytes, mesh.ep)

    # --- pp ---

    def _pipeline(self, stage: StageLayers) -> None:
        """Sends of ``parallel.pipeline.runtime``: the residual stream on, its gradient back.

        A message is this rank's shard of one micro-batch (``stage_cut.stage_activation``). A stage
        on the same rank gets it without a message.
        """
        cuts = self.mesh.tp if self.parallel.sequence_parallel else 1
        message_bytes = self.tokens // cuts * self.shape.dim * self.e
        neighbours: tuple[tuple[int, Phase, str], ...] = (
            (stage.stage + 1, "forward", "activations"),
            (stage.stage - 1, "backward", "gradients of activations"),
        )
        for neighbour, phase, purpose in neighbours:
            if 0 <= neighbour < self.n_stages and self.rank_of[neighbour] != self.pp_rank:
                receiver = self.rank_of[neighbour]
                self._add_message(phase, purpose, self.m, message_bytes, receiver)

    def _ties(self) -> None:
        """Sends of ``parallel.pipeline.ties``: a tied embedding on, and its gradient back."""
        first_rank, last_rank = self.rank_of[0], self.rank_of[self.n_stages - 1]
        tied = {row.tied_to for row in self.table.last if row.tied_to}
        if not tied or first_rank == last_rank:
            return
        first = self._of_unit("first", self.table.first)
        (embedding,) = (p for p in first if f"first.{p.row.name}" in tied)
        ranks = self._shard_sizes(embedding)[0] if self._has_fsdp() else 1
        shard_bytes = self._gathered_elements(embedding, ranks) // ranks * self.p
        for stage in self.stages:
            if stage.has_first:
                self._add_message("step", "tied embedding", 1, shard_bytes, last_rank)
            if stage.has_last:
                self._add_message("step", "gradient of its copy", 1, shard_bytes, first_rank)

    # --- dp ---

    def _data(self, stage: StageLayers) -> None:
        """Collectives of FSDP (``parallel.data.fsdp``): a gather or a reduction for each unit.

        Parameters are gathered in the dtype of computation, and gradients reduced in that of the
        parameters. If they are sent narrower, an all-to-all has the place of the reduce-scatter
        (``parallel.data.reduce_scatter``). Shards are padded to equal sizes. Experts have
        collectives of their own, unless their shards lie on the same ranks.
        """
        if not self._has_fsdp():
            return
        for unit in self._units(stage):
            gathers = self._gathers(stage, unit)
            dense = [p for p in unit.parameters if p.row.trains and p.cut != "experts"]
            experts = [p for p in unit.parameters if p.cut == "experts"]
            shares_ranks = self.mesh.ep == self.mesh.tp == 1
            for parameters in [[*dense, *experts]] if shares_ranks else [dense, experts]:
                if parameters:
                    self._unit_flows(parameters, gathers)

    def _unit_flows(self, parameters: list[_Parameter], gathers: _Gathers) -> None:
        of_experts = parameters[0].cut == "experts"
        shards, replicas = self._shard_sizes(parameters[0])
        elements = sum(self._gathered_elements(parameter, shards) for parameter in parameters)
        words = "experts" if of_experts else "parameters"
        shard_axis: Axis = "efsdp" if of_experts else "fsdp"
        replica_axis: Axis = "dp_replicate"
        if self.parallel.zero == 0:
            replica_axis = "expert_replicas" if of_experts else "replicas"

        phases: tuple[tuple[Phase, int], ...] = (
            ("forward", gathers.forward),
            ("backward", gathers.backward),
        )
        for phase, count in phases:
            self._add(shard_axis, "all_gather", phase, words, count, elements * self.e, shards)
        trained = [parameter for parameter in parameters if not parameter.is_frozen]
        if not trained:
            return
        elements = sum(self._gathered_elements(parameter, shards) for parameter in trained)
        count, words = self._reductions(), f"gradients of {words}"
        operation: Operation = "reduce_scatter" if self.g == self.p else "all_to_all"
        self._add(shard_axis, operation, "backward", words, count, elements * self.g, shards)
        shard_bytes = elements // shards * self.p
        self._add(replica_axis, "all_reduce", "backward", words, 1, shard_bytes, replicas)

    def _matrices(self) -> None:
        """Two all-to-alls a round of ``parallel.matrices``, if the optimizer works on matrices.

        They bring the momentum of each matrix to its owner, and the result to all that hold parts
        of it. The payload is what the first rank of the stage sends.
        """
        n_ranks = self.mesh.world_size // self.mesh.pp
        element_bytes = DTYPE_BYTES[self.recipe.optim.newton_schulz_dtype]
        for units in self.rounds_of_matrices():
            to_owners = [
                (prod(box.shape), unit.owner)
                for unit in units
                for rank, box in unit.senders()
                if rank == 0
            ]
            of_results = [
                [(prod(part.box.shape), part.rank) for part in message if part.unit.owner == 0]
                for message in messages_of_results(units, n_ranks)
            ]
            for purpose, parts in (
                ("momentum of matrices", to_owners),
                *(("updates of matrices", message) for message in of_results),
            ):
                payload_bytes = element_bytes * sum(elements for elements, _ in parts)
                kept_bytes = element_bytes * sum(elements for elements, rank in parts if rank == 0)
                self._add(
                    "stage", "all_to_all", "step", purpose, 1, payload_bytes, n_ranks, kept_bytes
                )

    def rounds_of_matrices(self) -> list[tuple[MatrixUnit, ...]]:
        names = matrices_of(architecture(self.shape.architecture), self.shape, self.recipe.optim)
        if not names:
            return []
        n_ranks = self.mesh.world_size // self.mesh.pp
        parameters = [
            CutParameter(parameter.row.shape, self._boxes(parameter, n_ranks))
            for name, parameter in self._parameters()
            if name in names and not parameter.is_frozen
        ]
        return rounds_of_units(parameters, n_ranks)

    def _parameters(self) -> Iterator[tuple[str, _Parameter]]:
        """Yield the parameters of this rank's stages by global name, in the model's own order."""
        for stage in self.stages:
            units = [(f"blocks.{layer}", self.table.blocks[layer]) for layer in stage.blocks]
            if stage.has_first:
                units.insert(0, ("first", self.table.first))
            if stage.has_last:
                units.append(("last", self.table.last))
            for unit, rows in units:
                for parameter in self._of_unit(unit, rows):
                    if not parameter.row.tied_to:
                        yield f"{unit}.{parameter.row.name}", parameter

    def _boxes(self, parameter: _Parameter, n_ranks: int) -> list[Box]:
        """Return the box of a parameter that each rank of a stage holds."""
        mesh, shape = self.mesh, parameter.row.shape
        shards, _ = self._shard_sizes(parameter)
        boxes = []
        for rank in range(n_ranks):
            ranges = [(0, length) for length in shape]
            if parameter.cut == "experts":
                ranges[0] = _part_of(ranges[0], rank % mesh.ep, mesh.ep)
                dim, shard = 1, rank // mesh.ep % mesh.efsdp
            else:
                dim, shard = 0, rank // mesh.tp % (mesh.dp_shard * mesh.cp)
                if parameter.cut == "rows":
                    # A vocabulary that tp cuts unevenly is sharded by columns.
                    dim = 1 if shape[0] % mesh.tp and len(shape) > 1 else 0
                    ranges[0] = _part_of(ranges[0], rank % mesh.tp, mesh.tp)
                elif parameter.cut == "columns":
                    ranges[1] = _part_of(ranges[1], rank % mesh.tp, mesh.tp)
            if shards > 1:
                ranges[dim] = _part_of(ranges[dim], shard, shards)
            offset = tuple(begin for begin, _ in ranges)
            boxes.append(Box(offset, tuple(end - begin for begin, end in ranges)))
        return boxes

    def _has_fsdp(self) -> bool:
        """As ``fsdp.meshes_of`` decides."""
        mesh = self.mesh
        shares_experts = self.shape.experts > 0 and mesh.dp_replicate * mesh.efsdp > 1
        return (
            mesh.dp_replicate * mesh.dp_shard * mesh.cp > 1
            or shares_experts
            or self.recipe.precision.compute is not None
            or self.recipe.memory.cpu_offload
        )

    def _shard_sizes(self, parameter: _Parameter) -> tuple[int, int]:
        """Return the ranks that shard a parameter, and those that replicate its shards."""
        mesh = self.mesh
        shards = mesh.efsdp if parameter.cut == "experts" else mesh.dp_shard * mesh.cp
        if self.parallel.zero == 0:
            return 1, mesh.dp_replicate * shards
        return shards, mesh.dp_replicate

    def _gathered_elements(self, parameter: _Parameter, shards: int) -> int:
        """Return the elements of a parameter after its gather, on one tp rank, with the padding."""
        size, dim = sharded_shape(parameter.row, parameter.cut, self.mesh)
        size[dim] = -(-size[dim] // shards) * shards
        return prod(size)

    def _reductions(self) -> int:
        """Return how often FSDP reduce-scatters gradients in a step: once under pp."""
        return self.m if self.mesh.pp == 1 and self.parallel.zero >= 2 else 1

    def _gathers(self, stage: StageLayers, unit: _Unit) -> _Gathers:
        drops = unit.drops and self.parallel.zero == 3
        if self.mesh.pp == 1:
            if self.parallel.zero < 3:
                return _Gathers(1, 0)
            return _Gathers(self.m, self.m if drops and unit.backward_reads else 0)
        has_windows = self.parallel.schedule not in ("GPipe", "1F1B")
        return _pipeline_gathers(self.cells, stage.stage, unit._replace(drops=drops), has_windows)

    def _units(self, stage: StageLayers) -> list[_Unit]:
        """Return the units of a stage: ``first``, those of blocks, ``last``; tied are one unit.

        A parameter with several names in ``last`` is one parameter.
        """
        table = self.table
        units = [
            _Unit(
                f"blocks {layers[0]} to {layers[-1]}",
                [
                    parameter
                    for layer in layers
                    for parameter in self._of_unit(f"blocks.{layer}", table.blocks[layer])
                ],
                drops=True,
            )
            for layers in units_of_blocks(
                stage.blocks,
                self.parallel.fsdp_blocks,
                alone=self.shape.mtp_layers if stage.has_last else 0,
            )
        ]
        first, last = self._of_unit("first", table.first), self._of_unit("last", table.last)
        untied = [parameter for parameter in last if not parameter.row.tied_to]
        tied = {parameter.row.tied_to: parameter for parameter in last if parameter.row.tied_to}
        if tied and stage.has_first and stage.has_last:
            # It is gathered once for both.
            return [*units, _Unit("stage", [*first, *untied], drops=False)]
        if stage.has_first:
            backward_reads = not table.first_only_looks_up
            units.insert(0, _Unit("first", first, drops=True, backward_reads=backward_reads))
        if stage.has_last:
            units.append(_Unit("last", [*untied, *tied.values()], drops=False))
        return units

    def _of_unit(self, unit: str, rows: Sequence[Row]) -> list[_Parameter]:
        """Return the parameters of a block, of ``first`` or of ``last``."""
        tp, sequence_parallel = self.mesh.tp, self.parallel.sequence_parallel
        return [
            _Parameter(
                row,
                cut_of(row, self.shape, tp=tp, sequence_parallel=sequence_parallel),
                is_frozen=not is_trained(self.recipe.optim, row.tied_to or f"{unit}.{row.name}"),
            )
            for row in rows
        ]

    # --- the world ---

    def _world(self) -> None:
        """All-reduces over all ranks, in float64.

        The valid tokens; the loss, the norm, the flags of ``training.loop`` and the norms by part;
        and E + 5 numbers of each router (``expert.balance``). Each depth of multi-token prediction
        has valid tokens and a loss of its own.
        """
        size, depths = self.mesh.world_size, self.shape.mtp_layers
        of_step = 2 + N_FLAGS + _PARTS + depths
        for purpose, numbers in (("valid tokens", 1 + depths), ("loss, norms and flags", of_step)):
            self._add("world", "all_reduce", "step", purpose, 1, numbers * _COUNT_BYTES, size)
        routers = sum(map(self._has_experts, range(self.shape.all_layers)))
        if routers:
            numbers = routers * (self.shape.experts + 5)
            purpose = "loads of experts"
            self._add("world", "all_reduce", "step", purpose, 1, numbers * _COUNT_BYTES, size)

    def _has_experts(self, layer: int) -> bool:
        return any(row.style == "experts" for row in self.table.blocks[layer])


def _part_of(whole: tuple[int, int], index: int, parts: int) -> tuple[int, int]:
    """Return the begin and the end of one of equal parts, of which the last ones may be shorter."""
    begin, end = whole
    size = -(-(end - begin) // parts)
    first = min(end, begin + index * size)
    return first, min(end, first + size)


def _gathers(rows: Sequence[Row]) -> Counter[int]:
    """Return how often the forward of a unit gathers activations of each width over tp: once for
    each module of style "gather", and for the head.
    """
    widths = {
        row.gathers: row.gathered or row.shape[1]
        for row in rows
        if row.style in ("column", "kv_column") and row.is_matrix
    }
    widths |= {row.module: row.shape[1] for row in rows if row.style == "head"}
    return Counter(widths.values())


def _sums(rows: Sequence[Row]) -> int:
    """Return how often the forward of a unit sums activations over tp."""
    return len({row.module for row in rows if row.style in ("row", "embedding")})


def _wide_norms(rows: Sequence[Row]) -> int:
    """Return how many norms of a unit average over the heads of all tp ranks."""
    return sum(row.style in NORMS_OVER_HEADS for row in rows)


def _pipeline_gathers(
    cells: Sequence[Cell], stage: int, unit: _Unit, has_windows: bool
) -> _Gathers:
    """Count the gathers of a unit in a step of a pipeline.

    Parameters are gathered when a forward or a backward needs them. A backward keeps them; a
    forward drops them if ``unit.drops``.

    Args:
        cells: what the rank runs.
        stage: the stage of the unit.
        unit: the unit; ``drops`` says whether it drops its parameters after each forward.
        has_windows: whether torch's runtime gathers the next three stages ahead, and drops all
            others. Schedules with one stage on a rank have no such windows.
    """
    forward = backward = 0
    is_gathered = was_active = False
    for cell, window in zip(cells, active_stages(cells), strict=True):
        is_active = stage in window
        if has_windows and is_active and not was_active and not is_gathered:
            is_gathered = True
            forward += 1
        if has_windows and was_active and not is_active:
            is_gathered = False
        was_active = is_active
        for action in cell:
            if action.stage != stage or action.kind == "W":
                continue
            if action.kind != "F" and not unit.backward_reads:
                continue
            if not is_gathered:
                forward += action.kind == "F"
                backward += action.kind != "F"
                is_gathered = True
            if action.kind == "F" and unit.drops:
                is_gathered = False
    return _Gathers(forward, backward)
