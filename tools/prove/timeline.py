"""Compare the bubbles that real pipelines leave with those that the simulation predicts.

Four processes train a small model of eight layers under each schedule, on the CPU with gloo. In the
forward of each layer they sleep, and so they do in the backward, once for the gradients of inputs
and once for those of weights. Sleeping needs no core, so that the times of layers are known on any
machine. The steps are traced as in a training. Of each schedule, the step that took least is
compared: other programs on the machine can only make a step longer.

    bash tools/prove/run timeline            # all schedules, about seven minutes
    bash tools/prove/run timeline 1F1B       # one of them

The columns are shares of the step in which ranks do not compute. "closed form" is that of the
papers. "simulated" is for the nominal times. "measured" is that of the run. "replayed" simulates
the run's own mean times, without messages and without what makes actions uneven.

Exit status: 0 if each measured share is within 5 points of the simulated one, 1 if one is not.
"""

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer3d.draw.measured import measured_timeline, replayed_timeline
from composer3d.facts import trace
from composer3d.facts.schedules import SCHEDULES
from composer3d.planner.schedule import recipe_actions
from composer3d.planner.simulate import StageTimes, bubble, closed_form, simulate
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from composer3d.training.observers.timeline import make_timeline
from composer3d.training.step import compute_gradients
from composer3d.verify.data import random_batch
from composer3d.verify.worker import local_batch
from tools.prove.proof import make_parser

RANKS, LAYERS, MICRO_BATCHES = 4, 8, 8
SLEEP_S = 0.2  # of one layer and micro-batch, for each of the three parts
STEPS = 4
BOUND = 0.05  # of the step
LIMIT_S = 600.0
BUILT_IN = tuple(name for name in SCHEDULES if name != "csv")

RECIPE = f"""\
[run]
device = "cpu"
[model]
preset = "debug-tiny"
n_layers = {LAYERS}
[mesh]
pp = {RANKS}
dp_shard = 1
[parallel]
schedule = "{{schedule}}"
stages = {{stages}}
[data]
source = "python"
seq_len = 8
global_batch = {MICRO_BATCHES}
[metrics]
timeline_steps = [2, {STEPS}]
"""


class Shares(NamedTuple):
    """The shares of a step in which ranks do not compute.

    Attributes:
        closed_form: of the papers; None: there is none.
        simulated: with the nominal times.
        measured: of the shortest traced step.
        replayed: simulated with the mean times of that step.
        step_s: the length of that step.
    """

    closed_form: float | None
    simulated: float
    measured: float
    replayed: float
    step_s: float

    @property
    def is_close(self) -> bool:
        return abs(self.measured - self.simulated) <= BOUND


def main(arguments: list[str]) -> int:
    parser = make_parser("timeline", __doc__)
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", default=BUILT_IN)
    names = parser.parse_args(arguments).schedules
    unknown = set(names) - set(BUILT_IN)
    if unknown:
        parser.error(f"unknown schedule {min(unknown)}; use one of {', '.join(BUILT_IN)}")
    print("schedule               closed form  simulated  measured  replayed   step")
    is_proven = True
    with Pool() as pool:
        for name in names:
            shares = compare(pool, name)
            form = "" if shares.closed_form is None else f"{shares.closed_form:.1%}"
            verdict = "" if shares.is_close else "  more than 5 points away"
            print(
                f"{name:22} {form:>11} {shares.simulated:10.1%} {shares.measured:9.1%} "
                f"{shares.replayed:9.1%} {shares.step_s:5.2f} s{verdict}",
                flush=True,
            )
            is_proven &= shares.is_close
    return 0 if is_proven else 1


def compare(pool: Pool, schedule: str, sleep_s: float = SLEEP_S, steps: int = STEPS) -> Shares:
    """Train under one schedule, and compare the bubble with the simulated one.

    A layer sleeps for ``sleep_s`` in each part of its work. All steps but the first one are traced.
    """
    per_rank = SCHEDULES[schedule].stages.default_per_rank
    n_stages = RANKS * per_rank
    layers = LAYERS // n_stages
    with tempfile.TemporaryDirectory() as folder:
        recipe_file = Path(folder, "recipe.toml")
        recipe_file.write_text(RECIPE.format(schedule=schedule, stages=[layers] * n_stages))
        recipe = load(str(recipe_file), []).recipe
        arguments = {"recipe": recipe, "folder": folder, "sleep_s": sleep_s, "steps": steps}
        pool.run(train_asleep, arguments, world_size=RANKS, limit_s=LIMIT_S)
        traced = [trace.read(Path(folder), step) for step in range(2, steps + 1)]

    shortest = min(traced, key=lambda step: measured_timeline(step).end_s)
    part_s = layers * sleep_s
    times = StageTimes(part_s, 2 * part_s, part_s, part_s)
    cells = recipe_actions(RANKS, recipe.parallel, MICRO_BATCHES)
    form = closed_form(schedule, RANKS, per_rank, MICRO_BATCHES, times)
    measured = measured_timeline(shortest)
    return Shares(
        closed_form=None if form is None else form.of_total,
        simulated=bubble(simulate(cells, [times] * n_stages)).of_total,
        measured=measured.bubble.of_total,
        replayed=replayed_timeline(shortest).bubble.of_total,
        step_s=measured.end_s,
    )


def train_asleep(recipe: Recipe, folder: str, sleep_s: float, steps: int) -> None:
    """A task: compute the gradients of some steps with layers that sleep, and trace them."""
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
                for module in stages.modules:
                    for block in module.blocks.values():
                        let_sleep(block, sleep_s)


def let_sleep(block: nn.Module, sleep_s: float) -> None:
    """Let a layer sleep in its forward, and in each half of its backward.

    The weight half is where the gradient of one of its matrices is computed: with a schedule that
    splits the backward, that is later.
    """

    def sleep(*_: Any) -> None:
        time.sleep(sleep_s)

    def sleep_with_gradient(gradient: Tensor | None) -> None:
        # The half for inputs calls the hook too, without a gradient.
        if gradient is not None:
            time.sleep(sleep_s)

    block.register_forward_pre_hook(sleep)
    block.register_forward_hook(lambda *call: _SleepInBackward.apply(call[2], sleep_s))
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
