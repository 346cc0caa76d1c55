"""The model of docs/own_model.md, installed in a folder of its own.

check, verify and train treat it as one of ours.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer3d import cli
from composer3d.planner.predict import sizes_of
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tests.generate.jobs import answer_of, run_command
from tools.prove.paths import ROOT

PAGE = (ROOT / "docs" / "own_model.md").read_text()
CODE, RECIPE = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.S)[1] for kind in ("python", "toml"))
LAYOUTS = """\
mesh.dp_replicate=2 mesh.cp=2 data.packing=documents
mesh.pp=2 mesh.cp=2 parallel.cp_method=ulysses parallel.schedule=ZBVZeroBubble
mesh.dp_shard=2 mesh.tp=2 mesh.pp=2
"""


def install(folder: Path, package: str, code: str = CODE) -> str:
    """Write the page's module into a package of another name; return the page's recipe for it."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    (folder / package / "other_name.py").write_text(code)
    recipe = RECIPE.replace("my_models.gpt:", f"{package}.other_name:")
    assert recipe != RECIPE
    return recipe


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of packages that Python finds; theirs is there."""
    folder = tmp_path_factory.mktemp("elsewhere")
    install(folder, "their_models")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def recipe(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe ``gpt.toml`` for it in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gpt.toml"
    path.write_text(RECIPE.replace("my_models.gpt:", "their_models.other_name:"))
    return path


def test_the_page_is_as_short_as_it_says() -> None:
    assert len(CODE.splitlines()) < 150
    assert "(docs/own_model.md)" in (ROOT / "README.md").read_text()


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command in this process; return the object that it prints."""
    status = cli.main([*arguments, "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed
    return answer_of(printed.out)


def test_its_layouts_are_exact(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("layouts.txt").write_text(LAYOUTS)
    found = answer(capsys, "verify", "gpt.toml", "--steps", "2", "--layouts", "layouts.txt")
    assert len(found["results"]) == len(LAYOUTS.splitlines())
    for verdict in found["results"]:
        assert verdict["passed"], verdict
        assert 0 < verdict["max_grad_rel_err"] < 1e-12


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "gpt.toml", "--full", "--steps", "1", "--set", "mesh.pp=2"),
        ("dryrun", "gpt.toml", "--set", "optim.name=muon", "--set", "mesh.dp_shard=2"),
    ],
    ids=["full", "muon"],
)
def test_its_full_size_job_runs_without_data(
    elsewhere: Path, recipe: Path, pool: Pool, arguments: tuple[str, ...]
) -> None:
    # In a process of its own, as of a user: another command would have read the table already.
    given = {"arguments": [*arguments, "--set", "data.global_batch=8"]}
    ((status, output, errors),) = pool.run(run_command, given, world_size=1)
    assert status == 0, errors
    assert ("sound   structure of 2 ranks" in output) == ("--full" in arguments)


