"""``composer3d report``: write one page about runs. It answers without torch."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from composer3d.commands.arguments import argument, gpus_per_node_option, json_option
from composer3d.commands.layout import mesh_words, note_of
from composer3d.commands.plan import find_device
from composer3d.commands.timeline import MOST_ACTIONS, count_actions, draw_recipe, page_of_run
from composer3d.draw import layout_svg, timeline
from composer3d.draw.layout import make_layout
from composer3d.facts import hardware, trace
from composer3d.facts.errors import UserError
from composer3d.facts.remote import RemotePath, is_url
from composer3d.facts.tags import COUNTED_TOKENS
from composer3d.facts.text import one_line, printable
from composer3d.models.registry import architecture
from composer3d.planner.calibrate import problem_of
from composer3d.planner.caveats import caveats
from composer3d.planner.memory import GIB
from composer3d.planner.search import Device, price
from composer3d.recipe.changes import shown, values_of
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import FIELDS
from composer3d.report import folder, page
from composer3d.report.folder import RunFolder
from composer3d.report.page import Drawing, Forecast, KeyDifference, Subject
from composer3d.runtime import run_files
from composer3d.runtime.files import replace_own

# Of a pipeline, so that a recipe of somebody else takes seconds: stages whose speed is predicted,
# and actions whose traffic the drawing of the layout counts.
_MOST_STAGES = 256
_MOST_COUNTED = 2_000_000

EXAMPLES = (
    "composer3d report runs/quickstart",
    "composer3d report runs/a runs/b runs/c -o compare.html",
)
DETAILS = f"It says tokens/s and the tokens seen. {COUNTED_TOKENS}"


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    as_json: bool = json_option()
    runs: Sequence[str] = argument(
        metavar="RUN",
        nargs="+",
        help="the folder of a run, on a disk or the URL of one in an object store (run.sync); "
        "several are compared",
    )
    out: str | None = argument(
        "-o",
        "--out",
        metavar="FILE.html",
        help="default: in the folder of the first run (of a URL: here), report.html, "
        "compare-NAME.html with the name of a second run, or compare-N-runs.html",
    )
    gpu: str | None = argument(
        "--gpu",
        metavar="NAME|FILE",
        help="the device whose speed is predicted, as in plan; default: that of the run",
    )
    gpus_per_node: int = gpus_per_node_option()


class WrittenReport(NamedTuple):
    """A page that was written.

    Attributes:
        path: its file.
        subjects: the runs, in their order.
    """

    path: Path
    subjects: list[Subject]

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        runs = [_as_json(subject) for subject in self.subjects]
        return {"ok": True, "report": str(self.path), "runs": runs}

    def tell(self) -> None:
        """Print the last numbers of each run, and where the page is."""
        for subject in self.subjects:
            numbers = page.final_numbers(subject.run).items()
            print(f"{subject.label}: {'; '.join(f'{key} {value}' for key, value in numbers)}")
            if subject.run.hidden_lost_ranks:
                n_all = len(subject.run.lost_ranks) + subject.run.hidden_lost_ranks
                print(f"  {n_all} reports of lost ranks; the page has the newest")
            for problem in subject.run.problems:
                print(f"  {printable(problem)}")
            if subject.forecast.offer:
                print(f"  {subject.forecast.offer}")
        print(f"wrote {one_line(self.path)}")


def run(options: Options) -> int:
    """Write the report of a run, or of several, and print what it has.

    Raises:
        UserError: as in ``write``.
    """
    report = write(options)
    if options.as_json:
        print(json.dumps(report.as_json()))
    else:
        report.tell()
    return 0


def write(options: Options) -> WrittenReport:
    """Write the report of a run, or of several. Nothing is printed.

    Raises:
        UserError: a folder is not that of a run, there are too many, or the file cannot be written.
    """
    if len(options.runs) > page.MOST_RUNS:
        raise UserError(
            f"composer3d report: {len(options.runs)} runs are more than the {page.MOST_RUNS} that "
            "a page can tell apart; name fewer"
        )
    with ExitStack() as at_end:
        return _write(options, [at_end.enter_context(_local(run)) for run in options.runs])


@contextmanager
def _local(run: str) -> Iterator[str]:
    """Yield the folder of a run, or a copy of one in an object store, without checkpoints."""
    if not is_url(run):
        yield run
        return
    with TemporaryDirectory(prefix="composer3d-") as temporary:
        try:
            place = RemotePath(run)
            copy = Path(temporary, place.name)
            copy.mkdir()
            run_files.fetch(place, copy)
        except ValueError as error:
            raise UserError(f"{one_line(run)} {error}") from None
        except OSError as error:
            raise UserError(f"{one_line(run)} cannot be copied: {error.strerror}") from None
        yield str(copy)


def _write(options: Options, paths: Sequence[str]) -> WrittenReport:
    """Write the report of runs whose folders are on this disk."""
    device = None if options.gpu is None else find_device(options.gpu)
    folders = [
        folder.read(path, url=run if is_url(run) else None)
        for run, path in zip(options.runs, paths, strict=True)
    ]
    has_pictures = len(folders) <= 2
    subjects = [
        _subject(found, label, device, options.gpus_per_node, has_pictures=has_pictures)
        for found, label in zip(folders, _labels(folders), strict=True)
    ]
    # The copy of a run in an object store goes at the end.
    beside = Path() if is_url(options.runs[0]) else folders[0].path
    path = _path(folders, beside, options.out)
    differences = _differences(folders) if len(folders) > 1 else None
    text = page.render(subjects, differences)
    try:
        replace_own(path, text)
    except OSError as error:
        raise UserError(
            f"{one_line(path)} cannot be written ({error.strerror}); name a file with -o"
        ) from None
    return WrittenReport(path, subjects)


def _labels(folders: list[RunFolder]) -> list[str]:
    """Return names of runs: those of their folders, or else their paths."""
    names = [one_line(found.name) for found in folders]
    if len(set(names)) < len(names):
        names = [one_line(found.path) for found in folders]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{twice}: a run cannot be compared with itself; name another one")
    return names


def _path(folders: list[RunFolder], beside: Path, out: str | None) -> Path:
    if out is None:
        name = "report.html"
        if len(folders) > 1:
            others = folders[1].name if len(folders) == 2 else f"{len(folders)}-runs"
            name = f"compare-{others}.html"
        return beside / name
    return page.page_path(out)


def _as_json(subject: Subject) -> dict[str, Any]:
    curves, forecast = subject.run.curves, subject.forecast

    def last(name: str) -> float | None:
        series = curves.of(name)
        return series.last.value if series.last is not None and series.ends_finite else None

    return {
        "name": subject.label,
        "step": subject.run.steps_done,
        "last_logged_step": curves.last_step,
        "lost_ranks": len(subject.run.lost_ranks) + subject.run.hidden_lost_ranks,
        "loss": last("loss"),
        "validation_loss": last("validation_loss"),
        "tokens_per_s": subject.run.tokens_per_s,
        "predicted_tokens_per_s": forecast.tokens_per_s,
        "predicted_tokens_per_s_80": forecast.tokens_80,
        "caveats": list(forecast.caveats),
        "problems": subject.run.problems,
    }


def _subject(
    run: RunFolder,
    label: str,
    device: hardware.Hardware | None,
    per_node: int,
    *,
    has_pictures: bool,
) -> Subject:
    recipe = run.recipe
    return Subject(
        label=label,
        run=run,
        facts={} if recipe is None else _facts(recipe),
        forecast=_forecast(run, device, per_node),
        pictures=[_layout(run, per_node), _pipeline(run)] if has_pictures else [],
    )


def _facts(recipe: Recipe) -> dict[str, str]:
    model, data = recipe.model, recipe.data
    count = architecture(model.architecture).count_parameters(model)
    return {
        "model": f"{count / 1e6:,.4g}M parameters, {model.n_layers} blocks of width {model.dim}",
        "mesh": mesh_words(recipe),
        "batch": f"{data.global_batch:,} samples of {data.seq_len:,} tokens",
        "data": data.source,
        "peak learning rate": f"{recipe.optim.lr:g}",
        "computes in": recipe.precision.computes_in,
    }


def _forecast(run: RunFolder, device: hardware.Hardware | None, per_node: int) -> Forecast:
    """Predict the speed of a run on a device; None means that of the run."""
    if run.recipe is None:
        return Forecast(None, None, f"Nothing is predicted: {run.recipe_problem}.")
    way_out = "name a device, or a row that composer3d doctor --write has made, with --gpu."
    if device is None and run.device is None:
        return Forecast(None, None, f"Nothing is predicted: the device is not known; {way_out}")
    row = device or (hardware.CPU if run.device == "cpu" else hardware.find(run.device or ""))
    if row is None:
        words = one_line(run.device or "")
        return Forecast(None, None, f"Nothing is predicted: there is no row for {words}; {way_out}")
    stages = run.recipe.mesh.pp * run.recipe.parallel.stages_per_rank
    if stages > _MOST_STAGES:
        words = f"{stages:,} pipeline stages would take too long; composer3d plan predicts them."
        return Forecast(None, None, f"Nothing is predicted: {words}")
    try:
        found = price(run.recipe, Device(hardware=row, per_node=per_node)).prediction
    except UserError as error:
        return Forecast(None, None, f"Nothing is predicted: {error}.")
    # On a CPU, the metrics have the memory of the whole process, and the planner that of tensors.
    predicts_memory = run.device not in (None, "cpu")
    peak_gib = max(rank.allocated_bytes for rank in found.memory) / GIB
    less_sure = caveats(run.recipe, row)
    return Forecast(
        tokens_per_s=found.tokens_s * run.recipe.world_size,
        memory_gib=peak_gib if predicts_memory else None,
        tokens_80=found.interval(found.tokens_s * run.recipe.world_size),
        memory_80=found.memory_interval(peak_gib),
        note=f"Predicted as composer3d plan does, for {row.name}. What was measured is the median "
        "over the logged steps with this recipe and this device.",
        caveats=less_sure,
        offer=_offer(run, row if device is None else None),
    )


def _offer(run: RunFolder, row: hardware.Hardware | None) -> str:
    """Return the command that plans with what a run measured; or an empty text.

    There is none if nothing was measured, if the run says nothing of its machine, or if the folder,
    with its recipe, is a copy that goes.
    """
    speed = run.tokens_per_s
    if speed is None or speed <= 0 or row is None or run.is_copy:
        return ""
    if run.recipe is None or problem_of(run.recipe):
        return ""
    recipe = shlex.quote(one_line(run.path / "recipe.toml"))
    name = shlex.quote(row.name)
    return (
        f"plans of this machine get surer with: composer3d plan {recipe} --gpu {name} "
        f"--calibrate {speed:.0f} --keep machine.toml"
    )


def _is_on_cpu(run: RunFolder) -> bool | None:
    """Return whether a run was on CPUs; None if its events do not say it."""
    return None if run.device is None else run.device == "cpu"


def _layout(run: RunFolder, per_node: int) -> Drawing:
    title = "Layout"
    if run.recipe is None:
        return Drawing(title, "", f"No drawing: {run.recipe_problem}.")
    parallel, pp = run.recipe.parallel, run.recipe.mesh.pp
    # The drawing lists the actions of all pipeline ranks, once for each of them.
    actions = 2 * pp * pp * parallel.stages_per_rank * run.recipe.micro_batches
    if actions > _MOST_COUNTED:
        words = f"No drawing: counting the traffic of {actions:,} actions would take too long; "
        return Drawing(title, "", words + "composer3d layout draws them.")
    try:
        layout = make_layout(run.recipe, per_node, is_on_cpu=_is_on_cpu(run))
        heading = f"{one_line(run.name)}: {mesh_words(run.recipe)}"
        return Drawing(title, layout_svg.draw(layout, heading=heading, notes=[note_of(layout)]), "")
    except UserError as error:
        return Drawing(title, "", f"No drawing: {error}.")


def _pipeline(run: RunFolder) -> Drawing:
    """Draw the last traced step of a run, or else the schedule of its recipe."""
    title = "Pipeline"
    recipe = run.recipe
    if recipe is None:
        return Drawing(title, "", f"No drawing: {run.recipe_problem}.")
    if recipe.mesh.pp == 1:
        return Drawing(title, "", "mesh.pp = 1, so there is no pipeline.")
    actions = count_actions(recipe)
    if actions > MOST_ACTIONS:
        words = f"No drawing: up to {actions:,} actions are too many for a page; "
        return Drawing(title, "", words + "composer3d timeline draws them.")
    problem = ""
    if (run.path / trace.FOLDER).is_dir():
        try:
            found = page_of_run(str(run.path), None)
            drawing = timeline.draw(
                found.timelines, heading=found.heading, notes=found.notes, unit=found.unit
            )
            if sum(len(row) for entry in found.timelines for row in entry.spans) <= MOST_ACTIONS:
                return Drawing(title, drawing, "")
            problem = "The trace has too many actions for a page."
        except UserError as error:
            problem = f"The trace of the run cannot be drawn: {error}."
    if recipe.parallel.schedule == "csv":
        words = "No drawing: the schedule is in a file, which a report does not open."
        return Drawing(title, "", f"{problem} {words}".strip())
    try:
        return Drawing(title, draw_recipe(recipe, one_line(run.name)), problem)
    except UserError as error:
        return Drawing(title, "", f"{problem} No drawing: {error}.".strip())


def _differences(folders: list[RunFolder]) -> list[KeyDifference] | None:
    """List the keys whose values differ; None if a recipe is missing or is not TOML."""
    values = []
    for found in folders:
        if not found.recipe_toml:
            return None
        try:
            values.append(values_of(found.recipe_toml))
        except ValueError:
            return None
    differences = []
    for key in sorted(set().union(*values)):
        default = FIELDS[key].default if key in FIELDS else None
        default = None if default is MISSING else default
        texts = tuple(shown(of_run.get(key, default)) for of_run in values)
        if len(set(texts)) > 1:
            differences.append(KeyDifference(key, texts))
    return differences
