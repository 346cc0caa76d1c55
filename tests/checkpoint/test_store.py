"""Where checkpoints are kept: which are, which one is the newest, and what is said of one that cannot be read."""

from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composer3d.checkpoint import Store
from composer3d.checkpoint.store import read_progress
from composer3d.dist import pool_world
from composer3d.errors import CheckpointError
from composer3d.launch import Pool, WorkerError
from composer3d.optim import build_optimizer
from composer3d.parallel import Stages
from composer3d.recipe.schema import OptimTable


def job(seed: int, shape: tuple[int, int] = (5, 3)) -> tuple[Stages, torch.optim.AdamW]:
    """A model of one matrix, sharded by rows where there are ranks, and an optimizer that has made a step.

    A store asks nothing of ``Stages`` but its named parameters.
    """
    torch.manual_seed(seed)
    module = nn.Module()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight, grad = (distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for _ in range(2))
    module.weight = nn.Parameter(weight)
    optimizer = build_optimizer(module.named_parameters(), OptimTable())
    module.weight.grad = grad
    optimizer.step()
    return cast(Stages, module), optimizer


def whole(stages: Stages, optimizer: torch.optim.AdamW) -> dict[str, list[float]]:
    """The state as numbers, the same on every rank."""
    ((_, parameter),) = stages.named_parameters()
    tensors = {"weight": parameter.detach(), **optimizer.state[parameter]}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist() for name, t in tensors.items()}


def save(folder: Path, steps: list[int], keep: int) -> tuple[list[str], dict[str, list[float]], list[float]]:
    """Names of what ``save`` returned, the state that was saved, and the next random numbers."""
    with pool_world():
        stages, optimizer = job(seed=0)
        store = Store(folder, keep=keep)
        paths = [store.save(step, stages, optimizer, {"data": {"at": step}}) for step in steps]
        return [path.name for path in paths], whole(stages, optimizer), torch.rand(3).tolist()


def load(path: Path, shape: tuple[int, int] = (5, 3)) -> tuple[dict[str, list[float]], list[float]]:
    """The state and the next random numbers after loading into a job of other values."""
    with pool_world():
        stages, optimizer = job(seed=1, shape=shape)
        before = whole(stages, optimizer)
        Store(path.parent, keep=1).load(path, stages, optimizer)
        assert before["weight"] != whole(stages, optimizer)["weight"]
        return whole(stages, optimizer), torch.rand(3).tolist()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept(pool: Pool, tmp_path: Path) -> None:
    ((saved, _, _),) = pool.run(save, {"folder": tmp_path, "steps": [2, 9, 10, 100], "keep": 2}, world_size=1)
    assert saved == ["step-00000002", "step-00000009", "step-00000010", "step-00000100"]
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    assert Store(tmp_path, keep=2).newest() == tmp_path / "step-00000100"


def test_what_was_just_saved_is_never_dropped(pool: Pool, tmp_path: Path) -> None:
    """A run that goes back to an earlier checkpoint saves steps below those that are there."""
    pool.run(save, {"folder": tmp_path, "steps": [5, 15, 20], "keep": 3}, world_size=1)
    (tmp_path / "step-00000001-mine").mkdir()
    pool.run(save, {"folder": tmp_path, "steps": [10], "keep": 2}, world_size=1)
    assert names(tmp_path) == ["step-00000001-mine", "step-00000010", "step-00000020"]


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (2, 1), (1, 2)])
def test_what_was_saved_is_loaded_bit_for_bit(pool: Pool, tmp_path: Path, saving: int, loading: int) -> None:
    saved = pool.run(save, {"folder": tmp_path, "steps": [7], "keep": 1}, world_size=saving)
    loaded = pool.run(load, {"path": tmp_path / "step-00000007"}, world_size=loading)
    assert read_progress(tmp_path / "step-00000007") == {"step": 7, "world_size": saving, "data": {"at": 7}}
    assert [state for state, _ in loaded] == [saved[0][1]] * loading
    if saving == loading:  # random numbers go on where they were
        assert [rest for _, rest in loaded] == [rest for _, _, rest in saved]


def test_newest_is_the_highest_step_that_is_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "absent", keep=2)
    assert store.newest() is None
    store = Store(tmp_path, keep=2)
    assert store.newest() is None
    for name, is_whole in {"step-00000009": True, "step-00000010": True, "step-00000020": False}.items():
        (tmp_path / name).mkdir()
        if is_whole:
            (tmp_path / name / "progress.json").write_text("{}")
    staging = tmp_path / "step-00000030.tmp"
    staging.mkdir()
    assert store.newest() == tmp_path / "step-00000010"
    (staging / "progress.json").write_text("{}")  # as a crash just before the rename leaves it
    assert store.newest() == tmp_path / "step-00000010"


def test_staging_folder_of_a_crash_is_written_anew(pool: Pool, tmp_path: Path) -> None:
    for leftover in (tmp_path / "step-00000004.tmp", tmp_path / "step-00000004"):
        leftover.mkdir()
        (leftover / "junk").write_text("from before")
    (tmp_path / "step-00000004.tmp" / "progress.json").write_text('{"step": 3')
    pool.run(save, {"folder": tmp_path, "steps": [4, 5], "keep": 2}, world_size=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert "junk" not in names(tmp_path / "step-00000004")
    assert read_progress(tmp_path / "step-00000004")["step"] == 4


@pytest.mark.parametrize("content", [b"", b'{"step": 3, "wor', b"\xff\xfe"], ids=["empty", "torn", "binary"])
def test_torn_progress_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step-00000004"
    path.mkdir()
    (path / "progress.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_progress(path)
    (line,) = caught.value.lines
    assert line.startswith(f"{path}/progress.json cannot be read (")
    assert line.endswith("the checkpoint is damaged")


@pytest.mark.parametrize("damaged", ["__0_0.distcp", ".metadata"])
def test_damaged_file_is_no_traceback(pool: Pool, tmp_path: Path, damaged: str) -> None:
    pool.run(save, {"folder": tmp_path, "steps": [1], "keep": 1}, world_size=1)
    path = tmp_path / "step-00000001"
    (path / damaged).write_bytes((path / damaged).read_bytes()[:100])
    with pytest.raises(WorkerError) as caught:
        pool.run(load, {"path": path}, world_size=1)
    assert isinstance(caught.value.user_error, CheckpointError)
    assert caught.value.user_error.lines[0].startswith(f"{path} cannot be read (")


def test_folder_without_progress_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_progress(tmp_path)
    assert caught.value.lines == (f"{tmp_path} is not a checkpoint: it has no progress.json; name a step-* folder",)


def test_checkpoint_of_another_model_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    pool.run(save, {"folder": tmp_path, "steps": [1], "keep": 1}, world_size=1)
    path = tmp_path / "step-00000001"
    with pytest.raises(WorkerError) as caught:
        pool.run(load, {"path": path, "shape": (6, 3)}, world_size=2)
    assert set(caught.value.failures) == {0, 1}
    assert isinstance(caught.value.user_error, CheckpointError)
    assert caught.value.user_error.lines == (
        f"{path} holds 'model.weight' as (5, 3), but the model needs (6, 3)",
        f"{path} holds 'optim.weight.exp_avg' as (5, 3), but the model needs (6, 3)",
        f"{path} holds 'optim.weight.exp_avg_sq' as (5, 3), but the model needs (6, 3)",
        f"{path} belongs to another model or optimizer; point checkpoint.resume elsewhere",
    )
