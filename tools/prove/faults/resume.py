"""Faults in what a resume or a rollback loads from a checkpoint.

``checks.training`` sees them: it ends a run, resumes it, and compares all steps with plain
training. ``checks.rollback`` sees those of a rollback.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from composer3d.checkpoint import Store
from composer3d.data import Loader
from composer3d.reliability.bad_steps import StepHistory
from composer3d.training import loop
from composer3d.training import step as train_step
from tools.prove.faults.places import found_by
from tools.prove.faults.plant import fault_of, instead_of

# Of the steps after the resume, moments change the second one.
_FIRST_STEP = "^(loss|grad_norm) of step 4 is"
_LATER_STEPS = "^(loss|grad_norm) of step [56] is"


@found_by("training", _LATER_STEPS)
@fault_of(Store, Store.load)
def swap_two_moments(right: Any, self: Any, path: Path, stages: Any, optimizer: Any) -> None:
    """Resume: the first moments of keys and values are swapped."""
    right(self, path, stages, optimizer)
    parameters = dict(stages.named_parameters())
    keys = optimizer.state[parameters["blocks.1.attn.wk.weight"]]
    values = optimizer.state[parameters["blocks.1.attn.wv.weight"]]
    keys["exp_avg"], values["exp_avg"] = values["exp_avg"], keys["exp_avg"]


@found_by("training", _LATER_STEPS)
def forget_the_second_moments() -> None:
    """Resume: AdamW's second moments are 0."""
    _change_state(lambda state: state["exp_avg_sq"].zero_())


@found_by("training", _LATER_STEPS)
def forget_the_first_moments() -> None:
    """Resume: AdamW's first moments are 0."""
    _change_state(lambda state: state["exp_avg"].zero_())


@found_by("training", _LATER_STEPS)
def forget_how_many_steps_were_taken() -> None:
    """Resume: AdamW corrects the bias of its moments as if no step had been taken."""
    _change_state(lambda state: state["step"].zero_())


def _change_state(change: Callable[[Any], Any]) -> None:
    """Call ``change`` with AdamW's state of each parameter after it is loaded."""

    @instead_of(Store, Store.load)
    def wrong(right: Any, self: Any, path: Path, stages: Any, optimizer: Any) -> None:
        right(self, path, stages, optimizer)
        for state in optimizer.state.values():
            change(state)


@found_by("training", _FIRST_STEP)
@fault_of(Store, Store.load)
def keep_the_first_weights(right: Any, self: Any, path: Path, stages: Any, optimizer: Any) -> None:
    """Resume: the optimizer is loaded, but the weights keep their initial values."""
    before = [parameter.detach().clone() for parameter in stages.parameters()]
    right(self, path, stages, optimizer)
    for parameter, first in zip(stages.parameters(), before, strict=True):
        parameter.detach().copy_(first)


@found_by("training", _FIRST_STEP)
@fault_of(Store, Store.load)
def round_what_is_loaded(right: Any, self: Any, path: Path, stages: Any, optimizer: Any) -> None:
    """Resume: loaded weights are rounded to float32."""
    right(self, path, stages, optimizer)
    for parameter in stages.parameters():
        whole = parameter.detach()
        whole.copy_(whole.float())


@found_by("training", _FIRST_STEP)
def go_on_a_step_later() -> None:
    """Resume: one batch is left out."""
    _change_position(lambda state: {**state, "next_step": state["next_step"] + 1})


@found_by("training", _FIRST_STEP)
def go_on_a_step_earlier() -> None:
    """Resume: the last batch before the checkpoint is trained on again."""
    _change_position(lambda state: {**state, "next_step": state["next_step"] - 1})


@found_by("training", _FIRST_STEP)
def begin_the_data_anew() -> None:
    """Resume: the loader starts with its first batch."""
    _change_position(lambda state: {**state, "next_step": 0})


def _change_position(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Load the state ``change(state)`` into the loader."""
    right = Loader.load_state_dict
    Loader.load_state_dict = lambda self, state: right(self, change(state))


@found_by("training", "lr of step 4 is")
def begin_the_learning_rate_anew() -> None:
    """Resume: the schedule of the learning rate starts with its first step."""
    # The two runs of the check have different numbers of steps; each counts its own from 0.
    steps_of_run: dict[int, int] = {}

    @instead_of(train_step, train_step.learning_rate)
    def wrong(right: Any, step: int, table: Any, total_steps: int) -> float:
        counted = steps_of_run.setdefault(total_steps, 0)
        return right(counted, table, total_steps)

    @instead_of(loop, loop.update)
    def count_step(right: Any, *arguments: Any, **options: Any) -> Any:
        values = right(*arguments, **options)
        for total_steps in steps_of_run:
            steps_of_run[total_steps] += 1
        return values


@found_by("rollback", r"^the run remembers \{'losses'")
def keep_what_was_rolled_back() -> None:
    """Rollback: the run remembers the losses of steps that it has taken back."""
    StepHistory.load_state_dict = lambda self, state: None


@found_by("rollback", r"^the run remembers \{'losses'")
def count_the_bad_step_after_a_rollback() -> None:
    """Rollback: the good steps after it are counted as bad ones in a row."""

    @instead_of(StepHistory, StepHistory.add_good)
    def add_good(right: Any, self: Any, loss: float, norm: float) -> None:
        in_a_row = self.bad_in_a_row
        right(self, loss, norm)
        self.bad_in_a_row = in_a_row

    @instead_of(StepHistory, StepHistory.load_state_dict)
    def load_state_dict(right: Any, self: Any, state: dict[str, Any]) -> None:
        in_a_row = self.bad_in_a_row
        right(self, state)
        self.bad_in_a_row = in_a_row


@found_by("rollback", r"^the steps have the random seeds")
def draw_the_same_numbers_in_every_step() -> None:
    """Random numbers: the seed does not depend on the step."""
    right = torch.manual_seed
    torch.manual_seed = lambda seed: right(seed >> 32 << 32)
