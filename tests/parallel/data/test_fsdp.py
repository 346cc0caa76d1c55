"""FSDP: the number of its collectives, and offload. ``layouts.txt`` proves that it is exact."""

from collections import Counter
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import StepShape, compose
from composer3d.parallel.data import fsdp
from composer3d.recipe.schema import MemoryTable, MeshTable, ParallelTable, PrecisionTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from tests.parallel.small_model import MICRO_BATCHES, compose_small, take_a_step
from tests.parallel.small_model import SHAPE as SMALL_SHAPE

SHAPE = ModelShape(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0)


# --- how often parameters and gradients are sent ---

UNITS = SMALL_SHAPE.n_layers + 2  # every block, and the two ends of the model


def count_sends(zero: int, pp: int, compute: str | None) -> Counter[tuple[str, torch.dtype]]:
    """Count this rank's collectives over fsdp in the second step, by kind and dtype."""
    counts: Counter[tuple[str, torch.dtype]] = Counter()

    def count_calls(name: str, kind: str) -> None:
        """Count the calls of ``torch.distributed.<name>``, if this torch has it."""
        original = getattr(dist, name, None)
        if original is None:
            return

        def counted(*arguments: Any, **keywords: Any) -> Any:
            values = (*arguments, *keywords.values())
            first_tensor = next(value for value in values if isinstance(value, torch.Tensor))
            counts[kind, first_tensor.dtype] += 1
            return original(*arguments, **keywords)

        setattr(dist, name, counted)

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        count_calls(name, "reduce-scatter")
    for name in ("all_gather_into_tensor", "all_gather_single"):
        count_calls(name, "all-gather")
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(pp=pp, dp_shard=2), device)
        parallel = ParallelTable(zero=zero)  # type: ignore[arg-type]
        precision = PrecisionTable(compute=compute)  # type: ignore[arg-type]
        stages = compose_small(mesh, parallel=parallel, precision=precision)
        take_a_step(stages)
        counts.clear()
        take_a_step(stages)
        return counts


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"),
    [
        (1, UNITS, UNITS),
        (2, UNITS, UNITS * MICRO_BATCHES),
        # Backward gathers them again, except for the first unit, which only looks up rows, and the
        # last one, whose backward follows its forward.
        (3, (2 * UNITS - 2) * MICRO_BATCHES, UNITS * MICRO_BATCHES),
    ],
)
def test_zero_decides_the_number_of_gathers_and_reductions(
    pool: Pool, zero: int, gathers: int, reductions: int
) -> None:
    arguments = {"zero": zero, "pp": 1, "compute": "bfloat16"}
    for counts in pool.run(count_sends, arguments, world_size=2):
        assert counts == {
            ("all-gather", torch.bfloat16): gathers,
            ("reduce-scatter", torch.float32): reductions,
        }


def test_a_pipeline_reduces_once_a_step_at_every_zero(pool: Pool) -> None:
    for counts in pool.run(count_sends, {"zero": 3, "pp": 2, "compute": None}, world_size=4):
        # The two stages have 5 units.
        assert counts["reduce-scatter", torch.float32] in (2, 3)


def gradients_of_two_steps(zero: Any) -> list[dict[str, torch.Tensor]]:
    """The whole gradients after each of two steps, on two replicas of two shards."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_replicate=2, dp_shard=2), device)
        stages = compose_small(mesh, parallel=ParallelTable(zero=zero))
        found = []
        for _ in range(2):
            take_a_step(stages)
            gradients = {}
            for name, parameter in stages.modules[0].named_parameters():
                assert isinstance(parameter.grad, DTensor)
                gradients[name] = parameter.grad.full_tensor()
            found.append(gradients)
        return found


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_sum_the_gradients_of_all_micro_batches_of_a_step(pool: Pool, zero: int) -> None:
    (once, _), *_ = pool.run(gradients_of_two_steps, {"zero": 1}, world_size=4)
    for steps in pool.run(gradients_of_two_steps, {"zero": zero}, world_size=4):
        for gradients in steps:  # the second step has nothing left of the first one
            assert gradients.keys() == once.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, once[name], rtol=1e-5, atol=1e-7)


# --- offload ---


def offload_flags(mesh: MeshTable, zero: Any) -> list[list[tuple[bool, bool]]]:
    """By FSDP unit and parameter: whether it is offloaded to the host, and in pinned memory."""
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
        for parameter in stages.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().device.type == "cpu"
        groups = [
            cast(Any, unit)._get_fsdp_state()._fsdp_param_group
            for unit in fsdp.units(stages.modules[0])
        ]
        return [
            [(parameter.offload_to_cpu, parameter.pin_memory) for parameter in group.fsdp_params]
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
    arguments = {"mesh": mesh, "zero": zero}
    for units in pool.run(offload_flags, arguments, world_size=mesh.world_size):
        assert len(units) >= 2  # a block, and an end of the model
        assert {flags for unit in units for flags in unit} == {(True, False)}
