"""Exceptions that a user sees.

A ``UserError`` has one message per line. The command line prints the lines on stderr and exits
with the error's status, without a traceback. Any other exception that reaches the command line is
a bug of composer3d and keeps its traceback.
"""

from collections.abc import Sequence

from composer3d.spec.text import printable


class UserError(Exception):
    """Something in the user's input is wrong.

    Attributes:
        lines: one problem per line: where it is, the wrong value, and what to change. All their
            characters are printable (``printable``).
        status: the exit status of the command.
    """

    status = 2

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


class MeshError(UserError):
    """The number of processes does not fit the mesh of the recipe, or ranks disagree."""


class DeviceError(UserError):
    """A rank or a node lacks the device that it needs; other ranks may have theirs."""


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
