"""Gradients sent in bfloat16: what ranks get, compared with an emulation on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.parallel import StepShape, compose
from composer3d.recipe.schema import MeshTable, ParallelTable, PrecisionTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from tests.parallel.small_model import MICRO_BATCHES, SHAPE, compose_small

SEQ_LEN = 8
Gradients = dict[str, Tensor]


def rows_of(batch_rank: int) -> Tensor:
    """The samples of a rank: other ones on each rank and in each micro-batch."""
    generator = torch.Generator().manual_seed(batch_rank)
    return torch.randint(SHAPE.vocab, (MICRO_BATCHES, SEQ_LEN), generator=generator)


def backward(stages: Any, tokens: Tensor) -> None:
    positions = torch.arange(SEQ_LEN).expand_as(tokens)
    stages.forward_backward(tokens, tokens, positions, torch.tensor(100.0))


def contributions(batch_ranks: int) -> list[list[Gradients]]:
    """The gradients of each micro-batch of each rank, computed by one process without FSDP."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=1), device)
        step = StepShape(micro_batch=1, micro_batches=1, seq_len=SEQ_LEN)
        stages = compose(
            Llama(SHAPE), sharding_plan(SHAPE), mesh, parallel=ParallelTable(), step=step, seed=0
        )
        found = []
        for rank in range(batch_ranks):
            of_rank = []
            for tokens in rows_of(rank).split(1):
                backward(stages, tokens)
                gradients = {}
                for name, parameter in stages.named_parameters():
                    assert parameter.grad is not None
                    gradients[name] = parameter.grad.clone()
                    parameter.grad = None
                of_rank.append(gradients)
            found.append(of_rank)
        return found


def composed(mesh: MeshTable, zero: Any, precision: PrecisionTable) -> Gradients:
    """The whole gradients that the ranks of ``mesh`` compute in a second step."""
    with pool_world() as device:
        built = Mesh.build(mesh, device)
        stages = compose_small(built, parallel=ParallelTable(zero=zero), precision=precision)
        gradients = {}
        for _ in range(2):  # nothing of the first step is left in the second one
            backward(stages, rows_of(built.batch_rank))
            for name, parameter in stages.named_parameters():
                assert isinstance(parameter.grad, DTensor)
                assert parameter.grad.dtype == torch.float32
                gradients[name] = parameter.grad.full_tensor()
                parameter.grad = None
        return gradients


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def emulate(
    found: list[list[Gradients]], zero: int, send: Callable[[Tensor], Tensor] = rounded
) -> Gradients:
    """Sum the contributions in float32, after each rank has sent what ``send`` makes of it.

    With ``zero = 1``, a rank sends the sum over its micro-batches; above, each of them.
    """
    gradients = {}
    for name in found[0][0]:
        by_rank = [torch.stack([each[name] for each in of_rank]) for of_rank in found]
        if zero == 1:
            sent = [send(in_order(of_rank)) for of_rank in by_rank]
            gradients[name] = in_order(sent)
        else:
            of_micro_batch = [
                in_order([send(of_rank[nth]) for of_rank in by_rank])
                for nth in range(MICRO_BATCHES)
            ]
            gradients[name] = in_order(of_micro_batch)
    return gradients


def in_order(terms: Any) -> Tensor:
    first, *others = terms
    total: Tensor = first.clone()
    for term in others:
        total += term
    return total


BFLOAT16 = PrecisionTable(reduce="bfloat16")


@pytest.mark.parametrize(
    ("replicas", "shards", "zero"),
    [
        (1, 2, 3),
        (1, 4, 1),
        (1, 4, 2),
        # The all-reduce of replicas stays in float32.
        (2, 2, 1),
        (2, 2, 3),
    ],
)
def test_contributions_are_rounded_once_and_summed_in_float32(
    pool: Pool, replicas: int, shards: int, zero: int
) -> None:
    mesh = MeshTable(dp_replicate=replicas, dp_shard=shards)
    (found,) = pool.run(contributions, {"batch_ranks": mesh.batch_ranks}, world_size=1)
    wanted, exact = emulate(found, zero), emulate(found, zero, send=lambda tensor: tensor)
    arguments = {"mesh": mesh, "zero": zero, "precision": BFLOAT16}
    for gradients in pool.run(composed, arguments, world_size=mesh.world_size):
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-9)
            assert (gradient - exact[name]).abs().max() > 1e-4 * exact[name].abs().max(), name


def test_micro_batches_are_not_summed_in_bfloat16(pool: Pool) -> None:
    (found,) = pool.run(contributions, {"batch_ranks": 2}, world_size=1)
    arguments = {"mesh": MeshTable(dp_shard=2), "zero": 1, "precision": BFLOAT16}
    gradients, _ = pool.run(composed, arguments, world_size=2)
    exact = emulate(found, 1, send=lambda tensor: tensor)
    absolute = emulate(found, 1, send=torch.abs)

    def in_bfloat16(of_rank: list[Gradients], name: str) -> Tensor:
        return in_order([each[name].bfloat16() for each in of_rank]).float()

    shows = 0
    for name, gradient in gradients.items():
        bound = 2.0**-8 * absolute[name] + 1e-9  # one rounding of each rank's sum
        assert ((gradient - exact[name]).abs() <= bound).all(), name
        narrow = in_order([in_bfloat16(of_rank, name) for of_rank in found])
        shows += int(((narrow - exact[name]).abs() > bound).sum())
    assert shows > 100  # elements in which a sum of micro-batches in bfloat16 breaks the bound


def test_gradients_of_matrices_that_are_bfloat16_already_lose_nothing(pool: Pool) -> None:
    arguments = {"mesh": MeshTable(dp_shard=2), "zero": 3}
    wide, narrow = (
        pool.run(
            composed,
            arguments | {"precision": PrecisionTable(compute="bfloat16", reduce=reduce)},  # type: ignore[arg-type]
            world_size=2,
        )[0]
        for reduce in (None, "bfloat16")
    )
    for name, gradient in narrow.items():
        # From torch 2.15 on, the gradients of norms are float32.
        if gradient.ndim == 2:
            torch.testing.assert_close(gradient, wide[name], rtol=1e-6, atol=1e-9)
