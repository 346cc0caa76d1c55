"""What the routers of a whole job have seen in a step: for metrics, and to balance the experts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.models.layers.moe import Router
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.recipe.schema import AXES
from composer3d.runtime.mesh import Mesh


class RouterLoad(NamedTuple):
    """What one router has seen in a step, over all ranks and micro-batches.

    Attributes:
        tokens_E: float64: the number of tokens that the router sent to each expert.
        per_token: the number of experts that each token should have.
        balance_loss, z_loss: what the router added to the job's loss: means over all tokens, times
            their coefficients.
        entropy: of the routing probabilities in nats, the sum over tokens.
        bias_low, bias_high: the smallest and the largest bias, before the step moved it; 0 without
            biases.
    """

    tokens_E: Tensor
    per_token: int
    balance_loss: float
    z_loss: float
    entropy: float
    bias_low: float
    bias_high: float


def routers_of(model: nn.Module) -> dict[str, Router]:
    """The routers of a model or of a stage, by global name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


class RouterSize(NamedTuple):
    """The number of experts of a router, and of those that it chooses for each token."""

    experts: int
    per_token: int


class Balance:
    """Sums what routers have seen over the job, and moves their biases.

    Args:
        sizes: of each router of the whole model, by name; the same on all ranks.
        stages: of this rank.

    Attributes:
        loads: by name of the router, after ``collect``; the same on all ranks.
    """

    def __init__(
        self, sizes: Mapping[str, RouterSize], stages: Sequence[nn.Module], mesh: Mesh
    ) -> None:
        self._sizes, self._mesh = sizes, mesh
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

        Collective over the world, if the model has routers: one all-reduce of E + 5 float64 numbers
        for each of them.
        """
        if not self._sizes:
            return
        parts = [self._own_sums(name, size.experts) for name, size in self._sizes.items()]
        lengths = [len(part) for part in parts]
        packed = torch.cat(parts)
        dist.all_reduce(packed)
        all_sums = packed.cpu().split(lengths)
        for (name, size), sums in zip(self._sizes.items(), all_sums, strict=True):
            self.loads[name] = RouterLoad(sums[:-5], size.per_token, *sums[-5:].tolist())

    def _own_sums(self, name: str, experts: int) -> Tensor:
        """What this rank adds to the sums of one router: zeros if it does not hold the router."""
        sums = torch.zeros(experts + 5, dtype=torch.float64, device=self._mesh.device)
        router = self._routers.get(name)
        if router is None:
            return sums
        if router.statistics.sums is not None:
            sums[:-2] = router.statistics.sums
        # All ranks of a stage hold the same biases: one of them counts.
        coords = self._mesh.coords
        if router.bias is not None and not any(coords[axis] for axis in AXES if axis != "pp"):
            sums[-2:] = torch.stack(torch.aminmax(local_shard(router.bias)))
        return sums

    def move_biases(self) -> None:
        """Move the bias of each router of this rank by its load in the step. No collective."""
        for name, router in self._routers.items():
            if router.bias is not None:
                bias = local_shard(router.bias)
                bias.add_(router.bias_move(self.loads[name].tokens_E).to(bias))
