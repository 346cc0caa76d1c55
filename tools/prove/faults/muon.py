"""Faults in Muon: in what is orthogonalised, where its parts lie, and what a step makes of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from tools.prove.faults.places import EP, Place, harms
from tools.prove.faults.plant import fault_by, fault_of, instead_of
from tools.prove.paths import MOE_RECIPE, RECIPE


def _harms(*layouts: str, recipe: Path = RECIPE) -> Place:
    """Plant the decorated fault in layouts with Muon."""
    with_muon = [f"optim.name=muon {layout}".strip() for layout in layouts]
    return harms(*with_muon, message=r" (is|are) off", recipe=recipe)


@_harms("mesh.dp_shard=2", "mesh.tp=2", "mesh.dp_shard=2 optim.newton_schulz_steps=25")
@fault_of(MatrixExchange, MatrixExchange.run)
def orthogonalise_shards(
    _: Any, self: MatrixExchange, read: Any, compute: Any, write: Any, *, like: Tensor
) -> None:
    """Each rank orthogonalises its part of a matrix alone."""
    for index, parameter in enumerate(self._origins):
        everything = (slice(None),) * len(parameter)
        write(index, everything, compute(read(index, everything).to(like).clone()))


@_harms("mesh.dp_shard=2")
@fault_of(MatrixExchange, MatrixExchange._gather)
def place_parts_one_rank_further(
    right: Any, self: MatrixExchange, *arguments: Any
) -> dict[MatrixUnit, Tensor]:
    """The owner puts the parts of a matrix together in another order."""
    wholes = right(self, *arguments)
    return {unit: whole.roll(whole.shape[-2] // 2, -2) for unit, whole in wholes.items()}


@_harms("mesh.dp_replicate=2")
@fault_of(MatrixExchange, MatrixExchange._scatter)
def leave_out_a_replica(
    right: Any, self: MatrixExchange, own: Any, results: Any, write: Any, like: Tensor
) -> None:
    """Replicas of the second half of the ranks do not get the results."""
    is_left_out = dist.get_rank() >= dist.get_world_size() // 2

    def write_if_first(index: int, where: Any, part: Tensor) -> None:
        write(index, where, torch.zeros_like(part) if is_left_out else part)

    right(self, own, results, write_if_first, like)


@_harms("mesh.dp_shard=2")
@fault_of(MatrixExchange, MatrixExchange._deliver)
def take_parts_of_one_rank_in_another_order(
    right: Any, self: MatrixExchange, message: Any, *arguments: Any
) -> None:
    """Of several parts that one rank sends in a message, the last is taken for the first."""
    incoming = sorted(message.incoming, key=lambda transfer: transfer.source, reverse=True)
    # It is in the order of the other ranks again, and that of each rank's parts is turned.
    incoming.reverse()
    right(self, message._replace(incoming=tuple(incoming)), *arguments)


@_harms("mesh.dp_shard=2")
@fault_of(Box, Box.seen_from)
def send_the_part_of_the_owner(right: Any, self: Box, origin: Any) -> tuple[slice, ...]:
    """The parts of replicas count twice: a matrix is made of the parts of one rank alone."""
    place = right(self, origin)
    # A part begins where its rank's begins; in the whole matrix too, though it lies further on.
    size = place[-2].stop - place[-2].start
    return (*place[:-2], slice(0, size), place[-1])


@_harms(EP, recipe=MOE_RECIPE)
@fault_of(muon, muon.newton_schulz)
def mix_the_experts(right: Any, matrix: Tensor, coefficients: Any, steps: int) -> Tensor:
    """The matrices of several experts are orthogonalised as one."""
    joined = matrix.reshape(-1, matrix.shape[-1])
    result: Tensor = right(joined, coefficients, steps).view_as(matrix)
    return result


@_harms(EP, recipe=MOE_RECIPE)
@fault_of(muon, muon.newton_schulz)
def give_experts_the_results_of_others(
    right: Any, matrix: Tensor, coefficients: Any, steps: int
) -> Tensor:
    """The results of several experts come back in another order."""
    result: Tensor = right(matrix, coefficients, steps)
    return result.flip(0) if result.dim() == 3 else result


@_harms("")
def stop_one_step_early() -> None:
    """Newton-Schulz has one step too few."""
    right = muon.newton_schulz
    muon.newton_schulz = lambda matrix, coefficients, steps: right(matrix, coefficients, steps - 1)


@_harms("")
@fault_of(muon, muon.newton_schulz)
def swap_two_coefficients(right: Any, matrix: Tensor, coefficients: Any, steps: int) -> Tensor:
    """Newton-Schulz has its second and third coefficient the other way round."""
    a, b, c = coefficients
    result: Tensor = right(matrix, (a, c, b), steps)
    return result


@_harms("optim.lr_scale=original")
def swap_rows_and_columns() -> None:
    """The factor of the learning rate takes inputs for outputs."""
    right = muon.update_scale
    muon.update_scale = lambda rows, columns, rule: right(columns, rows, rule)


@_harms("")
def leave_out_the_factor() -> None:
    """The learning rate does not depend on the size of a matrix."""
    muon.update_scale = lambda rows, columns, rule: 1.0


@_harms("optim.newton_schulz=[3,-4,2] optim.newton_schulz_steps=99", "")
@fault_of(muon.Muon, muon.Muon._moment)
def forget_the_momentum(right: Any, self: muon.Muon, parameter: Any) -> Tensor:
    """Each step begins with a momentum of zero."""
    return torch.zeros_like(right(self, parameter))


def _after_matrices(change: Callable[[muon.Muon], None]) -> None:
    """Call ``change`` with the optimizer after each step of its matrices."""

    @instead_of(muon.Muon, muon.Muon._apply_to_matrices)
    def wrong(right: Any, self: muon.Muon, divisor: Tensor, is_good: Tensor) -> None:
        right(self, divisor, is_good)
        change(self)


@_harms("mesh.dp_shard=2")
@fault_by(_after_matrices)
def keep_the_momentum_of_another_shard(self: muon.Muon) -> None:
    """After a step, a rank has the momentum of other rows than its own."""
    for parameter in self._matrices:
        moment = self._moment(parameter)
        moment.copy_(moment.roll(1, 0))


@_harms("")
@fault_by(_after_matrices)
def decay_twice(self: muon.Muon) -> None:
    """The weights of matrices decay twice in a step."""
    for parameter in self._matrices:
        group = self._groups[parameter]
        local_shard(parameter).mul_(1 - group["lr"] * group["weight_decay"])


@_harms("")
@fault_of(muon.Muon, muon.Muon._apply_to_matrices)
def clip_no_matrix(right: Any, self: muon.Muon, divisor: Tensor, is_good: Tensor) -> None:
    """Only the gradients of other parameters are clipped."""
    right(self, torch.ones_like(divisor), is_good)


@_harms("optim.matrix_lr=1e-3")
def ignore_the_rate_of_matrices() -> None:
    """Matrices have the learning rate of all other parameters."""
    _build_with(matrix_lr=None)


@_harms("mesh.tp=2")
@fault_of(optimizers, optimizers.matrices_of)
def orthogonalise_the_head(
    right: Any, chosen: Architecture, shape: Any, optim: OptimTable
) -> frozenset[str]:
    """The head and the embedding are orthogonalised as hidden matrices are."""
    every = {name for name, row in chosen.table_of(shape).parameters() if row.is_matrix}
    return right(chosen, shape, optim) | {name for name in every if "router" not in name}


def _build_with(**changes: Any) -> None:
    """Build Muon with other values of ``[optim]``."""

    @instead_of(muon.Muon, muon.Muon.__init__)
    def wrong(
        right: Any, self: muon.Muon, matrices: Any, others: Any, table: OptimTable, places: Any
    ) -> None:
        right(self, matrices, others, replace(table, **changes), places)


@_harms("")
def look_back() -> None:
    """The momentum is not Nesterov's."""
    _build_with(nesterov=False)


@_harms("")
def orthogonalise_in_bfloat16() -> None:
    """Newton-Schulz computes in bfloat16, whatever the recipe says."""
    _build_with(newton_schulz_dtype="bfloat16")
