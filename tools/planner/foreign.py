"""Facts in which other programs differ from ours: as fields, which a published run sets."""

from dataclasses import dataclass, field
from functools import cache

from composer3d.facts.schedules import Cell
from composer3d.planner.pipeline import Compiled, compile_cells
from composer3d.planner.schedule import cells_of
from composer3d.planner.setup import Layout, Precision, Setup, Sizes, Software
from tools.planner.zero_bubble import zero_bubble_actions


@dataclass(frozen=True, kw_only=True)
class ForeignSizes(Sizes):
    """The shape of a decoder, whose feed-forward layers may have no gate.

    Published runs give sizes and no table of parameters: these are counted from the sizes.
    """

    attention_parameters: int = field(init=False)
    dense_parameters: int = field(init=False)
    embedding_parameters: int = field(init=False)
    head_parameters: int = field(init=False)
    expert_parameters: int = field(init=False)
    shared_parameters: int = field(init=False)

    def __post_init__(self) -> None:
        of_width = self.ffn_matrices * self.dim
        counts = {
            "attention_parameters": 2 * self.dim * (self.query_width + self.kv_width),
            "dense_parameters": of_width * self.ffn,
            "embedding_parameters": self.vocab * self.dim,
            "head_parameters": self.vocab * self.dim,
            "expert_parameters": of_width * self.expert_width * self.experts,
            "shared_parameters": self.experts * self.dim + of_width * self.shared_width,
        }
        for name, count in counts.items():
            object.__setattr__(self, name, count)  # the class is frozen


@dataclass(frozen=True, kw_only=True)
class ForeignLayout(Layout):
    """A layout with what only other programs have.

    Attributes:
        schedule: also ``ZeroBubble``, with one stage a rank.
        expert_tp: whether tp cuts each expert.
        in_flight: micro-batches that the first rank holds at once under ``ZeroBubble``, as a
            multiple of pp: 1 for the memory of 1F1B, 2 for twice as much.
    """

    expert_tp: bool = False
    in_flight: int = 1

    def cells(self, micro_batches: int) -> list[list[Cell]]:
        """Return the cells of each pipeline rank.

        Raises:
            PlanError: the schedule cannot run with these numbers.
        """
        if self.schedule == "ZeroBubble":
            return zero_bubble_actions(self.pp, micro_batches, self.in_flight)
        return cells_of(
            self.schedule, self.pp, self.stages_per_rank, micro_batches, self.schedule_csv
        )

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        return stage if self.schedule == "ZeroBubble" else super().rank_of(stage)

    def compiled(self, micro_batches: int) -> Compiled:
        """Compile the schedule for a number of micro-batches.

        Raises:
            PlanError: the schedule cannot run with these numbers.
        """
        if self.schedule == "ZeroBubble":
            return compiled_zero_bubble(self.pp, micro_batches, self.in_flight)
        return super().compiled(micro_batches)


@cache
def compiled_zero_bubble(pp: int, micro_batches: int, in_flight: int) -> Compiled:
    """Compile a zero-bubble schedule, once.

    No rank waits for the others between steps: gradients are checked after the optimizer's step,
    which is undone if need be (arXiv 2401.10241, section 4).
    """
    return compile_cells(zero_bubble_actions(pp, micro_batches, in_flight), ranks_wait=False)


@dataclass(frozen=True, kw_only=True)
class ForeignPrecision(Precision):
    """The widths of values, with a second copy of the gradients.

    Attributes:
        extra_gradients: bytes per parameter of that copy, such as 16-bit gradients beside a 32-bit
            sum.
    """

    extra_gradients: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ForeignSoftware(Software):
    """What the kernels and the runtime of another program can do.

    Attributes:
        loss_copies: the copies of the logits, in bytes per logit, that the loss holds at its peak.
        fuses_weight_gradients: whether the product that makes a weight's gradient adds to the sum.
        keeps_blank_gradients: whether autograd gets an empty tensor in place of a weight's
            gradient, which is in the sum already: one for each shape of weights, always kept.
        dropout: whether residual streams have dropout.
        step_copies: temporaries of the optimizer's step, in bytes per updated parameter.
        bucket_bytes: buffers in which gradients are copied for their reduction.
        overlaps_gradients: whether gradients are reduced during backward.
        overlaps_gathers: whether a sharded optimizer gathers parameters during the next forward.
        gathers_tensors: whether a sharded optimizer gathers tensor by tensor, not in large buckets.
        launches_synchronously: whether the host waits for every kernel.
        sends_tokens_once: whether a token travels once to each node with some of its experts.
        balances_routing: whether the router gives all experts equally many tokens.
        routes_to_neighbours: whether such a router gives a token neighbouring experts.
    """

    loss_copies: float = 12.0
    fuses_weight_gradients: bool = False
    keeps_blank_gradients: bool = False
    dropout: bool = False
    step_copies: float = 8.0
    bucket_bytes: float = 0.0
    overlaps_gradients: bool = True
    overlaps_gathers: bool = False
    gathers_tensors: bool = False
    launches_synchronously: bool = False
    sends_tokens_once: bool = False
    balances_routing: bool = False
    routes_to_neighbours: bool = False


@dataclass(frozen=True, kw_only=True)
class ForeignSetup(Setup):
    """A setup of another program.

    Attributes:
        rounds: how often a step runs its micro-batches: each time with a pipeline, gathers and
            reductions of its own, and with one step of the optimizer after them all.
    """

    layout: ForeignLayout
    precision: ForeignPrecision = field(default_factory=ForeignPrecision)
    software: ForeignSoftware = field(default_factory=ForeignSoftware)
    rounds: int = 1

    @property
    def step_tokens(self) -> int:
        """The tokens of a step, over all ranks."""
        return self.rounds * super().step_tokens
