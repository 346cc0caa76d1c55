"""``composer3d inspect``: say what a checkpoint holds, and whether it is whole."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer3d.checkpoint.manifest import Manifest
from composer3d.checkpoint.pickles import reading
from composer3d.convert.formats import Source, count_not_finite, inspect_source, nbytes
from composer3d.facts.errors import CheckpointError
from composer3d.facts.text import in_quotes
from composer3d.models.llama.shape import ModelShape
from composer3d.models.registry import architecture
from composer3d.runtime.progress import Progress

_SHOWN_PROBLEMS = 100


def inspect(path: Path) -> dict[str, Any]:
    """Describe a checkpoint, and check whether it is whole.

    A ``dcp`` or ``torch`` checkpoint is also compared with its digests, and other files of torch
    with their checksums. Safetensors have none. All tensors are read, and a note names each that
    holds numbers that are not finite. It is not a problem: such a checkpoint may be whole.

    Args:
        path: a checkpoint of any format. The folder of a run stands for its newest whole
            checkpoint.

    Returns:
        A dict of values that JSON can represent. A value that cannot be read, because of a problem
        of the checkpoint, is None.

        - ``path`` and ``format``;
        - ``step`` and ``layout``: of the run that saved it; None and empty if no run did;
        - ``architecture``: the name of the model's architecture;
        - ``model``: the fields of the model's shape;
        - ``parameters``: the number of parameters of the model;
        - ``count`` and ``bytes``: the number of tensors, and the size of their elements;
        - ``dtypes``: the number of tensors of each dtype;
        - ``carried``: the names of the carried files, such as the tokenizer;
        - ``optimizer``: whether there is optimizer state;
        - ``whole``: whether there are no problems;
        - ``problems`` and ``notes``: one line each;
        - ``tensors``: (shape, dtype) of each tensor, by its name in the files.

    Raises:
        CheckpointError: there is no checkpoint at ``path``, or no checkpoint of the run is whole.
        UserError: a later version of composer3d wrote the checkpoint.
    """
    source = inspect_source(path)
    notes = [*source.notes, *_notes_of_not_finite(source)]
    # Either attribute is missing if a problem prevented it from being read.
    shape: ModelShape | None = getattr(source, "shape", None)
    manifest: Manifest | None = getattr(source, "manifest", None)
    count_parameters = architecture(source.architecture).count_parameters
    specs = {name: tensor.spec for name, tensor in source.tensors.items()}
    return {
        "path": str(source.path),
        "format": source.format,
        # Every run has a layout. Step 0 of other files would look as if nothing were trained.
        "step": manifest.step if manifest is not None and manifest.layout else None,
        "layout": None if manifest is None else manifest.layout,
        "architecture": None if shape is None else source.architecture,
        "model": None if shape is None else asdict(shape),
        "parameters": None if shape is None else count_parameters(shape),
        "count": len(specs),
        "bytes": sum(map(nbytes, specs.values())),
        "dtypes": Counter(spec.dtype for spec in specs.values()),
        "carried": list(source.carried),
        "optimizer": any(name.startswith("optim.") for name in specs),
        "whole": not source.problems,
        "problems": _shorten(source.problems),
        "notes": notes,
        "tensors": specs,
    }


def _notes_of_not_finite(source: Source) -> list[str]:
    """Read all tensors, and return a line for each with numbers that are not finite.

    A tensor that cannot be read is a problem, and the others are read nevertheless. If a checkpoint
    had problems before, only tensors with checksums are read.
    """
    notes = []
    tensors = {
        name: tensor
        for name, tensor in source.tensors.items()
        if tensor.has_checksum or not source.problems
    }
    total = sum(nbytes(tensor.spec) for tensor in tensors.values())
    with Progress("inspect", total, "B") as progress:
        for name, tensor in tensors.items():
            try:
                with reading(f"{source.path}: {in_quotes(name)}"):
                    count = count_not_finite(tensor.read())
            except CheckpointError as error:
                source.problems += error.lines
                continue
            if count:
                notes.append(f"warning: {in_quotes(name)} holds {count}")
            progress.advance(nbytes(tensor.spec))
    return notes


def _shorten(problems: list[str]) -> list[str]:
    """Return the first 100 problems, and a line with the number of other problems.

    A malicious index can have a problem for each of its thousands of names.
    """
    hidden = len(problems) - _SHOWN_PROBLEMS
    if hidden <= 0:
        return problems
    return [*problems[:_SHOWN_PROBLEMS], f"{hidden:,} more problems"]
