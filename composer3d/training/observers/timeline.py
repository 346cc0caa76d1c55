"""Write the timeline of some steps: what each pipeline rank has run when (``facts.trace``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer3d.facts import trace
from composer3d.parallel import Stages
from composer3d.parallel.pipeline.runtime import Pipeline
from composer3d.recipe.schema import Recipe
from composer3d.runtime import log
from composer3d.runtime.files import append_whole
from composer3d.training.observers.observer import Observer, Phase


@dataclass(kw_only=True)
class TimelineWriter(Observer):
    """Traces the steps of a recipe's ``metrics.timeline_steps`` on this rank.

    Attributes:
        path: the file of this pipeline rank.
        first, last: the steps that are traced, counted from 1.
        pipeline: what runs this rank's stages.
        facts: the fields of ``trace.TraceHead`` that are the same for all steps.
    """

    path: Path
    first: int
    last: int
    pipeline: Pipeline
    facts: dict[str, Any]
    _step: int = field(default=0, init=False)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self._step = number
        yield

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Trace the gradients of the step if it is one of the traced steps.

        Collective over the pipeline of this rank. A file that cannot be written is reported, and
        the run goes on.
        """
        if name != "gradients" or not self.first <= self._step <= self.last:
            yield
            return
        with self.pipeline.record() as recording:
            yield
        clock = recording.clock
        head = trace.TraceHead(
            step=self._step,
            started_unix_s=clock.started_unix_s,
            clock_error_s=round(clock.error_s, 9),
            **self.facts,
        )
        try:
            append_whole(self.path, trace.lines(head, recording.events))
        except OSError as error:
            log.get().warning(f"the timeline of step {self._step} could not be written: {error}")


def make_timeline(recipe: Recipe, stages: Stages, folder: Path) -> TimelineWriter | None:
    """Return what traces the recipe's steps on this rank, or None if it traces none.

    One pipeline is traced: the one of the ranks that are the first on each other axis. Raises
    OSError if the folder for its files cannot be made.
    """
    mesh, steps = stages.mesh, recipe.metrics.timeline_steps
    is_first_pipeline = not any(at for axis, at in mesh.coords.items() if axis != "pp")
    if steps is None or not is_first_pipeline:
        return None
    if not isinstance(stages.executor, Pipeline):
        log.get().warning("metrics.timeline_steps: mesh.pp = 1, so there is no pipeline to trace")
        return None
    pp_rank = mesh.coords["pp"]
    path = trace.file_of(folder, pp_rank)
    path.parent.mkdir(exist_ok=True)
    return TimelineWriter(
        path=path,
        first=steps[0],
        last=steps[1],
        pipeline=stages.executor,
        facts={
            "pp_rank": pp_rank,
            "pp": mesh.sizes.pp,
            "schedule": recipe.parallel.schedule,
            "stages_per_rank": recipe.parallel.stages_per_rank,
            "micro_batches": recipe.micro_batches,
            "device": mesh.device.type,
        },
    )
