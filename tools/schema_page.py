"""Write ``docs/reference.md`` from the schema of recipes: ``python -m tools.schema_page``."""

import sys
from pathlib import Path

from composer3d.recipe.values import SchemaRow, schema_tables

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"

_HEAD = """# Every key of a recipe

`python -m tools.schema_page` writes this page from the schema, and a test compares them.
`composer3d check --schema` prints the same. [recipes.md](recipes.md) says how recipes work, and
what the choices do. A key without a default may be absent.

Besides the tables, a recipe may begin with `base = "FILE"`, the recipe to inherit from; its path is
relative to the recipe.
"""


def text() -> str:
    """Return the page."""
    parts = [_HEAD]
    for heading, rows in schema_tables().items():
        table, _, condition = heading.partition(" ")
        parts.append(f"## {table}{f' {condition}' if condition else ''}\n")
        parts.append("| key | default | type | meaning |\n|---|---|---|---|")
        parts.extend(_line(row) for row in rows)
        parts.append("")
    return "\n".join(parts)


def _line(row: SchemaRow) -> str:
    default = f"`{row.default}`" if row.default else ""
    cells = (f"`{row.name}`", default, row.type_text, row.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    """Write the page."""
    PAGE.write_text(text())
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
