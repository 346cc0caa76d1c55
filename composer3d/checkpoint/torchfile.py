"""Read untrusted files of ``torch.save`` without torch's own reader.

Torch's reader makes the objects that a file asks for, and accepts the sizes that it declares. This
module makes tensors and plain values only. It compares every size with the file before it allocates
memory.

A file of ``torch.save`` is an uncompressed zip archive. ``NAME/data.pkl`` is a pickle of everything
but the bytes of tensors. Each ``NAME/data/KEY`` holds the bytes of one storage, to which the pickle
refers by KEY.
"""

import mmap
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from composer3d.checkpoint import pickles
from composer3d.checkpoint.pickles import Name, PickleError, Record, Storage, reading
from composer3d.facts.files import MIB, open_plain
from composer3d.facts.text import in_quotes

# All dtypes of this torch by name, such as "float32".
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

# The classes and functions that pickles of tensors name.
_STORAGES = {
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.ShortStorage": torch.int16,
    "torch.storage.UntypedStorage": torch.uint8,  # used for all newer dtypes
}
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_TENSOR_WITH_DTYPE = "torch._utils._rebuild_tensor_v3"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_SIZE = "torch.Size"
_ORDERED_DICT = "collections.OrderedDict"
_NAMES = frozenset(
    {
        _REBUILD_TENSOR,
        _REBUILD_TENSOR_WITH_DTYPE,
        _REBUILD_PARAMETER,
        _SIZE,
        _ORDERED_DICT,
        *_STORAGES,
        *(f"torch.{name}" for name in DTYPES),
    }
)

# Limits of what a file may hold.
_MAX_DEPTH = 64  # levels of nested values
_MAX_VALUES = 200_000  # values, and dimensions of tensors
_MAX_DIMS = 64
_MAX_INTEGER = 1 << 62  # sizes, strides and offsets must be below it
_MAX_DIRECTORY = 64 * MIB  # the list of records of an archive; each storage takes about 100 bytes
_TOO_MANY_VALUES = f"it nests deeper than {_MAX_DEPTH} values, or holds more than {_MAX_VALUES:,}"

# The zip format: the signatures of its structures, and their fixed fields.
_HEADER_MARK = b"PK\x03\x04"  # of the header before each record's bytes
_ENTRY_MARK = b"PK\x01\x02"  # of an entry in the list of records
_END_MARK = b"PK\x05\x06"  # of the end of an archive
_WIDE_END_MARK = b"PK\x06\x06"  # of the end of an archive above 4 GiB (zip64)
_WIDE_LOCATOR_MARK = b"PK\x06\x07"  # of the record that says where the zip64 end is
_ENTRY = struct.Struct("<4s6xH4xIIIHHH8xI")
# This value in an entry means that the number has 64 bits and is in the entry's extra field.
_IN_EXTRA_FIELD = 0xFFFFFFFF
_WIDE_NUMBERS = 1  # the id of the extra field with 64-bit numbers


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        shape: its sizes.
        dtype: the dtype of its elements.
        begin: the offset of its first element in the file, in bytes.
        read: reads the tensor, and returns it on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    read: Callable[[], Tensor]


class _ByteRange(NamedTuple):
    """A range of bytes in a file, and the CRC-32 that they must have; 0: the file has none."""

    begin: int
    size: int
    checksum: int = 0


def load_torch(path: Path) -> Any:
    """Read a file of ``torch.save``, except for the bytes of its tensors.

    The file is memory-mapped. The mapping lives as long as any of the tensors, and the bytes of a
    tensor are read from the disk only when they are used. If the file has a checksum of them, they
    are compared with it on the first read; ``StoredTensor.read`` raises ValueError if they differ.

    Returns:
        A dict, list, tuple or plain value, with a ``StoredTensor`` for each tensor.

    Raises:
        CheckpointError: the file cannot be read, was not written by ``torch.save``, declares more
            bytes than it has, or names something other than the classes of tensors. Nothing that
            the file names is run.
    """
    with reading(path), open_plain(path) as file:
        size = file.seek(0, 2)
        archive = _Archive(file, _ByteRange(0, size))
        # Copy on write: a tensor that is changed in memory does not change the file.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        verified: set[_ByteRange] = set()

        def view(place: _ByteRange, dtype: torch.dtype) -> Tensor:
            if place not in verified:
                begin, end = place.begin, place.begin + place.size
                with memoryview(mapped) as content, content[begin:end] as stored:
                    _require_checksum(stored, place.checksum, "a tensor")
                verified.add(place)
            return _view(mapped, place, dtype)

        return _Values(archive, view).convert(archive.parse_pickle())


