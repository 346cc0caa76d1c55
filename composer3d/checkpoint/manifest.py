"""Write, read and check ``manifest.json``, the description of a checkpoint.

The manifest is written last, when all other files are on the disk. It holds the size and the digest
of every other file in the folder, and a digest of its own content, so that every flipped bit is
found. The digests (XXH3-128) detect damage. They do not detect forgery. This module uses neither
torch nor pickle.
"""

import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import xxhash

from composer3d.facts.errors import CheckpointError, UserError
from composer3d.facts.files import MIB, RefusedFileError, open_plain, parse_json, read_plain
from composer3d.facts.remote import Place, RemotePath
from composer3d.facts.text import in_quotes, short_json
from composer3d.models.registry import DEFAULT, is_ours
from composer3d.models.shape import DecoderShape
from composer3d.recipe.changes import TEXT_LIMIT
from composer3d.recipe.schema import MODEL_KEYS
from composer3d.runtime.files import sync

FILE = "manifest.json"
ASSETS = "assets"  # a folder of a checkpoint: the files of the model besides its tensors
FORMAT = 1

# Limits of a manifest file. A tensor takes about 100 bytes in it, and a file about 80. The number
# of values has its own limit, because an empty list takes 3 bytes in the file and 64 in memory.
_MAX_BYTES = 32 * MIB
_MAX_VALUES = 1_500_000

# Values, also those in lists, and characters of texts that describe a model, or the position in the
# data. A pickle can name one list or text many times.
_MAX_DESCRIPTION = 2**20

_MAX_COUNT = 2**53  # every JSON reader represents integers up to this one exactly
_MAX_DIMS = 64
_SHOWN_FILES = 8  # how many files that are not listed are named
_SHOWN_DIFFERENCES = 8

# Errors that say of a file that it is missing, or that no checkpoint has one of its kind or size.
_DAMAGE = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,
        errno.EFBIG,
        errno.ENAMETOOLONG,
    }
)
_PAUSE_S = 1.0  # before a file is read once more

T = TypeVar("T")


class FileEntry(NamedTuple):
    """A file of a checkpoint, as the manifest lists it."""

    size: int  # bytes
    digest: str  # XXH3-128 of its content, 32 hexadecimal digits


class TensorSpec(NamedTuple):
    """The shape of a whole tensor, and its dtype by name, such as "float32"."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of one checkpoint, in plain values that JSON can represent.

    Attributes:
        step: optimizer steps done.
        world_size: ranks of the job that saved it.
        layout: the size of each mesh axis in that job. It is information for the user only: the
            checkpoint can be loaded on any layout.
        model: the values of ``model_of``: numbers, texts and so on, and tuples of them.
        recipe: the resolved recipe in TOML; empty if no run of composer3d made the checkpoint.
        data: the state of the data loader, of values like those of ``model``, but with lists in
            place of tuples when it is read; None for a checkpoint of weights alone.
        lr: the learning rate of the last step, if there was one.
        history: the state of ``StepHistory``; empty, and not written, if it remembers nothing.
        files: all other files of the folder, by their paths within it.
        tensors: all tensors, by their global names.
    """

    step: int
    world_size: int = 1
    layout: dict[str, int] = field(default_factory=dict)
    model: dict[str, Any]
    recipe: str = ""
    data: dict[str, Any] | None = None
    lr: float | None = None
    history: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)

    @property
    def assets(self) -> set[str]:
        """The files of the model besides its tensors, by their paths in the folder ``ASSETS``."""
        prefix = f"{ASSETS}/"
        return {name.removeprefix(prefix) for name in self.files if name.startswith(prefix)}


# What ``Manifest.model`` has beside the fields of a shape.
_ARCHITECTURE, _HEAD_DIM, PARAMS = "model.architecture", "model.head_dim", "precision.params"


