"""composer3d: compose parallelisms for Llama-style models in plain PyTorch, and prove each exact.

``from composer3d import compose, Mesh, ...`` gives the public names of the library. Their modules
are imported when a name is first used (PEP 562). So ``import composer3d`` does not import torch,
and ``composer3d check`` answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.models.contract import Decoder, SequenceInfo, ShardingPlan
    from composer3d.parallel.compose import compose
    from composer3d.parallel.context.api import ring_attention
    from composer3d.parallel.context.ownership import shard_sequence, unshard_sequence
    from composer3d.parallel.executor import StepShape
    from composer3d.parallel.stages import Stages
    from composer3d.runtime.mesh import Mesh

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "Mesh",
    "SequenceInfo",
    "ShardingPlan",
    "Stages",
    "StepShape",
    "__version__",
    "compose",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]

# The module of each public name. Only type checkers see the imports above.
_MODULES = {
    "Decoder": "composer3d.models.contract",
    "Mesh": "composer3d.runtime.mesh",
    "SequenceInfo": "composer3d.models.contract",
    "ShardingPlan": "composer3d.models.contract",
    "Stages": "composer3d.parallel.stages",
    "StepShape": "composer3d.parallel.executor",
    "compose": "composer3d.parallel.compose",
    "ring_attention": "composer3d.parallel.context.api",
    "shard_sequence": "composer3d.parallel.context.ownership",
    "unshard_sequence": "composer3d.parallel.context.ownership",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    """List all public names, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
