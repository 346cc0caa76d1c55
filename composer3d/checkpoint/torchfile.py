"""Files of ``torch.save``, read without it: torch makes objects on a file's word, and lets it declare any size.

Such a file is an uncompressed zip archive: ``NAME/data.pkl`` is a pickle of everything but the bytes of tensors, and
each ``NAME/data/KEY`` is a storage, to which the pickle refers. Sizes are held against the file before memory is taken.
"""

import mmap
import struct
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
from composer3d.spec.files import MIB, open_plain

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
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
    "torch.storage.UntypedStorage": torch.uint8,  # of all newer dtypes
}
_TENSOR, _NEWER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER, _SIZE, _DICT = (
    "torch._utils._rebuild_parameter",
    "torch.Size",
    "collections.OrderedDict",
)
_NAMES = frozenset(
    {_TENSOR, _NEWER, _PARAMETER, _SIZE, _DICT, *_STORAGES, *(f"torch.{name}" for name in DTYPES)}
)
_DEPTH, _VALUES = (
    64,
    200_000,
)  # of what a file may hold: nested values, and values and dimensions in all
_DIRECTORY = 64 * MIB  # of an archive; each storage takes about 100 bytes
_TOO_MANY = f"it nests deeper than {_DEPTH} values, or holds more than {_VALUES:,}"
_LARGEST = 1 << 62
_ZIP = b"PK\x03\x04"
_LISTED = struct.Struct("<4s6xH8xIIHHH8xI")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its form, where its bytes begin, and how to get it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int  # byte of the file where its first element lies
    read: Callable[[], Tensor]


class _Part(NamedTuple):
    """A stretch of a file."""

    begin: int
    size: int


def load_torch(path: Path) -> Any:
    """What a file of ``torch.save`` holds: dict, list, tuple and plain values, with ``Stored`` for each tensor.

    The file stays mapped for as long as one of them is there; nothing of a tensor is read before it is used.

    Raises CheckpointError where it is no such file, declares more than it has, or names another class than those of
    tensors, which is never made.
    """
    with reading(path), open_plain(path) as file:
        size = file.seek(0, 2)
        archive = _Archive(file, _Part(0, size))
        mapped = mmap.mmap(
            file.fileno(), 0, access=mmap.ACCESS_COPY
        )  # a copy of what is written to, not of the file
        return _Tree(archive, lambda part, dtype: _view(mapped, part, dtype)).plain(
            archive.content()
        )


def read_tensor(file: BinaryIO, begin: int, size: int) -> Tensor:
    """The one tensor of a ``torch.save`` that lies in ``size`` bytes of ``file``, in memory of its own.

    Raises ValueError (a PickleError where its pickle is at fault) and OSError.
    """
    archive = _Archive(file, _Part(begin, size))
    content = archive.content()
    if type(content) is not Record:
        raise PickleError("it holds something else than one tensor")
    held = _Tree(archive, lambda part, dtype: _copy(file, part, dtype)).plain(content)
    if not isinstance(held, Stored):
        raise PickleError("it holds something else than one tensor")
    return held.read()


def _view(mapped: mmap.mmap, part: _Part, dtype: torch.dtype) -> Tensor:
    if part.size == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(
        mapped, dtype=dtype, count=part.size // dtype.itemsize, offset=part.begin
    )


