"""``composer3d train``: start the ranks of a training, or run as one of them.

Under torchrun the command is one rank. Otherwise it starts all ranks on this machine. Functions
import the modules that need torch when they need them, so that the starter of the ranks can begin
to import torch first.
"""

import re
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.steps import published
from composer3d.commands import job
from composer3d.commands.arguments import recipe_argument, set_option
from composer3d.facts import events
from composer3d.facts.errors import RecipeError, UserError
from composer3d.facts.interrupts import ending_at_once
from composer3d.facts.remote import Place
from composer3d.facts.step_folders import list_steps
from composer3d.facts.tags import COUNTED_TOKENS
from composer3d.models import hub
from composer3d.recipe.advice import nothing_to_do, way_to_go_on
from composer3d.recipe.changes import changes
from composer3d.recipe.machine import package_problems
from composer3d.recipe.resolve import Resolved, load
from composer3d.recipe.schema import Recipe
from composer3d.reliability.lock import describe_loss
from composer3d.runtime import collector, environment, launch, log, rank_logs, shortage
from composer3d.runtime.console import say
from composer3d.runtime.ends import describe_died, describe_left
from composer3d.runtime.files import append_whole, write_atomic
from composer3d.runtime.ranks import describe_rank, describe_several
from composer3d.training.owed import METRICS, owes_validation

if TYPE_CHECKING:
    from composer3d.training.observers.metrics import Metrics

EXAMPLES = (
    "composer3d train quickstart",
    "composer3d train quickstart --set run.steps=300 --set optim.lr=1e-3",
    "torchrun --nproc-per-node 8 -m composer3d train quickstart",
)
DETAILS = f"Of each logged step, it prints tok/s of all ranks together. {COUNTED_TOKENS}"


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str = recipe_argument()
    sets: Sequence[str] = set_option()


def run(options: Options) -> int:
    """Train a recipe: as one rank under torchrun, else with all ranks of its mesh on this machine.

    Returns:
        The exit status: 0 done, 1 a rank failed, 2 the user's input is wrong, 128 + N stopped by
        signal N.

    Raises:
        RecipeError: the recipe cannot be used, or needs too many processes for this machine.
        DeviceError: this machine has fewer GPUs than the recipe needs.
    """
    # Before the first step there is nothing to save.
    with ending_at_once():
        return _run(options.recipe, options.sets)


def _run(recipe: str, sets: Sequence[str]) -> int:
    if environment.is_rank():
        return train_rank(recipe, sets)

    resolved = load(recipe, sets, may_import=True)
    finished_step = step_of_finished_run(resolved.recipe)
    if finished_step is not None:
        log.setup("", main=True)
        log.get().info(nothing_to_do(resolved.recipe, finished_step))
        return 0

    _require_packages(resolved)
    # Torch takes seconds to import.
    _say_what_begins(resolved.recipe)
    if resolved.recipe.model.hf is not None and hub.is_place(resolved.recipe.model.hf):
        # With the commit, which is loaded already, no rank asks the Hub again.
        sets = (*sets, f"model.hf={resolved.recipe.model.hf}")
    resolved, processes = job.count_processes(resolved, partial(_load, recipe, sets))
    if processes == 1 and not resolved.recipe.reliability.restarts:
        return train_rank(recipe, sets)
    return run_with_restarts(resolved.recipe, recipe, sets, processes)


def _say_what_begins(recipe: Recipe) -> None:
    log.setup("", main=True)
    log.get().info(f"training {recipe.run.name}: {recipe.run.steps:,} steps")


def _require_packages(resolved: Resolved) -> None:
    """Raise RecipeError if the recipe needs packages that are missing."""
    problems = list(package_problems(resolved.recipe))
    if problems:
        raise RecipeError([f"{resolved.place(key)}: {text}" for key, text in problems])