def model_of(shape: DecoderShape, params: str, architecture: str | None = None) -> dict[str, Any]:
    """Return the values that identify a model: the fields of its shape and its parameters' dtype.

    The architecture is included if it is not the default one. Two models that differ in one of
    these values compute different functions, even with the same tensors.

    Args:
        shape: the shape of the model.
        params: the name of the parameters' dtype, such as "float32".
        architecture: the name of the model's architecture. None: that of ``shape`` if it is the
            table [model] of a recipe, else the default one.
    """
    values = {
        f"model.{entry.name}": getattr(shape, entry.name)
        for entry in fields(shape)
        if entry.name not in MODEL_KEYS
    }
    if architecture is None:
        architecture = getattr(shape, "architecture", DEFAULT)
    if architecture != DEFAULT:
        values[_ARCHITECTURE] = architecture
    return {**values, _HEAD_DIM: shape.head_width, PARAMS: params}


def with_later_fields(
    values: Mapping[str, Any], shape: DecoderShape | type[DecoderShape]
) -> dict[str, Any]:
    """Return ``Manifest.model`` with each field of ``shape`` that has come since it was written.

    Such a field has a default with which the model is what it was before.
    """
    later = {
        f"model.{entry.name}": entry.default
        for entry in fields(shape)
        if entry.name not in MODEL_KEYS and entry.default is not MISSING
    }
    return {**later, **values}


def unknown_fields(
    values: Mapping[str, Any], shape: DecoderShape | type[DecoderShape]
) -> dict[str, Any]:
    """Return what ``Manifest.model`` says that no model of ``shape`` has.

    A later version has written it, and what a model with it computes is not known.
    """
    known = {f"model.{entry.name}" for entry in fields(shape)}
    known |= {_ARCHITECTURE, _HEAD_DIM, PARAMS}
    return {key: value for key, value in values.items() if key not in known}


def require_known_fields(
    folder: Place, values: Mapping[str, Any], shape: DecoderShape | type[DecoderShape]
) -> None:
    """Raise UserError if ``Manifest.model`` of ``folder`` has a field that ``shape`` has not.

    The checkpoint is not damaged, so a resume must stop here, as where ``read`` raises UserError.
    """
    unknown = unknown_fields(values, shape)
    if unknown:
        key = min(unknown)
        others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        architecture = values.get(_ARCHITECTURE, DEFAULT)
        newer = "composer3d" if is_ours(architecture) else f"version of {in_quotes(architecture)}"
        raise UserError(
            f"{folder} has {in_quotes(key)} = {short_json(unknown[key])}{others}, which this "
            f"version does not know: it would compute another model; use a newer {newer}"
        )


def write(folder: Place, manifest: Manifest) -> None:
    """Write ``manifest`` into ``folder``, and wait until it is kept.

    Raises CheckpointError, and writes nothing, if ``read`` would refuse it.
    """
    content = _content_of(manifest, str(folder / FILE))
    if isinstance(folder, RemotePath):
        (folder / FILE).write(content)
    else:
        (folder / FILE).write_bytes(content)
        sync(folder / FILE)


def require_readable(manifest: Manifest) -> None:
    """Raise CheckpointError if ``read`` would refuse a manifest, so that nothing is written.

    It may lack the files and the tensors: so it is known before the first step of a run.
    """
    _content_of(manifest, "the manifest of a checkpoint")


