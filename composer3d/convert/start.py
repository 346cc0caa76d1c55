"""Start training from a Hugging Face folder: each rank reads only its own shards of the tensors."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from composer3d.checkpoint.manifest import require_same_tensors
from composer3d.checkpoint.store import global_specs
from composer3d.convert.formats import Source, open_source
from composer3d.parallel import Stages
from composer3d.parallel.init import local_part
from composer3d.runtime.process_group import on_all


def load_hf(folder: str | Path, stages: Stages) -> None:
    """Fill the parameters of ``stages`` from the weights in ``folder``, converted to their dtypes.

    Collective over the default group: ranks gather the shapes of their parameters, and whether
    each has succeeded. Before any parameter is written, the files are compared with their
    config.json, and both with the model of the job.

    Raises CheckpointError, on every rank, if files are missing, damaged or of another model.
    """
    parameters = dict(stages.named_parameters())
    shapes = {f"model.{name}": shape for name, (shape, _) in global_specs(parameters).items()}
    source = on_all("model.hf", lambda: _open(Path(folder), shapes))
    on_all("model.hf", lambda: _read(source, parameters))


def _open(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Source:
    """Open the folder; raise CheckpointError if names or shapes of its tensors differ."""
    source = open_source(folder)
    shapes_in_files = {name: spec.shape for name, spec in source.specs().items()}
    advice = "remove the sizes that [model] overrides"
    require_same_tensors(shapes, shapes_in_files, folder, advice)
    return source


def _read(source: Source, parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        local, offset = local_part(parameter)
        if local.numel() == 0:
            continue
        box = tuple(
            slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True)
        )
        # ``read`` returns a view of the file, so only this box of it comes into memory.
        local.copy_(source.read(f"model.{name}")[box])
