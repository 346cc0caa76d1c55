"""``composer3d inspect``: what a checkpoint holds, and whether it is whole."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer3d.convert.formats import name_of, nbytes, survey
from composer3d.models.llama.counts import parameters

_MOST_PROBLEMS = 100


def inspect(path: Path) -> dict[str, Any]:
    """What is known of a checkpoint, as plain values, or a CheckpointError. A dcp's files are held to their digests."""
    found = survey(path)
    kinds = {name: entry[:2] for name, entry in found.raw.items()}
    shape, manifest = getattr(found, "shape", None), getattr(found, "manifest", None)
    known = {"path": str(found.path), "format": found.kind, "step": manifest and manifest.step}
    known |= {"layout": manifest and manifest.layout, "model": shape and asdict(shape)}
    known |= {
        "parameters": shape and parameters(shape),
        "count": len(kinds),
        "bytes": sum(map(nbytes, kinds.values())),
    }
    known |= {
        "dtypes": Counter(name_of(dtype) for _, dtype in kinds.values()),
        "carried": [*found.carried],
    }
    known |= {"optimizer": any(name.startswith("optim.") for name in kinds)}
    known |= {
        "whole": not found.problems,
        "problems": _shortened(found.problems),
        "notes": found.notes,
    }
    return known | {
        "tensors": {name: (shape, name_of(dtype)) for name, (shape, dtype) in kinds.items()}
    }


def _shortened(problems: list[str]) -> list[str]:
    """A hostile index can have a problem for each of its thousands of names."""
    more = len(problems) - _MOST_PROBLEMS
    return [*problems[:_MOST_PROBLEMS], f"{more:,} more problems"] if more > 0 else problems