def run_with_restarts(recipe: Recipe, path: str, sets: Sequence[str], processes: int) -> int:
    """Run ``train_rank`` on all ranks, and again if one is lost: ``reliability.restarts`` times.

    A rank is lost if it died, hung until its peers gave up, or raised an error that is no
    UserError. A collective that failed although all ranks are there is a loss too. So is a rank
    that lacked memory, if this start has saved a checkpoint: otherwise the next start would lack it
    again. After another UserError the next start would fail in the same way, and a signal asked the
    job to stop: neither starts it again.

    Args:
        recipe: the recipe of the job.
        path: its file.
        sets: overrides, each ``table.key=value``.
        processes: the number of ranks.

    Returns:
        The exit status of the last start.
    """
    log.setup("", main=True)
    log.get().info(f"starting {processes} ranks")
    most = recipe.reliability.restarts
    arguments: dict[str, Any] = {"recipe": path, "sets": tuple(sets)}
    cleanup = ExitStack()
    claimed = None
    if most:
        # The ranks tell here which folder they have, to start again only in the same one.
        claimed = cleanup.enter_context(launch.unnamed_file("claimed"))
        arguments["claimed"] = str(claimed)
    for restart in range(most + 1):
        earlier_reports, earlier_kills = _lost_reports(recipe), shortage.kernel_kills()
        earlier_checkpoint = _newest_checkpoint(recipe)
        result = launch.run_ranks(
            train_rank, arguments, processes=processes, save_limit_s=_save_limit_s(recipe)
        )
        reports = _lost_reports(recipe) - earlier_reports
        was_killed = signal.SIGKILL in result.died.values()
        if was_killed and shortage.kernel_kills() > earlier_kills:
            result.lacked_memory += [
                rank for rank, end in result.died.items() if end == signal.SIGKILL
            ]
        lines = describe_failures(result, recipe, next(iter(reports), None))
        is_over = not result.is_lost or restart == most
        is_hopeless = result.lacked_memory and _newest_checkpoint(recipe) == earlier_checkpoint
        loss = None if is_over or claimed is None else describe_loss(claimed, recipe.run.folder)
        if loss is not None:
            lines.append(loss)
        elif is_hopeless and not is_over:
            lines.append(
                "the ranks are not started again: memory ran out before this start had saved "
                f"anything, so the next one would end in the same way; {shortage.WAY_OUT}"
            )
        elif not is_over:
            lines.append(f"starting all ranks again, {restart + 1} of at most {most} times")
        # Before it is printed: nobody may read the output any more.
        _keep_in_log(recipe, [*result.reason, *result.traceback.splitlines(), *lines])
        say(lines)
        if is_over or is_hopeless or loss is not None:
            break
        if _newest_checkpoint(recipe) is not None:
            # The recipe may ask to begin anew, which was done.
            arguments["sets"] = (*sets, "checkpoint.resume=auto")
    cleanup.close()
    return result.status


def _save_limit_s(recipe: Recipe) -> float:
    """Return how long ranks may take after a signal, until they have saved.

    A save in the background may be under way. It ends first, then a step and its own save. The
    ranks limit each of them themselves: this is for ranks that all hang.
    """
    return 60.0 * (recipe.run.timeout_minutes + 2 * recipe.checkpoint.timeout_minutes)


def _keep_in_log(recipe: Recipe, lines: Sequence[str]) -> None:
    """Add lines to the log in the run's folder, if there is one: rank 0 may have died."""
    path = recipe.run.folder / log.FILE
    if lines and path.is_file():
        log.setup("", main=True)
        log.keep_in(path, lambda: True)
        log.keep(lines)


def step_of_finished_run(recipe: Recipe) -> int | None:
    """Return the step of the newest checkpoint if the run is finished, else None.

    This reads only the manifest and the sizes of the files, without torch. The result is also None
    if ``checkpoint.resume`` is not "auto", if the checkpoint is damaged, if the last validation was
    cut off, or if the recipe has changed the seed, the data or the model. Training then resumes as
    the recipe says, or reports the error.
    """
    if recipe.checkpoint.resume != "auto":
        return None
    try:
        newest = next(reversed(list_steps(recipe.checkpoint_folder)), None)
        if newest is None or int(newest.name.removeprefix("step-")) < recipe.run.steps:
            return None
        manifest = manifests.read(newest)
        changed_keys = {change.key for change in changes(manifest.recipe, recipe)}
        is_whole = manifests.has_all_bytes(newest, manifest)
    except (UserError, OSError, ValueError):
        return None

    if manifest.step < recipe.run.steps or not is_whole:
        return None
    model = manifests.model_of(recipe.model, recipe.precision.params)
    then = manifests.with_later_fields(manifest.model, recipe.model)
    if any(then.get(key) != value for key, value in model.items()):
        return None
    if manifests.unknown_fields(manifest.model, recipe.model):
        return None
    if any(key == "run.seed" or key.startswith(("data.", "model.")) for key in changed_keys):
        return None
    metrics = recipe.run.folder / METRICS
    if manifest.step == recipe.run.steps and owes_validation(
        metrics, recipe.validation, manifest.step
    ):
        return None
    return manifest.step


