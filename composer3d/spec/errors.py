"""Exceptions that reach a user, and nothing else.

A ``UserError`` holds one message a line. The command line prints the lines on stderr and exits with status 2; it never
shows a traceback for one. Anything else that escapes is a bug of composer3d and keeps its traceback.
"""

from collections.abc import Sequence


class UserError(Exception):
    """Something the user gave is wrong. ``lines`` name the place, the value and the way out, one problem a line."""

    status = 2  # what the command exits with

    def __init__(self, lines: str | Sequence[str]) -> None:
        self.lines: tuple[str, ...] = (lines,) if isinstance(lines, str) else tuple(lines)
        super().__init__("\n".join(self.lines))


class RecipeError(UserError):
    """A recipe, or an override of one, cannot be used."""


class ModelError(UserError):
    """The architecture that a recipe names cannot be used."""


class DataError(UserError):
    """Training or validation data is missing, empty, too small or has changed."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or belongs to another model."""


class MeshError(UserError):
    """The world that was started does not fit the mesh of the recipe."""


class DeviceError(UserError):
    """A rank, or a node, lacks the device it needs; other ranks may have theirs."""


class PlanError(UserError):
    """A parallelism plan does not fit the model it is applied to."""


class TrainingError(UserError):
    """Training cannot go on: a loss or a gradient is not finite."""

    status = 1


class LostPeersError(UserError):
    """Other ranks of the job have died or do not come to a collective. One rank has lines, the others none."""

    status = 1
