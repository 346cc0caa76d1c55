"""A slice of the resume proof, and planted faults that show that each of its checks can fail."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tests.long import some_of
from tools.prove import resume as resume_matrix
from tools.prove.faults.resume import go_on_a_step_later, swap_two_moments

PART_WITH_EXPERTS = ("ep 4 of tp 4", "ep 2 of zero 3 x 2, pp 2 ZBV")
PART = ("one process", "zero 2 x 3", "pp 2 1F1B, tp 2")


@pytest.fixture(scope="module")
def matrix(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> resume_matrix.Matrix:
    out = resume_matrix.Matrix(pool, tmp_path_factory.mktemp("resume"))
    for name in PART:
        assert out.save(name) == []
    return out


def test_the_layouts_are_many_and_legal(tmp_path: Path) -> None:
    assert len(resume_matrix.LAYOUTS) >= 12
    assert {*map(resume_matrix.processes_of, resume_matrix.LAYOUTS.values())} == {1, 2, 3, 4, 6, 8}
    (tmp_path / "recipe.toml").write_text(resume_matrix.RECIPE.format(corpus="none"))
    drawn = [
        [*resume_matrix.SIZES, *model.sets, *layout.split()]
        for model in resume_matrix.MODELS.values()
        for layout in model.layouts.values()
    ]
    for sets in drawn:
        processes = resume_matrix.processes_of(" ".join(sets))
        recipe = load(
            tmp_path / "recipe.toml", sets, world_size=processes, check_files=False
        ).recipe
        assert recipe.world_size == processes


@pytest.mark.parametrize("name", PART)
def test_a_layout_resumes_what_it_and_another_saved(
    matrix: resume_matrix.Matrix, name: str
) -> None:
    own, other = matrix.resume(name, sources=[name, PART[PART.index(name) - 1]])
    assert own.is_exact, own
    assert own.deviation == 0.0
    assert other.is_exact, other


def test_a_tensor_that_no_rank_has_after_a_resume_is_wrong(
    matrix: resume_matrix.Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = PART[0]
    monkeypatch.setitem(matrix._tensors, name, {*matrix._tensors[name], "lost"})
    (cell,) = matrix.resume(name, sources=[name])
    assert cell.wrong == ("lost",)
    assert not cell.is_exact


def test_a_parameter_without_moments_is_an_error() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    run = SimpleNamespace(
        stages=SimpleNamespace(named_parameters=lambda: [("weight", parameter)]),
        optimizer=SimpleNamespace(state={parameter: {}}),
    )
    with pytest.raises(LookupError, match="no moments of weight"):
        [*resume_matrix.parts(run)]


@pytest.mark.long
def test_experts_resume_on_another_layout(pool: Pool, tmp_path: Path) -> None:
    matrix = resume_matrix.Matrix(pool, tmp_path, resume_matrix.MODELS["experts"])
    cells, problems = resume_matrix.prove(matrix, PART_WITH_EXPERTS, on=PART_WITH_EXPERTS[1:])
    assert problems == []
    assert [cell.source for cell in cells] == list(PART_WITH_EXPERTS)


@some_of(
    1,
    ("family", "target"),
    [
        ("Muon", "Muon, zero 3 x 3"),
        ("gpt-oss", "gpt-oss, ep 2 of tp 2, pp 2 1F1B"),
        ("DeepSeek", "DeepSeek, ep 2 of tp 2, pp 2 1F1B"),
        ("GLM-4.5", "GLM-4.5, ep 2 of tp 2, pp 2 1F1B"),
        ("Gemma 3", "Gemma 3, zero 3 x 2, cp 2"),
    ],
)
def test_a_family_resumes_on_another_layout(
    family: str, target: str, pool: Pool, tmp_path: Path
) -> None:
    """In float64: bitwise on its own layout, and within 1e-9 on one with other axes."""
    model = resume_matrix.MODELS[family]
    assert model.bound == 1e-9
    matrix = resume_matrix.Matrix(pool, tmp_path, model)
    layouts = list(model.layouts)[:2]
    cells, problems = resume_matrix.prove(matrix, layouts, on=[target])
    assert problems == []
    assert [cell.source for cell in cells] == layouts
    assert cells[layouts.index(target)].deviation == 0.0
    assert not replace(cells[0], deviation=2e-9).is_exact


def train_ranks_on_each_others_samples() -> None:
    """The samples of a step are right, but ranks have swapped theirs."""
    from composer3d.data import loader

    def wrong(n: int, seed: int, first: int, count: int, order: str) -> Any:
        step, at = divmod(first, resume_matrix.BATCH)
        first = step * resume_matrix.BATCH + (at + count) % resume_matrix.BATCH
        return right(n, seed, first, count, order)

    loader.sample_order, right = wrong, loader.sample_order


@pytest.mark.parametrize(
    ("fault", "tensors", "losses", "samples"),
    [
        (swap_two_moments, r"blocks\.1\.attn\.w[kv]\.weight exp_avg", True, False),
        (go_on_a_step_later, None, True, True),
        (train_ranks_on_each_others_samples, None, False, True),
    ],
)
def test_a_fault_is_found(
    matrix: resume_matrix.Matrix,
    fault: Callable[[], None],
    tensors: str | None,
    losses: bool,
    samples: bool,
) -> None:
    on, source = PART[:2] if fault is not train_ranks_on_each_others_samples else PART[1::-1]
    (cell,) = matrix.resume(on, fault, [source])
    assert not cell.is_exact
    assert all(re.fullmatch(tensors or "none", name) for name in cell.wrong)
    assert bool(cell.wrong) == (tensors is not None)
    assert (cell.deviation > resume_matrix.BOUND) == losses
    assert (not cell.same_samples) == samples
