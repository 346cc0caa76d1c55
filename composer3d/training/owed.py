"""Find out whether the last validation of a run was cut off. No torch here."""

import os
from pathlib import Path

from composer3d.facts.files import open_plain, parse_json
from composer3d.recipe.schema import ValidationTable

# The file of metrics in a run's folder.
METRICS = "metrics.jsonl"

# Bytes at the end of metrics.jsonl that are read. The lines of the newest step are among them.
_TAIL = 4 << 20


def owes_validation(metrics: Path, table: ValidationTable, last_step: int) -> bool:
    """Return whether the validation after the last step is not among the metrics of a run.

    The step is saved before it is validated. So a signal or a kill in the validation loses no step,
    but the next start would have nothing to do.

    Args:
        metrics: the run's file of metrics. Without one, nothing is known, and nothing is owed.
        table: the recipe's ``[validation]``.
        last_step: ``run.steps``, which are all done.
    """
    if not table.every:
        return False
    try:
        with open_plain(metrics, follow_links=False) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read(_TAIL).splitlines()
    except (OSError, ValueError):
        return False
    return not any(_is_validation(line, last_step) for line in lines)


def _is_validation(line: bytes, step: int) -> bool:
    if b"validation_loss" not in line:
        return False
    try:
        values = parse_json(line)
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("step") == step and "validation_loss" in values
