"""Configurations of other programs through import, check, plan, dryrun and verify.

``tools/prove/run imports`` takes all of them through every command, at full size. Here the smallest
one goes through all, on 8 processes with few layers, and the others through the quick commands.
"""

from pathlib import Path

import pytest

from composer3d import cli
from composer3d.runtime.launch import Pool
from composer3d.verify.proof import verify_layout
from tools.prove.imports.run import CONFIGURATIONS, Outcome, arguments_of, judge, main


def test_the_smallest_goes_through_every_command(
    pool: Pool, references: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(tmp_path / "small.toml")
    small = ["model.n_layers=4", "model.dim=256", "model.n_heads=4", "model.n_kv_heads=4"]
    small += ["model.ffn=512", "data.global_batch=64", "data.seq_len=256"]
    arguments = [word for one in small for word in ("--set", one)]
    command = arguments_of("import", CONFIGURATIONS["megatron-deepspeed-16"], Path(recipe))
    assert cli.main([*command, "--gpus", "8", *arguments]) == 0
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
    for step in ("import", "check"):
        assert cli.main(arguments_of(step, CONFIGURATIONS[name], recipe)) == 0
    assert cli.main(["plan", str(recipe), "--memory"]) in (0, 1)
    assert "needs most" in capsys.readouterr().out


def test_a_step_does_not_hold_with_other_ranks_or_an_inexact_layout() -> None:
    stages = [{"peak_gib": 3.0}, {"peak_gib": 4.5}]
    answer = {"world_size": 16, "stages": stages}
    assert judge("dryrun", answer, 16) == Outcome("", "16 ranks, peak 4.5 GiB")
    assert judge("dryrun", answer, 512).problem == "it has 16 ranks, and the text 512"
    verdict = {"passed": True, "layout": "tp 2", "loss_rel_err": 1e-15, "max_grad_rel_err": 2e-14}
    assert judge("verify", verdict, 16) == Outcome("", "tp 2, worst relative error 2e-14")
    assert judge("verify", {**verdict, "passed": False}, 16).problem == "not exact"
    assert judge("plan", {"legal": 0, "layouts": []}, 16).problem == "no layout"


def test_a_record_leaves_out_what_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, record = "megatron-deepspeed-16", tmp_path / "done.txt"
    arguments = [name, "--steps", "import", "check", "--record", str(record)]
    assert main(arguments) == 0
    lines = record.read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "import"], [name, "check"]]
    capsys.readouterr()
    assert main(arguments) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["import"]
    assert record.read_text().splitlines() == lines
