"""Say on standard error how far long work is. No torch.

A terminal gets a bar after two seconds. Anything else gets a plain line at most every ten seconds,
so that a log stays short. Standard output has only results.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer3d.facts.text import clock_text
from composer3d.runtime.console import say

# Seconds before a bar is shown, and between plain lines.
_BAR_AFTER_S = 2.0
_LINE_EVERY_S = 10.0


class Progress:
    """The progress of one piece of work, as a context. One process uses it, from one thread.

    Args:
        what: says what is done, such as "convert".
        total: the amount of work, in ``unit``. It may be an estimate; 0: unknown.
        unit: the name of the unit. "B" is bytes, which are shown in MB.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._begun_s = self._said_s = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from tqdm import tqdm

            # Without its thread, which would watch for bars that stand still.
            tqdm.monitor_interval = 0
            self._bar = tqdm(
                total=self._total or None,
                desc=self._what,
                unit=self._unit if self._unit == "B" else f" {self._unit}",
                unit_scale=self._unit == "B",
                delay=_BAR_AFTER_S,
                leave=False,
                dynamic_ncols=True,
                file=sys.stderr,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Add to the work that is done.

        Args:
            amount: the work since the last call, in the unit.
            note: what to show beside the numbers, such as a count of something else.
        """
        self._done += amount
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)
            return
        now_s = time.monotonic()
        # When all is done, the result follows.
        if now_s - self._said_s >= _LINE_EVERY_S and self._done != self._total:
            self._said_s = now_s
            say([self._line(now_s, note)])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while the body prints results on the same terminal."""
        if self._bar is not None:
            self._bar.clear()
        yield
        if self._bar is not None and time.monotonic() - self._begun_s > _BAR_AFTER_S:
            sys.stdout.flush()
            self._bar.refresh()

    def _line(self, now_s: float, note: str) -> str:
        scale, unit = (10**6, "MB") if self._unit == "B" else (1, self._unit)
        done = f"{self._done / scale:,.0f}"
        if self._total:
            done += f" of {self._total / scale:,.0f}"
        elapsed_s = now_s - self._begun_s
        parts = [f"{self._what}: {done} {unit}", f"{clock_text(elapsed_s)} so far"]
        if self._total and self._done:
            # Assume the average speed so far. The total may have been an estimate.
            left_s = elapsed_s * max(self._total / self._done - 1, 0)
            parts.append(f"about {clock_text(left_s)} left")
        if note:
            parts.append(note)
        return ", ".join(parts)
