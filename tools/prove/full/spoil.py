"""Faults of communication by rule: each way to spoil a call, at each kind of call of a step."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from composer3d.full import places
from composer3d.recipe.schema import MeshTable

# The functions of torch that each kind of call goes through.
_FUNCTIONS: Final = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "all_to_all": "all_to_all_single",
}
ANY: Final = ("drop all", "lose one", "call twice", "last rank skips", "call over another group")
HALF: Final = "send half"
OF_REDUCTIONS: Final = ("take the average", "take the maximum")
OF_MESSAGES: Final = ("drop all", "lose one", "call twice", "last rank skips")
WRONG_NEIGHBOUR: Final = "wrong neighbour"


class _Done:
    """A call that was never made."""

    def wait(self) -> None:
        """Do not wait."""


@dataclass
class Spoil:
    """A way to spoil the calls of one operation over one group.

    Attributes:
        way: one of ``ANY``, ``HALF``, ``OF_REDUCTIONS``, ``OF_MESSAGES`` or ``WRONG_NEIGHBOUR``.
        operation: "message", or a key of ``_FUNCTIONS``.
        group: as in ``places.GROUPS``; "pp" for messages between stages.
        sizes: of the mesh.
    """

    way: str
    operation: str
    group: str
    sizes: MeshTable
    calls: int = 0

    def __str__(self) -> str:
        return f"{self.way}: {self.operation} over {self.group}"

    def __call__(self) -> None:
        """Plant it in this process."""
        if self.operation == "message":
            self._spoil_messages()
            return
        name = _FUNCTIONS[self.operation]
        right = getattr(dist, name)
        signature = inspect.signature(right)

        def spoiled(*arguments: Any, **keywords: Any) -> Any:
            bound = signature.bind(*arguments, **keywords)
            bound.apply_defaults()
            group = bound.arguments["group"] or dist.group.WORLD
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks != places.members(self.group, dist.get_rank(), self.sizes):
                return right(*arguments, **keywords)
            return self._call(lambda: right(*bound.args, **bound.kwargs), bound.arguments, ranks)

        setattr(dist, name, spoiled)

    def _call(self, call: Callable[[], Any], given: dict[str, Any], ranks: Any) -> Any:
        self.calls += 1
        match self.way:
            case "drop all":
                return _Done()
            case "lose one" if self.calls == 2:
                return _Done()
            case "last rank skips" if dist.get_rank() == ranks[-1]:
                return _Done()
            case "call twice":
                call()
            case "call over another group":
                others = {*range(dist.get_world_size())} - {*ranks} or {*ranks[:1]}
                given["group"] = dist.new_group(sorted({dist.get_rank(), min(others)}))
            case "send half":
                name = "tensor" if "tensor" in given else next(n for n in given if "input" in n)
                whole = given[name].flatten()
                given[name] = whole[: whole.numel() // 2]
            case "take the average":
                given["op"] = dist.ReduceOp.AVG
            case "take the maximum":
                given["op"] = dist.ReduceOp.MAX
        return call()

    def _spoil_messages(self) -> None:
        inside = False

        def spoiler(right: Callable[..., Any]) -> Callable[..., Any]:
            def spoiled(operations: list[Any], *others: Any, **keywords: Any) -> Any:
                nonlocal inside
                if inside:
                    return right(operations, *others, **keywords)
                inside = True
                try:
                    changed = [each for one in operations for each in self._message(one)]
                    return right(changed, *others, **keywords) if changed else []
                finally:
                    inside = False

            return spoiled

        torch_schedules._batch_p2p = spoiler(torch_schedules._batch_p2p)
        dist.batch_isend_irecv = spoiler(dist.batch_isend_irecv)

    def _message(self, one: dist.P2POp) -> list[dist.P2POp]:
        ranks = dist.get_process_group_ranks(one.group or dist.group.WORLD)
        expected = places.members(self.group, dist.get_rank(), self.sizes)
        if one.op is not dist.isend or not set(ranks) <= set(expected):
            return [one]
        self.calls += 1
        match self.way:
            case "drop all":
                return []
            case "lose one" if self.calls == 2:
                return []
            case "last rank skips" if dist.get_rank() == ranks[-1]:
                return []
            case "call twice":
                return [one, one]
            case "send half":
                half = one.tensor.flatten()[: one.tensor.numel() // 2]
                return [dist.P2POp(one.op, half, one.peer, one.group)]
            case "wrong neighbour":
                own = ranks.index(dist.get_rank())
                peer = ranks[(2 * own - ranks.index(one.peer)) % len(ranks)]
                return [dist.P2POp(one.op, one.tensor, peer, one.group)]
        return [one]
