"""``manifest.json``: what a checkpoint is, and by which every byte of it can be checked. No torch here, and no pickle.

It is written last, when all other files are on the disk. It holds sizes and digests (XXH3-128, for damage and not
against forgery) of every other file of the folder, and a digest of itself, so that no flipped bit passes.
"""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import xxhash

from composer3d.models.llama.shape import ModelShape
from composer3d.runtime.files import sync
from composer3d.spec.errors import CheckpointError, UserError
from composer3d.spec.files import MIB, open_plain, parse_json, read_plain

FILE = "manifest.json"
FORMAT = 1
_LIMIT = 32 * MIB  # bytes of a manifest; a tensor takes about 100, a file 80
_VALUES = 1_500_000  # that it may hold: an empty list of three bytes would become one of 64
_MOST = 2**53  # of what is counted: every reader of JSON has these numbers exactly
_SHOWN = 8  # of files that do not belong there


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One checkpoint. All of it is JSON: what a resumed run does is decided by plain values."""

    step: int  # optimizer steps that were done
    world_size: int = 1
    layout: dict[str, int] = field(
        default_factory=dict
    )  # the mesh that saved, for people: any layout can load
    model: dict[str, Any]  # see ``model_of``
    recipe: str = ""  # resolved TOML
    data: dict[str, Any] | None = (
        None  # the loader's state; None where a checkpoint only seeds a run with tensors
    )
    lr: float | None = None  # of the last step
    files: dict[str, tuple[int, str]] = field(default_factory=dict)  # name: (bytes, XXH3-128)
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(
        default_factory=dict
    )  # global name: (shape, dtype)


def model_of(shape: ModelShape, params: str) -> dict[str, Any]:
    """What makes two models different functions of the same tensors: the shape, and the parameters' dtype."""
    sizes = {f"model.{f.name}": getattr(shape, f.name) for f in fields(ModelShape)}
    return {**sizes, "model.head_dim": shape.head_width, "precision.params": params}


def write(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into ``folder``, and have it on the disk."""
    content = _encode({"format": FORMAT, **asdict(manifest)})
    if len(content) > _LIMIT or _values_in(content) > _VALUES:
        raise CheckpointError(
            f"{folder / FILE} would be too large to be read: {len(content):,} bytes"
        )
    (folder / FILE).write_bytes(content)
    sync(folder / FILE)


def _encode(content: dict[str, Any]) -> bytes:
    """Canonical JSON, with the digest of its own rest."""
    canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    rest = canonical({key: value for key, value in content.items() if key != "digest"})
    return canonical({**content, "digest": xxhash.xxh3_128_hexdigest(rest.encode())}).encode()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises CheckpointError where there is none that can be used."""
    place = folder / FILE
    try:
        written = read_plain(place, limit=_LIMIT, follow_links=False)
        if _values_in(written) > _VALUES:
            raise ValueError(f"it holds more than {_VALUES:,} values")
        content = parse_json(written)
        if (
            type(content) is not dict or _encode(content) != written
        ):  # a flipped bit can spell the same in another way
            raise ValueError("it is not what its digest says")
        version = content.pop("format", None)
        if version != FORMAT or type(version) is not int:
            # No damage, which a resume would pass over.
            raise UserError(
                f"{place} is not of format {FORMAT}, all that this composer3d reads; use a newer one"
            )
        del content["digest"]
        return parse(content)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {FILE}; name a step-* folder"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be used: it {error.strerror}; copy the checkpoint again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{place} cannot be used: {_sentence(error)}; copy the checkpoint again"
        ) from None


def _values_in(written: bytes) -> int:
    return sum(written.count(mark) for mark in (b"[", b"{", b","))


def _sentence(error: Exception) -> str:
    return "it nests too deep" if isinstance(error, RecursionError) else str(error)


def parse(content: Any) -> Manifest:
    """A manifest of plain values that someone else wrote. Raises ValueError where one is not what it must be."""
    if type(content) is not dict:
        raise ValueError("it is no object with fields")
    for key in content.keys() - _RULES.keys():
        raise ValueError(f"it has a field {key!r:.100}, which no manifest has")
    for key, (holds, rule) in _RULES.items():
        if key not in content:
            raise ValueError(f"it lacks {key}")
        if not holds(content[key]):
            raise ValueError(f"{key} is {_shown(content[key])}, but must be {rule}")
    files = {name: (size, digest) for name, (size, digest) in content["files"].items()}
    tensors = {name: (tuple(shape), dtype) for name, (shape, dtype) in content["tensors"].items()}
    return Manifest(**{**content, "files": files, "tensors": tensors})


def _shown(value: Any) -> str:
    """A value as JSON, where that is short."""
    if isinstance(value, dict | list | tuple):
        return "another"
    return f"{value!r:.60}"


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _text(value: Any, most: int = 1000) -> bool:
    return type(value) is str and len(value) <= most


