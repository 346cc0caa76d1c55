"""The table of a model's parameters, from which all else that is said of them derives. No torch.

Counts, the globs of the sharding plan, the planner's sums and traffic, and the names in formats of
others come from it. Tests compare the table with the model's own modules.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

# How tensor parallelism cuts a module. ``parallel.tensor.styles`` has the placements of each style.
#   embedding  The rows of the vocabulary are cut. A rank gives 0 for the tokens of other ranks'
#              rows, and the outputs of all ranks are summed.
#   norm       Not cut. Under sequence parallelism, it runs on this rank's part of the sequence.
#   whole      A linear layer that is not cut. Otherwise as "norm".
#   router     Not cut. It chooses experts for this rank's part of the sequence.
#   head_norm  Not cut. It runs on this rank's heads.
#   column_norm, kv_column_norm
#              A ``torch.nn.RMSNorm`` over all heads of a "column" or "kv_column" together: (B, T,
#              heads, head width). Its weight is cut like theirs. The ranks average the mean squares
#              of each token.
#   gather     A module that contains columns and has no parameters of its own. It gathers their
#              input once, for all of them.
#   column     The output features are cut. It must lie below a module of style "gather".
#   kv_column  As column, but cut by key-value heads, which may be fewer than ranks.
#   row        The input features are cut. The outputs of all ranks are summed, so it can have no
#              bias.
#   head       The rows of the vocabulary are cut. It is called with (h_BTC, labels_BT) and returns
#              the summed loss. It has ``weight`` and the seam ``cross_entropy(logits_NV,
#              labels_N)``. To compute the loss in parts, it also needs ``chunks``, as
#              ``models.layers.head.Head`` has.
Style = Literal[
    "embedding",
    "norm",
    "whole",
    "router",
    "head_norm",
    "column_norm",
    "kv_column_norm",
    "gather",
    "column",
    "kv_column",
    "row",
    "head",
]

# The styles of a norm over all heads, which tp cuts.
NORMS_OVER_HEADS = frozenset[Style]({"column_norm", "kv_column_norm"})

# The style of a parameter. "experts": its first dim is the expert, and tp does not cut it.
ParameterStyle = Style | Literal["experts"]


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same initial value for all elements."""

    value: float


class Row(NamedTuple):
    """One parameter.

    Attributes:
        name: within its unit: "attn.wq.weight" in a block.
        shape: of the whole parameter.
        style: how tp cuts the module that it belongs to.
        init: its initial values.
        gather: the module within the unit that gathers the input of its module, if that is not the
            one that holds its module.
        gathered: the width of what that module gathers, if its own module reads only a part of it.
        float8: whether it may multiply in float8.
        is_unread: whether nothing in backward reads what its module returns (``ShardingPlan``).
        trains: whether it can have a gradient; the bias of a router cannot.
        tied_to: the global name of the parameter that it is, if that stands elsewhere in the table.
        hf: the name in files of Hugging Face. ``#`` stands for the number of the block, and ``@``
            for the number of the expert, if files have a tensor for each expert. Empty: it has no
            place there.
        meta: the name in files of Meta, likewise.
        is_rotary: whether its rows belong to heads that are rotated. Meta orders such rows in
            another way.
    """

    name: str
    shape: tuple[int, ...]
    style: ParameterStyle
    init: Normal | Constant
    gather: str = ""
    gathered: int = 0
    float8: bool = False
    is_unread: bool = False
    trains: bool = True
    tied_to: str = ""
    hf: str = ""
    meta: str = ""
    is_rotary: bool = False

    @property
    def elements(self) -> int:
        """The number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dims beside that of the experts."""
        return len(self.shape) - (self.style == "experts") > 1

    @property
    def module(self) -> str:
        """The name of its module within the unit."""
        return self.name.rpartition(".")[0]

    @property
    def gathers(self) -> str:
        """The name within the unit of the module that gathers the input of its module."""
        return self.gather or self.module.rpartition(".")[0]


class Globs(NamedTuple):
    """The tables of a ``ShardingPlan`` that follow from the parameters."""

    tensor: dict[str, Style]
    init: dict[str, Normal | Constant]
    attend: str
    experts: str | None
    unread: tuple[str, ...]
    float8: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ParameterTable:
    """All parameters of a model, in its own order.

    Attributes:
        first: the parameters before the blocks.
        blocks: the parameters of each block. Blocks of a kind share one tuple.
        last: the parameters after the blocks.
        attention: the name, within a block, of the module that attends across tokens.
        first_only_looks_up: whether ``first`` does nothing with its parameters but look up rows.
    """

    first: tuple[Row, ...]
    blocks: tuple[tuple[Row, ...], ...]
    last: tuple[Row, ...]
    attention: str
    first_only_looks_up: bool = False

    def units(self) -> Iterator[tuple[str, tuple[Row, ...]]]:
        """Yield the name and the rows of ``first``, of each block and of ``last``."""
        yield "first", self.first
        for number, rows in enumerate(self.blocks):
            yield f"blocks.{number}", rows
        yield "last", self.last

    def parameters(self) -> Iterator[tuple[str, Row]]:
        """Yield each parameter with its global name. A tied one is yielded once."""
        for unit, rows in self.units():
            for row in rows:
                if not row.tied_to:
                    yield f"{unit}.{row.name}", row

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter by its global name."""
        return {name: row.shape for name, row in self.parameters()}

    def trainable_names(self) -> list[tuple[str, ...]]:
        """Return the global names of the parameters that can have a gradient, for each unit."""
        return [
            tuple(f"{unit}.{row.name}" for row in rows if row.trains and not row.tied_to)
            for unit, rows in self.units()
        ]

    def hidden_matrices(self) -> frozenset[str]:
        """Return the global names of the matrices within blocks, without routers."""
        styles = ("column", "kv_column", "row", "whole", "experts")
        return frozenset(
            name for name, row in self.parameters() if row.style in styles and row.is_matrix
        )

    @cached_property
    def block_kinds(self) -> list[tuple[tuple[Row, ...], int]]:
        """The rows of each kind of block, and the number of such blocks."""
        rows_of = {id(rows): rows for rows in self.blocks}  # to hash all rows would take long
        return [(rows_of[kind], count) for kind, count in Counter(map(id, self.blocks)).items()]

    @cached_property
    def kinds(self) -> Mapping[str, Row]:
        """One row for each name, in which ``*`` stands for the number of the block."""
        found = {f"first.{row.name}": row for row in self.first}
        for rows, _ in self.block_kinds:
            found |= {f"blocks.*.{row.name}": row for row in rows}
        return found | {f"last.{row.name}": row for row in self.last}

    def globs(self) -> Globs:
        """Return the globs of a sharding plan. Each matches the parameters of one kind.

        A module that holds columns gathers their input: it gets the style "gather".
        """
        tensor: dict[str, Style] = {}
        experts = None
        unread: dict[str, None] = {}
        float8: dict[str, None] = {}
        for name, row in self.kinds.items():
            module = name.rpartition(".")[0]
            if row.float8:
                float8[module] = None
            if row.style == "experts":
                experts = module
                continue
            if row.style in ("column", "kv_column"):
                tensor[name.removesuffix(row.name) + row.gathers] = "gather"
            tensor[module] = row.style
            if row.is_unread:
                unread[module] = None
        init = {name: row.init for name, row in self.kinds.items() if not row.tied_to}
        attend = f"blocks.*.{self.attention}"
        return Globs(tensor, init, attend, experts, tuple(unread), tuple(float8))
