"""Traces gradients through a step: over which ranks each was summed, and how it was scaled.

A path begins when backward adds a gradient to ``.grad`` of a parameter. Until the optimizer reads
it, all operations on it are linear: it is copied, cut, joined, added and summed over ranks. So its
path is a list of sums and a factor. Paths are recorded on storages, by byte range, because FSDP
keeps the gradients of a unit in one buffer. An operator that this module does not know ends a path,
and the gradient that the optimizer reads then has none.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from composer3d.dryrun.collectives import tensors_in
from composer3d.full.places import SAME, Varying
from composer3d.runtime.torch_private import group_of_argument, reduction_of_argument


class Sum(NamedTuple):
    """A sum over ranks.

    Attributes:
        operation: "all_reduce", "reduce_scatter", or "all_to_all" that a local addition completes.
        ranks: the global ranks that take part.
        is_done: whether the contributions have been added, and not only exchanged.
    """

    operation: str
    ranks: tuple[int, ...]
    is_done: bool = True


class GradientPath(NamedTuple):
    """The path of a parameter's gradient from backward to the optimizer.

    Attributes:
        sums: the sums over ranks, in order.
        factor: the product of all scalars that the gradient was multiplied by.
        partial_over: the digits over which the gradient was partial when backward computed it.
        additions: how often backward has added to this gradient.
        problem: an operation that no gradient should undergo, in words, or "".
    """

    sums: tuple[Sum, ...] = ()
    factor: float = 1.0
    problem: str = ""
    partial_over: Varying = SAME
    additions: int = 0


Paths = Mapping[str, GradientPath]

# Operators by their effect on a gradient. Views need no row: they share the storage.
_COPIES = frozenset(("_to_copy", "clone", "cat", "stack", "constant_pad_nd", "sum", "alias_copy"))
_COPIES_INTO = frozenset(
    ("copy_", "chunk_cat", "chunk_cat_mixed_dtype", "split_with_sizes_copy", "_foreach_copy_")
)
_ADDS = frozenset(("add", "add_", "_foreach_add_"))
_SCALED = "a multiple of it is added"
_SCALES = {"mul": 1, "div": -1, "mul_": 1, "div_": -1, "_foreach_mul_": 1, "_foreach_div_": -1}
_CLEARS = frozenset(("zero_", "fill_", "resize_"))
_REDUCES = {
    "allreduce_": (0, 0),
    "allreduce_coalesced_": (0, 0),
    "_reduce_scatter_base_": (0, 1),
    "reduce_scatter_tensor_coalesced_": (0, 1),
    "alltoall_base_": (0, 1),
}
_NAMES = {"allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce"}
_AVERAGE = "average"

_ATTRIBUTE = "composer3d_paths"


class _Range(NamedTuple):
    begin: int
    end: int
    paths: Paths


def begin(name: str, gradient: Tensor, partial_over: Varying = SAME) -> None:
    """Begin the path of a parameter's gradient of any shape, or count a further addition to it."""
    before = paths_of(gradient).get(name)
    if before is not None and before.sums:
        path = before._replace(problem="backward adds to what was summed over ranks before")
    else:
        path = before or GradientPath()
    path = path._replace(
        partial_over=path.partial_over | partial_over, additions=path.additions + 1
    )
    _write(gradient, {name: path})


def paths_of(tensor: Tensor) -> Paths:
    """Return the paths of the gradients that a tensor of any shape holds, by parameter name."""
    found: Paths = {}
    first, end = _extent(tensor)
    for one in vars(tensor.untyped_storage()).get(_ATTRIBUTE, ()):
        if one.begin < end and first < one.end:
            found = _merged(found, one.paths)
    return found


