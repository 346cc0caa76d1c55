#!/usr/bin/env python3
"""Compare the planner's predictions with published training runs.

    python tools/planner_eval.py CSV... [--json] [--table] [--holdout] [--calibrate ID] [--worst 20]

CSV has the columns of the published measurements. ``--json`` prints one object as the last line of
standard output, and ``--table`` a table for a page, with a row for each run. ``--holdout`` fits the
constants again without each family of sources, and reports the errors on that family, with the
intervals that the errors on the other families give; only the first file is fitted to. It takes
minutes and needs numpy, which torch brings. ``--calibrate`` predicts the other runs on the GPU of
the run ID as ``composer3d plan --calibrate`` does.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import exp, log1p
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from composer3d.facts.calibration import Observation
from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line
from composer3d.planner.calibrate import Calibration
from composer3d.planner.constants import SHIPPED, Constants
from composer3d.planner.intervals import (
    SHIPPED_SPREADS,
    Candidate,
    Interval,
    Spreads,
    around,
    close_probability,
    memory_shares,
    shares,
    spread,
)
from composer3d.planner.memory import GIB
from composer3d.planner.predict import fits
from composer3d.planner.time import predict_time
from tools.planner.memory import predict_memory
from tools.planner.rows import Row, Skipped, memory_of, read, tokens_s

if TYPE_CHECKING:
    from tools.planner.spreads import Error

# Published runs that no constant is fitted to.
NEVER_FITTED = tuple(
    Path(__file__).parent / "planner" / f"published_{name}.csv" for name in ("b200", "moe")
)


class Errors(NamedTuple):
    """Errors as fractions of the measured values.

    Attributes:
        rows: how many.
        median, p90: of the absolute errors.
        bias: the mean of the signed errors; above 0 the prediction is too high.
    """

    rows: int
    median: float | None
    p90: float | None
    bias: float | None

    def __str__(self) -> str:
        if self.median is None or self.p90 is None or self.bias is None:
            return f"{0:5d}"
        return f"{self.rows:5d} {self.median:8.1%} {self.p90:8.1%} {self.bias:+8.1%}"


class Outcome(NamedTuple):
    """One row, and its prediction. An error is predicted / measured - 1, or None.

    Attributes:
        decision: whether "fits" can be judged: the row says what it recomputed.
        tokens_spread, memory_spread: of which spreads each prediction has how much.
        spreads: the spreads that make its intervals.
        left_spread: the spread of tokens/s after a calibration; None: there was none.
    """

    row: Row
    tokens_error: float | None
    memory_error: float | None
    fits: bool
    decision: bool
    tokens_spread: Mapping[str, float]
    memory_spread: Mapping[str, float]
    spreads: Spreads = SHIPPED_SPREADS
    left_spread: float | None = None

    @property
    def tokens_interval(self) -> Interval:
        """The 80% interval of predicted tokens/s, as shares of the prediction."""
        width = self.left_spread
        if width is None:
            width = spread(self.tokens_spread, self.spreads)
        return around(1.0, width, self.spreads.quantile)

    @property
    def memory_interval(self) -> Interval:
        """The same of memory."""
        width = spread(self.memory_spread, self.spreads)
        return around(1.0, width, self.spreads.memory_quantile)


def summary(errors: Sequence[float]) -> Errors:
    """Summarise signed errors. The percentile is interpolated."""
    if not errors:
        return Errors(0, None, None, None)
    sizes = sorted(abs(error) for error in errors)
    place = 0.9 * (len(sizes) - 1)
    below = int(place)
    above = min(below + 1, len(sizes) - 1)
    p90 = sizes[below] + (place - below) * (sizes[above] - sizes[below])
    return Errors(len(errors), median(sizes), p90, fmean(errors))


def evaluate(rows: Sequence[Row], constants: Constants) -> tuple[list[Outcome], list[Skipped]]:
    """Predict every row. Rows that cannot be predicted are returned with the reason."""
    outcomes: list[Outcome] = []
    skipped: list[Skipped] = []
    for row in rows:
        try:
            time = predict_time(row.setup, constants)
            ranks = predict_memory(row.setup, constants)
            tokens = tokens_s(row, constants) / row.tokens_s - 1 if row.tokens_s else None
            memory = memory_of(row, ranks) / row.memory_gib - 1 if row.memory_gib else None
        except UserError as error:
            skipped.append(Skipped(row.place, row.id, str(error)))
            continue
        largest = max(ranks, key=lambda rank: rank.allocated_bytes)
        outcomes.append(
            Outcome(
                row,
                tokens,
                memory,
                fits(row.setup, ranks),
                row.recompute_is_stated,
                shares(row.setup, time),
                memory_shares(largest, memory_of(row, [largest]) * GIB),
            )
        )
    return outcomes, skipped


class Coverage(NamedTuple):
    """How well 80% intervals hold the measured values.

    Attributes:
        share: of the rows whose measured value is inside; None: there are no rows.
        width: the median width, as a share of the prediction: 0.2 is about 10% to each side.
    """

    share: float | None
    width: float | None


def coverage(predicted: Sequence[tuple[float, Interval]]) -> Coverage:
    """Judge errors (predicted / measured - 1) with the intervals around 1 of their predictions."""
    if not predicted:
        return Coverage(None, None)
    inside = [low <= 1 / (1 + error) <= high for error, (low, high) in predicted]
    return Coverage(fmean(inside), median(high - low for _, (low, high) in predicted))


def tokens_coverage(outcomes: Sequence[Outcome]) -> Coverage:
    """Judge the intervals of tokens/s."""
    return coverage(
        [(o.tokens_error, o.tokens_interval) for o in outcomes if o.tokens_error is not None]
    )


def memory_coverage(outcomes: Sequence[Outcome]) -> Coverage:
    """Judge the intervals of memory."""
    return coverage(
        [(o.memory_error, o.memory_interval) for o in outcomes if o.memory_error is not None]
    )


def size_of(row: Row) -> str:
    gpus = row.setup.layout.world_size
    return "1 node" if gpus <= 8 else "2-8 nodes" if gpus <= 64 else "more than 8 nodes"


GROUPINGS: dict[str, Callable[[Row], str]] = {
    "family": lambda row: row.family,
    "layout": lambda row: {"fsdp": "FSDP only", "tp": "tp > 1, pp 1", "pp": "pp > 1"}[
        row.layout_class
    ],
    "gpu": lambda row: row.gpu,
    "generation": lambda row: row.generation,
    "size": size_of,
}


def grouped(outcomes: Sequence[Outcome], key: Callable[[Row], str]) -> dict[str, Errors]:
    """Return the errors of tokens/s by group."""
    found: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.tokens_error is not None:
            found[key(outcome.row)].append(outcome.tokens_error)
    return {name: summary(errors) for name, errors in sorted(found.items())}


class Sweep(NamedTuple):
    """Runs of one model, batch and number of devices in different layouts.

    Attributes:
        loss: how much slower the layout that the planner ranks first is than the best measured.
        correlation: Spearman's, of predicted and measured tokens/s.
        close: the predicted probability that the first one is at most 3% slower than the best.
    """

    name: str
    rows: int
    loss: float
    correlation: float
    close: float


def sweeps(outcomes: Sequence[Outcome]) -> list[Sweep]:
    """Find the sweeps of layouts with three rows or more, and judge the ranking in each."""
    groups: dict[tuple[object, ...], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        row = outcome.row
        if outcome.tokens_error is None:
            continue
        groups[job_of(row)].append(outcome)
    found = []
    for members in groups.values():
        layouts = {(o.row.setup.layout, o.row.setup.batch, o.row.setup.recompute) for o in members}
        if len(layouts) < 3:
            continue
        measured = [o.row.tokens_s or 0.0 for o in members]
        predicted = [
            value * (1 + (o.tokens_error or 0.0))
            for value, o in zip(measured, members, strict=True)
        ]
        order = sorted(range(len(members)), key=predicted.__getitem__, reverse=True)
        first = order[0]
        candidates = [Candidate(predicted[place], members[place].tokens_spread) for place in order]
        row = members[0].row
        found.append(
            Sweep(
                f"{row.source[:40]}: {row.model}, {row.setup.layout.world_size} devices",
                len(members),
                1 - measured[first] / max(measured),
                _spearman(predicted, measured),
                close_probability(candidates),
            )
        )
    return found


def job_of(row: Row) -> tuple[object, ...]:
    """Return what the runs of a sweep have in common."""
    setup = row.setup
    return row.source, row.gpu, setup.layout.world_size, setup.batch.seq_len, setup.sizes


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [
            sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2
            for value in values
        ]

    a, b = ranks(one), ranks(other)
    mean = (len(a) - 1) / 2
    product = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    norm = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return product / norm if norm else 0.0


def answer(outcomes: Sequence[Outcome], skipped: Sequence[Skipped]) -> dict[str, object]:
    """Return the object that ``--json`` prints."""
    tokens = summary([o.tokens_error for o in outcomes if o.tokens_error is not None])
    memory = summary([o.memory_error for o in outcomes if o.memory_error is not None])
    judged = [o for o in outcomes if o.decision]
    by_source: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.tokens_error is not None:
            by_source[outcome.row.source].append(outcome.tokens_error)
    return {
        "rows": len(outcomes),
        "tokens_rows": tokens.rows,
        "memory_rows": memory.rows,
        "skipped": len(skipped),
        "median_error": tokens.median,
        "p90_error": tokens.p90,
        "bias": tokens.bias,
        **_coverage_json(outcomes),
        "memory_median_error": memory.median,
        "memory_p90_error": memory.p90,
        "sweeps": [sweep._asdict() for sweep in sweeps(outcomes)],
        "false_fits": sum(o.fits and o.row.ran_out_of_memory for o in judged),
        "false_refusals": sum(not o.fits and not o.row.ran_out_of_memory for o in judged),
        "by_source": {
            source: summary(errors)._asdict() for source, errors in sorted(by_source.items())
        },
        "by_layout": {
            name: errors._asdict()
            for name, errors in grouped(outcomes, GROUPINGS["layout"]).items()
        },
    }


def _coverage_json(outcomes: Sequence[Outcome]) -> dict[str, object]:
    tokens, memory = tokens_coverage(outcomes), memory_coverage(outcomes)
    generations = sorted({o.row.generation for o in outcomes})
    return {
        "coverage_80": {
            "time": tokens.share,
            "memory": memory.share,
            "time_by_generation": {
                name: tokens_coverage([o for o in outcomes if o.row.generation == name]).share
                for name in generations
            },
        },
        "interval_width_median": {"time": tokens.width, "memory": memory.width},
    }


def report(outcomes: Sequence[Outcome], skipped: Sequence[Skipped], worst: int) -> None:
    """Print the tables for people."""
    print(f"{'tokens/s':34} rows   median      90th     bias")
    tokens = [o.tokens_error for o in outcomes if o.tokens_error is not None]
    print(f"{'all':32} {summary(tokens)}")
    for title, key in GROUPINGS.items():
        print(f"by {title}")
        for name, errors in grouped(outcomes, key).items():
            print(f"  {name[:30]:30} {errors}")
    memory: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.memory_error is not None:
            memory["all"].append(outcome.memory_error)
            memory[outcome.row.family].append(outcome.memory_error)
    print("memory")
    for name, values in memory.items():
        print(f"  {name[:30]:30} {summary(values)}")
    wrong = [o for o in outcomes if o.decision and o.fits == o.row.ran_out_of_memory]
    names = ", ".join(o.row.id for o in wrong) or "none"
    print(f"fits or not: {len(wrong)} wrong decisions: {names}")
    print(
        "sweeps of layouts: rows, measured loss of the layout ranked first, rank correlation, "
        "predicted probability that the loss is at most 3%"
    )
    for sweep in sweeps(outcomes):
        judged = f"{sweep.loss:6.1%} {sweep.correlation:+.2f} {sweep.close:4.0%}"
        print(f"  {sweep.name:70} {sweep.rows:3d} {judged}")
    by_size = sorted(
        (o for o in outcomes if o.tokens_error is not None),
        key=lambda o: -abs(o.tokens_error or 0.0),
    )
    print(f"the worst {worst} rows")
    for outcome in by_size[:worst]:
        print(f"  {outcome.tokens_error:+7.1%} {describe(outcome.row)}")
    for row in skipped:
        print(f"skipped {row.place} ({row.id}): {row.reason}")


def describe(row: Row) -> str:
    """Describe a row in a line: its layout, and where the predicted time goes."""
    setup, layout = row.setup, row.setup.layout
    time = predict_time(setup)
    parts = {"recompute": time.recompute_s, "bubble": time.bubble_s, **time.exposed_s}
    shares = ", ".join(
        f"{name} {seconds / time.step_s:.0%}"
        for name, seconds in parts.items()
        if seconds > 0.02 * time.step_s
    )
    return (
        f"{row.id:10} {row.model[:16]:16} {row.gpu[:9]} x{layout.world_size} tp{layout.tp} "
        f"pp{layout.pp} dp{layout.batch_ranks} cp{layout.cp} mbs{setup.batch.micro_batch} "
        f"x{setup.batch.micro_batches} seq{setup.batch.seq_len} {setup.recompute}: {shares}"
    )


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table for a page: each run with its measured and its predicted tokens/s."""
    lines = [
        "| run | model | devices | layout | measured | predicted | 80% interval | error | fits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        row, error = outcome.row, outcome.tokens_error
        if row.tokens_s is None or error is None:
            continue
        predicted = row.tokens_s * (1 + error)
        low, high = outcome.tokens_interval
        layout, batch = row.setup.layout, row.setup.batch
        stages = f" x {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        rounds = f" x {row.setup.rounds}" if row.setup.rounds > 1 else ""
        fits_text = ("yes" if outcome.fits else "no") if outcome.decision else "-"
        lines.append(
            f"| `{row.id}` | {row.model} | {layout.world_size:,} {row.gpu.split('-')[0]} "
            f"| tp {layout.tp}, pp {layout.pp}{stages}, dp {layout.batch_ranks}, ep {layout.ep}, "
            f"{batch.micro_batch} x {batch.micro_batches}{rounds} samples "
            f"| {row.tokens_s:,.0f} | {predicted:,.0f} "
            f"| {predicted * low:,.0f}-{predicted * high:,.0f} | {error:+.1%} "
            f"| {fits_text} |"
        )
    return lines


def errors_of(outcomes: Sequence[Outcome], *, memory: bool = False) -> "list[Error]":
    """Return the errors of tokens/s, or of memory, from which spreads are estimated."""
    from tools.planner.spreads import Error  # numpy is needed only here

    found = []
    for o in outcomes:
        error = o.memory_error if memory else o.tokens_error
        if error is not None:
            parts = o.memory_spread if memory else o.tokens_spread
            found.append(Error(o.row.family, job_of(o.row), log1p(error), parts))
    return found


def left_out(rows: Sequence[Row], others: Sequence[Row]) -> list[Outcome]:
    """Predict each row with constants that were fitted to ``rows`` without its family."""
    from tools.planner.fit import fit_without_each_family  # numpy is needed only here

    found = [
        outcome
        for family, constants in fit_without_each_family(rows).items()
        for outcome in evaluate([row for row in rows if row.family == family], constants)[0]
    ]
    return found + evaluate(others, SHIPPED)[0]


def holdout(rows: Sequence[Row], others: Sequence[Row]) -> list[Outcome]:
    """Fit without each family of sources in turn, and predict that family.

    Its intervals are those that the errors on the other families give.
    """
    from tools.planner.spreads import estimate

    found = left_out(rows, others)
    ids = {o.row.id for o in found}
    never_fitted = [row for path in NEVER_FITTED for row in read(path)[0] if row.id not in ids]
    known = found + evaluate(never_fitted, SHIPPED)[0]
    time, memory = errors_of(known), errors_of(known, memory=True)
    result: list[Outcome] = []
    for family in sorted({o.row.family for o in found}):
        spreads = estimate(
            [error for error in time if error.family != family],
            [error for error in memory if error.family != family],
        )
        of_family = [o._replace(spreads=spreads) for o in found if o.row.family == family]
        errors = [o.tokens_error for o in of_family if o.tokens_error is not None]
        print(f"  without {family[:22]:22} {summary(errors)}", flush=True)
        result += of_family
    return result


def calibrated(outcomes: Sequence[Outcome], name: str) -> list[Outcome]:
    """Predict the other runs on a machine after one run on it.

    Raises:
        UserError: no such run is there, or its tokens/s are not given.
    """
    known = next((o for o in outcomes if o.row.id == name), None)
    if known is None or known.tokens_error is None:
        raise UserError(f"--calibrate {one_line(name, 80)}: no run with tokens/s has this id")
    calibration = Calibration((Observation(log1p(known.tokens_error), known.tokens_spread),))
    found = []
    for outcome in outcomes:
        if outcome is known or outcome.row.gpu != known.row.gpu or outcome.tokens_error is None:
            continue
        run = outcome.tokens_spread
        error = (1 + outcome.tokens_error) / exp(calibration.expected(run)) - 1
        found.append(outcome._replace(tokens_error=error, left_spread=calibration.spread(run)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("csv", nargs="+", help="published runs, with the columns of published.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--table", action="store_true", help="print a table of all runs")
    parser.add_argument("--holdout", action="store_true", help="fit without each family in turn")
    parser.add_argument(
        "--calibrate", metavar="ID", help="learn from a run, and predict the others"
    )
    parser.add_argument("--worst", type=int, default=20, help="rows to list (20)")
    arguments = parser.parse_args(argv)
    try:
        files = [read(path) for path in arguments.csv]
    except UserError as error:
        print(*error.lines, sep="\n", file=sys.stderr)
        return error.status
    rows = [row for of_file, _ in files for row in of_file]
    skipped = [row for _, of_file in files for row in of_file]
    if arguments.holdout:
        print("each family of sources left out of the fit in turn; tokens/s")
        fitted = files[0][0]
        outcomes = holdout(fitted, rows[len(fitted) :])
        failed: list[Skipped] = []
    else:
        outcomes, failed = evaluate(rows, SHIPPED)
    skipped += failed
    if arguments.calibrate is not None:
        try:
            outcomes = calibrated(outcomes, arguments.calibrate)
        except UserError as error:
            print(*error.lines, sep="\n", file=sys.stderr)
            return error.status
    if arguments.json:
        print(json.dumps(answer(outcomes, skipped)))
    elif arguments.table:
        print(*table(outcomes), sep="\n")
    else:
        report(outcomes, skipped, arguments.worst)
    return 0


if __name__ == "__main__":
    sys.exit(main())
