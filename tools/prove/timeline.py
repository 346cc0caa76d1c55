"""Compare the bubbles that real pipelines leave with those that the simulation predicts.

Processes train a small model on the CPU with gloo, one for each rank of the pipeline. Each stage
sleeps in its forward, and twice in its backward: once for the gradients of inputs and once for
those of weights. Sleeping needs no core, so that the times of stages are known on any machine. The
steps are traced as in a training. Of each pipeline, the step that took least is compared: other
programs on the machine can only make a step longer.

    bash tools/prove/run timeline            # all schedules on 4 ranks, about seven minutes
    bash tools/prove/run timeline 1F1B       # one of them
    bash tools/prove/run timeline --cuts     # stages of equal time, about five minutes

With ``--cuts``, the pipelines are those of two recipes, twice: cut by parameters, and as
``composer3d plan`` cuts them by predicted time. Their stages sleep as long as the planner says that
they take on an H100, on another scale.

The columns are shares of the step in which ranks do not compute. "closed form" is that of the
papers. "simulated" is for the nominal times. "measured" is that of the run. "replayed" simulates
the run's own mean times, without messages and without what makes actions uneven. "expected" is the
length of the simulated step.

Exit status: 0 if each measured share is within 5 points of the simulated one, and each cut by time
makes the step shorter by what was simulated, within 2 points; 1 if one does not.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer3d.draw.measured import measured_timeline, replayed_timeline
from composer3d.facts import trace
from composer3d.facts.hardware import by_name
from composer3d.facts.schedules import SCHEDULES
from composer3d.planner.layouts import Choices
from composer3d.planner.levers import Levers, Timed, main_cut
from composer3d.planner.predict import predict_speed
from composer3d.planner.schedule import recipe_actions
from composer3d.planner.search import Device
from composer3d.planner.setup import Setup
from composer3d.planner.simulate import StageTimes, bubble, closed_form, simulate
from composer3d.planner.time import pipeline_times
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import variant
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from composer3d.training.observers.timeline import make_timeline
from composer3d.training.step import compute_gradients
from composer3d.verify.data import random_batch
from composer3d.verify.worker import local_batch
from tools.prove.paths import ROOT
from tools.prove.proof import make_parser

RANKS, LAYERS, MICRO_BATCHES = 4, 8, 8
SLEEP_S = 0.2  # of one layer and micro-batch, for each of the three parts
STEPS = 4
BOUND = 0.05  # of the step
GAIN_BOUND = 0.02  # of the step of the cut by parameters
LIMIT_S = 600.0
BUILT_IN = tuple(name for name in SCHEDULES if name != "csv")

# Those whose step a cut by time makes shorter by more than noise.
CUT_RECIPES = ("deepseek-v3-1024", "qwen3-30b-a3b-16-ep-pp")
CUT_FORWARD_S = 0.15  # of the stage whose forward takes longest

RECIPE = """\
[run]
device = "cpu"
[model]
preset = "debug-tiny"
n_layers = {layers}
[mesh]
pp = {ranks}
dp_shard = 1
[parallel]
schedule = "{schedule}"
virtual_stages = {per_rank}
stages = {cut}
[data]
source = "python"
seq_len = 8
global_batch = {micro_batches}
[metrics]
timeline_steps = [2, {steps}]
"""


class Pipeline(NamedTuple):
    """A pipeline whose stages sleep.

    Attributes:
        ranks: its ranks.
        schedule: the name of its schedule.
        cut: the layers of each stage.
        times: how long each stage sleeps.
        micro_batches: those of a step.
    """

    ranks: int
    schedule: str
    cut: tuple[int, ...]
    times: tuple[StageTimes, ...]
    micro_batches: int

    @property
    def per_rank(self) -> int:
        return len(self.cut) // self.ranks

    def recipe(self, file: Path, steps: int) -> Recipe:
        """Write a recipe that trains a small model so, and return it."""
        values = {**self._asdict(), "cut": list(self.cut), "per_rank": self.per_rank}
        file.write_text(RECIPE.format(**values, layers=sum(self.cut), steps=steps))
        return load(str(file), []).recipe


class Shares(NamedTuple):
    """The shares of a step in which ranks do not compute.

    Attributes:
        closed_form: of the papers; None: there is none.
        simulated: with the nominal times.
        measured: of the shortest traced step.
        replayed: simulated with the mean times of that step.
        step_s: the length of that step.
        expected_s: the length of the simulated one.
    """

    closed_form: float | None
    simulated: float
    measured: float
    replayed: float
    step_s: float
    expected_s: float

    @property
    def is_close(self) -> bool:
        return abs(self.measured - self.simulated) <= BOUND


def main(arguments: list[str]) -> int:
    parser = make_parser("timeline", __doc__)
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", default=BUILT_IN)
    parser.add_argument("--cuts", action="store_true", help="compare stages cut by time instead")
    options = parser.parse_args(arguments)
    if options.cuts and options.schedules != BUILT_IN:
        parser.error("--cuts compares the pipelines of recipes: name no schedule")
    unknown = set(options.schedules) - set(BUILT_IN)
    if unknown:
        parser.error(f"unknown schedule {min(unknown)}; use one of {', '.join(BUILT_IN)}")
    print(f"{'':36} closed form  simulated  measured  replayed  expected      step")
    with Pool() as pool:

        def compare_and_print(name: str, pipeline: Pipeline) -> Shares:
            return _print(name, compare(pool, pipeline))

        if options.cuts:
            found = [compare_cuts(name, compare_and_print) for name in CUT_RECIPES]
        else:
            schedules = {name: of_equal_layers(name) for name in options.schedules}
            found = [compare_and_print(*one).is_close for one in schedules.items()]
    return 0 if all(found) else 1


def _print(name: str, shares: Shares) -> Shares:
    form = "" if shares.closed_form is None else f"{shares.closed_form:.1%}"
    verdict = "" if shares.is_close else f"  more than {100 * BOUND:.0f} points away"
    print(
        f"{name:36} {form:>11} {shares.simulated:10.1%} {shares.measured:9.1%} "
        f"{shares.replayed:9.1%} {shares.expected_s:7.2f} s {shares.step_s:7.2f} s{verdict}",
        flush=True,
    )
    return shares


def of_equal_layers(schedule: str, sleep_s: float = SLEEP_S) -> Pipeline:
    """Return a pipeline whose layers sleep for ``sleep_s`` in each part of their work."""
    n_stages = RANKS * SCHEDULES[schedule].stages.default_per_rank
    layers = LAYERS // n_stages
    part_s = layers * sleep_s
    times = (_times(part_s, 2 * part_s),) * n_stages
    return Pipeline(RANKS, schedule, (layers,) * n_stages, times, MICRO_BATCHES)


def of_cuts(recipe: Recipe, forward_s: float = CUT_FORWARD_S) -> tuple[Pipeline, Pipeline]:
    """Return the pipeline of a recipe, as it is cut, and as a plan cuts it by predicted time.

    The longest forward of a stage of the first one takes ``forward_s``.
    """
    h100 = by_name("H100")
    assert h100 is not None
    device = Device(hardware=h100)
    setup = device.setup(recipe)
    levers = Levers(device.setup, 1, Choices())
    (faster,) = levers.with_other_cuts([Timed(recipe, setup, predict_speed(setup))])
    scale = forward_s / max(stage.forward_s for stage in pipeline_times(setup).stages)

    def pipeline(setup: Setup) -> Pipeline:
        stages = pipeline_times(setup).stages
        return Pipeline(
            recipe.mesh.pp,
            recipe.parallel.schedule,
            main_cut(setup),
            tuple(_times(scale * one.forward_s, scale * one.backward_s) for one in stages),
            min(recipe.micro_batches, max(2 * recipe.mesh.pp, 8)),
        )

    return pipeline(setup), pipeline(faster.setup)


def compare_cuts(name: str, compare_and_print: Callable[[str, Pipeline], Shares]) -> bool:
    """Compare the pipelines of a recipe, and what the second one saves of a step."""
    recipe = load(ROOT / "recipes" / f"{name}.toml", check_files=False).recipe
    recipe = variant(recipe, {"parallel.stages": None})
    own, by_time = map(compare_and_print, (name, "  cut by time"), of_cuts(recipe))
    simulated = by_time.expected_s / own.expected_s - 1
    measured = by_time.step_s / own.step_s - 1
    is_right = abs(measured - simulated) <= GAIN_BOUND
    verdict = "" if is_right else f", more than {100 * GAIN_BOUND:.0f} points away"
    print(f"  a step: simulated {simulated:+.1%}, measured {measured:+.1%}{verdict}", flush=True)
    return own.is_close and by_time.is_close and is_right


def _times(forward_s: float, backward_s: float) -> StageTimes:
    return StageTimes(forward_s, backward_s, backward_s / 2, backward_s / 2)


def compare(pool: Pool, pipeline: Pipeline, steps: int = STEPS) -> Shares:
    """Train some steps, of which all but the first are traced, and compare the bubbles."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = pipeline.recipe(Path(folder, "recipe.toml"), steps)
        arguments = {"recipe": recipe, "folder": folder, "times": pipeline.times, "steps": steps}
        pool.run(train_asleep, arguments, world_size=pipeline.ranks, limit_s=LIMIT_S)
        traced = [trace.read(Path(folder), step) for step in range(2, steps + 1)]

    shortest = min(traced, key=lambda step: measured_timeline(step).end_s)
    cells = recipe_actions(pipeline.ranks, recipe.parallel, pipeline.micro_batches)
    # The papers have stages that take equal times.
    of_papers = (pipeline.schedule, pipeline.ranks, pipeline.per_rank, pipeline.micro_batches)
    is_even = len(set(pipeline.times)) == 1
    form = closed_form(*of_papers, pipeline.times[0]) if is_even else None
    simulated, measured = simulate(cells, pipeline.times), measured_timeline(shortest)
    return Shares(
        closed_form=None if form is None else form.of_total,
        simulated=bubble(simulated).of_total,
        measured=measured.bubble.of_total,
        replayed=replayed_timeline(shortest).bubble.of_total,
        step_s=measured.end_s,
        expected_s=max(spans[-1].end_s for spans in simulated),
    )


