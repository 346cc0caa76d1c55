"""Damaged checkpoints of training runs: each is refused, or loads bitwise the same values.

Damage leaves the digests as they are, and must be found. A forger computes them again: then a value
may be another one, but nothing is executed, every tensor has the shape of its model, and the
program ends as always.
"""

import json
import pickle
import pickletools
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

from composer3d.convert.formats import Source, open_source
from composer3d.facts.errors import UserError
from composer3d.runtime.launch import Pool
from tools.prove.fuzz.child import Case, Ran, WrongError, command
from tools.prove.fuzz.mutate import change_json, flip, replace_file, written
from tools.prove.hostile.base import EXPERTS, STEPS
from tools.prove.hostile.case import run
from tools.prove.hostile.checkpoints import seal, touch, touching, write_manifest
from tools.prove.proof import logged_rows, overrides

_STEP = f"step-{STEPS:08d}"
# Each checkpoint, with the run that made it and the overrides of its recipe.
_CHECKPOINTS = {
    "dense": ("victim", ()),
    "experts": ("experts", EXPERTS),
    "shards": ("shards", ('run.name="shards"', "mesh.dp_shard=2", "mesh.tp=2")),
}
_MANIFEST, _METADATA = "manifest.json", ".metadata"


def make_base(base: Path, pool: Pool) -> None:
    """Train the run whose checkpoint has the files of four ranks, beside those of ``hostile``."""
    sets = overrides(f"run.steps={STEPS}", *_CHECKPOINTS["shards"][1])
    outcome = run(["train", "recipe.toml", *sets], base, pool)
    assert outcome.status == 0, outcome


def make(base: Path, draw: random.Random) -> Case:
    """Change a checkpoint, and open it in all ways."""
    name = draw.choice(("dense", "dense", "experts", "shards"))
    run_name, sets = _CHECKPOINTS[name]
    sound, evil = base / "runs" / run_name / "checkpoints" / _STEP, Path("evil")
    shutil.copytree(sound, evil)
    ways = (
        *(_tensor_bytes, _tensor_bytes, _tensor_bytes, _any_bytes, _any_bytes, _metadata_bytes),
        *(_metadata_program, _metadata_program, _metadata_values, _metadata_values, _manifest),
        *(_manifest, _replace, _swap_files, _extra_file),
    )
    way = draw.choice(ways)
    change = way(evil, base, draw)
    is_forged = draw.random() < (0.7 if way in (_metadata_program, _metadata_values) else 0.3)
    if is_forged:
        is_forged = _try_seal(evil)
        change += ", digests computed again" if is_forged else ""
    resumes = draw.random() < 0.3
    # A run of four ranks is resumed on one: any layout can go on.
    sets = tuple(each for each in sets if not each.startswith("mesh."))
    return Case(
        f"{name}: {change}",
        lambda: _act(evil, sound, base, sets, is_forged=is_forged, resumes=resumes),
        cpu_s=8.0,
    )


# Ways to change a checkpoint. Each returns what was changed.


def _data_files(evil: Path) -> list[Path]:
    return sorted(evil.glob("*.distcp"))


@cache
def _places(sound: str) -> list[tuple[str, int, int]]:
    """The file, begin and length of every part of a tensor. ``sound`` is a checkpoint of ours."""
    metadata: Metadata = pickle.loads((Path(sound) / _METADATA).read_bytes())
    return [
        (info.relative_path, info.offset, info.length) for info in metadata.storage_data.values()
    ]


def _tensor_bytes(evil: Path, base: Path, draw: random.Random) -> str:
    """Flip one bit within a stored tensor."""
    name, begin, length = draw.choice(_places(str(evil.resolve())))
    content = bytearray((evil / name).read_bytes())
    at = begin + draw.randrange(length)
    content[at] ^= 1 << draw.randrange(8)
    (evil / name).write_bytes(content)
    return f"a bit of {name} at {at}"


def _any_bytes(evil: Path, base: Path, draw: random.Random) -> str:
    files = [path for path in sorted(evil.rglob("*")) if path.is_file()]
    path = draw.choice(files)
    path.write_bytes(flip(path.read_bytes(), draw))
    return f"bytes of {path.relative_to(evil)}"


def _metadata_bytes(evil: Path, base: Path, draw: random.Random) -> str:
    path = evil / _METADATA
    path.write_bytes(flip(path.read_bytes(), draw))
    return f"bytes of {_METADATA}"


