"""Sound files, changed at random: each is read or refused, and nothing else happens.

``bash tools/prove/run fuzz`` tries thousands of changes of whole checkpoints.
"""

import io
import pickle
import pickletools
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config as serialization

from composer3d.checkpoint.manifest import FILE, FileEntry, Manifest, find_damage, read, write
from composer3d.checkpoint.metadata import METADATA, read_metadata, read_whole, tensor_specs
from composer3d.checkpoint.torchfile import StoredTensor, load_torch
from composer3d.facts.errors import CheckpointError
from tests.checkpoint.assemble import DATA, DATA_FILE, PLACE, SOUND, call, name, text

TARGETS = ("torch.Size", "torch.float32", f"{PLACE}.Metadata", "builtins.getattr")
# Instructions that are added to pickles.
SPLICES = [
    *(name(path) for path in TARGETS),
    call("os.system", text("touch marker")),
    *(b"}", b"]", b")", b"(", b"0", b"b", b"R", b"\x81", b"s", b"u", b"t", b"\x85", b"\x86"),
    *(b"q\x00", b"h\x00", b"N\x94", b"Q", b"X\xff\xff\xff\x7f"),
]

WAYS = ["drop", "repeat", "replace", "add"]


def instructions(program: bytes) -> list[bytes]:
    places = [place for _, _, place in pickletools.genops(program)]
    ends = [*places[1:], len(program)]
    return [program[begin:end] for begin, end in zip(places, ends, strict=True)]


@st.composite
def flipped(draw: st.DrawFn, content: bytes) -> bytes:
    """Change a few bytes, or cut the file."""
    changed = bytearray(content)
    places = st.integers(0, len(content) - 1)
    for at in draw(st.lists(places, min_size=1, max_size=8)):
        changed[at] = draw(st.integers(0, 255))
    is_cut = draw(st.integers(0, 9)) == 0
    return bytes(changed[: draw(places)] if is_cut else changed)


@st.composite
def rewritten(draw: st.DrawFn, program: bytes) -> bytes:
    """Drop, repeat, move or add a few instructions of a pickle."""
    parts = instructions(program)
    for way in draw(st.lists(st.sampled_from(WAYS), min_size=1)):
        at = draw(st.integers(0, len(parts) - 1))
        if way == "drop" and len(parts) > 1:
            del parts[at]
        elif way == "repeat":
            parts.insert(draw(st.integers(0, len(parts) - 1)), parts[at])
        elif way == "replace":
            parts[at] = draw(st.sampled_from(parts))
        else:
            parts.insert(at, draw(st.sampled_from(SPLICES)))
    return b"".join(parts)


def torch_file(*, has_checksums: bool) -> bytes:
    file = io.BytesIO()
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    with serialization.patch("save.compute_crc32", has_checksums):
        torch.save({"a": torch.ones(3), "b": {"c": parameter, "d": [1, "x", None]}}, file)
    return file.getvalue()


# Without checksums, a changed pickle is read.
TORCH_FILE = torch_file(has_checksums=False)
with zipfile.ZipFile(io.BytesIO(torch_file(has_checksums=True))) as sound:
    PROGRAM = sound.read("archive/data.pkl")


def with_program(changed: bytes) -> bytes:
    """Put a changed pickle into the torch file, whose size stays as it is."""
    return TORCH_FILE.replace(PROGRAM, changed[: len(PROGRAM)].ljust(len(PROGRAM), b"\0"))


def read_checkpoint(folder: Path, content: bytes) -> None:
    (folder / DATA_FILE).write_bytes(DATA)
    (folder / METADATA).write_bytes(content)
    found = read_metadata(folder)
    for tensor in tensor_specs(found, str(folder)):
        with suppress(ValueError):  # the bytes of the tensors are zeros
            read_whole(folder, found, tensor)


def read_torch_file(folder: Path, content: bytes) -> None:
    (folder / "x.pt").write_bytes(content)
    stack = [load_torch(folder / "x.pt")]
    while stack:
        value = stack.pop()
        if isinstance(value, StoredTensor):
            with suppress(ValueError):  # its bytes are not those of its dtype
                assert value.read().shape == value.shape
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value


MANIFEST = Manifest(
    step=3, model={"model.dim": 8}, data={"next_step": 3}, files={"a": FileEntry(1, "0" * 32)}
)


def read_manifest(folder: Path, content: bytes) -> None:
    (folder / FILE).write_bytes(content)
    find_damage(folder, read(folder))


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each call by which Python or torch would unpickle something."""
    seen: list[str] = []
    for module, name_of in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        path = f"{module.__name__}.{name_of}"
        monkeypatch.setattr(module, name_of, lambda *_, path=path, **__: seen.append(path))
    return seen


@pytest.mark.parametrize("kind", ["metadata", "torch file", "manifest"])
def test_randomly_changed_files_are_read_or_refused(
    tmp_path: Path, kind: str, unpickled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, MANIFEST)
    sound = (tmp_path / FILE).read_bytes()
    contents, attempt = {
        "metadata": (flipped(SOUND) | rewritten(SOUND), read_checkpoint),
        "torch file": (
            flipped(TORCH_FILE) | rewritten(PROGRAM).map(with_program),
            read_torch_file,
        ),
        "manifest": (flipped(sound), read_manifest),
    }[kind]
    n_refused = 0

    # The same files in every run, so that a machine cannot be unlucky with ``n_refused``.
    @settings(max_examples=120, derandomize=True)
    @given(content=contents)
    def change(content: bytes) -> None:
        nonlocal n_refused
        began = time.process_time()
        lines: tuple[str, ...] = ()
        try:
            attempt(tmp_path, content)
        except CheckpointError as error:
            n_refused += 1
            lines = error.lines
        assert all(len(line) < 1500 and "\n" not in line for line in lines), lines
        assert time.process_time() - began < 2

    change()
    assert n_refused > 30
    assert unpickled == []
    assert not (tmp_path / "marker").exists()
