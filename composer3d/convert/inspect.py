"""``composer3d inspect``: say what a checkpoint holds, and whether it is whole."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer3d.checkpoint.manifest import Manifest
from composer3d.convert.formats import inspect_source, nbytes
from composer3d.models.llama.counts import parameters
from composer3d.models.llama.shape import ModelShape

_SHOWN_PROBLEMS = 100


def inspect(path: Path) -> dict[str, Any]:
    """Return what is known about a checkpoint, as values that JSON can hold.

    The files of a ``dcp`` and of a ``torch`` checkpoint are compared with their digests.

    Returns:
        ``path``, ``format``, ``step``, ``layout``, ``model``, ``parameters``, ``count`` and
        ``bytes`` of
        the tensors, ``dtypes`` (how many tensors have each), ``carried`` (names of other files),
        ``optimizer`` (whether it has an optimizer's state), ``whole``, ``problems``, ``notes``, and
        ``tensors``: (shape, dtype) by name in the files. A value that a problem kept from being
        read
        is None.

    Raises:
        CheckpointError: there is no checkpoint at all.
    """
    source = inspect_source(path)
    # A problem may have kept either from being read: then the source does not have the attribute.
    shape: ModelShape | None = getattr(source, "shape", None)
    manifest: Manifest | None = getattr(source, "manifest", None)
    specs = {name: tensor.spec for name, tensor in source.tensors.items()}
    return {
        "path": str(source.path),
        "format": source.format,
        "step": None if manifest is None else manifest.step,
        "layout": None if manifest is None else manifest.layout,
        "model": None if shape is None else asdict(shape),
        "parameters": None if shape is None else parameters(shape),
        "count": len(specs),
        "bytes": sum(map(nbytes, specs.values())),
        "dtypes": Counter(spec.dtype for spec in specs.values()),
        "carried": list(source.carried),
        "optimizer": any(name.startswith("optim.") for name in specs),
        "whole": not source.problems,
        "problems": _shorten(source.problems),
        "notes": source.notes,
        "tensors": specs,
    }


def _shorten(problems: list[str]) -> list[str]:
    """Return at most 100 problems and the number of others.

    An index that was made to harm can have a problem for each of its thousands of names.
    """
    hidden = len(problems) - _SHOWN_PROBLEMS
    if hidden <= 0:
        return problems
    return [*problems[:_SHOWN_PROBLEMS], f"{hidden:,} more problems"]
