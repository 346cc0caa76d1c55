"""``composer3d plan``: ranked layouts, memory, a written recipe, and errors."""

import json
import re
from collections import Counter
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest

from composer3d import cli
from composer3d.commands import plan as plan_command
from composer3d.commands.plan import scale_line
from composer3d.facts import hardware
from composer3d.planner import levers, predict, search
from composer3d.planner.search import Device, ScalePoint, price, scaling
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import variant
from composer3d.runtime.progress import Progress
from tests.commands.conftest import Ask
from tools.prove.paths import ROOT

RECIPE = "llama3-8b-8-fsdp"
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
CLUSTER_RECIPES = [
    path for path in RECIPES if load(path, check_files=False).recipe.run.device == "cuda"
]
TOO_LARGE = ("data.micro_batch=4",)
KEYS = {
    "pp", "virtual_stages", "dp_replicate", "dp_shard", "cp", "tp", "ep", "micro_batch", "schedule",
    "activation_checkpoint", "step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_gib", "fits",
    "bound_by", "step_time_s_80", "tokens_per_s_per_gpu_80", "mfu_80", "peak_gib_80",
    "fits_probability",
}  # fmt: skip


def test_layouts_are_ranked_and_the_fastest_is_written_as_a_recipe(
    ask: Ask, capsys: pytest.CaptureFixture[str], tmp_path: Path, predictions: Counter[str]
) -> None:
    out = tmp_path / "fastest.toml"
    command = [RECIPE, "--gpus", "16", "--gpu", "H100", "--top", "5", "--write", str(out)]
    status, answer = ask("plan", *command)
    assert status == 0
    found = answer["layouts"]
    assert len(found) == 5
    assert found[0].keys() >= KEYS
    speeds = [layout["tokens_per_s_per_gpu"] for layout in found]
    assert speeds == sorted(speeds, reverse=True)
    for layout in found:
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert prod(layout[axis] for axis in axes) == 16
        assert layout["fits"]
        assert 0.2 < layout["mfu"] < 0.7
        for key in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_gib"):
            low, high = layout[f"{key}_80"]
            assert 0.8 < low / layout[key] < 0.98
            assert 1.02 < high / layout[key] < 1.25
        assert layout["fits_probability"] > 0.5
    assert 0 < answer["first_is_close_probability"] <= 1
    check_predictions(answer, predictions)

    recipe = load(str(out), world_size=16).recipe
    assert recipe.mesh.tp == found[0]["tp"]
    assert recipe.mesh.dp_shard == found[0]["dp_shard"]
    assert recipe.memory.activation_checkpoint == found[0]["activation_checkpoint"]
    text = out.read_text()
    assert "# composer3d plan" in text
    # A file of the user's is never overwritten.
    assert cli.main(["plan", "quickstart", "--write", str(out)]) == 2
    assert "cannot be made" in capsys.readouterr().err
    assert out.read_text() == text


