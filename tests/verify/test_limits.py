"""A proof computes small tensors in parts, as a job does its large ones, and finds faults there."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from composer3d.facts.limits import JOB
from composer3d.parallel import Stages, grad_norm, init
from composer3d.parallel.context import tiles
from composer3d.planner.matrices import limited_rounds
from composer3d.planner.traffic import rounds_of_matrices
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.training.optimizers import muon
from composer3d.training.optimizers.adamw import AdamW
from composer3d.verify import worker
from composer3d.verify.limits import limits_of_proof, run_limit_s, wait_limit_s
from composer3d.verify.proof import verify_layout
from tools.prove.full.at_scale import lose_a_matrix_between_rounds
from tools.prove.paths import MOE_RECIPE, RECIPE


def lose_the_end_of_rows() -> None:
    """Gradients in host memory: what is left after the last whole row is lost."""
    right = grad_norm._norm_sq

    def wrong(grads: list[torch.Tensor]) -> torch.Tensor:
        row = grad_norm.ROW
        return right(
            [g if g.numel() < row else g.flatten()[: g.numel() // row * row] for g in grads]
        )

    grad_norm._norm_sq = wrong


def lose_the_last_of_several_bands() -> None:
    """Windows that are wider than a band: the last tile is lost."""
    right = tiles._visible

    def wrong(q: Any, k: Any, window: int, banded: bool) -> Iterator[Any]:
        found = [*right(q, k, window, banded)]
        return iter(found[:-1] if window > tiles.BAND and len(found) > 1 else found)

    tiles._visible = wrong


def lose_the_last_rows_of_initial_weights() -> None:
    """Initial weights: what is left after the last whole part is not drawn."""
    right = init.fill_normal

    def wrong(local: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        right(local, *arguments, **keywords)
        rows = init.CHUNK // local.shape[-1]
        flat = local.view(-1, local.shape[-1])
        if len(flat) > rows:
            flat[len(flat) // rows * rows :] = 0

    init.fill_normal = wrong


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("mesh.dp_shard=2", lose_the_last_rows_of_initial_weights),
        ("optim.name=muon mesh.dp_shard=2", lose_a_matrix_between_rounds),
        ("mesh.dp_shard=2", lose_the_end_of_rows),
        ("mesh.cp=2 model.window=40", lose_the_last_of_several_bands),
    ],
)
def test_a_fault_of_what_is_computed_in_parts_is_found(
    pool: Pool, tmp_path: Path, layout: str, fault: Callable[[], None]
) -> None:
    sets = layout.split()
    verdict = verify_layout(
        pool, tmp_path, str(RECIPE), sets, dtype="float64", steps=2, fault=fault
    )
    assert verdict.error is not None
    assert re.search(r" (is|are) off", verdict.error), verdict.error


def step_although_it_is_bad() -> None:
    """AdamW: a step whose loss is not finite is made like any other."""
    right = AdamW.apply_gradients

    def wrong(self: Any, *, divisor: torch.Tensor, is_good: torch.Tensor) -> None:
        right(self, divisor=divisor, is_good=torch.ones_like(is_good))

    AdamW.apply_gradients = wrong  # type: ignore[method-assign]


def keep_a_bad_momentum() -> None:
    """Muon: the momentum takes in gradients that are not finite."""
    right = muon.Muon._apply_to_matrices

    def wrong(self: Any, divisor: torch.Tensor, is_good: torch.Tensor) -> None:
        right(self, divisor, is_good)
        if not is_good:
            for parameter in self._matrices:
                self._moment(parameter).fill_(torch.nan)

    muon.Muon._apply_to_matrices = wrong  # type: ignore[method-assign]


def move_biases_although_it_is_bad() -> None:
    """Router biases move in a bad step, too."""
    right = Stages.move_router_biases
    Stages.move_router_biases = (  # type: ignore[method-assign]
        lambda self, is_good: right(self, torch.ones_like(is_good))
    )


@pytest.mark.parametrize(
    ("recipe", "layout", "fault", "words"),
    [
        (RECIPE, "mesh.dp_shard=2", step_although_it_is_bad, " (is|are) off"),
        (RECIPE, "mesh.dp_shard=2 optim.name=muon", keep_a_bad_momentum, " (is|are) off"),
        (
            MOE_RECIPE,
            "mesh.dp_shard=2 model.router=sigmoid model.router_bias=true",
            move_biases_although_it_is_bad,
            "is not finite changed blocks.0.moe.router.bias",
        ),
    ],
)
def test_a_bad_step_that_changes_something_is_wrong(
    pool: Pool, tmp_path: Path, recipe: Path, layout: str, fault: Callable[[], None], words: str
) -> None:
    verdict = verify_layout(
        pool, tmp_path, str(recipe), layout.split(), dtype="float64", steps=2, fault=fault
    )
    assert verdict.error is not None
    assert re.search(words, verdict.error), verdict.error


def test_every_limit_of_a_proof_is_lower() -> None:
    small = limits_of_proof(load(str(RECIPE)).recipe)
    assert all(low < high for low, high in zip(small, JOB, strict=True))


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        (RECIPE, "mesh.dp_shard=2"),
        (RECIPE, "mesh.pp=2 mesh.tp=2"),
        (MOE_RECIPE, "mesh.dp_shard=2 mesh.ep=2"),
    ],
)
def test_a_proof_has_several_rounds_of_several_matrices(recipe: Path, layout: str) -> None:
    """As a job has. With one matrix a round, no message would have an order of its parts."""
    small = load(str(recipe), ["optim.name=muon", *layout.split()]).recipe
    with limited_rounds(limits_of_proof(small).elements_per_round):
        rounds = rounds_of_matrices(small)
    assert len(rounds) > 1
    owners = [Counter(unit.owner for unit in units) for units in rounds]
    assert max(owners[0].values()) > 1
    shapes = {unit.box.shape for units in rounds for unit in units}
    # Several experts are computed together.
    assert small.model.experts == 0 or max(shape[0] for shape in shapes if len(shape) == 3) > 1


@pytest.mark.parametrize("compiles", [False, True])
def test_a_rank_waits_for_others_that_compile(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last stage gets its first message after minutes if the stages before it compile."""
    waits = []

    def stop(*, timeout_s: float) -> None:
        waits.append(timeout_s)
        raise InterruptedError

    monkeypatch.setattr(worker, "pool_world", stop)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    torch.save({}, tmp_path / "reference")
    recipe = load(str(RECIPE), [f"compile.enabled={compiles}".lower()]).recipe
    with pytest.raises(InterruptedError):
        worker.run_composed(recipe, "float64", 1, str(tmp_path / "reference"))
    assert waits == [wait_limit_s(recipe)]
    assert (waits[0] > 600) == compiles
    assert waits[0] < run_limit_s(recipe)
