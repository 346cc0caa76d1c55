"""One logger for the whole package, which says who speaks.

Rank 0 prints information plainly, for people. Warnings and errors of every rank carry the rank's identity, one prefix a
line, so that a line of a log of a thousand ranks can be traced to its machine.
"""

import logging
import sys


class _Identified(logging.Formatter):
    def __init__(self, identity: str) -> None:
        super().__init__("%(message)s")
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        prefix = f"[{self._identity}] " if self._identity else ""
        return "\n".join(
            f"{prefix}{record.levelname.lower()}: {line}" for line in text.splitlines()
        )


def setup(identity: str, *, main: bool) -> None:
    """Sends the package's log to stderr; called once a process knows its rank, and again replaces what was set up.

    Args:
        identity: who this process is, such as ``rank 13 (pp1 dp0 cp1 tp1, node 1 gpu 5)``; "" for a single process.
        main: whether this rank speaks for the job; the others log only warnings and errors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Identified(identity))
    logger = get()
    logger.handlers.clear()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if main else logging.WARNING)
    # A root handler that a library installs would print every line a second time.
    logger.propagate = False


def get() -> logging.Logger:
    """The package's logger."""
    return logging.getLogger("composer3d")