def test_how_close_the_first_layout_is_does_not_depend_on_how_many_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has what is printed for three. It is of torch 2.13."""
    monkeypatch.setattr(predict, "is_since_2_15", lambda: False)
    command = ["plan", RECIPE, "--gpus", "8", "--gpu", "H100", "--top"]
    found = []
    for top in ("1", "3"):
        assert cli.main([*command, top]) == 0
        found.append(capsys.readouterr().out.partition("why:")[0])
    one, three = (text.splitlines() for text in found)
    assert (one[0], one[-1]) == (three[0], three[-1])
    assert f"```text\n{found[1]}```" in (ROOT / "docs" / "plan.md").read_text()


def test_memory_of_the_recipe_as_it_is(ask: Ask) -> None:
    status, answer = ask("plan", "llama-175b-1024-3d", "--memory", "--gpu", "A100-80GB")
    assert status == (0 if answer["fits"] else 1)
    assert len(answer["ranks"]) == 8
    totals = [sum(rank.values()) for rank in answer["ranks"]]
    assert totals[answer["largest_rank"]] == max(totals)
    # Stages of the end hold fewer micro-batches than those of the beginning.
    assert answer["ranks"][0]["activations"] > answer["ranks"][6]["activations"]


@pytest.mark.parametrize(
    ("path", "sets"),
    [*((path, ()) for path in RECIPES), (ROOT / "recipes" / f"{RECIPE}.toml", TOO_LARGE)],
    ids=lambda value: getattr(value, "stem", None),
)
def test_the_memory_that_is_shown_decides_whether_a_recipe_fits(
    path: Path, sets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(path), "--memory", *(word for one in sets for word in ("--set", one))]
    status = cli.main(command)
    text = capsys.readouterr().out
    heads, *rows = [line for line in text.splitlines() if line.startswith(("GiB ", "pp rank"))]
    column = heads.split().index("needed") - len(heads.split())
    needed = [float(row.split()[column]) for row in rows]
    for row, sum_of_row in zip(rows, needed, strict=True):
        kinds = [float(cell) for cell in row.split()[3:column]]
        assert sum(kinds) == pytest.approx(sum_of_row, abs=0.05 * (len(kinds) + 1))
    found = re.search(r"fits? (\d+) GiB .* most, ([\d.]+) GiB \(80%: ([\d.]+)-([\d.]+)\)", text)
    assert found is not None
    limit, peak, low, high = map(float, found.groups())
    assert max(needed) == peak
    assert low <= peak <= high
    assert (peak <= limit) == (status == 0)


def test_a_rank_on_a_cpu_has_no_context_and_its_figures_have_digits(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    on_cpu = ["quickstart", "--gpu", "CPU"]
    _, answer = ask("plan", *on_cpu, "--memory")
    for rank, needed_gib in zip(answer["ranks"], answer["needed_gib"], strict=True):
        assert rank["slack"] == rank["context"] == 0
        assert sum(rank.values()) == pytest.approx(needed_gib)
    peak = f"{answer['peak_gib']:.4f}"
    assert 0 < float(peak) < 1

    assert cli.main(["plan", *on_cpu, "--memory"]) == 0
    text = capsys.readouterr().out
    assert "CUDA" not in text
    assert "(context)" not in text
    row = next(line for line in text.splitlines() if line.startswith("pp rank 0"))
    assert row.split()[-1] == peak
    assert f"needs most, {peak} GiB (80%: 0.0" in text

    assert cli.main(["plan", *on_cpu, "--top", "1", "--why", "recipe"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"\n  needed +0\.\d{{4}} +{peak} ", text)
    assert re.search(r"it needs 0\.\d{4} of 16 GiB", text)

    # What CUDA takes hides no digits of a small model on a GPU.
    assert cli.main(["plan", "quickstart", "--memory"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("pp rank"))
    assert float(row.split()[3]) > 0


def test_recipes_say_the_memory_that_is_needed(ask: Ask) -> None:
    path = ROOT / "recipes" / f"{RECIPE}.toml"
    gib = []
    for zero in ("2", "3"):
        _, answer = ask("plan", str(path), "--memory", "--set", f"parallel.zero={zero}")
        gib.append(answer["peak_gib"])
    words = "with zero = 2, it needs {:.0f} GiB in place of {:.0f}"
    assert words.format(*gib) in path.read_text()


@pytest.mark.parametrize("path", CLUSTER_RECIPES, ids=lambda path: path.stem)
def test_the_recipes_for_clusters_fit(path: Path, ask: Ask) -> None:
    """A fragmented allocator, or a prediction that is too low, needs 8% to spare."""
    status, answer = ask("plan", str(path), "--memory", "--gpu", "H100")
    largest = answer["ranks"][answer["largest_rank"]]
    assert status == 0, f"{largest} of {answer['memory_gib']} GiB"
    assert sum(largest.values()) <= 0.92 * answer["memory_gib"], largest


@pytest.mark.parametrize(("gpu", "is_fitted"), [("H100", True), ("B200", False), ("CPU", False)])
def test_a_device_of_which_no_run_was_fitted_is_said(
    gpu: str, is_fitted: bool, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    status, answer = ask("plan", "quickstart", "--gpu", gpu, "--top", "1")
    assert status == 0
    assert answer["gpu_is_fitted"] == is_fitted
    assert cli.main(["plan", "quickstart", "--gpu", gpu, "--top", "1"]) == 0
    assert ("few or no training runs on it" in capsys.readouterr().out) != is_fitted


def test_a_part_that_trains_is_said_and_needs_less(capsys: pytest.CaptureFixture[str]) -> None:
    def memory(*sets: str) -> tuple[str, float]:
        overrides = [word for one in sets for word in ("--set", one)]
        command = ["plan", "llama3-8b-8-fsdp", "--memory", *overrides]
        assert cli.main(command) in (0, 1)
        text = capsys.readouterr().out
        assert cli.main([*command, "--json"]) in (0, 1)
        return text, json.loads(capsys.readouterr().out)["ranks"][0]["optimizer"]

    text, of_all = memory()
    assert "optim.train" not in text
    text, of_some = memory('optim.train=["blocks.*.attn.*"]')
    assert text.startswith("optim.train: gradients and the state of the optimizer are those of")
    assert 0.1 * of_all < of_some < 0.3 * of_all


def test_that_packed_documents_are_priced_as_whole_samples_is_said_where_times_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = 'data.packing = "documents": times, tokens/s and MFU are those of attention over whole'
    packed = ["--set", "data.packing=documents"]
    for more, is_said in (
        (["--top", "1"], False),
        (["--top", "1", *packed], True),
        (["--memory", *packed], False),
        (["--memory", "--goodput", "9", *packed], True),
    ):
        assert cli.main(["plan", "quickstart", *more]) == 0
        assert (words in capsys.readouterr().out) == is_said


def test_the_table_of_scale_says_why_and_has_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: dict[str, set[str]] = {}

    class Recorder(Progress):
        def advance(self, amount: int = 1, note: str = "") -> None:
            notes.setdefault(self._what, set()).add(note)

    monkeypatch.setattr(plan_command, "Progress", Recorder)
    assert cli.main(["plan", "quickstart", "--gpus", "8", "--scale"]) == 0
    text = capsys.readouterr().out
    assert "legal layouts on 8 x H100-80GB SXM" in text
    assert "the first layout is within 3% of the best with a probability of" in text
    assert "80%: four of five measured values are expected in it" in text
    assert "bound by" in text
    assert "the fastest layout as devices grow" in text
    whats = ("memory", "time", "further keys")
    assert notes["plan"] == {f"{what} of each layout" for what in whats}
    assert "memory on 2,048 devices, of each layout" in notes["plan --scale"]


# The command of docs/plan.md whose table this file checks.
QUOTED = "composer3d plan llama-175b-1024-3d --gpus 1024 --gpu A100-80GB --scale"


def test_the_table_of_the_page_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes half a minute, so each row is priced again in the layout that it names.

    The page is of torch 2.13.
    """
    monkeypatch.setattr(predict, "is_since_2_15", lambda: False)
    page = (ROOT / "docs" / "plan.md").read_text()
    assert f"\n{QUOTED}\n" in page
    _, _, rest = page.partition("\ndevices  samples ")
    rows = rest.partition("\nefficiency: ")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["8", "64", "512", "2,048"]

    recipe = load(ROOT / "recipes" / "llama-175b-1024-3d.toml", check_files=False).recipe
    row_of_device = hardware.by_name("A100-80GB")
    assert row_of_device is not None
    device = Device(hardware=row_of_device)
    (small,) = scaling(recipe, device, [8])
    assert scale_line(small) == rows[0]
    base = None
    for row in rows[1:]:
        priced = price(recipe_of_row(recipe, row), device)
        assert priced.prediction.fits
        base = base or priced.prediction.tokens_s
        efficiency = priced.prediction.tokens_s / base
        assert scale_line(ScalePoint(priced.recipe.world_size, priced, efficiency)) == row


