"""Where the files of a format store our parameters. No torch here."""

from typing import NamedTuple


class Location(NamedTuple):
    """The place of one of our tensors in the files of a format.

    Attributes:
        names: the names of tensors in the files. There is one, or with ``is_stack`` one for each
            expert, in order.
        shape: the shape of each of these tensors.
        is_stack: whether our tensor is the stack of these tensors, with the expert as its first
            dim.
        rows: (begin, end) in the second dim of the tensor in the file, if our tensor is that part
            of it; None: our tensor is the whole.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_stack: bool = False
    rows: tuple[int, int] | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of our tensor."""
        if self.is_stack:
            return (len(self.names), *self.shape)
        if self.rows is not None:
            begin, end = self.rows
            return (self.shape[0], end - begin, *self.shape[2:])
        return self.shape
