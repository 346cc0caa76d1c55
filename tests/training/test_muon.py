"""Muon on one process: torch's own, and the papers' text. ``verify`` proves it on layouts."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from composer3d.data import Batch
from composer3d.recipe.schema import OptimTable
from composer3d.training.observers.metrics import further_metrics
from composer3d.training.observers.observer import StepResult
from composer3d.training.optimizers import Optimizer, build_optimizer
from composer3d.training.optimizers.contract import StageMatrices
from composer3d.training.step_values import StepValues
from tests.planner.setups import recipe_of
from tests.reference import muon as reference

SHAPES = {"tall": (48, 32), "wide": (16, 40), "norm": (32,), "experts": (3, 16, 24)}
NAMES = frozenset(("tall", "wide", "experts"))
ONE = torch.ones((), dtype=torch.float64)


def make(table: OptimTable, dtype: torch.dtype) -> tuple[dict[str, nn.Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(1)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in SHAPES.items()
    }
    matrices = StageMatrices(NAMES, None, torch.device("cpu"))
    return parameters, build_optimizer(parameters.items(), table, matrices)


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def of(name: str, tensors: Mapping[str, Tensor | None]) -> Tensor:
    """Return a tensor by name, or that of an expert by its number."""
    found = tensors["experts" if name.isdigit() else name]
    assert found is not None
    return found[int(name)] if name.isdigit() else found


def test_twenty_steps_have_the_bits_of_torch() -> None:
    for scale in ("original", "match_rms_adamw"):
        table = OptimTable(name="muon", lr=0.02, lr_scale=scale)  # type: ignore[arg-type]
        parameters, ours = make(table, torch.float32)
        copies = [nn.Parameter(parameters[name].detach().clone()) for name in ("tall", "wide")]
        torchs = torch.optim.Muon(copies, lr=0.02, weight_decay=0.1, adjust_lr_fn=scale)
        for step in range(20):
            set_gradients(parameters, step)
            for name, copy in zip(("tall", "wide"), copies, strict=True):
                copy.grad = parameters[name].grad.clone()  # type: ignore[union-attr]
            ours.apply_gradients(divisor=ONE, is_good=torch.tensor(True))
            torchs.step()
        for name, copy in zip(("tall", "wide"), copies, strict=True):
            assert torch.equal(parameters[name], copy)


def test_twenty_steps_in_float64_are_those_of_the_papers() -> None:
    table = OptimTable(name="muon", lr=0.02, newton_schulz_dtype="float64", matrix_lr=0.01)
    parameters, ours = make(table, torch.float64)
    matrices = {
        **{name: parameters[name].detach().clone() for name in ("tall", "wide")},
        **{str(i): parameters["experts"][i].detach().clone() for i in range(3)},
    }
    momenta = {name: torch.zeros_like(matrix) for name, matrix in matrices.items()}
    for step in range(20):
        set_gradients(parameters, step)
        for name in matrices:
            gradient = of(name, {key: each.grad for key, each in parameters.items()})
            matrices[name], momenta[name] = reference.step(
                matrices[name], momenta[name], gradient / 2, lr=0.01, decay=0.1, rate=0.95
            )
        ours.set_lr(0.02)
        ours.apply_gradients(divisor=2 * ONE, is_good=torch.tensor(True))
    for name, expected in matrices.items():
        assert (of(name, parameters) - expected).norm() <= 1e-12 * expected.norm()


def test_the_rates_of_the_metrics_are_those_of_the_parameters() -> None:
    recipe = recipe_of("llama3-8b-8-muon", "optim.lr=3e-4", "optim.matrix_lr=2e-2")
    parameters, muon = make(recipe.optim, torch.float32)
    muon.set_lr(1.5e-4)
    rates = {p: group["lr"] for group in muon.param_groups for p in group["params"]}
    batch = Batch(*torch.zeros(3, 1, 8, dtype=torch.int64))
    result = StepResult(1, batch, StepValues(1.0, 1.0), 1.5e-4)
    stages: Any = SimpleNamespace(router_loads={})
    assert further_metrics(recipe, stages, result)["matrix_lr"] == rates[parameters["tall"]]
    assert rates[parameters["tall"]] == 1e-2
    assert rates[parameters["norm"]] == 1.5e-4

    usual = recipe_of("llama3-8b-8-muon")
    assert further_metrics(usual, stages, result) == {}


def test_others_are_updated_as_by_adamw() -> None:
    parameters, ours = make(OptimTable(name="muon"), torch.float32)
    copy = nn.Parameter(parameters["norm"].detach().clone())
    adamw = build_optimizer([("norm", copy)], OptimTable())
    for step in range(5):
        set_gradients(parameters, step)
        copy.grad = parameters["norm"].grad.clone()  # type: ignore[union-attr]
        for optimizer in (ours, adamw):
            optimizer.set_lr(1e-3 * (step + 1))
            optimizer.apply_gradients(divisor=3 * ONE, is_good=torch.tensor(True))
    assert torch.equal(parameters["norm"], copy)
    assert set(ours.state[parameters["norm"]]) == {"exp_avg", "exp_avg_sq", "step"}
    assert set(ours.state[parameters["tall"]]) == {"momentum_buffer"}


def test_a_bad_step_changes_no_bit() -> None:
    parameters, ours = make(OptimTable(name="muon"), torch.float32)
    set_gradients(parameters, 0)
    ours.apply_gradients(divisor=ONE, is_good=torch.tensor(True))
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    moments = {
        name: {key: tensor.clone() for key, tensor in ours.state[parameter].items()}
        for name, parameter in parameters.items()
    }
    set_gradients(parameters, 1)
    for parameter in parameters.values():
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = float("nan")
    ours.apply_gradients(divisor=ONE, is_good=torch.tensor(False))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])
        for key, tensor in ours.state[parameter].items():
            assert torch.equal(tensor, moments[name][key])


def test_a_matrix_without_a_gradient_stays_as_it_is() -> None:
    parameters, ours = make(OptimTable(name="muon"), torch.float32)
    set_gradients(parameters, 0)
    parameters["wide"].grad = None
    before = parameters["wide"].detach().clone()
    ours.apply_gradients(divisor=ONE, is_good=torch.tensor(True))
    assert torch.equal(parameters["wide"], before)
