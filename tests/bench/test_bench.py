"""The bench: that its hand-written loop computes what composer3d does, and that it prints what it says. No timing."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from composer3d.models.llama.model import Llama
from composer3d.models.llama.shape import PRESETS
from tools.bench import jobs, plain
from tools.bench.commands import LAYOUTS, main
from tools.bench.jobs import SHAPE, Job, JobError, measure

SEQ_LEN = 48


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_plain_loop_computes_what_composer3d_does(compute: str) -> None:
    torch.manual_seed(0)
    shape = PRESETS["debug-bench"]
    ours = Llama(shape, device="cpu")
    sizes = {key: value for key, value in asdict(shape).items() if key in SHAPE}
    theirs = plain.Llama(seq_len=SEQ_LEN, compute=getattr(torch, compute), **sizes)
    pairs = list(zip(ours.named_parameters(), theirs.named_parameters(), strict=True))
    with torch.no_grad():
        for (_, mine), (_, copy) in pairs:
            torch.nn.init.normal_(mine, mean=float(mine.dim() == 1), std=0.05)
            copy.copy_(mine)
    tokens_bt, labels_bt = torch.randint(shape.vocab, (2, 3, SEQ_LEN))
    expected = ours(tokens_bt, labels_bt, torch.arange(SEQ_LEN).repeat(3, 1)) / labels_bt.numel()
    loss = theirs(tokens_bt, labels_bt)
    expected.backward()
    loss.backward()
    close = 1e-5 if compute == "float32" else 0.05
    assert loss.item() == pytest.approx(expected.item(), rel=close)
    assert all(p.dtype == torch.float32 for p in theirs.parameters())
    for (_, mine), (name, copy) in pairs:
        assert mine.grad is not None
        assert copy.grad is not None
        assert (copy.grad - mine.grad).norm() < close * mine.grad.norm(), name


def test_plain_takes_no_help_from_composer3d(root: Path) -> None:
    assert "import composer3d" not in (text := (root / "tools/bench/plain.py").read_text())
    assert "from composer3d" not in text


def test_train_prints_four_figures(root: Path) -> None:
    command = [
        sys.executable,
        "tools/bench.py",
        "train",
        "recipes/debug-1-single.toml",
        "--set",
        "run.steps=6",
        "--json",
    ]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == ["tokens_per_s", "step_s", "launch_to_first_step_s", "peak_rss_gib"]
    assert figures["tokens_per_s"] * figures["step_s"] == pytest.approx(8 * 64)  # tokens of a step
    assert figures["step_s"] < figures["launch_to_first_step_s"] < 120
    assert 0.1 < figures["peak_rss_gib"] < 4  # torch alone takes 0.2


def test_a_wrong_recipe_is_told_as_composer3d_tells_it(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert main(["train", str(root / "recipes/debug-1-single.toml"), "--set", "mesh.tq=2"]) == 2
    assert "unknown key 'mesh.tq'" in capsys.readouterr().err


def test_an_interpreter_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--python", "/no/such/python"]) == 2
    assert "bench.py gpu:" in (said := capsys.readouterr().err)
    assert "/no/such/python" in said


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(JobError, match="the reason"):
        measure(
            lambda folder: [
                Job(command=["bash", "-c", "echo the reason; exit 3"], output=folder / "output")
            ]
        )


def test_a_run_that_hangs_is_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LIMIT_S", 1.0)
    script = "sleep 60 & echo $! > pid; wait"
    with pytest.raises(JobError, match="not done after 1 s"):
        measure(
            lambda folder: [
                Job(command=["bash", "-c", script], cwd=tmp_path, output=folder / "output")
            ]
        )
    assert int((tmp_path / "pid").read_text()) not in jobs.processes()
    assert os.getpid() in jobs.processes()


def test_gpu_refuses_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["gpu", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no CUDA GPU" in captured.err


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_sides_of_a_layout_are_alike(name: str) -> None:
    sets = dict(each.split("=") for each in LAYOUTS[name].sets)
    words = LAYOUTS[name].peer.split()
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    axes = {"tp": "tensor", "pp": "pipeline", "cp": "context"}
    sizes = {axis: int(sets.get(f"mesh.{axis}", 1)) for axis in axes}
    shards = int(sets.get("mesh.dp_shard", 1))
    assert sizes == {
        axis: int(flags.get(f"--parallelism.{word}-parallel-degree", 1))
        for axis, word in axes.items()
    }
    assert [int(word) for word in words[:3]] == [
        shards * sizes["tp"] * sizes["pp"] * sizes["cp"],
        8,
        shards,
    ]
    micro = flags.get("--parallelism.pipeline-parallel-microbatch-size", 8 // shards)
    assert int(sets["data.micro_batch"]) == int(micro)
