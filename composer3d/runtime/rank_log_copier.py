"""Copy what a rank prints to the console and to a file of its own, in a process of its own.

The process lives on until everything is copied when a signal ends its rank. This file imports
nothing of its package. It is run as a script with these arguments:

- the path of the file, and the most bytes of it;
- the descriptors from which it reads what the rank writes to standard output and to standard error;
- those of the console for both;
- that of the file, which is open for appending.
"""

import os
import select
import signal
import sys
from contextlib import suppress

# Seconds to wait for a child of the rank that still holds its output, after the rank has ended.
_PATIENCE_S = 1.0

_MOST_BYTES = 1 << 16  # of one read


class _File:
    """The file. When it is full it becomes PATH.1, over the former one, and a new one begins.

    What cannot be written is lost: the rank and its console must go on.
    """

    def __init__(self, path: str, most_bytes: int, descriptor: int) -> None:
        self._path, self._most_bytes, self._descriptor = path, most_bytes, descriptor

    def append(self, content: bytes) -> None:
        with suppress(OSError):
            if os.fstat(self._descriptor).st_size + len(content) > self._most_bytes:
                self._begin_anew()
            _write_all(self._descriptor, content)

    def _begin_anew(self) -> None:
        with suppress(FileNotFoundError):  # an earlier try made room, and could not open a file
            os.replace(self._path, f"{self._path}.1")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        new = os.open(self._path, flags, 0o666)
        os.close(self._descriptor)
        self._descriptor = new


def main() -> None:
    """Copy until nobody can write any more, or the rank has ended and nothing comes for a while."""
    # The signals that stop a job are for its ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    rank = os.getppid()
    path, *numbers = sys.argv[1:]
    most_bytes, output, errors, console_output, console_errors, descriptor = map(int, numbers)
    file = _File(path, most_bytes, descriptor)
    consoles = {output: console_output, errors: console_errors}
    while consoles:
        ready, _, _ = select.select(list(consoles), (), (), _PATIENCE_S)
        if not ready and os.getppid() != rank:
            break
        for source in ready:
            content = os.read(source, _MOST_BYTES)
            if not content:
                del consoles[source]
                continue
            # The file first: a console may block for as long as nobody reads it.
            file.append(content)
            with suppress(OSError):  # a terminal that was closed
                _write_all(consoles[source], content)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


if __name__ == "__main__":
    main()
