"""Writes ``docs/gpu.md`` from the results of the parts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.parts import PARTS, planned
from tools.prove.paths import ROOT

PAGE = ROOT / "docs" / "gpu.md"
RESULTS = Path(__file__).parent / "results"
_HEAD = """# Measured on a GPU

`python -m tools.gpu run --out FOLDER` measures what one GPU can show, in parts that can each be
repeated. What is below was measured once for each card. Its files are in
[tools/gpu/results](../tools/gpu/results), and `python -m tools.gpu page` writes this page from
them. Columns that begin with `planned` are what `composer3d plan` says of the same recipe today.

A profiled step is slower than the others. Each column in ms adds up the kernels, copies and fills
of one category; `idle` is the share of the step in which no kernel ran; `waits` is how often the
host waited for an event or a stream.

When the H100 was measured, `compile.enabled` did not compile the loss, and blocks of the ring ran
FlashAttention 2. On the H200, Triton could not start: everything that needs it was skipped,
including 9 of the 28 layouts.
"""


def write(folder: Path) -> None:
    """Write the page from the files of a folder."""
    PAGE.write_text(text_of(folder))
    print(PAGE.relative_to(ROOT))


def text_of(folder: Path) -> str:
    """Return the text of the page: the files in ``folder``, by part and then by card.

    A part without a file is left out, one that failed is named.
    """
    parts = [_HEAD]
    paths = [(name, path) for name in PARTS for path in sorted(folder.rglob(f"{name}.json"))]
    for name, path in paths:
        part, result = PARTS[name], json.loads(path.read_text())
        card = result.get("card", "no card")
        title = part.what[0].upper() + part.what[1:]
        parts.append(
            f"## {title}\n\n`{name}`, {card}, {result['date']}, {result['seconds']:.0f} s.\n"
        )
        if "error" in result:
            parts.append(f"It failed:\n\n```\n{result['error'][-1500:]}\n```\n")
        else:
            figures = {
                row: {**value, **planned(name, row, card)} if isinstance(value, dict) else value
                for row, value in result["figures"].items()
            }
            parts += _tables(figures)
    return "\n".join(parts)


def _tables(figures: Mapping[str, Any]) -> list[str]:
    """Return tables: of the figures that are no tables themselves, and one for each kind of row.

    Figures of figures are a row each. What is nested more deeply is a row of another table.
    """
    rows = {name: value for name, value in figures.items() if isinstance(value, dict)}
    single = {name: value for name, value in figures.items() if name not in rows}
    tables = []
    if single:
        lines = [f"| {name} | {_shown(value)} |" for name, value in single.items()]
        tables.append("\n".join(["| | |", "|---|---|", *lines]) + "\n")
    if set(rows) == {"rows"}:
        return [*tables, *_tables(rows["rows"])]
    if not rows:
        return tables
    flat = {
        name: {column: value for column, value in row.items() if not isinstance(value, dict)}
        for name, row in rows.items()
    }
    tables.append(_matrix("", flat))
    nested = {column for row in rows.values() for column in row if isinstance(row[column], dict)}
    for column in sorted(nested):
        tables.append(_matrix(column, {name: row.get(column, {}) for name, row in rows.items()}))
    return tables


def _matrix(corner: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a line for each row, and all columns that some row has."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [
        f"| {corner} | {' | '.join(columns)} |",
        f"|{'---|' * (len(columns) + 1)}",
    ]
    for name, row in rows.items():
        cells = [_shown(row[column]) if column in row else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return "; ".join(map(_shown, value))
    return str(value).replace("|", "/").replace("\n", " ")
