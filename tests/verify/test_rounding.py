"""Rounding in float32 proofs: AdamW replayed in float64, and the measured noise of gradients."""

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
from composer3d.verify.rounding import AdamWReplay, measure_noise, round_to_float32

TABLE = OptimTable(clip=1.0)
LR = (1e-4, 3e-4, 2e-4)


def gradient(step: int) -> Tensor:
    """4,000 elements: usual ones, tiny ones, ones whose square float32 loses, and zeros."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.tensor([1e-2, 1e-9, 1e-30, 0.0]).repeat(1000)
    return torch.randn(4000, generator=generator) * sizes


def excess(
    table: OptimTable,
    *,
    trained: OptimTable | None = None,
    lr: Callable[[float], float] = float,
    spoil: Callable[[Tensor, torch.optim.Optimizer, int], None] | None = None,
    foreach: bool = False,
) -> float:
    """The largest relative error that rounding does not explain in three steps of torch's AdamW.

    Args:
        table: the settings of the replay.
        trained: the settings of the optimizer, in float32; by default those of the replay.
        lr: changes the optimizer's learning rate.
        spoil: is called after each step, to damage the weight or the optimizer's state.
        foreach: use AdamW's foreach form instead of the fused one.
    """
    trained = trained or table
    norms = [gradient(step).double().norm().item() for step in range(3)]
    weight = (torch.randn(4000, generator=torch.Generator().manual_seed(9)) * 0.02).requires_grad_()
    form = {"foreach": True} if foreach else {"fused": True}
    optimizer = torch.optim.AdamW(
        [weight], betas=trained.betas, eps=trained.eps, weight_decay=trained.weight_decay, **form
    )
    replay = AdamWReplay(table, norms, [min(norm, table.clip or norm) for norm in norms])
    largest = 0.0
    for step in range(3):
        before = weight.detach().double()
        weight.grad = gradient(step)
        replay.record_gradients(step, {"w": weight.grad})
        if 0 < trained.clip < norms[step]:
            weight.grad *= trained.clip / norms[step]
        optimizer.param_groups[0]["lr"] = lr(LR[step])
        optimizer.step()
        if spoil is not None:
            spoil(weight, optimizer, step)
        a, b = replay.remove_rounding(
            "w", weight.detach().double(), before, lr=LR[step], decayed=True
        )
        largest = max(largest, ((a - b).norm() / b.norm()).item())
    return largest


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
        replace(TABLE, weight_decay=0.0),
        replace(TABLE, weight_decay=1.0),
    ],
    ids=str,
)
def test_rounding_explains_all_of_an_exact_step(
    table: OptimTable, clip: float, foreach: bool
) -> None:
    assert excess(replace(table, clip=clip), foreach=foreach) == 0.0


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
def test_rounding_does_not_explain_another_setting(trained: OptimTable) -> None:
    assert excess(TABLE, trained=trained) > 1e-8


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


@pytest.mark.parametrize(
    "spoil", [forget_first, forget_second, forget_count, lose_an_element, spoil_an_element]
)
def test_rounding_does_not_explain_a_spoilt_step(
    spoil: Callable[[Tensor, torch.optim.Optimizer, int], None],
) -> None:
    assert excess(TABLE, spoil=spoil) > 1e-8


def test_rounding_does_not_explain_another_learning_rate() -> None:
    assert excess(TABLE, lr=lambda lr: lr * 1.001) > 1e-8


def test_a_parameter_without_a_gradient_stays() -> None:
    replay = AdamWReplay(TABLE, [1.0], [1.0])
    replay.record_gradients(0, {"w": None})
    weight = torch.ones(3, dtype=torch.float64)
    a, b = replay.remove_rounding("w", weight + 1e-9, weight, lr=1.0, decayed=True)
    assert torch.equal(b, weight)
    assert torch.equal(a, weight + 1e-9)


def test_rounding_does_not_explain_a_value_that_is_not_finite() -> None:
    replay = AdamWReplay(TABLE, [1.0], [1.0])
    replay.record_gradients(0, {"w": torch.ones(3)})
    weight = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.float64)
    a, b = replay.remove_rounding(
        "w", weight, torch.ones(3, dtype=torch.float64), lr=1e-4, decayed=False
    )
    assert not torch.isfinite(a - b)[1:].any()


def test_noise_is_that_of_float32() -> None:
    shape = ModelShape(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn=24, vocab=97, qkv_bias=True, qk_norm=True
    )
    model = Llama(shape, dtype=torch.float64, device="cpu")
    init.initialise(model, sharding_plan(shape), 3)
    round_to_float32(model)
    assert all(torch.equal(p, p.float().double()) for p in model.parameters())
    tokens = torch.randint(97, (6, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).repeat(6, 1)

    def gradients(llama: Llama, rows: int) -> dict[str, Tensor]:
        llama.zero_grad()
        for first in range(0, 6, rows or 6):
            part = slice(first, first + (rows or 6))
            llama(tokens[part], tokens[part].roll(-1, 1), positions[part]).backward()
        return {name: p.grad.clone() for name, p in llama.named_parameters() if p.grad is not None}

    exact = gradients(model, 0)
    found = measure_noise(model, exact, gradients)
    assert found.keys() == exact.keys()
    total = sum(tensor.norm().item() ** 2 for tensor in exact.values()) ** 0.5
    for name, distance in found.items():
        assert 0 < distance < 1e-6 * total, name
        assert distance < 1e-4 * exact[name].norm().item(), name
