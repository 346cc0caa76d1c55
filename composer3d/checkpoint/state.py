"""What a checkpoint holds, as flat names to tensors that do not depend on the layout.

``model.NAME`` and ``optim.NAME.exp_avg`` use the parameter's global name, and a DTensor knows its place in the whole
tensor, so that a checkpoint can be read on another layout. No generator is kept: each step seeds its own.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from composer3d.errors import CheckpointError
from composer3d.optim import optimizer_state
from composer3d.parallel import Stages

Form = tuple[tuple[int, ...], str]  # the shape and the dtype of a whole tensor


def gather_state(stages: Stages, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """This rank's live tensors under their global names: what is saved, and what a load writes into."""
    state = {f"model.{name}": parameter.detach() for name, parameter in stages.named_parameters()}
    return state | optimizer_state(optimizer, stages.named_parameters())


def local_parts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's elements of each tensor: live memory."""
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


class PartsPlanner(DefaultSavePlanner):
    """Plans a save by the tensors given to it, and writes ``parts``, which may be copies of their local parts."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        super().__init__()
        self._parts = parts

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn]


def compare(wanted: dict[str, Tensor], saved: dict[str, Form], place: str) -> None:
    """Hold what a checkpoint has against what this job needs, both ways. Collective: ranks hold different names.

    Raises:
        CheckpointError: on every rank, with the differences.
    """
    mine = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in wanted.items()}
    gathered: list[dict[str, Form]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    job = {name: form for part in gathered for name, form in part.items()}
    lines = []
    for name, (shape, dtype) in sorted(job.items()):
        if name not in saved:
            lines.append(f"{place} has no {name!r} {shape}, which the model needs")
        elif saved[name] != (shape, dtype):
            lines.append(f"{place} holds {name!r} as {saved[name]}, but the model needs {(shape, dtype)}")
    lines += [
        f"{place} holds {name!r} {saved[name][0]}, which the model does not have" for name in sorted(saved.keys() - job)
    ]
    if lines:
        shown = lines[:8] + ([f"{place}: {len(lines) - 8} more differences"] if len(lines) > 8 else [])
        raise CheckpointError(
            [*shown, f"{place} belongs to another model or optimizer; point checkpoint.resume elsewhere"]
        )