def test_a_fault_of_its_plan_is_seen(
    elsewhere: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Column biases that are not cut would be added once for each rank: the plan is refused."""
    plain = "self.down = nn.Linear(shape.ffn, shape.dim, bias=False)"
    faulty = CODE.replace(plain, plain.replace(", bias=False", ""))
    assert faulty != CODE
    recipe.write_text(install(elsewhere, "faulty_models", faulty))
    assert cli.main(["verify", "gpt.toml", "--steps", "2", "--set", "mesh.tp=2"]) == 2
    assert "'blocks.0.mlp.down' has style \"row\" and a parameter 'bias'" in capsys.readouterr().out


def test_it_is_checked_trained_and_resumed(
    elsewhere: Path,
    recipe: Path,
    pool: Pool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = answer(capsys, "check", "gpt.toml")
    assert checked["recipe"]["model"]["max_positions"] == 512
    assert checked["origins"]["model.max_positions"] == "gpt.toml:12"

    def train(*sets: str) -> str:
        short = ("data.global_batch=2", "data.seq_len=32", "metrics.every=1", *sets)
        arguments = ["train", "gpt.toml", *(word for text in short for word in ("--set", text))]
        ((status, _, errors),) = pool.run(run_command, {"arguments": arguments}, world_size=1)
        assert status == 0, errors
        return errors

    train("run.steps=4")
    train("run.name=apart", "run.steps=2", "optim.decay=4")
    assert "resumed from" in train("run.name=apart", "run.steps=4", "optim.decay=4")
    resumed = loss_of(Path("runs", "apart"))
    assert len(resumed) == 4
    assert resumed == loss_of(Path("runs", "gpt"))

    # A checkpoint alone never leads to an import: here the module cannot be found.
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(elsewhere)])
    arguments = ["inspect", "runs/apart"]
    ((status, _, errors),) = pool.run(run_command, {"arguments": arguments}, world_size=1)
    assert status == 2
    assert "has a model of the architecture" in errors
    assert "their_models.other_name:ARCHITECTURE" in errors


def loss_of(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_its_layout_and_plan_say_what_is_known(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "mesh.pp=2", "--set", "mesh.dp_shard=2", "--set", "mesh.tp=2"]
    drawn = answer(capsys, "layout", "gpt.toml", *sets, "-o", "gpt.svg")
    # The positions make `first` larger: 512 x 64 parameters, as much as 2 / 3 of a block.
    assert [rank["layers"] for rank in drawn["pp_ranks"]] == [
        "embedding, blocks 0-1",
        "blocks 2-3, norm and head",
    ]
    picture = Path("gpt.svg").read_text()
    assert "sends in a step" in picture
    assert "rank 7" in picture
    assert cli.main(["plan", "gpt.toml", "--gpus", "2", "--top", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("The architecture is your own: parameters and messages ")


def test_its_norms_are_counted_by_module_and_placed_by_what_reads_them(
    elsewhere: Path, recipe: Path
) -> None:
    """A LayerNorm has two parameters; and a norm of the input may be registered last."""
    sizes = sizes_of(load(recipe, may_import=True).recipe)
    assert (sizes.norms, sizes.norms_after) == (2, False)

    reordered = CODE.replace(
        "self.mlp_norm, self.mlp = nn.LayerNorm(shape.dim), MLP(shape)",
        "self.mlp, self.mlp_norm = MLP(shape), nn.LayerNorm(shape.dim)",
    )
    assert reordered != CODE
    recipe.write_text(install(elsewhere, "reordered_models", reordered))
    assert sizes_of(load(recipe, may_import=True).recipe) == sizes

    after = reordered.replace("self.mlp(self.mlp_norm(h_BTC))", "self.mlp_norm(self.mlp(h_BTC))")
    assert after != reordered
    recipe.write_text(install(elsewhere, "post_norm_models", after))
    sizes = sizes_of(load(recipe, may_import=True).recipe)
    assert (sizes.norms, sizes.norms_after) == (2, True)


SENT = {
    "pp, tp": ["mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2"],
    "fewer keys than tp, full": [
        "mesh.dp_shard=2",
        "mesh.tp=4",
        "model.n_kv_heads=2",
        "memory.activation_checkpoint=full",
    ],
    "selective, whole sequences": [
        "mesh.tp=2",
        "memory.activation_checkpoint=selective",
        "parallel.sequence_parallel=false",
    ],
    "cp, untied": ["mesh.cp=2", "mesh.dp_shard=2", "parallel.zero=1", "model.tied=false"],
}


@pytest.mark.parametrize("name", SENT)
def test_its_planned_traffic_is_what_a_dry_run_counts(
    recipe: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    sets = [word for text in SENT[name] for word in ("--set", text)]
    planned, counted = (
        answer(capsys, command, "gpt.toml", *sets) for command in ("layout", "dryrun")
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
            r"use llama, moe, olmo2, granite, gpt_oss, deepseek, glm, phi3, gemma3, or "
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
def test_what_is_wrong_has_its_line(
    recipe: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], line: str
) -> None:
    right = recipe.read_text()
    assert change[0] in right
    recipe.write_text(right.replace(*change))
    assert cli.main(["check", "gpt.toml"]) == 2
    assert re.search(line, capsys.readouterr().err)
