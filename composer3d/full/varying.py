"""Over which axes the values of a tensor vary between ranks, followed through a step.

A type of a tensor, in terms of the mesh: over each axis of a stage its values are the same on all
ranks (replicated), or they vary (sharded, or partial: a summand). JAX's ``shard_map`` checks the
same property as "varying manual axes", and Meta's ``spmd_types`` does for PyTorch. What is computed
from values that vary, varies; a sum or a gathering over an axis makes values the same over it.

The type is written down on storages, and begins at parameters and at the batch. Two things follow
from it without a formula for any layer: where activations meet (the ends of blocks and stages),
they have the type of the residual stream; and a gradient is partial over exactly those axes over
which it varies and its parameter does not.

Axes are cut into digits of a rank's number (``places.Digit``), because experts cut a stage into ep
and efsdp, which are no axes of the other parameters.

What it does not see: a rank that takes its own part of a tensor by its number, so that a value
which varies passes as the same. A value that is the same passes as one that varies where it shares
its memory, or the list that an operator gets, with one that varies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.dryrun.collectives import Message, tensors_in
from composer3d.full.places import SAME, Digit, Varying, digits_of, names
from composer3d.parallel.pipeline.ties import local_shard

_VARYING, _FIXED = "composer3d_varying", "composer3d_fixed_varying"
_UNREAD = "composer3d_unread"


def varying(tensor: Tensor) -> Varying:
    """Return over which digits the values of a tensor of any shape vary; a DTensor: its shard's."""
    return _type_of(vars(local_shard(tensor).untyped_storage()))


def _type_of(known: Mapping[str, Any]) -> Varying:
    """Return the type that is written down on a storage."""
    fixed: Varying | None = known.get(_FIXED)
    return known.get(_VARYING, SAME) if fixed is None else fixed


def fix(tensor: Tensor, digits: Varying) -> None:
    """Say over which digits the values of a tensor of any shape vary, whatever is written to it."""
    vars(local_shard(tensor).untyped_storage())[_FIXED] = digits