def _metadata_program(evil: Path, base: Path, draw: random.Random) -> str:
    """Change instructions of the pickle: drop, repeat, move them, or call something."""
    content = (evil / _METADATA).read_bytes()
    starts = [place for _, _, place in pickletools.genops(content)]
    parts = [
        content[begin:end] for begin, end in zip(starts, [*starts[1:], len(content)], strict=True)
    ]
    calls = [
        touching(evil.resolve().parent),
        *(b"cposix\nsystem\n", b"cbuiltins\neval\n", b"\x8c\x02os\x8c\x06system\x93"),
        *(b"cbuiltins\ngetattr\n", b"ctorch\nload\n", b"ctorch.serialization\n_get_layout\n"),
        *(b"ctorch\nSize\n", b"\x80\x05"),
        *(bytes([opcode]) for opcode in b"0Rb\x81N(tQ\x94"),
        *(b"K\x05", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\x20" + b"\xff" * 32),
        *(b"X\xff\xff\xff\x7f", b"]" * 5000, b"." * 3),
    ]
    shown = []
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(parts))
        way = draw.choice(("drop", "repeat", "replace", "insert", "insert", "number"))
        if way == "drop" and len(parts) > 1:
            del parts[at]
        elif way == "repeat":
            parts.insert(draw.randrange(len(parts)), parts[at])
        elif way == "replace":
            parts[at] = draw.choice(parts)
        elif way == "number" and parts[at][:1] in (b"K", b"M", b"J"):
            parts[at] = parts[at][:1] + draw.randbytes(len(parts[at]) - 1)
        else:
            parts.insert(at, draw.choice(calls))
        shown.append(way)
    (evil / _METADATA).write_bytes(b"".join(parts))
    return f"the program of {_METADATA}: {', '.join(shown)}"


def _metadata_values(evil: Path, base: Path, draw: random.Random) -> str:
    """Change what the metadata says of tensors, their parts and where these are stored."""
    metadata: Any = pickle.loads((evil / _METADATA).read_bytes())
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    name = draw.choice(sorted(entries))
    entry = entries[name]
    key = draw.choice([key for key in storage if key.fqn == name])
    other_key = draw.choice(list(storage))
    info = storage[key]
    at = draw.randrange(len(entry.chunks))
    chunk = entry.chunks[at]
    dims = len(entry.size)
    number = draw.choice((0, 1, -1, 2, 7, 2**31, 2**62, 2**63 - 1, -(2**62)))

    def moved(sizes: Any) -> Any:
        if not sizes:
            return torch.Size((1,))
        values = list(sizes)
        place = draw.randrange(len(values))
        values[place] = draw.choice((number, max(0, values[place] - 1), values[place] + 1, 0))
        return torch.Size(tuple(max(0, value) for value in values))

    def dtype() -> torch.dtype:
        return draw.choice((torch.float64, torch.float16, torch.int32, torch.bfloat16, torch.bool))

    def stored(**fields: Any) -> None:
        storage[key] = _StorageInfo(
            **{
                "relative_path": info.relative_path,
                "offset": info.offset,
                "length": info.length,
                **fields,
            }
        )

    def swap_storage() -> None:
        storage[key], storage[other_key] = storage[other_key], info

    def swap_entries() -> None:
        other = other_key.fqn
        entries[name], entries[other] = entries[other], entry

    def new_chunk(offsets: Any, sizes: Any) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    odd_paths = ("../x", "/etc/passwd", ".", "", "a\0b", "manifest.json", _METADATA, "no", 5, None)
    edits: dict[str, Callable[[], Any]] = {
        "size": lambda: setattr(entry, "size", moved(entry.size)),
        "dims": lambda: setattr(entry, "size", torch.Size((1, *entry.size))),
        "dtype": lambda: setattr(entry.properties, "dtype", dtype()),
        "chunk offsets": lambda: entry.chunks.__setitem__(
            at, ChunkStorageMetadata(moved(chunk.offsets), chunk.sizes)
        ),
        "chunk sizes": lambda: entry.chunks.__setitem__(
            at, ChunkStorageMetadata(chunk.offsets, moved(chunk.sizes))
        ),
        "chunk twice": lambda: entry.chunks.append(chunk),
        "chunk missing": lambda: entry.chunks.pop(at),
        "many chunks": lambda: setattr(entry, "chunks", entry.chunks * 20_000),
        "overlap": lambda: entry.chunks.append(new_chunk((0,) * dims, (1,) * dims)),
        "offset": lambda: stored(offset=info.offset + number),
        "offset of another": lambda: stored(offset=storage[other_key].offset),
        "length": lambda: stored(length=max(info.length + number, -1)),
        "length of another": lambda: stored(length=storage[other_key].length),
        "path": lambda: stored(relative_path=draw.choice(odd_paths)),
        "path of another": lambda: stored(relative_path=storage[other_key].relative_path),
        "stored as another": lambda: storage.__setitem__(key, storage[other_key]),
        "storage swapped": swap_storage,
        "storage missing": lambda: storage.pop(key),
        "entries swapped": swap_entries,
        "entry missing": lambda: entries.pop(name),
        "entry renamed": lambda: entries.__setitem__(f"{name}x", entries.pop(name)),
        "entry of bytes": lambda: entries.__setitem__(name, BytesStorageMetadata()),
        "planner data": lambda: setattr(metadata, "planner_data", {"x": ("y", 1)}),
        "a call": lambda: setattr(metadata, "planner_data", touch(evil.resolve().parent)),
    }
    way = draw.choice(list(edits))
    edits[way]()
    (evil / _METADATA).write_bytes(pickle.dumps(metadata))
    return f"{way} of {name}"


