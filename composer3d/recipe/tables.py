"""Make a recipe of tables in Python, instead of a file. No torch here."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

from composer3d.facts.errors import ModelError, RecipeError
from composer3d.models import registry
from composer3d.models.shape import DecoderShape
from composer3d.recipe.draft import ParsedRecipe
from composer3d.recipe.resolve import Resolved, load
from composer3d.recipe.schema import (
    TABLES,
    CheckpointTable,
    CompileTable,
    DataTable,
    MemoryTable,
    MeshTable,
    Model,
    OptimTable,
    ParallelTable,
    PrecisionTable,
    Recipe,
    RunTable,
    model_table,
)
from composer3d.recipe.values import entries_of_recipe

# The tables that ``make_recipe`` takes; the others are for ``composer3d train`` alone.
Table = (
    RunTable
    | MeshTable
    | ParallelTable
    | MemoryTable
    | PrecisionTable
    | CompileTable
    | DataTable
    | OptimTable
    | CheckpointTable
)


def preset(name: str, **changes: Any) -> Model:
    """Return the table [model] of a published model.

    Args:
        name: a preset of any architecture, such as "llama3-8b".
        changes: fields of the shape that replace those of the preset.

    Raises:
        ModelError: there is no such preset.
    """
    for architecture in registry.OURS:
        shape = registry.architecture(architecture).presets.get(name)
        if shape is not None:
            values = {**_fields_of(shape), **changes}
            return _model(architecture, preset=name, **values)
    known = [preset for each in registry.OURS for preset in registry.architecture(each).presets]
    similar = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"the presets are {', '.join(known)}"
    raise ModelError(f"there is no preset {name!r}; {hint}")


def own_model(architecture: str, **sizes: Any) -> Model:
    """Return the table [model] of an architecture of your own.

    Args:
        architecture: "package.module:NAME" of an ``Architecture``. Its module is imported.
        sizes: the fields of the architecture's shape.

    Raises:
        ModelError: the architecture cannot be imported, or is none.
    """
    if architecture.startswith("__main__:"):
        raise ModelError(
            f'"{architecture}": other processes cannot import the program that runs; name its '
            'file, such as "tiny:TINY" for TINY in tiny.py'
        )
    registry.import_architecture(architecture)
    return _model(architecture, **sizes)


def _model(architecture: str, **values: Any) -> Model:
    model: Model = model_table(architecture)(architecture=architecture, **values)
    return model


def _fields_of(shape: DecoderShape) -> dict[str, Any]:
    return {entry.name: getattr(shape, entry.name) for entry in fields(shape)}


def make_recipe(
    model: Model,
    *tables: Table,
    sets: Sequence[str] = (),
    world_size: int | None = None,
    check_files: bool = True,
) -> Recipe:
    """Make a recipe of tables, and check it as a recipe in a file is checked.

    Args:
        model: from ``preset`` or ``own_model``.
        tables: at most one of each kind; a table that is left out has its defaults.
        sets: overrides, each ``table.key=value``, such as "mesh.tp=2".
        world_size: the number of processes, which the mesh must fill. ``mesh.dp_shard = -1`` is
            what the other axes leave of it, or 1 without it.
        check_files: whether to check the files that the recipe names.

    Raises:
        RecipeError: a value is wrong, or a rule of recipes refuses several together: such a layout
            would not be exact, or could not run. There is a line for each problem.
        TypeError: something is none of the tables above.
        ValueError: there are two tables of one kind.
    """
    kinds = {kind: name for name, kind in TABLES.items() if kind in get_args(Table)}
    named: dict[str, Mapping[str, Any]] = {"model": asdict(model)}
    for table in tables:
        if type(table) not in kinds:
            known = ", ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"a {type(table).__name__} is none of the tables {known}")
        name = kinds[type(table)]
        if name in named:
            raise ValueError(f"there are two tables of the kind {type(table).__name__}")
        defaults = {entry.name: entry.default for entry in fields(table)}
        # A value that is the default is not written, so that no message says that it was given.
        named[name] = {key: value for key, value in asdict(table).items() if value != defaults[key]}
    document = make_document("make_recipe", named)
    return load_document(
        document, sets, world_size=world_size, check_files=check_files, may_import=True
    ).recipe


def load_recipe(
    path: str | os.PathLike[str],
    sets: Sequence[str] = (),
    *,
    world_size: int | None = None,
    check_files: bool = True,
) -> Recipe:
    """Read a recipe from a TOML file, and check it.

    The module that ``model.architecture`` names is imported, which runs it: load no recipe of a
    stranger.

    Args:
        path: the file.
        sets, world_size, check_files: as for ``make_recipe``.

    Raises:
        RecipeError: the recipe cannot be used. There is a line for each problem, with its place.
    """
    resolved = load(path, sets, world_size=world_size, check_files=check_files, may_import=True)
    return resolved.recipe


def as_document(recipe: Recipe) -> str:
    """Return a whole recipe as TOML. Loading the text gives an equal recipe."""
    origins = dict.fromkeys(entries_of_recipe(recipe), "Python")
    return Resolved(recipe, origins, False, lambda key: key).to_toml()


def make_document(name: str, tables: Mapping[str, Mapping[str, Any]]) -> ParsedRecipe:
    """Make a recipe that ``load_document`` reads.

    Args:
        name: its name, in place of that of a file.
        tables: the values of each table, by key. A key whose value is None is left out.
    """
    return ParsedRecipe(name, {table: _plain(values) for table, values in tables.items()}, {})


def _plain(value: Any) -> Any:
    """Return a value as TOML would hold it: arrays are lists, and nothing is None."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def load_document(
    document: ParsedRecipe,
    sets: Sequence[str] = (),
    *,
    world_size: int | None = None,
    check_files: bool = False,
    may_import: bool = False,
) -> Resolved:
    """Resolve a recipe of ``make_document``.

    Args:
        document: the recipe.
        sets: overrides, each ``table.key=value``.
        world_size, check_files, may_import: as in ``load``.

    Raises:
        RecipeError: the recipe cannot be used. Nobody wrote the document, so the error does not
            name it.
    """
    try:
        return load(
            document, sets, world_size=world_size, check_files=check_files, may_import=may_import
        )
    except RecipeError as error:
        place = re.compile(rf"^{re.escape(document.name)}: | \({re.escape(document.name)}\)")
        raise RecipeError([place.sub("", line) for line in error.lines]) from None