def follow(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> None:
    """Record what an operator has done with the gradients among its arguments.

    Args:
        name: of the operator, with namespace and without overload, such as "aten::add_".
        arguments, keywords: those of the call, with tensors of any shape.
        result: what the call returned.
    """
    namespace, _, leaf = name.partition("::")
    if namespace == "c10d":
        if leaf in _REDUCES:
            _sum_over_ranks(leaf, arguments)
        return
    if leaf in _COPIES:
        sources = _paths_of_all(arguments)
        if sources:
            if leaf == "sum":
                sources = {key: _added(path) for key, path in sources.items()}
            for target in tensors_in(keywords.get("out", result)):
                _write(target, sources)
    elif leaf in _COPIES_INTO:
        sources = _paths_of_all(arguments[1:] if leaf.endswith("copy_") else arguments)
        for target in tensors_in(keywords.get("out", arguments[0])):
            _write(target, sources)
    elif leaf in _ADDS:
        alpha = keywords.get("alpha", arguments[2] if len(arguments) > 2 else 1)
        targets, others = (list(tensors_in(argument)) for argument in arguments[:2])
        results = targets if leaf != "add" else tensors_in(result)
        for target, one, other in zip(results, targets, others, strict=False):
            before, more = paths_of(one), paths_of(other)
            if more and alpha != 1:
                more = {name: path._replace(problem=_SCALED) for name, path in more.items()}
            if before or more:
                _write(target, _merged(before, more, are_added=True))
    elif leaf in _SCALES:
        _scale(arguments, result, _SCALES[leaf])
    elif leaf in _CLEARS or _changes(leaf):
        for target in tensors_in(arguments[:1]):
            _write(target, {})


def _changes(leaf: str) -> bool:
    """Return whether an operator that is in no table changes its first argument in place."""
    return leaf.endswith("_") and not leaf.endswith("__")


def _sum_over_ranks(leaf: str, arguments: Sequence[Any]) -> None:
    into, source = (list(tensors_in(arguments[place])) for place in _REDUCES[leaf])
    paths = [paths_of(tensor) for tensor in source]
    if not any(paths):
        return
    group, kind = _group_and_kind(arguments)
    is_exchange = leaf == "alltoall_base_"
    operation = "all_to_all" if is_exchange else _NAMES.get(leaf, "reduce_scatter")
    done = Sum(operation, group, is_done=not is_exchange)

    def summed(path: GradientPath) -> GradientPath:
        path = path._replace(sums=(*path.sums, done))
        if kind == _AVERAGE:
            return path._replace(factor=path.factor / len(group))
        return path if is_exchange or kind == "sum" else path._replace(problem=f"a {kind} of ranks")

    for target, of_source in zip(into, paths, strict=True):
        _write(target, {name: summed(path) for name, path in of_source.items()})


def _group_and_kind(arguments: Sequence[Any]) -> tuple[tuple[int, ...], str]:
    group, kind = None, "sum"
    for argument in arguments:
        reduction = reduction_of_argument(argument)
        if reduction is not None:
            kind = reduction
        elif type(argument).__name__ in ("ScriptObject", "ProcessGroup"):
            group = group_of_argument(argument)
    assert group is not None
    return tuple(dist.get_process_group_ranks(group)), kind


def _added(path: GradientPath) -> GradientPath:
    return path._replace(sums=tuple(one._replace(is_done=True) for one in path.sums))


def _scale(arguments: Sequence[Any], result: Any, power: int) -> None:
    paths = _paths_of_all(arguments[:1])
    if not paths:
        return
    factor = arguments[1]
    if isinstance(factor, int | float):
        changed = {
            name: path._replace(factor=path.factor * float(factor) ** power)
            for name, path in paths.items()
        }
    else:
        words = "it is multiplied by a tensor"
        changed = {name: path._replace(problem=words) for name, path in paths.items()}
    for target in tensors_in(arguments[0] if result is None else result):
        _write(target, changed)


def _paths_of_all(arguments: Iterable[Any]) -> Paths:
    found: Paths = {}
    for argument in arguments:
        for tensor in tensors_in(argument):
            more = paths_of(tensor)
            found = _merged(found, more) if more else found
    return found


def _merged(one: Paths, other: Paths, *, are_added: bool = False) -> Paths:
    """Return the paths of two tensors that are joined or added."""
    if not one or not other:
        return one or other
    both = {**one, **other}
    for name in one.keys() & other.keys():
        first, second = one[name], other[name]
        additions = (first.additions + second.additions) if are_added else first.additions
        if first._replace(additions=0) != second._replace(additions=0):
            words = "what was summed over some ranks is added to what was not"
            first = first._replace(problem=first.problem or words)
        both[name] = first._replace(additions=additions)
    return both


def _write(tensor: Tensor, paths: Paths) -> None:
    storage = vars(tensor.untyped_storage())
    if not paths and _ATTRIBUTE not in storage:
        return
    first, end = _extent(tensor)
    kept = []
    for one in storage.get(_ATTRIBUTE, ()):
        if one.begin < first:
            kept.append(one._replace(end=min(one.end, first)))
        if one.end > end:
            kept.append(one._replace(begin=max(one.begin, end)))
    storage[_ATTRIBUTE] = [*kept, _Range(first, end, paths)] if paths else kept


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the byte range of a tensor in its storage, as begin and end."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if not prod(tensor.shape):
        # A rank without rows still has a gradient, with the path of the buffer that it is cut from.
        return first, first + 1
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (1 + int(steps)) * size
