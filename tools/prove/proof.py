"""What the proofs share: their command lines, the text and metrics of a run, a watched training."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def make_parser(
    name: str, description: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """The parser of the options of a proof, whose help keeps the lines of its texts."""
    return argparse.ArgumentParser(
        prog=f"tools/prove/run {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_number(
    parser: argparse.ArgumentParser, option: str, default: int, what: str, least: int = 0
) -> None:
    """Add an option of a number, and say what it is, its default and its least value."""

    def number_of(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} must be at least {least}")
        return number

    parser.add_argument(
        option, metavar="N", type=number_of, default=default, help=f"{what}; default: %(default)s"
    )


def add_names(parser: argparse.ArgumentParser, what: str) -> None:
    """Add parts of names, of which ``choose`` makes a choice."""
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"part of a {what}; default: all")


def choose(
    parser: argparse.ArgumentParser, found: Iterable[T], names: Sequence[str], problem: str
) -> list[T]:
    """Return what has a name in its text, or all without names. None is an error of arguments.

    Args:
        parser: reports the error.
        found: what there is.
        names: parts of the texts.
        problem: begins the error; the names follow.
    """
    chosen = [one for one in found if not names or any(name in str(one) for name in names)]
    if not chosen:
        parser.error(f"{problem} {' or '.join(names)}")
    return chosen


def overrides(*sets: str) -> list[str]:
    """The arguments of ``composer3d`` that override keys of a recipe."""
    return [f"--set={each}" for each in sets]


def corpus_of(size: int) -> bytes:
    """Text of ``size`` bytes that does not repeat itself soon, without the byte 0."""
    return bytes((i * i + i // 7) % 251 + 1 for i in range(size))


def logged_rows(run: Path) -> list[dict[str, Any]]:
    """The metrics that a run has logged so far, without a line that is being written."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def logged_losses(run: Path) -> dict[int, float]:
    """The losses that a run has logged so far, by step."""
    return {row["step"]: row["loss"] for row in logged_rows(run) if "loss" in row}


@contextmanager
def watched_run(recipe: str, sets: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
    """Build a run as one of the ranks of a task, in a folder that is removed in the end.

    Yields:
        The run, and the lines that it reports about ranks so far, with their steps.
    """
    import torch

    from composer3d.recipe.resolve import load
    from composer3d.reliability.report import Report
    from composer3d.runtime.process_group import broadcast_object, pool_world
    from composer3d.training.build import build
    from composer3d.training.observers.observer import Observer

    torch.set_num_threads(1)
    lines: list[str] = []

    class ReportListener(Observer):
        def report(self, step: int, report: Report) -> None:
            lines.extend(f"step {step}: {line}" for line in report.lines)

    with pool_world() as device:
        rank = int(os.environ["RANK"])
        name = broadcast_object(tempfile.mkdtemp(prefix="composer3d-watch-") if rank == 0 else None)
        folder = Path(str(name))
        path = folder / f"recipe-{rank}.toml"
        path.write_text(recipe)
        world_size = int(os.environ["WORLD_SIZE"])
        resolved = load(path, [f"run.out_dir={folder}", *sets], world_size=world_size)
        run = build(resolved.recipe, device, resolved.to_toml())
        run.observers.add(ReportListener())
        yield run, lines
        if rank == 0:
            shutil.rmtree(folder)
