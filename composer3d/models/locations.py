"""Where the files of a format store our parameters. No torch here."""

from typing import NamedTuple

from composer3d.models.table import ParameterTable


class Location(NamedTuple):
    """The place of one of our tensors in the files of a format.

    Attributes:
        names: the names of tensors in the files. There is one, or with ``is_stack`` one for each
            expert, in order.
        shape: the shape of each of these tensors.
        is_stack: whether our tensor is the stack of these tensors, with the expert as its first
            dim.
        is_transposed: whether the last two dims of our tensor are the other way round there.
        rows: (begin, end) in the second dim of the tensor in the file, if our tensor is that part
            of it; None: our tensor is the whole.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_stack: bool = False
    is_transposed: bool = False
    rows: tuple[int, int] | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of our tensor."""
        if self.is_stack:
            return (len(self.names), *self.shape)
        if self.rows is not None:
            begin, end = self.rows
            return (self.shape[0], end - begin, *self.shape[2:])
        if self.is_transposed:
            return (*self.shape[:-2], *self.shape[:-3:-1])
        return self.shape


def hf_locations(table: ParameterTable) -> dict[str, Location]:
    """Return the place of each parameter in the published files of Hugging Face, by our name.

    Args:
        table: of a model that ``huggingface.make_config`` accepts.
    """
    locations = {}
    for name, row in table.parameters():
        in_files = in_block(row.hf, name)
        if "@" not in in_files:
            locations[name] = Location((in_files,), row.shape)
            continue
        of_experts = tuple(in_files.replace("@", str(expert)) for expert in range(row.shape[0]))
        locations[name] = Location(of_experts, row.shape[1:], is_stack=True)
    return locations


def in_block(name_in_files: str, name: str) -> str:
    """Put the number of the block of the parameter ``name`` into its name in files."""
    assert name_in_files, f"{name} has no place in these files"
    return name_in_files.replace("#", name.split(".")[1])