def of_placements(parameter: Tensor, digits: Sequence[Digit]) -> Varying:
    """Return over which digits a parameter of any shape varies: those that cut a DTensor."""
    if not isinstance(parameter, DTensor):
        return SAME
    mesh = parameter.device_mesh
    cuts = [
        digits_of(dist.get_process_group_ranks(mesh.get_group(dim)), digits)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    return SAME.union(*cuts)


class _Access(NamedTuple):
    """How an operator uses its arguments.

    Attributes:
        writes: the places of those that it writes to.
        writes_named: the names of the keywords that it writes to.
        overwrites: it does not read what it writes to.
        is_view: it makes tensors that share the memory of an argument, and does nothing else.
        is_constant: it makes a tensor of equal values, and reads the size of its argument only.
    """

    writes: tuple[int, ...]
    writes_named: tuple[str, ...]
    overwrites: bool
    is_view: bool
    is_constant: bool


class Follower:
    """Writes down the types of all that operators make, and which results nothing has read.

    Args:
        digits: of a rank's number.

    Attributes:
        unread: what collectives and messages have brought and no operator has read, by a number.
    """

    def __init__(self, digits: Sequence[Digit]) -> None:
        self.unread: dict[int, str] = {}
        self._digits = digits
        self._numbers = count()
        self._accesses: dict[Any, _Access] = {}
        self._groups: dict[str, Varying] = {}
        self._sent: dict[str, Varying] = {}

    def follow(
        self, operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any
    ) -> list[Tensor]:
        """Write down the types of what an operator has made or changed, which sends nothing.

        Returns:
            The tensors of any shape that it has changed.
        """
        access = self._accesses.get(operator)
        if access is None:
            access = self._accesses[operator] = _access_of(operator)
        if access.is_view and not _is_copy(result, arguments):
            return []
        targets = [arguments[place] for place in access.writes if place < len(arguments)]
        targets += [keywords[name] for name in access.writes_named if name in keywords]
        read = [
            argument
            for place, argument in enumerate(arguments)
            if not (access.overwrites and place in access.writes)
        ]
        read += [value for name, value in keywords.items() if name not in access.writes_named]
        joined = SAME if access.is_constant else self._read(read)
        changed = list(tensors_in(targets))
        for tensor in changed or tensors_in(result):
            _write(tensor, joined)
        return changed

    def follow_message(
        self, message: Message, is_functional: bool, arguments: Sequence[Any], result: Any
    ) -> None:
        """Write down the types of what a collective has made."""
        over = self._over(message.group)
        source, target = arguments[0], arguments[0]
        if is_functional:
            target = result
        elif message.operation in ("all_gather", "reduce_scatter", "all_to_all"):
            source = arguments[1]
        given = SAME if message.operation == "recv" else self._read([source])
        name = message.group.group_name
        match message.operation:
            case "all_gather" | "all_reduce" | "broadcast":
                made = given - over
            case "send":
                self._sent[name] = self._sent.get(name, SAME) | given
                return
            case "recv":
                # Ranks of a ring do alike: what arrives is of the type of what was sent.
                made = self._sent.get(name, SAME) | over
            case _:
                made = given | over
        for tensor in tensors_in(target):
            _write(tensor, made)
            if message.group.size() > 1 and tensor.numel():
                number = next(self._numbers)
                vars(tensor.untyped_storage())[_UNREAD] = number
                self.unread[number] = message.operation

    def _read(self, arguments: Sequence[Any]) -> Varying:
        """Return the type of what is made of some arguments, which are read now."""
        joined = SAME
        for tensor in tensors_in(arguments):
            known = vars(tensor.untyped_storage())
            if _UNREAD in known:
                self.unread.pop(known.pop(_UNREAD), None)
            joined |= _type_of(known)
        return joined

    def _over(self, group: dist.ProcessGroup) -> Varying:
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[name] = digits_of(ranks, self._digits)
        return self._groups[name]


# Operators that do not read what they write to.
_OVERWRITERS = frozenset(("copy_", "_foreach_copy_", "fill_", "zero_"))
_CONSTANTS = frozenset(
    ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)


def _is_copy(result: Any, arguments: Sequence[Any]) -> bool:
    """Return whether an operator that may make a view, such as ``to``, has made a copy."""
    if not (isinstance(result, Tensor) and arguments and isinstance(arguments[0], Tensor)):
        return False
    return result.untyped_storage()._cdata != arguments[0].untyped_storage()._cdata


def _access_of(operator: Any) -> _Access:
    entries = [
        (place, entry)
        for place, entry in enumerate(operator._schema.arguments)
        if entry.alias_info is not None and entry.alias_info.is_write
    ]
    named = tuple(entry.name for _, entry in entries if entry.kwarg_only)
    leaf = operator.name().partition("::")[2].partition(".")[0]
    returned = [entry.alias_info for entry in operator._schema.returns]
    return _Access(
        writes=tuple(place for place, entry in entries if not entry.kwarg_only),
        writes_named=named,
        overwrites=leaf in _OVERWRITERS or bool(named),
        is_view=leaf == "wait_tensor"
        or (bool(returned) and not entries and all(alias is not None for alias in returned)),
        is_constant=leaf in _CONSTANTS,
    )


def _write(tensor: Tensor, digits: Varying) -> None:
    storage = tensor.untyped_storage()
    known = vars(storage)
    if tensor.nbytes < storage.nbytes():
        digits = digits | known.get(_VARYING, SAME)
    if digits or _VARYING in known:
        known[_VARYING] = digits


class Seams:
    """Where values of a known type meet: collects those that vary over more.

    Attributes:
        seen: how many were compared.
        wrong: what is wrong with which values, in words.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.wrong: dict[str, str] = {}

    def expect(self, what: str, tensor: Tensor, most: Varying) -> None:
        """Compare the type of a tensor of any shape with the digits over which it may vary."""
        more = varying(tensor) - most
        self.agree(what, not more, f"vary between the ranks of {names(more)}")

    def agree(self, what: str, is_right: bool, problem: str) -> None:
        """Count something that was compared, and keep its problem if it is wrong."""
        self.seen += 1
        if not is_right:
            self.wrong[what] = f"{what} {problem}"

    def watch(self, what: str, most: Varying) -> Callable[[Any, Any, Any], None]:
        """Return a forward hook that compares a module's output, and in backward its gradient."""

        def see(_: Any, __: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                self.expect(f"the activations after {what}", tensor, most)
                if tensor.requires_grad:
                    tensor.register_hook(see_gradient)

        def see_gradient(gradient: Tensor) -> None:
            self.expect(f"the gradients of the activations after {what}", gradient, most)

        return see

    def __iter__(self) -> Iterator[str]:
        return iter(self.wrong.values())