def read_tensor(file: BinaryIO, begin: int, size: int) -> Tensor:
    """Read one tensor that ``torch.save`` wrote into a part of ``file``.

    Args:
        file: the file.
        begin: the offset in ``file`` at which the output of ``torch.save`` begins, in bytes.
        size: the size of this output, in bytes.

    Returns:
        The tensor on the CPU, in new memory, with the shape and the dtype that the file gives.

    Raises:
        ValueError: these bytes are not the output of ``torch.save`` for one tensor. It is a
            PickleError if the pickle is wrong.
        OSError: the file cannot be read.
    """
    archive = _Archive(file, _ByteRange(begin, size))
    content = archive.parse_pickle()
    # This check comes before the conversion, which would walk through any other value.
    if type(content) is not Record:
        raise PickleError("it holds something other than one tensor")
    values = _Values(archive, lambda place, dtype: _copy(file, place, dtype))
    tensor = values.convert(content)
    if not isinstance(tensor, StoredTensor):
        raise PickleError("it holds something other than one tensor")
    return tensor.read()


def _require_checksum(content: bytes | memoryview, checksum: int, noun: str) -> None:
    """Raise ValueError if the content does not have its CRC-32. 0 means that there is none.

    ``torch.save`` writes them unless ``torch.serialization.set_crc32_options`` says otherwise.
    Torch itself does not compare them.
    """
    if checksum and zlib.crc32(content) != checksum:
        raise ValueError(f"the bytes of {noun} do not have their checksum; copy the file again")


def _view(mapped: mmap.mmap, place: _ByteRange, dtype: torch.dtype) -> Tensor:
    """View the bytes at ``place`` as a flat tensor."""
    if place.size == 0:
        return torch.empty(0, dtype=dtype)
    count = place.size // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=place.begin)


