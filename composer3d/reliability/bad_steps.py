"""Decide which steps are bad, and remember whose batches a run has left out.

A step is bad if its loss or its gradient norm is not finite, or is far above those of the good
steps before it: more standard deviations above their mean than the recipe allows. The
``SkipStepOptimizer`` of OLMo-core has the same rule.

The loss and the norm are sums over all ranks, so all ranks decide alike, without a message. Step n
always has batch n of the run's order, so a list of steps says which batches were left out.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from composer3d.facts.errors import UserError
from composer3d.facts.files import MIB, parse_json, read_plain
from composer3d.recipe.schema import MOST_STEPS, ReliabilityTable
from composer3d.runtime.files import append_whole, sync, write_atomic

FILE = "bad_steps.jsonl"

# Bytes of the file: room for more than 100,000 lines.
_FILE_LIMIT = 32 * MIB

# The beginning of each line that ``Ledger.write`` writes.
_LINE_START = b'{"step": '


class Limits(NamedTuple):
    """The largest loss and gradient norm of a good step.

    Both are infinite where nothing counts as a spike. A value that is not finite is bad all the
    same.
    """

    loss: float
    norm: float

    @property
    def are_finite(self) -> bool:
        """Whether a spike of the loss or of the norm makes a step bad."""
        return math.isfinite(self.loss) or math.isfinite(self.norm)

    def problem(self, loss: float, norm: float) -> str | None:
        """Describe what is wrong with a step, or return None if it is good.

        ``training.step.update`` decides the same on the device, with the same float64 values.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm} are not finite"
        spikes = []
        if loss > self.loss:
            spikes.append(f"the loss {loss:.4g} is above {self.loss:.4g}")
        if norm > self.norm:
            spikes.append(f"the gradient norm {norm:.4g} is above {self.norm:.4g}")
        return " and ".join(spikes) or None


NO_LIMITS = Limits(math.inf, math.inf)


class StepHistory:
    """The losses and norms of the newest good steps, from which limits follow.

    It is saved with each checkpoint, so that a resumed run decides as the uninterrupted one.

    Args:
        table: the recipe's ``[reliability]``.

    Attributes:
        bad_in_a_row: the number of bad steps since the last good one.
    """

    def __init__(self, table: ReliabilityTable) -> None:
        self._table = table
        # Without the sigma rule nothing is kept, and nothing is saved.
        kept = table.spike_window if table.spike_sigma else 0
        self._losses: deque[float] = deque(maxlen=kept)
        self._norms: deque[float] = deque(maxlen=kept)
        self.bad_in_a_row = 0

    def limits(self) -> Limits:
        """Return the limits of the next step.

        They are infinite until the window is half full: the deviation of few values means little.
        """
        sigma = self._table.spike_sigma
        if not sigma or len(self._losses) < self._table.spike_window // 2:
            return NO_LIMITS
        return Limits(_limit(self._losses, sigma), _limit(self._norms, sigma))

    def add_good(self, loss: float, norm: float) -> None:
        """Count a good step."""
        self._losses.append(loss)
        self._norms.append(norm)
        self.bad_in_a_row = 0

    def add_bad(self) -> None:
        """Count a bad step. Its values are left out: they would raise the limits."""
        self.bad_in_a_row += 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; empty if there is nothing to remember."""
        state: dict[str, Any] = {}
        if self._losses:
            state |= {"losses": list(self._losses), "norms": list(self._norms)}
        if self.bad_in_a_row:
            state["bad_in_a_row"] = self.bad_in_a_row
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the values of ``state_dict``, of which the recipe's window keeps the newest."""
        for values, key in ((self._losses, "losses"), (self._norms, "norms")):
            values.clear()
            values.extend(state.get(key, ()))
        self.bad_in_a_row = state.get("bad_in_a_row", 0)


def _limit(values: deque[float], sigma: float) -> float:
    return statistics.fmean(values) + sigma * statistics.stdev(values)


class BadStep(NamedTuple):
    """A bad step after which the run went on, and the batches that it left out for that.

    Attributes:
        step: the bad step, counted from 1.
        action: "skip" left out the batch of this step. "rollback" went back to a checkpoint, and
            left out the batches since then.
        first: the first step whose batch was left out; ``step`` is the last.
        reason: what was wrong.
    """

    step: int
    action: Literal["skip", "rollback"]
    first: int
    reason: str


