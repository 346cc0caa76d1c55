"""Exceptions that a user sees.

A ``UserError`` has one message per line. The command line prints the lines on stderr and exits
with the error's status, without a traceback. Any other exception that reaches the command line is
a bug of composer3d and keeps its traceback.
"""

import errno
from collections.abc import Sequence

from composer3d.facts.text import printable

# What a machine lacks or fails in, whatever the user has asked for.
_MACHINE_ERRORS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.ESTALE,
        errno.EMFILE,
        errno.ENFILE,
    }
)


class UserError(Exception):
    """Something in the user's input is wrong.

    Attributes:
        lines: one problem per line: where it is, the wrong value, and what to change. All their
            characters are printable (``printable``).
        status: the exit status of the command.
        is_told: whether this process has printed the lines.
    """

    status = 2
    is_told = False

    def __init__(self, lines: str | Sequence[str]) -> None:
        self.lines: tuple[str, ...] = tuple(
            map(printable, (lines,) if isinstance(lines, str) else lines)
        )
        super().__init__("\n".join(self.lines))


class RecipeError(UserError):
    """A recipe, or an override of one, cannot be used."""


class ModelError(UserError):
    """The architecture that a recipe names cannot be used."""


class DataError(UserError):
    """Training or validation data is missing, empty or too small, or it has changed."""


class RankDataError(DataError):
    """One rank cannot read its data while it trains. The other ranks do not know of it."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or belongs to another model."""


class SaveError(CheckpointError):
    """A checkpoint cannot be written. The run was right, so this is no wrong input."""

    status = 1


class MachineError(UserError):
    """A machine lacks something that the run needs: space on a disk, memory, open files."""

    status = 1


class NoMemoryError(MachineError):
    """A process lacks memory. Other ranks may have theirs."""


class MeshError(UserError):
    """The number of processes does not fit the mesh of the recipe, or ranks disagree."""


class LaunchError(UserError):
    """A variable that a launcher of ranks sets is wrong. Other ranks may have a right one."""


class DeviceError(UserError):
    """A rank or a node lacks the device that it needs; other ranks may have theirs."""


class RankLogError(UserError):
    """A rank cannot keep what it prints. The other ranks do not know of it."""


class PlanError(UserError):
    """A sharding plan or a schedule does not fit the model or the mesh it is applied to."""


class TrainingError(UserError):
    """Training cannot go on, for example because a loss or a gradient is not finite."""

    status = 1


class LostPeersError(UserError):
    """Other ranks of the job have died, or do not join a collective.

    Only one rank's error has lines, so that they are printed once. On the others, the error has no
    lines.
    """

    status = 1


class ExchangeError(UserError):
    """A group of ranks has the wrong ranks, or a collective returned a wrong value."""

    status = 1


def of_os_error(what: str, error: OSError) -> UserError:
    """Return an error of the operating system as one of the machine, or of the user's input.

    Args:
        what: the start of its line.
        error: the error.
    """
    kind = MachineError if error.errno in _MACHINE_ERRORS else UserError
    return kind(f"{what}: {error}")


def reason_in_one_line(error: Exception) -> str:
    """Return why something has failed, in one line of at most 1,000 characters."""
    if isinstance(error, UserError):
        return " ".join(error.lines)[:1000]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:1000]
