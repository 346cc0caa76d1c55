#!/usr/bin/env python3
"""Write the page with every published run: measured, predicted, and what others predicted.

    python tools/planner_table.py

It reads ``tools/planner/published*.csv``, and writes ``docs/planner_table.md``.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line
from composer3d.planner.constants import SHIPPED
from composer3d.planner.intervals import Interval
from tools.planner.rows import REQUIRED, Row, read
from tools.planner_eval import Outcome, evaluate, memory_coverage, tokens_coverage

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "planner_table.md"
FILES = tuple(sorted((ROOT / "tools" / "planner").glob("published*.csv")))

_TOP = """# Every published run, and what is predicted of it

[plan.md](plan.md) says how. One command makes this page from `published*.csv` in `tools/planner/`:

```bash
python tools/planner_table.py
```

**Add a run:** a line in one of these files, or in a new one beside them, with the columns
{columns}
and as many of the others as are known. Then run the command. The constants of the planner are
fitted to `published.csv`, so that errors on its runs are smaller than on a new one. No constant is
fitted to the others. What the planner of somebody else predicted of a run goes into `predicted_by`,
`predicted_tok_s_gpu` and `predicted_mem_gib`.

Rates are tokens per second and device; memory is in GiB. In brackets stand the 80% interval and the
error. A star marks a run outside its interval. Of {rows:,} runs, {inside:.0%} are inside in time,
and of {memory_rows:,} runs, {inside_memory:.0%} are inside in memory.

"""


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the page with every run, by source."""
    memory_rows = sum(o.memory_error is not None for o in outcomes)
    text = _TOP.format(
        columns=", ".join(f"`{name}`" for name in REQUIRED),
        rows=sum(o.tokens_error is not None for o in outcomes),
        inside=tokens_coverage(outcomes).share or 0.0,
        inside_memory=memory_coverage(outcomes).share or 0.0,
        memory_rows=memory_rows,
    )
    by_source: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_source[outcome.row.source].append(outcome)
    lines = []
    for source, members in by_source.items():
        lines += [f"## {_cell(source)}", "", *_HEAD, *map(_line, members), ""]
    return text + "\n".join(lines)


_HEAD = (
    "| run | model | devices | layout | tokens/s | predicted | memory | predicted | others |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _line(outcome: Outcome) -> str:
    row = outcome.row
    layout, batch = row.setup.layout, row.setup.batch
    cells = (
        f"`{_cell(row.id)}`",
        _cell(row.model),
        f"{layout.world_size:,} {row.gpu}",
        f"tp {layout.tp}, pp {layout.pp} x {layout.stages_per_rank}, dp {layout.batch_ranks}, "
        f"cp {layout.cp}, ep {layout.ep}, zero {layout.zero}, "
        f"{batch.micro_batch} x {batch.micro_batches} x {batch.seq_len:,}",
        *_cells(row.tokens_s, outcome.tokens_error, outcome.tokens_interval, ",.0f"),
        *_cells(row.memory_gib, outcome.memory_error, outcome.memory_interval, ".1f"),
        _other(row),
    )
    return f"| {' | '.join(cells)} |"


def _cells(
    measured: float | None, error: float | None, interval: Interval, form: str
) -> tuple[str, str]:
    if measured is None or error is None:
        return "-", "-"
    predicted = measured * (1 + error)
    low, high = predicted * interval.low, predicted * interval.high
    mark = "" if low <= measured <= high else " *"
    return (
        f"{measured:{form}}",
        f"{predicted:{form}} ({low:{form}}-{high:{form}}, {error:+.1%}){mark}",
    )


def _other(row: Row) -> str:
    if row.other is None:
        return "-"
    name, tokens, memory = row.other
    words = [f"{tokens / row.tokens_s - 1:+.1%} time"] if tokens and row.tokens_s else []
    words += [f"{memory / row.memory_gib - 1:+.1%} memory"] if memory and row.memory_gib else []
    return f"{_cell(name)}: {', '.join(words)}"


def _cell(text: str) -> str:
    """Return a text of a file as one that cannot end a cell of a table, nor be markup."""
    return "".join(f"\\{c}" if c in "\\|`*_<>[]#" else c for c in one_line(text, 80))


def main() -> int:
    try:
        rows = [row for path in FILES for row in read(path)[0]]
    except UserError as error:
        print(*error.lines, sep="\n", file=sys.stderr)
        return error.status
    PAGE.write_text(page(evaluate(rows, SHIPPED)[0]))
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(rows)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
