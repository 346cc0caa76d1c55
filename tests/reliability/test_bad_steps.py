"""Which steps are bad, and the ledger of those after which a run went on."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from composer3d.facts.errors import UserError
from composer3d.recipe.schema import ReliabilityTable
from composer3d.reliability.bad_steps import (
    FILE,
    NO_LIMITS,
    BadStep,
    Ledger,
    Limits,
    StepHistory,
    parse_line,
)

SKIP = BadStep(7, "skip", 7, "loss nan, gradient norm nan are not finite")
ROLLBACK = BadStep(15, "rollback", 11, "the loss 9 is above 4")


def history(sigma: float = 6.0, window: int = 8) -> StepHistory:
    return StepHistory(ReliabilityTable(spike_sigma=sigma, spike_window=window))


def test_limits_are_the_mean_and_some_deviations_of_the_newest_good_steps() -> None:
    steps = history(sigma=3.0)
    losses = [5.0, 4.0, 4.5, 4.2, 4.1, 3.9, 4.4, 4.0, 3.7, 3.6]
    norms = [1.0 + 0.1 * (step % 3) for step in range(len(losses))]
    for loss, norm in zip(losses, norms, strict=True):
        steps.add_good(loss, norm)
    for values, limit in ((losses, steps.limits().loss), (norms, steps.limits().norm)):
        newest = values[-8:]
        assert limit == statistics.fmean(newest) + 3.0 * statistics.stdev(newest)


def test_no_limit_before_the_window_is_half_full_or_without_the_sigma_rule() -> None:
    steps, without = history(), history(sigma=0.0)
    for step in range(4):
        assert steps.limits() == NO_LIMITS
        steps.add_good(4.0 - 0.1 * step, 1.0)
        without.add_good(4.0 - 0.1 * step, 1.0)
    assert steps.limits().are_finite
    assert without.limits() == NO_LIMITS
    assert without.state_dict() == {}


def test_bad_steps_do_not_move_the_limits_and_are_counted_in_a_row() -> None:
    steps = history()
    for step in range(6):
        steps.add_good(4.0 - 0.1 * step, 1.0 + 0.01 * step)
    before = steps.limits()
    steps.add_bad()
    steps.add_bad()
    assert (steps.limits(), steps.bad_in_a_row) == (before, 2)
    steps.add_good(3.4, 1.0)
    assert steps.bad_in_a_row == 0


def test_the_state_of_a_history_survives_json_and_a_smaller_window() -> None:
    steps = history(window=16)
    for step in range(12):
        steps.add_good(4.0 / (3 + step), 1 / 3 + step)
    steps.add_bad()
    state = json.loads(json.dumps(steps.state_dict()))
    same, smaller = history(window=16), history(window=8)
    same.add_good(100.0, 100.0)
    same.load_state_dict(state)
    smaller.load_state_dict(state)
    assert same.limits() == steps.limits()
    assert same.state_dict() == steps.state_dict()
    assert smaller.state_dict()["losses"] == state["losses"][-8:]


@pytest.mark.parametrize(
    ("loss", "norm", "problem"),
    [
        (4.0, 2.0, None),
        (3.0, 1.0, None),
        (4.1, 2.0, "the loss 4.1 is above 4"),
        (4.0, 2.5, "the gradient norm 2.5 is above 2"),
        (5.0, 3.0, "the loss 5 is above 4 and the gradient norm 3 is above 2"),
        (math.nan, 1.0, "loss nan, gradient norm 1.0 are not finite"),
        (1.0, math.inf, "loss 1.0, gradient norm inf are not finite"),
    ],
)
def test_a_problem_is_a_value_above_its_limit_or_not_finite(
    loss: float, norm: float, problem: str | None
) -> None:
    assert Limits(4.0, 2.0).problem(loss, norm) == problem


def test_without_limits_only_values_that_are_not_finite_are_bad() -> None:
    assert NO_LIMITS.problem(1e300, 1e300) is None
    assert NO_LIMITS.problem(math.inf, 1.0) is not None
    assert not NO_LIMITS.are_finite


def test_lines_of_a_ledger_come_back_and_name_the_batches_left_out(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.begin(resumes=True) == []
    ledger.write(SKIP)
    ledger.write(ROLLBACK)
    again = Ledger(tmp_path)
    again.lines = again.begin(resumes=True)
    assert again.lines == [SKIP, ROLLBACK]
    left_out = {step: again.leaves_out(step) for step in range(1, 20)}
    assert [step for step, entry in left_out.items() if entry] == [7, 11, 12, 13, 14, 15]
    assert left_out[12] == ROLLBACK
    assert [again.left_out(until=step) for step in (6, 7, 12, 15, 99)] == [0, 1, 3, 6, 6]
    assert again.rollbacks == 1


def test_a_cut_line_is_removed_and_a_run_that_starts_anew_leaves_out_nothing(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(SKIP)
    with ledger.path.open("ab") as file:
        file.write(b'{"step": 9, "act')
    assert ledger.begin(resumes=True) == [SKIP]
    ledger.write(ROLLBACK)
    assert ledger.begin(resumes=True) == [SKIP, ROLLBACK]
    assert ledger.begin(resumes=False) == []
    assert ledger.path.read_bytes() == b""


def test_a_last_line_without_a_line_break_counts_unless_it_was_cut(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(SKIP)
    line = ledger.path.read_bytes()
    ledger.path.write_bytes(line + json.dumps(ROLLBACK._asdict()).encode())
    assert ledger.begin(resumes=True) == [SKIP, ROLLBACK]
    ledger.write(SKIP)
    assert ledger.begin(resumes=True) == [SKIP, ROLLBACK, SKIP]
    for cut in range(1, len(line) - 1):
        ledger.path.write_bytes(line + line[:cut])
        assert ledger.begin(resumes=True) == [SKIP]
        assert ledger.path.read_bytes() == line
    ledger.path.write_bytes(line + b"step 9 too")
    with pytest.raises(UserError, match=f"{FILE}:2: "):
        ledger.begin(resumes=True)
    assert ledger.path.read_bytes() == line + b"step 9 too"


def test_a_ledger_is_not_written_once_the_folder_belongs_to_another_job(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UserError("replaced")

    with pytest.raises(UserError, match="replaced"):
        Ledger(tmp_path, refuse).write(SKIP)
    assert not (tmp_path / FILE).exists()


def test_a_ledger_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")
    (tmp_path / FILE).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="symbolic link"):
        Ledger(tmp_path).begin(resumes=True)
    with pytest.raises(OSError, match="symbolic link"):
        Ledger(tmp_path).write(SKIP)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": True}, "step and first must be integers"),
        ({"step": "7"}, "step and first must be integers"),
        ({"step": 0, "first": 0}, "first and step must be from 1"),
        ({"step": 10**10}, "first and step must be from 1"),
        ({"first": 8}, "first and step must be from 1"),
        ({"first": 6}, "a skip leaves out one batch"),
        ({"action": "stop"}, "action must be skip or rollback"),
        ({"action": ["skip"]}, "action must be skip or rollback"),
        ({"reason": None}, "reason must be a text"),
        ({"more": 1}, "it is not an object with the keys step, action, first, reason"),
    ],
)
def test_a_line_that_no_run_has_written_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    line = json.dumps({**SKIP._asdict(), **change})
    with pytest.raises(ValueError, match=problem):
        parse_line(line.encode())
    (tmp_path / FILE).write_text(json.dumps(SKIP._asdict()) + "\n" + line + "\n")
    with pytest.raises(UserError) as refused:
        Ledger(tmp_path).begin(resumes=True)
    (shown,) = refused.value.lines
    assert shown.startswith(f"{tmp_path / FILE}:2: {problem}")
    assert shown.endswith("restore it, or remove it to learn from all of them")


@pytest.mark.parametrize("line", [b"[]", b"not json", b'{"step": NaN}', b"\xff", b"[" * 100_000])
def test_a_line_that_is_not_an_object_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / FILE).write_bytes(line + b"\n")
    with pytest.raises(UserError, match=f"{FILE}:1: "):
        Ledger(tmp_path).begin(resumes=True)
