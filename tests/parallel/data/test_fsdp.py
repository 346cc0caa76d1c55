"""FSDP: its units, the number of its collectives, and offload.

``layouts.txt`` proves that it is exact.
"""

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import Stages, StepShape, compose
from composer3d.parallel.data import fsdp
from composer3d.parallel.local_gradients import see_local_gradients
from composer3d.recipe.schema import MemoryTable, MeshTable, ParallelTable, PrecisionTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.torch_private import DispatchMode, modules_of_unit
from tests.long import some_of
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


def count_divisions() -> int:
    """Count the divisions of whole buffers of gradients in a step of one rank."""

    class Divisions(DispatchMode):
        count = 0

        def __torch_dispatch__(
            self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            is_buffer = operator.name().startswith("aten::div") and arguments[0].dim() == 1
            self.count += is_buffer and arguments[0].numel() > SMALL_SHAPE.dim
            return operator(*arguments, **(keywords or {}))

    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=1), device)
        stages = compose_small(mesh, precision=PrecisionTable(compute="bfloat16"))
        with Divisions() as seen:
            take_a_step(stages)
        return seen.count


def test_a_rank_alone_does_not_divide_gradients_by_one(pool: Pool) -> None:
    """Torch before 2.15 divides by a factor that is set, even by 1."""
    assert pool.run(count_divisions, {}, world_size=1) == [0]


def order_of_gathers() -> list[str]:
    """Take a step of zero 3: which unit, of two blocks, is gathered or begins its backward."""
    events: list[str] = []
    unshard, pre_backward = FSDPParamGroup.unshard, FSDPParamGroup.pre_backward

    def gather(self: FSDPParamGroup, async_op: bool = False) -> None:
        is_there = self.is_unsharded or self._all_gather_result is not None
        unshard(self, async_op)
        if not is_there and self._all_gather_result is not None:
            events.append(f"gather {self._module_fqn}")

    def begin_backward(self: FSDPParamGroup, *arguments: Any) -> None:
        events.append(f"backward of {self._module_fqn}")
        pre_backward(self, *arguments)

    with pool_world() as device, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(FSDPParamGroup, "unshard", gather)
        monkeypatch.setattr(FSDPParamGroup, "pre_backward", begin_backward)
        mesh = Mesh.build(MeshTable(dp_shard=2), device)
        stages = compose_layers(5, mesh, 1, parallel=ParallelTable(fsdp_blocks=2))
        tokens = torch.arange(8).view(1, 8)
        stages.forward_backward(tokens, tokens, tokens, 8)
    return events


def compose_layers(
    n_layers: int, mesh: Mesh, micro_batches: int, *, tied: bool = False, **tables: Any
) -> Stages:
    shape = replace(SHAPE, n_layers=n_layers, tied=tied)
    step = StepShape(micro_batch=1, micro_batches=micro_batches, seq_len=8)
    return compose(Llama(shape), sharding_plan(shape), mesh, step=step, seed=0, **tables)


def test_backward_gathers_the_unit_before_the_one_that_runs(pool: Pool) -> None:
    units = ["blocks.0, blocks.1", "blocks.2, blocks.3", "blocks.4"]
    for events in pool.run(order_of_gathers, {}, world_size=2):
        # `last` stays gathered, and `first` is not read again.
        assert events == [
            *(f"gather {unit}" for unit in ("first", *units, "last")),
            "backward of last",
            *(
                event
                for unit in reversed(units)
                for event in (f"gather {unit}", f"backward of {unit}")
            ),
            "backward of first",
        ]


def sizes_of_units(fsdp_blocks: int, tied: bool) -> list[int]:
    """The modules of each unit of a model of five blocks."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=2), device)
        parallel = ParallelTable(fsdp_blocks=fsdp_blocks)
        (stage,) = compose_layers(5, mesh, 1, tied=tied, parallel=parallel).modules
        units = fsdp.units(stage)
        assert units[0] is stage
        held = [module for unit in units for module in modules_of_unit(unit)]
        assert len(set(held)) == len(held)
        assert all(unit is modules_of_unit(unit)[0] for unit in units)
        return [len(modules_of_unit(unit)) for unit in units]


@pytest.mark.parametrize(
    ("fsdp_blocks", "tied", "sizes"),
    [
        (1, False, [1, 1, 1, 1, 1, 1, 1, 1]),  # the stage, first, five blocks, last
        (2, False, [1, 1, 2, 2, 1, 1]),
        (4, True, [1, 4, 1]),
        (100, False, [1, 1, 5, 1]),
    ],
)
def test_a_unit_has_as_many_blocks_as_the_recipe_says(
    pool: Pool, fsdp_blocks: int, tied: bool, sizes: list[int]
) -> None:
    arguments = {"fsdp_blocks": fsdp_blocks, "tied": tied}
    assert pool.run(sizes_of_units, arguments, world_size=2) == [sizes, sizes]


def differences_of_units(
    axes: dict[str, int], tables: dict[str, dict[str, Any]], layers: int
) -> list[str]:
    """Train with units of one block and of two; returns the losses and gradients that differ."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(**axes), device)
        of_one, of_two = (run_with_units_of(blocks, mesh, tables, layers) for blocks in (1, 2))
        assert of_one.keys() == of_two.keys()
        return [name for name, value in of_one.items() if not torch.equal(value, of_two[name])]


