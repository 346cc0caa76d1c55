"""``composer3d plan``: ranked layouts, memory, a written recipe, and errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer3d import cli
from composer3d.recipe.resolve import load
from tools.prove.paths import ROOT

RECIPE = "llama3-8b-8-fsdp"
KEYS = {
    "pp", "virtual_stages", "dp_replicate", "dp_shard", "cp", "tp", "ep", "micro_batch", "schedule",
    "activation_checkpoint", "step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_gib", "fits",
    "bound_by",
}  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["plan", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_layouts_are_ranked_and_use_all_devices(capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = plan(capsys, RECIPE, "--gpus", "16", "--gpu", "H100", "--top", "5")
    assert status == 0
    found = answer["layouts"]
    assert len(found) == 5
    assert found[0].keys() >= KEYS
    speeds = [layout["tokens_per_s_per_gpu"] for layout in found]
    assert speeds == sorted(speeds, reverse=True)
    for layout in found:
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        size = 1
        for axis in axes:
            size *= layout[axis]
        assert size == 16
        assert layout["fits"]
        assert 0.2 < layout["mfu"] < 0.7


def test_a_written_plan_is_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "fastest.toml"
    status, answer = plan(capsys, RECIPE, "--gpus", "16", "--write", str(out))
    assert status == 0
    recipe = load(str(out), world_size=16).recipe
    best = answer["layouts"][0]
    assert recipe.mesh.tp == best["tp"]
    assert recipe.mesh.dp_shard == best["dp_shard"]
    assert recipe.memory.activation_checkpoint == best["activation_checkpoint"]
    assert "# composer3d plan" in out.read_text()
    # A file of the user's is never overwritten.
    assert cli.main(["plan", RECIPE, "--gpus", "16", "--write", str(out)]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_what_fits_nowhere_has_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    big = ("--set", "model.preset=llama3-405b")
    status, answer = plan(capsys, RECIPE, *big, "--gpus", "8", "--top", "1")
    assert status == 1
    assert answer["fitting"] == 0
    assert not answer["layouts"][0]["fits"]


def test_memory_of_the_recipe_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = plan(capsys, "llama-175b-1024-3d", "--memory", "--gpu", "A100-80GB")
    assert status == (0 if answer["fits"] else 1)
    assert len(answer["ranks"]) == 8
    totals = [sum(rank.values()) for rank in answer["ranks"]]
    assert totals[answer["largest_rank"]] == max(totals)
    # Stages of the end hold fewer micro-batches than those of the beginning.
    assert answer["ranks"][0]["activations"] > answer["ranks"][6]["activations"]


def test_text_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", RECIPE, "--gpus", "8", "--scale"]) == 0
    text = capsys.readouterr().out
    assert "legal layouts on 8 x H100-80GB SXM" in text
    assert "bound by" in text
    assert "the fastest layout as devices grow" in text


def test_a_device_of_the_user(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = tmp_path / "mine.toml"
    row.write_text(
        'name = "Mine"\nmemory_gib = 96\nmemory_gb_s = 4000\nnvlink_gb_s = 450\nnic_gbit = 400\n'
        'generation = "hopper"\n[peak_tflops]\nbfloat16 = 990\nfloat32 = 67\n'
    )
    status, answer = plan(capsys, RECIPE, "--gpus", "8", "--gpu", str(row), "--top", "1")
    assert status == 0
    assert answer["gpu"] == "Mine"
    row.write_text('name = "Mine"\nmemory_gib = -1\nspeed = 3\n')
    assert cli.main(["plan", RECIPE, "--gpu", str(row)]) == 2
    error = capsys.readouterr().err
    assert "the key 'memory_gb_s' is missing" in error
    assert "unknown key 'speed'" in error


def test_an_unknown_device_lists_those_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", RECIPE, "--gpu", "abacus"]) == 2
    error = capsys.readouterr().err
    assert "abacus: unknown device" in error
    assert "MI300X" in error


def test_plan_needs_no_torch() -> None:
    script = (
        "import sys; from composer3d import cli; "
        f"status = cli.main(['plan', {RECIPE!r}, '--gpus', '8', '--json', '--top', '1']); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
