"""Where experts are, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan
from composer3d.models.moe.shape import MoeShape
from composer3d.parallel import Stages, StepShape, compose, compose_for_generation
from composer3d.parallel.init import local_part
from composer3d.recipe.schema import CompileTable, MemoryTable, MeshTable, ParallelTable
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world

SHAPE = MoeShape(16, 2, 4, 2, 24, 32, 100.0, experts=4, experts_per_token=2)
TOKENS = 8


def compose_on(mesh: Mesh, shape: MoeShape, **tables: Any) -> Stages:
    tables.setdefault("parallel", ParallelTable())
    step = StepShape(micro_batch=1, micro_batches=2, seq_len=TOKENS)
    return compose(MoeLlama(shape), sharding_plan(shape), mesh, step=step, seed=0, **tables)


def run_step(mesh_sizes: dict[str, int], shape: MoeShape) -> dict[str, list[int]]:
    """Run a step; return the local shape of each parameter of experts."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(**mesh_sizes), device)
        stages = compose_on(mesh, shape)
        tokens = torch.arange(2 * TOKENS).view(2, TOKENS) % shape.vocab
        arguments = (tokens, tokens, torch.arange(TOKENS).expand_as(tokens))
        stages.forward_backward(*map(stages.own_tokens, arguments), torch.tensor(2.0 * TOKENS))
        shapes = {}
        for name, parameter in stages.named_parameters():
            if "experts" in name:
                assert isinstance(parameter, DTensor)
                assert Shard(0) in parameter.placements or mesh.sizes.ep == 1
                shapes[name] = list(parameter.to_local().shape)
        return shapes


def shapes_for_generation(mesh_sizes: dict[str, int]) -> dict[str, list[int]]:
    """Return the local shape of each parameter of experts of a model that generates."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(**mesh_sizes), device)
        stage = compose_for_generation(MoeLlama(SHAPE), sharding_plan(SHAPE), mesh)
        return {
            name: list(local_part(parameter)[0].shape)
            for name, parameter in stage.named_parameters()
            if "experts" in name
        }


@pytest.mark.parametrize(("ep", "experts"), [(1, 4), (2, 2)])
def test_ranks_of_tp_share_the_experts_of_a_model_that_generates(
    ep: int, experts: int, pool: Pool
) -> None:
    sizes = {"dp_shard": 1, "tp": 2, "ep": ep}
    for shapes in pool.run(shapes_for_generation, {"mesh_sizes": sizes}, world_size=2):
        assert len(shapes) == 6
        assert {shape[0] for shape in shapes.values()} == {experts}


def test_a_pipeline_rank_without_experts_does_not_keep_others_waiting(pool: Pool) -> None:
    """All ranks form the groups of experts, also those whose blocks have none."""
    shape = replace(SHAPE, dense_layers=1)
    arguments = {"mesh_sizes": {"pp": 2, "dp_shard": 1, "cp": 2, "ep": 2}, "shape": shape}
    ranks = pool.run(run_step, arguments, world_size=4, limit_s=60.0)
    assert [len(shapes) for shapes in ranks] == [0, 0, 3, 3]


@pytest.mark.parametrize(
    ("mesh_sizes", "w1"),
    [
        ({"dp_shard": 2, "ep": 1}, [4, 12, 16]),
        ({"dp_shard": 2, "ep": 2}, [2, 24, 16]),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, [2, 12, 16]),
        ({"dp_shard": 1, "tp": 2, "ep": 1}, [4, 12, 16]),
        ({"dp_shard": 1, "dp_replicate": 2, "cp": 2, "ep": 2}, [2, 24, 16]),
    ],
)
def test_experts_are_whole_on_a_rank_of_ep_and_sharded_over_the_others(
    pool: Pool, mesh_sizes: dict[str, int], w1: list[int]
) -> None:
    arguments = {"mesh_sizes": mesh_sizes, "shape": SHAPE}
    world_size = MeshTable(**mesh_sizes).world_size
    for shapes in pool.run(run_step, arguments, world_size=world_size):
        assert len(shapes) == 6
        assert shapes["blocks.0.moe.experts.w1"] == w1


def compose_refused(mesh_sizes: dict[str, int], tables: dict[str, Any]) -> None:
    with pool_world() as device:
        compose_on(Mesh.build(MeshTable(**mesh_sizes), device), SHAPE, **tables)


@pytest.mark.parametrize(
    ("mesh_sizes", "tables", "message"),
    [
        (
            {"dp_shard": 1, "tp": 2},
            {"parallel": ParallelTable(sequence_parallel=False)},
            "mesh.tp = 2 with experts needs parallel.sequence_parallel = true",
        ),
        (
            {"dp_shard": 3, "ep": 3},
            {},
            "mesh.ep = 3 must divide the 4 experts of blocks.0.moe.experts.w1",
        ),
        (
            {"dp_shard": 1},
            {
                "compiling": CompileTable(enabled=True),
                "memory": MemoryTable(activation_checkpoint="selective"),
            },
            "compile.enabled = true with experts cannot keep the results of single operators",
        ),
        (
            {"dp_shard": 1, "tp": 2},
            {
                "compiling": CompileTable(enabled=True),
                "parallel": ParallelTable(async_tp=True),
            },
            "parallel.async_tp = true is not proven with experts",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_without_a_recipe_too(
    pool: Pool, mesh_sizes: dict[str, int], tables: dict[str, Any], message: str
) -> None:
    arguments = {"mesh_sizes": mesh_sizes, "tables": tables}
    with pytest.raises(WorkerError) as caught:
        pool.run(compose_refused, arguments, world_size=MeshTable(**mesh_sizes).world_size)
    assert caught.value.user_error is not None
    assert message in caught.value.user_error.lines[0]
