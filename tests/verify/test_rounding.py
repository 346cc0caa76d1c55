"""Rounding in proofs: AdamW replayed in float64, and the measured noise of gradients."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import init
from composer3d.recipe.schema import OptimTable
from composer3d.training.optimizers.adamw_proof import AdamWProof
from composer3d.verify.rounding import (
    StepResults,
    measure_noise,
    noisy_copies,
    round_to_float32,
)

TABLE = OptimTable(clip=1.0)
LR = (1e-4, 3e-4, 2e-4)
DTYPES = (torch.float32, torch.float64)


def gradient(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """4,000 elements: usual ones, tiny ones, ones whose square float32 loses, and zeros."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.tensor([1e-2, 1e-9, 1e-30, 0.0], dtype=dtype).repeat(1000)
    return torch.randn(4000, dtype=dtype, generator=generator) * sizes


def excess(
    table: OptimTable,
    *,
    trained: OptimTable | None = None,
    lr: Callable[[float], float] = float,
    spoil: Callable[[Tensor, torch.optim.Optimizer, int], None] | None = None,
    foreach: bool = False,
    dtype: torch.dtype = torch.float32,
) -> float:
    """The largest relative error that rounding does not explain in three steps of torch's AdamW.

    Args:
        table: the settings of the replay.
        trained: the settings of the optimizer; by default those of the replay.
        lr: changes the optimizer's learning rate.
        spoil: is called after each step, to damage the weight or the optimizer's state.
        foreach: use AdamW's foreach form instead of the fused one.
        dtype: the dtype of the weight and of the optimizer.
    """
    trained = trained or table
    generator = torch.Generator().manual_seed(9)
    weight = (torch.randn(50, 80, dtype=dtype, generator=generator) * 0.02).requires_grad_()
    form = {"foreach": True} if foreach else {"fused": True}
    optimizer = torch.optim.AdamW(
        [weight], betas=trained.betas, eps=trained.eps, weight_decay=trained.weight_decay, **form
    )
    replay = AdamWProof(table, dtype)
    largest = 0.0
    for step in range(3):
        before = weight.detach().double().clone()
        weight.grad = gradient(step, dtype).view(50, 80)
        norm = weight.grad.double().norm().item()
        replay.record_gradients({"w": weight.grad}, norm=norm, max_norm=table.clip)
        if 0 < trained.clip < norm:
            weight.grad *= trained.clip / norm
        optimizer.param_groups[0]["lr"] = lr(LR[step])
        optimizer.step()
        if spoil is not None:
            spoil(weight, optimizer, step)
        a, b = replay.remove_rounding("w", weight.detach().double(), before, lr=LR[step])
        largest = max(largest, ((a - b).norm() / b.norm()).item())
    return largest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("foreach", [False, True], ids=["fused", "foreach"])
@pytest.mark.parametrize("clip", [0.0, 0.1, 100.0])
@pytest.mark.parametrize(
    "table",
    [
        TABLE,
        replace(TABLE, eps=1e-15),
        replace(TABLE, eps=1e-4),
        replace(TABLE, eps=1e-30),
        replace(TABLE, betas=(0.0, 0.999)),
        replace(TABLE, betas=(0.95, 0.0)),
        replace(TABLE, betas=(0.95, 0.0), eps=1e-30),
        replace(TABLE, betas=(0.999999, 0.999999999)),
        replace(TABLE, weight_decay=0.0),
        replace(TABLE, weight_decay=1.0),
    ],
    ids=str,
)
def test_rounding_explains_all_of_an_exact_step(
    table: OptimTable, clip: float, foreach: bool, dtype: torch.dtype
) -> None:
    assert excess(replace(table, clip=clip), foreach=foreach, dtype=dtype) == 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "trained",
    [
        replace(TABLE, eps=1.1e-8),
        replace(TABLE, betas=(0.95, 0.9)),
        replace(TABLE, betas=(0.9, 0.951)),
        replace(TABLE, betas=(0.901, 0.95)),
        replace(TABLE, weight_decay=0.0),
        replace(TABLE, weight_decay=0.11),
    ],
    ids=str,
)
def test_rounding_does_not_explain_another_setting(trained: OptimTable, dtype: torch.dtype) -> None:
    assert excess(TABLE, trained=trained, dtype=dtype) > 1e-8


