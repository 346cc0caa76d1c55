"""Configurations of other programs through import, check, plan, dryrun and verify.

``tools/prove/run imports`` takes all of them through every command, at full size. Here the smallest
one goes through all, on 8 processes with few layers, and the others through the quick commands.
"""

from pathlib import Path

import pytest

from composer3d import cli
from composer3d.runtime.launch import Pool
from composer3d.verify.proof import verify_layout
from tools.prove.imports.run import CONFIGURATIONS, steps


def test_the_smallest_goes_through_every_command(
    pool: Pool, references: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(tmp_path / "small.toml")
    small = ["model.n_layers=4", "model.dim=256", "model.n_heads=4", "model.n_kv_heads=4"]
    small += ["model.ffn=512", "data.global_batch=64", "data.seq_len=256"]
    arguments = [word for one in small for word in ("--set", one)]
    script = str(CONFIGURATIONS["megatron-deepspeed-16"])
    assert cli.main(["import", script, "-o", recipe, "--gpus", "8", *arguments]) == 0
    assert cli.main(["check", recipe, "--gpus", "8"]) == 0
    assert cli.main(["plan", recipe, "--top", "1"]) == 0
    assert cli.main(["dryrun", recipe]) == 0
    assert "WRONG" not in capsys.readouterr().out
    verdict = verify_layout(pool, references, recipe, [], dtype="float64", steps=2)
    assert verdict.passed, verdict
    assert (verdict.world_size, verdict.refused) == (8, False)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_all_are_imported_checked_and_priced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "x.toml"
    importing, checking, *_ = steps(CONFIGURATIONS[name], recipe)
    assert cli.main(importing) == 0
    assert cli.main(checking) == 0
    assert cli.main(["plan", str(recipe), "--memory"]) in (0, 1)
    assert "needs most" in capsys.readouterr().out
