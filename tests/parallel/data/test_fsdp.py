"""What is kept on the host. That the numbers are right is proven in layouts.txt; here, that it is kept there at all."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import StepShape, compose
from composer3d.parallel.data import fsdp
from composer3d.parallel.grad_norm import local_grad_norm_sq
from composer3d.recipe.schema import MemoryTable, MeshTable, ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world

SHAPE = ModelShape(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0)


def offloaded(mesh: MeshTable, zero: Any) -> list[list[tuple[bool, bool]]]:
    """For each FSDP unit, of each parameter: whether it is copied to the host, and in pinned memory."""
    with pool_world() as device:
        stages = compose(
            Llama(SHAPE),
            sharding_plan(SHAPE),
            Mesh.build(mesh, device),
            parallel=ParallelTable(zero=zero),
            memory=MemoryTable(cpu_offload=True),
            step=StepShape(micro_batch=1, micro_batches=2, seq_len=16),
            seed=0,
        )
        assert all(
            isinstance(p, DTensor) and p.to_local().device.type == "cpu"
            for p in stages.parameters()
        )
        groups = [
            cast(Any, unit)._get_fsdp_state()._fsdp_param_group
            for unit in fsdp.units(stages.modules[0])
        ]
        return [
            [(p.offload_to_cpu, p.pin_memory) for p in group.fsdp_params]
            for group in groups
            if group
        ]


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        (MeshTable(dp_shard=1), 3),
        (MeshTable(dp_shard=1, tp=2), 3),
        (MeshTable(dp_shard=1, pp=2), 1),
        (MeshTable(dp_shard=1, dp_replicate=2), 0),
    ],
    ids=["one", "tp", "pp", "replicas"],
)
def test_every_parameter_is_kept_on_the_host(pool: Pool, mesh: MeshTable, zero: int) -> None:
    for units in pool.run(offloaded, {"mesh": mesh, "zero": zero}, world_size=mesh.world_size):
        assert len(units) >= 2  # a block, and an end of the model
        assert {flags for unit in units for flags in unit} == {(True, False)}


def test_the_norm_is_summed_where_the_mesh_is() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    mesh = cast(Mesh, SimpleNamespace(device=torch.device("meta"), stage_ranks=1))
    assert local_grad_norm_sq([parameter], mesh).device.type == "meta"
    assert local_grad_norm_sq([], mesh).device.type == "meta"
