"""The recipe of a job that runs a checkpoint's model on several ranks, or on one."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from composer3d.generate.load import Checkpoint
from composer3d.recipe.draft import ParsedRecipe
from composer3d.recipe.tables import make_document


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
    return make_document(name, {"model": model, **tables})
