"""``composer3d timeline``: what it prints and writes, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.facts import hardware, trace
from composer3d.planner.predict import of_recipe
from composer3d.planner.time import pipeline_times, predict_time
from composer3d.recipe.resolve import load
from tests.commands.conftest import Ask
from tests.draw.pictures import read
from tests.draw.test_measured import traced
from tools.prove.paths import ROOT

RECIPE = str(ROOT / "recipes" / "llama-175b-1024-3d.toml")
SMALL = [str(ROOT / "recipes" / "debug-8-dp-tp-pp.toml")]


def test_it_prints_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("debug-8-dp-tp-pp.toml: 2 pipeline ranks, 4 micro-batches\n")
    assert "1 unit: the forward of one micro-batch" in out
    assert "bubble: 20.0% of the step = (P-1)/(M + P-1); 25.0% of the ideal time = (P-1)/M" in out
    assert out.count("rank 0") == 1


def test_json_has_every_action_and_the_bubble(ask: Ask) -> None:
    _, answer = ask("timeline", RECIPE, "--compare", "1F1B")
    interleaved, plain = answer["schedules"]
    assert answer["ok"]
    assert (answer["pp"], answer["micro_batches"]) == (8, 32)
    assert interleaved["bubble_of_total"] == pytest.approx(7 / (96 + 7))
    assert interleaved["bubble_of_ideal"] == pytest.approx(7 / 96)
    assert interleaved["closed_form"] == {"of_ideal": 7 / 96, "is": "(P-1)/(V M)"}
    assert plain["bubble_of_ideal"] == pytest.approx(7 / 32)
    # The unit is the same: a rank computes as long in both.
    assert interleaved["step"] == pytest.approx(3 * 32 + 7)
    assert plain["step"] == pytest.approx(3 * (32 + 7))
    assert plain["in_flight"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [len(row) for row in interleaved["ranks"]] == [2 * 3 * 32] * 8
    assert plain["ranks"][0][0] == {"actions": ["0F0"], "start": 0.0, "end": 1.0}


def test_it_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "own.svg"
    arguments = ["timeline", *SMALL, "--compare", "ZBVZeroBubble", "-o", str(out)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:2]] == ["1F1B", "ZBVZeroBubble"]
    assert printed[-1] == f"wrote {out}"
    page = read(out.read_text())
    words = " ".join(text.words for text in page.texts)
    # The unit of time is stated in the picture.
    assert "1 unit: the forward of one micro-batch through all layers of a rank." in words
    assert "All stages are equal" in words


def test_a_csv_schedule_is_drawn(ask: Ask) -> None:
    recipe = str(ROOT / "recipes" / "debug-2-csv.toml")
    schedule = f"--set=parallel.schedule_csv={ROOT / 'recipes' / 'zb-h1-2x4.csv'}"
    (answer,) = ask("timeline", recipe, schedule)[1]["schedules"]
    assert answer["title"].startswith("zb-h1-2x4.csv: P = 2 ranks")
    assert answer["closed_form"] is None


def test_times_of_a_device_are_those_of_the_plan(ask: Ask) -> None:
    _, answer = ask("timeline", RECIPE, "--gpu", "A100-80GB", "--compare", "1F1B")
    interleaved, plain = answer["schedules"]
    assert answer["unit"].startswith("Times of A100-80GB as composer3d plan predicts them")

    device = hardware.by_name("A100-80GB")
    assert device is not None
    setup = of_recipe(load(RECIPE, [], check_files=False).recipe, device)
    stages, sends_s = pipeline_times(setup)
    # Milliseconds. The last stage has the head.
    first = interleaved["ranks"][0][0]
    assert first["actions"] == ["0F0"]
    assert first["end"] == pytest.approx(1000 * stages[0].forward_s)
    assert stages[-1].forward_s > stages[0].forward_s
    second = interleaved["ranks"][1][0]
    assert second["start"] == pytest.approx(first["end"] + 1000 * sends_s[0])
    # The pipeline of the plan: the slowest rank computes and waits. The reduction comes later.
    time = predict_time(setup)
    pipeline_s = time.compute_s + time.exposed_s["tp"] + time.bubble_s
    assert interleaved["step"] == pytest.approx(1000 * pipeline_s)
    # A rank has three stages in the one schedule, and one of the same layers in the other.
    assert plain["ranks"][0][0]["end"] == pytest.approx(3 * first["end"], rel=0.01)
    assert plain["bubble_of_total"] > interleaved["bubble_of_total"]
    assert interleaved["closed_form"] is None


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The folder of a run with a trace."""
    step = traced("ZBVZeroBubble")
    (tmp_path / trace.FOLDER).mkdir()
    for head, events in zip(*step, strict=True):
        skewed = replace(head, clock_error_s=2e-5 * head.pp_rank)
        trace.file_of(tmp_path, head.pp_rank).write_bytes(trace.lines(skewed, events))
    return str(tmp_path)


