"""A box of a tensor: the part that one rank holds of it, or one file."""

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor: the global index of its first element, and its size, for each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def rows(self, first: int, count: int) -> "Box":
        """Return the part that lies in ``count`` rows of the tensor's first dim.

        Args:
            first: the first of these rows, counted in the whole tensor.
            count: their number.
        """
        begin = max(self.offset[0], first)
        end = max(begin, min(self.offset[0] + self.shape[0], first + count))
        return Box((begin, *self.offset[1:]), (end - begin, *self.shape[1:]))

    def seen_from(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of this box in a part of the tensor that begins at ``origin``."""
        return tuple(
            slice(begin - start, begin - start + size)
            for begin, start, size in zip(self.offset, origin, self.shape, strict=True)
        )
