"""What ``torch.distributed.checkpoint`` (DCP) says of a checkpoint in ``.metadata``, and the reading of its tensors.

Torch unpickles that file, and objects among the tensors, with whatever they run. Here the pickle is parsed to inert
records, of which torch's ``Metadata`` is built anew, field by field. All that reads a checkpoint reads through this
module, and it is the only one that uses DCP's private names.
"""

import gc
import mmap
import os
import secrets
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from composer3d.checkpoint import pickles
from composer3d.checkpoint.pickles import Name, PickleError, Record, reading
from composer3d.checkpoint.torchfile import DTYPES, read_tensor, sizes_of
from composer3d.runtime.torch_private import StorageInfo
from composer3d.spec.errors import CheckpointError
from composer3d.spec.files import open_plain

METADATA = ".metadata"
METADATA_LIMIT = (
    4 << 30
)  # bytes: about 200 for each part of a tensor; 70B over 1,024 ranks has 2.2 million parts
_PLACE, _STORED = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)
_LAYOUT = "torch.serialization._get_layout"
_CLASSES = {
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
}
_CLASSES |= {"StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"}
# All that torch 2.13 and 2.15 write, under Python 3.11 (of which some pickle an enum by getattr) to 3.14.
_NAMES = frozenset(
    {
        *(f"{_PLACE}.{name}" for name in _CLASSES),
        *(f"torch.{name}" for name in DTYPES),
        _STORED,
        _LAYOUT,
        "torch.Size",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "builtins.getattr",
    }
)
_LONGEST_NAME = 1000
_PRIME = 2**61 - 1