def _plain(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return (
        value is None
        or type(value) is bool
        or _text(value)
        or (type(value) is int and abs(value) <= 2**63)
    )


def _each(
    value: Any, of_value: Callable[[Any], bool], of_name: Callable[[Any], bool] = _text
) -> bool:
    return type(value) is dict and all(
        of_name(name) and of_value(each) for name, each in value.items()
    )


def _pair(value: Any, first: Callable[[Any], bool], second: Callable[[Any], bool]) -> bool:
    return type(value) in (list, tuple) and len(value) == 2 and first(value[0]) and second(value[1])


def _file_name(name: Any) -> bool:
    """Whether it names a file of the folder, or of a folder in it, in the one way that there is."""
    if not _text(name) or "\0" in name or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and name not in ("", ".", FILE)
        and str(path) == name
    )


def _digest(value: Any) -> bool:
    return type(value) is str and re.fullmatch("[0-9a-f]{32}", value) is not None


def _shape(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) <= 64 and all(map(_count, value))


def _data(value: Any) -> bool:
    """The loader's state, of which these are known; what else it holds is for a later loader."""
    if value is None:
        return True
    counts, texts = ("next_step", "seq_len", "global_batch"), ("digest",)
    return (
        _each(value, _plain)
        and all(_count(value[key]) for key in counts if key in value)
        and all(_text(value[key]) for key in texts if key in value)
        and type(value.get("seed", 0)) is int
    )


# What each field must be, and how that is said.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_count, "an integer from 0 to 2^53"),
    "world_size": (lambda value: _count(value) and value >= 1, "an integer from 1 to 2^53"),
    "layout": (lambda value: _each(value, _count), "integers from 0 to 2^53 by name"),
    "model": (lambda value: _each(value, _plain), "numbers, texts or null by name"),
    "recipe": (lambda value: _text(value, MIB), "a text of at most 2^20 characters"),
    "data": (_data, "null, or numbers and texts by name; next_step is an integer from 0 to 2^53"),
    "lr": (
        lambda value: value is None or (type(value) is float and math.isfinite(value)),
        "null or a finite number",
    ),
    "files": (
        lambda value: _each(value, lambda pair: _pair(pair, _count, _digest), _file_name),
        "size and digest (XXH3-128) of files by their names within the folder",
    ),
    "tensors": (
        lambda value: _each(value, lambda pair: _pair(pair, _shape, _text)),
        "shape and dtype by name",
    ),
}


def damage(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> list[str]:
    """What is wrong with the files of ``folder``, one line each: missing, too many, of another size or digest.

    ``names`` are those to read, None all of them; what is too many is always found.
    """
    wanted = manifest.files if names is None else {name: manifest.files[name] for name in names}
    lines = []
    for name, (size, digest) in sorted(wanted.items()):
        path = folder / name
        try:
            _refuse_links(folder, name)
            with open_plain(path, follow_links=False) as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    lines.append(f"{path} has {found} bytes, the manifest says {size}")
                elif _digest_of(file) != digest:
                    lines.append(f"{path} has another digest than the manifest says")
        except OSError as error:
            lines.append(f"{path} cannot be read ({error.strerror})")
    extra = sorted(_names_in(folder) - manifest.files.keys() - {FILE})
    lines += [f"{folder / name} is not in the manifest" for name in extra[:_SHOWN]]
    return lines + (
        [f"{folder}: {len(extra) - _SHOWN} more files are not in the manifest"]
        if extra[_SHOWN:]
        else []
    )


def _refuse_links(folder: Path, name: str) -> None:
    """A folder within a checkpoint must not be a link: what lies behind it is no part of the checkpoint."""
    for parent in list(PurePosixPath(name).parents)[:-1]:
        if (folder / parent).is_symlink():
            raise OSError(errno.ELOOP, f"{parent} is a symbolic link, which is not followed here")


def _names_in(folder: Path) -> set[str]:
    """All that lies in a folder and below: files, and links and pipes as well, of which none is followed or opened."""
    found = set()
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found |= {os.path.relpath(os.path.join(place, name), folder) for name in (*files, *links)}
    return found


def compare(
    job: Mapping[str, object], saved: Mapping[str, object], place: object, way_out: str
) -> None:
    """Hold what ``place`` has, by name, against what this job needs, both ways.

    Raises CheckpointError with the differences, of which eight are shown, and ``way_out``.
    """
    lines = [
        f"{place} holds {name!r} as {saved.get(name, 'nothing')}, but the model needs {job.get(name, 'nothing')}"
        for name in sorted(saved.keys() | job.keys())
        if saved.get(name) != job.get(name)
    ]
    if lines:
        raise CheckpointError([*lines[:8], f"{place}: {len(lines)} differences; {way_out}"])


def digest_file(path: Path) -> str:
    """XXH3-128 of a file's bytes, as hexadecimal. Reads it piece by piece."""
    with open_plain(path) as file:
        return _digest_of(file)


def _digest_of(file: BinaryIO) -> str:
    return hashlib.file_digest(cast(Any, file), xxhash.xxh3_128).hexdigest()
