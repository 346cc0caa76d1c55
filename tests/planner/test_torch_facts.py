"""What the planner believes of torch, against what FSDP does in a real backward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from composer3d.models.layers.moe import Exchanged, Experts
from composer3d.planner.torch_facts import is_since_2_15
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.torch_private import DispatchMode

MATRICES = 3  # of an expert


class Gradients(DispatchMode):
    """Notes when a gradient of the experts is written, converted, and added to a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        result = operator(*arguments, **(keywords or {}))
        names = {"aten::_grouped_mm": "written", "aten::_to_copy": "converted"}
        name = names.get(operator.name(), "added" if "add_" in operator.name() else None)
        # Nothing but the matrices of experts has three dims.
        if name is not None and result.dim() == MATRICES:
            self.events.append((name, result.dtype))
        return result


def events_of_backwards() -> list[list[tuple[str, torch.dtype]]]:
    """Return the events of two backwards whose gradients are summed, and of one that reduces."""
    with pool_world() as device:
        experts = Experts(4, 16, 32)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh(device.type, (1,))
        unit = fully_shard(experts, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        found = []
        for reduces in (False, False, True):
            unit.set_requires_gradient_sync(reduces)
            unit.set_is_last_backward(reduces)
            loss = experts(torch.ones(8, 16, dtype=torch.bfloat16), exchange).float().sum()
            with Gradients() as gradients:
                loss.backward()
            found.append(gradients.events)
        return found


def exchange(rows_MC: Tensor) -> Exchanged:
    return Exchanged(rows_MC, torch.full((4,), 2), lambda x: x)


def test_gradients_are_added_to_a_sum_at_once_since_torch_2_15(pool: Pool) -> None:
    written, added = ("written", torch.bfloat16), ("added", torch.float32)
    converted = ("converted", torch.float32)
    (found,) = pool.run(events_of_backwards, {}, world_size=1)
    begins, adds, reduces = found
    if is_since_2_15():
        assert begins == [written, converted] * MATRICES
        assert adds == reduces == [written, added] * MATRICES
    else:
        assert begins == [written] * MATRICES + [converted] * MATRICES
        assert adds == reduces == [written] * MATRICES + [added] * MATRICES
