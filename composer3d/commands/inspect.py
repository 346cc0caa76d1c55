"""``composer3d inspect``: print what a checkpoint holds, and whether it is whole."""

import json
from pathlib import Path
from typing import Any

from composer3d.convert.inspect import inspect


def main_inspect(path: str, *, tensors: bool, as_json: bool) -> int:
    """Print what is known of a checkpoint. Returns 0 if it is whole, 1 if it is not."""
    found = inspect(Path(path))
    status = 0 if found["whole"] else 1
    listed = found.pop("tensors")
    if as_json:
        print(json.dumps(found | ({"tensors": listed} if tensors else {})))
        return status

    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found["dtypes"].items())
    parameters = found["parameters"]
    rows = {
        "format": found["format"],
        "step": found["step"],
        "layout": _pairs(found["layout"]),
        "model": _pairs(found["model"]),
        "parameters": f"{parameters:,}" if parameters else None,
        "tensors": f"{found['count']} ({dtypes}), {found['bytes']:,} bytes",
        "carried": ", ".join(found["carried"]),
        "whole": "yes" if found["whole"] else "no",
    }
    for name, value in rows.items():
        if value not in (None, ""):
            print(f"{name:<11}{value}")
    for line in (*found["problems"], *found["notes"]):
        print(line)
    if tensors:
        for name, (shape, dtype) in listed.items():
            print(f"  {name if name.isprintable() else repr(name)} {shape} {dtype}")
    return status


def _pairs(values: dict[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in (values or {}).items())
