"""A ``Plan`` is what a model tells every parallelism, once, as data: tables from globs over its global names."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from composer3d.errors import PlanError

# How a module is cut over tp; ``tp.py`` says what each means in placements. Columns read what a module above them, of
# style "gather", has gathered. A "head" is called with (h, labels) and returns the summed loss: it has ``weight``, the
# seam ``cross_entropy(logits_NV, labels_N)`` and, to be run in parts, ``chunks``, as ``composer3d.models.Head`` has.
Style = Literal["embedding", "norm", "head_norm", "gather", "column", "kv_column", "row", "head"]


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initial values that are all the same."""

    value: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a model says of itself. Of several globs that match a name, the first counts."""

    tensor: Mapping[str, Style]  # glob over module names -> how tp cuts it; every parameter must lie in a named module
    init: Mapping[str, Normal | Constant]  # glob over parameter names -> initial values
    kv_heads: int | None = None  # how many key-value heads the modules of style "kv_column" project to
    attend: str | None = None  # glob over the modules whose ``attend`` cp replaces: all that attend across tokens
    save: tuple[str, ...] = ()  # globs over operators whose outputs selective checkpointing keeps: "aten.mm.default"

    def check(self, model: nn.Module) -> None:
        """Hold the tables against the whole model, before it is cut.

        Raises:
            PlanError: naming every glob that matches nothing and every parameter that no glob covers.
        """
        modules = [name for name, _ in model.named_modules()]
        parameters = [name for name, _ in model.named_parameters()]
        lines = [
            f"the plan's {table} glob {glob!r} matches no {kind} of {type(model).__name__}"
            for table, globs, names, kind in (
                ("tensor", self.tensor, modules, "module"),
                ("init", self.init, parameters, "parameter"),
                ("attend", (self.attend,) if self.attend else (), modules, "module"),
            )
            for glob in globs
            if not any(fnmatchcase(name, glob) for name in names)
        ]
        for name in parameters:
            if self.style_of(name.rpartition(".")[0]) in (None, "gather"):
                lines.append(f"no glob of the plan's tensor table covers parameter {name!r}")
            if self.init_of(name) is None:
                lines.append(f"no glob of the plan's init table covers parameter {name!r}")
        for name in modules:
            parts = name.split(".")
            above = {self.style_of(".".join(parts[:count])) for count in range(len(parts))}
            if self.style_of(name) in ("column", "kv_column") and "gather" not in above:
                lines.append(f'the plan cuts {name!r} into columns: nothing above it is of style "gather"')
        if "kv_column" in self.tensor.values() and self.kv_heads is None:
            lines.append('the plan gives modules the style "kv_column" and no kv_heads')
        for name, module in model.named_modules():
            if self.attends(name) != hasattr(module, "attend"):
                lines.append(f"module {name!r} must match the plan's attend glob just where it has the seam `attend`")
        if lines:
            raise PlanError(lines)

    def style_of(self, name: str) -> Style | None:
        return next((style for glob, style in self.tensor.items() if fnmatchcase(name, glob)), None)

    def attends(self, name: str) -> bool:
        return self.attend is not None and fnmatchcase(name, self.attend)

    def init_of(self, name: str) -> Normal | Constant | None:
        return next((how for glob, how in self.init.items() if fnmatchcase(name, glob)), None)