def _content_of(manifest: Manifest, place: str) -> bytes:
    """Return what ``write`` writes. ``place`` names the file.

    Raises CheckpointError if ``read`` would refuse it.
    """
    lines = [
        f"a checkpoint cannot keep {in_quotes(name)} = {short_json(value)} of {what}: {_ALLOWED}"
        for what, values in (("the model", manifest.model), ("the batches' state", manifest.data))
        for name, value in (values if isinstance(values, dict) else {}).items()
        if type(name) is not str or not _comes_back(value)
    ]
    if lines:
        raise CheckpointError(lines)
    fields_of_manifest = asdict(manifest)
    for key in _OPTIONAL:
        if not fields_of_manifest[key]:
            del fields_of_manifest[key]
    content = _encode({"format": FORMAT, **fields_of_manifest})
    n_values = _count_values(content)
    if len(content) > _MAX_BYTES or n_values > _MAX_VALUES:
        raise CheckpointError(
            f"{place} would be too large to be read: it has {len(content):,} bytes and "
            f"{n_values:,} values, and at most {_MAX_BYTES:,} and {_MAX_VALUES:,} are allowed; "
            "save a model with fewer tensors, or from fewer ranks"
        )
    try:
        _decode(content, place)
    except ValueError as error:
        raise CheckpointError(f"{place} could not be read again: {error}") from None
    return content


def _comes_back(value: Any) -> bool:
    """Return whether a value is still allowed after it was written as JSON and read again."""
    try:
        return _is_description({"": parse_json(json.dumps(value))})
    except (TypeError, ValueError, RecursionError):
        return False


def _encode(content: dict[str, Any]) -> bytes:
    """Encode ``content`` as canonical JSON, with a digest of all its other fields in ``digest``."""
    canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    without_digest = canonical({key: value for key, value in content.items() if key != "digest"})
    digest = xxhash.xxh3_128_hexdigest(without_digest.encode())
    return canonical({**content, "digest": digest}).encode()


