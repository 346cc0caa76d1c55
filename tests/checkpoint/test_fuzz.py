"""Files that chance has made of sound ones: refused or read, and never anything else. ``many`` runs more by hand."""

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

from composer3d.checkpoint.manifest import FILE, Manifest, damage, read, write
from composer3d.checkpoint.metadata import METADATA, read_metadata, read_whole, tensors_of
from composer3d.checkpoint.torchfile import Stored, load_torch
from composer3d.spec.errors import CheckpointError
from tests.checkpoint.assemble import call, name, one, text

TARGETS = (
    "torch.Size",
    "torch.float32",
    "torch.distributed.checkpoint.metadata.Metadata",
    "builtins.getattr",
)
SPLICES = [
    *(name(path) for path in TARGETS),
    call("os.system", text("touch marker")),
    b"}",
    b"]",
    b")",
    b"(",
    b"0",
    b"b",
]
SPLICES += [
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
    """A few bytes are others, or the file is shorter."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed[: draw.randrange(len(changed))] if draw.random() < 0.1 else changed)


def rewritten(content: bytes, draw: random.Random) -> bytes:
    """A few instructions of a pickle are dropped, doubled, moved or new."""
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


def of_metadata(folder: Path, draw: random.Random) -> None:
    change = draw.choice((flipped, rewritten))
    (folder / METADATA).write_bytes(change(one(folder), draw))
    found = read_metadata(folder)
    for tensor in tensors_of(found, str(folder)):
        with suppress(ValueError):  # its bytes are zeros
            read_whole(folder, found, tensor)


def of_torch_file(folder: Path, draw: random.Random) -> None:
    held = {
        "a": torch.ones(3),
        "b": {"c": torch.nn.Parameter(torch.ones(2, 2)), "d": [1, "x", None]},
    }
    file = io.BytesIO()
    torch.save(held, file)
    content = file.getvalue()
    if draw.random() < 0.5:
        begin = content.index(b"\x80\x02")
        end = (
            begin
            + next(
                place
                for code, _, place in pickletools.genops(content[begin:])
                if code.name == "STOP"
            )
            + 1
        )
        room = end - begin
        pickled = rewritten(content[begin:end], draw)[:room]
        content = content[:begin] + pickled + bytes(room - len(pickled)) + content[end:]
    else:
        content = flipped(content, draw)
    (folder / "x.pt").write_bytes(content)
    stack = [load_torch(folder / "x.pt")]
    while stack:
        value = stack.pop()
        if isinstance(value, Stored):
            assert value.read().shape == value.shape
        stack += (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )


def of_manifest(folder: Path, draw: random.Random) -> None:
    write(
        folder,
        Manifest(step=3, model={"model.dim": 8}, data={"next_step": 3}, files={"a": (1, "0" * 32)}),
    )
    (folder / FILE).write_bytes(flipped((folder / FILE).read_bytes(), draw))
    damage(folder, read(folder))


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "metadata": of_metadata,
    "torch file": of_torch_file,
    "manifest": of_manifest,
}


def many(folder: Path, kind: str, count: int, seed: int) -> tuple[int, int]:
    """How many of ``count`` files were read and refused. Any other error than a CheckpointError goes through."""
    results = [0, 0]
    for number in range(count):
        draw = random.Random(f"{seed} {kind} {number}")
        began = time.process_time()
        try:
            KINDS[kind](folder, draw)
            results[0] += 1
        except CheckpointError as error:
            results[1] += 1
            said = error.lines
        else:
            said = ()
        assert all(len(line) < 1500 and "\n" not in line for line in said), said
        assert time.process_time() - began < 2, number
    return results[0], results[1]


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever Python or torch would unpickle by itself."""
    seen: list[str] = []
    monkeypatch.setattr(pickle, "load", lambda *given, **more: seen.append("load"))
    monkeypatch.setattr(pickle, "loads", lambda *given, **more: seen.append("loads"))
    monkeypatch.setattr(torch, "load", lambda *given, **more: seen.append("torch.load"))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_what_chance_makes_is_refused_or_read(
    tmp_path: Path, kind: str, unpickled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, bad = many(tmp_path, kind, 400, seed=0)
    assert whole + bad == 400
    assert bad > 100
    assert unpickled == []
    assert not (tmp_path / "marker").exists()


if __name__ == "__main__":
    import tempfile

    for kind in KINDS:
        with tempfile.TemporaryDirectory() as place:
            print(kind, many(Path(place), kind, int(sys.argv[1]), seed=int(sys.argv[2])))