def recipe_of_row(recipe: Recipe, row: str) -> Recipe:
    """The recipe that a row of the table of ``--scale`` describes."""
    cells = row.replace(" x ", " ").replace(",", "").split()
    names = (
        "data.global_batch", "mesh.tp", "mesh.pp", "parallel.virtual_stages", "mesh.dp_replicate",
        "mesh.dp_shard", "mesh.cp", "mesh.ep", "parallel.zero", "data.micro_batch",
    )  # fmt: skip
    values: dict[str, Any] = dict(zip(names, map(int, cells[1:11]), strict=True))
    values["parallel.schedule"], values["memory.activation_checkpoint"] = cells[11:13]
    return variant(recipe, values)


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each prediction of the planner was asked for."""
    calls: Counter[str] = Counter()
    names = ("predict", "predict_speed", "memory_of_ranks")
    for module, name in (*((search, name) for name in names), (levers, "predict_speed")):
        right = getattr(module, name)
        key = name if module is search else "of a lever"

        def counted(*given: Any, key: str = key, right: Any = right) -> Any:
            calls[key] += 1
            return right(*given)

        monkeypatch.setattr(module, name, counted)
    return calls


def check_predictions(answer: dict[str, Any], predictions: Counter[str]) -> None:
    """The memory of each layout is predicted once, and the time of those that fit, up to a limit.

    Only those that are shown are predicted as a whole. A plan answers soon because of that. How
    soon depends on the machine.
    """
    assert answer["legal"] > 100
    assert predictions["memory_of_ranks"] == answer["legal"]
    assert predictions["predict_speed"] <= search._MOST_TIMED + search._MOST_NEAR
    assert predictions["predict"] == len(answer["layouts"])
    # Of 32 families at most, and of cuts.
    of_stages = levers._MOST_IN_PARTS * len(levers._PARTS_OF_STAGES) * 2
    assert predictions["of a lever"] <= 32 * (5 * 3 + 3) + 2 * answer["fitting"] + of_stages
    assert answer["fitting"] <= answer["legal"]


def test_a_plan_of_a_large_job_predicts_no_layout_twice(
    ask: Ask, predictions: Counter[str]
) -> None:
    command = ("llama3-405b-16384-3d", "--gpus", "16384", "--gpu", "H100")
    status, answer = ask("plan", *command)
    assert status == 0
    check_predictions(answer, predictions)


def test_a_device_of_the_user_on_which_all_fit_or_none(
    ask: Ask, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = tmp_path / "mine.toml"
    row.write_text(
        'name = "Mine"\nmemory_gib = 96\nmemory_gb_s = 4000\nnvlink_gb_s = 450\nnic_gbit = 400\n'
        'generation = "hopper"\n[peak_tflops]\nbfloat16 = 990\nfloat32 = 67\n'
    )
    status, answer = ask("plan", "quickstart", "--gpu", str(row), "--top", "1")
    assert status == 0
    assert answer["gpu"] == "Mine"
    row.write_text(row.read_text().replace("memory_gib = 96", "memory_gib = 0.001"))
    status, answer = ask("plan", "quickstart", "--gpu", str(row), "--top", "1")
    assert (status, answer["fitting"]) == (1, 0)
    assert not answer["layouts"][0]["fits"]
    assert cli.main(["plan", "quickstart", "--gpu", str(row), "--goodput", "10"]) == 1
    assert "goodput: no layout fits" in capsys.readouterr().out
    row.write_text('name = "Mine"\nmemory_gib = -1\nspeed = 3\n')
    assert cli.main(["plan", RECIPE, "--gpu", str(row)]) == 2
    error = capsys.readouterr().err
    assert "the key 'memory_gb_s' is missing" in error
    assert "unknown key 'speed'" in error


def test_a_run_calibrates_the_plans_of_its_machine(
    ask: Ask, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A slow run moves predictions down, and a row keeps that; a second one moves them further."""
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    plan = ("plan", "quickstart", "--gpu")
    _, before = ask(*plan, "H100")
    recipe = load(ROOT / "recipes" / "quickstart.toml", check_files=False).recipe
    row = hardware.by_name("H100")
    assert row is not None
    tokens_s = price(recipe, Device(hardware=row)).prediction.tokens_s
    speed = f"{0.8 * tokens_s * recipe.world_size:.1f}"
    _, once = ask(*plan, "H100", "--calibrate", speed, "--keep", str(first))
    _, kept = ask(*plan, str(first))
    _, twice = ask(*plan, str(first), "--calibrate", speed, "--keep", str(second))
    _, again = ask(*plan, str(second))
    assert kept["layouts"] == once["layouts"]
    assert again["layouts"] == twice["layouts"]
    speeds = [one["layouts"][0]["tokens_per_s_per_gpu"] for one in (before, once, twice)]
    assert speeds == sorted(speeds, reverse=True)
    widths = [
        high / low
        for low, high in (
            one["layouts"][0]["tokens_per_s_per_gpu_80"] for one in (before, once, twice)
        )
    ]
    assert widths == sorted(widths, reverse=True)
    said = once["calibration"]
    # Almost all of this step is the host's, which is unsure: the run is believed.
    assert said["now_tokens_per_s"] == pytest.approx(said["measured_tokens_per_s"], rel=0.02)

    text = first.read_text()
    for wrong, message in (
        (("--calibrate", "-1"), "above 0"),
        (("--calibrate", "nan"), "above 0"),
        (("--calibrate", "1e9"), "of all devices together"),
        (("--calibrate", speed, "--set", "optim.train=['blocks.*']"), "optim.train leaves"),
        (("--calibrate", speed, "--set", "data.packing=documents"), "stays within documents"),
        (("--keep", str(second)), "give both"),
        (("--calibrate", speed, "--keep", str(first)), "cannot be made"),
    ):
        assert cli.main([*plan, "H100", *wrong]) == 2
        assert message in capsys.readouterr().err
    assert first.read_text() == text


