"""The only places that unpickle what a checkpoint holds. A pickle is a program: these read data and run none of it."""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from composer3d.errors import CheckpointError

METADATA = ".metadata"


class _Properties(TensorProperties):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:5])  # torch 2.15 adds the strides, and 2.13 cannot read six values


_CLASSES: tuple[type, ...] = (Metadata, TensorStorageMetadata, metadata.BytesStorageMetadata, _StorageInfo, torch.Size)
_CLASSES += (metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING)
# All that torch 2.13 and 2.15 write into .metadata.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(c.__module__, c.__name__): c for c in _CLASSES},
    (TensorProperties.__module__, "TensorProperties"): _Properties,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): lambda *parts: Path(*parts),  # not the class itself, whose methods a pickle could replace
    ("pathlib._local", "PosixPath"): lambda *parts: Path(*parts),  # Python 3.13
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused: nothing of it was run")
        return _ALLOWED[module, name]


@contextmanager
def reading(place: object, way_out: str = "") -> Iterator[None]:
    """Whatever fails within becomes a CheckpointError that names ``place``: a damaged file can raise anything."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{place} cannot be read: {explain(error)}{way_out}") from None


def read_metadata(folder: Path) -> Metadata:
    """What ``torch.distributed.checkpoint`` says of a checkpoint, read without running anything.

    Raises CheckpointError where it cannot be read, or names a class that does not belong there, or files elsewhere.
    """
    with reading(folder / METADATA), open(folder / METADATA, "rb") as file:
        read = _Unpickler(file).load()
        outside = [i.relative_path for i in read.storage_data.values() if i.relative_path != Path(i.relative_path).name]
        if not isinstance(read, Metadata) or outside:
            raise ValueError(f"it names the files {outside[:3]}" if outside else "it is no Metadata")
    return read


def tensors_of(read: Metadata, place: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Global name to (shape, dtype). Raises CheckpointError where an entry is no tensor: torch would unpickle it."""
    found, others = {}, []
    for name, entry in read.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found[name] = tuple(entry.size), str(entry.properties.dtype).removeprefix("torch.")
        else:
            others.append(name)
    if others:
        shown = ", ".join(sorted(others)[:8])
        raise CheckpointError(f"{place} holds objects that are no tensors, which are not loaded: {shown}")
    return found


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
    with reading(path):
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")


def explain(error: BaseException) -> str:
    """One line of what torch says at length of a file that it cannot, or must not, read."""
    said = str(error).rpartition("trusted source.")[2].strip()  # what comes before advises to trust the file
    refused = re.search(r"(?:GLOBAL|class) ([\w.]+\.\w+)", said)
    if refused:
        return f"it holds an object of {refused[1]}, which is refused: no code of it was run"
    return f"{type(error).__name__}: {said.splitlines()[0] if said else ''}"
