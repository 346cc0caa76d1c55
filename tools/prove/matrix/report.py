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
from tools.prove.matrix.cover import COLUMNS, STEPS, Cover, Row, line_of, recipe_of
from tools.prove.paths import MATRIX_PAGE

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
EXPLANATION = [
    "The layouts hold, as far as it is legal, every schedule with every `zero` and every mode of",
    "checkpointing, every two values of any two rows of this table, and every schedule with",
    "every two values of most rows. The numbers count layouts; `-` is refused or has no meaning.",
    "`bash tools/prove/run matrix` writes this page.",
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
    schedules = COLUMNS["schedule"]
    lines = [f"| layouts with | {' | '.join('no `pp`' if s == 'none' else s for s in schedules)} |"]
    lines.append("|---" * (len(schedules) + 1) + "|")
    for column, values in COLUMNS.items():
        if column == "schedule":
            continue
        for value in values:
            counts = [
                sum(r["schedule"] == s and r[column] == value for r in matrix.rows)
                for s in schedules
            ]
            lines.append(
                f"| {column} {value} | {' | '.join(str(count or '-') for count in counts)} |"
            )
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
