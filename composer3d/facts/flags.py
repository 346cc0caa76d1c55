"""The flags with which ranks agree on what the loop does after a step. No torch here."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from composer3d.facts.interrupts import STOP_SIGNALS


class StepFlags(NamedTuple):
    """Flags that a rank raises during a step, or those that any rank has raised.

    A signal may reach one rank only, the save of one rank may fail, and the clocks of ranks differ.
    But a save is collective, so all ranks must do the same. Each rank packs its own flags into
    numbers. They are summed over all ranks in one message with the loss, and every rank unpacks the
    same sums.

    Attributes:
        stop_signal: the number of the signal that asks to stop; 0 for none. If ranks got different
            ones, the first of ``STOP_SIGNALS`` among them counts.
        save_failed: whether the save in the background has failed.
        save_is_due_by_clock: whether a checkpoint is due by the clock.
    """

    stop_signal: int = 0
    save_failed: bool = False
    save_is_due_by_clock: bool = False

    def pack(self) -> list[float]:
        """Return as many numbers for each rank: a flag that is raised is 1."""
        signals = [float(number == self.stop_signal) for number in STOP_SIGNALS]
        return [*signals, float(self.save_failed), float(self.save_is_due_by_clock)]

    @classmethod
    def unpack(cls, numbers: Sequence[float]) -> Self:
        """Return the flags of all ranks from their packed numbers, summed or maximal."""
        *signals, save_failed, save_is_due_by_clock = numbers
        raised = [number for number, count in zip(STOP_SIGNALS, signals, strict=True) if count > 0]
        return cls(raised[0] if raised else 0, save_failed > 0, save_is_due_by_clock > 0)


N_FLAGS = len(StepFlags().pack())
