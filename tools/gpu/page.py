"""Writes ``docs/gpu.md`` from the results of the parts."""

import json
from pathlib import Path
from typing import Any

from tools.gpu.parts import PARTS
from tools.prove.paths import ROOT

PAGE = ROOT / "docs" / "gpu.md"
_HEAD = """# Measured on a GPU

`python -m tools.gpu run --out FOLDER` measures what is on this page, and
`python -m tools.gpu page FOLDER` writes it.
"""


def write(folder: Path) -> None:
    """Write the page from the files of a folder."""
    PAGE.write_text(text_of(folder))
    print(PAGE.relative_to(ROOT))


def text_of(folder: Path) -> str:
    """Return the text of the page. A part without a file is left out, one that failed is named."""
    parts = [_HEAD]
    for name, part in PARTS.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        title = part.what[0].upper() + part.what[1:]
        parts.append(f"## {title}\n\n`{name}`, {result['date']}, {result['seconds']:.0f} s.\n")
        if "error" in result:
            parts.append(f"It failed:\n\n```\n{result['error'][-1500:]}\n```\n")
        else:
            parts.append(_table(result["figures"]))
    return "\n".join(parts)


def _table(figures: dict[str, Any], prefix: str = "") -> str:
    """Return a table with a row for each figure."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in _flat(figures, prefix))
    return f"| | |\n|---|---|\n{rows}\n"


def _flat(figures: Any, prefix: str) -> list[tuple[str, str]]:
    if isinstance(figures, dict):
        found = []
        for name, value in figures.items():
            found += _flat(value, f"{prefix}: {name}" if prefix else name)
        return found
    if isinstance(figures, float):
        return [(prefix, f"{figures:.4g}")]
    if isinstance(figures, list):
        return [(prefix, "; ".join(map(str, figures)))]
    return [(prefix, str(figures).replace("|", "/").replace("\n", " "))]
