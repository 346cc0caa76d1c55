"""Read a checkpoint of ``torch.distributed.checkpoint`` (DCP): its ``.metadata``, and its tensors.

Torch unpickles that file, and any objects among the tensors, and so runs whatever they contain.
Here the pickle is parsed to inert records, and torch's ``Metadata`` is built from them, field by
field. All code that reads a checkpoint reads it through this module. Only this module uses DCP's
private names.
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
from typing import Any, BinaryIO, TypeGuard

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
from composer3d.checkpoint.manifest import TensorSpec
from composer3d.checkpoint.pickles import Name, PickleError, Record, reading
from composer3d.checkpoint.torchfile import DTYPES, read_tensor, sizes_of
from composer3d.runtime.torch_private import StorageInfo
from composer3d.spec.errors import CheckpointError
from composer3d.spec.files import open_plain

METADATA = ".metadata"
# Bytes. Each part of a tensor takes about 200; a model of 70B on 1,024 ranks has 2.2 million parts.
METADATA_LIMIT = 4 << 30

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_GET_LAYOUT = "torch.serialization._get_layout"
# All names that torch 2.13 and 2.15 write, under Python 3.11 to 3.14. Some versions of Python
# pickle an enum by getattr.
_NAMES = frozenset(
    {
        f"{_MODULE}.Metadata",
        f"{_MODULE}.TensorStorageMetadata",
        f"{_MODULE}.BytesStorageMetadata",
        f"{_MODULE}.ChunkStorageMetadata",
        f"{_MODULE}.MetadataIndex",
        f"{_MODULE}.StorageMeta",
        f"{_MODULE}.TensorProperties",
        f"{_MODULE}._MEM_FORMAT_ENCODING",
        _STORAGE_INFO,
        _GET_LAYOUT,
        "torch.Size",
        *(f"torch.{name}" for name in DTYPES),
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "builtins.getattr",
    }
)
_LONGEST_NAME = 1000  # characters of a tensor's name
_LONGEST_FILE_NAME = 255
_PRIME = 2**61 - 1

Sizes = tuple[int, ...]


def read_metadata(folder: Path) -> Metadata:
    """Read DCP's description of a checkpoint: the parts of each tensor, and their places.

    Nothing in it is run. The description is checked to be sound. The parts of a tensor fill it
    exactly. Each part has bytes of its own in a plain file of ``folder``, and enough of them.

    Raises CheckpointError if it is not sound, or cannot be read.
    """
    with reading(folder / METADATA), _paused_garbage_collector():
        state = _state_of(_parse(folder / METADATA), f"{_MODULE}.Metadata")
        raw_entries = _dict_in(state, "state_dict_metadata")
        raw_storage = _dict_in(state, "storage_data")
        _require_room(raw_entries.values(), len(raw_storage))

        entries = {_check_name(name): _entry(name, raw) for name, raw in raw_entries.items()}
        storage: dict[Any, StorageInfo] = {}
        for raw_index, raw_info in raw_storage.items():
            index = _index(raw_index)
            if index in storage:
                raise PickleError(f"it stores a part of {_shown(index.fqn)} twice")
            storage[index] = _storage_info(index.fqn, raw_info)

        _check_parts(entries, storage)
        _check_files(folder, storage.values())
    return Metadata(entries, storage_data=storage, storage_meta=StorageMeta())


@contextmanager
def _paused_garbage_collector() -> Iterator[None]:
    """Pause Python's garbage collector within the block.

    Millions of small objects are made there, and none of them is garbage: the collector would walk
    through all of them again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parse(path: Path) -> Any:
    # The file is mapped and not read: parsing a large file of zeros ends at its first byte.
    with open_plain(path, follow_links=False) as file:
        size = file.seek(0, os.SEEK_END)
        if not 0 < size <= METADATA_LIMIT:
            raise PickleError(
                f"it has {size:,} bytes, and at least 1 and at most {METADATA_LIMIT:,} are read"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return pickles.parse(mapped, _NAMES, longest_text=4 * _LONGEST_NAME, all_texts=None)


def tensor_specs(metadata: Metadata, place: str) -> dict[str, TensorSpec]:
    """Return shape and dtype of all tensors by their global names.

    Raises CheckpointError, which names ``place``, if an entry is an object: torch would unpickle
    it.
    """
    specs: dict[str, TensorSpec] = {}
    objects = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            specs[name] = TensorSpec(tuple(entry.size), dtype)
        else:
            objects.append(name)
    if objects:
        shown = ", ".join(map(_shown, sorted(objects)[:8]))
        raise CheckpointError(
            f"{place} holds objects that are no tensors, which are not loaded: {shown}"
        )
    return specs


def _shown(name: str) -> str:
    return f"{name!r:.200}"


# Building torch's metadata from what the pickle describes. All of it is checked.


def _state_of(record: Any, path: str) -> dict[Any, Any]:
    """Return the fields of an object of the class at ``path``."""
    class_name = path.rpartition(".")[2]
    if type(record) is not Record or record.path != path or record.arguments != ():
        raise PickleError(f"it holds something else in place of a {class_name}")
    state = {} if record.state is None else record.state
    if type(state) is not dict or record.items is not None:
        raise PickleError(f"it holds a {class_name} whose fields have no names")
    return state


def _dict_in(state: dict[Any, Any], field: str) -> dict[Any, Any]:
    value = state.get(field)
    if type(value) is not dict:
        raise PickleError(f"its {field} is no dict")
    return value


def _check_name(name: Any) -> str:
    if type(name) is not str or not 0 < len(name) <= _LONGEST_NAME:
        raise PickleError(
            f"it has a tensor whose name is not a text of 1 to {_LONGEST_NAME} characters"
        )
    return name


def _is_bytes_entry(entry: Any) -> bool:
    return type(entry) is Record and entry.path == f"{_MODULE}.BytesStorageMetadata"


def _require_room(entries: Iterable[Any], n_stored: int) -> None:
    """Refuse more parts than are stored, before any part is looked at.

    A short file can claim very many parts: many names can share one long list of them.
    """
    n_parts = 0
    for entry in entries:
        if _is_bytes_entry(entry):
            n_parts += 1
        else:
            state = entry.state if type(entry) is Record else None
            chunks = state.get("chunks") if type(state) is dict else None
            n_parts += len(chunks) if type(chunks) is list else 0
        if n_parts > n_stored:
            raise PickleError(f"its tensors have more parts than the {n_stored:,} that are stored")


def _entry(name: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is_bytes_entry(entry):
        return BytesStorageMetadata()
    state = _state_of(entry, f"{_MODULE}.TensorStorageMetadata")
    chunks = state.get("chunks")
    if type(chunks) is not list:
        raise PickleError(f"{_shown(name)} has no list of parts")
    shape = sizes_of(state.get("size"))
    boxes: list[tuple[Sizes, Sizes]] = []
    for chunk in chunks:
        box = _state_of(chunk, f"{_MODULE}.ChunkStorageMetadata")
        boxes.append((sizes_of(box.get("offsets")), sizes_of(box.get("sizes"))))
    if not fills(shape, boxes):
        raise PickleError(
            f"the parts of {_shown(name)} do not hold each element of {shape} exactly once"
        )
    return TensorStorageMetadata(
        _properties(name, state.get("properties")),
        torch.Size(shape),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )


def _properties(name: str, record: Any) -> TensorProperties:
    """Return the properties of a dense tensor of the dtype in ``record``.

    The other properties do not matter for a dense tensor; torch 2.15 adds the strides to them.
    """
    state = None
    if type(record) is Record and record.path == f"{_MODULE}.TensorProperties":
        state = record.state
    if type(state) is not tuple or len(state) not in (5, 6):
        raise PickleError(f"{_shown(name)} has no properties of a tensor")
    dtype, layout = state[:2]
    if type(dtype) is not Name or dtype.path.removeprefix("torch.") not in DTYPES:
        raise PickleError(f"{_shown(name)} has no dtype")
    is_layout = type(layout) is Record and layout.path == _GET_LAYOUT and layout.arguments
    layout_name = layout.arguments[0] if is_layout else None
    if type(layout_name) is not str or layout_name != "torch.strided":
        raise PickleError(f"{_shown(name)} is no dense tensor")
    return TensorProperties(DTYPES[dtype.path.removeprefix("torch.")])


def _index(key: Any) -> MetadataIndex:
    state = _state_of(key, f"{_MODULE}.MetadataIndex")
    name = _check_name(state.get("fqn"))
    offset = state.get("offset")
    return MetadataIndex(name, None if offset is None else sizes_of(offset))


def _storage_info(name: str, value: Any) -> StorageInfo:
    state = _state_of(value, _STORAGE_INFO)
    file, begin, length = (state.get(field) for field in ("relative_path", "offset", "length"))
    if not _is_file_name(file):
        raise PickleError(f"{_shown(name)} lies in {file!r:.200}, which is no file of the folder")
    if type(begin) is not int or type(length) is not int or begin < 0 or length <= 0:
        raise PickleError(f"{_shown(name)} has no place in {file!r:.200}")
    if state.get("transform_descriptors") is not None:
        raise PickleError(
            f"{_shown(name)} is transformed (compressed), which composer3d does not read"
        )
    return StorageInfo(file, begin, length)


def _is_file_name(value: Any) -> TypeGuard[str]:
    """Whether ``value`` can name a file directly in a folder."""
    return (
        type(value) is str
        and value not in ("", ".", "..")
        and Path(value).name == value
        and "\0" not in value
        and len(value) <= _LONGEST_FILE_NAME
    )


def fills(shape: Sizes, boxes: Iterable[tuple[Sizes, Sizes]]) -> bool:
    """Whether boxes lie within ``shape`` and hold each of its elements exactly once.

    The time is linear in the number of boxes. Every axis gets a ruler with random marks at the
    places where boxes begin and end, and the measure of a box is the product of its sides. If
    every element lies in exactly one box, the measures of the boxes add up to the measure of the
    shape, for any marks. Otherwise their difference is a nonzero polynomial of the marks. Random
    marks of 61 bits make it zero with a probability of 2^-55 (Schwartz and Zippel). Nobody knows
    the marks beforehand.

    Args:
        boxes: offsets and sizes of each.
    """
    rulers: list[defaultdict[int, int]] = [
        defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in shape
    ]

    def measure(offsets: Sizes, sizes: Sizes) -> int:
        product = 1
        for ruler, begin, size in zip(rulers, offsets, sizes, strict=True):
            product = product * (ruler[begin + size] - ruler[begin]) % _PRIME
        return product

    total = 0
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        ends = (begin + size for begin, size in zip(offsets, sizes, strict=True))
        if any(end > length for end, length in zip(ends, shape, strict=True)):
            return False
        total += measure(offsets, sizes)
    origin = (0,) * len(shape)
    return total % _PRIME == measure(origin, shape) % _PRIME


def _check_parts(
    entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
    storage: Mapping[Any, StorageInfo],
) -> None:
    """Require that each part of a tensor is stored, in enough bytes, and that nothing else is."""
    expected: set[MetadataIndex] = set()
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            expected.add(MetadataIndex(name))
            continue
        for chunk in entry.chunks:
            index = MetadataIndex(name, chunk.offsets)
            at = tuple(chunk.offsets)
            if index in expected:
                raise PickleError(f"two parts of {_shown(name)} begin at {at}")
            expected.add(index)
            if index not in storage:
                raise PickleError(f"the part of {_shown(name)} at {at} is stored nowhere")
            size = prod(chunk.sizes) * entry.properties.dtype.itemsize
            length = storage[index].length
            if length < size:
                raise PickleError(
                    f"the part of {_shown(name)} at {at} has {length:,} bytes of {size:,}"
                )
    for index in storage:
        if index not in expected:
            raise PickleError(f"it stores a part of {_shown(index.fqn)} that no tensor has")


def _check_files(folder: Path, storage: Iterable[StorageInfo]) -> None:
    """Require that each part has bytes of its own in a plain file of the folder."""
    file, file_size, end = "", 0, 0
    for info in sorted(storage, key=lambda info: (info.relative_path, info.offset)):
        if info.relative_path != file:
            file, end = info.relative_path, 0
            status = os.lstat(folder / file)
            if not stat.S_ISREG(status.st_mode):
                raise PickleError(f"it names {file!r:.200}, which is no plain file")
            file_size = status.st_size
        if info.offset < end or info.offset + info.length > file_size:
            raise PickleError(
                f"{file!r:.200} has {file_size:,} bytes, but parts of tensors overlap in it or end "
                "beyond it"
            )
        end = info.offset + info.length


# Reading tensors.


def read_part(
    file: BinaryIO, info: StorageInfo, entry: TensorStorageMetadata, sizes: torch.Size
) -> Tensor:
    """Read one part of a tensor.

    Raises ValueError if the file holds something else there, and OSError if it cannot be read.
    """
    part = read_tensor(file, info.offset, info.length)
    dtype = entry.properties.dtype
    if part.shape != sizes or part.dtype != dtype:
        raise ValueError(
            f"a part is {tuple(part.shape)} of {part.dtype}, "
            f"but should be {tuple(sizes)} of {dtype}"
        )
    return part


def open_part(folder: Path, info: StorageInfo) -> BinaryIO:
    """Open the file in which a part lies. Links are refused."""
    return open_plain(folder / info.relative_path, follow_links=False)


def read_whole(folder: Path, metadata: Metadata, name: str) -> Tensor:
    """Read one tensor, and join its parts.

    Raises ValueError if a file holds something else, and OSError if it cannot be read.
    """
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    whole: Tensor | None = None
    for chunk in entry.chunks:
        info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        with open_part(folder, info) as file:
            part = read_part(file, info, entry, chunk.sizes)
        if part.shape == entry.size:
            return part
        if whole is None:
            whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        whole[_slices(chunk.offsets, chunk.sizes)] = part
    if whole is None:
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    return whole


def _slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


class TensorLoadPlanner(dcp.DefaultLoadPlanner):
    """Plans a load of tensors, and refuses objects: torch's own planner would unpickle them."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise _refused_object(read_item.dest_index.fqn)


class CheckedReader(StorageReader):
    """Gives torch the parts of tensors that it asks for, each checked.

    Args:
        folder: the checkpoint.
        metadata: as ``read_metadata`` returned it. The file is not read again.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._metadata = metadata
        # By the name of a tensor: the sizes of its parts by their offsets.
        self._part_sizes: dict[str, dict[torch.Size, torch.Size]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    # Without ``**kwargs`` in this signature, torch does not also ask for metadata of single ranks.
    def read_metadata(self) -> Metadata:
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
        """Read the parts in ``plan`` into the tensors of ``planner``, in their order on disk."""
        items = [(self._metadata.storage_data[item.storage_index], item) for item in plan.items]
        items.sort(key=lambda pair: (pair[0].relative_path, pair[0].offset))
        open_path = ""
        with ExitStack() as stack:
            for info, item in items:
                if info.relative_path != open_path:
                    stack.close()
                    file = stack.enter_context(open_part(self._folder, info))
                    open_path = info.relative_path
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
            raise _refused_object(name)
        with reading(f"{self._folder / info.relative_path}: {name!r:.200}"):
            if name not in self._part_sizes:
                self._part_sizes[name] = {chunk.offsets: chunk.sizes for chunk in entry.chunks}
            offsets = torch.Size(item.storage_index.offset or ())
            part = read_part(file, info, entry, self._part_sizes[name][offsets])
            target = planner.resolve_tensor(item).detach()
            target.copy_(part[_slices(item.storage_offsets, item.lengths)])
            planner.commit_tensor(item, target)


def _refused_object(name: str) -> CheckpointError:
    return CheckpointError(f"{name!r:.200} is an object and no tensor, which is not loaded")