def describe_failures(
    result: launch.JobResult, recipe: Recipe, report: Path | None = None
) -> list[str]:
    """Describe the ranks that did not report a failure: they died, were killed, or left the others.

    Args:
        result: how the ranks ended.
        recipe: the recipe of the job.
        report: the file in which the other ranks say what they did; None if there is none.
    """
    advice = resume_advice(recipe)
    if report is not None:
        advice = f"what each rank did is in {report}; {advice}"
    ended = describe_died(result.died, recipe.mesh) + describe_left(result.left, recipe.mesh)
    lines = [f"{line}; {advice}" for line in ended]
    if result.raised and report is not None and not result.died:
        # The traceback has been printed.
        lines.append(advice)

    if result.stuck:
        names = describe_several(result.stuck, lambda rank: describe_rank(rank, recipe.mesh))
        were = "was" if len(result.stuck) == 1 else "were"
        limit = f"{_save_limit_s(recipe) / 60:.0f} minutes after the signal"
        if result.was_cut_off:
            lines.append(
                f"{names} {were} killed: {limit}, the steps were not saved; {resume_advice(recipe)}"
            )
        elif result.status > 128:
            after = f"{result.patience_s:.0f} s after another rank had ended"
            waited = f"still running {limit if isinf(result.patience_s) else after}"
            cause = "Ctrl-C came again" if result.was_insisted else waited
            lines.append(f"{names} {were} killed: {cause}; {resume_advice(recipe)}")
        elif signal.SIGABRT in result.died.values():
            # NCCL aborts the ranks that waited too long, so a rank that still ran is the cause.
            lines.append(f"{names} {were} still running: look for the cause there first")
        elif result.reason:
            waited = f"{launch.CLOSE_S:.0f} s after the error of another rank"
            lines.append(f"{names} {were} killed: {waited}, still running")
    return lines


def resume_advice(recipe: Recipe) -> str:
    """Return the end of an error: whether the same command resumes or starts anew.

    The text names the newest checkpoint of the run, or the folder in which there is none.
    """
    newest = _newest_checkpoint(recipe)
    if newest is None:
        folder = recipe.checkpoint_folder
        return f"there is no checkpoint in {folder}: the same command starts anew"
    return f"the newest checkpoint is {newest}: {way_to_go_on(recipe)} from it"


def _write_report(recipe: Recipe, text: str) -> str | None:
    """Write the report of lost ranks into the run's folder, and return its path, or None."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = recipe.run.folder
    # The number keeps the order if the clocks of machines differ.
    number = 1 + max(map(_number_of_report, _lost_reports(recipe)), default=0)
    path = folder / f"lost-ranks-{now}_{number}.txt"
    try:
        write_atomic(path, text)
        done = 0
        for found in events.read(folder):
            done = done if found is None else events.done_after(found, done)
        lost = events.Event(done, round(time.time(), 3), "lost ranks", path.name)
        append_whole(folder / events.FILE, events.line(lost), begins_line=True)
    except OSError:
        # The line on the console must come all the same.
        return str(path) if path.exists() else None
    return str(path)


def _number_of_report(path: Path) -> int:
    found = re.search(r"_(\d{1,9})\.txt$", path.name)
    return int(found[1]) if found else 1


def _lost_reports(recipe: Recipe) -> set[Path]:
    """Return the reports of lost ranks in the run's folder."""
    return set(recipe.run.folder.glob("lost-ranks-*.txt"))


def _write_trace(recipe: Recipe, rank: int, trace: bytes, moment: str) -> str | None:
    """Write the last collectives of a rank into the run's folder, and return their path, or None.

    The names are those that torch's ``torchfrtrace --prefix nccl-trace-TIME-rank- FOLDER`` reads.
    """
    folder = recipe.run.folder
    path = folder / f"nccl-trace-{moment}-rank-{rank}"
    try:
        write_atomic(path, trace)
    except OSError:
        return None
    return str(path)


