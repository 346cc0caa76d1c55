"""Prove every layout of the covering matrix in float64, and write ``docs/matrix.md``."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from composer3d.full.check import check_structure
from composer3d.full.predicates import completed
from composer3d.runtime.launch import Pool
from composer3d.runtime.progress import Progress
from composer3d.verify.judge import Verdict
from composer3d.verify.proof import verify_layout
from tools.prove.matrix import report
from tools.prove.matrix.cover import (
    STEPS,
    Row,
    context,
    cover,
    line_of,
    read,
    recipe_of,
    sets,
    slice_of,
    to_text,
)
from tools.prove.paths import MATRIX, RECIPE, ROOT


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/prove/run matrix", description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--find",
        action="store_true",
        help="add the layouts that matrix.txt lacks to those that it has, but prove nothing",
    )
    choice.add_argument(
        "--slice", action="store_true", help="prove the slice that the tests run, write nothing"
    )
    choice.add_argument(
        "--context",
        action="store_true",
        help="prove all combinations of context parallelism, write nothing",
    )
    choice.add_argument(
        "--rows",
        metavar="A-B,C",
        type=numbers_of,
        help="prove layouts A to B and C of matrix.txt, counted from 1, write nothing",
    )
    parser.add_argument(
        "--structure",
        action="store_true",
        help="look at the chosen layouts with the checks of verify --full alone, which compute no "
        "number and must find nothing; write nothing",
    )
    options = parser.parse_args(arguments)
    if options.find:
        matrix = cover(read().rows)
        MATRIX.write_text(to_text(matrix))
        path = MATRIX.relative_to(ROOT)
        print(f"{len(matrix.rows)} layouts, {len(matrix.refused)} refused: {path}")
        return 0

    matrix = read()
    numbers: Sequence[int] = options.rows or ()
    if options.rows:
        if not all(1 <= number <= len(matrix.rows) for number in numbers):
            parser.error(f"--rows must be within 1-{len(matrix.rows)}")
        rows = [matrix.rows[number - 1] for number in numbers]
    elif options.context:
        rows = context()
    elif options.slice:
        rows = slice_of(matrix.rows)
    else:
        rows = list(matrix.rows)
    if not rows:
        parser.error("there is no layout to prove")
    numbers = numbers or range(1, len(rows) + 1)

    if options.structure:
        return _look(rows, numbers)
    begin = time.monotonic()
    verdicts = prove(rows, numbers)
    seconds = time.monotonic() - begin
    n_exact = sum(verdict.passed for verdict in verdicts)
    print(f"{n_exact} of {len(rows)} layouts are exact, in {seconds / 60:.1f} minutes")
    is_whole = not (options.slice or options.context or options.rows)
    if n_exact == len(rows) and is_whole:
        report.write(ROOT, matrix, verdicts, seconds)
    return 0 if n_exact == len(rows) else 1


def _look(rows: Sequence[Row], numbers: Sequence[int]) -> int:
    """Check the structure of layouts, and print what is found in them."""
    begin = time.monotonic()
    wrong = 0
    with Pool() as pool:
        for number, row in zip(numbers, rows, strict=True):
            recipe = recipe_of(row)
            small = [recipe, *completed(recipe, [recipe])]
            structure = check_structure(pool, recipe, small)
            wrong += not structure.passed
            print(f"{number:>3} {'sound' if structure.passed else 'WRONG'}  {line_of(row)}")
            for finding in structure.findings:
                print(f"    {finding}", flush=True)
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(rows) - wrong} of {len(rows)} layouts are sound, in {minutes:.1f} minutes")
    return int(wrong > 0)


def numbers_of(text: str) -> list[int]:
    """Return the numbers of "9-12,20"; there is at least one."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} names no layout")
    return numbers


def prove(rows: Sequence[Row], numbers: Sequence[int]) -> list[Verdict]:
    """Prove all rows, and print a line for each, which begins with its number."""
    verdicts = []
    with (
        Pool() as pool,
        tempfile.TemporaryDirectory(prefix="composer3d-matrix-") as folder,
        Progress("matrix", len(rows), "layouts") as progress,
    ):
        for number, row in zip(numbers, rows, strict=True):
            begin = time.monotonic()
            verdict = verify_layout(
                pool, Path(folder), str(RECIPE), sets(row), dtype="float64", steps=STEPS
            )
            verdicts.append(verdict)
            word = "exact" if verdict.passed else "WRONG"
            duration = f"{time.monotonic() - begin:.1f} s"
            with progress.paused():
                print(
                    f"{number:>3} {word} {duration:>7}  {verdict.max_grad_rel_err}  "
                    f"{verdict.layout}",
                    flush=True,
                )
                if not verdict.passed:
                    print(f"    {verdict.error}\n    {' '.join(sets(row))}", flush=True)
            progress.advance()
    return verdicts