def forget_first(weight: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.state[weight]["exp_avg"].zero_()


def forget_second(weight: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.state[weight]["exp_avg_sq"].zero_()


def forget_count(weight: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.state[weight]["step"].zero_()


def lose_an_element(weight: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
    weight.data[0] = 0.0


def spoil_an_element(weight: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
    weight.data[0] += 1e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spoil", [forget_first, forget_second, forget_count, lose_an_element, spoil_an_element]
)
def test_rounding_does_not_explain_a_spoilt_step(
    spoil: Callable[[Tensor, torch.optim.Optimizer, int], None], dtype: torch.dtype
) -> None:
    assert excess(TABLE, spoil=spoil, dtype=dtype) > 1e-8


def test_rounding_does_not_explain_another_learning_rate() -> None:
    assert excess(TABLE, lr=lambda lr: lr * 1.001) > 1e-8


def test_a_parameter_without_a_gradient_stays() -> None:
    replay = AdamWProof(TABLE, torch.float32)
    replay.record_gradients({"w": None}, norm=1.0, max_norm=1.0)
    weight = torch.ones(3, dtype=torch.float64)
    a, b = replay.remove_rounding("w", weight + 1e-9, weight, lr=1.0)
    assert torch.equal(b, weight)
    assert torch.equal(a, weight + 1e-9)


def test_rounding_does_not_explain_a_value_that_is_not_finite() -> None:
    replay = AdamWProof(TABLE, torch.float32)
    replay.record_gradients({"w": torch.ones(3)}, norm=1.0, max_norm=1.0)
    weight = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.float64)
    a, b = replay.remove_rounding("w", weight, torch.ones(3, dtype=torch.float64), lr=1e-4)
    assert not torch.isfinite(a - b)[1:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_noise_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    shape = ModelShape(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn=24, vocab=97, qkv_bias=True, qk_norm=True
    )
    model = Llama(shape, dtype=torch.float64, device="cpu")
    init.initialise(model, sharding_plan(shape), 3)
    if dtype == torch.float32:
        round_to_float32(model)
        assert all(torch.equal(p, p.float().double()) for p in model.parameters())
    tokens = torch.randint(97, (6, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).repeat(6, 1)

    def compute(llama: Llama, rows: int) -> StepResults:
        llama.zero_grad()
        loss = 0.0
        for first in range(0, 6, rows or 6):
            part = slice(first, first + (rows or 6))
            of_part = llama(tokens[part], tokens[part].roll(-1, 1), positions[part])
            of_part.backward()
            loss += of_part.item()
        named = llama.named_parameters()
        return StepResults(loss, {name: p.grad.clone() for name, p in named if p.grad is not None})

    names = [name for name, _ in model.named_parameters()]
    exact = compute(model, 0)
    total = sum(tensor.norm().item() ** 2 for tensor in exact.gradients.values()) ** 0.5
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("wq" in name)
    few = compute(model, 0)
    found = measure_noise(noisy_copies(model, dtype, names), few, compute)

    # Frozen parameters have no noise of their own, but a part in the norm of all.
    assert found.gradients.keys() == few.gradients.keys() < exact.gradients.keys()
    assert found.norm_of_all == pytest.approx(total)
    rounding = torch.finfo(dtype).eps
    assert 0 < found.loss < 100 * rounding * exact.loss
    for name, distance in found.gradients.items():
        assert 0 < distance < 10 * rounding * total, name
        assert distance < 1000 * rounding * exact.gradients[name].norm().item(), name