def run_with_units_of(
    fsdp_blocks: int, mesh: Mesh, tables: dict[str, dict[str, Any]], layers: int
) -> dict[str, torch.Tensor]:
    """Take two steps, and in between an evaluation and the gradients of one rank alone.

    Returns:
        The losses, and this rank's shards of all gradients, by name.
    """
    parallel = ParallelTable(fsdp_blocks=fsdp_blocks, **tables.get("parallel", {}))
    stages = compose_layers(
        layers,
        mesh,
        MICRO_BATCHES,
        parallel=parallel,
        memory=MemoryTable(**tables.get("memory", {})),
        precision=PrecisionTable(**tables.get("precision", {})),
    )
    torch.manual_seed(dist.get_rank() // (mesh.sizes.world_size // mesh.sizes.pp))
    tokens = torch.randint(SHAPE.vocab, (MICRO_BATCHES, 8))
    positions = torch.arange(8).expand_as(tokens)
    found = {}

    def take_a_whole_step(name: str) -> None:
        rows = torch.randint(SHAPE.vocab, (MICRO_BATCHES, 8))
        found[f"loss of {name}"] = stages.forward_backward(rows, rows, positions, 64)
        for parameter_name, parameter in stages.named_parameters():
            assert isinstance(parameter.grad, DTensor), parameter_name
            found[f"{parameter_name} of {name}"] = parameter.grad.to_local().clone()

    def see(unit: Any, index: int, gradient: torch.Tensor) -> None:
        sums[0] += gradient.double().abs().sum()

    take_a_whole_step("step 1")
    found["validation"] = stages.evaluate(tokens, tokens, positions)
    sums = [torch.zeros((), dtype=torch.float64)]
    if mesh.sizes.dp_shard > 1:
        rows = tokens.shape[0] if mesh.sizes.pp > 1 else 1
        own = (tokens[:rows], tokens[:rows], positions[:rows])
        found["loss of one rank"] = see_local_gradients(stages, *own, see=see)
        found["gradients of one rank"] = sums[0]
    take_a_whole_step("step 2")
    return found


BF16 = {"precision": {"compute": "bfloat16"}}


@some_of(
    4,
    ("axes", "tables", "layers"),
    [
        ({"dp_shard": 2}, BF16 | {"memory": {"activation_checkpoint": "every 2 blocks"}}, 5),
        (
            {"dp_shard": 2},
            {
                "parallel": {"zero": 1},
                "precision": {"compute": "bfloat16", "reduce": "bfloat16"},
                "memory": {"activation_checkpoint": "selective"},
            },
            5,
        ),
        ({"dp_replicate": 2, "dp_shard": 2}, BF16 | {"parallel": {"zero": 2}}, 5),
        ({"dp_replicate": 2, "dp_shard": 1}, BF16 | {"parallel": {"zero": 0}}, 5),
        ({"pp": 2, "dp_shard": 2}, BF16, 6),
        ({"pp": 2, "dp_shard": 2}, BF16 | {"parallel": {"schedule": "Interleaved1F1B"}}, 12),
        (
            {"pp": 2, "dp_shard": 2},
            BF16 | {"parallel": {"schedule": "ZBVZeroBubble", "zero": 1}},
            12,
        ),
        (
            {"pp": 2, "dp_shard": 2},
            BF16
            | {
                "parallel": {"schedule": "DualPipeV"},
                "memory": {"activation_checkpoint": "full", "cpu_offload": True},
            },
            12,
        ),
    ],
    ids=str,
)
def test_units_of_several_blocks_compute_the_same_bits(
    pool: Pool, axes: dict[str, int], tables: dict[str, dict[str, Any]], layers: int
) -> None:
    arguments = {"axes": axes, "tables": tables, "layers": layers}
    world_size = MeshTable(**axes).world_size
    differences = pool.run(differences_of_units, arguments, world_size=world_size)
    assert differences == [[]] * world_size


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


def test_replicas_sum_the_gradients_of_all_micro_batches_of_a_step(pool: Pool) -> None:
    (once, _), *_ = pool.run(gradients_of_two_steps, {"zero": 1}, world_size=4)
    for zero in (2, 3):
        for steps in pool.run(gradients_of_two_steps, {"zero": zero}, world_size=4):
            for gradients in steps:  # the second step has nothing left of the first one
                assert gradients.keys() == once.keys()
                for name, gradient in gradients.items():
                    torch.testing.assert_close(gradient, once[name], rtol=1e-5, atol=1e-7)


# --- offload ---


def offload_flags(mesh: MeshTable, zero: Any) -> list[list[tuple[bool, bool]]]:
    """By FSDP unit and parameter: whether it is offloaded to the host, and in pinned memory."""
    with pool_world() as device:
        stages = compose_small(
            Mesh.build(mesh, device),
            parallel=ParallelTable(zero=zero),
            memory=MemoryTable(cpu_offload=True),
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
