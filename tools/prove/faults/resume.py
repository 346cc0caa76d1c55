"""Faults of what a checkpoint brings back: seen by a run that ends, starts again and is held against plain training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def swap_two_moments() -> None:
    """The first moments of keys and values are loaded into each other's places."""
    from composer3d.checkpoint import Store

    def wrong(self: Any, path: Path, stages: Any, optimizer: Any) -> None:
        right(self, path, stages, optimizer)
        named = dict(stages.named_parameters())
        a, b = (optimizer.state[named[f"blocks.1.attn.{name}.weight"]] for name in ("wk", "wv"))
        a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]

    Store.load, right = wrong, Store.load


def forget_the_second_moments() -> None:
    """AdamW's second moments are 0 after a resume."""
    _change_state(lambda state: state["exp_avg_sq"].zero_())


def forget_the_first_moments() -> None:
    """AdamW's first moments are 0 after a resume."""
    _change_state(lambda state: state["exp_avg"].zero_())


def forget_how_many_steps_were_taken() -> None:
    """AdamW corrects its moments after a resume as if no step had been taken."""
    _change_state(lambda state: state["step"].zero_())


def _change_state(change: Callable[[Any], Any]) -> None:
    """Call ``change`` with what AdamW keeps of each parameter, after it was loaded."""
    from composer3d.checkpoint import Store

    def wrong(self: Any, path: Path, stages: Any, optimizer: Any) -> None:
        right(self, path, stages, optimizer)
        for state in optimizer.state.values():
            change(state)

    Store.load, right = wrong, Store.load


def keep_the_first_weights() -> None:
    """A resume loads the optimizer, and leaves the weights as they were initialised."""
    from composer3d.checkpoint import Store

    def wrong(self: Any, path: Path, stages: Any, optimizer: Any) -> None:
        before = [parameter.detach().clone() for parameter in stages.parameters()]
        right(self, path, stages, optimizer)
        for parameter, first in zip(stages.parameters(), before, strict=True):
            parameter.detach().copy_(first)

    Store.load, right = wrong, Store.load


def round_what_is_loaded() -> None:
    """Weights are rounded to float32 where they are loaded."""
    from composer3d.checkpoint import Store

    def wrong(self: Any, path: Path, stages: Any, optimizer: Any) -> None:
        right(self, path, stages, optimizer)
        for parameter in stages.parameters():
            whole = parameter.detach()
            whole.copy_(whole.float())

    Store.load, right = wrong, Store.load


def go_on_a_step_later() -> None:
    """A batch is left out after a resume."""
    _change_position(lambda state: {**state, "next_step": state["next_step"] + 1})


def go_on_a_step_earlier() -> None:
    """The last batch before a checkpoint is trained on twice."""
    _change_position(lambda state: {**state, "next_step": state["next_step"] - 1})


def begin_the_data_anew() -> None:
    """The loader starts with its first batch after a resume."""
    _change_position(lambda state: {**state, "next_step": 0})


def _change_position(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from composer3d.data import Loader

    Loader.load_state_dict, right = (
        lambda self, state: right(self, change(state)),
        Loader.load_state_dict,
    )


def begin_the_learning_rate_anew() -> None:
    """The schedule starts with its first step after a resume: it counts the steps of the process."""
    from composer3d.training import loop

    steps: dict[int, int] = {}
    right = loop.learning_rate

    def wrong(step: int, table: Any, total: int) -> float:
        return right(steps.setdefault(total, 0) + 0 * step, table, total)

    def count(stages: Any, optimizer: Any, **more: Any) -> None:
        update(stages, optimizer, **more)
        for total in steps:
            steps[total] += 1

    loop.learning_rate, update = wrong, loop.update
    loop.update = count
