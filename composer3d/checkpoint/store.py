"""Where checkpoints are kept: one folder a step, written by ``torch.distributed.checkpoint``, published by a rename."""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composer3d import log
from composer3d.checkpoint.state import compare, gather_state
from composer3d.errors import CheckpointError
from composer3d.parallel import Stages

T = TypeVar("T")
_PROGRESS = "progress.json"  # written last: a folder without it is not a checkpoint


class Store:
    """The checkpoints of one run: ``FOLDER/step-00000100``. Every method but ``newest`` is collective over the job."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def newest(self) -> Path | None:
        """The checkpoint with the highest step, or None."""
        whole = [path for path in self._steps() if (path / _PROGRESS).exists()]
        return whole[-1] if whole else None

    def _steps(self) -> list[Path]:
        """Folders of checkpoints by step: what a user has put beside them under another name is not ours."""
        return sorted(path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name))

    def save(self, step: int, stages: Stages, optimizer: torch.optim.AdamW, progress: dict[str, Any]) -> Path:
        """Write the state after ``step`` steps and ``progress`` (plain JSON), then drop the oldest beyond ``keep``."""
        final = self.folder / f"step-{step:08d}"
        staging = final.with_suffix(".tmp")
        if dist.get_rank() == 0:
            for crashed in self.folder.glob("step-*.tmp"):
                shutil.rmtree(crashed, ignore_errors=True)
            staging.mkdir(parents=True)
        dist.barrier()
        dcp.save(gather_state(stages, optimizer), storage_writer=dcp.FileSystemWriter(staging))
        if dist.get_rank() == 0:
            with open(staging / _PROGRESS, "w") as file:
                json.dump({"step": step, "world_size": dist.get_world_size(), **progress}, file)
                file.flush()
                os.fsync(file.fileno())
            replaced = final.with_suffix(".old.tmp")
            if final.exists():
                final.rename(replaced)
            staging.rename(final)
            shutil.rmtree(replaced, ignore_errors=True)
            for old in [path for path in self._steps() if path != final][: 1 - self._keep or None]:
                shutil.rmtree(old, onerror=_warn)
        dist.barrier()
        return final

    def load(self, path: Path, stages: Stages, optimizer: torch.optim.AdamW) -> None:
        """Read ``path`` into the live model, optimizer and generator.

        Raises:
            CheckpointError: it is not a checkpoint, or its names and shapes are not this job's.
        """
        progress = read_progress(path)
        state = gather_state(stages, optimizer)
        metadata = _readable(path, lambda: dcp.FileSystemReader(path).read_metadata()).state_dict_metadata
        rng = f"rng.{dist.get_rank()}"
        generator: Tensor = state.pop(rng)
        saved = {
            name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else ()
            for name, entry in metadata.items()
            if not name.startswith("rng.")
        }
        compare(state, saved, str(path))
        if progress["world_size"] == dist.get_world_size():
            state[rng] = generator
        _readable(path, lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(path)))
        torch.set_rng_state(generator)


def _readable(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (Exception, CheckpointException) as error:  # whatever DCP makes of a damaged file
        cause = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {cause[-1]}); it is damaged: remove the folder to go on "
            "from the checkpoint before it"
        ) from error


def _warn(function: object, path: str, problem: object) -> None:
    """Space that cannot be freed must not end a healthy run."""
    log.get().warning(f"cannot remove {path} of an old checkpoint")


def read_progress(path: Path, keys: Sequence[str] = ("step", "world_size")) -> dict[str, Any]:
    """What a checkpoint says of itself: ``step``, ``world_size`` and what the run gave to ``Store.save``.

    Args:
        keys: what must be there.

    Raises:
        CheckpointError: the folder is no checkpoint of composer3d.
    """
    try:
        progress = json.loads((path / _PROGRESS).read_text())
        if not isinstance(progress, dict) or any(key not in progress for key in keys):
            raise ValueError(f"it must hold {', '.join(keys)}")
        return progress
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a checkpoint: it has no {_PROGRESS}; name a step-* folder") from None
    except ValueError as error:
        raise CheckpointError(f"{path}/{_PROGRESS} cannot be read ({error}); the checkpoint is damaged") from None
