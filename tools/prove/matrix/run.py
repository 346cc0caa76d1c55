"""Prove every layout of the covering matrix in float64, and write ``docs/matrix.md``."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from composer3d.runtime.launch import Pool
from composer3d.verify.judge import Verdict
from composer3d.verify.proof import verify_layout
from tools.prove.matrix import report
from tools.prove.matrix.cover import STEPS, Row, context, cover, read, sets, slice_of, to_text
from tools.prove.paths import MATRIX, RECIPE, ROOT


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/prove/run matrix", description=__doc__)
    parser.add_argument(
        "--find",
        action="store_true",
        help="find the layouts again and write matrix.txt, but prove nothing",
    )
    parser.add_argument(
        "--slice", action="store_true", help="prove the slice that the tests run, write nothing"
    )
    parser.add_argument(
        "--context",
        action="store_true",
        help="prove all combinations of context parallelism, write nothing",
    )
    options = parser.parse_args(arguments)
    if options.find:
        matrix = cover(read().rows)
        MATRIX.write_text(to_text(matrix))
        path = MATRIX.relative_to(ROOT)
        print(f"{len(matrix.rows)} layouts, {len(matrix.refused)} refused: {path}")
        return 0

    matrix = read()
    if options.context:
        rows = context()
    elif options.slice:
        rows = slice_of(matrix.rows)
    else:
        rows = list(matrix.rows)

    begin = time.monotonic()
    verdicts = prove(rows)
    seconds = time.monotonic() - begin
    n_exact = sum(verdict.passed for verdict in verdicts)
    print(f"{n_exact} of {len(rows)} layouts are exact, in {seconds / 60:.1f} minutes")
    if n_exact == len(rows) and not (options.slice or options.context):
        report.write(ROOT, matrix, verdicts, seconds)
    return 0 if n_exact == len(rows) else 1


def prove(rows: list[Row]) -> list[Verdict]:
    """Prove all rows, and print a line for each."""
    verdicts = []
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-matrix-") as folder:
        for number, row in enumerate(rows, 1):
            begin = time.monotonic()
            verdict = verify_layout(
                pool, Path(folder), str(RECIPE), sets(row), dtype="float64", steps=STEPS
            )
            verdicts.append(verdict)
            word = "exact" if verdict.passed else "WRONG"
            duration = f"{time.monotonic() - begin:.1f} s"
            print(
                f"{number:>3} {word} {duration:>7}  {verdict.max_grad_rel_err}  {verdict.layout}",
                flush=True,
            )
            if not verdict.passed:
                print(f"    {verdict.error}\n    {' '.join(sets(row))}", flush=True)
    return verdicts
