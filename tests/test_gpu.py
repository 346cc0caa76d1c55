"""Training on a GPU learns as on the CPU. All tests are skipped on a machine without a GPU."""

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
        reason=f"torch {torch.__version__} lacks torch.distributed.all_gather_single; "
        "composer3d needs 2.13",
    ),
]
RECIPE = ROOT / "recipes" / "debug-1-single.toml"


def train(folder: Path, *overrides: str) -> list[float]:
    """Train the debug recipe into ``folder``; return the loss of each step."""
    overrides = (f"run.out_dir={folder}", "model.preset=debug-small", *overrides)
    arguments = [f"--set={override}" for override in overrides]
    command = [sys.executable, "-m", "composer3d", "train", str(RECIPE), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    lines = (folder / "debug-1-single" / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.fixture(scope="module")
def cpu_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("cpu"))


def max_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_float32_learns_as_on_the_cpu(tmp_path: Path, cpu_losses: list[float]) -> None:
    assert max_difference(train(tmp_path, "run.device=cuda"), cpu_losses) < 1e-3


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_bfloat16_learns_as_float32_on_the_cpu(
    tmp_path: Path, cpu_losses: list[float], checkpointing: str
) -> None:
    overrides = (
        "run.device=cuda",
        "precision.compute=bfloat16",
        f"memory.activation_checkpoint={checkpointing}",
    )
    assert max_difference(train(tmp_path, *overrides), cpu_losses) < 2e-2


@pytest.mark.parametrize(
    "masks",
    [
        ("data.packing=documents",),
        ("model.window=24",),
        ("data.packing=documents", "model.window=8"),
    ],
)
def test_documents_and_windows_learn_as_on_the_cpu(tmp_path: Path, masks: tuple[str, ...]) -> None:
    """They have a kernel of their own on a GPU."""
    on_cpu = train(tmp_path / "cpu", *masks)
    on_gpu = train(tmp_path / "gpu", *masks, "run.device=cuda", "precision.compute=bfloat16")
    assert max_difference(on_gpu, on_cpu) < 2e-2


@pytest.mark.parametrize(
    ("architecture", "preset"),
    [
        ("deepseek", "debug-deepseek"),
        ("gemma3", "debug-gemma3"),
        ("glm", "debug-glm"),
        ("gpt_oss", "debug-gpt-oss"),
        ("granite", "debug-granite"),
        ("moe", "debug-moe"),
        ("olmo2", "debug-olmo3"),
        ("phi3", "debug-phi3"),
    ],
)
def test_each_architecture_learns_as_on_the_cpu(
    tmp_path: Path, architecture: str, preset: str
) -> None:
    """With documents, in float32 by the kernels for any dtype, and in bfloat16 by those of GPUs."""
    model = (f"model.architecture={architecture}", f"model.preset={preset}")
    overrides = (*model, "data.packing=documents")
    on_cpu = train(tmp_path / "cpu", *overrides)
    wide = train(tmp_path / "wide", *overrides, "run.device=cuda")
    assert max_difference(wide, on_cpu) < 1e-3
    half = train(tmp_path / "half", *overrides, "run.device=cuda", "precision.compute=bfloat16")
    assert max_difference(half, on_cpu) < 2e-2


def test_a_resumed_run_repeats_the_losses(tmp_path: Path) -> None:
    overrides = (
        "run.device=cuda",
        "run.deterministic=true",
        "precision.compute=bfloat16",
        "optim.decay=20",
    )
    whole = train(tmp_path / "whole", *overrides)
    first_steps = train(tmp_path / "parts", *overrides, "run.steps=10")
    assert first_steps == whole[:10]
    assert train(tmp_path / "parts", *overrides) == whole


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_on_the_host_learn_as_on_the_gpu(tmp_path: Path, zero: int) -> None:
    overrides = (
        "run.device=cuda",
        "run.steps=2",
        "precision.compute=bfloat16",
        f"parallel.zero={zero}",
    )
    on_gpu = train(tmp_path / "gpu", *overrides)
    on_host = train(tmp_path / "host", *overrides, "memory.cpu_offload=true")
    # With offload AdamW runs on the CPU, which rounds differently.
    assert max_difference(on_host, on_gpu) < 1e-3


def test_compiled_blocks_learn_as_eager_ones(tmp_path: Path) -> None:
    overrides = (
        "run.device=cuda",
        "precision.compute=bfloat16",
        "memory.activation_checkpoint=selective",
    )
    eager = train(tmp_path / "eager", *overrides)
    compiled = train(tmp_path / "compiled", *overrides, "compile.enabled=true")
    assert max_difference(eager, compiled) < 2e-2
