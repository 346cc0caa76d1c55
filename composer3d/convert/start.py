"""Start training from a Hugging Face folder: each rank reads only its own shards of the tensors."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from composer3d.checkpoint.manifest import require_same_tensors
from composer3d.checkpoint.store import global_specs
from composer3d.convert.formats import Source, open_source
from composer3d.models import hub
from composer3d.parallel import Stages
from composer3d.parallel.init import local_part
from composer3d.runtime.environment import local_rank, rank
from composer3d.runtime.process_group import on_all


def load_hf(folder: str, stages: Stages) -> None:
    """Load the weights in ``folder`` into the parameters of ``stages``, in place.

    The weights are converted to the dtypes of the parameters. Before any parameter is changed, the
    files are compared with their config.json and with the model of the job. Collective over the
    default group: the ranks exchange the names and shapes of their parameters, and their errors.

    Args:
        folder: a Hugging Face folder, with config.json and weights, or a name on the Hub.
        stages: this rank's pipeline stages. A DTensor gets this rank's shard.

    Raises:
        CheckpointError: files are missing, damaged or of another model. Every rank raises it.
    """
    parameters = dict(stages.named_parameters())
    shapes = {f"model.{name}": shape for name, (shape, _) in global_specs(parameters).items()}
    # One rank of each node asks the Hub. The others find everything in the cache of the node.
    on_all("model.hf", lambda: _load_files(folder) if local_rank() == 0 else None)
    source = on_all("model.hf", lambda: _open(hub.folder(folder), shapes))
    on_all("model.hf", lambda: read_shards(source, parameters))


def _load_files(folder: str) -> None:
    hub.folder(folder, shows_progress=rank() == 0)


def _open(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Source:
    """Open the folder, and require that its tensors have exactly these names and shapes.

    A job without multi-token prediction does not read its layers.
    """
    source = open_source(folder)
    without_mtp = source.shape.without_mtp
    main = {f"model.{name}" for name in source.model_of.table_of(without_mtp).shapes()}
    if shapes.keys() <= main:
        source.locations = {name: source.locations[name] for name in main}
        source.shape = without_mtp
    shapes_in_files = {name: spec.shape for name, spec in source.specs().items()}
    advice = "remove the sizes that [model] overrides"
    require_same_tensors(shapes, shapes_in_files, folder, advice)
    return source


def read_shards(source: Source, parameters: Mapping[str, Tensor]) -> None:
    """Read this rank's shard of each parameter from a checkpoint, in place. No collective.

    Args:
        source: the checkpoint.
        parameters: by global name, with the shapes of the checkpoint. A plain tensor is read
            whole, and a DTensor as the shard that its placements give this rank.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    for name, parameter in parameters.items():
        local, offset = local_part(parameter)
        if local.numel() == 0:
            continue
        box = tuple(
            slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True)
        )
        # The files are mapped, so only this rank's shard comes into memory.
        local.copy_(source.read(f"model.{name}", box))
