"""Folders in an object store, by their URL: ``s3://BUCKET/FOLDER``. No torch here.

The library fsspec talks to the store, through a package for each kind of it, which reads its own
environment variables and files: AWS_ENDPOINT_URL, AWS_PROFILE and so on. What a store holds is as
hostile as any other folder, and is checked by who reads it.

An object store has no rename, no lock and no folders. An object appears whole or not at all: a
writer that is killed while it uploads leaves nothing.

Every function raises OSError with a ``strerror`` for people, as ``facts.files`` does.
"""

import errno
import io
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, total_ordering
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from composer3d.facts.files import FileTooLargeError
from composer3d.facts.text import in_quotes, one_line

if TYPE_CHECKING:
    from concurrent.futures import Future

# The package that fsspec needs for each kind of store; None: none. An extra of the name of the kind
# installs it.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "file": None}
# fsspec takes more: a name with its password, options, a chain of file systems, and characters with
# which one path stands for several.
_URL = re.compile(rf"({'|'.join(PACKAGES)})://[\w.=+,~/-]+")
URL_FORM = (
    f"KIND://BUCKET/PATH, where KIND is one of {', '.join(PACKAGES)}, and the rest has letters, "
    "digits and . _ - = + , ~ only"
)

# Ranges of a file are read by so many threads, and so many bytes ahead of the range in use.
_THREADS = 8
_AHEAD_BYTES = 256 << 20
_MOST_AHEAD = 32  # ranges: an end of the process waits for those that have begun
_PIECE_BYTES = 16 << 20  # of a file that is read whole


def is_url(text: str) -> bool:
    """Return whether a text is meant as the URL of an object store."""
    return text.partition("://")[0] in PACKAGES and "://" in text


def is_valid_url(text: str) -> bool:
    """Return whether a text is a URL from which a ``RemotePath`` can be made."""
    kind, _, path = text.partition("://")
    parts = path.removesuffix("/").split("/")
    # A path on a disk begins with a slash, and a bucket has a name.
    begins_right = (parts[0] == "") == (kind == "file")
    is_path = begins_right and not any(part in ("", ".", "..") for part in parts[1:])
    return is_path and _URL.fullmatch(text) is not None