def test_a_run_is_drawn_beside_its_simulation(
    run: str, tmp_path: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    _, answer = ask("timeline", "--measured", run)
    measured, simulated = answer["schedules"]
    assert (answer["pp"], answer["micro_batches"], answer["step"]) == (4, 8, 2)
    assert measured["bubble_of_total"] == pytest.approx(simulated["bubble_of_total"], abs=1e-4)
    assert measured["ranks"][0][0] == {"actions": ["0F0"], "start": 0.0, "end": pytest.approx(20)}
    assert measured["waits"].keys() == {"messages", "gradients"}

    out = tmp_path / "own.svg"
    assert cli.main(["timeline", "--measured", run, "--step", "2", "-o", str(out)]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("measured in step 2: ZBVZeroBubble: P = 4 ranks, V = 2 stages a rank")
    assert "waiting for messages of other pipeline ranks" in first
    assert second.startswith("simulated with its mean times: ZBVZeroBubble")
    cells = [rectangle for rectangle in read(out.read_text()).rectangles if rectangle.tip]
    assert len(cells) == 2 * 2 * 3 * 8 * 4

    recipe = [RECIPE, "--gpu", "A100-80GB"]
    assert len(ask("timeline", "--measured", run, *recipe)[1]["schedules"]) == 3


def test_the_error_of_clocks_is_that_against_rank_0(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two other ranks may differ by twice that."""
    assert cli.main(["timeline", "--measured", run]) == 0
    assert "The clocks of ranks are within 0.06 ms of rank 0's." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "composer3d timeline: name a RECIPE, or a run with --measured RUN"),
        ([RECIPE, "--step", "3"], "--step has no effect without --measured; give both"),
        (["--measured", "no/such"], "no/such/timeline/pp0.jsonl is missing; a run writes it with"),
        (["--measured", "RUN", "--step", "9"], "pp0.jsonl has no step 9"),
        (["--measured", "RUN", RECIPE], "--measured: only times in seconds can stand beside a run"),
        (["--measured", "RUN", "--compare", "1F1B"], "--measured: only times in seconds can stand"),
        ([RECIPE, "--gpu", "X1"], "--gpu X1: unknown device; known are"),
        (
            [*SMALL, "--set=mesh.pp=1", "--set=mesh.dp_shard=4"],
            "mesh.pp = 1, so there is no pipeline",
        ),
        (
            [*SMALL, "--compare", "2F2B"],
            "--compare 2F2B: there is no such schedule; use one of GPipe,",
        ),
        ([*SMALL, "--compare", "csv"], "--compare csv: there is no such schedule"),
        (
            [*SMALL, "--set=data.global_batch=4", "--compare", "DualPipeV"],
            "--compare: DualPipeV has 2 micro-batches, but needs at least twice pp = 2; change "
            "data.global_batch",
        ),
        ([*SMALL, "-o", "own.png"], "-o own.png: the picture is an SVG file; use a name in .svg"),
        (
            [*SMALL, "-o", "no/such/own.svg"],
            "-o no/such/own.svg: cannot be written (No such file",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    run: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [run if argument == "RUN" else argument for argument in arguments]
    assert cli.main(["timeline", *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
