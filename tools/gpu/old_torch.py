"""Lets a single process train on torch 2.11, which lacks names that composer3d takes from 2.13.

A machine with a GPU may have no newer torch. What is measured of one GPU does not depend on these
names: no collective has more than one rank. Nothing else may import this module.
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

# The names of 2.13, and what does the same before.
_BEFORE_2_13 = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def add_missing_names() -> list[str]:
    """Give torch the names that it lacks, and return them.

    Those that ``torch_private`` imports stand for nothing: whoever calls one gets an error.
    """
    missing = [name for name in _BEFORE_2_13 if not hasattr(dist, name)]
    for name in missing:
        setattr(dist, name, getattr(dist, _BEFORE_2_13[name]))
    spec = find_spec("composer3d.runtime")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("torch_private.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            module = import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    setattr(module, alias.name, _Missing)
                    missing.append(f"{node.module}.{alias.name}")
    return missing


class _Missing:
    """Stands for a name that this torch lacks."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("this torch is too old for what composer3d wants here")
