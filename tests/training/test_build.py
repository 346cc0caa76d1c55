"""Building a run: folders that cannot be used, and what is said or refused."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from composer3d.facts.errors import CheckpointError, PlanError
from composer3d.models.registry import architecture
from composer3d.recipe.changes import TEXT_LIMIT
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import pool_world
from composer3d.training import build
from composer3d.training.build import describe_attention, doubtful_choices
from tests.training.jobs import DATA, RECIPE, build_and_train, train
from tools.prove.paths import RECIPE as FOR_VERIFY


def make_full(run: Path) -> None:
    line = '{"step": 1, "loss": 1.0}\n'
    (run / "metrics.jsonl").write_text(line * 100_000)


def make_pipe(run: Path) -> None:
    os.mkfifo(run / "metrics.jsonl")


def make_foreign_link(run: Path) -> None:
    (run.parent / "theirs").mkdir()
    shutil.move(run / "checkpoints", run.parent / "theirs/checkpoints")
    (run / "checkpoints").symlink_to(run.parent / "theirs/checkpoints")
    os.chown(run / "checkpoints", 12345, 12345, follow_symlinks=False)


@pytest.mark.parametrize(
    ("spoil", "largest_file", "message"),
    [
        (make_full, 1 << 20, "rank 0: metrics: [Errno 27] File too large"),
        (
            make_pipe,
            None,
            "rank 0: runs/small/metrics.jsonl is a named pipe, not a plain file; the run writes",
        ),
        pytest.param(
            make_foreign_link,
            None,
            "run.out_dir: runs/small/checkpoints is a symbolic link of another user (uid 12345)",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a link away"),
        ),
    ],
)
def test_a_folder_that_is_wrong_ends_every_rank_with_one_line(
    pool: Pool, trained: Path, spoil: Callable[[Path], None], largest_file: int | None, message: str
) -> None:
    (trained / "runs/small/metrics.jsonl").unlink()
    spoil(trained / "runs/small")
    arguments = {
        "folder": str(trained),
        "sets": ["mesh.dp_shard=2", "run.steps=6"],
        "largest_file": largest_file,
    }
    with pytest.raises(WorkerError) as caught:
        pool.run(build_and_train, arguments, world_size=2)
    assert set(caught.value.failures) == {0, 1}
    assert caught.value.user_error is not None
    (line,) = caught.value.user_error.lines
    assert message in line


def build_with_a_long_recipe(folder: str) -> None:
    os.chdir(folder)
    with pool_world() as device:
        resolved = load("recipe.toml", ["run.name=long"], world_size=1)
        build.build(resolved.recipe, device, resolved.to_toml() + "#" * TEXT_LIMIT)


def test_a_run_whose_checkpoints_could_not_be_read_ends_before_it_trains(
    pool: Pool, trained: Path
) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(build_with_a_long_recipe, {"folder": str(trained)}, world_size=1)
    assert isinstance(caught.value.user_error, CheckpointError)
    assert "could not be read again: recipe is " in str(caught.value.user_error)
    assert not (trained / "runs/long/recipe.toml").exists()


def test_folder_that_cannot_be_made_is_refused(pool: Pool, folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    (folder / "file").write_text("")
    result = train(pool, folder, "run.out_dir=file")
    assert result.returncode == 2
    assert "run.out_dir: " in result.stderr
    assert "Not a directory" in result.stderr


@pytest.mark.parametrize(
    ("sets", "description"),
    [
        ([], None),
        (["model.window=64"], None),  # a window as long as the sequence
        (["model.window=8"], "whole sequences; its kernel: CPU flash"),
        (["data.packing=documents"], "whole sequences; its kernel: CPU flash"),
        (["mesh.cp=2"], "ring over cp 2, zigzag; its kernel: CPU flash"),
        (
            ["mesh.cp=2", "parallel.cp_method=ulysses"],
            "ulysses over cp 2, zigzag; its kernel: scaled_dot_product_attention of torch",
        ),
        (
            ["mesh.cp=2", "parallel.cp_method=ulysses", "model.window=8"],
            "ulysses over cp 2, zigzag; its kernel: CPU flash",
        ),
    ],
)
def test_attention_is_described_as_it_is_computed(
    tmp_path: Path, sets: list[str], description: str | None
) -> None:
    (tmp_path / "r.toml").write_text(
        '[run]\nname = "a"\n[model]\npreset = "debug-tiny"\n[data]\nseq_len = 64\n'
    )
    recipe = load(tmp_path / "r.toml", sets).recipe
    assert describe_attention(recipe, torch.device("cpu")) == description


@pytest.mark.parametrize(
    ("sets", "place"),
    [
        ([], "whole sequences"),
        (["mesh.cp=2", "parallel.cp_method=ulysses"], "ulysses over cp 2, zigzag"),
    ],
)
def test_attention_with_sinks_is_none_of_torch(tmp_path: Path, sets: list[str], place: str) -> None:
    (tmp_path / "r.toml").write_text(
        '[run]\nname = "a"\n[data]\nseq_len = 64\n'
        '[model]\narchitecture = "gpt_oss"\npreset = "debug-gpt-oss"\nwindow = 64\n'
    )
    recipe = load(tmp_path / "r.toml", sets).recipe
    assert describe_attention(recipe, torch.device("cpu")) == f"{place}; its kernel: CPU flash"


@pytest.mark.parametrize(
    ("sets", "kernel"),
    [
        (["mesh.cp=2"], "cuDNN"),
        (["mesh.cp=2", "data.seq_len=508"], "CUDA flash"),  # blocks of 127 queries
        (["mesh.cp=2", "data.seq_len=508", "parallel.cp_balance=contiguous"], "cuDNN"),
        (["data.packing=documents"], "CUDA flash"),
        (["model.window=8"], "CUDA flash"),
        (["model.window=8", "model.full_every=2", "mesh.cp=2"], "cuDNN"),
        (["mesh.cp=2", "precision.compute=float32"], "plain scores"),
    ],
)
def test_the_kernel_on_a_hopper_gpu_is_named(
    sets: list[str], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is one in name: its queries are tensors without data."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    usual = ["data.seq_len=512", "precision.compute=bfloat16"]
    recipe = load(str(FOR_VERIFY), [*usual, *sets], check_files=False).recipe
    with FakeTensorMode():
        described = describe_attention(recipe, torch.device("cuda"))
    assert described is not None
    assert described.endswith(f"its kernel: {kernel}")


def test_float8_with_tp_is_doubted(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '[run]\nname = "a"\n[model]\npreset = "debug-tiny"\n[data]\nseq_len = 64\n'
        '[precision]\ncompute = "bfloat16"\nmatmul = "float8"\n'
    )
    assert doubtful_choices(load(tmp_path / "r.toml", []).recipe) == []
    (line,) = doubtful_choices(load(tmp_path / "r.toml", ["mesh.tp=2"]).recipe)
    assert line.startswith('precision.matmul = "float8" with mesh.tp = 2 may be slower')


def test_a_glob_of_matrices_that_matches_none_is_refused_without_a_rule_too() -> None:
    """Rules know the parameters of our architectures alone."""
    recipe = load(FOR_VERIFY, ["optim.name=muon"]).recipe
    build._require_matrices(architecture("llama"), recipe)
    unmatched = replace(recipe, optim=replace(recipe.optim, matrices=("*.wq.weight", "*norm*")))
    with pytest.raises(PlanError, match=r"'\*norm\*' matches no matrix of the model"):
        build._require_matrices(architecture("llama"), unmatched)
