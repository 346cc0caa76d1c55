"""One logger for the whole package, which says who speaks.

Rank 0 prints information plainly, for people. Warnings and errors of every rank carry the rank's identity, one prefix a
line, so that a line of a log of a thousand ranks can be traced to its machine.
"""

import logging
import sys

_NAME = "composer3d"


class _Identified(logging.Formatter):
    """Prefixes each line of a warning or an error with the rank's identity; information stays plain."""

    def __init__(self, identity: str) -> None:
        super().__init__("%(message)s")
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        prefix = f"[{self._identity}] " if self._identity else ""
        return "\n".join(f"{prefix}{record.levelname.lower()}: {line}" for line in text.splitlines())


def setup(identity: str, *, main: bool, level: str = "INFO") -> None:
    """Sends the package's log to stderr; called once a process knows its rank, and again replaces what was set up.

    Args:
        identity: who this process is, such as ``rank 13 (pp1 dp0 cp1 tp1, node 1 gpu 5)``; "" for a single process.
        main: whether this rank speaks for the job; the others log only warnings and errors.
        level: the least severe level that the main rank logs, by its name in ``logging``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Identified(identity))
    logger = get()
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level if main else max(logging.WARNING, logging.getLevelName(level)))
    # A root handler that a library installs would print every line a second time.
    logger.propagate = False


def get() -> logging.Logger:
    """The package's logger."""
    return logging.getLogger(_NAME)
