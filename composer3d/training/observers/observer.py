"""The interface of what watches a training."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal, NamedTuple, TypeVar

from composer3d.data import Batch
from composer3d.facts.events import Kind
from composer3d.reliability.report import Report
from composer3d.training.step_values import StepValues

T = TypeVar("T", bound="Observer")

# The parts of a training that are watched. "gradients" is a part of a step.
Phase = Literal["data", "gradients", "validation", "checkpoint", "replicas"]


class StepResult(NamedTuple):
    """A step that has been done.

    Attributes:
        step: its number, counted from 1.
        batch: this rank's part of the global batch.
        values: the loss and the norm, the same on all ranks.
        lr: the learning rate.
    """

    step: int
    batch: Batch
    values: StepValues
    lr: float


class Observer:
    """Watches a training. It changes no number that the training computes.

    A subclass overrides the methods that it needs. Every rank has the same observers in the same
    order, so an observer may communicate in a method, if it does so on every rank.
    """

    def training(self) -> AbstractContextManager[None]:
        """Return the context of the whole training."""
        return nullcontext()

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return the context of step ``number``, counted from 1: data, gradients and update."""
        return nullcontext()

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Return the context of a part of the training."""
        return nullcontext()

    def wants_norm_by_part(self, number: int) -> bool:
        """Return whether step ``number`` must compute the norm of each part of the model."""
        return False

    def end_step(self, result: StepResult) -> None:
        """See a step that has been done."""

    def check_state(self, step: int) -> None:
        """See the weights and the optimizer's state after ``step`` steps."""

    def end_validation(self, step: int, loss: float) -> None:
        """See the validation loss after ``step`` steps, in nats per valid token."""

    def event(self, step: int, kind: Kind, text: str, *, seconds: float | None = None) -> None:
        """See what has happened to the run after ``step`` steps: the values of an ``Event``.

        A save in the background is told by its thread, and at no fixed moment: no communication.
        """

    def report(self, step: int, report: Report) -> None:
        """See what was found after ``step`` steps, on the rank that found it."""

    def close(self) -> None:
        """End. The training may have failed."""


class Observers(Observer):
    """All observers of a run as one: each call goes to all of them, in their order.

    The contexts of the first observer are the outer ones, and it is closed last.
    """

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Add the last observer."""
        self._observers.append(observer)

    def find(self, kind: type[T]) -> T | None:
        """Return the observer of a class, or None."""
        return next((observer for observer in self if isinstance(observer, kind)), None)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._observers)

    def training(self) -> AbstractContextManager[None]:
        return _nested(observer.training() for observer in self)

    def step(self, number: int) -> AbstractContextManager[None]:
        return _nested(observer.step(number) for observer in self)

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        return _nested(observer.phase(name) for observer in self)

    def wants_norm_by_part(self, number: int) -> bool:
        return any(observer.wants_norm_by_part(number) for observer in self)

    def end_step(self, result: StepResult) -> None:
        for observer in self:
            observer.end_step(result)

    def check_state(self, step: int) -> None:
        for observer in self:
            observer.check_state(step)

    def end_validation(self, step: int, loss: float) -> None:
        for observer in self:
            observer.end_validation(step, loss)

    def event(self, step: int, kind: Kind, text: str, *, seconds: float | None = None) -> None:
        for observer in self:
            observer.event(step, kind, text, seconds=seconds)

    def report(self, step: int, report: Report) -> None:
        for observer in self:
            observer.report(step, report)

    def close(self) -> None:
        for observer in reversed(self._observers):
            observer.close()


@contextmanager
def _nested(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
