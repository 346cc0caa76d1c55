"""What the routers of a whole job have seen in a step: for metrics, and to balance the experts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


def sizes_of_routers(model: nn.Module) -> dict[str, RouterSize]:
    """Return the sizes of the routers of a model, by global name."""
    return {
        name: RouterSize(router.experts, router.per_token)
        for name, router in routers_of(model).items()
    }


class Balance:
    """Sums what routers have seen over the job, and moves their biases.

    Args:
        sizes: of each router of the whole model, by name; the same on all ranks.
        stages: of this rank.

    """

    def __init__(
        self, sizes: Mapping[str, RouterSize], stages: Sequence[nn.Module], mesh: Mesh
    ) -> None:
        self._sizes, self._mesh = sizes, mesh
        self._routers = {
            name: router for stage in stages for name, router in routers_of(stage).items()
        }
        # By name of the router, after ``collect``; the same on all ranks.
        self._sums: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Begin a step."""
        for router in self._routers.values():
            router.statistics.reset()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let routers forget what they see inside of this context."""
        before = {name: router.statistics.sums for name, router in self._routers.items()}
        self.reset()
        yield
        for name, router in self._routers.items():
            router.statistics.sums = before[name]

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
        self._sums = dict(zip(self._sizes, packed.split(lengths), strict=True))

    def loads(self) -> dict[str, RouterLoad]:
        """Return what all routers have seen, by name: empty before the first ``collect``.

        The same on all ranks. On a GPU, the host waits for it. No collective.
        """
        if not self._sums:
            return {}
        on_host = torch.cat(list(self._sums.values())).cpu()
        all_sums = on_host.split([len(sums) for sums in self._sums.values()])
        return {
            name: RouterLoad(sums[:-5], self._sizes[name].per_token, *sums[-5:].tolist())
            for name, sums in zip(self._sums, all_sums, strict=True)
        }

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

    def move_biases(self, is_good: Tensor) -> None:
        """Move the bias of each router of this rank by its load in the step, if ``is_good``.

        A router that does not train (``optim.train``) stays as it is, with its bias. ``is_good`` is
        a bool scalar on the mesh's device. No collective, and no wait.
        """
        for name, router in self._routers.items():
            if router.bias is not None and router.weight.requires_grad:
                bias = local_shard(router.bias)
                bias.add_((router.bias_move(self._sums[name][:-5]) * is_good).to(bias))


def expert_metrics(loads: Mapping[str, RouterLoad], tokens: int) -> dict[str, float]:
    """Describe how the routers of a model spread a step of ``tokens`` tokens over experts.

    Returns:
        Empty without experts. Otherwise:

        - ``expert_load``: the tokens of the busiest expert of a layer over the mean of its experts,
          1 at best, the mean over layers; ``expert_load/blocks.3`` for each layer.
        - ``dropped_tokens``: the choices that tokens should have, minus those that routers counted.
          It is always 0, because there is no capacity.
        - ``router_entropy``: nats, the mean over tokens and layers; also for each layer.
        - ``balance_loss`` and ``z_loss``: what they add to the loss, summed over layers.
        - ``router_bias``: the largest bias minus the smallest, for each layer that has them.
    """
    if not loads:
        return {}
    metrics: dict[str, float] = {}
    shares = {name: load.tokens_E.max() / load.tokens_E.mean() for name, load in loads.items()}
    metrics["expert_load"] = torch.stack(list(shares.values())).mean().item()
    metrics["dropped_tokens"] = sum(
        load.per_token * tokens - load.tokens_E.sum().item() for load in loads.values()
    )
    metrics["router_entropy"] = sum(load.entropy for load in loads.values()) / (tokens * len(loads))
    metrics["balance_loss"] = sum(load.balance_loss for load in loads.values())
    metrics["z_loss"] = sum(load.z_loss for load in loads.values())
    for name, load in loads.items():
        layer = name.removesuffix(".moe.router")
        metrics[f"expert_load/{layer}"] = shares[name].item()
        metrics[f"router_entropy/{layer}"] = load.entropy / tokens
        if load.bias_high > load.bias_low:
            metrics[f"router_bias/{layer}"] = load.bias_high - load.bias_low
    return metrics