def read_metadata(folder: Path) -> Metadata:
    """What DCP says of a checkpoint: each tensor's parts, and where they lie. Nothing of it is run.

    It is held to be sound: the parts of a tensor fill it exactly, each has bytes of its own in a plain file of
    ``folder``, and these are enough for it. Raises CheckpointError where it is not, or cannot be read.
    """
    with reading(folder / METADATA), _without_collector():
        parsed = _parse(folder / METADATA)
        state = _state(parsed, "Metadata")
        listed, kept = _dict(state, "state_dict_metadata"), _dict(state, "storage_data")
        _require_room(listed.values(), len(kept))
        entries = {_name(name): _entry(name, entry) for name, entry in listed.items()}
        stored: dict[Any, StorageInfo] = {}
        for key, value in kept.items():
            index = _index(key)
            if index in stored:
                raise PickleError(f"it stores a part of {_shown(index.fqn)} twice")
            stored[index] = _storage(index.fqn, value)
        _check_parts(entries, stored)
        _check_files(folder, stored.values())
    return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of small objects are made and none is garbage: the collector would walk them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parse(path: Path) -> Any:
    """The file is mapped, so that one of zeros, however large it claims to be, ends at its first byte."""
    with open_plain(path, follow_links=False) as file:
        size = file.seek(0, os.SEEK_END)
        if not 0 < size <= METADATA_LIMIT:
            raise PickleError(
                f"it has {size:,} bytes, and at least 1 and at most {METADATA_LIMIT:,} are read"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return pickles.parse(mapped, _NAMES, longest_text=4 * _LONGEST_NAME, all_texts=None)


def tensors_of(read: Metadata, place: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Global name to (shape, dtype). Raises CheckpointError where an entry is no tensor: torch would unpickle it."""
    found, others = {}, []
    for name, entry in read.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found[name] = tuple(entry.size), str(entry.properties.dtype).removeprefix("torch.")
        else:
            others.append(name)
    if others:
        shown = ", ".join(map(_shown, sorted(others)[:8]))
        raise CheckpointError(
            f"{place} holds objects that are no tensors, which are not loaded: {shown}"
        )
    return found


def _shown(name: str) -> str:
    return f"{name!r:.200}"


def _state(record: Any, kind: str, path: str = "") -> dict[Any, Any]:
    """The fields of an object of class ``kind`` (or of the class at ``path``)."""
    if (
        type(record) is not Record
        or record.path != (path or f"{_PLACE}.{kind}")
        or record.arguments != ()
    ):
        raise PickleError(f"it holds something else where a {kind} belongs")
    state = {} if record.state is None else record.state
    if type(state) is not dict or record.items is not None:
        raise PickleError(f"it holds a {kind} whose fields have no names")
    return state


def _dict(state: dict[Any, Any], name: str) -> dict[Any, Any]:
    found = state.get(name)
    if type(found) is not dict:
        raise PickleError(f"its {name} is no dict")
    return found


def _name(name: Any) -> str:
    if type(name) is not str or not 0 < len(name) <= _LONGEST_NAME:
        raise PickleError(f"it names a tensor by no text of 1 to {_LONGEST_NAME} characters")
    return name


def _require_room(entries: Iterable[Any], room: int) -> None:
    """Refuse more parts than are stored before one is looked at: many names can share one long list of them."""
    total = 0
    for entry in entries:
        state = entry.state if type(entry) is Record else None
        chunks = state.get("chunks") if type(state) is dict else None
        is_object = type(entry) is Record and entry.path == f"{_PLACE}.BytesStorageMetadata"
        total += 1 if is_object else len(chunks) if type(chunks) is list else 0
        if total > room:
            raise PickleError(f"its tensors have more parts than the {room:,} that are stored")


def _entry(name: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry) is Record and entry.path == f"{_PLACE}.BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(entry, "TensorStorageMetadata")
    chunks = state.get("chunks")
    if type(chunks) is not list:
        raise PickleError(f"{_shown(name)} has no list of parts")
    shape = sizes_of(state.get("size"))
    parts = [_state(chunk, "ChunkStorageMetadata") for chunk in chunks]
    boxes = [(sizes_of(part.get("offsets")), sizes_of(part.get("sizes"))) for part in parts]
    if not fills(shape, boxes):
        raise PickleError(
            f"the parts of {_shown(name)} do not make {shape} with every element in one of them"
        )
    made = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
    ]
    return TensorStorageMetadata(
        _properties(name, state.get("properties")), torch.Size(shape), made
    )


def _properties(name: str, record: Any) -> TensorProperties:
    """Only the dtype counts; the rest, to which torch 2.15 adds the strides, describes what no checkpoint has."""
    state = (
        record.state
        if type(record) is Record and record.path == f"{_PLACE}.TensorProperties"
        else None
    )
    if type(state) is not tuple or len(state) not in (5, 6):
        raise PickleError(f"{_shown(name)} has no properties of a tensor")
    dtype, layout = state[:2]
    if type(dtype) is not Name or dtype.path.removeprefix("torch.") not in DTYPES:
        raise PickleError(f"{_shown(name)} has no dtype")
    kind = layout.arguments[:1] if type(layout) is Record and layout.path == _LAYOUT else ()
    if [type(each) for each in kind] != [str] or kind[0] != "torch.strided":
        raise PickleError(f"{_shown(name)} is no dense tensor")
    return TensorProperties(DTYPES[dtype.path.removeprefix("torch.")])


def _index(key: Any) -> MetadataIndex:
    state = _state(key, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_name(state.get("fqn")), None if offset is None else sizes_of(offset))


def _storage(name: str, value: Any) -> StorageInfo:
    state = _state(value, "storage", _STORED)
    path, begin, length = (state.get(field) for field in ("relative_path", "offset", "length"))
    if (
        type(path) is not str
        or path in ("", ".", "..")
        or Path(path).name != path
        or "\0" in path
        or len(path) > 255
    ):
        raise PickleError(
            f"{_shown(name)} lies in {path!r:.200}, which names no file of the folder"
        )
    if type(begin) is not int or type(length) is not int or not (begin >= 0 < length):
        raise PickleError(f"{_shown(name)} lies nowhere in {path!r:.200}")
    if state.get("transform_descriptors") is not None:
        raise PickleError(
            f"{_shown(name)} is transformed (compressed), which composer3d does not read"
        )
    return StorageInfo(path, begin, length)


def fills(shape: tuple[int, ...], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes (offsets, sizes) lie within ``shape`` and hold each of its elements once. Linear in their number.

    Every axis is given a ruler with random marks where boxes begin and end, and a box is measured by the product of
    its sides. Where each element lies in one box, the measures add up to that of the shape, whatever the marks. Where
    one lies in none or in several, the difference is a polynomial of the marks that is not zero, which random marks
    of 61 bits take for zero once in 2^55 times (Schwartz and Zippel). Nobody knows the marks beforehand.
    """
    rulers: list[defaultdict[int, int]] = [
        defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in shape
    ]

    def measure(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        product = 1
        for ruler, begin, size in zip(rulers, offsets, sizes, strict=True):
            product = product * (ruler[begin + size] - ruler[begin]) % _PRIME
        return product

    total = 0
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        if any(
            begin + size > most for begin, size, most in zip(offsets, sizes, shape, strict=True)
        ):
            return False
        total += measure(offsets, sizes)
    return total % _PRIME == measure((0,) * len(shape), shape) % _PRIME


def _check_parts(
    entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
    stored: Mapping[Any, StorageInfo],
) -> None:
    """Each part of a tensor is stored once, in as many bytes as it needs, and nothing else is."""
    wanted: set[MetadataIndex] = set()
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            wanted.add(MetadataIndex(name))
            continue
        for chunk in entry.chunks:
            index = MetadataIndex(name, chunk.offsets)
            if index in wanted:
                raise PickleError(f"two parts of {_shown(name)} begin at {tuple(chunk.offsets)}")
            wanted.add(index)
            size = prod(chunk.sizes) * entry.properties.dtype.itemsize
            if index not in stored or stored[index].length < size:
                kept = (
                    f"has {stored[index].length:,} bytes of {size:,}"
                    if index in stored
                    else "is stored nowhere"
                )
                raise PickleError(f"the part of {_shown(name)} at {tuple(chunk.offsets)} {kept}")
    for index in stored:
        if index not in wanted:
            raise PickleError(f"it stores a part of {_shown(index.fqn)} that no tensor has")


def _check_files(folder: Path, stored: Iterable[StorageInfo]) -> None:
    """The bytes of each part lie in a plain file of the folder, and in no other part."""
    file, size, end = "", 0, 0
    for info in sorted(stored, key=lambda info: (info.relative_path, info.offset)):
        if info.relative_path != file:
            file, end = info.relative_path, 0
            found = os.lstat(folder / file)
            if not stat.S_ISREG(found.st_mode):
                raise PickleError(f"it names {file!r:.200}, which is no plain file")
            size = found.st_size
        if info.offset < end or info.offset + info.length > size:
            raise PickleError(
                f"{file!r:.200} has {size:,} bytes, but parts of tensors overlap in it or end beyond it"
            )
        end = info.offset + info.length


def read_part(
    file: BinaryIO, info: StorageInfo, entry: TensorStorageMetadata, sizes: torch.Size
) -> Tensor:
    """One part of a tensor. Raises ValueError where the file holds something else there."""
    part = read_tensor(file, info.offset, info.length)
    if part.shape != sizes or part.dtype != entry.properties.dtype:
        raise ValueError(
            f"a part is {tuple(part.shape)} of {part.dtype}, but should be {tuple(sizes)} of {entry.properties.dtype}"
        )
    return part


def open_part(folder: Path, info: StorageInfo) -> BinaryIO:
    """The file in which a part lies."""
    return open_plain(folder / info.relative_path, follow_links=False)


def read_whole(folder: Path, metadata: Metadata, name: str) -> Tensor:
    """One tensor, put together of its parts. Raises OSError and ValueError."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    whole: Tensor | None = None
    for chunk in entry.chunks:
        info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        with open_part(folder, info) as file:
            part = read_part(file, info, entry, chunk.sizes)
        if part.shape == entry.size:
            return part
        whole = torch.empty(entry.size, dtype=entry.properties.dtype) if whole is None else whole
        whole[
            tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        ] = part
    return torch.empty(entry.size, dtype=entry.properties.dtype) if whole is None else whole


class Planner(dcp.DefaultLoadPlanner):
    """Loads tensors and nothing else: torch's own would unpickle an object without a look at it."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise CheckpointError(
            f"{read_item.dest_index.fqn!r:.200} is an object and no tensor, which is not loaded"
        )


class Reader(StorageReader):
    """Hands to torch the parts of tensors that it asks for, each checked, by metadata that is read already."""

    def __init__(self, folder: Path, read: Metadata) -> None:
        self._folder, self._metadata = folder, read
        self._sizes: dict[
            str, dict[torch.Size, torch.Size]
        ] = {}  # of the parts of a tensor, by their offsets

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:  # without keywords torch asks for no other file
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read the parts that ``plan`` names, in the order in which they lie, into the tensors of ``planner``."""
        items = [(self._metadata.storage_data[item.storage_index], item) for item in plan.items]
        items.sort(key=lambda pair: (pair[0].relative_path, pair[0].offset))
        opened = ""
        with ExitStack() as stack:
            for info, item in items:
                if info.relative_path != opened:
                    stack.close()
                    file, opened = (
                        stack.enter_context(open_part(self._folder, info)),
                        info.relative_path,
                    )
                self._read(file, info, item, planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(
        self, file: BinaryIO, info: StorageInfo, item: ReadItem, planner: LoadPlanner
    ) -> None:
        name = item.storage_index.fqn
        entry = self._metadata.state_dict_metadata[name]
        if item.type != LoadItemType.TENSOR or not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{name!r:.200} is an object and no tensor, which is not loaded")
        with reading(f"{self._folder / info.relative_path}: {name!r:.200}"):
            if name not in self._sizes:
                self._sizes[name] = {chunk.offsets: chunk.sizes for chunk in entry.chunks}
            offset = item.storage_index.offset
            part = read_part(file, info, entry, self._sizes[name][torch.Size(offset or ())])
            box = tuple(
                slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(part[box])
            planner.commit_tensor(item, target)