@total_ordering
class RemotePath:
    """A folder or a file in an object store. Paths of one store are ordered as their texts are.

    The store is not asked before a method is called.

    Args:
        url: ``KIND://BUCKET/PATH``.

    Raises:
        ValueError: the URL is malformed; the error says what it must be.
    """

    def __init__(self, url: str) -> None:
        if not is_valid_url(url):
            raise ValueError(f"must be {URL_FORM}")
        self._url = url.removesuffix("/")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __lt__(self, other: "RemotePath") -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> "RemotePath":
        """Return the path of what is in this folder.

        Raises OSError if it has a name that no URL here may have: a store may hold such names.
        """
        try:
            return RemotePath(f"{self._url}/{name}")
        except ValueError:
            reason = f"holds {in_quotes(name, 80)}, a name that is not read"
            raise OSError(errno.EINVAL, reason, str(self)) from None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._url.rpartition("/")[2]

    @property
    def mounted(self) -> Path | None:
        """The folder on a disk of this machine that a URL ``file://`` names; None: another URL."""
        return Path(self._url.partition("://")[2]) if self.kind == "file" else None

    @property
    def parent(self) -> "RemotePath":
        """The folder that holds this file or folder; of a bucket, the bucket itself."""
        above = self._url.rpartition("/")[0]
        return RemotePath(above) if is_valid_url(above) else self

    # Reading.

    def folders(self) -> list[str]:
        """Return the names of the folders in this folder, sorted. A missing one has none."""
        with self._words():
            system = _system(self.kind)
            try:
                entries = system.ls(self._place, detail=True)
            except FileNotFoundError:
                return []
            return sorted(
                entry["name"].rstrip("/").rpartition("/")[2]
                for entry in entries
                if entry["type"] == "directory"
            )

    def files(self) -> dict[str, int]:
        """Return the size in bytes of each file in this folder and below, by its path within it.

        A folder that is missing has none.
        """
        with self._words():
            found = _system(self.kind).find(self._place, detail=True)
            start = len(self._place) + 1
            return {
                name[start:]: int(entry["size"])
                for name, entry in found.items()
                # The place itself, if it is a file, and the marks of empty folders.
                if len(name) > start and not name.endswith("/")
            }

    def own_files(self) -> dict[str, int]:
        """Return the size in bytes of each file in this folder, not below it, by its name."""
        with self._words():
            system = _system(self.kind)
            try:
                entries = system.ls(self._place, detail=True)
            except FileNotFoundError:
                return {}
            return {
                entry["name"].rpartition("/")[2]: int(entry["size"])
                for entry in entries
                if entry["type"] == "file" and entry["name"] != self._place
            }

    def size(self) -> int:
        """Return the size of this file in bytes."""
        with self._words():
            return int(_system(self.kind).info(self._place)["size"])

    def exists(self) -> bool:
        """Return whether there is a file of this path, or a folder with files in it."""
        # ``exists`` of fsspec says no if the store cannot be asked.
        try:
            with self._words():
                _system(self.kind).info(self._place)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def sizes(self) -> dict[str, int]:
        """Return what ``files`` returns, or the size of this file under the name ""."""
        found = self.files()
        if not found and self.exists():
            with self._words():
                entry = _system(self.kind).info(self._place)
            if entry["type"] == "file":
                return {"": int(entry["size"])}
        return found

    def read(self, limit: int) -> bytes:
        """Return the content of this file, of at most ``limit`` bytes.

        Raises:
            FileTooLargeError: it has more. None of them has been read.
        """
        size = self.size()
        if size > limit:
            raise _too_large(self, limit)
        return self.read_range(0, size)

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> Generator[bytes, None, None]:
        """Yield ranges of bytes of this file, in their order. Some are read ahead, in threads.

        Args:
            ranges: the first byte and the number of bytes of each. One must fit into memory, beside
                256 MiB of those that are read ahead.

        Raises:
            OSError: a range cannot be read, or the file ends within it.
        """
        # Imported here: every command imports this module, and few read a store.
        from concurrent.futures import ThreadPoolExecutor

        waiting: deque[tuple[int, Future[bytes]]] = deque()
        ahead = 0  # bytes of those in ``waiting``
        with ThreadPoolExecutor(_THREADS) as threads:
            try:
                for begin, size in ranges:
                    while waiting and (ahead + size > _AHEAD_BYTES or len(waiting) >= _MOST_AHEAD):
                        done, content = waiting.popleft()
                        ahead -= done
                        yield content.result()
                    waiting.append((size, threads.submit(self.read_range, begin, size)))
                    ahead += size
                while waiting:
                    yield waiting.popleft()[1].result()
            finally:
                threads.shutdown(cancel_futures=True)

    def read_range(self, begin: int, size: int) -> bytes:
        """Return ``size`` bytes of this file, from byte ``begin`` on.

        Raises:
            OSError: they cannot be read, or the file ends within them.
        """
        if size == 0:
            return b""  # the servers of S3 refuse an empty range
        with self._words():
            system = _system(self.kind)
            content = bytes(system.cat_file(self._place, start=begin, end=begin + size))
        self._require_size(content, begin, size)
        return content

    def _require_size(self, content: bytes, begin: int, size: int) -> None:
        if len(content) != size:
            reason = f"ends within the {size:,} bytes at {begin:,}"
            raise OSError(errno.EIO, reason, str(self))

    def pieces(self, size: int | None = None) -> Generator[bytes, None, None]:
        """Yield the whole content of this file in pieces, of which some are read ahead.

        Args:
            size: the size of the file in bytes; None: the store is asked.
        """
        size = self.size() if size is None else size
        return self.read_ranges(
            (begin, min(_PIECE_BYTES, size - begin)) for begin in range(0, size, _PIECE_BYTES)
        )

    # Writing.

    @contextmanager
    def create(self, tell: Callable[[Any], object] = lambda content: None) -> Iterator["Upload"]:
        """Yield a stream to write to. At the end of the block, the file is there with all of it.

        It replaces an earlier file. If the block raises, nothing is there, or the earlier file; in
        a store of the kind ``file``, a part of the new one.

        Args:
            tell: is called with all that is written, in its order.
        """
        with self._words():
            stream = _system(self.kind).open(self._place, "wb")
        try:
            yield Upload(self, stream, tell)
            with self._words():
                stream.close()
        except BaseException:
            _abandon(stream)
            raise

    def write(self, content: bytes) -> None:
        """Write this file, in place of an earlier one."""
        with self._words():
            _system(self.kind).pipe_file(self._place, content)

    def remove(self) -> None:
        """Remove this file. A missing one is no error."""
        with self._words(), suppress(FileNotFoundError):
            _system(self.kind).rm_file(self._place)

    def remove_tree(self) -> None:
        """Remove all files of this folder and below. A missing one is no error."""
        with self._words(), suppress(FileNotFoundError):
            _system(self.kind).rm(self._place, recursive=True)

    @property
    def kind(self) -> str:
        """The kind of its store: one of ``PACKAGES``."""
        return self._url.partition("://")[0]

    @property
    def _place(self) -> str:
        """The path as fsspec's file systems name it: without the kind."""
        return str(_system(self.kind)._strip_protocol(self._url))

    @contextmanager
    def _words(self) -> Iterator[None]:
        """Raise every failure of a store as an OSError with words for people.

        The packages have errors of several bases, and those of their connections have others.
        """
        try:
            yield
        except OSError as error:
            number = _number_of(error)
            reason = error.strerror or _reason(error, os.strerror(number))
            raise OSError(number, reason, str(self)) from error
        except ImportError as error:
            package = PACKAGES[self.kind] or "fsspec"
            reason = f"needs {package}: pip install composer3d[{self.kind}]"
            raise OSError(errno.ENOSYS, reason, str(self)) from error
        except Exception as error:
            raise OSError(errno.EIO, _reason(error, "it failed"), str(self)) from error


