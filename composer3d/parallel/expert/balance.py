"""What the routers of a whole job have seen in a step: for metrics, and to balance the experts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.models.layers.moe import Router
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.runtime.mesh import Mesh


class RouterLoad(NamedTuple):
    """What one router has seen in a step, over all ranks and micro-batches.

    Attributes:
        tokens_E: float64: the number of tokens that each expert computed.
        balance_loss, z_loss: what the router added to the job's loss: means over all tokens, times
            their coefficients.
        entropy: of the routing probabilities in nats, the sum over tokens.
    """

    tokens_E: Tensor
    balance_loss: float
    z_loss: float
    entropy: float


def routers_of(model: nn.Module) -> dict[str, Router]:
    """The routers of a model or of a stage, by global name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


class Balance:
    """Sums what routers have seen over the job, and moves their biases.

    Args:
        experts: the number of experts of each router of the whole model, by name; the same on all
            ranks.
        stages: of this rank.

    Attributes:
        loads: by name of the router, after ``collect``; the same on all ranks.
    """

    def __init__(self, experts: Mapping[str, int], stages: Sequence[nn.Module], mesh: Mesh) -> None:
        self._experts, self._mesh = experts, mesh
        self._routers = {
            name: router for stage in stages for name, router in routers_of(stage).items()
        }
        self.loads: dict[str, RouterLoad] = {}

    def reset(self) -> None:
        """Begin a step."""
        for router in self._routers.values():
            router.statistics.reset()

    def collect(self) -> None:
        """Sum what all ranks have seen since ``reset``.

        Collective over the world, if the model has routers: one all-reduce of E + 3 float64 numbers
        for each of them.
        """
        if not self._experts:
            return
        parts = []
        for name, experts in self._experts.items():
            router = self._routers.get(name)
            sums = None if router is None else router.statistics.sums
            zeros = torch.zeros(experts + 3, dtype=torch.float64, device=self._mesh.device)
            parts.append(zeros if sums is None else sums)
        sizes = [len(part) for part in parts]
        packed = torch.cat(parts)
        dist.all_reduce(packed)
        for name, sums in zip(self._experts, packed.cpu().split(sizes), strict=True):
            self.loads[name] = RouterLoad(sums[:-3], *sums[-3:].tolist())

    def move_biases(self) -> None:
        """Move the bias of each router of this rank by its load in the step. No collective."""
        for name, router in self._routers.items():
            if router.bias is not None:
                bias = local_shard(router.bias)
                bias.add_(router.bias_move(self.loads[name].tokens_E).to(bias))
