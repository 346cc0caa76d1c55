"""Keep what each rank prints in a file of its own, beside the console (``run.rank_logs``).

It works on the descriptors 1 and 2, so that it also keeps what libraries print that know nothing of
Python. No torch here.
"""

import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from composer3d.facts.errors import RankLogError, UserError
from composer3d.facts.files import refuse_foreign_link
from composer3d.runtime import environment
from composer3d.runtime.files import append_whole, open_own

# The folder of the files, in that of the run.
FOLDER = "logs"

# Bytes. A full file becomes FILE.1, so a rank has at most twice as many.
MOST_BYTES = 32 << 20

# Seconds for the last lines to be copied, when the rank ends. What a child of the rank prints that
# stays for longer is lost.
_END_S = 5.0

_OUTPUTS = 1, 2


def path_of(run_folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return run_folder / FOLDER / f"rank-{rank}.log"


@contextmanager
def kept(run_folder: Path) -> Iterator[None]:
    """Append to a file what this rank and its children print inside of the context.

    The console gets the same, a moment later. A header says which attempt of which rank begins. An
    error that leaves the context is appended as well, and raised. A signal that ends the rank loses
    nothing of what was written to the descriptors.

    Args:
        run_folder: the folder of the run, which is made if it is missing.

    Raises:
        RankLogError: the file cannot be written, or is a link; or the process that copies cannot be
            started.
    """
    path = path_of(run_folder, environment.rank())
    try:
        file = _open(run_folder, path)
    except OSError as error:
        reason = error.strerror or error
        raise RankLogError(
            f"run.rank_logs: {path}: {reason}; mend it, or set run.rank_logs = false"
        ) from None
    with file:
        try:
            copier = _Copier(file, path)
        except OSError as error:
            raise RankLogError(
                f"run.rank_logs: the process that keeps what a rank prints cannot be started: "
                f"{error.strerror or error}"
            ) from None
    try:
        yield
    except BaseException as error:
        text = traceback.format_exc()
        if isinstance(error, UserError):
            text = "".join(f"{line}\n" for line in error.lines)
        copier.end()
        # Whoever started this rank prints it on the console.
        with suppress(OSError):
            append_whole(path, text.encode(errors="backslashreplace"), begins_line=True)
        raise
    copier.end()


def _open(run_folder: Path, path: Path) -> BinaryIO:
    """Open the file of a rank, and begin a new attempt in it."""
    refuse_foreign_link(run_folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_foreign_link(path.parent)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    header = (
        f"--- {now} rank {environment.rank()} of {environment.world_size()}, process {os.getpid()} "
        f"on {platform.node()} ---\n"
    )
    append_whole(path, header.encode(errors="backslashreplace"), begins_line=True)
    return open_own(path, append=True)


class _Copier:
    """The process that copies the descriptors 1 and 2 of this one (``rank_log_copier``).

    Raises:
        OSError: it cannot be started. The descriptors are as before.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        _flush()
        self._consoles = {output: os.dup(output) for output in _OUTPUTS}
        with ExitStack() as opened:
            reads, writes = zip(*(os.pipe() for _ in _OUTPUTS), strict=True)
            for descriptor in (*reads, *writes):
                opened.callback(os.close, descriptor)
            try:
                given = (*reads, *self._consoles.values(), file.fileno())
                self._process = _start(given, path)
            except OSError:
                self._close_consoles()
                raise
            for output, write in zip(_OUTPUTS, writes, strict=True):
                os.dup2(write, output)

    def end(self) -> None:
        """Give the descriptors back, and wait until everything is copied."""
        _flush()
        for output, console in self._consoles.items():
            os.dup2(console, output)
        self._close_consoles()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_consoles(self) -> None:
        for console in self._consoles.values():
            os.close(console)


def _start(given: tuple[int, ...], path: Path) -> subprocess.Popen[bytes]:
    """Start the copier with ``given``, its descriptors. Raises OSError."""
    script = Path(__file__).with_name("rank_log_copier.py")
    arguments = (path, MOST_BYTES, *given)
    return subprocess.Popen(
        # Isolated: it imports nothing that the user's environment or folder names.
        [sys.executable, "-I", "-S", str(script), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=given,
        # A Ctrl-C of the terminal is not for it.
        start_new_session=True,
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
