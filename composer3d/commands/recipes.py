"""``composer3d recipes``: list, show and copy the recipes that come with composer3d. No torch."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.commands import shipped
from composer3d.commands.parser import Parser, did_you_mean
from composer3d.commands.shipped import Options, make_files
from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line
from composer3d.facts.toml import parse_toml
from composer3d.models.registry import architecture
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import AXES, Recipe

__all__ = ["Options"]

FOLDER = Path(__file__).parent.with_name("recipes")


def names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


EXAMPLES = (
    "composer3d recipes ls",
    "composer3d recipes show quickstart",
    "composer3d recipes cp quickstart my.toml",
)


def add_arguments(command: Parser) -> None:
    """Add the arguments, whose names are those of ``Options``."""
    shipped.add_actions(
        command,
        ls="list the recipes with their size, mesh and purpose",
        show="print a recipe as it is written; composer3d check NAME resolves it",
        cp="copy a recipe, with the recipes that it inherits, to change it; overwrites nothing",
        name="a recipe, as ls lists it",
        dest="a folder, or a file that ends with .toml; default: NAME.toml in this folder",
    )


def run(options: Options) -> int:
    """List, show or copy recipes.

    Raises:
        UserError: there is no such recipe, or the copy cannot be made.
    """
    if options.action == "ls":
        return _list(as_json=options.as_json)
    path = find(options.name or "")
    if options.action == "show":
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    made = copy(path, options.dest)
    for file in made:
        print(f"made {one_line(file)}")
    print(f"train it: composer3d train {one_line(made[0])}")
    return 0


def find(name: str) -> Path:
    """Return the file of a recipe of composer3d.

    Raises:
        UserError: there is no such recipe.
    """
    known = names()
    stem = name.removeprefix("recipes/").removesuffix(".toml")
    if stem in known:
        return FOLDER / f"{stem}.toml"
    hint = did_you_mean(stem, known) or "; composer3d recipes ls lists them"
    raise UserError(f"{one_line(name, 200)}: composer3d has no such recipe{hint}")


class ListedRecipe(NamedTuple):
    """One recipe in the list."""

    name: str
    processes: int
    parameters: int
    model: str
    mesh: str
    description: str


def _row_of(name: str) -> ListedRecipe:
    """Describe a recipe. Its files are not opened."""
    path = FOLDER / f"{name}.toml"
    recipe = load(path, check_files=False).recipe
    model_of = architecture(recipe.model.architecture)
    return ListedRecipe(
        name=name,
        processes=recipe.world_size,
        parameters=model_of.count_parameters(recipe.model),
        model=recipe.model.preset or recipe.model.architecture,
        mesh=_mesh_of(recipe),
        description=_description_of(path.read_text(encoding="utf-8")),
    )


def _mesh_of(recipe: Recipe) -> str:
    axes = [f"{axis} {getattr(recipe.mesh, axis)}" for axis in (*AXES, "ep")]
    return " ".join(axis for axis in axes if not axis.endswith(" 1")) or "one process"


def _description_of(text: str) -> str:
    """Return the first sentence of the comment at the beginning of a recipe."""
    comment = []
    for line in text.splitlines():
        # An indented line of the comment is a command.
        if not line.startswith("# ") or line.startswith("#   "):
            break
        comment.append(line.removeprefix("# "))
    # A sentence ends before a capital letter: "et al. 2023" does not end one.
    return re.split(r"(?<=\.)\s+(?=[A-Z])", " ".join(comment))[0].rstrip(".")


def _list(*, as_json: bool) -> int:
    rows = [_row_of(name) for name in names()]
    if as_json:
        answer: dict[str, Any] = {"ok": True, "recipes": [row._asdict() for row in rows]}
        print(json.dumps(answer))
        return 0
    lines = [["recipe", "processes", "model", "parameters", "mesh", "what it is for"]]
    lines += [
        [
            row.name,
            f"{row.processes:,}",
            row.model,
            _short_count(row.parameters),
            row.mesh,
            row.description,
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    for line in lines:
        # Numbers stand at the right of their columns.
        cells = [
            cell.rjust(width) if column in (1, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        print(_fit("  ".join([*cells, line[5]])))
    return 0


def _short_count(count: int) -> str:
    """Return a number of parameters with three digits: ``8.03B``."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,}"


def _fit(line: str) -> str:
    """Cut a line at the width of the terminal. Other readers get the whole line."""
    if not sys.stdout.isatty():
        return line
    columns = shutil.get_terminal_size().columns
    return line if len(line) <= columns else line[: max(1, columns - 3)] + "..."


def copy(path: Path, dest: str | None) -> list[Path]:
    """Copy a recipe, and beside the copy the files that it needs: its bases, and schedules in CSV.

    A file that exists is never changed. One with the same content is used as it is.

    Args:
        path: a recipe of composer3d.
        dest: a folder, or the name of the copy, which ends with ``.toml``. None is a file in the
            working directory, with the name of the recipe.

    Returns:
        The copy, and the other files that were made.

    Raises:
        UserError: a file exists with other content, or cannot be made. Nothing is left then.
    """
    target = Path(dest if dest is not None else path.name)
    if os.path.isdir(target):
        target /= path.name
    elif target.suffix != ".toml":
        raise UserError(
            f"{one_line(target)}: name a folder that exists, or a file that ends with .toml"
        )
    contents = {target: path.read_bytes()}
    for file in _needed_files(path):
        contents.setdefault(target.with_name(file.name), file.read_bytes())
    if target.name in {file.name for file in _needed_files(path)}:
        raise UserError(
            f"{one_line(target)}: the recipe inherits from a file of this name; give the copy "
            "another name"
        )

    return make_files(contents)


def _needed_files(path: Path) -> list[Path]:
    """Return the bases of a recipe of composer3d, and the files of its pipeline schedules."""
    files: list[Path] = []
    place: Path | None = path
    while place is not None:
        tables = parse_toml(place.read_bytes())
        schedule = tables.get("parallel", {}).get("schedule_csv")
        if schedule is not None:
            files.append(place.with_name(schedule))
        base = tables.get("base")
        place = None if base is None else place.with_name(base)
        if place is not None:
            files.append(place)
    return files
