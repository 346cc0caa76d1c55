"""AdamW and its learning rate: corners of the schedules, decay, state, frozen parameters."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.parallel.grad_norm import clip_divisor, local_grad_norm_sq
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import MeshTable, OptimGroup, OptimTable
from composer3d.runtime.mesh import Mesh
from composer3d.training.optim import learning_rate
from composer3d.training.optimizers import build_optimizer

NAMES = ("blocks.0.attn.wq.weight", "blocks.0.attn_norm.weight")


@pytest.fixture
def one_rank_world() -> Iterator[None]:
    """A world of one rank without threads or sockets: enough for DTensors of one shard."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((6, 4), (4,))
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def _take_steps(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], steps: range
) -> None:
    for step in steps:
        for parameter in parameters.values():
            parameter.grad = torch.sin(parameter.detach() * (step + 1))
        optimizer.step()


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            OptimTable(lr=1.0, warmup=4, schedule="constant"),
            {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0},
        ),
        (
            OptimTable(lr=1.0, min_lr=0.2),
            {
                0: 0.6 + 0.4 * math.cos(math.pi * 0.01),
                49: 0.6,
                98: 0.6 + 0.4 * math.cos(math.pi * 0.99),
                99: 0.2,
            },
        ),
        (
            OptimTable(lr=1.0, warmup=10),
            {0: 0.1, 9: 1.0, 10: 0.5 + 0.5 * math.cos(math.pi / 90), 54: 0.5, 99: 0.0, 100: 0.0},
        ),
        (
            OptimTable(lr=1.0, warmup=2, decay=10, min_lr=0.1),
            {0: 0.5, 1: 1.0, 5: 0.55, 9: 0.1, 10: 0.1, 50: 0.1},
        ),
        (OptimTable(lr=1.0, warmup=5, decay=5, min_lr=0.1), {4: 1.0, 5: 0.1}),
        (
            OptimTable(lr=1.0, schedule="linear"),
            {0: 0.99, 1: 0.98, 74: 0.25, 98: 0.01, 99: 0.0, 100: 0.0},
        ),
        (
            OptimTable(lr=1.0, schedule="linear", warmup=2, decay=10, min_lr=0.2),
            {0: 0.5, 1: 1.0, 2: 0.9, 3: 0.8, 5: 0.6, 8: 0.3, 9: 0.2, 10: 0.2, 99: 0.2},
        ),
        (OptimTable(lr=1.0, schedule="linear", warmup=100), {98: 0.99, 99: 1.0, 100: 0.0}),
        (
            OptimTable(lr=1.0, schedule="wsd", warmup=10, decay=80, decay_steps=20, min_lr=0.5),
            {
                4: 0.5,
                9: 1.0,
                10: 1.0,
                59: 1.0,
                60: 0.975,
                69: 0.75,
                78: 0.525,
                79: 0.5,
                80: 0.5,
                99: 0.5,
            },
        ),
        (
            OptimTable(lr=1.0, schedule="wsd"),
            {0: 1.0, 89: 1.0, 90: 0.9, 94: 0.5, 98: 0.1, 99: 0.0, 100: 0.0},
        ),
        (OptimTable(lr=1.0, schedule="wsd", decay_steps=1, min_lr=0.1), {0: 1.0, 98: 1.0, 99: 0.1}),
        # A tenth of 5 steps is at least one step.
        (OptimTable(lr=1.0, schedule="wsd", decay=5), {0: 1.0, 3: 1.0, 4: 0.0, 5: 0.0}),
        (
            OptimTable(lr=1.0, schedule="wsd", warmup=95),
            {94: 1.0, 95: 0.8, 98: 0.2, 99: 0.0, 100: 0.0},
        ),
        (
            OptimTable(lr=1.0, schedule="wsd", warmup=5, decay=10, decay_steps=5),
            {4: 1.0, 5: 0.8, 8: 0.2, 9: 0.0},
        ),
    ],
)
def test_learning_rate_at_its_corners(table: OptimTable, expected: dict[int, float]) -> None:
    assert {step: learning_rate(step, table, 100) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    "sets",
    [
        ["optim.schedule=wsd", "optim.warmup=5", "optim.decay_steps=15"],  # of 20 steps
        ["optim.schedule=wsd", "optim.warmup=5", "optim.decay=9", "optim.decay_steps=4"],
        ["optim.schedule=wsd", "optim.warmup=20"],
        ["optim.schedule=linear", "optim.warmup=5", "optim.decay=6", "optim.min_lr=1e-3"],
        ["optim.schedule=constant"],
    ],
    ids=" ".join,
)
def test_schedules_that_just_fit_are_accepted(root: Path, sets: list[str]) -> None:
    table = load(root / "recipes" / "debug-1-single.toml", sets).recipe.optim
    assert all(0 <= learning_rate(step, table, 20) <= table.lr for step in range(25))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_learning_rate_never_rises_after_the_warmup(schedule: Any) -> None:
    table = OptimTable(schedule=schedule, warmup=10, min_lr=1e-5)
    rates = [learning_rate(step, table, 60) for step in range(80)]
    assert rates[59:] == [1e-5] * 21  # from step number 60 on, counted from 1
    assert rates[58] > 1e-5
    assert max(rates) == rates[9] == table.lr
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10] < rates[9] or schedule == "wsd"


