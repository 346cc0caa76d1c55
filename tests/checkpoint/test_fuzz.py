"""Sound files, changed at random: each is read or refused, and nothing else happens.

This is a fixed slice, against the readers alone. ``bash tools/prove/run fuzz`` changes thousands of
whole checkpoints and folders, and gives them to the commands.
"""

import io
import pickle
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config as serialization

from composer3d.checkpoint.metadata import METADATA, read_metadata, read_whole, tensor_specs
from composer3d.checkpoint.torchfile import StoredTensor, load_torch
from composer3d.facts.errors import CheckpointError
from tests.checkpoint.assemble import DATA, DATA_FILE, SOUND
from tools.prove.fuzz.checkpoints import _metadata_program
from tools.prove.fuzz.mutate import flip


def change_metadata(folder: Path, draw: random.Random) -> None:
    (folder / DATA_FILE).write_bytes(DATA)
    (folder / METADATA).write_bytes(SOUND)
    if draw.random() < 0.5:
        (folder / METADATA).write_bytes(flip(SOUND, draw))
    else:
        _metadata_program(folder, folder, draw)


def read_checkpoint(folder: Path) -> None:
    found = read_metadata(folder)
    for tensor in tensor_specs(found, str(folder)):
        with suppress(ValueError):  # the bytes of the tensors are zeros
            read_whole(folder, found, tensor)


def make_torch_file() -> bytes:
    """Without checksums, so that a changed pickle is read."""
    file = io.BytesIO()
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    with serialization.patch("save.compute_crc32", False):
        torch.save({"a": torch.ones(3), "b": {"c": parameter, "d": [1, "x", None]}}, file)
    return file.getvalue()


TORCH_FILE = make_torch_file()
PICKLE = TORCH_FILE.index(b"\x80\x02")
PLACES = (None, (PICKLE, TORCH_FILE.index(b"PK", PICKLE)))  # the file, and the pickle in it


def change_torch_file(folder: Path, draw: random.Random) -> None:
    (folder / "x.pt").write_bytes(flip(TORCH_FILE, draw, within=draw.choice(PLACES)))


def read_torch_file(folder: Path) -> None:
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


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each call by which Python or torch would unpickle something."""
    seen: list[str] = []
    for module, name_of in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        path = f"{module.__name__}.{name_of}"
        monkeypatch.setattr(module, name_of, lambda *_, path=path, **__: seen.append(path))
    return seen


@pytest.mark.parametrize(
    ("change", "read"),
    [(change_metadata, read_checkpoint), (change_torch_file, read_torch_file)],
    ids=["metadata", "torch file"],
)
def test_randomly_changed_files_are_read_or_refused(
    tmp_path: Path,
    change: Callable[[Path, random.Random], None],
    read: Callable[[Path], None],
    unpickled: list[str],
) -> None:
    folder, outside = tmp_path / "case" / "evil", tmp_path / "outside"
    folder.mkdir(parents=True)
    outside.mkdir()  # for the markers of programs
    draw = random.Random(20261127)
    refusals: list[tuple[str, ...]] = []
    began = time.process_time()
    for _ in range(200):
        change(folder, draw)
        try:
            read(folder)
        except CheckpointError as error:
            refusals.append(error.lines)
    assert time.process_time() - began < 20
    assert 50 < len(refusals) < 200
    for lines in refusals:
        assert all(len(line) < 1500 and "\n" not in line for line in lines), lines
    assert unpickled == []
    assert list(outside.iterdir()) == []