def train_asleep(recipe: Recipe, folder: str, times: Sequence[StageTimes], steps: int) -> None:
    """A task: compute the gradients of some steps with stages that sleep, and trace them."""
    torch.set_num_threads(1)
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        timeline = make_timeline(recipe, stages, Path(folder))
        assert timeline is not None
        for step in range(1, steps + 1):
            batch = local_batch(random_batch(recipe, step), stages)
            with timeline.step(step), timeline.phase("gradients"):
                compute_gradients(stages, batch).await_values()
            if step == 1:  # it connects the ranks, and is not traced
                begins = accumulate(recipe.parallel.stages or (), initial=0)
                of_block = {str(begin): stage for begin, stage in zip(begins, times, strict=False)}
                for module in stages.modules:
                    name, block = next(iter(module.blocks.items()))
                    let_sleep(block, of_block[name])


def let_sleep(block: nn.Module, times: StageTimes) -> None:
    """Let a layer sleep in its forward, and in each half of its backward.

    The weight half is where the gradient of one of its matrices is computed: with a schedule that
    splits the backward, that is later.
    """

    def sleep(*_: Any) -> None:
        time.sleep(times.forward_s)

    def sleep_with_gradient(gradient: Tensor | None) -> None:
        # The half for inputs calls the hook too, without a gradient.
        if gradient is not None:
            time.sleep(times.backward_weight_s)

    block.register_forward_pre_hook(sleep)
    block.register_forward_hook(
        lambda *call: _SleepInBackward.apply(call[2], times.backward_input_s)
    )
    matrix = next(module for module in block.modules() if isinstance(module, nn.Linear))
    matrix.weight.register_hook(sleep_with_gradient)


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_BTC: Tensor, sleep_s: float) -> Tensor:
        ctx.sleep_s = sleep_s
        return h_BTC.view_as(h_BTC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.sleep_s)
        return grads[0], None
