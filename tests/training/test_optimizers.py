"""What an optimizer costs: one row, one file, and nothing elsewhere. A trial one goes all the way.

The trial optimizer is SGD with momentum. This module adds it as a user's program would.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.checkpoint import Store
from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.facts import hardware
from composer3d.models.registry import architecture, resolve
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.planner.predict import of_recipe
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.optimizers import OPTIMIZERS, OptimizerFacts, StateTensor
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import OptimTable, Recipe
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from composer3d.training.optimizers import Optimizer, build_optimizer
from composer3d.training.optimizers.contract import StageMatrices, groups_by_rates
from composer3d.training.optimizers.proof import OptimizerProof, ReplayedStep, rates_in_proof
from composer3d.training.step import compute_gradients, update
from composer3d.verify import proof
from composer3d.verify.data import random_batch
from composer3d.verify.proof import verify_layout
from composer3d.verify.worker import local_batch
from tests.checkpoint.store_jobs import make_manifest
from tools.prove.paths import MOE_RECIPE, RECIPE, ROOT

PACKAGE = ROOT / "composer3d"
PROOFS = sorted((PACKAGE / "training" / "optimizers").glob("*proof.py"))

# Files that may name one optimizer, or what it keeps: its own, and those with a reason.
OWN = {
    "recipe/optimizers.py": "its row",
    "training/optimizers/adamw.py": "its step",
    "training/optimizers/adamw_proof.py": "its step in float64",
    "training/optimizers/muon.py": "the step of what is no matrix",
    "training/optimizers/muon_proof.py": "the same in float64",
    "recipe/schema.py": "the choices of optim.name",
}
OTHERS = {
    "imports": "words of other programs, and what a user is told of them",
}

TRIAL = OptimizerFacts(
    title="SGD with momentum",
    state=(StateTensor("momentum"),),
    code=f"{__name__}:Trial",
    proof=f"{__name__}:TrialProof",
)
OPTIMIZERS["trial"] = TRIAL


class TrialTable(OptimTable):
    """The table of a recipe with the trial optimizer. Its momentum is the first of ``betas``.

    A worker that unpickles it imports this module, and then has the optimizer too.
    """


class Trial(Optimizer):
    """SGD with momentum and without decay."""

    facts = TRIAL

    @classmethod
    def build(
        cls,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        table: OptimTable,
        matrices: StageMatrices,
    ) -> Self:
        groups = groups_by_rates(named_parameters, table)
        return cls(groups, {"lr": table.lr, "momentum": table.betas[0]})

    @torch.no_grad()
    def apply_gradients(self, *, divisor: Tensor, is_good: Tensor) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                weight, gradient, momentum = map(
                    local_shard, (parameter, parameter.grad, state["momentum"])
                )
                gradient.div_(divisor)
                moved = group["momentum"] * momentum + gradient
                momentum.copy_(torch.where(is_good, moved, momentum))
                weight.copy_(torch.where(is_good, weight - group["lr"] * moved, weight))


class TrialProof(OptimizerProof):
    """Repeats the steps of SGD with momentum."""

    def __init__(self, optim: OptimTable, dtype: torch.dtype, matrices: frozenset[str]) -> None:
        super().__init__(optim, dtype, matrices)
        self.momenta: dict[str, Tensor] = {}
        self.absolute: dict[str, Tensor] = {}

    @staticmethod
    def plain(
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optim: OptimTable,
        matrices: frozenset[str],
    ) -> torch.optim.Optimizer:
        groups = [
            {"params": [parameter], "lr_factor": rates_in_proof(name, parameter, optim)[0]}
            for name, parameter in named_parameters
        ]
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.betas[0])

    def step(self, name: str, gradient: Tensor, before: Tensor, *, lr: float) -> ReplayedStep:
        beta = self.optim.betas[0]
        lr *= rates_in_proof(name, before, self.optim)[0]
        self.momenta[name] = beta * self.momenta.get(name, 0) + gradient
        self.absolute[name] = beta * self.absolute.get(name, 0) + gradient.abs()
        weight = before - lr * self.momenta[name]
        roundings = 8 * torch.finfo(self.dtype).eps
        return ReplayedStep(weight, roundings * (before.abs() + lr * self.absolute[name]))


def with_trial(recipe: Recipe) -> Recipe:
    """Return the recipe with the trial optimizer. Its momentum is the first of ``betas``."""
    return replace(recipe, optim=TrialTable(name=cast(Any, "trial")))


def table_of(name: str) -> OptimTable:
    return OptimTable(name=cast(Any, name))


def files_that_name(*words: str) -> set[str]:
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(word in path.read_text().lower() for word in words)
    }


def test_only_its_own_files_name_an_optimizer() -> None:
    found = files_that_name("adamw", "exp_avg")
    in_folders = {name for name in found if name.split("/")[0] in OTHERS}
    assert found - in_folders == set(OWN)
    assert {name.split("/")[0] for name in in_folders} == set(OTHERS)  # no reason is outdated


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_row_and_its_code_are_of_one_optimizer(name: str) -> None:
    row = OPTIMIZERS[name]
    assert issubclass(resolve(row.code), Optimizer)
    assert resolve(row.code).facts is row
    assert issubclass(resolve(row.proof), OptimizerProof)


@pytest.mark.parametrize("path", PROOFS, ids=lambda path: path.stem)
def test_a_proof_shares_no_code_with_the_step(path: Path) -> None:
    ours = set(re.findall(r"^(?:from|import) (composer3d\S*)", path.read_text(), re.MULTILINE))
    proofs = {"composer3d.training.optimizers.proof", "composer3d.training.optimizers.adamw_proof"}
    # The settings, and what this rank holds of a tensor.
    facts = {"composer3d.recipe.schema", "composer3d.parallel.init"}
    assert ours <= proofs | facts


def test_the_matrices_of_a_model() -> None:
    dense, experts = load(str(RECIPE)).recipe, load(str(MOE_RECIPE)).recipe
    found = [
        matrices_of(architecture(recipe.model.architecture), recipe.model, table_of("muon"))
        for recipe in (dense, experts)
    ]
    attention = [f"attn.{name}.weight" for name in ("wq", "wk", "wv", "wo")]
    kinds = [{name.partition(".")[2].partition(".")[2] for name in names} for names in found]
    assert kinds[0] == {*attention, *(f"ffn.{name}.weight" for name in ("w1", "w2", "w3"))}
    assert kinds[1] == {*attention, *(f"moe.experts.{name}" for name in ("w1", "w2", "w3"))}
    chosen = replace(table_of("muon"), matrices=("*.wq.*", "last.*"))
    names = matrices_of(architecture("llama"), dense.model, chosen)
    blocks = {f"blocks.{number}.attn.wq.weight" for number in range(dense.model.n_layers)}
    assert names == blocks | {"last.head.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_makes_the_state_of_the_row(name: str, dtype: torch.dtype) -> None:
    table = table_of(name)
    parameters = {
        name: nn.Parameter(torch.ones(shape, dtype=dtype))
        for name, shape in (("matrix", (3, 2)), ("vector", (5,)))
    }
    matrices = StageMatrices(frozenset(("matrix",)), None, torch.device("cpu"))
    optimizer = build_optimizer(parameters.items(), table, matrices)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    divisor, is_good = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.bool)
    optimizer.apply_gradients(divisor=divisor, is_good=is_good)
    for name, parameter in parameters.items():
        found = {
            key: (tuple(tensor.shape), tensor.dtype)
            for key, tensor in optimizer.state[parameter].items()
        }
        shape = tuple(parameter.shape)
        assert found == {
            tensor.name: ((), torch.float32) if tensor.is_scalar else (shape, dtype)
            for tensor in optimizer.facts.state_of(is_matrix=name == "matrix")
        }


def train_and_save(folder: Path, sets: list[str]) -> dict[str, list[float]]:
    """Take a good, a bad and a good step with the trial optimizer, and save. Returns the state."""
    with pool_world() as device:
        recipe, (stages, optimizer) = make_job(sets, device)
        store = Store(folder, keep=1)
        for step, norm in enumerate((0.5, 0.0, 0.5)):
            before = whole(optimizer_state(optimizer, stages.named_parameters()))
            sums = compute_gradients(stages, local_batch(random_batch(recipe, step), stages))
            if norm == 0:
                sums.loss.fill_(float("nan"))
            update(stages, optimizer, sums, max_norm=norm, lr=1e-2)
            after = whole(optimizer_state(optimizer, stages.named_parameters()))
            assert (before == after) == (norm == 0)
        store.save(make_manifest(3), stages, optimizer)
        return after


def load_again(path: Path, sets: list[str]) -> dict[str, list[float]]:
    """Load into a job that has taken no step. Returns its state."""
    with pool_world() as device:
        _, (stages, optimizer) = make_job(sets, device)
        store = Store(path.parent, keep=1)
        store.check(path)
        store.load(path, stages, optimizer)
        return whole(optimizer_state(optimizer, stages.named_parameters()))


def make_job(sets: list[str], device: torch.device) -> tuple[Recipe, tuple[Any, Optimizer]]:
    recipe = with_trial(load(RECIPE, sets, check_files=False).recipe)
    stages = build_stages(recipe, Mesh.build(recipe.mesh, device))
    return recipe, (stages, build_optimizer(stages.named_parameters(), recipe.optim))


def whole(state: dict[str, Tensor]) -> dict[str, list[float]]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist()
        for name, t in state.items()
    }


def test_the_trial_steps_and_is_saved_and_loaded(pool: Pool, tmp_path: Path) -> None:
    layout = {"saving": ["mesh.dp_shard=2"], "loading": ["mesh.tp=2"]}
    arguments = {"folder": tmp_path, "sets": layout["saving"]}
    saved = pool.run(train_and_save, arguments, world_size=2)
    assert saved[0]
    assert all(name.startswith("optim.") and name.endswith(".momentum") for name in saved[0])
    assert any(any(values) for values in saved[0].values())
    arguments = {"path": tmp_path / "step-00000003", "sets": layout["loading"]}
    assert pool.run(load_again, arguments, world_size=2) == [saved[0]] * 2


def test_the_planner_prices_what_an_optimizer_keeps() -> None:
    recipe = load(RECIPE).recipe
    row = hardware.by_name("H100")
    assert row is not None
    setups = [of_recipe(r, row) for r in (recipe, with_trial(recipe))]
    # Parameters in float32, with two moments or with one.
    assert [setup.precision.optimizer for setup in setups] == [12, 8]


def step_too_far() -> None:
    right = Trial.set_lr
    Trial.set_lr = lambda self, lr: right(self, 2 * lr)  # type: ignore[method-assign]


def test_the_trial_is_proven(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_with_trial(*arguments: Any, **options: Any) -> Any:
        resolved = load(*arguments, **options)
        return replace(resolved, recipe=with_trial(resolved.recipe))

    monkeypatch.setattr(proof, "load", load_with_trial)
    sets = ["mesh.dp_shard=2", "mesh.tp=2"]
    options: dict[str, Any] = {"dtype": "float32", "steps": 2}
    verdict = verify_layout(pool, tmp_path, str(RECIPE), sets, **options)
    assert verdict.passed, verdict
    verdict = verify_layout(pool, tmp_path, str(RECIPE), sets, **options, fault=step_too_far)
    assert not verdict.passed
    assert "weight" in (verdict.error or "")
