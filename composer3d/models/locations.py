"""Where the files of a format store our parameters. No torch here."""

from collections.abc import Mapping
from typing import NamedTuple

from composer3d.models.table import ParameterTable, Row


class Location(NamedTuple):
    """The place of one of our tensors in the files of a format.

    Attributes:
        names: the names of tensors in the files. There is one, or with ``is_stack`` one for each
            expert, in order.
        shape: the shape of each of these tensors.
        is_stack: whether our tensor is the stack of these tensors, with the expert as its first
            dim.
        is_transposed: whether the last two dims of our tensor are the other way round there.
        rows: (begin, end) of the matrix in the file, or of each matrix if it holds several, if our
            tensor is that part of it; None: our tensor is the whole.
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
            return (*self.shape[: self.row_dim], end - begin, *self.shape[self.row_dim + 1 :])
        if self.is_transposed:
            return (*self.shape[:-2], *self.shape[:-3:-1])
        return self.shape

    @property
    def row_dim(self) -> int:
        """The dim of the tensor in the file that counts rows of a matrix: a vector has only one."""
        return max(0, len(self.shape) - 2)


def hf_locations(table: ParameterTable) -> dict[str, Location]:
    """Return the place of each parameter in the published files of Hugging Face, by our name.

    Matrices that the table gives one name in files lie in one tensor there, whose rows are those of
    the first matrix of a block, then those of the second, and so on.

    Args:
        table: of a model that ``huggingface.make_config`` accepts.
    """
    sharing: dict[str, dict[str, Row]] = {}
    for name, row in table.parameters():
        sharing.setdefault(in_block(row.hf, name), {})[name] = row

    locations: dict[str, Location] = {}
    for in_files, rows in sharing.items():
        if len(rows) > 1:
            locations |= _parts_of_one(in_files, rows)
            continue
        ((name, row),) = rows.items()
        if "@" not in in_files:
            locations[name] = Location((in_files,), row.shape)
            continue
        of_experts = tuple(in_files.replace("@", str(expert)) for expert in range(row.shape[0]))
        locations[name] = Location(of_experts, row.shape[1:], is_stack=True)
    return locations


def _parts_of_one(in_files: str, rows: Mapping[str, Row]) -> dict[str, Location]:
    """Return the places of matrices whose rows make one tensor in the files."""
    columns = {row.shape[1:] for row in rows.values()}
    assert len(columns) == 1, f"{in_files} joins matrices of several widths"
    whole = (sum(row.shape[0] for row in rows.values()), *columns.pop())
    places, begin = {}, 0
    for name, row in rows.items():
        end = begin + row.shape[0]
        places[name] = Location((in_files,), whole, rows=(begin, end))
        begin = end
    return places


def in_block(name_in_files: str, name: str) -> str:
    """Put the number of the block of the parameter ``name`` into its name in files."""
    assert name_in_files, f"{name} has no place in these files"
    return name_in_files.replace("#", name.split(".")[1])
