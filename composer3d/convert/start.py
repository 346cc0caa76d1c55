"""A start of training from Hugging Face's files: each rank reads its own boxes of the tensors."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from composer3d.checkpoint.manifest import compare
from composer3d.checkpoint.store import forms
from composer3d.convert.formats import Source, open_source
from composer3d.parallel import Stages
from composer3d.parallel.init import local_part
from composer3d.runtime.process_group import on_all


def load_hf(folder: str | Path, stages: Stages) -> None:
    """Fill the parameters of ``stages`` from the weights in ``folder``, converted to their dtypes.

    Collective: ranks tell each other the shapes of what they hold, and whether they came through. The files are held
    against their config.json, and both against the job, before anything is read. Raises CheckpointError, on every
    rank, where the files are missing, damaged or of another model.
    """
    own = dict(stages.named_parameters())
    job = {f"model.{name}": shape for name, (shape, _) in forms(own).items()}
    source = on_all("model.hf", lambda: _open(Path(folder), job))
    on_all("model.hf", lambda: _read(source, own))


def _open(folder: Path, job: dict[str, tuple[int, ...]]) -> Source:
    source = open_source(folder)
    held = {name: shape for name, (shape, _) in source.kinds().items()}
    compare(job, held, folder, "let [model] override no sizes of it")
    return source


def _read(source: Source, own: Mapping[str, Tensor]) -> None:
    for name, parameter in own.items():
        local, offset = local_part(parameter)
        if local.numel():  # a view of the file: only this box of it comes into memory
            box = tuple(
                slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True)
            )
            local.copy_(source.read(f"model.{name}")[box])