def _copy(file: BinaryIO, part: _Part, dtype: torch.dtype) -> Tensor:
    held = torch.empty(part.size // dtype.itemsize, dtype=dtype)
    file.seek(part.begin)
    target = held.view(torch.uint8).numpy().data
    if cast(BufferedReader, file).readinto(target) != len(target):
        raise ValueError("it has become shorter")
    return held


class _Archive:
    """The records of an uncompressed zip archive, by their names without its own."""

    def __init__(self, file: BinaryIO, place: _Part) -> None:
        self._file, self._place = file, place
        if self._read(_Part(0, min(len(_ZIP), place.size))) != _ZIP:
            raise ValueError(
                "it is no archive of torch.save, whose form before torch 1.6 is not read either; "
                "where you trust it, load it with torch.load and write it with torch.save"
            )
        found = dict(self._entries(self._directory()))
        self._name = next(
            (name for name in found if name.endswith("/data.pkl") and name.count("/") == 1), ""
        )
        if not self._name:
            raise ValueError("it is an archive without a data.pkl; write it with torch.save")
        self._records = found
        self._places: dict[str, _Part] = {}  # where records are that were asked for

    def content(self) -> Any:
        """What its pickle describes: everything but the bytes of tensors."""
        self._require_order()
        part = self._record("data.pkl")
        if part.size > pickles.LIMIT:
            raise ValueError(
                f"its data.pkl has {part.size:,} bytes, and at most {pickles.LIMIT:,} are read"
            )
        self._file.seek(part.begin)
        return pickles.parse(self._file.read(part.size), _NAMES, storages=True)

    def _require_order(self) -> None:
        """An archive may say in which order the bytes of its numbers lie; older ones do not, and are little."""
        if self._name.removesuffix("data.pkl") + "byteorder" not in self._records:
            return
        part = self._record("byteorder")
        self._file.seek(part.begin)
        if self._file.read(min(part.size, 100)) != b"little":
            raise ValueError(
                "the bytes of its numbers lie in another order than little endian; "
                "where you trust it, load it with torch.load on a little-endian machine, and write it with torch.save"
            )

    def storage(self, key: str) -> _Part:
        """Where a storage lies in the file."""
        return self._record(f"data/{key}")

    def _record(self, name: str) -> _Part:
        """Where its bytes are: after a header of its own, which repeats its name."""
        if name in self._places:
            return self._places[name]
        own = self._name.removesuffix("data.pkl") + name
        if own not in self._records:
            raise ValueError(f"it has no {name!r:.100}, to which it refers")
        offset, size = self._records[own]
        header = self._read(_Part(offset, 30))
        name_size, more_size = struct.unpack("<HH", header[26:])
        begin = offset + 30 + name_size + more_size
        if header[:4] != _ZIP or begin + size > self._place.size:
            raise ValueError(f"its {name!r:.100} does not lie within it; copy it again")
        self._places[name] = _Part(self._place.begin + begin, size)
        return self._places[name]

    def _read(self, part: _Part) -> bytes:
        """``part`` counts from the beginning of the archive."""
        if not 0 <= part.begin <= part.begin + part.size <= self._place.size:
            raise ValueError("it is cut off; copy it again")
        self._file.seek(self._place.begin + part.begin)
        return self._file.read(part.size)

    def _directory(self) -> bytes:
        """The list of records, at the archive's end."""
        end = self._place.size - 22
        last = self._read(_Part(end, 22))
        if last[:4] != b"PK\x05\x06":
            raise ValueError("it is cut off, or something was added to it; copy it again")
        size, offset = struct.unpack("<II", last[12:20])
        if (
            0xFFFFFFFF in (size, offset) or last[10:12] == b"\xff\xff"
        ):  # the wide form of a large archive
            locator = self._read(_Part(end - 20, 20))
            wide = self._read(_Part(struct.unpack("<Q", locator[8:16])[0], 56))
            if locator[:4] != b"PK\x06\x07" or wide[:4] != b"PK\x06\x06":
                raise ValueError("the end of its archive is damaged; copy it again")
            size, offset = struct.unpack("<QQ", wide[40:56])
        if size > _DIRECTORY:
            raise ValueError(
                f"its list of records has {size:,} bytes, and at most {_DIRECTORY:,} are read"
            )
        return self._read(_Part(offset, size))

    def _entries(self, directory: bytes) -> Iterator[tuple[str, _Part]]:
        """Name of each record, where its header begins, and its size."""
        at = 0
        seen: set[str] = set()
        while at < len(directory):
            try:
                name, method, packed, size, offset, at = _listed(directory, at)
            except (struct.error, UnicodeDecodeError):
                name = ""
            if not name or at > len(directory) or name in seen:
                raise ValueError("its list of records is damaged; copy it again")
            if method != 0 or size != packed:
                raise ValueError(
                    f"its {name!r:.100} is compressed, which torch.save never does; write it anew with it"
                )
            if offset + size > self._place.size:
                raise ValueError(
                    f"its {name!r:.100} has {size:,} bytes, more than the file; copy it again"
                )
            seen.add(name)
            yield name, _Part(offset, size)


def _listed(directory: bytes, at: int) -> tuple[str, int, int, int, int, int]:
    """What a list says of the record at ``at``: name, method, sizes packed and not, offset; and where the next is."""
    mark, method, packed, size, name_size, more_size, note_size, offset = _LISTED.unpack_from(
        directory, at
    )
    begin = at + _LISTED.size
    name = directory[begin : begin + name_size].decode() if mark == b"PK\x01\x02" else ""
    more = directory[begin + name_size : begin + name_size + more_size]
    size, packed, offset = _widen(more, size, packed, offset)
    return name, method, packed, size, offset, begin + name_size + more_size + note_size


def _widen(more: bytes, *values: int) -> Iterator[int]:
    """Numbers of a record, of which those above 32 bits stand in its extra field of the kind 1, in their order."""
    wide, at = b"", 0
    while at + 4 <= len(more):
        kind, size = struct.unpack_from("<HH", more, at)
        wide = more[at + 4 : at + 4 + size] if kind == 1 else wide
        at += 4 + size
    for value in values:
        if value == 0xFFFFFFFF:
            yield int.from_bytes(wide[:8], "little")
            wide = wide[8:]
        else:
            yield value


class _Tree:
    """Turns what a pickle describes into plain values and ``Stored`` tensors, each part of it checked."""

    def __init__(self, archive: _Archive, read: Callable[[_Part, torch.dtype], Tensor]) -> None:
        self._archive, self._read = archive, read
        self._left = _VALUES
        self._made: dict[
            int, tuple[Record, Stored]
        ] = {}  # by identity of the record, which is kept alive

    def plain(self, value: Any, depth: int = 0) -> Any:
        """A value with all that it holds, of which each is visited as often as it is held."""
        self._charge(1)
        if depth > _DEPTH:
            raise PickleError(_TOO_MANY)
        if type(value) is list:
            return [self.plain(each, depth + 1) for each in value]
        if type(value) is tuple:
            return tuple(self.plain(each, depth + 1) for each in value)
        if type(value) is Record and value.path == _DICT and value.arguments == ():
            value = value.items or {}  # its state is an attribute that a module's state_dict has
        if type(value) is dict:
            return {self._key(key): self.plain(each, depth + 1) for key, each in value.items()}
        if type(value) is Record and value.path == _SIZE:
            return sizes_of(value)
        if type(value) is Record:
            if id(value) not in self._made:
                self._made[id(value)] = value, self._tensor(value)
            stored = self._made[id(value)][1]
            self._charge(len(stored.shape))
            return stored
        if type(value) is Name:
            return value.path
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise PickleError("it holds a storage that belongs to no tensor")

    def _charge(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise PickleError(_TOO_MANY)

    def _key(self, key: Any) -> str | int:
        if type(key) is not str and type(key) is not int:
            raise PickleError("it holds a dict whose keys are no texts")
        return key

    def _tensor(self, record: Record) -> Stored:
        if record.path == _PARAMETER and record.arguments and type(record.arguments[0]) is Record:
            record = record.arguments[0]
        if record.path not in (_TENSOR, _NEWER) or not 6 <= len(record.arguments) <= 8:
            raise PickleError(
                f"it makes an object of {record.path} in a way that torch.save does not"
            )
        storage, offset, size, stride = record.arguments[:4]
        part, dtype = self._stored(storage)
        if record.path == _NEWER:
            dtype = _dtype(record.arguments[6]) if len(record.arguments) > 6 else dtype
        shape, steps = sizes_of(size), sizes_of(stride)
        if type(offset) is not int or not 0 <= offset < _LARGEST or len(steps) != len(shape):
            raise PickleError("it holds a tensor with strides or an offset that no tensor has")
        room = part.size // dtype.itemsize
        reach = (
            offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
            if prod(shape)
            else 0
        )
        if max(reach, prod(shape)) > room:
            raise PickleError(
                f"it holds a tensor of shape {shape} in a storage of {room} elements, which are too few"
            )

        def read() -> Tensor:
            return self._read(part, dtype).as_strided(shape, steps, offset if prod(shape) else 0)

        return Stored(shape, dtype, part.begin + offset * dtype.itemsize, read)

    def _stored(self, storage: Any) -> tuple[_Part, torch.dtype]:
        """Where the bytes of a tensor are, and of what dtype the pickle says that they are."""
        identity = storage.arguments if type(storage) is Storage else ()
        if [type(each) for each in identity] != [str, Name, str, str, int] or identity[
            0
        ] != "storage":
            raise PickleError("it holds a tensor without a storage")
        _, kind, key, _, count = identity
        if kind.path not in _STORAGES:
            raise PickleError(f"it holds a storage of {kind.path}, which is none")
        part, dtype = self._archive.storage(key), _STORAGES[kind.path]
        if count < 0 or count * dtype.itemsize != part.size:
            raise PickleError(
                f"it declares a storage of {count} {dtype}, but keeps {part.size:,} bytes of it"
            )
        return part, dtype


def _dtype(value: Any) -> torch.dtype:
    if type(value) is not Name or value.path.removeprefix("torch.") not in DTYPES:
        raise PickleError("it holds a tensor of no dtype")
    return DTYPES[value.path.removeprefix("torch.")]


def sizes_of(value: Any) -> tuple[int, ...]:
    """A shape, or the like: a tuple or ``torch.Size`` of integers that are not negative and not endless."""
    if type(value) is Record and value.path == _SIZE and len(value.arguments) == 1:
        value = value.arguments[0]
    if (
        type(value) is not tuple
        or len(value) > 64
        or any(type(n) is not int or not 0 <= n < _LARGEST for n in value)
    ):
        raise PickleError("it holds a shape that no tensor has")
    return value
