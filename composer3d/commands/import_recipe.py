"""``composer3d import``: make a recipe of a configuration of another program. No torch."""

import json
import sys
from pathlib import Path
from typing import Any

from composer3d.facts.errors import UserError
from composer3d.imports.result import Imported, import_file


def run(
    *,
    file: str,
    out: str | None,
    sets: list[str],
    gpus: int | None,
    model: str | None,
    accept: list[str],
    as_json: bool,
) -> int:
    """Write the recipe, and print what was taken over, what has no equal and what is open.

    Args:
        file: the configuration.
        out: the recipe to make; None prints it. It must not exist.
        sets: values of the recipe, each ``table.key=value``.
        gpus: the number of GPUs; None: what the file says.
        model: a preset that gives the sizes that the file lacks.
        accept: the keys of open points that the user accepts.
        as_json: whether to print one JSON object as the last line.

    Returns:
        The exit status: 0, or 1 if the recipe is a draft with open points.

    Raises:
        UserError: no recipe can be made, or ``out`` cannot be written.
    """
    if out is not None and Path(out).exists():
        raise UserError(f"-o {out}: the file exists; choose another name")
    imported = import_file(file, sets, gpus=gpus, model=model, accept=accept)
    status = 1 if imported.made.open else 0
    if out is not None:
        _write(imported.text, Path(out))
    if as_json:
        print(json.dumps(_as_json(imported)))
        return status
    if out is None:
        print(imported.text, end="")
    report = sys.stderr if out is None else sys.stdout
    print(*_report(imported, out), sep="\n", file=report)
    return status


def _write(text: str, path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"-o {path}: the file cannot be made ({error.strerror})") from None


def _as_json(imported: Imported) -> dict[str, Any]:
    made = imported.made
    return {
        "ok": not made.open,
        "program": made.program,
        "world_size": imported.resolved.recipe.world_size,
        "recipe": imported.text,
        "taken_over": made.taken,
        "not_in_the_file": made.assumed,
        "no_equal": made.lost,
        "no_difference": made.harmless,
        "contradictions": made.contradictions,
        "open": made.open,
    }


def _report(imported: Imported, out: str | None) -> list[str]:
    made, recipe = imported.made, imported.resolved.recipe
    lines = [f"{made.file}: {made.program}, {recipe.world_size:,} GPUs"]
    for title, entries in (
        ("taken over", made.taken),
        ("not in the file", made.assumed),
        ("no equal", made.lost),
        ("contradictions", made.contradictions),
        ("open points", [f"{key}: {line}" for key, line in made.open.items()]),
    ):
        lines.append(f"{title}:" if entries else f"{title}: none")
        lines += [f"  {entry}" for entry in entries]
    if made.harmless:
        lines.append(f"no difference here: {', '.join(made.harmless)}")
    if made.open:
        lines.append(
            f"{out or 'the recipe'} is a draft, which no command runs: settle each open point in "
            "it and delete its line in [open], or import again with --accept KEY for each"
        )
    elif out is not None:
        lines.append(
            f"the recipe is {out}; next: composer3d check {out} --gpus {recipe.world_size}"
        )
    return lines
