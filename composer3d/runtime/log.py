"""The logger of the whole package.

Rank 0 prints information without a prefix, for people. On every rank, each line of a warning or
an error starts with the rank's identity, so that a line in the log of a thousand ranks leads to
its machine.
"""

import logging
import sys


class _IdentityFormatter(logging.Formatter):
    def __init__(self, identity: str) -> None:
        super().__init__("%(message)s")
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        prefix = f"[{self._identity}] " if self._identity else ""
        level = record.levelname.lower()
        return "\n".join(f"{prefix}{level}: {line}" for line in text.splitlines())


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
    logger.setLevel(logging.INFO if main else logging.WARNING)
    # A root handler that a library installs would print every line a second time.
    logger.propagate = False


def get() -> logging.Logger:
    """The package's logger."""
    return logging.getLogger("composer3d")
