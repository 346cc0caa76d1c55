"""``manifest.json``: what a checkpoint is, and by which every byte of it can be checked. No torch here, and no pickle.

It is written last, when all other files are on the disk. It holds sizes and digests (XXH3-128, for damage and not
against forgery) of every other file of the folder, and a digest of itself, so that no flipped bit passes.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from composer3d.errors import CheckpointError, UserError
from composer3d.shape import ModelShape

FILE = "manifest.json"
FORMAT = 1
_KINDS: dict[str, Any] = {"step": int, "world_size": int, "layout": dict, "model": dict, "recipe": str}
_KINDS |= {"data": dict | None, "lr": float | None, "files": dict, "tensors": dict}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One checkpoint. All of it is JSON: what a resumed run does is decided by plain values."""

    step: int  # optimizer steps that were done
    world_size: int = 1
    layout: dict[str, int] = field(default_factory=dict)  # the mesh that saved, for people: any layout can load
    model: dict[str, Any]  # see ``model_of``
    recipe: str = ""  # resolved TOML
    data: dict[str, Any] | None = None  # the loader's state; None where a checkpoint only seeds a run with tensors
    lr: float | None = None  # of the last step
    files: dict[str, tuple[int, str]] = field(default_factory=dict)  # name: (bytes, XXH3-128)
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # global name: (shape, dtype)


def model_of(shape: ModelShape, params: str) -> dict[str, Any]:
    """What makes two models different functions of the same tensors: the shape, and the parameters' dtype."""
    sizes = {f"model.{f.name}": getattr(shape, f.name) for f in fields(ModelShape)}
    return {**sizes, "model.head_dim": shape.head_width, "precision.params": params}


def write(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into ``folder``, and have it on the disk."""
    (folder / FILE).write_bytes(_encode({"format": FORMAT, **asdict(manifest)}))
    sync(folder / FILE)


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _encode(content: dict[str, Any]) -> bytes:
    """Canonical JSON, with the digest of its own rest."""
    canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    rest = canonical({key: value for key, value in content.items() if key != "digest"})
    return canonical({**content, "digest": xxhash.xxh3_128_hexdigest(rest.encode())}).encode()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises CheckpointError where there is none that can be used."""
    place = folder / FILE
    try:
        written = place.read_bytes()
        content = json.loads(written)
        if _encode(content) != written:  # byte for byte: a flipped bit can also spell the same content in another way
            raise ValueError("it is not what its digest says")
        if content.pop("format") != FORMAT:
            # No damage, which a resume would pass over.
            raise UserError(f"{place} is not of format {FORMAT}, all that this composer3d reads; use a newer one")
        del content["digest"]
        wrong = [name for name, kind in _KINDS.items() if not isinstance(content[name], kind)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} must be of another type")
        content["files"] = {name: (size, digest) for name, (size, digest) in content["files"].items()}
        content["tensors"] = {name: (tuple(shape), dtype) for name, (shape, dtype) in content["tensors"].items()}
        return Manifest(**content)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {FILE}; name a step-* folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{place} cannot be used ({type(error).__name__}: {error})") from None


def damage(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> list[str]:
    """What is wrong with the files of ``folder``, one line each: missing, too many, of another size or digest.

    ``names`` are those to read, None all of them; what is too many is always found.
    """
    wanted = manifest.files if names is None else {name: manifest.files[name] for name in names}
    lines = []
    for name, (size, digest) in sorted(wanted.items()):
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                lines.append(f"{path} has {found} bytes, the manifest says {size}")
            elif digest_file(path) != digest:
                lines.append(f"{path} has another digest than the manifest says")
        except OSError as error:
            lines.append(f"{path} cannot be read ({error.strerror})")
    extra = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()} - manifest.files.keys() - {FILE}
    return lines + [f"{folder / name} is not in the manifest" for name in sorted(extra)]


def compare(job: Mapping[str, object], saved: Mapping[str, object], place: object, way_out: str) -> None:
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
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
