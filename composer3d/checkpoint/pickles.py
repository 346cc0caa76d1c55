"""The only places that unpickle what a checkpoint holds. A pickle is a program: these read data and run none of it."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composer3d.errors import CheckpointError

METADATA = ".metadata"


class _Properties(TensorProperties):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:5])  # torch 2.15 adds the strides, and 2.13 cannot read six values


_CLASSES = (Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta)
# All that torch 2.13 and 2.15 write into .metadata.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(c.__module__, c.__name__): c for c in (*_CLASSES, _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size)},
    (TensorProperties.__module__, "TensorProperties"): _Properties,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,  # Python 3.13
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused: nothing of it was run")
        return _ALLOWED[module, name]


def read_metadata(folder: Path) -> Metadata:
    """What ``torch.distributed.checkpoint`` says of a checkpoint, read without running anything.

    Raises:
        CheckpointError: the file cannot be read, or it names a class that does not belong there, or files elsewhere.
    """
    place = folder / METADATA
    try:
        with open(place, "rb") as file:
            read = _Unpickler(file).load()
        outside = [i.relative_path for i in read.storage_data.values() if i.relative_path != Path(i.relative_path).name]
        if not isinstance(read, Metadata) or outside:
            raise ValueError(f"it names the files {outside[:3]}" if outside else "it is no Metadata")
        return read
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{place} cannot be read ({type(error).__name__}: {error})") from None


def tensors_of(read: Metadata, place: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Global name to (shape, dtype). Raises CheckpointError where an entry is no tensor: torch would unpickle it."""
    others = sorted(name for name, e in read.state_dict_metadata.items() if not isinstance(e, TensorStorageMetadata))
    if others:
        raise CheckpointError(
            f"{place} holds objects that are no tensors, which are not loaded: {', '.join(others[:8])}"
        )
    return {
        name: (tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        for name, entry in read.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class SafeReader(FileSystemReader):
    """Torch's reader, given the metadata that ``read_metadata`` has read: torch itself would unpickle anything."""

    def __init__(self, folder: Path, read: Metadata) -> None:
        super().__init__(folder)
        self._read = read

    def read_metadata(self) -> Metadata:  # without keywords torch asks for no other file
        return self._read


def load_torch(path: Path) -> Any:
    """What a file of ``torch.save`` holds, its tensors mapped and not read: (containers of) tensors and plain values.

    Raises CheckpointError where it is no such file, or names another class, which is never made.
    """
    try:
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {explain(error)}") from None


def explain(error: BaseException) -> str:
    """One line of what torch says at length of a file that it cannot, or must not, read."""
    said = str(error).rpartition("trusted source.")[2].strip()  # what comes before advises to trust the file
    refused = re.search(r"(?:GLOBAL|class) ([\w.]+\.\w+)", said)
    if refused:
        return f"it holds an object of {refused[1]}, which is refused: no code of it was run"
    return f"{type(error).__name__}: {said.splitlines()[0] if said else ''}"
