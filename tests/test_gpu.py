"""The same lines on a GPU: what the CPU has proven, held against it. Each test skips itself where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.prove.paths import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.skipif(
        not hasattr(torch.distributed, "all_gather_single"),
        reason=f"torch {torch.__version__} lacks torch.distributed.all_gather_single; composer3d needs 2.13",
    ),
]
RECIPE = ROOT / "recipes" / "debug-1-single.toml"


def losses(folder: Path, *sets: str) -> list[float]:
    """The losses of a run of the debug recipe, by step."""
    arguments = [
        f"--set={each}" for each in (f"run.out_dir={folder}", "model.preset=debug-small", *sets)
    ]
    command = [sys.executable, "-m", "composer3d", "train", str(RECIPE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    lines = (folder / "debug-1-single" / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("cpu"))


def worst(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_float32_learns_as_on_the_cpu(tmp_path: Path, on_cpu: list[float]) -> None:
    assert worst(losses(tmp_path, "run.device=cuda"), on_cpu) < 1e-3


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_bfloat16_learns_as_float32_on_the_cpu(
    tmp_path: Path, on_cpu: list[float], checkpointing: str
) -> None:
    sets = (
        "run.device=cuda",
        "precision.compute=bfloat16",
        f"memory.activation_checkpoint={checkpointing}",
    )
    assert worst(losses(tmp_path, *sets), on_cpu) < 2e-2


def test_a_resumed_run_repeats_the_losses(tmp_path: Path) -> None:
    sets = ("run.device=cuda", "precision.compute=bfloat16", "optim.decay=20")
    whole = losses(tmp_path / "whole", *sets)
    first = losses(tmp_path / "parts", *sets, "run.steps=10")
    assert first == whole[:10]
    assert losses(tmp_path / "parts", *sets) == whole


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_on_the_host_learn_as_on_the_gpu(tmp_path: Path, zero: int) -> None:
    sets = ("run.device=cuda", "run.steps=2", "precision.compute=bfloat16", f"parallel.zero={zero}")
    kept = losses(tmp_path / "gpu", *sets)
    # AdamW runs on the CPU: its rounding is another one.
    assert worst(losses(tmp_path / "host", *sets, "memory.cpu_offload=true"), kept) < 1e-3


def test_compiled_blocks_learn_as_eager_ones(tmp_path: Path) -> None:
    sets = (
        "run.device=cuda",
        "precision.compute=bfloat16",
        "memory.activation_checkpoint=selective",
    )
    assert (
        worst(
            losses(tmp_path / "eager", *sets),
            losses(tmp_path / "fast", *sets, "compile.enabled=true"),
        )
        < 2e-2
    )
