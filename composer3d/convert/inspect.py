"""``composer3d inspect``: what a checkpoint holds, and whether it is whole."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer3d.convert.formats import name_of, nbytes, survey
from composer3d.planner.counts import parameters

_MOST_PROBLEMS = 100


def inspect(path: Path) -> dict[str, Any]:
    """What is known of a checkpoint, as plain values, or a CheckpointError. A dcp's files are held to their digests."""
    found = survey(path)
    kinds = {name: entry[:2] for name, entry in found.raw.items()}
    shape, manifest = getattr(found, "shape", None), getattr(found, "manifest", None)
    known = {"path": str(found.path), "format": found.kind, "step": manifest and manifest.step}
    known |= {"layout": manifest and manifest.layout, "model": shape and asdict(shape)}
    known |= {"parameters": shape and parameters(shape), "count": len(kinds), "bytes": sum(map(nbytes, kinds.values()))}
    known |= {"dtypes": Counter(name_of(dtype) for _, dtype in kinds.values()), "carried": [*found.carried]}
    known |= {"optimizer": any(name.startswith("optim.") for name in kinds)}
    known |= {"whole": not found.problems, "problems": _shortened(found.problems), "notes": found.notes}
    return known | {"tensors": {name: (shape, name_of(dtype)) for name, (shape, dtype) in kinds.items()}}


def _shortened(problems: list[str]) -> list[str]:
    """A hostile index can have a problem for each of its thousands of names."""
    more = len(problems) - _MOST_PROBLEMS
    return [*problems[:_MOST_PROBLEMS], f"{more:,} more problems"] if more > 0 else problems


def main_inspect(path: str, *, tensors: bool, as_json: bool) -> int:
    """The command: 0 for a checkpoint that is whole, 1 for one that is not."""
    found = inspect(Path(path))
    listed = found.pop("tensors")
    if as_json:
        print(json.dumps(found | ({"tensors": listed} if tensors else {})))
        return 0 if found["whole"] else 1
    pairs = {n: " ".join(f"{k}={v}" for k, v in (found[n] or {}).items()) for n in ("layout", "model")}
    lines = {"format": found["format"], "step": found["step"], **pairs}
    lines["parameters"] = found["parameters"] and f"{found['parameters']:,}"
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found["dtypes"].items())
    lines["tensors"] = f"{found['count']} ({dtypes}), {found['bytes']:,} bytes"
    lines |= {"carried": ", ".join(found["carried"]), "whole": "yes" if found["whole"] else "no"}
    print(*(f"{name:<11}{value}" for name, value in lines.items() if value not in (None, "")), sep="\n")
    print(*(f"{line}\n" for line in (*found["problems"], *found["notes"])), sep="", end="")
    for name, (shape, dtype) in listed.items() if tensors else ():
        print(f"  {name if name.isprintable() else repr(name)} {shape} {dtype}")
    return 0 if found["whole"] else 1