def read(folder: Place) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing, damaged or wrong.
        UserError: a later version of composer3d wrote the manifest. It is not damaged, so a resume
            must stop here. It must not skip this checkpoint as it skips a damaged one.
        OSError: the file cannot be read, which says nothing of its content.
    """
    place = folder / FILE
    try:
        return _try_twice(folder, lambda: _read(place))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {FILE}; name a step-* folder"
        ) from None
    except RefusedFileError as error:
        problem = f"it {error.strerror}"
    except OSError as error:
        _require_damage(folder, FILE, error)
        problem = error.strerror or str(error)
    except ValueError as error:
        problem = str(error)
    raise CheckpointError(f"{place} cannot be used: {problem}; copy the checkpoint again")


def _read(place: Place) -> Manifest:
    """Read the manifest at ``place``. Raises OSError, ValueError or UserError."""
    if isinstance(place, RemotePath):
        written = place.read(_MAX_BYTES)
    else:
        written = read_plain(place, limit=_MAX_BYTES, follow_links=False)
    return _decode(written, str(place))


def _decode(written: bytes, place: str) -> Manifest:
    """Return the manifest that a file says. ``place`` names it. Raises ValueError or UserError."""
    if _count_values(written) > _MAX_VALUES:
        raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
    content = parse_json(written)
    # The bytes are compared, and not only the digests: a flipped bit can change how a value is
    # written and keep the value, such as 1E-05 for 1e-05.
    if type(content) is not dict or _encode(content) != written:
        raise ValueError("its content does not match its digest")
    version = content.pop("format", None)
    if version != FORMAT or type(version) is not int:
        raise UserError(
            f"{place} is not of format {FORMAT}, the only one that this composer3d reads; "
            "use a newer composer3d"
        )
    del content["digest"]
    require_no_later_fields(content, place)
    return parse(content)


def require_no_later_fields(content: Mapping[str, Any], place: object) -> None:
    """Raise UserError if a manifest has a field that this version does not know.

    A later version has written it. The manifest is not damaged, so a resume must stop here.

    Args:
        content: the fields, which have been compared with their digest.
        place: the file, as the error names it.
    """
    later = content.keys() - _RULES.keys()
    if later:
        others = f" (and {len(later) - 1} more)" if len(later) > 1 else ""
        raise UserError(
            f"{place} has the field {in_quotes(min(later))}{others}, which this version does not "
            "know; use a newer composer3d"
        )


def without_later_fields(content: Any) -> Any:
    """Return a manifest without the fields that this version does not know.

    It is for content that is compared with its digest afterwards. A field that JSON could not hold,
    or that is large, stays: no version writes it, and its digest could take very long.
    """
    if type(content) is not dict:
        return content
    return {
        key: value
        for key, value in content.items()
        if key in _RULES or type(key) is not str or not _is_small(value)
    }


def _is_small(value: Any) -> bool:
    """Whether a value is one of JSON, with at most ``_MAX_DESCRIPTION`` values and characters.

    A pickle can name one list many times, so each list counts as often as it is named.
    """
    left, pending = _MAX_DESCRIPTION, [value]
    while pending:
        item = pending.pop()
        if type(item) is dict:
            parts = [*item.keys(), *item.values()]
            if not all(type(key) is str for key in item):
                return False
        elif type(item) in (list, tuple):
            parts = list(item)
        elif _is_single(item):
            left -= len(item) if type(item) is str else 1
            parts = []
        else:
            return False
        left -= len(parts)
        if left < 0:
            return False
        pending += parts
    return True


def _count_values(written: bytes) -> int:
    """Count the opening brackets and commas of a JSON text: it has at most one more value.

    The keys of objects are not counted as values.
    """
    return sum(written.count(mark) for mark in (b"[", b"{", b","))


def parse(content: Any) -> Manifest:
    """Check plain values, such as those of a JSON file, and build a manifest from them.

    The values are untrusted: the type and the range of each one are checked.

    Args:
        content: a dict from the names of all fields of ``Manifest`` to their values, of which those
            in ``_OPTIONAL`` may be absent. Tuples may be lists.

    Raises:
        ValueError: a field is missing, unknown or wrong.
    """
    if type(content) is not dict:
        raise ValueError("it is not an object with fields")
    for key in content.keys() - _RULES.keys():
        raise ValueError(f"it has a field {in_quotes(key)}, which no manifest has")
    for key, rule in _RULES.items():
        if key not in content:
            if key in _OPTIONAL:
                continue
            raise ValueError(f"it lacks {key}")
        if not rule.accepts(content[key]):
            raise ValueError(_describe_wrong_value(key, content[key], rule.allowed))
    files = {name: FileEntry(size, digest) for name, (size, digest) in content["files"].items()}
    tensors = {
        name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in content["tensors"].items()
    }
    # A shape has tuples, and JSON lists.
    model = {
        name: tuple(value) if type(value) is list else value
        for name, value in content["model"].items()
    }
    return Manifest(**{**content, "model": model, "files": files, "tensors": tensors})


def _describe_wrong_value(key: str, value: Any, allowed: str) -> str:
    if isinstance(value, dict | list | tuple):
        return f"the content of {key} is wrong; it must be {allowed}"
    return f"{key} is {in_quotes(value, 60)}, but must be {allowed}"


# The names that each state of our loader has, and those of its integers.
_OF_OUR_LOADER = frozenset({"next_step", "digest"})
_COUNTS_OF_OUR_LOADER = ("next_step", "seq_len", "global_batch")

# What a model or a loader's state may consist of.
_IN_ALL = "with at most 2^20 values and characters in all"
_ALLOWED = (
    "it must be a finite number (an integer from -2^63 to 2^64 - 1), a text, true, false or null, "
    f"or a list of these, {_IN_ALL}; make a text of anything else, such as with json.dumps"
)

# Checks of single values. Each compares types exactly, because isinstance accepts True as an int.


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_text(value: Any, longest: int = 1000) -> bool:
    return type(value) is str and len(value) <= longest


def _is_finite_float(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_single(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**64
    is_text = _is_text(value, longest=_MAX_DESCRIPTION)
    return value is None or type(value) is bool or is_text or _is_finite_float(value)


def _is_description(value: Any) -> bool:
    """Whether ``value`` is an object of single values and lists of them, not too large in all."""
    if type(value) is not dict:
        return False
    left = _MAX_DESCRIPTION
    for name, item in value.items():
        parts = item if type(item) in (list, tuple) else (item,)
        left -= len(parts)
        if left < 0 or not _is_text(name) or not all(map(_is_single, parts)):
            return False
        left -= sum(len(part) for part in parts if type(part) is str)
    return left >= 0


def _is_object(
    value: Any,
    accepts_value: Callable[[Any], bool],
    accepts_name: Callable[[Any], bool] = _is_text,
) -> bool:
    return type(value) is dict and all(
        accepts_name(name) and accepts_value(item) for name, item in value.items()
    )


def _is_pair(
    value: Any, accepts_first: Callable[[Any], bool], accepts_second: Callable[[Any], bool]
) -> bool:
    return (
        type(value) in (list, tuple)
        and len(value) == 2
        and accepts_first(value[0])
        and accepts_second(value[1])
    )


def _is_file_name(name: Any) -> bool:
    """Whether ``name`` is the normalized relative path of a file in the folder or below it."""
    if not _is_text(name) or "\0" in name or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and name not in ("", ".", FILE)
        and str(path) == name
    )


def _is_digest(value: Any) -> bool:
    return type(value) is str and re.fullmatch("[0-9a-f]{32}", value) is not None


def _is_shape(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) <= _MAX_DIMS and all(map(_is_count, value))


def _is_data(value: Any) -> bool:
    """Whether ``value`` can be the state of a data loader.

    The fields of our loader are checked one by one, if the state is its own: it has both of
    ``_OF_OUR_LOADER``, and requires them. Others may belong to a later one, or to a user's batches.
    """
    if value is None:
        return True
    if not _is_description(value):
        return False
    return not value.keys() >= _OF_OUR_LOADER or (
        all(_is_count(value[key]) for key in _COUNTS_OF_OUR_LOADER if key in value)
        and _is_text(value["digest"])
        and type(value.get("seed", 0)) is int
        and type(value.get("order_seed", 0)) is int
        and _is_text(value.get("order", ""))
    )


def _is_history(value: Any) -> bool:
    """Whether ``value`` can be the state of ``StepHistory``."""
    if type(value) is not dict or value.keys() - {"losses", "norms", "bad_in_a_row"}:
        return False
    losses, norms = value.get("losses", []), value.get("norms", [])
    return (
        all(_is_list_of_floats(values) for values in (losses, norms))
        and len(losses) == len(norms)
        and _is_count(value.get("bad_in_a_row", 0))
    )


def _is_list_of_floats(value: Any) -> bool:
    return type(value) is list and all(map(_is_finite_float, value))


class _Rule(NamedTuple):
    """The check of a field, and the description of its allowed values in an error."""

    accepts: Callable[[Any], bool]
    allowed: str


_RULES = {
    "step": _Rule(_is_count, "an integer from 0 to 2^53"),
    "world_size": _Rule(
        lambda value: _is_count(value) and value >= 1,
        "an integer from 1 to 2^53",
    ),
    "layout": _Rule(
        lambda value: _is_object(value, _is_count),
        "an object of integers from 0 to 2^53",
    ),
    "model": _Rule(
        _is_description,
        f"an object of numbers, texts, true, false or null, and of lists of them, {_IN_ALL}",
    ),
    "recipe": _Rule(
        lambda value: _is_text(value, longest=TEXT_LIMIT),
        "a text of at most 2^20 characters",
    ),
    "data": _Rule(
        _is_data,
        "null, or an object of numbers and texts in which next_step is an integer from 0 to 2^53, "
        f"and of lists of them, {_IN_ALL}",
    ),
    "lr": _Rule(
        lambda value: value is None or _is_finite_float(value),
        "null or a finite number",
    ),
    "history": _Rule(
        _is_history,
        "an object of losses and norms, lists of equally many finite numbers, and bad_in_a_row, an "
        "integer from 0 to 2^53",
    ),
    "files": _Rule(
        lambda value: _is_object(
            value, lambda entry: _is_pair(entry, _is_count, _is_digest), _is_file_name
        ),
        "an object from paths within the folder to size and digest (XXH3-128)",
    ),
    "tensors": _Rule(
        lambda value: _is_object(value, lambda spec: _is_pair(spec, _is_shape, _is_text)),
        "an object from names to shape and dtype",
    ),
}

# Fields that are written only if they hold anything, so that earlier versions can read the others.
_OPTIONAL = ("history",)


def find_damage(
    folder: Place,
    manifest: Manifest,
    names: Collection[str] | None = None,
    *,
    report: Callable[[int], None] = lambda n_bytes: None,
) -> list[str]:
    """Compare the files of a checkpoint with its manifest. Each checked file is read whole.

    A file that the manifest does not list is no damage: see ``describe_unlisted``.

    Args:
        folder: the checkpoint.
        manifest: the manifest of the checkpoint.
        names: the files in the manifest to check; None means all.
        report: is called with the number of bytes after each piece of a file.

    Returns:
        One line for each file that is missing, is no plain file, or has another size or digest. The
        list is empty if nothing is wrong.

    Raises OSError if a file cannot be read, which says nothing of its content.
    """
    entries = manifest.files
    if names is not None:
        entries = {name: manifest.files[name] for name in names}

    lines = []
    for name, entry in sorted(entries.items()):
        try:
            compare = partial(_compare, folder, name, entry, report)
            lines += _try_twice(folder, compare)
        except OSError as error:
            _require_damage(folder, name, error)
            lines.append(f"{folder}/{name} cannot be read ({error.strerror})")
    return lines


def describe_unlisted(folder: Place, manifest: Manifest) -> list[str]:
    """Return a line for each file of a checkpoint that its manifest does not list.

    Such a file is not damage, because nothing that loads a checkpoint reads it. A desktop, a backup
    or a user may have put it there. At most eight files are named, and the others are counted.

    The list is empty for an object store, where files of a save that was cut off may lie beside
    those of the checkpoint.
    """
    if isinstance(folder, RemotePath):
        return []
    unlisted = sorted(_names_in(folder) - manifest.files.keys() - {FILE})
    lines = [
        f"{folder}/{name} is not in the manifest: it is not read"
        for name in unlisted[:_SHOWN_FILES]
    ]
    if len(unlisted) > _SHOWN_FILES:
        hidden = len(unlisted) - _SHOWN_FILES
        lines.append(f"{folder}: {hidden} more files are not in the manifest")
    return lines


def _compare(
    folder: Place, name: str, entry: FileEntry, report: Callable[[int], None]
) -> list[str]:
    """Return a line if a file has another size or digest than its entry. Raises OSError."""
    with _opened(folder, name) as (size, pieces):
        if size != entry.size:
            return [f"{folder}/{name} has {size} bytes, but the manifest says {entry.size}"]
        if _digest_of(pieces, report) != entry.digest:
            return [f"{folder}/{name} has another digest than the manifest says"]
    return []


def _try_twice(folder: Place, function: Callable[[], T]) -> T:
    """Return what ``function`` returns, which reads a file of ``folder``. Raises what it raises.

    After an error of input and output on a disk it is called once more: a network file system may
    have lost its server for a moment. The libraries of object stores try again themselves.
    """
    try:
        return function()
    except OSError as error:
        if error.errno != errno.EIO or isinstance(folder, RemotePath):
            raise
    time.sleep(_PAUSE_S)
    return function()


def _require_damage(folder: Place, name: str, error: OSError) -> None:
    """Raise an error again, with the path of its file, unless it says something of the file itself.

    A connection that fails, a key that has expired, a right that is lacking or a stale handle say
    nothing of the checkpoint: a run that took an older one would replace a healthy one.
    """
    # A sector of a disk that cannot be read twice is damage.
    is_of_disk = error.errno == errno.EIO and not isinstance(folder, RemotePath)
    if not (is_of_disk or error.errno in _DAMAGE or isinstance(error, RefusedFileError)):
        reason = error.strerror or str(error)
        raise OSError(error.errno, reason, f"{folder}/{name}") from error


@contextmanager
def _opened(folder: Place, name: str) -> Iterator[tuple[int, Iterator[bytes | memoryview]]]:
    """Yield the size of a file of a checkpoint, and its content in pieces. Raises OSError."""
    if isinstance(folder, RemotePath):
        path = folder / name
        size = path.size()
        yield size, path.pieces(size)
        return
    _refuse_links(folder, name)
    with open_plain(folder / name, follow_links=False) as file:
        yield os.fstat(file.fileno()).st_size, _pieces_of(file)


def has_all_bytes(folder: Place, manifest: Manifest) -> bool:
    """Return whether each file of a checkpoint has its size. No content is read.

    Raises OSError if the folder or a file cannot be read, or is missing.
    """
    if isinstance(folder, RemotePath):
        sizes = folder.files()
        return all(sizes.get(name) == entry.size for name, entry in manifest.files.items())
    return all(
        (folder / name).stat().st_size == entry.size for name, entry in manifest.files.items()
    )


def _refuse_links(folder: Path, name: str) -> None:
    """Raise OSError if a folder on the way to ``name`` is a link, which could lead elsewhere."""
    for parent in list(PurePosixPath(name).parents)[:-1]:
        if (folder / parent).is_symlink():
            raise OSError(errno.ELOOP, f"{parent} is a symbolic link, which is not followed here")


def _names_in(folder: Path) -> set[str]:
    """Return the relative paths of all files below ``folder``.

    Links, also those to folders, and pipes count as files. Nothing is opened, and no link is
    followed.
    """
    found = set()
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found |= {os.path.relpath(os.path.join(place, name), folder) for name in (*files, *links)}
    return found


def require_same_tensors(
    expected: Mapping[str, object], saved: Mapping[str, object], place: object, way_out: str
) -> None:
    """Require that ``saved`` has exactly the names of ``expected``, with equal values.

    Args:
        expected: the ``TensorSpec``s or shapes that the model needs, by name.
        saved: the ``TensorSpec``s or shapes that the checkpoint has, by name.
        place: the checkpoint, as the error names it.
        way_out: what the user can change. The error ends with it.

    Raises:
        CheckpointError: the two differ. At most eight differences are shown.
    """
    lines = [
        _describe_difference(name, expected, saved, place)
        for name in sorted(saved.keys() | expected.keys())
        if saved.get(name) != expected.get(name)
    ]
    if lines:
        summary = f"{place}: {len(lines)} differences; {way_out}"
        raise CheckpointError([*lines[:_SHOWN_DIFFERENCES], summary])


def _describe_difference(
    name: str, expected: Mapping[str, object], saved: Mapping[str, object], place: object
) -> str:
    if name not in saved:
        return f"{place} has no {in_quotes(name)}, but the model needs it as {expected[name]}"
    if name not in expected:
        return f"{place} holds {in_quotes(name)} as {saved[name]}, which the model does not have"
    return f"{place} holds {in_quotes(name)} as {saved[name]}, but the model needs {expected[name]}"


def file_entry(path: Path) -> FileEntry:
    """Return the size and the digest of a file. The file is read in pieces.

    Raises OSError if the file cannot be read, or is not a plain file.
    """
    with open_plain(path) as file:
        return FileEntry(os.fstat(file.fileno()).st_size, _digest_of(_pieces_of(file)))


def _pieces_of(file: BinaryIO) -> Iterator[memoryview]:
    """Yield the content of a file in pieces. Each is overwritten by the next."""
    buffer = memoryview(bytearray(1 << 20))
    while size := cast(Any, file).readinto(buffer):
        yield buffer[:size]


def _digest_of(
    pieces: Iterable[bytes | memoryview], report: Callable[[int], None] = lambda n_bytes: None
) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
        report(len(piece))
    return digest.hexdigest()
