"""``composer3d inspect``: report what a checkpoint contains and whether it is complete."""

import json
from pathlib import Path
from typing import Any

from composer3d.convert.inspect import inspect


def run(path: str, *, tensors: bool, as_json: bool) -> int:
    """Print a report on a checkpoint.

    Args:
        path: the checkpoint, in any format that ``convert`` reads.
        tensors: whether to list each tensor with its shape and dtype.
        as_json: whether to print one JSON object instead of text.

    Returns:
        The exit status: 0 if the checkpoint is complete, 1 if it is not.

    Raises:
        CheckpointError: there is no checkpoint at all.
        UserError: a later version of composer3d wrote the checkpoint.
    """
    report = inspect(Path(path))
    status = 0 if report["whole"] else 1
    if as_json:
        if not tensors:
            del report["tensors"]
        print(json.dumps(report))
        return status

    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in report["dtypes"].items())
    parameters = report["parameters"]
    rows = {
        "format": report["format"],
        "step": report["step"],
        "layout": _pairs(report["layout"]),
        "architecture": report["architecture"],
        "model": _pairs(report["model"]),
        "parameters": f"{parameters:,}" if parameters else None,
        "tensors": f"{report['count']} ({dtypes}), {report['bytes']:,} bytes",
        "carried": ", ".join(report["carried"]),
        "whole": "yes" if report["whole"] else "no",
    }
    for name, value in rows.items():
        if value not in (None, ""):
            print(f"{name:<13}{value}")
    for line in (*report["problems"], *report["notes"]):
        print(line)
    if tensors:
        for name, (shape, dtype) in report["tensors"].items():
            print(f"  {name if name.isprintable() else repr(name)} {shape} {dtype}")
    return status


def _pairs(values: dict[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in (values or {}).items())
