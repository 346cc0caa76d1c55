"""Sound files, changed at random: each is read or refused, and nothing else happens.

``python tests/checkpoint/test_fuzz.py COUNT SEED`` tries more of them.
"""

import io
import pickle
import pickletools
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from composer3d.checkpoint.manifest import FILE, FileEntry, Manifest, find_damage, read, write
from composer3d.checkpoint.metadata import METADATA, read_metadata, read_whole, tensor_specs
from composer3d.checkpoint.torchfile import StoredTensor, load_torch
from composer3d.facts.errors import CheckpointError
from tests.checkpoint.assemble import call, name, sound_metadata, text

TARGETS = (
    "torch.Size",
    "torch.float32",
    "torch.distributed.checkpoint.metadata.Metadata",
    "builtins.getattr",
)
# Instructions that are added to pickles.
SPLICES = [
    *(name(path) for path in TARGETS),
    call("os.system", text("touch marker")),
    b"}",
    b"]",
    b")",
    b"(",
    b"0",
    b"b",
    b"R",
    b"\x81",
    b"s",
    b"u",
    b"t",
    b"\x85",
    b"\x86",
    b"q\x00",
    b"h\x00",
    b"N\x94",
    b"Q",
    b"X\xff\xff\xff\x7f",
]


def flipped(content: bytes, draw: random.Random) -> bytes:
    """Change a few bytes, or cut the file."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed[: draw.randrange(len(changed))] if draw.random() < 0.1 else changed)


def rewritten(content: bytes, draw: random.Random) -> bytes:
    """Drop, repeat, move or add a few instructions of a pickle."""
    places = [place for _, _, place in pickletools.genops(content)]
    parts = [
        content[begin:end] for begin, end in zip(places, [*places[1:], len(content)], strict=True)
    ]
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(parts))
        way = draw.randrange(4)
        if way == 0 and len(parts) > 1:
            del parts[at]
        elif way == 1:
            parts.insert(draw.randrange(len(parts)), parts[at])
        elif way == 2:
            parts[at] = draw.choice(parts)
        else:
            parts.insert(at, draw.choice(SPLICES))
    return b"".join(parts)


def try_metadata(folder: Path, draw: random.Random) -> None:
    change = draw.choice((flipped, rewritten))
    (folder / METADATA).write_bytes(change(sound_metadata(folder), draw))
    found = read_metadata(folder)
    for tensor in tensor_specs(found, str(folder)):
        with suppress(ValueError):  # the bytes of the tensors are zeros
            read_whole(folder, found, tensor)


def try_torch_file(folder: Path, draw: random.Random) -> None:
    content_in = {
        "a": torch.ones(3),
        "b": {"c": torch.nn.Parameter(torch.ones(2, 2)), "d": [1, "x", None]},
    }
    file = io.BytesIO()
    torch.save(content_in, file)
    content = file.getvalue()
    if draw.random() < 0.5:
        # Change the pickle, and keep its size.
        begin = content.index(b"\x80\x02")
        room = 1 + next(
            at for code, _, at in pickletools.genops(content[begin:]) if code.name == "STOP"
        )
        end = begin + room
        pickled = rewritten(content[begin:end], draw)[:room]
        content = content[:begin] + pickled + bytes(room - len(pickled)) + content[end:]
    else:
        content = flipped(content, draw)
    (folder / "x.pt").write_bytes(content)
    stack = [load_torch(folder / "x.pt")]
    while stack:
        value = stack.pop()
        if isinstance(value, StoredTensor):
            with suppress(ValueError):  # its bytes do not have their checksum
                assert value.read().shape == value.shape
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def try_manifest(folder: Path, draw: random.Random) -> None:
    files = {"a": FileEntry(1, "0" * 32)}
    write(folder, Manifest(step=3, model={"model.dim": 8}, data={"next_step": 3}, files=files))
    (folder / FILE).write_bytes(flipped((folder / FILE).read_bytes(), draw))
    find_damage(folder, read(folder))


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "metadata": try_metadata,
    "torch file": try_torch_file,
    "manifest": try_manifest,
}


def try_many(folder: Path, kind: str, count: int, seed: int) -> tuple[int, int]:
    """Try ``count`` files of one kind. Any error but a CheckpointError is raised.

    Returns:
        How many files were read, and how many were refused.
    """
    n_read = n_refused = 0
    for number in range(count):
        draw = random.Random(f"{seed} {kind} {number}")
        began = time.process_time()
        try:
            KINDS[kind](folder, draw)
            n_read += 1
            lines: tuple[str, ...] = ()
        except CheckpointError as error:
            n_refused += 1
            lines = error.lines
        assert all(len(line) < 1500 and "\n" not in line for line in lines), lines
        assert time.process_time() - began < 2, number
    return n_read, n_refused


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each call by which Python or torch would unpickle something."""
    seen: list[str] = []
    monkeypatch.setattr(pickle, "load", lambda *args, **options: seen.append("load"))
    monkeypatch.setattr(pickle, "loads", lambda *args, **options: seen.append("loads"))
    monkeypatch.setattr(torch, "load", lambda *args, **options: seen.append("torch.load"))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_randomly_changed_files_are_read_or_refused(
    tmp_path: Path, kind: str, unpickled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    n_read, n_refused = try_many(tmp_path, kind, 400, seed=0)
    assert n_read + n_refused == 400
    assert n_refused > 100
    assert unpickled == []
    assert not (tmp_path / "marker").exists()


if __name__ == "__main__":
    import tempfile

    for kind in KINDS:
        with tempfile.TemporaryDirectory() as place:
            print(kind, try_many(Path(place), kind, int(sys.argv[1]), seed=int(sys.argv[2])))
