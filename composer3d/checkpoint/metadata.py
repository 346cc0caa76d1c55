"""Read checkpoints of ``torch.distributed.checkpoint`` (DCP): their metadata and their tensors.

Torch unpickles the file ``.metadata``, and objects that are stored among the tensors, and so runs
any code in them. This module parses ``.metadata`` to inert records, and builds torch's ``Metadata``
from them, field by field. All code that reads DCP checkpoints does so through this module.
"""

import mmap
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from io import BytesIO
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from composer3d.checkpoint import pickles
from composer3d.checkpoint.manifest import TensorSpec
from composer3d.checkpoint.pickles import Name, PickleError, Record, reading
from composer3d.checkpoint.torchfile import DTYPES, read_tensor, sizes_of
from composer3d.facts.box import Box
from composer3d.facts.errors import CheckpointError
from composer3d.facts.files import open_plain
from composer3d.facts.remote import Place, RemotePath, whole_file
from composer3d.facts.text import in_quotes
from composer3d.runtime import collector
from composer3d.runtime.torch_private import StorageInfo

METADATA = ".metadata"
# In bytes. Each part of a tensor takes 130 to 180. The largest job that this allows for: 405B
# parameters on 16,384 ranks with pp = 4, so that 4,096 ranks share each of 3,411 tensors of weights
# and moments. Its 14 million parts take 2.4 GB. (The published layout has pp = 16 and takes 0.6.)
METADATA_LIMIT = 3 << 30
# A file has at least this many bytes for each tensor and each part that it lists, besides a few kB.
_MIN_BYTES_PER_PART = 64
_FREE_BYTES = 4096

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_GET_LAYOUT = "torch.serialization._get_layout"
# All names that torch 2.13 and 2.15 write, under Python 3.11 to 3.14. Some versions of Python
# pickle a member of an enum as a call of getattr.
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
_LONGEST_KEY = 200  # of a part in a dict, in characters
_SHOWN_OF_KEY = 100  # characters of the name in a key that is replaced by its digest
_PRIME = 2**61 - 1

Sizes = tuple[int, ...]


def read_metadata(folder: Place, listed: Collection[str] | None = None) -> Metadata:
    """Read DCP's metadata of a checkpoint: the parts of each tensor, and where each is stored.

    The file is untrusted: it is parsed as data, and checked. The parts of a tensor must cover each
    of its elements exactly once. Each part must have enough bytes in a plain file of ``folder``,
    and must not share them with another part. The ``storage_data`` of the result has the keys of
    ``_part_key``.

    Args:
        folder: the checkpoint.
        listed: the files that its manifest lists, which have been compared with it. No other file
            is read. None: there is no manifest.

    Raises CheckpointError if the metadata is wrong or cannot be read.
    """
    with reading(folder / METADATA), collector.paused():
        if listed is not None and METADATA not in listed:
            raise PickleError("the manifest does not list it")
        parsed, size = _parse(folder / METADATA)
        state = _state_of(parsed, f"{_MODULE}.Metadata")
        raw_entries = _dict_in(state, "state_dict_metadata")
        raw_storage = _dict_in(state, "storage_data")
        _require_room(raw_entries.values(), len(raw_storage), size)

        # The storage comes first: its entries must differ, so that no small file has many of them.
        storage: dict[str, StorageInfo] = {}
        for raw_index, raw_info in raw_storage.items():
            name, offsets = _read_index(raw_index)
            key = _part_key(name, offsets)
            if key in storage:
                raise PickleError(f"it stores a part of {in_quotes(name)} twice")
            storage[key] = _build_storage_info(name, raw_info)
        entries = {_check_name(name): _build_entry(name, raw) for name, raw in raw_entries.items()}

        _check_parts(entries, storage)
        _check_files(folder, storage.values(), listed)
    return Metadata(entries, storage_data=storage, storage_meta=StorageMeta())