def _newest_checkpoint(recipe: Recipe) -> Place | None:
    """Return the run's newest checkpoint with a manifest, which is written last, or None.

    None as well if that cannot be found out: then it is for a message, or the ranks say why.
    """
    with suppress(OSError):
        return next(reversed(published(recipe.checkpoint_folder)), None)
    return None


def train_rank(recipe: str, sets: Sequence[str], claimed: str | None = None) -> int:
    """Train as one rank of a job (``job.run_rank``), and return its exit status.

    Args:
        recipe: the recipe's file.
        sets: overrides, each ``table.key=value``.
        claimed: where rank 0 tells the launcher which folder it has claimed.
    """
    return job.run_rank(
        partial(_train, claimed=claimed), partial(_load, recipe, sets), keep=_keep_output
    )


def _keep_output(recipe: Recipe) -> AbstractContextManager[None]:
    return rank_logs.kept(recipe.run.folder) if recipe.run.rank_logs else nullcontext()


def _load(recipe: str, sets: Sequence[str], world_size: int) -> Resolved:
    return load(recipe, sets, world_size=world_size, may_import=True)


def _describe(resolved: Resolved, metrics: "Metrics", *, is_on_cpu: bool) -> None:
    """Give TensorBoard the recipe as text and hyperparameters, and drawings of its layout."""
    from composer3d.commands.timeline import MOST_ACTIONS, count_actions, draw_recipe
    from composer3d.draw import layout_svg, layout_text
    from composer3d.draw.layout import make_layout
    from composer3d.draw.png import png_of
    from composer3d.draw.terminal import Style
    from composer3d.models.registry import is_ours

    recipe = resolved.recipe
    if not recipe.metrics.tensorboard:
        return
    texts = {"run/recipe": resolved.to_toml()}
    drawings = {}
    # The layout of an architecture of a user's own needs its model: composer3d layout builds it.
    if is_ours(recipe.model.architecture):
        per_node = environment.local_world_size()
        style = Style(width=120, has_colours=False, has_unicode=True)
        layout = make_layout(recipe, per_node, is_on_cpu=is_on_cpu)
        texts["run/layout"] = layout_text.render(layout, style)
        drawings["run/layout"] = layout_svg.draw(layout, heading=recipe.run.name, notes=[])
    if recipe.mesh.pp > 1 and count_actions(recipe) <= MOST_ACTIONS:
        drawings["run/pipeline"] = draw_recipe(recipe, recipe.run.name)
    images = {tag: png_of(svg) for tag, svg in drawings.items()}
    hparams = {
        f"{table}.{key}": value
        for table in ("model", "mesh", "parallel", "data", "optim", "precision", "memory")
        for key, value in asdict(getattr(recipe, table)).items()
        if isinstance(value, bool | int | float | str)
    }
    shown = {tag: png for tag, png in images.items() if png is not None}
    metrics.describe(texts, shown, hparams, has_experts=recipe.model.experts > 0)


def _train(resolved: Resolved, rank: int, *, claimed: str | None) -> int:
    if rank == 0 and environment.is_rank() and not environment.has_launcher():
        _say_what_begins(resolved.recipe)
    # Under torchrun, every rank imports torch.
    with collector.importing():
        from composer3d.training.build import build
        from composer3d.training.loop import train
        from composer3d.training.observers.metrics import Metrics

    recipe = resolved.recipe
    # Under torchrun, nobody has checked it.
    _require_packages(resolved)
    timeout_s = 60 * recipe.run.timeout_minutes
    advice = partial(resume_advice, recipe)
    joined = job.join(
        resolved,
        rank,
        timeout_s=timeout_s,
        advice=advice,
        write_report=partial(_write_report, recipe),
        write_trace=partial(_write_trace, recipe, rank),
    )
    with joined as world:
        told = None if claimed is None else Path(claimed)
        run = build(recipe, world.device, resolved.to_toml(), claimed=told)
        if rank == 0:
            metrics = run.observers.find(Metrics)
            assert metrics is not None
            _describe(resolved, metrics, is_on_cpu=world.device.type == "cpu")
        signal_number = train(run, partial(job.tell, rank=rank))
    return 128 + signal_number if signal_number else 0
