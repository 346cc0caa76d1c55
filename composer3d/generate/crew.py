"""The model of a harness: what rank 0 asks, all ranks of tp compute."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from composer3d.facts.errors import CheckpointError
from composer3d.generate.generator import Completion, Generator, WantsStop
from composer3d.generate.sampling import Sampling
from composer3d.generate.scores import Passage, Score, score
from composer3d.runtime.process_group import broadcast_object


class _Job(NamedTuple):
    """What all ranks are to compute next.

    Attributes:
        method: the name of a method of ``Crew``.
        arguments: its arguments but the callbacks, which only rank 0 has.
    """

    method: str
    arguments: dict[str, Any]


class Crew:
    """A model that scores passages and goes on with prompts, in one process or over tp.

    Over tp, rank 0 calls ``score`` and ``generate``, and at last ``dismiss``, while the other ranks
    are in ``follow``. So only rank 0 needs tasks, their data and a tokenizer, and the ranks cannot
    disagree on them. Each call is a broadcast of its arguments over all ranks, and then what
    ``scores.score`` or ``Generator.generate`` says.

    Args:
        generator: this rank's part of the model.
        device: its device.
        batch: the most passages or prompts that are read together.
        has_others: whether other ranks follow.
    """

    def __init__(
        self, generator: Generator, *, device: torch.device, batch: int, has_others: bool = False
    ) -> None:
        self._generator, self._device, self._batch = generator, device, batch
        self._has_others = has_others

    def score(
        self, passages: Sequence[Passage], *, on_done: Callable[[int], None] | None = None
    ) -> list[Score]:
        """Score passages, as ``scores.score`` does. For rank 0."""
        return self._run_on_all("_score", {"passages": passages}, on_done=on_done)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling,
        wants_stop: WantsStop | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Go on with prompts, as ``Generator.generate`` does. For rank 0."""
        arguments = {"prompts": prompts, "max_tokens": max_tokens, "sampling": sampling}
        return self._run_on_all("_generate", arguments, wants_stop=wants_stop, on_done=on_done)

    def dismiss(self) -> None:
        """Let the other ranks return from ``follow``. For rank 0."""
        if self._has_others:
            broadcast_object(None)

    def follow(self) -> None:
        """Compute what rank 0 asks, until it dismisses this rank. For all other ranks."""
        while (job := broadcast_object(None)) is not None:
            try:
                getattr(self, job.method)(**job.arguments)
            except CheckpointError:
                # All ranks have the same logits, so rank 0 has this error too, and reports it.
                continue

    def _run_on_all(self, method: str, arguments: dict[str, Any], **callbacks: Any) -> Any:
        if self._has_others:
            broadcast_object(_Job(method, arguments))
        return getattr(self, method)(**arguments, **callbacks)

    def _score(
        self, passages: Sequence[Passage], on_done: Callable[[int], None] | None = None
    ) -> list[Score]:
        return score(
            self._generator, passages, device=self._device, batch=self._batch, on_done=on_done
        )

    def _generate(self, prompts: Sequence[Sequence[int]], **arguments: Any) -> list[Completion]:
        return self._generator.generate(prompts, batch=self._batch, **arguments)
