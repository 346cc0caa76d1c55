#!/usr/bin/env python3
"""Fit the constants of the cost model to published training runs, and print them.

    python tools/planner_fit.py CSV
    python tools/planner_fit.py --spreads CSV

Copy the printed values to ``SHIPPED`` in ``composer3d/planner/constants.py``. With ``--spreads``,
they are those of the errors on rows that were left out, and on those of ``tools/planner/``, for
``SHIPPED_SPREADS`` in ``composer3d/planner/intervals.py``. It needs numpy, which torch brings.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from composer3d.facts.errors import UserError
from composer3d.planner.constants import FITTED
from composer3d.planner.intervals import MEANING
from tools.planner.rows import Row, read


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("csv", help="published runs, with the columns of published.csv")
    parser.add_argument("--spreads", action="store_true", help="estimate the spreads of errors")
    arguments = parser.parse_args(argv)
    try:
        from tools.planner.fit import fit
    except ModuleNotFoundError as error:
        print(f"the fit needs {error.name}; install it: pip install {error.name}", file=sys.stderr)
        return 2
    try:
        rows, skipped = read(arguments.csv)
    except UserError as error:
        print(*error.lines, sep="\n", file=sys.stderr)
        return error.status
    for row in skipped:
        print(f"# skipped {row.place} ({row.id}): {row.reason}")
    if arguments.spreads:
        _print_spreads(rows)
        return 0
    print("SHIPPED = Constants(")
    for name, value in fit(rows).as_dict().items():
        fitted = FITTED[name]
        print(f"    {name}={value:.4g},  # {fitted.low:g} to {fitted.high:g} {fitted.unit}")
    print(")")
    return 0


def _print_spreads(rows: Sequence[Row]) -> None:
    from tools.planner.spreads import estimate
    from tools.planner_eval import NEVER_FITTED, errors_of, left_out

    found = left_out(rows, [row for path in NEVER_FITTED for row in read(path)[0]])
    spreads = estimate(errors_of(found), errors_of(found, memory=True))
    print("SHIPPED_SPREADS = Spreads(")
    for name, value in spreads.as_dict().items():
        meaning = MEANING[name]
        print(f"    {name}={value:.3g},  # {meaning.low:g} to {meaning.high:g}")
    print(")")


if __name__ == "__main__":
    sys.exit(main())
