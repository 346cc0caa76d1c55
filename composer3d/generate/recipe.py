"""The recipe of a job that runs a checkpoint's model on several ranks, or on one."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from composer3d.generate.load import Checkpoint
from composer3d.recipe.values import as_toml
from composer3d.spec.errors import RecipeError


@contextmanager
def recipe_of(
    name: str, checkpoint: Checkpoint, tables: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Write a recipe with the checkpoint's model, and remove it at the end.

    Args:
        name: the name of its file.
        checkpoint: gives the table [model].
        tables: the other tables. A key whose value is None is left out.

    Yields the path of the file. Within the context, a RecipeError loses the places in it.
    """
    shape = checkpoint.shape
    model = {entry.name: getattr(shape, entry.name) for entry in fields(shape)}
    model = {"architecture": checkpoint.source.architecture, **model}
    lines: list[str] = []
    for table, values in {"model": model, **tables}.items():
        lines += [f"[{table}]"]
        lines += [f"{key} = {as_toml(value)}" for key, value in values.items() if value is not None]
    with tempfile.TemporaryDirectory(prefix="composer3d-") as folder:
        path = Path(folder) / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n")
        try:
            yield str(path)
        except RecipeError as error:
            # Nobody wrote this file, so its lines say nothing.
            place = re.compile(rf"^{re.escape(str(path))}(:\d+)?: | \({re.escape(str(path))}:\d+\)")
            raise RecipeError([place.sub("", line) for line in error.lines]) from None
