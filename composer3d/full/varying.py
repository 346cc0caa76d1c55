"""Traces through a step over which axes the values of a tensor vary between ranks.

That is a tensor's type: over each axis of a stage, its values are either the same on all ranks
(replicated) or vary (sharded, or partial: a summand). JAX's ``shard_map`` checks the same property
as "varying manual axes", and Meta's ``spmd_types`` does so for PyTorch. What is computed from
varying values varies; a sum or an all-gather over an axis makes values the same over it.

Types are recorded on storages. Those of parameters and of the batch are given. Two checks follow
without a formula for any layer: at the ends of blocks and stages, activations must have the type of
the residual stream; and a gradient is partial over exactly the axes over which it varies but its
parameter does not.

Axes are cut into digits of a rank's number (``places.Digit``), because experts cut a stage into ep
and efsdp, which are not axes of other parameters.

Limits: if a rank takes its own part of a tensor by its rank number, the result varies but passes as
the same. A value that is the same passes as varying if it shares its memory, or an operator's list
of tensors, with one that varies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Return the digits over which a tensor of any shape varies; for a DTensor, its shard."""
    return _type_of(vars(local_shard(tensor).untyped_storage()))


def _type_of(known: Mapping[str, Any]) -> Varying:
    """Return the type that is recorded on a storage."""
    fixed: Varying | None = known.get(_FIXED)
    return known.get(_VARYING, SAME) if fixed is None else fixed


def fix(tensor: Tensor, digits: Varying) -> None:
    """Set the digits over which a tensor of any shape varies, whatever is written to it later."""
    vars(local_shard(tensor).untyped_storage())[_FIXED] = digits


def of_placements(parameter: Tensor, digits: Sequence[Digit]) -> Varying:
    """Return the digits over which a parameter of any shape varies: those that shard a DTensor."""
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
        writes: the positions of arguments that it writes to.
        writes_named: the names of keyword arguments that it writes to.
        overwrites: whether it does not read what it writes to.
        is_view: whether it only makes tensors that share the memory of an argument.
        is_constant: whether it makes a constant or an empty tensor, and reads only the size of its
            argument.
    """

    writes: tuple[int, ...]
    writes_named: tuple[str, ...]
    overwrites: bool
    is_view: bool
    is_constant: bool


class Follower:
    """Records the types of all results of operators, and received tensors that were never read.

    Args:
        digits: the digits of a rank's number.

    Attributes:
        unread: the operations whose results no operator has read yet, by a running number.
        next_number: the number of the next result.
    """

    def __init__(self, digits: Sequence[Digit]) -> None:
        self.unread: dict[int, str] = {}
        self._digits = digits
        self.next_number = 0
        self._accesses: dict[Any, _Access] = {}
        self._groups: dict[str, Varying] = {}
        self._sent: dict[str, Varying] = {}

    def follow(
        self, operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any
    ) -> list[Tensor]:
        """Record the types of what an operator that sends nothing has made or changed.

        Returns:
            The tensors of any shape that it has changed in place.
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
        """Record the types of what a collective or a message has made."""
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
                # All ranks of a ring do the same, so what arrives has the type of what was sent.
                made = self._sent.get(name, SAME) | over
            case _:
                made = given | over
        for tensor in tensors_in(target):
            _write(tensor, made)
            if message.group.size() > 1 and tensor.numel():
                vars(tensor.untyped_storage())[_UNREAD] = self.next_number
                self.unread[self.next_number] = message.operation
                self.next_number += 1

    def excuse(self, operation: str, most: int, since: int) -> None:
        """Count as read at most ``most`` unread results of an operation.

        They are the first ones whose numbers are at least ``since`` (``next_number``).
        """
        numbers = [number for number, name in self.unread.items() if name == operation]
        for number in [number for number in numbers if number >= since][:most]:
            del self.unread[number]

    def see_read(self, number: Tensor) -> None:
        """Count a tensor of any shape as read, when the host reads it."""
        self._read([number])

    def _read(self, arguments: Sequence[Any]) -> Varying:
        """Return the type of what is computed from arguments, and mark these as read."""
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
# Operators that read only the size of their argument. What is written to an empty tensor later
# decides how that varies.
_CONSTANTS = frozenset(
    (
        *("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
        *("empty_like", "new_empty", "new_empty_strided"),
    )
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
    """Collects values that vary over more digits than they may.

    Attributes:
        seen: how many values were compared.
        wrong: the problem of each wrong value, in words, by what the value is.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.wrong: dict[str, str] = {}

    def expect(self, what: str, tensor: Tensor, most: Varying) -> None:
        """Check that a tensor of any shape varies at most over the digits ``most``."""
        more = varying(tensor) - most
        self.agree(what, not more, f"vary between the ranks of {names(more)}")

    def agree(self, what: str, is_right: bool, problem: str) -> None:
        """Count a comparison, and keep its problem if it failed."""
        self.seen += 1
        if not is_right:
            self.wrong[what] = f"{what} {problem}"

    def watch(self, what: str, most: Varying) -> Callable[[Any, Any, Any], None]:
        """Return a forward hook that checks a module's output, and in backward its gradient."""

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