def test_goodput_of_the_first_layout_and_of_the_recipe_as_it_is(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--top", "2"], ["--memory"]):
        status, answer = ask("plan", RECIPE, "--goodput", "published", *words)
        found = answer["goodput"]
        assert status == 0
        assert found["mttf_hours"] == pytest.approx(16_384 * 54 * 24 / 419 / 8)
        assert "2407.21783" in found["mttf_source"]
        assert found["storage_gb_s"] == pytest.approx(2000 / 16_384 * 8)
        assert found["best"]["trains"] >= found["own"]["trains"] > 0.5
        assert found["longest"]["every"] >= found["best"]["every"]
    # A better storage and a worse job: what the user says counts.
    sets = ["--set", "checkpoint.async_save=true", "--set", "run.timeout_minutes=30"]
    values = ["--goodput", "12", "--storage", "20", "--restart", "4"]
    status, found = ask("plan", RECIPE, "--memory", *values, *sets)
    found = found["goodput"]
    assert (found["mttf_hours"], found["mttf_source"], found["storage_gb_s"]) == (12, None, 20)
    assert found["restart_s"] == pytest.approx(240 + found["load_s"])
    assert found["save_writes_s"] == pytest.approx(found["checkpoint_gb"] / 20)
    lost = found["best"]["trains"] - found["best_if_ranks_hang"]
    assert lost == pytest.approx((1800 - found["notice_s"]) / (12 * 3600), rel=0.1)
    assert cli.main(["plan", RECIPE, "--memory", *values, *sets]) == 0
    text = capsys.readouterr().out
    assert f"{found['best']['trains']:.1%} of the time trains with checkpoint.every = " in text
    assert "a failure after 12.0 h on average\n" in text
    assert "if ranks hang instead, for run.timeout_minutes = 30: " in text


def test_that_a_run_is_too_short_for_a_better_interval_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "\n  1,000 is run.steps: a longer run may do better"
    # With a failure after 15 h, a save at the end alone is only little worse than the best one.
    for hours, is_said in (("10000", True), ("15", False), ("1", False)):
        assert cli.main(["plan", RECIPE, "--memory", "--goodput", hours]) == 0
        assert (words in capsys.readouterr().out) == is_said


def test_the_goodput_of_the_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--memory", "--gpu", "H100", "--goodput", "published"]
    assert cli.main(["plan", "llama3-405b-16384-3d", *words]) == 0
    text = capsys.readouterr().out.partition("goodput of this layout")[2]
    assert f"\ngoodput of this layout{text}```" in (ROOT / "docs" / "plan.md").read_text()


@pytest.mark.parametrize(
    ("page", "sentence", "recipe", "sets"),
    [
        ("performance", "`composer3d plan` predicts {:.0%} more", "llama3-8b-8-float8", []),
        ("performance", "it predicts {:.1%} more tokens", RECIPE, ["precision.reduce=bfloat16"]),
        ("axis-dp", "{:.1%} fewer tokens per second with 4", RECIPE, ["parallel.fsdp_blocks=4"]),
    ],
)
def test_pages_have_the_speeds_that_are_predicted(
    page: str, sentence: str, recipe: str, sets: list[str]
) -> None:
    """Each sentence compares a layout on H100 with the one of ``RECIPE``."""
    row = hardware.by_name("H100")
    assert row is not None
    device = Device(hardware=row)
    before, after = (
        price(load(path, overrides, check_files=False).recipe, device).prediction.tokens_s
        for path, overrides in (
            (ROOT / "recipes" / f"{RECIPE}.toml", []),
            (ROOT / "recipes" / f"{recipe}.toml", sets),
        )
    )
    assert sentence.format(abs(after / before - 1)) in words_of(page)


def test_the_memory_of_muon_on_the_page_is_what_the_command_says(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is of torch 2.13."""
    monkeypatch.setattr(predict, "is_since_2_15", lambda: False)
    gib = []
    for recipe in (RECIPE, "llama3-8b-8-muon", "qwen3-30b-a3b-16-ep-pp", "qwen3-30b-a3b-16-muon"):
        _, answer = ask("plan", recipe, "--memory", "--gpu", "H100")
        gib.append(answer["peak_gib"])
    sentence = (
        "{:.1f} GiB become {:.1f} on each GPU for the first, "
        "{:.1f} become {:.1f} on the GPUs that need most for the second."
    )
    assert sentence.format(*gib) in words_of("optimizers")


def words_of(page: str) -> str:
    """The text of a page, in one line."""
    return " ".join((ROOT / "docs" / f"{page}.md").read_text().split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goodput", "often"], "--goodput often: give the hours between two failures"),
        (["--goodput", "0"], "--goodput 0: give the hours"),
        (["--goodput", "nan"], "--goodput nan: give the hours"),
        (["--goodput", "inf"], "--goodput inf: give the hours"),
        (["--goodput", "3", "--storage", "-1"], "--storage -1: give a number from"),
        (["--goodput", "3", "--restart", "nan"], "--restart nan: give a number from"),
        (["--storage", "3"], "--storage has no effect without --goodput; give both"),
        (["--goodput", "published", "--gpu", "CPU"], "nobody published failures of CPU"),
        (["--memory", "--why", "1"], "--why has no effect with --memory; leave it out"),
        (["--memory", "--write", "x.toml"], "--write has no effect with --memory"),
        (["--memory", "--scale"], "--scale has no effect with --memory"),
        (["--memory", "--calibrate", "7"], "--calibrate has no effect with --memory"),
        (["--memory", "--gpus-per-node", "4"], "--gpus-per-node has no effect with --memory"),
        (["--memory", "--gpus", "512"], "--memory prices the recipe as it is, on"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    most = [] if "--memory" in words else ["--top", "1"]
    assert cli.main(["plan", "quickstart", *most, *words]) == 2
    assert message in capsys.readouterr().err


def test_options_that_count_with_memory_after_all(ask: Ask, tmp_path: Path) -> None:
    """Times decide the goodput, and what --keep remembers."""
    command = ("plan", "llama-175b-1024-3d", "--memory", "--gpu", "A100-80GB")
    nodes, measured = ("--gpus-per-node", "4"), ("--calibrate", "9e4")
    answers = [ask(*command, "--goodput", "3", *more)[1] for more in ((), nodes, measured)]
    shares = [answer["goodput"]["own"] for answer in answers]
    assert all(one != other for one, other in combinations(shares, 2))
    files = [tmp_path / "eight.toml", tmp_path / "four.toml"]
    for file, more in zip(files, ((), nodes), strict=True):
        ask(*command, *measured, "--keep", str(file), *more)
    assert files[0].read_text() != files[1].read_text()


def test_an_unknown_device_lists_those_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", RECIPE, "--gpu", "abacus"]) == 2
    error = capsys.readouterr().err
    assert "abacus: unknown device" in error
    assert "MI300X" in error


def test_why_compares_the_first_layout_with_another_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a row of the table, with overrides, and with the recipe, some of which do not fit."""
    plan = ("plan", RECIPE, "--top", "3", "--why")
    for layout, fits in (
        ("3", True),
        ("recipe", True),
        ("data.micro_batch=4", False),
    ):
        assert cli.main([*plan, layout, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        why = answer["why"]
        assert why["fits"] == [True, fits]
        seconds = why["step_time_s"]
        assert seconds[0] == answer["layouts"][0]["step_time_s"]
        assert (seconds[1] == answer["layouts"][2]["step_time_s"]) == (layout == "3")
        assert seconds[1] - seconds[0] == why["more_s"]
    assert cli.main([*plan, layout]) == 0
    text = capsys.readouterr().out
    assert "B: the recipe with data.micro_batch=4\n" in text
    assert "B does not fit: pipeline rank 0 needs" in text
    assert f"what decides is {why['decisive']}" in text

    for layout, message in (
        ("4", "the table has the rows 1 to 3"),
        ("mesh.tp=3", "mesh.tp = 3 must divide model.n_heads = 32"),
        ("mesh.tp=2", "but the world has 8"),
        ("model.dim=64", "give others with --set"),
        ("fast", "give others with --set"),
        (" ", "give others with --set"),
        ("mesh.tp=2 mesh.nope=1", "--why mesh.tp=2 mesh.nope=1: "),
    ):
        assert cli.main([*plan, layout]) == 2
        assert message in capsys.readouterr().err


def test_the_rows_of_why_add_up_to_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Here the pipeline rank that decides computes less than the mean: a row is negative."""
    layout = (
        "mesh.pp=4 mesh.dp_shard=2 parallel.zero=1 data.micro_batch=1 "
        'memory.activation_checkpoint="full in the first 1 stages"'
    )
    assert cli.main(["plan", RECIPE, "--top", "1", "--why", layout]) == 0
    table = capsys.readouterr().out.partition("ms of a step")[2].partition("GiB of")[0]
    rows = {line[:34].strip(): line[34:].replace(",", "").split() for line in table.splitlines()}
    steps = rows.pop("step")
    rows.pop("")
    assert float(rows["uneven stages"][1]) < -1
    for column, step_ms in enumerate(steps):
        printed = sum(float(cells[column]) for cells in rows.values())
        assert printed == pytest.approx(float(step_ms), abs=0.05 * (len(rows) + 1))


def test_a_cut_of_stages_by_time_is_shown_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "fastest.toml"
    sets = ("--set", "data.global_batch=16")
    command = ["plan", "deepseek-v2-lite-16", *sets, "--top", "2", "--write", str(out)]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    (words,) = re.findall(r"\n      with (parallel.stages=\S+)\n", text)
    assert "its stages are cut by predicted time" in text

    recipe = load(str(out)).recipe
    assert words == f"parallel.stages={list(recipe.parallel.stages or ())}".replace(" ", "")
    assert "# composer3d plan" in out.read_text().partition("\nstages = ")[2].splitlines()[0]
    # The words are an override.
    mesh = f"mesh.pp={recipe.mesh.pp} mesh.dp_shard=-1 parallel.virtual_stages=4"
    assert cli.main([*command[:-2], "--json", "--why", f"{mesh} {words}"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layouts"][0]["stages"] == list(recipe.parallel.stages or ())
    assert answer["layouts"][1]["stages"] is None
    assert answer["why"]["fits"] == [True, True]
