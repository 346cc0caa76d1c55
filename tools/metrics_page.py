"""Write the table of metrics in docs/review.md: ``python -m tools.metrics_page``.

A test compares the page with the tags of TensorBoard.
"""

import re
from pathlib import Path

from composer3d.facts.tags import TAGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "review.md"
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"


def page(text: str) -> str:
    """Return the text of the page with the table between its markers.

    Raises:
        ValueError: the page lacks the markers.
    """
    lines = ["| key | tag in TensorBoard | meaning |", "|---|---|---|"]
    lines += [f"| `{key}` | `{tag.name}` | {tag.description} |" for key, tag in TAGS.items()]
    table = "\n".join([BEGIN, *lines, END])
    made, found = re.subn(f"{BEGIN}.*?{END}", lambda _: table, text, flags=re.DOTALL)
    if not found:
        raise ValueError(f"the page lacks {BEGIN} and {END}")
    return made


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
