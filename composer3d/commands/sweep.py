"""``composer3d sweep``: train a recipe with several values of keys, one run after the other.

It needs no torch itself: each run is a ``composer3d train`` of its own.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from composer3d.commands import registry
from composer3d.commands.arguments import argument, json_option, recipe_argument, set_option
from composer3d.facts.errors import RecipeError, UserError
from composer3d.facts.interrupts import signals_to_catch
from composer3d.facts.step_folders import list_steps
from composer3d.facts.text import one_line
from composer3d.recipe.changes import changes, kept_text
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.report.page import MOST_RUNS, page_path
from composer3d.runtime import environment
from composer3d.runtime.files import require_replaceable

_NAME = "run.name"

# The keys on which the results of a run depend, by more than rounding. ``run.steps`` is not one: a
# sweep may go on for more steps.
_DECISIVE = (
    "model.",
    "data.",
    "optim.",
    "precision.",
    "validation.",
    "run.seed",
    "checkpoint.init",
)

EXAMPLES = (
    "composer3d sweep quickstart --set optim.lr=1e-3,2e-3,4e-3",
    "composer3d sweep quickstart --set optim.lr=1e-3,2e-3 --set optim.weight_decay=0.0,0.1",
    "composer3d sweep llama3-8b-8-fsdp --set optim.lr=1e-4,3e-4 --print",
)
DETAILS = (
    "Every combination of the values is a run, whose name tells its values. The same command goes "
    "on after it was stopped, and leaves out what is finished."
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str = recipe_argument()
    sets: Sequence[str] = set_option(
        help="override a value; several values, with commas between them, are tried in turn"
    )
    as_json: bool = json_option(without=("--print",))
    prints: bool = argument(
        "--print",
        action="store_true",
        help="only print the commands, one on each line, to run them elsewhere",
    )
    out: str | None = argument(
        "-o",
        "--out",
        without=("--print",),
        metavar="FILE.html",
        help="the report of all runs; default: NAME-sweep.html in run.out_dir",
    )


class Trial(NamedTuple):
    """One run of a sweep.

    Attributes:
        sets: its overrides, the name of the run among them.
        recipe: its recipe.
        common_name: the name that all runs would have without the values.
    """

    sets: tuple[str, ...]
    recipe: Recipe
    common_name: str


def run(options: Options) -> int:
    """Train each combination, then write the report that compares them.

    A run that fails does not stop the others, but a signal does.

    Returns:
        The exit status: 0 done, 1 a run failed, 128 + N stopped by signal N.

    Raises:
        UserError: this is a rank under torchrun, there are no several values, or too many for a
            report; a recipe cannot be used, or the report cannot be written; or a run of the same
            name has checkpoints of other settings. No run has begun then.
    """
    if environment.is_rank():
        raise UserError(
            "composer3d sweep starts the ranks of its runs itself: start it without torchrun, or "
            "take the commands of --print"
        )
    trials = make_trials(options.recipe, options.sets, most=None if options.prints else MOST_RUNS)
    if options.prints:
        for trial in trials:
            print(shlex.join(["composer3d", *_arguments(options.recipe, trial)]))
        return 0

    out = _report_path(options.out, trials[0])
    _refuse_other_settings(trials)
    failed = []
    for number, trial in enumerate(trials, 1):
        name = trial.recipe.run.name
        print(f"run {number} of {len(trials)}: {name}", file=sys.stderr, flush=True)
        # -P, as the program composer3d: no module is imported from the current folder.
        command = [sys.executable, "-P", "-m", "composer3d", *_arguments(options.recipe, trial)]
        status, stopped_by = _run(command)
        if status < 0 or status >= 128 or stopped_by:
            print("the sweep was stopped: the same command goes on", file=sys.stderr)
            # A run that has done its last step, and one that could not save, have their own status.
            return 128 - status if status < 0 else status or 128 + stopped_by
        if status:
            failed.append(name)
    if failed:
        print(f"{len(failed)} of {len(trials)} runs failed: {', '.join(failed)}", file=sys.stderr)
    folders = [trial.recipe.run.folder for trial in trials]
    with_metrics = [str(folder) for folder in folders if (folder / "metrics.jsonl").is_file()]
    answer: dict[str, Any] = {"runs": []}
    if with_metrics:
        # The modules of report take time to import, which `--help` and `--print` do not need.
        from composer3d.commands import report

        parsed = registry.parse(["report", "-o", str(out), "--", *with_metrics])
        written = report.write(parsed.options)
        answer = written.as_json()
        if not options.as_json:
            written.tell()
    if options.as_json:
        print(json.dumps(answer | {"ok": not failed, "failed": failed}))
    return 1 if failed else 0


def _refuse_other_settings(trials: Sequence[Trial]) -> None:
    """Raise UserError if a run has checkpoints that were made with other settings.

    A run is called after the values that vary. With another value of another key, it would go on
    from these checkpoints, or be finished already, and the report would show results of the old
    value as if they were those of the new one.
    """
    for trial in trials:
        folder = trial.recipe.run.folder
        try:
            text = kept_text(folder)
            differences = changes(text, trial.recipe)
            has_checkpoints = bool(list_steps(trial.recipe.checkpoint_folder))
        except (OSError, ValueError, UserError):
            continue  # the run begins anew, or reports the problem itself
        decisive = [change for change in differences if change.key.startswith(_DECISIVE)]
        if has_checkpoints and decisive:
            key, then, now = decisive[0]
            more = f" ({len(decisive) - 1} more differ)" if len(decisive) > 1 else ""
            raise UserError(
                f"{one_line(folder)} has checkpoints of a run with {key} = {then}, and this sweep "
                f"has {now}{more}: give the sweep another run.name, or remove that folder"
            )


def _report_path(out: str | None, trial: Trial) -> Path:
    """Return the path of the report: what ``-o`` says, or one in the folder of the runs.

    Raises:
        UserError: it cannot be written there. This is known before the hours of training.
    """
    folder = Path(trial.recipe.run.out_dir)
    path = page_path(out) if out is not None else folder / f"{trial.common_name}-sweep.html"
    if out is None and not os.path.exists(folder):
        return path  # the first run makes the folder
    try:
        require_replaceable(path)
    except OSError as error:
        raise UserError(
            f"{one_line(path)}: the report cannot be written there ({error.strerror}); name "
            "another file with -o"
        ) from None
    return path


def _run(command: Sequence[str]) -> tuple[int, int]:
    """Run a training. Return its status, and the first signal that has come meanwhile, or 0.

    The status is below 0 if a signal has ended the training.
    A signal to this process must not leave the training alone, nor end it before it has saved.
    Ctrl-C reaches all processes of a terminal, so it is not sent on.
    """
    received: list[int] = []
    with subprocess.Popen(command) as process:

        def send_on(number: int, _: FrameType | None) -> None:
            received.append(number)
            if number != signal.SIGINT:
                process.send_signal(number)

        before = {number: signal.signal(number, send_on) for number in signals_to_catch()}
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return status, received[0] if received else 0


def _arguments(recipe: str, trial: Trial) -> list[str]:
    sets = [word for override in trial.sets for word in ("--set", override)]
    return ["train", recipe, *sets]


def make_trials(recipe: str, sets: Sequence[str], *, most: int | None) -> list[Trial]:
    """Return every combination of the values in ``sets``, the last key varying fastest.

    Args:
        recipe: the recipe's file.
        sets: overrides, each ``table.key=value``, or with commas between several values.
        most: the most combinations; None: any number.

    Raises:
        UserError: there are no several values, too many combinations, or two runs would have the
            same name.
        RecipeError: the recipe of a combination cannot be used. The error has the lines of all.
    """
    choices = [_choices_of(override) for override in sets]
    varied = [options for options in choices if len(options) > 1]
    if not varied:
        raise UserError(
            "composer3d sweep: no key has several values; write them with commas, such as "
            "--set optim.lr=1e-3,2e-3"
        )
    if any(options[0].startswith(f"{_NAME}=") for options in varied):
        raise UserError(f"composer3d sweep: {_NAME} is made of the values; set one name, or none")
    count = 1
    for options in varied:
        count *= len(options)
    if most is not None and count > most:
        raise UserError(
            f"composer3d sweep: {count} runs are more than the {most} that a report can tell "
            "apart; leave values out, or take the commands of --print"
        )
    trials, problems = [], []
    for combination in product(*choices):
        values = [
            text for text, options in zip(combination, choices, strict=True) if len(options) > 1
        ]
        try:
            common_name = load(recipe, combination, may_import=True).recipe.run.name
            name = f"{common_name}-{'-'.join(_words_of(values))}"
            named = (*combination, f"{_NAME}={name}")
            trials.append(Trial(named, load(recipe, named, may_import=True).recipe, common_name))
        except RecipeError as error:
            problems += [line for line in error.lines if line not in problems]
    if problems:
        raise RecipeError(problems)
    names = [trial.recipe.run.name for trial in trials]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"composer3d sweep: two runs would be called {one_line(name)}; give each value once"
            )
    return trials


def _choices_of(override: str) -> list[str]:
    """Return an override for each of the values that stand in one, with commas between them."""
    key, equals, values = override.partition("=")
    return [f"{key}{equals}{value}" for value in split_values(values)]


def split_values(text: str) -> list[str]:
    """Split a text at its commas, but not within quotes, brackets and braces."""
    pieces, depth, quote, begin = [], 0, "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            pieces.append(text[begin:place])
            begin = place + 1
    return [*pieces, text[begin:]]


def _words_of(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a part of a run's name for each override: the last word of its key, and its value.

    The whole key stands there if two keys end in the same word. What a name may not have is left
    out of a value.
    """
    keys = [override.partition("=")[0].strip() for override in overrides]
    words = [key.rpartition(".")[2] for key in keys]
    for override, key, word in zip(overrides, keys, words, strict=True):
        value = re.sub(r"[^A-Za-z0-9.+_-]+", "-", override.partition("=")[2]).strip("-")
        yield f"{word if words.count(word) == 1 else key}-{value}"
