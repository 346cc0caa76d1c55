"""The logger of the whole package.

Rank 0 prints information without a prefix, for people. On every rank, each line of a warning or
an error starts with the rank's identity, so that a line in the log of a thousand ranks leads to
its machine.

A training also keeps these lines of rank 0 in ``log.txt`` in the run's folder, each with its time.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from composer3d.facts.text import printable_lines
from composer3d.runtime.files import LineFile

FILE = "log.txt"

# About when this process began (``time.monotonic``): it imports this module early, before torch.
PROCESS_BEGAN_S = time.monotonic()

# Lines that are kept in memory before the run's folder is known.
_MOST_EARLY = 1000

# Seconds after which a phase of the start is said while it lasts.
_SLOW_S = 5.0


class _IdentityFormatter(logging.Formatter):
    def __init__(self, identity: str) -> None:
        super().__init__("%(message)s")
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        # Messages may name files and tensors of a stranger.
        text = printable_lines(super().format(record))
        if record.levelno < logging.WARNING:
            return text
        prefix = f"[{self._identity}] " if self._identity else ""
        level = record.levelname.lower()
        return "\n".join(f"{prefix}{level}: {line}" for line in text.splitlines())


class _RunFile(logging.Handler):
    """Appends each line with its time (UTC) to a file, and keeps the lines before there is one."""

    def __init__(self, identity: str) -> None:
        super().__init__()
        self.setFormatter(_IdentityFormatter(identity))
        self._early: list[bytes] = []
        self._file: LineFile | None = None

    def open(self, path: Path, may_write: Callable[[], bool]) -> None:
        # What is told about this file comes back to it, and is written once this is possible.
        self._file = LineFile(path, lambda text: get().warning(text), may_write)
        early, self._early = self._early, []
        if early:
            self._file.append(b"".join(early))

    def emit(self, record: logging.LogRecord) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        lines = [f"{stamp} {line}\n" for line in self.format(record).splitlines()]
        content = "".join(lines).encode(errors="backslashreplace")
        if self._file is not None:
            self._file.append(content)
        elif len(self._early) < _MOST_EARLY:
            self._early.append(content)


def setup(identity: str, *, main: bool) -> None:
    """Send the package's log to stderr. A process calls it once it knows its rank.

    A second call replaces the first.

    Args:
        identity: the name of this process, such as ``rank 13 (pp1 dp0 cp1 tp1, node 1 gpu 5)``. It
            stands before warnings and errors; "" leaves it out.
        main: whether this rank logs for the job; the others log only warnings and errors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_IdentityFormatter(identity))
    logger = get()
    logger.handlers.clear()
    logger.addHandler(handler)
    if main:
        logger.addHandler(_RunFile(identity))
    _phases.clear()
    logger.setLevel(logging.INFO if main else logging.WARNING)
    # A root handler that a library installs would print every line a second time.
    logger.propagate = False


def get() -> logging.Logger:
    """The package's logger."""
    return logging.getLogger("composer3d")


def keep_in(path: Path, may_write: Callable[[], bool]) -> None:
    """Append the lines of this process to ``path`` from now on, and those since ``setup``.

    A link is not followed. If the file cannot be written, a warning says so once. A process that
    does not log for its job keeps nothing.

    Args:
        path: the file; a missing one is created.
        may_write: returns whether the file still belongs to this process.
    """
    for handler in get().handlers:
        if isinstance(handler, _RunFile):
            handler.open(path, may_write)


def say_from_handler(line: str) -> None:
    """Write a line to the console and the file from a handler of a signal.

    The handler may have interrupted a write to the console, whose buffer takes no second one. A
    process that does not log for its job says nothing.
    """
    if get().isEnabledFor(logging.INFO):
        # If standard error was closed at the start, its descriptor may be that of another file.
        if sys.__stderr__ is not None:
            with suppress(OSError, ValueError):
                os.write(sys.__stderr__.fileno(), f"{line}\n".encode())
        keep([line])


def keep(lines: Sequence[str]) -> None:
    """Write lines to the file of ``keep_in`` that the console gets in another way."""
    for handler in get().handlers:
        if isinstance(handler, _RunFile):
            handler.handle(
                logging.makeLogRecord({"msg": "\n".join(lines), "levelno": logging.INFO})
            )


class _Phase(NamedTuple):
    """A phase of the start of this process. Its beginning is a time of ``time.monotonic``."""

    name: str
    began_s: float
    seconds: float


_phases: list[_Phase] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Measure the body, a phase of the start. It is said at once if it lasts over 5 seconds.

    Args:
        name: says what is done, such as "model".
    """
    began_s = time.monotonic()
    timer = threading.Timer(_SLOW_S, lambda: get().info(f"starting: {name} ..."))
    timer.daemon = True
    if get().isEnabledFor(logging.INFO):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    add_phase(name, began_s)


def add_phase(name: str, began_s: float) -> None:
    """Add a phase that ends now.

    Args:
        name: as in ``phase``.
        began_s: when it began, a time of ``time.monotonic``. All processes of a machine have the
            same clock.
    """
    now_s = time.monotonic()
    began_s = min(began_s, now_s)
    _phases.append(_Phase(name, began_s, now_s - began_s))


def say_phases() -> None:
    """Log how long the start took until now, each phase of it, and what was in none.

    The start begins with the first phase.
    """
    if _phases:
        total_s = time.monotonic() - _phases[0].began_s
        other_s = max(0.0, total_s - sum(phase.seconds for phase in _phases))
        parts = [f"{phase.name} {phase.seconds:.1f}" for phase in _phases]
        parts.append(f"other {other_s:.1f}")
        get().info(f"started in {total_s:.1f} s: {', '.join(parts)}")
    _phases.clear()
