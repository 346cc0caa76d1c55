"""Faults in Muon: in what is orthogonalised, where its parts lie, and what a step makes of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.facts.box import Box
from composer3d.models.registry import Architecture
from composer3d.parallel.matrices import MatrixExchange
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.planner.matrices import MatrixUnit
from composer3d.recipe.schema import OptimTable
from composer3d.training import optimizers
from composer3d.training.optimizers import muon
from tools.prove.faults.plant import instead_of


def orthogonalise_shards() -> None:
    """Each rank orthogonalises its part of a matrix alone."""

    def wrong(self: MatrixExchange, read: Any, compute: Any, write: Any, *, like: Tensor) -> None:
        for index, parameter in enumerate(self._origins):
            everything = (slice(None),) * len(parameter)
            write(index, everything, compute(read(index, everything).to(like).clone()))

    MatrixExchange.run = wrong  # type: ignore[method-assign]


def place_parts_one_rank_further() -> None:
    """The owner puts the parts of a matrix together in another order."""

    @instead_of(MatrixExchange, MatrixExchange._gather)
    def wrong(right: Any, self: MatrixExchange, *arguments: Any) -> dict[MatrixUnit, Tensor]:
        wholes = right(self, *arguments)
        return {unit: whole.roll(whole.shape[-2] // 2, -2) for unit, whole in wholes.items()}


def leave_out_a_replica() -> None:
    """Replicas of the second half of the ranks do not get the results."""

    @instead_of(MatrixExchange, MatrixExchange._scatter)
    def wrong(
        right: Any, self: MatrixExchange, own: Any, results: Any, write: Any, like: Tensor
    ) -> None:
        is_left_out = dist.get_rank() >= dist.get_world_size() // 2

        def write_if_first(index: int, where: Any, part: Tensor) -> None:
            write(index, where, torch.zeros_like(part) if is_left_out else part)

        right(self, own, results, write_if_first, like)


def send_the_part_of_the_owner() -> None:
    """The parts of replicas count twice: a matrix is made of the parts of one rank alone."""

    @instead_of(Box, Box.seen_from)
    def wrong(right: Any, self: Box, origin: Any) -> tuple[slice, ...]:
        place = right(self, origin)
        # A part begins where its rank's begins; in the whole matrix too, though it lies further on.
        size = place[-2].stop - place[-2].start
        return (*place[:-2], slice(0, size), place[-1])


def mix_the_experts() -> None:
    """The matrices of several experts are orthogonalised as one."""

    @instead_of(muon, muon.newton_schulz)
    def wrong(right: Any, matrix: Tensor, coefficients: Any, steps: int) -> Tensor:
        joined = matrix.reshape(-1, matrix.shape[-1])
        result: Tensor = right(joined, coefficients, steps).view_as(matrix)
        return result


def give_experts_the_results_of_others() -> None:
    """The results of several experts come back in another order."""

    @instead_of(muon, muon.newton_schulz)
    def wrong(right: Any, matrix: Tensor, coefficients: Any, steps: int) -> Tensor:
        result: Tensor = right(matrix, coefficients, steps)
        return result.flip(0) if result.dim() == 3 else result


def stop_one_step_early() -> None:
    """Newton-Schulz has one step too few."""
    right = muon.newton_schulz
    muon.newton_schulz = lambda matrix, coefficients, steps: right(matrix, coefficients, steps - 1)


def swap_two_coefficients() -> None:
    """Newton-Schulz has its second and third coefficient the other way round."""

    @instead_of(muon, muon.newton_schulz)
    def wrong(right: Any, matrix: Tensor, coefficients: Any, steps: int) -> Tensor:
        a, b, c = coefficients
        result: Tensor = right(matrix, (a, c, b), steps)
        return result


def swap_rows_and_columns() -> None:
    """The factor of the learning rate takes inputs for outputs."""
    right = muon.update_scale
    muon.update_scale = lambda rows, columns, rule: right(columns, rows, rule)


def leave_out_the_factor() -> None:
    """The learning rate does not depend on the size of a matrix."""
    muon.update_scale = lambda rows, columns, rule: 1.0


def forget_the_momentum() -> None:
    """Each step begins with a momentum of zero."""

    @instead_of(muon.Muon, muon.Muon._moment)
    def wrong(right: Any, self: muon.Muon, parameter: Any) -> Tensor:
        return torch.zeros_like(right(self, parameter))


def _after_matrices(change: Callable[[muon.Muon], None]) -> None:
    """Call ``change`` with the optimizer after each step of its matrices."""

    @instead_of(muon.Muon, muon.Muon._apply_to_matrices)
    def wrong(right: Any, self: muon.Muon, divisor: Tensor, is_good: Tensor) -> None:
        right(self, divisor, is_good)
        change(self)


def keep_the_momentum_of_another_shard() -> None:
    """After a step, a rank has the momentum of other rows than its own."""

    def change(self: muon.Muon) -> None:
        for parameter in self._matrices:
            moment = self._moment(parameter)
            moment.copy_(moment.roll(1, 0))

    _after_matrices(change)


def decay_twice() -> None:
    """The weights of matrices decay twice in a step."""

    def change(self: muon.Muon) -> None:
        for parameter in self._matrices:
            group = self._groups[parameter]
            local_shard(parameter).mul_(1 - group["lr"] * group["weight_decay"])

    _after_matrices(change)


def clip_no_matrix() -> None:
    """Only the gradients of other parameters are clipped."""

    @instead_of(muon.Muon, muon.Muon._apply_to_matrices)
    def wrong(right: Any, self: muon.Muon, divisor: Tensor, is_good: Tensor) -> None:
        right(self, torch.ones_like(divisor), is_good)


def ignore_the_rate_of_matrices() -> None:
    """Matrices have the learning rate of all other parameters."""
    _build_with(matrix_lr=None)


def orthogonalise_the_head() -> None:
    """The head and the embedding are orthogonalised as hidden matrices are."""

    @instead_of(optimizers, optimizers.matrices_of)
    def wrong(right: Any, chosen: Architecture, shape: Any, optim: OptimTable) -> frozenset[str]:
        every = {name for name, row in chosen.table_of(shape).parameters() if row.is_matrix}
        return right(chosen, shape, optim) | {name for name in every if "router" not in name}


def _build_with(**changes: Any) -> None:
    """Build Muon with other values of ``[optim]``."""

    @instead_of(muon.Muon, muon.Muon.__init__)
    def wrong(
        right: Any, self: muon.Muon, matrices: Any, others: Any, table: OptimTable, places: Any
    ) -> None:
        right(self, matrices, others, replace(table, **changes), places)


def look_back() -> None:
    """The momentum is not Nesterov's."""
    _build_with(nesterov=False)


def orthogonalise_in_bfloat16() -> None:
    """Newton-Schulz computes in bfloat16, whatever the recipe says."""
    _build_with(newton_schulz_dtype="bfloat16")
