"""What routers have seen in a step is the same on all ranks and layouts."""

from typing import Any

import pytest
import torch

from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan
from composer3d.models.moe.shape import MoeShape
from composer3d.parallel import StepShape, compose
from composer3d.parallel.expert.balance import expert_metrics
from composer3d.parallel.freeze import freeze_others
from composer3d.recipe.schema import MemoryTable, MeshTable, ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world

SHAPE = MoeShape(
    16,
    2,
    4,
    2,
    24,
    32,
    100.0,
    experts=4,
    experts_per_token=2,
    router="sigmoid",
    router_bias=True,
    bias_rate=0.125,
    balance_loss=0.5,
    z_loss=0.25,
)
ROWS, TOKENS = 4, 8


def loads_of(
    mesh_sizes: dict[str, int],
    micro_batch: int,
    checkpoint: str = "none",
    train: tuple[str, ...] = ("*",),
) -> dict[str, Any]:
    """Run two steps on the same global batch; return what routers have seen in the second."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(**mesh_sizes), device)
        rows = ROWS // mesh.batch_ranks
        step = StepShape(micro_batch=micro_batch, micro_batches=rows // micro_batch, seq_len=TOKENS)
        model = MoeLlama(SHAPE, dtype=torch.float64)
        freeze_others(model, train)
        stages = compose(
            model,
            sharding_plan(SHAPE),
            mesh,
            parallel=ParallelTable(),
            step=step,
            seed=0,
            memory=MemoryTable(activation_checkpoint=checkpoint),
        )
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(SHAPE.vocab, (ROWS, TOKENS), generator=generator)
        tokens = tokens[mesh.batch_rank * rows :][:rows]
        positions = torch.arange(TOKENS).expand_as(tokens)
        arguments = [stages.own_tokens(x) for x in (tokens, tokens, positions)]
        stages.forward_backward(*arguments, torch.tensor(ROWS * TOKENS))
        stages.move_router_biases(torch.tensor(True))
        stages.move_router_biases(torch.tensor(False))  # a bad step moves nothing
        stages.forward_backward(*arguments, torch.tensor(ROWS * TOKENS))
        metrics = expert_metrics(stages.router_loads, ROWS * TOKENS)
        counts = {name: load.tokens_E.tolist() for name, load in stages.router_loads.items()}
    return {"metrics": metrics, "counts": counts}


@pytest.fixture(scope="module")
def expected(pool: Pool) -> dict[str, Any]:
    """What routers see on one process, in one micro-batch."""
    arguments = {"mesh_sizes": {"dp_shard": 1}, "micro_batch": 4}
    (found,) = pool.run(loads_of, arguments, world_size=1)
    return found


@pytest.mark.parametrize(
    ("mesh_sizes", "micro_batch", "checkpoint"),
    [
        ({"dp_shard": 1}, 1, "full"),
        ({"dp_shard": 2, "ep": 2}, 2, "none"),
        ({"dp_shard": 1, "tp": 2, "ep": 2}, 4, "selective"),
        ({"dp_shard": 1, "cp": 2, "dp_replicate": 2}, 1, "none"),
        ({"dp_shard": 1, "pp": 2, "tp": 2}, 2, "full"),
    ],
)
def test_loads_do_not_depend_on_the_layout(
    pool: Pool,
    expected: dict[str, Any],
    mesh_sizes: dict[str, int],
    micro_batch: int,
    checkpoint: str,
) -> None:
    arguments = {
        "mesh_sizes": mesh_sizes,
        "micro_batch": micro_batch,
        "checkpoint": checkpoint,
    }
    world_size = MeshTable(**mesh_sizes).world_size
    for rank in pool.run(loads_of, arguments, world_size=world_size):
        assert rank["counts"] == expected["counts"]
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=1e-10)


def test_the_loads_of_one_process_are_those_of_its_tokens(expected: dict[str, Any]) -> None:
    metrics = expected["metrics"]
    assert metrics["dropped_tokens"] == 0
    assert metrics["expert_load"] >= 1
    assert metrics["balance_loss"] >= 2 * 0.5 * 0.9
    assert metrics["z_loss"] > 0
    assert metrics["router_bias/blocks.1"] == 0.25
    for counts in expected["counts"].values():
        assert sum(counts) == ROWS * TOKENS * 2


@pytest.mark.parametrize("mesh_sizes", [{"dp_shard": 2, "ep": 2}, {"dp_shard": 1, "pp": 2}])
def test_the_bias_of_a_router_that_does_not_train_stays(
    pool: Pool, mesh_sizes: dict[str, int]
) -> None:
    arguments = {
        "mesh_sizes": mesh_sizes,
        "micro_batch": 2,
        "train": ("first.*", "blocks.*.attn.*", "blocks.0.moe.router.weight"),
    }
    for rank in pool.run(loads_of, arguments, world_size=2):
        assert rank["metrics"]["router_bias/blocks.0"] == 0.25
        assert "router_bias/blocks.1" not in rank["metrics"]  # a spread of 0 is not said
