"""``composer3d report``: what it prints and writes, and what it refuses."""

import html
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.report.page import MOST_RUNS
from tests.commands.conftest import Ask
from tests.report.runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "base")


def test_it_writes_a_page_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("base: steps done 40 of 250; tokens seen 163,840; training loss")
    assert printed[-1] == f"wrote {run}/report.html"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_a_page_of_the_user_is_not_replaced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run.parent / "mine.html"
    theirs = '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    page.write_text(theirs)
    assert cli.main(["report", str(run), "-o", str(page)]) == 2
    assert "another file of this name is there" in capsys.readouterr().err
    assert page.read_text() == theirs
    page.unlink()
    for _ in range(2):
        assert cli.main(["report", str(run), "-o", str(page)]) == 0


def test_it_offers_to_plan_with_what_the_run_measured(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command that it prints works, and makes the file."""
    assert cli.main(["report", str(run)]) == 0
    (offer,) = re.findall(r"surer with: composer3d (plan .*)", capsys.readouterr().out)
    kept = tmp_path / "machine.toml"
    command = shlex.split(offer.replace("machine.toml", str(kept)))
    assert cli.main(command) == 0
    assert "calibrated: " in capsys.readouterr().out
    assert "[[calibration]]" in kept.read_text()


@pytest.mark.parametrize("sets", ["optim.train=['blocks.*']", "data.packing=documents"])
def test_a_run_that_did_less_than_is_predicted_offers_nothing(
    sets: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "less", sets=(sets,))
    assert cli.main(["report", str(run)]) == 0
    printed = capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "measured / predicted" in page
    assert "--calibrate" not in printed + page
    # The page says what ``plan`` says of such recipes.
    assert f">{html.escape(sets.partition('=')[0])}" in page


def test_json_has_the_final_numbers(run: Path, ask: Ask) -> None:
    out = run.parent / "own.html"
    _, answer = ask("report", str(run), "-o", str(out), "--gpu", "H100")
    (found,) = answer["runs"]
    assert answer["ok"]
    assert answer["report"] == str(out)
    assert found["step"] == 40
    assert found["loss"] == pytest.approx(2.406, abs=0.001)
    assert found["validation_loss"] == 3.5
    low, high = found["predicted_tokens_per_s_80"]
    assert 0 < low < found["predicted_tokens_per_s"] < high
    assert out.exists()


def test_a_loss_that_is_not_finite_at_the_end_is_no_final_loss(
    run: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": null}\n')
    assert cli.main(["report", str(run)]) == 0
    assert "training loss 2.4060 (step 40; not finite at the end)" in capsys.readouterr().out
    assert ask("report", str(run))[1]["runs"][0]["loss"] is None
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    assert cli.main(["report", str(run)]) == 0
    assert "training loss never finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["data.global_batch=1073741824"], "counting the traffic of"),
        (
            ["mesh.pp=1024", "model.n_layers=1024", "data.global_batch=8192"],
            "1,024 pipeline stages would take too long",
        ),
    ],
)
def test_a_huge_recipe_takes_no_memory_and_no_time(
    tmp_path: Path, sets: list[str], words: str
) -> None:
    alone = ["mesh.dp_shard=1", "mesh.tp=1", "mesh.cp=1", "mesh.pp=1", "data.micro_batch=1"]
    run = make_run(tmp_path / "huge", sets=(*alone, *sets))
    code = f"from composer3d.cli import main; main(['report', {str(run)!r}, '--gpu', 'H100'])"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
    subprocess.run([sys.executable, "-c", limit + code], check=True, timeout=300)
    assert words in (run / "report.html").read_text()


def test_two_runs_are_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_run(run.parent / "other", sets=("optim.lr=1e-3",))
    assert cli.main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {run}/compare-other.html\n")
    text = (run / "compare-other.html").read_text()
    assert "<tr><td>optim.lr</td><td>0.004</td><td>0.001</td></tr>" in text
    assert "<tr><td>run.name</td><td>&quot;base&quot;</td><td>&quot;other&quot;</td></tr>" in text
    assert "base train <b>2.406</b>" in text
    assert "other train <b>2.406</b>" in text
    differences = text[text.index("Differences of the recipes") : text.index("<h2>Curves")]
    assert differences.count("<tr>") == 3  # the head, and two keys


def test_many_runs_are_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = [
        make_run(run.parent / f"lr-{n}", sets=(f"optim.lr={n}e-3",)) for n in range(1, MOST_RUNS)
    ]
    assert cli.main(["report", *map(str, [run, *others])]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {run}/compare-{MOST_RUNS}-runs.html\n")
    text = (run / f"compare-{MOST_RUNS}-runs.html").read_text()
    row = text[text.index("<tr><td>optim.lr</td>") :].partition("</tr>")[0]
    values = ["0.004", *(f"0.00{n}" for n in range(1, MOST_RUNS))]
    assert re.findall(r"<td>([0-9.]+)</td>", row) == values
    # Each run has a colour in the chart of losses, and no drawing of its layout.
    for place in range(MOST_RUNS):
        assert f'<polyline class="c{place + 1}"' in text
    assert "<h2>lr-1: Layout" not in text
    assert "<title>predicted: " in text  # one line, as nothing that it depends on differs
    assert "lr-1 predicted" not in text
    assert text.count("<details>\n<summary>") == MOST_RUNS
    too_many = make_run(run.parent / "one-more")
    assert cli.main(["report", *map(str, [run, *others, too_many])]) == 2
    assert f"{MOST_RUNS + 1} runs are more than the {MOST_RUNS}" in capsys.readouterr().err


def test_equal_recipes_are_said_to_be_equal(run: Path) -> None:
    other = make_run(run.parent / "again" / "base")
    assert cli.main(["report", str(run), str(other)]) == 0
    assert "The recipes have the same values." in (run / "compare-base.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "-o", "page.svg"], "-o page.svg: the report is an HTML file"),
        (["{run}", "{run}"], "a run cannot be compared with itself"),
        (["{run}", "{run}/.", "{run}"], "a run cannot be compared with itself"),
        (["{run}/none"], "there is no such folder"),
        (["{run}", "--gpu", "abacus"], "--gpu abacus: unknown device"),
        (["{run}", "-o", "{run}/none/x.html"], "cannot be written (No such file or directory)"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", *(text.format(run=run) for text in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
