"""``composer3d eval --tasks``: tasks of lm-eval, in one process or over the ranks of tp."""

import contextlib
import json
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d.commands import job, tp
from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line, printable
from composer3d.recipe.draft import ParsedRecipe
from composer3d.recipe.resolve import Resolved
from composer3d.runtime import environment

if TYPE_CHECKING:
    from composer3d.generate.tasks import Figure, Figures, TasksRequest, TasksSession

# Rank 0 loads data sets, and tokenizes questions, while the others wait for its first batch. A rank
# that dies is noticed at once, whatever this is.
_TIMEOUT_S = 4 * 3600.0

_HEADINGS = ("task", "shots", "documents", "metric", "value", "stderr")
_LEFT = (0, 3)  # the columns of text
_LARGE = 1e9  # from here on, a figure is shown with an exponent


def run(
    request: "TasksRequest", *, processes: int | None, device: str, out: str | None, as_json: bool
) -> int:
    """Evaluate tasks, and print their figures.

    Args:
        request: the tasks and the checkpoint.
        processes: the ranks of tp; None: one, or all under torchrun.
        device: as in [run] of a recipe.
        out: a file for a line of JSON for each document.
        as_json: whether to print JSON.

    Returns:
        The exit status: 0 done, 1 a rank failed.

    Raises:
        UserError: the checkpoint, the tokenizer, a task or the layout cannot be used.
    """
    if out is not None and os.path.lexists(out) and environment.rank() == 0:
        raise UserError(f"--out {one_line(out)}: the file exists; name another one")
    # Imported here because these modules import torch.
    from composer3d.generate.tasks import evaluate_tasks_here, open_tasks_session, require_lm_eval
    from composer3d.runtime.process_group import pick_device

    require_lm_eval()
    if environment.is_rank() or (processes or 1) > 1:
        return tp.run_ranks(
            "eval",
            evaluate_rank,
            {"request": request, "out": out, "as_json": as_json},
            src=request.src,
            own=request.recipe,
            tp=processes or environment.world_size(),
            device=device,
        )
    session = open_tasks_session(request)
    _print_notes(session)
    chosen: Any = device
    begun_s = time.perf_counter()
    with _only_results_on_stdout():
        figures = evaluate_tasks_here(session, pick_device(chosen))
    _report(figures, session, time.perf_counter() - begun_s, out=out, as_json=as_json)
    return 0


def evaluate_rank(
    document: ParsedRecipe, request: "TasksRequest", out: str | None, as_json: bool
) -> int:
    """Evaluate as one rank of tp, and return its exit status. Rank 0 prints."""
    function = partial(_evaluate, request=request, out=out, as_json=as_json)
    return tp.run_rank(document, function, as_json=as_json)


def _evaluate(
    resolved: Resolved, rank: int, *, request: "TasksRequest", out: str | None, as_json: bool
) -> int:
    # Imported here because this module imports torch.
    from composer3d.generate.tasks import evaluate_tasks_on_ranks, open_tasks_session

    session = open_tasks_session(request)
    if rank == 0:
        _print_notes(session)
    joined = job.join(
        resolved, rank, timeout_s=_TIMEOUT_S, advice=lambda: "start the command again"
    )
    begun_s = time.perf_counter()
    with joined as world, _only_results_on_stdout():
        figures = evaluate_tasks_on_ranks(session, resolved.recipe, world.device)
    if figures is not None:
        _report(figures, session, time.perf_counter() - begun_s, out=out, as_json=as_json)
    return 0


def _only_results_on_stdout() -> contextlib.AbstractContextManager[object]:
    """Send what lm-eval and tasks print to standard error: standard output has only results."""
    return contextlib.redirect_stdout(sys.stderr)


def _print_notes(session: "TasksSession") -> None:
    for note in session.checkpoint.source.notes:
        print(printable(note), file=sys.stderr)


def _report(
    figures: "Figures", session: "TasksSession", seconds: float, *, out: str | None, as_json: bool
) -> None:
    """Print the figures, and write the documents to ``out``."""
    if as_json:
        answer = {
            "ok": True,
            "source": str(session.checkpoint.source.path),
            "figures": [figure._asdict() for figure in figures.figures],
            "seconds": seconds,
        }
        print(json.dumps(answer), flush=True)
    else:
        print("\n".join(_table(figures.figures)), flush=True)
        print(f"{seconds:.1f} s, sequences of up to {session.longest:,} tokens", file=sys.stderr)
    if out is None:
        return
    # Last: figures that took hours are not lost with a disk that is full.
    try:
        with open(out, "x", encoding="utf-8") as file:
            for task, samples in figures.samples.items():
                for sample in samples:
                    file.write(json.dumps({"task": task, **sample}, default=str) + "\n")
    except OSError as error:
        raise UserError(
            f"--out {one_line(out)}: cannot be written ({error.strerror}); name another file"
        ) from None


def _table(figures: "list[Figure]") -> list[str]:
    """Return the lines of a table of figures. A task is named in the first line of its own."""
    rows = [_HEADINGS]
    before = None
    for figure in figures:
        is_first = figure.task != before
        before = figure.task
        metric = figure.metric
        if figure.filter != "none":
            metric = f"{metric} ({figure.filter})"
        rows.append(
            (
                one_line(figure.task) if is_first else "",
                _text_of(figure.shots) if is_first else "",
                _text_of(figure.documents) if is_first else "",
                one_line(metric),
                _text_of(figure.value),
                _text_of(figure.stderr),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _text_of(number: float | None) -> str:
    if number is None:
        return "-"
    if isinstance(number, int):
        return f"{number:,}"
    # The perplexity of a model that has learned little may have twenty digits.
    return f"{number:,.4f}" if abs(number) < _LARGE else f"{number:.4e}"
