"""The memory of every pipeline rank, in bytes by kind. No torch here.

``moments`` finds the peak; here is what no formula counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from composer3d.planner.constants import SHIPPED, Constants
from composer3d.planner.moments import Always, Moment, peak_moments
from composer3d.planner.setup import Setup

GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The bytes of a rank at its peak, by kind.

    Attributes:
        weights: the parameters that forward reads, or their shards.
        gradients: the sums over micro-batches, or their shards.
        optimizer: moments and master copy.
        gathered: blocks that FSDP has gathered, and their whole gradients.
        buffers: buckets of reductions, and the gathered input of a product under tp.
        activations: what backward needs, of all micro-batches in flight.
        logits: logits and their copies in the loss.
        step_copies: temporaries of the optimizer, if they exceed activations and logits.
        slack: what the allocator reserves and does not use; 0 on a CPU.
        context: what torch's allocator does not see; 0 on a CPU.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    step_copies: float = 0.0
    slack: float = 0.0
    context: float = 0.0

    @property
    def allocated_bytes(self) -> float:
        """What a dry run can count: all but the slack and the context."""
        return self.device_bytes - self.slack - self.context

    @property
    def reserved_bytes(self) -> float:
        """What torch's allocator reserves: all but the context."""
        return self.device_bytes - self.context

    @property
    def device_bytes(self) -> float:
        """All bytes of the rank on its device."""
        return sum(getattr(self, entry.name) for entry in fields(self))


def predict_memory(setup: Setup, constants: Constants = SHIPPED) -> list[RankMemory]:
    """Predict the peak of each pipeline rank.

    Raises:
        PlanError: the schedule cannot run with these numbers.
    """
    return list(memory_of_ranks(setup, constants))


def memory_of_ranks(setup: Setup, constants: Constants = SHIPPED) -> Iterator[RankMemory]:
    """Yield the peak of one pipeline rank after the other, as ``predict_memory`` returns them.

    Whoever asks whether all ranks fit may stop at the first one that does not.
    """
    for always, moment in peak_moments(setup):
        yield _rank(setup, constants, always, moment)


def peak(setup: Setup, constants: Constants = SHIPPED) -> RankMemory:
    """Return the pipeline rank that needs most."""
    return max(predict_memory(setup, constants), key=lambda rank: rank.device_bytes)


def _rank(setup: Setup, constants: Constants, always: Always, moment: Moment) -> RankMemory:
    known = RankMemory(
        weights=always.weights,
        gradients=moment.gradients,
        optimizer=always.optimizer,
        gathered=moment.gathered,
        buffers=moment.buffers,
        activations=moment.activations,
        logits=moment.logits,
    )
    if setup.machine.hardware.generation == "cpu":
        return known  # there is neither CUDA's context nor its allocator
    return with_unseen(known, constants)


def with_unseen(used: RankMemory, constants: Constants) -> RankMemory:
    """Add what no formula counts: the slack, and what torch's allocator does not see."""
    return replace(
        used,
        slack=(constants.slack_share - 1) * used.allocated_bytes,
        context=constants.context_gib * GIB,
    )
