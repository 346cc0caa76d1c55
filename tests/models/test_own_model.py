"""The model of docs/own_model.md, installed in a folder of its own.

check, verify and train treat it as one of ours.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.prove.paths import ROOT

PAGE = (ROOT / "docs" / "own_model.md").read_text()
CODE, RECIPE = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.S)[1] for kind in ("python", "toml"))
LAYOUTS = """\
mesh.dp_shard=2
mesh.dp_replicate=2 data.packing=documents
mesh.tp=2
mesh.pp=2
mesh.pp=2 parallel.schedule=ZBVZeroBubble
mesh.cp=2
mesh.cp=2 parallel.cp_method=ulysses
mesh.dp_shard=2 mesh.tp=2 mesh.pp=2
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The page's module in a package of another name than the page's, and its recipe."""
    package = tmp_path / "elsewhere" / "their_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "other_name.py").write_text(CODE)
    recipe = RECIPE.replace("my_models.gpt:", "their_models.other_name:")
    assert recipe != RECIPE
    (tmp_path / "gpt.toml").write_text(recipe)
    (tmp_path / "layouts.txt").write_text(LAYOUTS)
    return tmp_path


def run(folder: Path, *arguments: str, path: str = "elsewhere") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder / path), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "composer3d", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_page_is_as_short_as_it_says() -> None:
    assert len(CODE.splitlines()) < 150
    assert "(docs/own_model.md)" in (ROOT / "README.md").read_text()


def test_its_layouts_are_exact(installed: Path) -> None:
    done = run(
        installed, "verify", "gpt.toml", "--steps", "2", "--layouts", "layouts.txt", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(done.stdout.splitlines()[-1])["results"]
    assert len(verdicts) == len(LAYOUTS.splitlines())
    for verdict in verdicts:
        assert verdict["passed"], verdict
        assert 0 < verdict["max_grad_rel_err"] < 1e-12


def test_a_fault_of_its_plan_is_seen(installed: Path) -> None:
    """Column biases that are not cut would be added once for each rank: the plan is refused."""
    module = installed / "elsewhere" / "their_models" / "other_name.py"
    module.write_text(
        CODE.replace(
            "self.down = nn.Linear(shape.ffn, shape.dim, bias=False)",
            "self.down = nn.Linear(shape.ffn, shape.dim)",
        )
    )
    done = run(installed, "verify", "gpt.toml", "--steps", "2", "--set", "mesh.tp=2")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "'blocks.0.mlp.down' has style \"row\" and a parameter 'bias'" in done.stdout


def test_it_is_checked_trained_and_resumed(installed: Path) -> None:
    done = run(installed, "check", "gpt.toml", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["recipe"]["model"]["max_positions"] == 512
    assert answer["origins"]["model.max_positions"] == "gpt.toml:12"
    short = ["--set", "data.global_batch=2", "--set", "data.seq_len=32", "--set", "metrics.every=1"]
    whole = run(installed, "train", "gpt.toml", *short, "--set", "run.steps=4")
    assert whole.returncode == 0, whole.stderr
    losses = (installed / "runs" / "gpt" / "metrics.jsonl").read_text()
    apart = ["--set", "run.name=apart", *short]
    for steps in ("2", "4"):
        part = run(
            installed,
            "train",
            "gpt.toml",
            *apart,
            "--set",
            f"run.steps={steps}",
            "--set",
            "optim.decay=4",
        )
        assert part.returncode == 0, part.stderr
    assert "resumed from" in part.stderr
    resumed = loss_of((installed / "runs" / "apart" / "metrics.jsonl").read_text())
    assert len(resumed) == 4
    assert resumed == loss_of(losses)

    # A checkpoint alone never leads to an import: here the module cannot be found.
    found = run(installed, "inspect", "runs/apart", path="nowhere")
    assert found.returncode == 2, found.stdout
    assert "has a model of the architecture" in found.stderr
    assert "their_models.other_name:ARCHITECTURE" in found.stderr


def test_its_layout_and_plan_say_what_is_known(installed: Path) -> None:
    sets = ["--set", "mesh.pp=2", "--set", "mesh.dp_shard=2", "--set", "mesh.tp=2"]
    done = run(installed, "layout", "gpt.toml", *sets, "-o", "gpt.svg", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    # The positions make `first` larger: 512 x 64 parameters, as much as 2 / 3 of a block.
    assert [rank["layers"] for rank in answer["pp_ranks"]] == [
        "embedding, blocks 0-1",
        "blocks 2-3, norm and head",
    ]
    picture = (installed / "gpt.svg").read_text()
    assert "sends in a step" in picture
    assert "rank 7" in picture
    done = run(installed, "plan", "gpt.toml", "--gpus", "2", "--top", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The architecture is your own: parameters and messages ")


SENT = {
    "pp, tp": ["mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2"],
    "fewer keys than tp": ["mesh.dp_shard=2", "mesh.tp=4", "model.n_kv_heads=2"],
    "full": ["mesh.dp_shard=2", "mesh.tp=2", "memory.activation_checkpoint=full"],
    "selective, whole sequences": [
        "mesh.tp=2",
        "memory.activation_checkpoint=selective",
        "parallel.sequence_parallel=false",
    ],
    "cp, untied": ["mesh.cp=2", "mesh.dp_shard=2", "parallel.zero=1", "model.tied=false"],
}


@pytest.mark.parametrize("name", SENT)
def test_its_planned_traffic_is_what_a_dry_run_counts(installed: Path, name: str) -> None:
    sets = [word for text in SENT[name] for word in ("--set", text)]
    planned, counted = (
        json.loads(run(installed, command, "gpt.toml", *sets, "--json").stdout.splitlines()[-1])
        for command in ("layout", "dryrun")
    )
    for rank, stage in zip(planned["pp_ranks"], counted["stages"], strict=True):
        sent = {
            (axis, operation): [calls["count"], round(calls["bytes"])]
            for axis, operations in stage["comm"].items()
            for operation, calls in operations.items()
            if operation != "recv"
        }
        found: dict[tuple[str, str], list[float]] = {}
        for row in rank["traffic"].values():
            for flow in row["flows"]:
                calls = found.setdefault((flow["axis"], flow["operation"]), [0, 0])
                calls[0] += flow["count"]
                calls[1] += flow["sent_bytes"]
        assert found == sent


def loss_of(lines: str) -> list[float]:
    rows = [json.loads(line) for line in lines.splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            ("their_models.other_name:", "no_such_package.gpt:"),
            r"gpt\.toml:5: model\.architecture: \"no_such_package\.gpt:ARCHITECTURE\" cannot be "
            r"imported: ModuleNotFoundError: No module named 'no_such_package'; install the "
            r"package, or put its folder into PYTHONPATH",
        ),
        (
            (":ARCHITECTURE", ":GPT"),
            r"gpt\.toml:5: .* is a type, not a composer3d\.models\.registry\.Architecture",
        ),
        (
            (":ARCHITECTURE", ":NOTHING"),
            r"gpt\.toml:5: .*module \"their_models\.other_name\" has no \"NOTHING\"",
        ),
        (
            ("their_models.other_name:ARCHITECTURE", "mamba"),
            r"gpt\.toml:5: model\.architecture: there is no architecture \"mamba\"; "
            r"use llama, moe, olmo2, or "
            r"\"package\.module:NAME\" for one of your own",
        ),
        (
            ("max_positions = 512", "max_position = 512"),
            r"gpt\.toml:12: unknown key 'model\.max_position'; did you mean 'max_positions'\?",
        ),
        (
            ("max_positions = 512", "max_positions = 0"),
            r"gpt\.toml:12: model\.max_positions = 0 must be from 1 to",
        ),
        (("ffn = 256\n", ""), r"gpt\.toml:4: \[model\] lacks ffn; set them"),
    ],
)
def test_what_is_wrong_has_its_line(installed: Path, change: tuple[str, str], line: str) -> None:
    recipe = (installed / "gpt.toml").read_text()
    assert change[0] in recipe
    (installed / "gpt.toml").write_text(recipe.replace(*change))
    done = run(installed, "check", "gpt.toml")
    assert done.returncode == 2, done.stdout
    assert re.search(line, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