def _manifest(evil: Path, base: Path, draw: random.Random) -> str:
    document, shown = change_json(json.loads((evil / _MANIFEST).read_bytes()), draw)
    if isinstance(document, dict) and draw.random() < 0.7:
        try:
            write_manifest(evil, document)
            return f"manifest, with a digest: {shown}"
        except (ValueError, RecursionError):
            pass
    (evil / _MANIFEST).write_bytes(written(document, draw))
    return f"manifest: {shown}"


def _replace(evil: Path, base: Path, draw: random.Random) -> str:
    path = draw.choice([path for path in sorted(evil.rglob("*")) if path.is_file()])
    way = replace_file(path, base.parent / "outside", draw)
    return f"{path.relative_to(evil)}: {way}"


def _swap_files(evil: Path, base: Path, draw: random.Random) -> str:
    """Swap two files of tensors, or take one of another checkpoint."""
    files = _data_files(evil)
    path = draw.choice(files)
    other = draw.choice(files)
    if other == path:
        other_run = draw.choice([name for name, _ in _CHECKPOINTS.values()])
        theirs = _data_files(base / "runs" / other_run / "checkpoints" / _STEP)
        path.write_bytes(draw.choice(theirs).read_bytes())
        return f"{path.name} of {other_run}"
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return f"{path.name} and {other.name} swapped"


def _extra_file(evil: Path, base: Path, draw: random.Random) -> str:
    name = draw.choice(("x", "__9_0.distcp", "assets/x.py", "pytorch_model.bin", "a\nb"))
    (evil / name).write_bytes(b"x")
    return f"one more file {name!r}"


def _try_seal(evil: Path) -> bool:
    """Compute the digests again, as a forger does. Return whether the manifest allowed it."""
    try:
        large = [path for path in evil.rglob("*") if path.is_file() and path.stat().st_size > 1e8]
        if large or (evil / _MANIFEST).is_symlink():
            return False
        seal(evil)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
    return True


# The judgement.


@cache
def _sound_digests(sound: Path) -> dict[str, str]:
    return _digests(open_source(sound))


def _digests(source: Source) -> dict[str, str]:
    """Read every tensor that the model needs, and return its digest, dtype and shape by name."""
    found = {}
    for name in source.locations:
        tensor = source.read(name)
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        found[name] = f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(content)}"
    return found


def _act(
    evil: Path, sound: Path, base: Path, sets: tuple[str, ...], *, is_forged: bool, resumes: bool
) -> str:
    inspected = command("inspect", "evil", statuses=(0, 1, 2))
    is_whole = inspected.status == 0
    found: dict[str, str] | None = None
    try:
        found = _digests(open_source(evil))
    except UserError as error:
        if any(len(line) > 5000 or not line.isprintable() for line in error.lines):
            raise WrongError(f"an error of {error.lines!r:.300}") from None
    # Inspect compares digests, which a forger computes again. It does not read what they are of.
    if is_whole != (found is not None) and not (is_whole and is_forged):
        raise WrongError(f"inspect says whole: {is_whole}, reading says {found is not None}")
    resumed = _resume("evil", base, sets) if resumes else None
    if found is None:
        if resumed is not None and resumed.status == 0:
            raise WrongError("training goes on from a checkpoint that inspect refuses")
        return "refused"

    expected = _sound_digests(sound)
    is_same = found == expected
    if not is_same and not is_forged:
        changed = sorted(name for name in expected if found.get(name) != expected[name])
        raise WrongError(f"damage of {changed[:3]} was loaded without notice")
    if [text.split(" ")[:-1] for text in found.values()] != [
        text.split(" ")[:-1] for text in expected.values()
    ]:
        raise WrongError("a forged checkpoint has tensors of other shapes or dtypes")
    if resumed is not None and resumed.status == 0 and is_same:
        _require_same_step(base, sound, sets)
    return "the same values" if is_same else "forged: read as it was written"


def _resume(path: str, base: Path, sets: tuple[str, ...], name: str = "again") -> Ran:
    """Train one step from a checkpoint, on one process."""
    every_set = (
        *sets,
        f"run.steps={STEPS + 1}",
        f'run.name="{name}"',
        f"checkpoint.resume={path}",
        f"data.path={base / 'tokens'}",
    )
    return command("train", str(base / "recipe.toml"), *overrides(*every_set))


def _require_same_step(base: Path, sound: Path, sets: tuple[str, ...]) -> None:
    """Require that the next step has the loss and the norm that the sound checkpoint gives."""
    _resume(str(sound), base, sets, "sound")
    first, second = (
        next(row for row in logged_rows(Path("runs", name)) if "loss" in row)
        for name in ("again", "sound")
    )
    for key in ("step", "loss", "grad_norm"):
        if first[key] != second[key]:
            raise WrongError(f"after the resume, {key} is {first[key]}, not {second[key]}")
