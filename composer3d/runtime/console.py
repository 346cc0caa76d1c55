"""Standard output and standard error that cannot end a job. No torch here.

A terminal is closed, the reader of a pipe has gone, or the disk of a log file is full: then Python
raises OSError in whatever prints, and once more when the interpreter ends.
"""

import io
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO


class _Steady(io.RawIOBase):
    """A descriptor to write to. What cannot be written is lost, and the first error is kept."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        with suppress(OSError):
            return os.isatty(self._descriptor)
        return False

    def write(self, content: object) -> int:
        left = memoryview(content).cast("B")  # type: ignore[arg-type]
        size = len(left)
        try:
            while len(left):
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self.error = self.error or error
        return size


def open_closed_descriptors() -> None:
    """Send the standard streams that this process was started without to /dev/null.

    Otherwise the next file that is opened would get the number of one of them, and what libraries
    print would be written into that file.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one: the loop has filled those below it.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = os.fdopen(descriptor, "w" if descriptor else "r", closefd=False)
            setattr(sys, name, stream)


def steady_errors() -> None:
    """Make ``sys.stderr`` a stream that never raises."""
    sys.stderr = _steady(sys.stderr)


def steady_output() -> None:
    """Make ``sys.stdout`` a stream that never raises; ``output_error`` returns what was lost."""
    sys.stdout = _steady(sys.stdout)


def output_error() -> OSError | None:
    """Return why something could not be written to a steady ``sys.stdout``, or None."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    steady = _steady_part(sys.stdout)
    return None if steady is None else steady.error


def say(lines: Iterable[str]) -> None:
    """Print lines on standard error. An error of that is ignored: nobody could be told of it."""
    with suppress(OSError, ValueError):
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def _steady(stream: TextIO) -> TextIO:
    # A test, or a program that calls this package, may have put a stream of its own there.
    if type(stream) is not io.TextIOWrapper or _steady_part(stream) is not None:
        return stream
    with suppress(OSError, ValueError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Steady(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream is sys.__stderr__,
        write_through=stream.write_through,
    )


def _steady_part(stream: TextIO) -> _Steady | None:
    """Return what ``_steady`` has put below a stream, or None."""
    # With PYTHONUNBUFFERED, the buffer of a usual stream has no ``raw``.
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Steady) else None
