"""What a checkpoint holds, as flat names to tensors that do not depend on the layout.

``model.NAME`` and ``optim.NAME.exp_avg`` use the parameter's global name, and a DTensor knows its place in the whole
tensor, so that a checkpoint can be read on another layout. ``rng.RANK`` is the generator of one rank of the job that
saved.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.errors import CheckpointError
from composer3d.optim import optimizer_state
from composer3d.parallel import Stages


def gather_state(stages: Stages, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """This rank's live tensors under their global names: what is saved, and what a load writes into."""
    state = {f"model.{name}": parameter.detach() for name, parameter in stages.named_parameters()}
    state |= optimizer_state(optimizer, stages.named_parameters())
    state[f"rng.{dist.get_rank()}"] = torch.get_rng_state()
    return state


def compare(wanted: dict[str, Tensor], saved: dict[str, tuple[int, ...]], place: str) -> None:
    """Hold the names and shapes of a checkpoint against this job's, both ways. Collective: ranks hold different names.

    Raises:
        CheckpointError: on every rank, with the differences.
    """
    mine = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    gathered: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    job = {name: shape for part in gathered for name, shape in part.items()}
    lines = []
    for name, shape in sorted(job.items()):
        if name not in saved:
            lines.append(f"{place} has no {name!r} {shape}, which the model needs")
        elif saved[name] != shape:
            lines.append(f"{place} holds {name!r} as {saved[name]}, but the model needs {shape}")
    lines += [
        f"{place} holds {name!r} {saved[name]}, which the model does not have" for name in sorted(saved.keys() - job)
    ]
    if lines:
        shown = lines[:8] + ([f"{place}: {len(lines) - 8} more differences"] if len(lines) > 8 else [])
        raise CheckpointError(
            [*shown, f"{place} belongs to another model or optimizer; point checkpoint.resume elsewhere"]
        )