class Ledger:
    """The file ``bad_steps.jsonl`` in the run's folder: a line for each ``BadStep``.

    A line is on the disk before the run goes on. A run that is killed and resumed at an earlier
    checkpoint leaves out the same batches again, even if what made the step bad does not come
    back.

    Args:
        folder: the run's folder.
        guard: is called before the file is changed. It raises TrainingError if the folder belongs
            to another job now.

    Attributes:
        lines: all bad steps of the run, in the order in which they happened.
    """

    def __init__(self, folder: Path, guard: Callable[[], None] | None = None) -> None:
        self.path = folder / FILE
        self.lines: list[BadStep] = []
        self._guard = guard

    def begin(self, *, resumes: bool) -> list[BadStep]:
        """Return the lines of the file for a run that starts, and prepare the file for more.

        A last line that was cut off is removed. One that only lacks its line break, as some editors
        leave it, counts. A run that does not resume a checkpoint leaves out nothing: the lines of a
        former run in this folder are removed. Only rank 0 calls this.

        Raises:
            UserError: the file has anything but lines of this class, or cannot be read.
            OSError: the file cannot be changed.
        """
        try:
            content = read_plain(self.path, limit=_FILE_LIMIT, follow_links=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(f"{self.path} {error.strerror}") from None
        whole = _whole_lines(content) if resumes else b""
        lines = [
            self._parse(number, line) for number, line in enumerate(whole.splitlines(), start=1)
        ]
        if whole != content:
            write_atomic(self.path, whole)
        return lines

    def _parse(self, number: int, line: bytes) -> BadStep:
        try:
            return parse_line(line)
        except ValueError as error:
            raise self._unusable(f"{self.path}:{number}: {error}") from None

    def _unusable(self, problem: str) -> UserError:
        return UserError(
            f"{problem}; the file lists the batches that this run leaves out: restore it, or "
            "remove it to learn from all of them"
        )

    def write(self, entry: BadStep) -> None:
        """Add a line to the file, and wait until it is on the disk.

        Raises:
            TrainingError: the folder belongs to another job.
            OSError: the line cannot be written.
        """
        if self._guard is not None:
            self._guard()
        append_whole(self.path, (json.dumps(entry._asdict()) + "\n").encode())
        sync(self.path)
        sync(self.path.parent)

    def leaves_out(self, step: int) -> BadStep | None:
        """Return the line that left out the batch of ``step``, or None."""
        return next((entry for entry in self.lines if entry.first <= step <= entry.step), None)

    @property
    def rollbacks(self) -> int:
        """The number of times that the run went back to a checkpoint."""
        return sum(entry.action == "rollback" for entry in self.lines)

    def left_out(self, until: int) -> int:
        """Return how many of the steps up to ``until`` have batches that were left out."""
        steps = {step for entry in self.lines for step in range(entry.first, entry.step + 1)}
        return sum(step <= until for step in steps)


def _whole_lines(content: bytes) -> bytes:
    """Return the lines of the file, each with its line break, without a last one that was cut."""
    begin_of_last = content.rfind(b"\n") + 1
    last = content[begin_of_last:]
    was_cut = last.startswith(_LINE_START) or _LINE_START.startswith(last)
    if was_cut:
        try:
            parse_line(last)
        except ValueError:
            return content[:begin_of_last]
    return content + b"\n"


def parse_line(line: bytes) -> BadStep:
    """Check a line of the file.

    Raises:
        ValueError: it is not a line that ``Ledger.write`` has written.
    """
    content = parse_json(line)
    if type(content) is not dict or content.keys() != set(BadStep._fields):
        raise ValueError(f"it is not an object with the keys {', '.join(BadStep._fields)}")
    entry = BadStep(**content)
    if type(entry.step) is not int or type(entry.first) is not int:
        raise ValueError("step and first must be integers")
    if not 1 <= entry.first <= entry.step <= MOST_STEPS:
        raise ValueError(f"first and step must be from 1 to {MOST_STEPS}, and first the smaller")
    if entry.action not in ("skip", "rollback") or type(entry.action) is not str:
        raise ValueError("action must be skip or rollback")
    if entry.action == "skip" and entry.first != entry.step:
        raise ValueError("a skip leaves out one batch: first must be step")
    if type(entry.reason) is not str:
        raise ValueError("reason must be a text")
    return entry
