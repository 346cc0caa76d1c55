"""Write the report of the matrix proof: the page ``docs/matrix.md``, and its summary in the README.

The README has a block between two markers, which ``write`` replaces. The page is written whole.
"""

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

from composer3d.recipe.rules import violations
from composer3d.verify.judge import Verdict
from tools.prove.matrix.cover import (
    COLUMNS,
    EXPERTS,
    OF_EXPERTS,
    STEPS,
    Cover,
    Row,
    line_of,
    recipe_of,
)
from tools.prove.paths import MATRIX_PAGE

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
EXPLANATION = [
    "The layouts hold, as far as it is legal, every schedule with every `zero` and every mode of",
    "checkpointing, every two values of any two rows of this table, and every schedule with",
    "every two values of most rows. The numbers count layouts; `-` is refused or has no meaning.",
    "`bash tools/prove/run matrix` writes this page.",
]
EXPLANATION_OF_EXPERTS = [
    "`ep` is the number of ranks that share the experts of a layer; `none` is a model without",
    "experts. Each number holds every schedule with every `zero` and with every mode of",
    "checkpointing, and every two values of two of `pp`, `data`, `cp` and `tp`, as far as it is",
    "legal and has at most 16 processes.",
]


def write(root: Path, matrix: Cover, verdicts: list[Verdict], seconds: float) -> None:
    """Write ``docs/matrix.md``, and the block of the README in the checkout ``root``."""
    lines = summary(verdicts, seconds)
    MATRIX_PAGE.write_text(page(lines, matrix, verdicts))
    readme = root / "README.md"
    readme.write_text(with_block(readme.read_text(), lines))


def page(summary_lines: list[str], matrix: Cover, verdicts: list[Verdict]) -> str:
    """The whole text of ``docs/matrix.md``."""
    parts = [
        "# What the covering matrix proves",
        "\n".join(summary_lines),
        "\n".join(EXPLANATION),
        crosstab(matrix),
        "\n".join(EXPLANATION_OF_EXPERTS),
        crosstab_of_experts(matrix),
        refusals(matrix),
        layouts(matrix, verdicts),
    ]
    return "\n\n".join(parts) + "\n"


def with_block(readme: str, summary_lines: list[str]) -> str:
    """Return the text of the README with ``summary_lines`` between the two markers.

    Raises:
        ValueError: the README does not hold both markers, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md must hold the lines {BEGIN} and {END}, in this order")
    return "\n".join([before + BEGIN, *summary_lines, END + after])


def summary(verdicts: list[Verdict], seconds: float) -> list[str]:
    """The result of the proof in three lines: the count, the worst errors, the date and machine."""
    fields = {
        "loss": "loss_rel_err",
        "norm": "grad_norm_rel_err",
        "gradients": "max_grad_rel_err",
        "weights": "max_weight_rel_err",
    }
    worst = ", ".join(
        f"{name} {max(getattr(verdict, field) or 0.0 for verdict in verdicts):.0e}"
        for name, field in fields.items()
    )
    most_processes = max(verdict.world_size for verdict in verdicts)
    return [
        f"{len(verdicts)} compositions on 1 to {most_processes} processes, each against one "
        f"process in float64 over {STEPS} steps and a validation: all exact.",
        f"Worst relative errors: {worst}.",
        f"{date.today()}, `bash tools/prove/run matrix`, torch {version('torch')}, "
        f"{os.cpu_count()} cores ({platform.machine()}), {seconds / 60:.0f} minutes.",
    ]


def crosstab(matrix: Cover) -> str:
    """The table of counts: layouts by value (rows) and schedule (columns).

    "-" is a combination that is refused or has no meaning.
    """
    headings = {name: "no `pp`" if name == "none" else name for name in COLUMNS["schedule"]}
    columns = [column for column in COLUMNS if column != "schedule"]
    return _count_layouts(matrix, "schedule", headings, columns)


def crosstab_of_experts(matrix: Cover) -> str:
    """The table of counts of the layouts with experts: by value (rows) and ep (columns)."""
    headings = {size: f"`ep` {size}" for size in COLUMNS["ep"][1:]}
    shown = {*EXPERTS, *(column for pair in OF_EXPERTS for column in pair)} - {"ep"}
    return _count_layouts(matrix, "ep", headings, [column for column in COLUMNS if column in shown])


def _count_layouts(matrix: Cover, by: str, headings: dict[str, str], columns: list[str]) -> str:
    """Count the layouts with each value of ``columns`` and each value of ``by`` that has a heading.

    Args:
        matrix: the layouts.
        by: the column of the matrix whose values are the columns of the table.
        headings: the heading of each of these values.
        columns: the columns of the matrix whose values are the rows of the table.
    """
    lines = [f"| layouts with | {' | '.join(headings.values())} |"]
    lines.append("|---" * (len(headings) + 1) + "|")
    for column in columns:
        for value in COLUMNS[column]:
            counts = [
                sum(row[by] == heading and row[column] == value for row in matrix.rows)
                for heading in headings
            ]
            shown_counts = " | ".join(str(count or "-") for count in counts)
            lines.append(f"| {column} {value} | {shown_counts} |")
    return "\n".join(lines)


def refusals(matrix: Cover) -> str:
    """The pairs of values that no legal layout holds, each with the message that refuses it."""
    lines = ["## Refused, with the message", ""]
    for target, row in matrix.refused:
        cells = ", ".join(f"{column} {value}" for column, value in target)
        lines.append(f"- {cells}: {message_of(row)}")
    return "\n".join(lines)


def message_of(row: Row) -> str:
    """The first message that refuses the layout ``row``."""
    recipe = recipe_of(row)
    return violations(recipe)[0].message(recipe)


def layouts(matrix: Cover, verdicts: list[Verdict]) -> str:
    """Every proven layout with its largest gradient error."""
    lines = ["## Proven, with the worst gradient", ""]
    pairs = zip(verdicts, matrix.rows, strict=True)
    lines += [f"- {verdict.max_grad_rel_err:.0e}: {line_of(row)}" for verdict, row in pairs]
    return "\n".join(lines)
