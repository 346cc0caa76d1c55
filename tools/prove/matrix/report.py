"""What the proof of the matrix writes: ``docs/matrix.md``, and the table in the README."""

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

from composer3d.recipe.rules.layout import violations
from composer3d.verify.proof import Verdict
from tools.prove.matrix.cover import COLUMNS, Cover, Row, line_of, recipe_of
from tools.prove.paths import MATRIX_PAGE

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


def write(root: Path, matrix: Cover, verdicts: list[Verdict], seconds: float) -> None:
    head = summary(verdicts, seconds)
    table = crosstab(matrix)
    text = f"# What the covering matrix proves\n\n{head}\n\n{table}\n\n{refusals(matrix)}\n\n{layouts(matrix, verdicts)}\n"
    MATRIX_PAGE.write_text(text)
    readme = root / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n{head}\n\n{table}\n{END}{after}")


def summary(verdicts: list[Verdict], seconds: float) -> str:
    fields = {"loss": "loss_rel_err", "norm": "grad_norm_rel_err", "gradients": "max_grad_rel_err"}
    fields["weights"] = "max_weight_rel_err"
    worst = ", ".join(
        f"{name} {max(getattr(v, field) or 0.0 for v in verdicts):.0e}"
        for name, field in fields.items()
    )
    return (
        f"{len(verdicts)} compositions on 1 to {max(v.world_size for v in verdicts)} processes, each against one "
        f"process in float64 over 3 steps and a validation: all exact. Worst relative errors: {worst}.\n"
        f"{date.today()}, `bash tools/prove/run matrix`, torch {version('torch')}, {os.cpu_count()} cores "
        f"({platform.machine()}), {seconds / 60:.0f} minutes."
    )


def crosstab(matrix: Cover) -> str:
    """Layouts by value (rows) and schedule (columns); 0: not legal, or without meaning there."""
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
    lines = ["## Refused, with the message", ""]
    for target, row in matrix.refused:
        cells = ", ".join(f"{column} {value}" for column, value in target)
        lines.append(f"- {cells}: {message_of(row)}")
    return "\n".join(lines)


def message_of(row: Row) -> str:
    recipe = recipe_of(row)
    return violations(recipe)[0].message(recipe)


def layouts(matrix: Cover, verdicts: list[Verdict]) -> str:
    lines = ["## Proven, with the worst gradient", ""]
    pairs = zip(verdicts, matrix.rows, strict=True)
    lines += [f"- {verdict.max_grad_rel_err:.0e}: {line_of(row)}" for verdict, row in pairs]
    return "\n".join(lines)
