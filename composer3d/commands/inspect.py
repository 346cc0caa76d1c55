"""``composer3d inspect``: report what a checkpoint or token files contain, and if all is whole."""

import json
import os
from pathlib import Path
from typing import Any

from composer3d.convert.inspect import inspect
from composer3d.data.tokens import find_damage
from composer3d.spec.token_manifest import MANIFEST, read_manifest


def run(path: str, *, tensors: bool, as_json: bool) -> int:
    """Print a report on a checkpoint, or on a folder of token files.

    Args:
        path: the checkpoint, in any format that ``convert`` reads, or a folder that ``prepare``
            made.
        tensors: whether to list each tensor with its shape and dtype.
        as_json: whether to print one JSON object instead of text.

    Returns:
        The exit status: 0 if it is complete, 1 if it is not.

    Raises:
        CheckpointError: there is no checkpoint at all.
        DataError: the manifest of token files cannot be used.
        UserError: a later version of composer3d wrote the checkpoint.
    """
    if os.path.exists(Path(path) / MANIFEST):  # unlike Path.exists, False for any odd name
        return _inspect_tokens(Path(path), as_json=as_json)
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


def _inspect_tokens(folder: Path, *, as_json: bool) -> int:
    """Print a report on token files, of which every byte is compared with its digest."""
    manifest = read_manifest(folder)
    problems = find_damage(manifest)
    report = {
        "path": str(folder),
        "format": "tokens",
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "dtype": manifest.dtype,
        "vocab": manifest.vocab,
        "tokenizer": manifest.tokenizer_name,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "whole": not problems,
        "problems": problems,
    }
    if as_json:
        print(json.dumps(report))
        return 1 if problems else 0
    for name in ("format", "tokens", "documents", "dtype", "vocab", "tokenizer", "bytes"):
        value = report[name]
        print(f"{name:<13}{value:,}" if isinstance(value, int) else f"{name:<13}{value}")
    print(f"{'whole':<13}{'no' if problems else 'yes'}", *problems, sep="\n")
    return 1 if problems else 0


def _pairs(values: dict[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in (values or {}).items())
