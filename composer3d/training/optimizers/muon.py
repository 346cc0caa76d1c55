"""Muon: the momentum of each matrix, orthogonalised as a whole; AdamW for all other parameters.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", and for the scale of
its update Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv:2502.16982). One step of a
matrix:

    M <- M + (1 - momentum) (G - M)              this rank's part of it
    U <- G + momentum (M - G), or M              this rank's part of it (``optim.nesterov``)
    O <- Newton-Schulz(U)                        the whole matrix, on its owner
    W <- (1 - lr weight_decay) W - lr scale O    this rank's part of it

Only U and O travel, each once and in ``optim.newton_schulz_dtype`` (``parallel.matrices``).
"""

import math
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn

from composer3d.parallel.matrices import MatrixExchange
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.recipe.optimizers import OPTIMIZERS
from composer3d.recipe.rates import matrix_lr_factor
from composer3d.recipe.schema import OptimTable
from composer3d.training.optimizers.adamw import AdamW
from composer3d.training.optimizers.contract import (
    NO_MATRICES,
    Optimizer,
    StageMatrices,
    groups_by_rates,
)

# Below this norm, a matrix counts as zero. It is that of ``torch.optim.Muon``.
_SMALLEST_NORM = 1e-7


class Muon(Optimizer, torch.optim.Optimizer):
    """Muon over the matrices of this rank, and AdamW over its other parameters.

    Both keep their state in ``state``, and their groups, with the same keys, in ``param_groups``.
    """

    facts = OPTIMIZERS["muon"]

    def __init__(
        self,
        matrices: Iterable[tuple[str, nn.Parameter]],
        others: Iterable[tuple[str, nn.Parameter]],
        table: OptimTable,
        places: StageMatrices,
    ) -> None:
        self._table = table
        matrices = [pair for pair in matrices if pair[1].requires_grad]
        others = [pair for pair in others if pair[1].requires_grad]
        self._matrices = [parameter for _, parameter in matrices]
        groups = groups_by_rates(matrices, table)
        for group in groups:
            group["lr_factor"] *= matrix_lr_factor(table)
        # By matrix, as ``set_lr`` changes them in every step.
        self._groups = {p: group for group in groups for p in group["params"]}
        self._others = AdamW.build(others, table) if others else None
        if self._others is not None:
            groups += self._others.param_groups
        super().__init__(groups, {"lr": table.lr})
        if self._others is not None:
            # One state and one list of groups: what is loaded or set here reaches AdamW.
            self._others.state = self.state
            self._others.param_groups = self.param_groups[-len(self._others.param_groups) :]
        self._exchange = MatrixExchange(self._matrices, places.group)
        self._device = places.device
        self.matrix_names = places.names

    @classmethod
    def build(
        cls,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        table: OptimTable,
        matrices: StageMatrices = NO_MATRICES,
    ) -> Self:
        """Build the optimizer as ``build_optimizer`` describes it."""
        named = list(named_parameters)
        return cls(
            [pair for pair in named if pair[0] in matrices.names],
            [pair for pair in named if pair[0] not in matrices.names],
            table,
            matrices,
        )

    @torch.no_grad()
    def apply_gradients(self, *, divisor: Tensor, is_good: Tensor) -> None:
        """Divide all gradients by ``divisor`` and update the weights; nothing if not ``is_good``.

        Collectives: those of ``MatrixExchange.run``, also if the step is not good.
        """
        if self._others is not None:
            self._others.apply_gradients(divisor=divisor, is_good=is_good)
        if self._matrices:
            self._apply_to_matrices(divisor, is_good)

    def _apply_to_matrices(self, divisor: Tensor, is_good: Tensor) -> None:
        table, momentum = self._table, self._table.momentum
        weights = [local_shard(parameter) for parameter in self._matrices]
        gradients = [
            None if parameter.grad is None else local_shard(parameter.grad)
            for parameter in self._matrices
        ]
        moments = [self._moment(parameter) for parameter in self._matrices]
        divisor, is_good = (scalar.to(weights[0].device) for scalar in (divisor, is_good))
        for gradient, moment in zip(gradients, moments, strict=True):
            if gradient is None:
                continue
            gradient.div_(divisor.to(gradient.dtype))
            # Without a name, the new values are gone before the matrices travel.
            moment.copy_(torch.where(is_good, torch.lerp(moment, gradient, 1 - momentum), moment))

        def read(index: int, where: tuple[slice, ...]) -> Tensor:
            gradient, moment = gradients[index], moments[index][where]
            if gradient is None or not table.nesterov:
                return moment
            return torch.lerp(gradient[where], moment, momentum)

        def compute(matrix: Tensor) -> Tensor:
            return newton_schulz(matrix, table.newton_schulz, table.newton_schulz_steps)

        def write(index: int, where: tuple[slice, ...], result: Tensor) -> None:
            if gradients[index] is None:
                return
            weight, parameter = weights[index][where], self._matrices[index]
            group = self._groups[parameter]
            lr, weight_decay = group["lr"], group["weight_decay"]
            rows, columns = parameter.shape[-2:]
            scale = update_scale(rows, columns, table.lr_scale)
            updated = weight * (1 - lr * weight_decay)
            updated.add_(result.to(weight.device), alpha=-lr * scale)
            weight.copy_(torch.where(is_good, updated, weight))

        dtype = getattr(torch, table.newton_schulz_dtype)
        like = torch.empty(0, dtype=dtype, device=self._device)
        self._exchange.run(read, compute, write, like=like)

    def _moment(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return local_shard(state["momentum_buffer"])


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Move the singular values of matrices towards 1 by a polynomial that is applied repeatedly.

    With the coefficients (a, b, c), one step is a X + b (X X^T) X + c (X X^T)^2 X. In bfloat16, the
    result for one matrix has the bits of ``torch.optim.Muon``'s.

    Args:
        matrix: (F, C), or (E, F, C) for several. Its values are overwritten.

    Returns:
        A tensor of the same shape and dtype.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    norm = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x.div_(norm.clamp(min=_SMALLEST_NORM))
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def update_scale(rows: int, columns: int, rule: str) -> float:
    """Return the factor of the learning rate for a matrix that has ``rows`` outputs.

    "original": sqrt(max(1, rows / columns)). "match_rms_adamw": 0.2 sqrt(max(rows, columns)), with
    which an update is about as large as AdamW's, so that AdamW's learning rate fits.
    """
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
