"""composer3d: compose parallelisms for Llama-style models in plain PyTorch, and prove each exact.

``from composer3d import compose, Mesh, ...`` gives the public names of the library. They are listed
in ``__init__.pyi``, and nowhere else. Their modules are imported when a name is first used (PEP
562). So ``import composer3d`` does not import torch, and ``composer3d check`` answers at once.
"""

import ast
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _read_names() -> dict[str, str]:
    """Return the module of each public name, as ``__init__.pyi`` imports it."""
    text = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    return {
        alias.name: str(statement.module)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


_MODULES = _read_names()

# The present name of each former one, which still works: see "Names change slowly" in
# docs/library.md.
_RENAMED: dict[str, str] = {}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _RENAMED:
        present = _RENAMED[name]
        text = f"composer3d.{name} is now composer3d.{present}, and goes with the next version"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(import_module(__name__), present)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    # The next use finds it without this function. The package ``verify``, which is here once it is
    # imported, stays in the place of its function: it can be called like it.
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    """List all public names, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