def _copy(file: BinaryIO, place: _ByteRange, dtype: torch.dtype) -> Tensor:
    """Read the bytes at ``place`` into a new flat tensor."""
    tensor = torch.empty(place.size // dtype.itemsize, dtype=dtype)
    file.seek(place.begin)
    target = tensor.view(torch.uint8).numpy().data
    if cast(BufferedReader, file).readinto(target) != len(target):
        raise ValueError("the file has become shorter")
    return tensor


class _Archive:
    """The records of an uncompressed zip archive, which lies at ``place`` in ``file``.

    The first part of a record's path is the name of the archive. Methods take paths without this
    part.
    """

    def __init__(self, file: BinaryIO, place: _ByteRange) -> None:
        self._file = file
        self._place = place
        if self._read(_ByteRange(0, min(len(_HEADER_MARK), place.size))) != _HEADER_MARK:
            raise ValueError(
                "it is not an archive of torch.save (the format before torch 1.6 is not read "
                "either); if you trust it, load it with torch.load and write it with torch.save"
            )
        # By full path: the offset of each record's header in the archive, and the record's size and
        # checksum.
        self._records = dict(self._parse_directory(self._read_directory()))
        pickle_paths = [
            path for path in self._records if path.endswith("/data.pkl") and path.count("/") == 1
        ]
        if not pickle_paths:
            raise ValueError("it is an archive without a data.pkl; write it with torch.save")
        self._prefix = pickle_paths[0].removesuffix("data.pkl")
        self._places: dict[str, _ByteRange] = {}  # of the records that were looked up

    def parse_pickle(self) -> Any:
        """Parse ``data.pkl``, which describes everything but the bytes of tensors."""
        self._require_little_endian()
        place = self._locate("data.pkl")
        if place.size > pickles.LIMIT:
            raise ValueError(
                f"its data.pkl has {place.size:,} bytes, and at most {pickles.LIMIT:,} are read"
            )
        self._file.seek(place.begin)
        content = self._file.read(place.size)
        # The parser comes first, because it says more exactly what is wrong.
        parsed = pickles.parse(content, _NAMES, storages=True)
        _require_checksum(content, place.checksum, "its data.pkl")
        return parsed

    def _require_little_endian(self) -> None:
        """Refuse another byte order. Without the record ``byteorder``, it is little endian."""
        if self._prefix + "byteorder" not in self._records:
            return
        place = self._locate("byteorder")
        self._file.seek(place.begin)
        if self._file.read(min(place.size, 100)) != b"little":
            raise ValueError(
                "its numbers are not little endian; if you trust it, load it with torch.load on a "
                "little-endian machine, and write it with torch.save"
            )

    def locate_storage(self, key: str) -> _ByteRange:
        """Return the place of a storage's bytes in the file."""
        return self._locate(f"data/{key}")

    def _locate(self, name: str) -> _ByteRange:
        """Return the place of a record's bytes in the file.

        The bytes follow the record's local header, which has the name again.
        """
        if name in self._places:
            return self._places[name]
        path = self._prefix + name
        if path not in self._records:
            raise ValueError(f"it has no {in_quotes(name)}, to which it refers")
        offset, size, checksum = self._records[path]
        header = self._read(_ByteRange(offset, 30))
        name_size, extra_size = struct.unpack("<HH", header[26:])
        begin = offset + 30 + name_size + extra_size
        if header[:4] != _HEADER_MARK or begin + size > self._place.size:
            raise ValueError(f"its {in_quotes(name)} does not lie within it; copy it again")
        self._places[name] = _ByteRange(self._place.begin + begin, size, checksum)
        return self._places[name]

    def _read(self, place: _ByteRange) -> bytes:
        """Read bytes of the archive. ``place`` counts from its beginning."""
        if not 0 <= place.begin <= place.begin + place.size <= self._place.size:
            raise ValueError("it is cut off; copy it again")
        self._file.seek(self._place.begin + place.begin)
        return self._file.read(place.size)

    def _read_directory(self) -> bytes:
        """Read the list of records, which stands near the end of the archive."""
        end_at = self._place.size - 22
        end = self._read(_ByteRange(end_at, 22))
        if end[:4] != _END_MARK:
            raise ValueError("it is cut off, or something was added to it; copy it again")
        size, offset = struct.unpack("<II", end[12:20])
        if _IN_EXTRA_FIELD in (size, offset) or end[10:12] == b"\xff\xff":
            # A large archive (zip64) has another end with 64-bit numbers before this one.
            locator = self._read(_ByteRange(end_at - 20, 20))
            wide_end_at = struct.unpack("<Q", locator[8:16])[0]
            wide_end = self._read(_ByteRange(wide_end_at, 56))
            if locator[:4] != _WIDE_LOCATOR_MARK or wide_end[:4] != _WIDE_END_MARK:
                raise ValueError("the end of its archive is damaged; copy it again")
            size, offset = struct.unpack("<QQ", wide_end[40:56])
        if size > _MAX_DIRECTORY:
            raise ValueError(
                f"its list of records has {size:,} bytes, and at most {_MAX_DIRECTORY:,} are read"
            )
        return self._read(_ByteRange(offset, size))

    def _parse_directory(self, directory: bytes) -> Iterator[tuple[str, _ByteRange]]:
        """Yield each record's path, with the offset of its header, and its size and checksum."""
        position = 0
        seen: set[str] = set()
        while position < len(directory):
            try:
                entry = _parse_entry(directory, position)
            except (struct.error, UnicodeDecodeError):
                entry = None
            if entry is None or not entry.path or entry.end > len(directory) or entry.path in seen:
                raise ValueError("its list of records is damaged; copy it again")
            position = entry.end
            if entry.method != 0 or entry.size != entry.packed_size:
                raise ValueError(
                    f"its {in_quotes(entry.path)} is compressed, which torch.save never does; "
                    "write it again with torch.save"
                )
            if entry.offset + entry.size > self._place.size:
                raise ValueError(
                    f"its {in_quotes(entry.path)} has {entry.size:,} bytes, more than the file; "
                    "copy it again"
                )
            seen.add(entry.path)
            yield entry.path, _ByteRange(entry.offset, entry.size, entry.checksum)


class _Entry(NamedTuple):
    """An entry in the list of records of an archive."""

    path: str  # empty if there is no entry
    method: int  # of compression; 0: none
    checksum: int  # CRC-32 of the record; 0: the writer computed none
    packed_size: int  # bytes in the archive
    size: int  # bytes of the record
    offset: int  # of the record's header in the archive
    end: int  # where the next entry begins in the list


def _parse_entry(directory: bytes, position: int) -> _Entry:
    """Parse the entry at ``position``. Raises struct.error and UnicodeDecodeError."""
    mark, method, checksum, packed_size, size, name_size, extra_size, comment_size, offset = (
        _ENTRY.unpack_from(directory, position)
    )
    name_at = position + _ENTRY.size
    extra_at = name_at + name_size
    comment_at = extra_at + extra_size
    path = directory[name_at:extra_at].decode() if mark == _ENTRY_MARK else ""
    extra = directory[extra_at:comment_at]
    size, packed_size, offset = _widen(extra, size, packed_size, offset)
    return _Entry(path, method, checksum, packed_size, size, offset, comment_at + comment_size)


def _widen(extra: bytes, *values: int) -> Iterator[int]:
    """Yield ``values``, taking each number above 32 bits from the extra field.

    The extra field with 64-bit numbers holds only these numbers, in the order of ``values``.
    """
    wide = b""
    position = 0
    while position + 4 <= len(extra):
        field_id, size = struct.unpack_from("<HH", extra, position)
        if field_id == _WIDE_NUMBERS:
            wide = extra[position + 4 : position + 4 + size]
        position += 4 + size
    for value in values:
        if value == _IN_EXTRA_FIELD:
            yield int.from_bytes(wide[:8], "little")
            wide = wide[8:]
        else:
            yield value


class _Values:
    """Converts a parsed pickle to plain values and ``StoredTensor``s, and checks each of them.

    Args:
        archive: the archive that holds the pickle.
        read: returns the bytes of a storage as a flat tensor.
    """

    def __init__(
        self, archive: _Archive, read: Callable[[_ByteRange, torch.dtype], Tensor]
    ) -> None:
        self._archive = archive
        self._read = read
        self._budget = _MAX_VALUES  # values that may still be converted
        # Tensors by the ``id`` of their record. The record is kept, so that no other object can get
        # the same ``id``.
        self._tensors: dict[int, tuple[Record, StoredTensor]] = {}

    def convert(self, value: Any, depth: int = 0) -> Any:
        """Convert a value and all values in it. A container that occurs twice is copied twice."""
        self._spend(1)
        if depth > _MAX_DEPTH:
            raise PickleError(_TOO_MANY_VALUES)
        if type(value) is list:
            return [self.convert(item, depth + 1) for item in value]
        if type(value) is tuple:
            return tuple(self.convert(item, depth + 1) for item in value)
        if type(value) is Record and value.path == _ORDERED_DICT and value.arguments == ():
            # The state of an OrderedDict is ignored: in a state_dict, it holds only _metadata.
            value = value.items or {}
        if type(value) is dict:
            return {_check_key(key): self.convert(item, depth + 1) for key, item in value.items()}
        if type(value) is Record and value.path == _SIZE:
            return sizes_of(value)
        if type(value) is Record:
            return self._convert_tensor_once(value)
        if type(value) is Name:
            return value.path
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise PickleError("it holds a storage that belongs to no tensor")

    def _spend(self, count: int) -> None:
        self._budget -= count
        if self._budget < 0:
            raise PickleError(_TOO_MANY_VALUES)

    def _convert_tensor_once(self, record: Record) -> StoredTensor:
        """Convert a tensor on the first visit, and return the same object on later ones.

        Every visit counts the dims of the tensor as values.
        """
        if id(record) not in self._tensors:
            self._tensors[id(record)] = record, self._convert_tensor(record)
        tensor = self._tensors[id(record)][1]
        self._spend(len(tensor.shape))
        return tensor

    def _convert_tensor(self, record: Record) -> StoredTensor:
        if (
            record.path == _REBUILD_PARAMETER
            and record.arguments
            and type(record.arguments[0]) is Record
        ):
            record = record.arguments[0]
        is_rebuilt = record.path in (_REBUILD_TENSOR, _REBUILD_TENSOR_WITH_DTYPE)
        if not is_rebuilt or not 6 <= len(record.arguments) <= 8:
            raise PickleError(
                f"it makes an object of {record.path} in a way that torch.save does not"
            )
        storage, offset, size, stride = record.arguments[:4]
        place, dtype = self._locate_storage(storage)
        if record.path == _REBUILD_TENSOR_WITH_DTYPE and len(record.arguments) > 6:
            dtype = _convert_dtype(record.arguments[6])
        shape = sizes_of(size)
        strides = sizes_of(stride)
        if type(offset) is not int or not 0 <= offset < _MAX_INTEGER or len(strides) != len(shape):
            raise PickleError("it holds a tensor with strides or an offset that no tensor has")

        # All elements of the tensor must lie in the storage. The tensor must not have more elements
        # than the storage: with strides of 0, one stored element could become any number of them.
        is_empty = prod(shape) == 0
        n_stored = place.size // dtype.itemsize
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        n_needed = 0 if is_empty else max(last + 1, prod(shape))
        if n_needed > n_stored:
            raise PickleError(
                f"it holds a tensor of shape {shape} in a storage of {n_stored} elements, "
                "which are too few"
            )

        def read() -> Tensor:
            flat = self._read(place, dtype)
            return flat.as_strided(shape, strides, 0 if is_empty else offset)

        return StoredTensor(shape, dtype, place.begin + offset * dtype.itemsize, read)

    def _locate_storage(self, storage: Any) -> tuple[_ByteRange, torch.dtype]:
        """Return where the bytes of a storage lie in the file, and the dtype of its elements."""
        identity = storage.arguments if type(storage) is Storage else ()
        types = [type(item) for item in identity]
        if types != [str, Name, str, str, int] or identity[0] != "storage":
            raise PickleError("it holds a tensor without a storage")
        _, storage_class, key, _, count = identity
        if storage_class.path not in _STORAGES:
            raise PickleError(
                f"it holds a storage of {storage_class.path}, which is not a class of storages"
            )
        place = self._archive.locate_storage(key)
        dtype = _STORAGES[storage_class.path]
        if count < 0 or count * dtype.itemsize != place.size:
            raise PickleError(
                f"it declares a storage of {count} {dtype}, but keeps {place.size:,} bytes of it"
            )
        return place, dtype


def _check_key(key: Any) -> str | int:
    if type(key) is not str and type(key) is not int:
        raise PickleError("it holds a dict with keys that are neither texts nor integers")
    return key


def _convert_dtype(value: Any) -> torch.dtype:
    if type(value) is not Name or value.path.removeprefix("torch.") not in DTYPES:
        raise PickleError("it holds a tensor without a dtype of torch")
    return DTYPES[value.path.removeprefix("torch.")]


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return a shape, strides or offsets from a parsed pickle, as a tuple.

    Args:
        value: a tuple of integers, or the ``Record`` of a ``torch.Size``.

    Raises:
        PickleError: ``value`` is something else, has more than 64 dims, or has an integer that is
            negative or at least 2^62.
    """
    if type(value) is Record and value.path == _SIZE and len(value.arguments) == 1:
        value = value.arguments[0]
    if (
        type(value) is not tuple
        or len(value) > _MAX_DIMS
        or any(type(n) is not int or not 0 <= n < _MAX_INTEGER for n in value)
    ):
        raise PickleError("it holds a shape that no tensor has")
    return value
