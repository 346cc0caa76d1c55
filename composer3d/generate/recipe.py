"""The recipe of a job that runs a checkpoint's model on several ranks, or on one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from composer3d.facts.errors import RecipeError
from composer3d.generate.load import Checkpoint
from composer3d.recipe.draft import ParsedRecipe
from composer3d.recipe.resolve import Resolved, load


def document_of(
    name: str, checkpoint: Checkpoint, tables: Mapping[str, Mapping[str, Any]]
) -> ParsedRecipe:
    """Make a recipe with the checkpoint's model.

    Args:
        name: the name of the document.
        checkpoint: gives the table [model].
        tables: the other tables. A key whose value is None is left out.
    """
    shape = checkpoint.shape
    model = {entry.name: getattr(shape, entry.name) for entry in fields(shape)}
    model = {"architecture": checkpoint.source.architecture, **model}
    content = {
        table: {key: _plain(value) for key, value in values.items() if value is not None}
        for table, values in {"model": model, **tables}.items()
    }
    return ParsedRecipe(name, content, {})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def load_document(
    document: ParsedRecipe, sets: Sequence[str] = (), *, world_size: int | None = None
) -> Resolved:
    """Resolve a recipe of ``document_of``.

    Args:
        document: the recipe.
        sets: overrides, each ``table.key=value``.
        world_size: as in ``load``.

    Raises:
        RecipeError: the recipe cannot be used. Nobody wrote the document, so the error does not
            name it.
    """
    try:
        return load(document, sets, world_size=world_size, check_files=False)
    except RecipeError as error:
        place = re.compile(rf"^{re.escape(document.name)}: | \({re.escape(document.name)}\)")
        raise RecipeError([place.sub("", line) for line in error.lines]) from None
