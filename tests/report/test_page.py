"""The page of ``composer3d report``: nothing that a run has written can run, load or overflow."""

import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from composer3d.commands.report import _subject
from composer3d.facts import events
from composer3d.facts.errors import UserError
from composer3d.facts.events import Event
from composer3d.facts.tags import COUNTED_TOKENS
from composer3d.report import folder, page
from composer3d.report.page import Subject
from tests.report.runs import make_run, metrics_of, write_rows

EVIL = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"


class Elements(HTMLParser):
    """Collects the tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.found)


def subject_of(path: Path, label: str = "run") -> Subject:
    return _subject(folder.read(str(path)), label, None, 8, has_pictures=True)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "evil")
    with (run / "recipe.toml").open("a") as file:
        file.write(f"# {EVIL}\n")
    with (run / events.FILE).open("ab") as file:
        file.write(events.line(Event(3, 1.0, "ranks", EVIL, EVIL)))
    (run / "lost-ranks-20260101T000000Z.txt").write_text(EVIL)
    write_rows(run, [{"step": 1, EVIL: 1.0, "loss": 2.0}, {"step": 2, "loss": EVIL}])
    text = page.render([subject_of(run, EVIL)], None)
    elements = Elements(text)
    assert elements.count("script") == 1
    assert elements.count("img") == elements.count("iframe") == elements.count("a") == 0
    handlers = [name for _, attributes in elements.found for name in attributes if name[:2] == "on"]
    assert handlers == []
    assert "\u202e" not in text
    assert text.count("&lt;script&gt;alert(1)") == 6
    # The six: the name twice, the recipe, the event, its device, and the report of lost ranks.


def test_the_policy_allows_the_own_script_and_style_alone(tmp_path: Path) -> None:
    text = page.render([subject_of(make_run(tmp_path / "run"))], None)
    (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ")
    (script,) = re.findall("<script>(.*)</script>", text, re.DOTALL)
    (style,) = re.findall("<style>(.*)</style>", text, re.DOTALL)
    assert f"script-src {page._digest(script)};" in policy
    assert f"style-src {page._digest(style)};" in policy
    # Styles of single elements would need a looser policy, and addresses would need a network.
    assert not [attributes for _, attributes in Elements(text).found if "style" in attributes]
    addresses = set(re.findall(r"https?://[^\"\s<]*", text))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_the_page_shows_what_happened(tmp_path: Path) -> None:
    text = page.render([subject_of(make_run(tmp_path / "run"))], None)
    for words in (
        "40 of 250",
        "163,840",  # tokens seen
        COUNTED_TOKENS,
        "the loss 9 is above 3; its batch is left out",
        "from a checkpoint of step 10",
        "1 checkpoints, the last after step 10",
        "8 ranks = pp 2 x dp_shard 2 x tp 2",
        "1F1B: P = 2 ranks",
        "Predicted as composer3d plan does, for CPU.",
        "node 0, process 7",
        "forward + backward = host + NIC.",
    ):
        assert words in text, words
    assert text.count('class="mark start"') == text.count('class="mark bad"') == 6


def test_steps_and_order_do_not_come_from_clocks_or_logged_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    slow = [
        # The clock of the machine that goes on is a year behind.
        Event(33, 1.6e9, "bad steps", "of the second start"),
        Event(34, 1.6e9, "lost ranks", "lost-ranks-20200101T000000Z_17.txt"),
        Event(30, 1.5e9, "start", "8 ranks on cpu, again", "cpu"),
        Event(47, 1.4e9, "stop", "stopped by signal 15"),
    ]
    with (run / events.FILE).open("ab") as file:
        file.writelines(map(events.line, slow))
    for number in range(1, 19):
        # Clocks go back from one failure to the next.
        (run / f"lost-ranks-{2040 - number}0101T000000Z_{number}.txt").write_text(f"n {number}")
    found = folder.read(str(run))
    assert [event.text for event in found.events[-4:]] == [event.text for event in slow]
    assert found.steps_done == 47  # the last line of metrics is of step 40
    assert [lost.text for lost in found.lost_ranks] == [f"n {n}" for n in range(14, 19)]
    assert found.hidden_lost_ranks == 13
    text = page.render([subject_of(run)], None)
    assert "47 of 250" in text
    assert "18 reports of lost ranks; the newest 5 follow" in text

    # A start goes back to a checkpoint, and ends before it logs a step.
    with (run / events.FILE).open("ab") as file:
        file.write(events.line(Event(45, 1.3e9, "start", "8 ranks on cpu, once more", "cpu")))
    assert folder.read(str(run)).steps_done == 45


def test_a_gpu_has_a_prediction(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", device="NVIDIA H100 80GB HBM3")
    found = subject_of(run)
    assert found.forecast.tokens_per_s is not None
    text = page.render([found], None)
    assert "for H100-80GB SXM" in text
    assert text.count('class="level"') == 2
    assert "measured / predicted" in text


def start(run: Path, step: int, device: str) -> None:
    with (run / events.FILE).open("ab") as file:
        file.write(events.line(Event(step, 1.8e9, "start", f"8 ranks on {device}", device)))


@pytest.mark.parametrize("changed", ["recipe", "device"])
def test_speed_and_memory_are_those_of_the_present_recipe_and_device(
    tmp_path: Path, changed: str
) -> None:
    """A run of 40 steps was twice as fast, and had twice the memory, in its first 20."""
    run = make_run(tmp_path / "run")
    rows = [metrics_of(step) for step in range(1, 41)]
    for row in rows[:20]:
        row.update(tokens_per_s=2000.0, memory_gib=1.0, mfu=0.4)
    for row in rows[20:]:
        row.update(tokens_per_s=1000.0, mfu=0.2)
    write_rows(run, rows)
    found = folder.read(str(run))
    assert (found.tokens_per_s, found.memory_gib) == (1500.0, 1.0)
    assert found.mfu == pytest.approx(0.3)
    assert found.since == 0
    if changed == "recipe":
        (run / "recipe-00000020.toml").touch()
    device = "cpu" if changed == "recipe" else "x"
    start(run, 20, device)
    found = folder.read(str(run))
    assert (found.tokens_per_s, found.mfu, found.memory_gib) == (1000.0, 0.2, 0.5)
    assert found.since == 20
    numbers = page.final_numbers(found)
    assert numbers["tokens/s, median"] == "1,000 (since step 20)"
    assert numbers["peak memory, GiB"] == "0.50 (since step 20)"
    write_rows(run, rows[:20])
    assert "tokens/s, median" not in page.final_numbers(folder.read(str(run)))

    # It goes back to an older checkpoint, and trains the same steps again.
    start(run, 10, device)
    write_rows(run, rows[:15])
    found = folder.read(str(run))
    assert (found.since, found.tokens_per_s) == (10, 2000.0)


def test_a_change_near_the_end_of_a_long_run_leaves_all_values_since(tmp_path: Path) -> None:
    """Eight steps in a row share the points of the curves."""
    run = make_run(tmp_path / "run")
    rows = [metrics_of(step) for step in range(1, 1001)]
    for row in rows[995:]:
        row.update(tokens_per_s=2000.0, memory_gib=0.7)
    rows[-1].update(tokens_per_s=3000.0, memory_gib=0.6)
    write_rows(run, rows)
    (run / "recipe-00000995.toml").touch()
    start(run, 995, "cpu")
    found = folder.read(str(run))
    assert (found.tokens_per_s, found.memory_gib) == (2000.0, 0.7)


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 30_001):
            file.write(json.dumps(metrics_of(step)) + "\n")
    with (run / events.FILE).open("wb") as file:
        for start in range(10):
            file.write(events.line(Event(start, 1e9, "start", "8 ranks on cpu", "cpu")))
        for step in range(2_000):
            file.write(events.line(Event(step, 1e9, "ranks", "straggler: rank 1")))
            file.write(events.line(Event(step, 1e9, "save", "checkpoint", None, 1.0)))
    subject = subject_of(run)
    text = page.render([subject], None)
    assert len(text) < 600_000
    assert "1,710 older events are left out" in text
    assert "2,000 checkpoints" in text
    assert page.final_numbers(subject.run)["starts of the job"] == "10"


def test_a_run_without_lines_has_no_blank_panel(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_rows(run, [])
    text = page.render([subject_of(run)], None)
    assert "<figure" not in text
    assert "No line of the metrics has: loss, speed, gradient norm" in text


def test_an_older_run_shows_its_ledger(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / events.FILE).unlink()
    entry = {"step": 7, "action": "skip", "first": 7, "reason": "the loss nan is not finite"}
    (run / "bad_steps.jsonl").write_text(json.dumps(entry) + "\nwrong\n")
    (run / "recipe-00000020.toml").touch()
    write_rows(run, [{"step": 9, "straggler_rank": 3, "straggler_factor": 2.0}])
    found = folder.read(str(run))
    assert [(event.step, event.kind) for event in found.events] == [
        (7, "bad steps"),
        (9, "ranks"),
        (20, "recipe"),
    ]
    assert found.problems == ["1 lines of bad_steps.jsonl are wrong, and left out"]


def test_code_that_a_recipe_names_is_not_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    recipe = (run / "recipe.toml").read_text()
    name = "this_module_must_not_be_imported"
    (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    sys.path.insert(0, str(tmp_path))
    try:
        hostile = re.sub('architecture = "llama"', f'architecture = "{name}:X"', recipe)
        assert hostile != recipe
        (run / "recipe.toml").write_text(hostile)
        found = subject_of(run)
    finally:
        sys.path.remove(str(tmp_path))
    assert found.run.recipe is None
    assert [picture.svg for picture in found.pictures] == ["", ""]
    text = page.render([found], None)
    assert "whose code a report does not run" in text
    assert "<figure" in text  # the curves are there all the same


def test_files_that_a_recipe_names_are_not_opened(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it would be refused, or wait
    recipe = (run / "recipe.toml").read_text()
    recipe = f'base = "{pipe}"\n' + recipe.replace("# hf is absent", f'hf = "{pipe}" #')
    recipe = recipe.replace("# schedule_csv is absent", f'schedule_csv = "{pipe}" #')
    recipe = recipe.replace('schedule = "1F1B"', 'schedule = "csv" #')
    (run / "recipe.toml").write_text(recipe)
    found = subject_of(run)
    assert found.run.recipe is not None
    assert found.run.recipe.model.hf is None
    assert "which a report does not open" in found.pictures[1].note


def test_no_link_brings_another_file_into_the_page(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("a secret\n")
    run = make_run(tmp_path / "run")
    for name in ("recipe.toml", "lost-ranks-20260101T000000Z.txt", events.FILE, "metrics.jsonl"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
    found = subject_of(run)
    assert found.run.recipe_problem.startswith("recipe.toml cannot be read")
    assert "a secret" not in page.render([found], None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not toml", "recipe.toml cannot be used"),
        ("[mesh]\npp = 'x'\n", "recipe.toml cannot be used"),
        ("a = " + "[" * 5_000, "recipe.toml cannot be used"),
        ("x" * (300 << 10), "recipe.toml cannot be read"),
        ("[mesh]\nwhen = 2020-01-01\n", "recipe.toml cannot be used"),
    ],
)
def test_a_wrong_recipe_leaves_the_curves(text: str, problem: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "recipe.toml").write_text(text)
    found = subject_of(run)
    assert found.run.problems[0].startswith(problem)
    assert "<figure" in page.render([found], None)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run: it has neither"):
        folder.read(str(tmp_path))
    with pytest.raises(UserError, match="there is no such folder"):
        folder.read(str(tmp_path / "none"))
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
        folder.read(str(tmp_path))
