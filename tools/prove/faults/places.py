"""Where each fault is planted, and what must find it there."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tools.prove.faults.plant import Plant
from tools.prove.paths import RECIPE

Check = Literal[
    *("verify", "dtypes", "model", "latents", "prediction", "generation", "weights", "training"),
    *("rollback", "conversion", "corruption", "stragglers"),
]

# Parts of layouts in several modules.
EP: Final = "mesh.dp_shard=2 mesh.ep=2"  # the experts of a layer on two ranks
PACKED: Final = "data.packing=documents"
# AdamW divides by the gradient itself.
NO_MEMORY: Final = "optim.betas=[0.9,0.0] optim.lr=1e-2 optim.eps=1e-30"

# What the proof says of several faults.
OFF: Final = r" is off by .* on rank"
CLIPPED: Final = "^gradient norm after clipping"
VALIDATION: Final = "^validation loss is off"


class Fault(NamedTuple):
    """A fault and the check that must find it.

    Attributes:
        plant: plants the fault in this process. Its docstring describes the fault.
        layout: overrides of the recipe, for ``verify`` and ``dtypes``.
        message: a regular expression that the error of the verdict, or the finding of another
            check, must match.
        check: ``verify`` of the layout, ``dtypes`` (the ledger of its dtypes), or one of
            ``checks.py``.
        recipe: the recipe that ``layout`` overrides.
    """

    plant: Plant
    layout: str
    message: str
    check: Check
    recipe: Path

    @property
    def title(self) -> str:
        """The name of the fault, with the layout or check that must find it."""
        where = self.layout if self.check in ("verify", "dtypes") else self.check
        return f"{self.plant.__name__} ({where or 'one process'})"

    def __str__(self) -> str:
        return self.title


# Filled when the modules of faults are imported, which ``table`` does.
faults_so_far: list[Fault] = []
# A decorator of a fault, which it adds to the list.
Place = Callable[[Plant], Plant]


def harms(*layouts: str, message: str = OFF, recipe: Path = RECIPE) -> Place:
    """Plant the decorated fault in layouts of which ``verify`` must say ``message``."""
    return _planted(layouts, message, "verify", recipe)


def computes_narrow(message: str, layout: str = "", recipe: Path = RECIPE) -> Place:
    """Plant the decorated fault in a layout in bfloat16: the ledger of dtypes must find it."""
    in_bfloat16 = f"precision.compute=bfloat16 {layout}".strip()
    return _planted([in_bfloat16], message, "dtypes", recipe)


def found_by(check: Check, message: str) -> Place:
    """Let one of ``checks.py`` look for the decorated fault."""
    return _planted([""], message, check, RECIPE)


def _planted(layouts: Sequence[str], message: str, check: Check, recipe: Path) -> Place:
    if check != "verify" and re.search(message, ""):
        raise ValueError(f"{message!r} matches a check that finds nothing")

    def add(plant: Plant) -> Plant:
        faults_so_far.extend(Fault(plant, layout, message, check, recipe) for layout in layouts)
        return plant

    return add