def _number_of(error: OSError) -> int:
    kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
    return error.errno or kinds.get(type(error), errno.EIO)


def _reason(error: Exception, default: str) -> str:
    """Return the first line of an error's text, with its kind unless it is the system's own."""
    text = str(error).strip()
    words = one_line(text.splitlines()[0]) if text else default
    return words if isinstance(error, OSError) else f"{type(error).__name__}: {words}"


@lru_cache
def _system(kind: str) -> Any:
    """Return fsspec's file system for a kind of store.

    No list of a folder is kept: other processes write there too.
    """
    import fsspec

    # An object store needs no folder before its files; of a disk, fsspec makes them.
    options = {"auto_mkdir": True} if kind == "file" else {"use_listings_cache": False}
    return fsspec.filesystem(kind, skip_instance_cache=True, **options)


def _abandon(stream: Any) -> None:
    """Close a stream without making its file, as far as its package can do that.

    An error is dropped: there is one already, which counts.
    """
    with suppress(Exception):
        if hasattr(stream, "discard"):
            stream.discard()
            stream.closed = True  # or its destructor would make the file
        else:
            stream.close()


Place = Path | RemotePath


class Upload(io.RawIOBase):
    """A stream that ``RemotePath.create`` yields. Its file is made by ``create``, not by ``close``.

    Args:
        path: the file.
        stream: that of fsspec.
        tell: is called with all that is written.
    """

    def __init__(self, path: RemotePath, stream: Any, tell: Callable[[Any], object]) -> None:
        self._path, self._stream, self._tell = path, stream, tell

    def writable(self) -> bool:
        """Return True: it can be written, and neither read nor rewound."""
        return True

    def write(self, content: Any) -> int:
        """Add bytes, and return their number. Raises OSError."""
        # fsspec would copy all of it before it sends a part.
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            self._tell(piece)
            with self._path._words():
                self._stream.write(piece)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes that have been written."""
        return int(self._stream.tell())


class RemotePart(NamedTuple):
    """A range of bytes of a file in a store.

    Attributes:
        path: the file.
        begin: the first byte.
        size: the number of bytes, at least 1.
    """

    path: RemotePath
    begin: int
    size: int


def read_parts(parts: Sequence[RemotePart]) -> list[bytes]:
    """Return parts of files, all of which are requested at once.

    Args:
        parts: of one store or of several. Together, they must fit into memory.

    Raises:
        OSError: a part cannot be read, or its file ends within it.
    """
    contents: dict[RemotePart, bytes] = {}
    for kind in dict.fromkeys(part.path.kind for part in parts):
        own = [part for part in parts if part.path.kind == kind]
        with own[0].path._words():
            found = _system(kind).cat_ranges(
                [part.path._place for part in own],
                [part.begin for part in own],
                [part.begin + part.size for part in own],
                on_error="return",
            )
        for part, content in zip(own, found, strict=True):
            with part.path._words():
                if isinstance(content, BaseException):
                    raise content
            part.path._require_size(content, part.begin, part.size)
            contents[part] = bytes(content)
    return [contents[part] for part in parts]


def same_folder(one: Place, other: Place) -> bool:
    """Return whether two paths lead to one folder. On a disk, links are followed."""
    if isinstance(one, Path) and isinstance(other, Path):
        # ``Path.resolve`` would raise RuntimeError for a cycle of links under Python 3.11 and 3.12.
        return os.path.realpath(one) == os.path.realpath(other)
    return one == other


def _too_large(path: RemotePath, limit: int) -> FileTooLargeError:
    reason = f"is larger than {limit:,} bytes, the limit for such a file"
    return FileTooLargeError(errno.EFBIG, reason, str(path))


def place_of(text: str) -> Place:
    """Return a path on a disk, or in an object store if ``text`` is a URL.

    Raises:
        ValueError: the URL is malformed; the error says what it must be.
    """
    return RemotePath(text) if is_url(text) else Path(text)


def whole_file(path: RemotePath, limit: int) -> BinaryIO:
    """Return a plain file on the disk with the content of ``path``; it goes when it is closed.

    Raises:
        FileTooLargeError: the file has more than ``limit`` bytes. None of them has been read.
        OSError: it cannot be read, or the disk is full.
    """
    import tempfile

    size = path.size()
    if size > limit:
        raise _too_large(path, limit)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        file.writelines(path.pieces(size))
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


@contextmanager
def local_copy(
    place: Place, report: Callable[[int], None] = lambda n_bytes: None
) -> Iterator[Path]:
    """Yield a path on a disk: ``place`` itself, or a copy of a folder or file in an object store.

    The copy has the name of the original. It is in a new folder of the system's folder for such
    things, which TMPDIR names, and goes at the end of the block.

    Args:
        place: the folder, or the file.
        report: is called with the number of bytes of each piece that has been copied.

    Raises:
        OSError: a file cannot be read or written, or has a name that no URL here may have; or the
            disk has less room.
    """
    if isinstance(place, Path):
        yield place
        return
    import shutil
    import tempfile

    sizes = place.sizes()
    with tempfile.TemporaryDirectory(prefix="composer3d-") as folder:
        needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
        if needed > free:
            reason = f"{needed:,} bytes would be copied to {folder}, and {free:,} are free there"
            raise OSError(errno.ENOSPC, reason, str(place))
        copy = Path(folder, place.name)
        for name, size in sizes.items():
            source, target = (place / name, copy / name) if name else (place, copy)
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "xb") as file:
                for piece in source.pieces(size):
                    file.write(piece)
                    report(len(piece))
        yield copy


def upload(
    source: Path,
    place: RemotePath,
    last: str | None = None,
    report: Callable[[int], None] = lambda n_bytes: None,
) -> None:
    """Copy a file, or a folder with all that is in it, to ``place``, where nothing may be yet.

    If that fails, the files that were sent are removed, as far as possible.

    Args:
        source: the file or the folder.
        place: what it becomes.
        last: the name of the files that readers open first. They are sent after all others, so that
            an upload that is killed leaves none of them beside missing files.
        report: is called with the number of bytes of each piece that has been sent.

    Raises:
        OSError: a file cannot be read or sent, or has a name that no URL here may have; or other
            files than those of ``source`` have come to ``place`` meanwhile.
    """
    if source.is_file():
        targets = {source: place}
    else:
        paths = sorted(path for path in source.rglob("*") if path.is_file())
        paths.sort(key=lambda path: path.name == last)
        targets = {path: place / path.relative_to(source).as_posix() for path in paths}
    sent: dict[RemotePath, int] = {}
    try:
        for path, target in targets.items():
            if path.name == last:
                _require_only(place, sent)
            sent[target] = path.stat().st_size
            with open(path, "rb") as file, target.create() as stream:
                while piece := file.read(_PIECE_BYTES):
                    stream.write(piece)
                    report(len(piece))
    except BaseException:
        # A store that cannot be reached now would let each file wait.
        with suppress(OSError):
            for target in reversed(sent):
                target.remove()
            if not place.files():
                place.remove_tree()  # a disk keeps empty folders
        raise


def _require_only(place: RemotePath, sent: dict[RemotePath, int]) -> None:
    """Raise OSError if a folder holds other files, or files of other sizes, than were sent."""
    if {place / name: size for name, size in place.files().items()} != sent:
        reason = "holds other files than were sent: another process writes there"
        raise OSError(errno.EBUSY, reason, str(place))
