"""A start of training from Hugging Face's files: each rank reads its own boxes of the tensors."""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from composer3d.convert.formats import Source, open_source
from composer3d.dist import on_all
from composer3d.errors import CheckpointError, UserError
from composer3d.parallel import Stages
from composer3d.parallel.init import local_part


def load_hf(folder: str | Path, stages: Stages) -> None:
    """Fill the parameters of ``stages`` from the weights in ``folder``, converted to their dtypes.

    Collective: ranks tell each other the shapes of what they hold, and whether they came through. The files are held
    against their config.json, and both against the job, before anything is read.

    Raises:
        CheckpointError: on every rank: the files are missing, damaged or of another model.
    """
    own = dict(stages.named_parameters())
    every: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, {name: tuple(parameter.shape) for name, parameter in own.items()})
    job = {f"model.{name}": shape for part in every for name, shape in part.items()}
    try:
        source = on_all("model.hf", lambda: _open(Path(folder), job))
        on_all("model.hf", lambda: _read(source, own))
    except UserError as error:
        raise CheckpointError(error.lines) from None


def _open(folder: Path, job: dict[str, tuple[int, ...]]) -> Source:
    source = open_source(folder)
    held = {name: source.raw[own].shape for name, own in source.names.items()}
    lines = [
        f"{folder} holds {name} as {held.get(name, 'nothing')}, but the recipe asks for {job.get(name, 'nothing')}"
        for name in sorted(held.keys() | job.keys())
        if held.get(name) != job.get(name)
    ]
    if lines:
        raise CheckpointError(
            [*lines[:8], f"{folder}: {len(lines)} tensors differ; let [model] override no sizes of it"]
        )
    return source


def _read(source: Source, own: Mapping[str, Tensor]) -> None:
    for name, parameter in own.items():
        local, offset = local_part(parameter)
        if local.numel():  # a view of the file: only this box of it comes into memory
            box = tuple(slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True))
            local.copy_(source.read(f"model.{name}")[box])