def _parse(path: Place) -> tuple[Any, int]:
    """Return the value in the file, and the size of the file in bytes."""
    # The file is mapped instead of read, so that a large file of zeros fails at its first byte
    # without taking memory. One in an object store is copied to a disk before.
    with _open(path) as file:
        size = file.seek(0, os.SEEK_END)
        if not 0 < size <= METADATA_LIMIT:
            raise PickleError(
                f"it has {size:,} bytes, and at least 1 and at most {METADATA_LIMIT:,} are read"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            value = pickles.parse(mapped, _NAMES, longest_text=4 * _LONGEST_NAME, all_texts=None)
            return value, size


def _open(path: Place) -> BinaryIO:
    """Open a plain file on a disk, with the content of ``path``. Raises OSError."""
    if isinstance(path, RemotePath):
        return whole_file(path, METADATA_LIMIT)
    return open_plain(path, follow_links=False)


def tensor_specs(metadata: Metadata, place: str) -> dict[str, TensorSpec]:
    """Return the shape and dtype of each whole tensor, by its global name.

    Args:
        metadata: as ``read_metadata`` returned it.
        place: the checkpoint, as the error names it.

    Raises:
        CheckpointError: an entry is a pickled object instead of a tensor.
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
        shown = ", ".join(map(in_quotes, sorted(objects)[:8]))
        raise CheckpointError(
            f"{place} holds objects that are not tensors, and only tensors are loaded: {shown}"
        )
    return specs


@dataclass(frozen=True)
class PackedTensor:
    """The parts of one tensor, and where they are stored, in arrays with a row for each part.

    A part takes 16 bytes for each dim and 20 more.

    Attributes:
        name: the global name.
        dtype, shape: those of the whole tensor.
        offsets, sizes: int64, shape (parts, dims).
        files: the names of the files, without repetition.
        file_of_part: int32, shape (parts,): indices of ``files``.
        begins, lengths: int64, shape (parts,): the range of bytes in the file.
    """

    name: str
    dtype: torch.dtype
    shape: Sizes
    offsets: np.ndarray
    sizes: np.ndarray
    files: tuple[str, ...]
    file_of_part: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray


def pack_metadata(metadata: Metadata, names: Iterable[str]) -> list[PackedTensor]:
    """Pack what ``metadata``, from ``read_metadata``, says of some tensors.

    The result has no objects of torch's checkpoints, so that it is small when it is sent.
    """
    packed = []
    for name in names:
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)  # ``tensor_specs`` refuses objects
        chunks = entry.chunks
        stored = [metadata.storage_data[_part_key(name, chunk.offsets)] for chunk in chunks]
        numbers = {path: number for number, path in enumerate({s.relative_path: 0 for s in stored})}
        shape = (len(chunks), len(entry.size))
        packed.append(
            PackedTensor(
                name=name,
                dtype=entry.properties.dtype,
                shape=tuple(entry.size),
                offsets=np.array([chunk.offsets for chunk in chunks], np.int64).reshape(shape),
                sizes=np.array([chunk.sizes for chunk in chunks], np.int64).reshape(shape),
                files=tuple(numbers),
                file_of_part=np.array([numbers[info.relative_path] for info in stored], np.int32),
                begins=np.array([info.offset for info in stored], np.int64),
                lengths=np.array([info.length for info in stored], np.int64),
            )
        )
    return packed


def unpack_metadata(packed: Iterable[PackedTensor], boxes: Mapping[str, Box]) -> Metadata:
    """Make metadata of the parts that overlap with boxes, in the form of ``read_metadata``.

    Args:
        packed: from ``pack_metadata``.
        boxes: the box that will be read of each tensor, by name.
    """
    entries: dict[str, STORAGE_TYPES] = {}
    storage: dict[str, StorageInfo] = {}
    for tensor in packed:
        box = boxes[tensor.name]
        ends, box_ends = tensor.offsets + tensor.sizes, np.add(box.offset, box.shape)
        overlaps = ((tensor.offsets < box_ends) & (ends > np.array(box.offset))).all(axis=1)
        chunks = []
        for part in np.flatnonzero(overlaps):
            offsets, sizes = tensor.offsets[part].tolist(), tensor.sizes[part].tolist()
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            storage[_part_key(tensor.name, tuple(offsets))] = StorageInfo(
                tensor.files[tensor.file_of_part[part]],
                int(tensor.begins[part]),
                int(tensor.lengths[part]),
            )
        entries[tensor.name] = TensorStorageMetadata(
            TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks
        )
    return Metadata(entries, storage_data=storage, storage_meta=StorageMeta())


# Building torch's metadata from the parsed pickle. Every value is checked.


def _state_of(record: Any, path: str) -> dict[Any, Any]:
    """Return the fields of ``record``, which must describe an object of the class ``path``."""
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
        raise PickleError(f"its {field} is not a dict")
    return value


def _check_name(name: Any) -> str:
    if type(name) is not str or not 0 < len(name) <= _LONGEST_NAME:
        raise PickleError(
            f"it has a tensor whose name is not a text of 1 to {_LONGEST_NAME} characters"
        )
    return name


def _is_bytes_entry(entry: Any) -> bool:
    return type(entry) is Record and entry.path == f"{_MODULE}.BytesStorageMetadata"


def _require_room(entries: Collection[Any], n_stored: int, size: int) -> None:
    """Refuse metadata that lists more than it stores, before any part is looked at.

    A small file can list a huge number of parts, because many names can share one long list, and
    many parts one record.

    Args:
        entries: what the file says of each tensor.
        n_stored: the number of parts that it stores.
        size: its size in bytes.
    """
    if (len(entries) + n_stored) * _MIN_BYTES_PER_PART > size + _FREE_BYTES:
        raise PickleError(
            f"it lists {len(entries):,} tensors and {n_stored:,} parts in {size:,} bytes, more "
            "than any writer puts there"
        )
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


def _build_entry(name: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is_bytes_entry(entry):
        return BytesStorageMetadata()
    state = _state_of(entry, f"{_MODULE}.TensorStorageMetadata")
    chunks = state.get("chunks")
    if type(chunks) is not list:
        raise PickleError(f"{in_quotes(name)} has no list of parts")
    shape = sizes_of(state.get("size"))
    boxes: list[tuple[Sizes, Sizes]] = []
    for chunk in chunks:
        box = _state_of(chunk, f"{_MODULE}.ChunkStorageMetadata")
        boxes.append((sizes_of(box.get("offsets")), sizes_of(box.get("sizes"))))
    if not fills(shape, boxes):
        raise PickleError(
            f"the parts of {in_quotes(name)} do not hold each element of {shape} exactly once"
        )
    return TensorStorageMetadata(
        _build_properties(name, state.get("properties")),
        torch.Size(shape),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )


def _build_properties(name: str, record: Any) -> TensorProperties:
    """Return the properties of a dense tensor with the dtype in ``record``.

    The other values in ``record``, to which torch 2.15 adds strides, do not matter for a dense
    tensor.
    """
    state = None
    if type(record) is Record and record.path == f"{_MODULE}.TensorProperties":
        state = record.state
    if type(state) is not tuple or len(state) not in (5, 6):
        raise PickleError(f"{in_quotes(name)} has no properties of a tensor")
    dtype, layout = state[:2]
    if type(dtype) is not Name or dtype.path.removeprefix("torch.") not in DTYPES:
        raise PickleError(f"{in_quotes(name)} has no dtype")
    is_layout = type(layout) is Record and layout.path == _GET_LAYOUT and layout.arguments
    layout_name = layout.arguments[0] if is_layout else None
    if type(layout_name) is not str or layout_name != "torch.strided":
        raise PickleError(f"{in_quotes(name)} is not a dense tensor")
    return TensorProperties(DTYPES[dtype.path.removeprefix("torch.")])


def _read_index(key: Any) -> tuple[str, Sizes | None]:
    """Return the name of a tensor and the offsets of its part; None for an object."""
    state = _state_of(key, f"{_MODULE}.MetadataIndex")
    name = _check_name(state.get("fqn"))
    offset = state.get("offset")
    return name, None if offset is None else sizes_of(offset)


def _part_key(name: str, offsets: Sizes | None) -> str:
    """Return the key of a part in a dict.

    It is a text, because Python hashes texts with a secret of the process. A file could be made
    with offsets that all have the same hash, and torch's ``MetadataIndex`` hashes the offsets. A
    long key is replaced by its digest: in a small file, many parts can share a long name.
    """
    key = f"{name}:{None if offsets is None else tuple(offsets)}"
    if len(key) <= _LONGEST_KEY:
        return key
    return f"{name[:_SHOWN_OF_KEY]}...{blake2b(key.encode(), digest_size=16).hexdigest()}:"


def _build_storage_info(name: str, value: Any) -> StorageInfo:
    state = _state_of(value, _STORAGE_INFO)
    file, begin, length = (state.get(field) for field in ("relative_path", "offset", "length"))
    if not _is_file_name(file):
        raise PickleError(
            f"{in_quotes(name)} lies in {in_quotes(file)}, which is not a file of the folder"
        )
    if type(begin) is not int or type(length) is not int or begin < 0 or length <= 0:
        raise PickleError(f"{in_quotes(name)} has no valid range of bytes in {in_quotes(file)}")
    if state.get("transform_descriptors") is not None:
        raise PickleError(
            f"{in_quotes(name)} is transformed (compressed), which composer3d does not read"
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


# How many random coordinates are kept, so that they need not be computed again: neighbouring parts
# share them.
_CACHED_COORDINATES = 1 << 12


def fills(shape: Sizes, boxes: Iterable[tuple[Sizes, Sizes]]) -> bool:
    """Return whether boxes lie within ``shape`` and cover each of its elements exactly once.

    The time is linear in the number of boxes, and the memory is constant. For each dim, every
    coordinate at which a box begins or ends is replaced by a random number. The volume of a box is
    the product of its sides in these random coordinates. If the boxes cover each element exactly
    once, their volumes add up to the volume of ``shape``, whatever the random numbers are.
    Otherwise the difference is a nonzero polynomial of the random numbers, and its degree is the
    number of dims, at most 64. By the Schwartz-Zippel lemma, random numbers of 61 bits make it zero
    with a probability of at most 2^-55. They are hashes with a key that is drawn anew in each call,
    so nobody can make a file that fits them.

    Args:
        shape: the sizes of the whole tensor.
        boxes: the offsets and the sizes of each box.
    """
    secret = secrets.token_bytes(16)

    @lru_cache(maxsize=_CACHED_COORDINATES)
    def random_coordinate(dim: int, coordinate: int) -> int:
        digest = blake2b(b"%d:%d" % (dim, coordinate), digest_size=16, key=secret).digest()
        return int.from_bytes(digest) % _PRIME

    def volume(offsets: Sizes, sizes: Sizes) -> int:
        product = 1
        for dim, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
            side = random_coordinate(dim, begin + size) - random_coordinate(dim, begin)
            product = product * side % _PRIME
        return product

    total = 0
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        ends = (begin + size for begin, size in zip(offsets, sizes, strict=True))
        if any(end > length for end, length in zip(ends, shape, strict=True)):
            return False
        total += volume(offsets, sizes)
    origin = (0,) * len(shape)
    return total % _PRIME == volume(origin, shape) % _PRIME


def _check_parts(
    entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
    storage: Mapping[str, StorageInfo],
) -> None:
    """Require that each part of a tensor is stored in enough bytes, and that no other is stored."""
    expected: set[str] = set()
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            expected.add(_part_key(name, None))
            continue
        for chunk in entry.chunks:
            key = _part_key(name, chunk.offsets)
            at = tuple(chunk.offsets)
            if key in expected:
                raise PickleError(f"two parts of {in_quotes(name)} begin at {at}")
            expected.add(key)
            if key not in storage:
                raise PickleError(f"the part of {in_quotes(name)} at {at} is stored nowhere")
            size = prod(chunk.sizes) * entry.properties.dtype.itemsize
            length = storage[key].length
            if length < size:
                raise PickleError(
                    f"the part of {in_quotes(name)} at {at} has {length:,} bytes of {size:,}"
                )
    for key in storage:
        if key not in expected:
            name = key.rpartition(":")[0]
            raise PickleError(f"it stores a part of {in_quotes(name)} that no tensor has")


def _check_files(
    folder: Place, storage: Iterable[StorageInfo], listed: Collection[str] | None
) -> None:
    """Require that each part lies in a plain file of the folder, and that no two overlap.

    The file must be one of ``listed``, unless that is None.
    """
    sizes = folder.files() if isinstance(folder, RemotePath) else None
    file, file_size, end = "", 0, 0
    for info in sorted(storage, key=lambda info: (info.relative_path, info.offset)):
        if info.relative_path != file:
            file, end = info.relative_path, 0
            size = _size_on_disk(folder, file) if sizes is None else sizes.get(file)
            if size is None:
                raise PickleError(f"it names {in_quotes(file)}, which is not a plain file")
            if listed is not None and file not in listed:
                raise PickleError(f"it names {in_quotes(file)}, which the manifest does not list")
            file_size = size
        if info.offset < end or info.offset + info.length > file_size:
            raise PickleError(
                f"{in_quotes(file)} has {file_size:,} bytes, but parts of tensors overlap in it or "
                "end beyond it"
            )
        end = info.offset + info.length


def _size_on_disk(folder: Place, file: str) -> int | None:
    """Return the size of a file in bytes; None: it is not a plain file. Raises OSError."""
    status = os.lstat(str(folder / file))
    return status.st_size if stat.S_ISREG(status.st_mode) else None


# Reading tensors.


def _read_part(
    file: BinaryIO, info: StorageInfo, entry: TensorStorageMetadata, sizes: torch.Size
) -> Tensor:
    """Read one part of a tensor into new memory on the CPU.

    Args:
        file: the file that stores the part.
        info: where the part is stored in ``file``.
        entry: the tensor to which the part belongs.
        sizes: the expected shape of the part.

    Raises:
        ValueError: the bytes are not a tensor of this shape and dtype.
        OSError: the file cannot be read.
    """
    part = read_tensor(file, info.offset, info.length)
    dtype = entry.properties.dtype
    if part.shape != sizes or part.dtype != dtype:
        raise ValueError(
            f"a part is {tuple(part.shape)} of {part.dtype}, "
            f"but should be {tuple(sizes)} of {dtype}"
        )
    return part


def read_whole(folder: Path, metadata: Metadata, name: str) -> Tensor:
    """Read all parts of one tensor, and return the whole tensor on the CPU.

    Args:
        folder: the checkpoint.
        metadata: as ``read_metadata`` returned it.
        name: the global name of a tensor in ``metadata``.

    Raises:
        ValueError: the bytes of a part are not a tensor of its shape and dtype.
        OSError: a file cannot be read.
    """
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    whole: Tensor | None = None
    for chunk in entry.chunks:
        info = metadata.storage_data[_part_key(name, chunk.offsets)]
        with open_plain(folder / info.relative_path, follow_links=False) as file:
            part = _read_part(file, info, entry, chunk.sizes)
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


def read_parts(
    folder: Place,
    metadata: Metadata,
    state: dict[str, Tensor],
    report: Callable[[int], None] = lambda n_bytes: None,
) -> None:
    """Read this rank's shards of tensors in place, in their order on disk. No collective.

    Torch's ``dcp.load`` would unpickle objects among the tensors, read the metadata again, and send
    the plans of all ranks to rank 0 and back, where nothing changes. Only its planner is used.

    Args:
        folder: the checkpoint.
        metadata: as ``read_metadata`` returned it, or the part of it that describes these shards.
        state: the tensors by global name, with the shapes of the whole ones.
        report: is called with the number of bytes of each part that is in its tensor.

    Raises:
        CheckpointError: a part is not a tensor of its shape and dtype.
        OSError: a file cannot be opened.
    """
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata)
    reads = _list_reads(metadata, planner.create_local_plan().items)
    for file_name, reads_of_file in groupby(reads, key=lambda read: read.info.relative_path):
        path, in_file = folder / file_name, list(reads_of_file)
        with _stored_parts(path, [read.info for read in in_file]) as stored:
            for (file, info), (_, entry, sizes, item) in zip(stored, in_file, strict=True):
                with reading(f"{path}: {in_quotes(item.storage_index.fqn)}"):
                    part = _read_part(file, info, entry, sizes)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part[_slices(item.storage_offsets, item.lengths)])
                    report(target.nbytes)


@contextmanager
def _stored_parts(
    path: Place, infos: list[StorageInfo]
) -> Iterator[Iterator[tuple[BinaryIO, StorageInfo]]]:
    """Yield, for each part that is stored in a file, a file to read it from, and its place there.

    A part in an object store is read whole, in one request, and some parts ahead.
    """
    if isinstance(path, RemotePath):
        ranges = ((info.offset, info.length) for info in infos)
        with closing(path.read_ranges(ranges)) as contents:
            yield (
                (BytesIO(content), replace(info, offset=0))
                for content, info in zip(contents, infos, strict=True)
            )
        return
    with open_plain(path, follow_links=False) as file:
        yield ((file, info) for info in infos)


class _Read(NamedTuple):
    """A part of a tensor to read: where it is stored, its tensor, its shape, and its target."""

    info: StorageInfo
    entry: TensorStorageMetadata
    sizes: torch.Size
    item: ReadItem


def _list_reads(metadata: Metadata, items: Iterable[ReadItem]) -> list[_Read]:
    """Return the reads of a plan in their order on disk. Raises CheckpointError for an object."""
    parts = {
        _part_key(name, chunk.offsets): (entry, chunk.sizes)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }
    reads = []
    for item in items:
        name = item.storage_index.fqn
        key = _part_key(name, item.storage_index.offset)
        if item.type != LoadItemType.TENSOR or key not in parts:
            raise CheckpointError(f"{in_quotes(name)} is an object, and only tensors are loaded")
        reads.append(_Read(metadata.storage_data[key], *parts[key], item))
    return sorted(reads, key=lambda read: (read.info.relative_path, read.info.offset))
