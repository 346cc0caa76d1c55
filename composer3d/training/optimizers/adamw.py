"""AdamW, as torch's fused kernel computes it."""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from composer3d.parallel.pipeline.ties import local_shard
from composer3d.recipe.optimizers import OPTIMIZERS
from composer3d.recipe.schema import OptimTable
from composer3d.runtime.torch_private import ShardsForKernel
from composer3d.training.optimizers.contract import (
    NO_MATRICES,
    Optimizer,
    StageMatrices,
    groups_by_rates,
)


class AdamW(Optimizer, ShardsForKernel, torch.optim.AdamW):
    """AdamW over the parameters of this rank: one kernel for each group of a device.

    Each element is updated alone, so a shard is updated as the whole tensor would be.
    """

    facts = OPTIMIZERS["adamw"]

    @classmethod
    def build(
        cls,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        table: OptimTable,
        matrices: StageMatrices = NO_MATRICES,
    ) -> Self:
        """Build the optimizer as ``build_optimizer`` describes it."""
        groups = groups_by_rates(named_parameters, table)
        return cls(groups, lr=table.lr, betas=table.betas, eps=table.eps, fused=True)

    def apply_gradients(self, *, divisor: Tensor, is_good: Tensor) -> None:
        """Divide all gradients by ``divisor`` and update the weights; nothing if not ``is_good``.

        The kernel reads both scalars on the device and divides ``.grad`` in place.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        device = parameters[0].device
        divisor, is_good = divisor.to(device), is_good.to(device)
        if parameters[0].dtype == torch.float64:
            # The kernel takes the divisor in float32, which is not exact enough for gradients in
            # float64.
            gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
            torch._foreach_div_(gradients, divisor)
            divisor = torch.ones_like(divisor)
        # These attributes are how torch.amp.GradScaler passes them.
        scaled: Any = self
        scaled.grad_scale = divisor.to(torch.float32)
        scaled.found_inf = (~is_good).to(torch.float32)
        self.step()
