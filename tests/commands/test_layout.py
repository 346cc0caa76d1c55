"""``composer3d layout``: what it prints and writes, and what it refuses."""

from pathlib import Path

import pytest

from composer3d import cli
from tests.commands.conftest import Ask
from tests.draw.pictures import read
from tools.prove.paths import ROOT

RECIPE = str(ROOT / "recipes" / "llama-175b-1024-3d.toml")
SMALL = str(ROOT / "recipes" / "quickstart.toml")


def test_it_prints_ranks_and_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layout", SMALL]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "quickstart.toml: 8 ranks = pp 2 x dp_shard 2 x tp 2"
    assert lines[1].startswith("1 node; 4 blocks; a step has 32 samples of 128 tokens")
    assert (
        "  rank 3 (pp0 dp_shard1 tp1): stage 0; heads 2-3 of 4; shard 1 of 2; samples 16-31 of "
        "each step"
    ) in lines
    assert "pp 1: stage 1: blocks 2-3, norm and head" in lines


def test_json_has_the_traffic_of_every_pipeline_rank(ask: Ask) -> None:
    _, answer = ask("layout", RECIPE, "--gpus-per-node", "4")
    assert (answer["ok"], answer["world_size"], answer["nodes"]) == (True, 1024, 256)
    assert [row["stages"] for row in answer["pp_ranks"]] == [[r, r + 8, r + 16] for r in range(8)]
    tp = answer["pp_ranks"][1]["traffic"]["tp"]
    assert (tp["ranks"], tp["stride"]) == (8, 1)
    # A ring of 8 ranks on nodes of 4 leaves a node twice.
    assert tp["nic_bytes"] == pytest.approx((tp["nvlink_bytes"] + tp["nic_bytes"]) / 4)
    assert tp["forward_bytes"] + tp["backward_bytes"] == pytest.approx(
        sum(flow["sent_bytes"] for flow in tp["flows"])
    )


def test_it_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "own.svg"
    assert cli.main(["layout", RECIPE, "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    page = read(out.read_text())
    heading = "llama-175b-1024-3d.toml: 1,024 ranks = pp 8 x dp_shard 16 x tp 8"
    assert heading in [text.words for text in page.texts]


def test_the_mesh_fills_the_given_number_of_gpus(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(ROOT / "recipes" / "llama3.1-8b-64-fsdp-cp-tp.toml")
    fill = ["layout", recipe, "--set", "mesh.dp_shard=-1"]
    assert ask(*fill, "--gpus", "128")[1]["mesh"]["dp_shard"] == 16
    assert cli.main([*fill, "--gpus", "100"]) == 2
    assert "100" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layout", SMALL, "-o", "own.pdf"]) == 2
    assert "use a name in .svg" in capsys.readouterr().err