def test_a_parameter_has_the_rates_of_the_first_group_that_matches() -> None:
    """Without a group that says otherwise, only matrices are decayed."""
    parameters = {name: nn.Parameter(torch.ones(2, 2)) for name in ("a.w", "a.v", "b.w", "c")}
    parameters |= {name: nn.Parameter(torch.ones(2)) for name in ("a.norm", "b.norm", "d")}
    groups = (
        OptimGroup(train=("a.w", "a.norm"), lr_factor=0.5),
        OptimGroup(train=("a.*", "b.*"), lr_factor=3.0, weight_decay=0.25),
    )
    optimizer = build_optimizer(parameters.items(), OptimTable(weight_decay=0.5, groups=groups))
    optimizer.set_lr(0.1)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)  # only decay moves a weight
    optimizer.step()
    moved = {name: 1 - parameter.flatten()[0].item() for name, parameter in parameters.items()}
    # lr x factor x decay
    expected = {
        "a.w": 0.025,
        "a.v": 0.075,
        "b.w": 0.075,
        "c": 0.05,
        "a.norm": 0.0,
        "b.norm": 0.075,
        "d": 0.0,
    }
    assert moved == pytest.approx(expected, abs=1e-7)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_changes_no_bit_of_a_step(dtype: torch.dtype) -> None:
    # Sizes that no vector register divides, and a tensor too small for several threads.
    sizes = [(1021, 997), (100_003,), (13,)]
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        assert torch.get_num_threads() == threads
        generator = torch.Generator().manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(size, dtype=dtype, generator=generator)) for size in sizes
        ]
        optimizer = build_optimizer(list(zip("abc", parameters, strict=True)), OptimTable())
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, dtype=dtype, generator=generator)
            optimizer.step()
        results.append([parameter.detach() for parameter in parameters])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_that_is_loaded_in_place_continues_bitwise(dtype: torch.dtype) -> None:
    table = OptimTable(lr=1e-2)
    kept = _parameters(dtype)
    optimizer = build_optimizer(kept.items(), table)
    _take_steps(optimizer, kept, range(3))
    saved = {
        name: tensor.clone() for name, tensor in optimizer_state(optimizer, kept.items()).items()
    }
    assert set(saved) == {
        f"optim.{name}.{key}" for name in NAMES for key in ("exp_avg", "exp_avg_sq", "step")
    }
    assert saved[f"optim.{NAMES[0]}.step"].item() == 3

    resumed = _parameters(dtype, seed=1)
    with torch.no_grad():
        for name, parameter in resumed.items():
            parameter.copy_(kept[name])
    # Built in the other order: state belongs to names, not to positions.
    other = build_optimizer(reversed(resumed.items()), table)
    target = optimizer_state(other, resumed.items())
    assert all(not tensor.any() for tensor in target.values())
    for name, tensor in target.items():
        tensor.copy_(saved[name])

    _take_steps(optimizer, kept, range(3, 6))
    _take_steps(other, resumed, range(3, 6))
    assert all(torch.equal(kept[name], resumed[name]) for name in NAMES)
    assert all(
        torch.equal(tensor, optimizer_state(other, resumed.items())[name])
        for name, tensor in optimizer_state(optimizer, kept.items()).items()
    )


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_frozen_parameter_has_no_state_no_norm_and_no_update(max_norm: float) -> None:
    mesh = Mesh.build(MeshTable(dp_shard=1), torch.device("cpu"))
    table = OptimTable(lr=0.1, weight_decay=0.5)
    parameters = _parameters()
    without = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    frozen = nn.Parameter(torch.ones(3, 2), requires_grad=False)
    parameters["blocks.0.attn.lora_base"] = frozen
    frozen_values = frozen.detach().clone()
    optimizers = [build_optimizer(every.items(), table) for every in (parameters, without)]

    norms = []
    for every, optimizer in zip((parameters, without), optimizers, strict=True):
        loss = sum((parameter * parameter).sum() for parameter in every.values())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        norm = local_grad_norm_sq(every.values(), mesh).sqrt()
        norms.append(float(norm))
        divisor = clip_divisor(norm, max_norm)
        optimizer.apply_gradients(divisor=divisor, is_good=norm.isfinite())

    assert frozen.grad is None
    assert torch.equal(frozen, frozen_values)
    assert frozen not in optimizers[0].state
    assert all(frozen is not p for group in optimizers[0].param_groups for p in group["params"])
    state = optimizer_state(optimizers[0], parameters.items())
    assert set(state) == set(optimizer_state(optimizers[1], without.items()))
    assert frozen not in optimizers[0].state

    # The others step as they do without the frozen one.
    assert norms[0] == norms[1] > 0.5
    assert all(torch.equal(parameters[name], without[name]) for name in NAMES)


