"""Which rank computes which matrix, what travels, and that all of it arrives."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.facts.box import Box
from composer3d.parallel.init import local_part
from composer3d.parallel.matrices import MatrixExchange
from composer3d.planner import matrices
from composer3d.planner.matrices import CutParameter, newton_schulz_flops
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from tools.prove.paths import MOE_RECIPE, RECIPE


class RankCounts(NamedTuple):
    """What one rank computed and sent, and the sizes of its stage's matrices."""

    stage: int
    flops: float
    sent_bytes: int
    flops_of_stage: float
    held_bytes: int


def exchange(recipe: Path, sets: list[str], elements: int) -> RankCounts:
    """A task: change each matrix as a whole, on its owner, and compare all that ranks hold then."""
    matrices.ELEMENTS_PER_ROUND = elements  # the process ends afterwards
    with pool_world():
        loaded = load(str(recipe), sets).recipe
        mesh = Mesh.build(loaded.mesh, torch.device("cpu"))
        named = dict(build_stages(loaded, mesh).named_parameters())
        named = {name: parameter for name, parameter in named.items() if parameter.dim() > 1}
        parameters = list(named.values())
        before = [whole(parameter) for parameter in parameters]
        locals_ = [local_part(parameter)[0] for parameter in parameters]
        copies = [local.clone() for local in locals_]
        flops, sent = 0.0, 0

        def compute(matrix: Tensor) -> Tensor:
            nonlocal flops
            flops += newton_schulz_flops(matrix.shape)
            return changed(matrix)

        def write(index: int, where: tuple[slice, ...], part: Tensor) -> None:
            locals_[index][where] = part

        send = dist.all_to_all_single

        def count(
            out: Tensor, x: Tensor, sizes: list[int], own: list[int], *, group: dist.ProcessGroup
        ) -> None:
            nonlocal sent
            sent += (x.numel() - own[dist.get_rank(group)]) * x.itemsize
            send(out, x, sizes, own, group=group)

        made = MatrixExchange(parameters, mesh.stage_group)
        like = torch.empty(0, dtype=torch.float64)
        with mock.patch.object(dist, "all_to_all_single", count):
            made.run(lambda index, where: copies[index][where], compute, write, like=like)
        for name, parameter, was in zip(named, parameters, before, strict=True):
            assert torch.equal(whole(parameter), changed(was)), name
        return RankCounts(
            mesh.coords["pp"],
            flops,
            sent,
            sum(newton_schulz_flops(matrix.shape) for matrix in before),
            sum(local.numel() * local.itemsize for local in locals_),
        )


def whole(parameter: Tensor) -> Tensor:
    data = parameter.detach()
    return (data.full_tensor() if isinstance(data, DTensor) else data).clone()


def changed(matrix: Tensor) -> Tensor:
    """Add to each matrix what no part of it knows: its last element, of the last column."""
    return matrix + matrix[..., -1:, -1:] * torch.arange(matrix.shape[-1]) + matrix[..., :1, :1]


LAYOUTS = {
    "one process": (RECIPE, 1, []),
    "fsdp, uneven rows": (RECIPE, 3, ["mesh.dp_shard=3", "data.global_batch=12"]),
    "replicas": (RECIPE, 2, ["mesh.dp_replicate=2"]),
    "whole parameters": (RECIPE, 2, ["mesh.dp_replicate=2", "parallel.zero=0"]),
    "fsdp, tp": (RECIPE, 4, ["mesh.dp_shard=2", "mesh.tp=2"]),
    "replicas, cp, tp": (RECIPE, 8, ["mesh.dp_replicate=2", "mesh.cp=2", "mesh.tp=2"]),
    "pp, fsdp": (RECIPE, 4, ["mesh.pp=2", "mesh.dp_shard=2"]),
    "experts": (MOE_RECIPE, 4, ["mesh.dp_shard=2", "mesh.tp=2", "mesh.ep=2"]),
    "experts, more ranks than experts of a rank": (MOE_RECIPE, 4, ["mesh.dp_shard=4"]),
}


# In many messages, and all in one round.
@pytest.mark.parametrize(
    ("layout", "elements"),
    [*((layout, 5000) for layout in LAYOUTS), ("fsdp, tp", 1 << 26), ("experts", 1 << 26)],
)
def test_each_matrix_is_computed_once_and_arrives(pool: Pool, layout: str, elements: int) -> None:
    recipe, world_size, sets = LAYOUTS[layout]
    sets = [*sets, "precision.params=float64"]
    arguments = {"recipe": recipe, "sets": sets, "elements": elements}
    ranks = pool.run(exchange, arguments, world_size=world_size)
    for stage in {rank.stage for rank in ranks}:
        members = [rank for rank in ranks if rank.stage == stage]
        flops = members[0].flops_of_stage
        assert sum(rank.flops for rank in members) == pytest.approx(flops)
        # One rank may have a whole matrix more than another, but not much more.
        assert max(rank.flops for rank in members) <= 1.6 * flops / len(members)
        # At most one gather of what is held once, and one scatter to all that hold it.
        assert sum(rank.sent_bytes for rank in members) <= 2 * sum(
            rank.held_bytes for rank in members
        )


def test_messages_bound_what_ranks_send_and_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six replicas of two halves: an owner sends its matrix six times."""
    monkeypatch.setattr(matrices, "ELEMENTS_PER_ROUND", 100)
    halves = [Box((rank % 2 * 4, 0), (4, 10)) for rank in range(12)]
    cut = [CutParameter((8, 10), halves)] * 12
    (units,) = matrices.rounds_of_units(cut, 12)
    assert {unit.owner for unit in units} == set(range(12))
    messages = matrices.messages_of_results(units, 12)
    assert 6 <= len(messages) <= 9  # 6 if every message were full
    found = Counter(part for message in messages for part in message)
    assert found == Counter((unit, rank, box) for unit in units for rank, box in unit.holders)
    for message in messages:
        sent, received = Counter[int](), Counter[int]()
        for part in message:
            sent[part.unit.owner] += prod(part.box.shape)
            received[part.rank] += prod(part.box.shape)
        assert max(sent.values()) <= 100
        assert max(received.values()) <= 100


def test_a_unit_of_experts_fits_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "ELEMENTS_PER_ROUND", 100)
    whole = Box((0, 0, 0), (16, 5, 8))
    units = [unit for (unit,) in matrices.rounds_of_units([CutParameter((16, 5, 8), [whole])], 1)]
    assert {unit.box.shape for unit in units} == {(2, 5, 8)}
    assert [unit.box.offset[0] for unit in units] == list(range(0, 16, 2))


def test_rounds_bound_what_a_rank_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "ELEMENTS_PER_ROUND", 100)
    parameters = [torch.zeros(6, 8), torch.zeros(20, 10), torch.zeros(4, 5), torch.zeros(3, 2, 7)]
    rounds = MatrixExchange(parameters, None).rounds
    sizes = [[prod(unit.box.shape) for unit in units] for units in rounds]
    assert sorted(size for of_round in sizes for size in of_round) == [20, 42, 48, 200]
    assert all(sum(of_round) <= 100 or len(of_round) == 1 for of_round in sizes)
