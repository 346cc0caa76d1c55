"""Counts the collectives of a step by mesh axis, in a dry run and in a real one.

Bytes are those that one rank sends, with n ranks in the group and x the bytes of a rank's part:

- all_gather sends (n - 1) x, of the part that the rank brings; reduce_scatter sends (n - 1) x, of
  the part that it keeps;
- all_reduce of x bytes sends 2 (n - 1) / n x: a reduce-scatter and an all-gather;
- all_to_all sends all rows but the rank's own;
- send sends x. For recv, the bytes are those that arrive.

No algorithm sends less. Groups of one rank send nothing, and are not counted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import (
    DispatchMode,
    body_of,
    group_by_name,
    group_of_argument,
)

# The axis of a collective over all ranks that belongs to no other axis.
WORLD = "world"


class Message(NamedTuple):
    """What one rank sends in one collective.

    Attributes:
        operation: such as "all_gather".
        group: the ranks that take part.
        dtype: of its first tensor; None: it has no tensor.
        sent_bytes: by the rules of this module.
    """

    operation: str
    group: dist.ProcessGroup
    dtype: torch.dtype | None
    sent_bytes: int


@dataclass
class Usage:
    """How often an operation was called, and the bytes of all calls."""

    count: int = 0
    sent_bytes: int = 0


# By axis and operation.
Traffic = dict[str, dict[str, Usage]]


class _Kind(NamedTuple):
    """How to read the arguments of an operator.

    Attributes:
        operation: our name for it.
        part: the place of the argument that holds the rank's part.
    """

    operation: str
    part: int


# The operators of process groups. Each takes its group as an object.
_OF_GROUPS: dict[str, _Kind] = {
    "allreduce_": _Kind("all_reduce", 0),
    "allreduce_coalesced_": _Kind("all_reduce", 0),
    "allgather_": _Kind("all_gather", 1),
    "_allgather_base_": _Kind("all_gather", 1),
    "allgather_into_tensor_coalesced_": _Kind("all_gather", 1),
    "reduce_scatter_": _Kind("reduce_scatter", 0),
    "_reduce_scatter_base_": _Kind("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": _Kind("reduce_scatter", 0),
    "alltoall_base_": _Kind("all_to_all", 1),
    "alltoall_": _Kind("all_to_all", 1),
    "broadcast_": _Kind("broadcast", 0),
    "send": _Kind("send", 0),
    "recv_": _Kind("recv", 0),
    "barrier": _Kind("barrier", 0),
}

# The operators that DTensor calls. Each takes the name of its group.
_FUNCTIONAL: dict[str, _Kind] = {
    "all_reduce": _Kind("all_reduce", 0),
    "all_reduce_": _Kind("all_reduce", 0),
    "all_gather_into_tensor": _Kind("all_gather", 0),
    "all_gather_into_tensor_out": _Kind("all_gather", 0),
    "reduce_scatter_tensor": _Kind("reduce_scatter", 0),
    "all_to_all_single": _Kind("all_to_all", 0),
    "broadcast": _Kind("broadcast", 0),
    "broadcast_": _Kind("broadcast", 0),
}


_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def is_collective(operator: Any) -> bool:
    """Return whether ``operator`` communicates, or waits for something that does."""
    return operator.name().partition("::")[0] in _NAMESPACES


def message_of(operator: Any, arguments: Sequence[Any]) -> Message | None:
    """Return what a call of ``operator`` sends, or None if it is no collective.

    Raises:
        RuntimeError: this module does not know the collective.
    """
    namespace, _, name = operator.name().partition("::")
    if namespace not in _NAMESPACES:
        return None
    table = _OF_GROUPS if namespace == "c10d" else _FUNCTIONAL
    name = name.partition(".")[0]
    if name == "wait_tensor":
        return None
    if name not in table:
        raise RuntimeError(f"the collective {operator} is not known here; add it to collectives.py")
    kind = table[name]
    group = _group_of(operator, arguments)
    parts = list(tensors_in(arguments[kind.part]))
    part_bytes = sum(tensor.nbytes for tensor in parts)
    if kind.operation == "reduce_scatter" and table is _FUNCTIONAL:
        part_bytes //= group.size()  # the argument is the whole
    sent_bytes = part_bytes
    match kind.operation:
        case "all_gather" | "reduce_scatter":
            sent_bytes = (group.size() - 1) * part_bytes
        case "all_reduce":
            sent_bytes = round(2 * (group.size() - 1) / group.size() * part_bytes)
        case "all_to_all":
            own_rows, all_rows = _own_rows(operator, arguments, group)
            sent_bytes = part_bytes * (all_rows - own_rows) // max(all_rows, 1)
        case "barrier":
            sent_bytes = 0
    return Message(kind.operation, group, parts[0].dtype if parts else None, sent_bytes)


def tensors_in(argument: Any) -> Iterable[Tensor]:
    """Iterate over a tensor of any shape, or over the tensors of nested lists and tuples.

    Anything else gives nothing.
    """
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from tensors_in(item)


def _group_of(operator: Any, arguments: Sequence[Any]) -> dist.ProcessGroup:
    for entry, argument in zip(operator._schema.arguments, arguments, strict=False):
        if entry.name == "group_name":
            return group_by_name(argument)
        if entry.name == "process_group":
            return group_of_argument(argument)
    raise RuntimeError(f"the collective {operator} has no argument with its process group")


def _own_rows(operator: Any, arguments: Sequence[Any], group: dist.ProcessGroup) -> tuple[int, int]:
    """Return how many rows of an all-to-all stay on this rank, and how many there are."""
    for entry, argument in zip(operator._schema.arguments, arguments, strict=False):
        if entry.name == "input_split_sizes" and argument:
            return int(argument[group.rank()]), int(sum(argument))
    return 1, group.size()


# The axis over which the body of a custom operator communicates. Its group may be that of another
# axis as well: with dp_shard = 1, cp and fsdp have the same ranks, and torch makes one group.
_AXIS_OF_OPERATOR = {
    "composer3d::ring_attention": "cp",
    "composer3d::ring_attention_backward": "cp",
    "composer3d::all_to_all": "cp",
    "composer3d::exchange_counts": "ep",
    "composer3d::exchange_rows": "ep",
    "composer3d::sum_counts": "sequence",
}


class CollectiveCounter:
    """The collectives of a rank, by axis and operation.

    Args:
        axis_of: returns the axis of a message; see ``axis_names``.

    Attributes:
        traffic: what was counted.
        groups: the groups of each axis in ``traffic``: of pp, one for each pair of neighbours.
    """

    def __init__(self, axis_of: Callable[[Message], str]) -> None:
        self._axis_of = axis_of
        self.traffic: Traffic = {}
        self.groups: dict[str, set[dist.ProcessGroup]] = {}
        self._axis: str | None = None

    @contextmanager
    def inside(self, operator: Any) -> Iterator[None]:
        """Count the collectives inside of the context for the axis of this custom operator."""
        before = self._axis
        self._axis = _AXIS_OF_OPERATOR.get(operator.name(), before)
        yield
        self._axis = before

    def axis(self, message: Message) -> str:
        """Return the axis for which a message counts."""
        return self._axis or self._axis_of(message)

    def see(self, operator: Any, arguments: Sequence[Any]) -> None:
        """Count the call of an operator, if it is a collective."""
        message = message_of(operator, arguments)
        if message is None or message.group.size() == 1:
            return
        axis = self.axis(message)
        self.groups.setdefault(axis, set()).add(message.group)
        operations = self.traffic.setdefault(axis, {})
        usage = operations.setdefault(message.operation, Usage())
        usage.count += 1
        usage.sent_bytes += message.sent_bytes


class CountCollectives(DispatchMode):
    """Counts the collectives of a real run, on this rank and in this thread.

    Use it as a context. Custom operators are run as their bodies, so that what these send counts.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._counter = CollectiveCounter(axis_names(mesh))

    @property
    def traffic(self) -> Traffic:
        """The collectives counted so far, by axis and operation."""
        return self._counter.traffic

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(of_argument, DTensor) for of_argument in types):
            return NotImplemented  # DTensor calls the operators of its shards
        body = body_of(operator)
        if body is not None:
            with self, self._counter.inside(operator):
                return body(*arguments, **(keywords or {}))
        self._counter.see(operator, arguments)
        return operator(*arguments, **(keywords or {}))


def axis_names(mesh: Mesh) -> Callable[[Message], str]:
    """Return a function that names the axis of a message: see ``Mesh.axis_of``.

    An axis may have all ranks of the job, and then has the group of the world. An all-reduce of
    float64 in this group is a sum of scalars, such as the loss, and so of the world.
    """

    def axis_of(message: Message) -> str:
        group, world = message.group, dist.group.WORLD
        is_world = world is not None and group.group_name == world.group_name
        if is_world and message.operation == "all_reduce" and message.dtype is torch.float64:
            return WORLD
        return mesh.axis_of(group)

    return axis_of
