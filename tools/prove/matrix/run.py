"""Prove every layout of the covering matrix in float64, and write ``docs/matrix.md``."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from composer3d.runtime.launch import Pool
from composer3d.verify.proof import Verdict, verify_layout
from tools.prove.matrix import report
from tools.prove.matrix.cover import STEPS, Row, context, cover, read, sets, slice_of, to_text
from tools.prove.paths import MATRIX, RECIPE, ROOT


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prove matrix", description="Prove the covering matrix, write docs/matrix.md."
    )
    parser.add_argument(
        "--find",
        action="store_true",
        help="find the layouts anew, write matrix.txt, prove none",
    )
    parser.add_argument(
        "--slice", action="store_true", help="prove the part that the tests run, write nothing"
    )
    parser.add_argument(
        "--context", action="store_true", help="prove all of context parallelism, write nothing"
    )
    options = parser.parse_args(arguments)
    if options.find:
        found = cover()
        MATRIX.write_text(to_text(found))
        print(
            f"{len(found.rows)} layouts, {len(found.refused)} refused: {MATRIX.relative_to(ROOT)}"
        )
        return 0
    matrix = read()
    rows = (
        context()
        if options.context
        else slice_of(matrix.rows)
        if options.slice
        else list(matrix.rows)
    )
    begin = time.monotonic()
    verdicts = prove(rows)
    seconds = time.monotonic() - begin
    good = sum(verdict.passed for verdict in verdicts)
    print(f"{good} of {len(rows)} layouts are exact, in {seconds / 60:.1f} minutes")
    if good == len(rows) and not (options.slice or options.context):
        report.write(ROOT, matrix, verdicts, seconds)
    return 0 if good == len(rows) else 1


def prove(rows: list[Row]) -> list[Verdict]:
    verdicts = []
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-matrix-") as folder:
        for number, row in enumerate(rows, 1):
            begin = time.monotonic()
            verdict = verify_layout(
                pool, Path(folder), str(RECIPE), sets(row), dtype="float64", steps=STEPS
            )
            verdicts.append(verdict)
            word = "exact" if verdict.passed else "WRONG"
            took = f"{time.monotonic() - begin:.1f} s"
            print(
                f"{number:>3} {word} {took:>7}  {verdict.max_grad_rel_err}  {verdict.layout}",
                flush=True,
            )
            if not verdict.passed:
                print(f"    {verdict.error}\n    {' '.join(sets(row))}", flush=True)
    return verdicts