def test_zero_state_is_that_of_torch() -> None:
    table = OptimTable()
    fresh, asked = _parameters(), _parameters()
    plain, ours = build_optimizer(fresh.items(), table), build_optimizer(asked.items(), table)
    optimizer_state(ours, asked.items())
    _take_steps(plain, fresh, range(2))
    _take_steps(ours, asked, range(2))
    for name in NAMES:
        assert torch.equal(fresh[name], asked[name])
        for key, tensor in plain.state[fresh[name]].items():
            mine = ours.state[asked[name]][key]
            assert (tensor.dtype, tensor.device, tensor.stride()) == (
                mine.dtype,
                mine.device,
                mine.stride(),
            )
            assert torch.equal(tensor, mine)


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_and_dtensors_of_several_meshes_step_as_plain_tensors_do(
    dtype: torch.dtype,
) -> None:
    flat, square = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
    table = OptimTable(lr=1e-2)
    plain = _parameters(dtype)
    plain |= {
        name: nn.Parameter(torch.ones(3, 2, dtype=dtype))
        for name in ("first.embed.weight", "last.head.weight")
    }
    mixed = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in plain.items()}
    mixed[NAMES[0]] = nn.Parameter(distribute_tensor(mixed[NAMES[0]].detach(), flat, [Shard(0)]))
    mixed["last.head.weight"] = nn.Parameter(
        distribute_tensor(mixed["last.head.weight"].detach(), square, [Shard(0), Replicate()])
    )
    reference, optimizer = (
        build_optimizer(plain.items(), table),
        build_optimizer(mixed.items(), table),
    )
    state = optimizer_state(optimizer, mixed.items())
    assert isinstance(state[f"optim.{NAMES[0]}.exp_avg"], DTensor)
    _take_steps(reference, plain, range(3))
    _take_steps(optimizer, mixed, range(3))
    for name, parameter in mixed.items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole, plain[name]), name
