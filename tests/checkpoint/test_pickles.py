"""No code from a stranger: what is not data is refused by its name, and nothing of it runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composer3d.checkpoint.pickles import METADATA, SafeReader, load_torch, read_metadata, tensors_of
from composer3d.errors import CheckpointError


class Call:
    """Pickled, it calls ``function(*arguments)`` wherever it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


class Stranger:
    """A class that torch does not know."""


def metadata(**more: Any) -> Metadata:
    size = torch.Size([2])
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float64), size, [ChunkStorageMetadata(size, size)])
    storage = {MetadataIndex("w", size, 0): _StorageInfo("__0_0.distcp", 0, 8)}
    return Metadata({"w": entry}, storage_data=storage, **more)


def written(folder: Path, content: Any) -> Path:
    (folder / METADATA).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_metadata(folder)
    (line,) = caught.value.lines
    assert line.startswith(f"{folder / METADATA} cannot be read")
    return line


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": {"c": torch.zeros(())}, "n": 5}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    finally:
        dist.destroy_process_group()
    read = read_metadata(tmp_path)
    assert isinstance(read.state_dict_metadata.pop("n"), BytesStorageMetadata)
    assert tensors_of(read, "x") == {"a": ((2, 3), "bfloat16"), "b.c": ((), "float32")}


def test_strides_of_a_later_torch_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = TensorProperties(dtype=torch.float16).__getstate__()
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*state[:5], (1,)))
    read = read_metadata(written(tmp_path, metadata()))
    assert tensors_of(read, "x") == {"w": ((2,), "float16")}


@pytest.mark.parametrize(
    "place", [lambda evil: evil, lambda evil: metadata(planner_data=evil), lambda evil: StorageMeta(evil)]
)
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "posix.system"), (eval, "builtins.eval"), (torch.load, "torch.serialization.load")],
)
def test_a_call_is_refused_and_not_made(tmp_path: Path, place: Any, function: Any, name: str) -> None:
    marker = tmp_path / "marker"
    argument = f"touch {marker}" if function is os.system else f"__import__('pathlib').Path({str(marker)!r}).touch()"
    line = refused(written(tmp_path, place(Call(function, argument))))
    assert f"it names {name}, which is refused: nothing of it was run" in line
    assert not marker.exists()
    if function is not torch.load:  # and the marker can appear
        pickle.loads((tmp_path / METADATA).read_bytes())
        assert marker.exists()


@pytest.mark.parametrize(
    "module_and_name", ["os\nsystem", "torch\nload", "torch\nTensor", "torch\nos", "torch.serialization\nos.system"]
)
def test_names_outside_the_list_are_refused(tmp_path: Path, module_and_name: str) -> None:
    assert module_and_name.replace("\n", ".") in refused(written(tmp_path, f"c{module_and_name}\n.".encode()))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "EOFError"),
        (pickle.dumps(metadata())[:-50], "cannot be read: UnpicklingError"),
        (pickle.dumps([1]), "AttributeError"),
        (Metadata({}, storage_data={1: _StorageInfo("../other/__0_0.distcp", 0, 8)}), "it names the files ['../other"),
        (Metadata({}, storage_data={1: _StorageInfo("/etc/passwd", 0, 8)}), "it names the files ['/etc/passwd"),
        (StorageMeta(), "AttributeError"),
    ],
    ids=["empty", "torn", "list", "outside", "absolute", "class"],
)
def test_what_is_no_metadata_is_said(tmp_path: Path, content: Any, said: str) -> None:
    assert said in refused(written(tmp_path, content))


def test_objects_that_torch_would_unpickle_are_named() -> None:
    read = metadata()
    read.state_dict_metadata["extra"] = BytesStorageMetadata()
    with pytest.raises(CheckpointError) as caught:
        tensors_of(read, "x")
    assert caught.value.lines == ("x holds objects that are no tensors, which are not loaded: extra",)


def test_torch_file_of_tensors_is_mapped(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.arange(3.0)}, "step": 7}, tmp_path / "x.pt")
    read = load_torch(tmp_path / "x.pt")
    assert read["model"]["w"].tolist() == [0.0, 1.0, 2.0]
    assert read["step"] == 7


@pytest.mark.parametrize("name", ["posix.system", f"{__name__}.Stranger"])
def test_torch_file_that_names_another_class_is_refused(tmp_path: Path, name: str) -> None:
    marker, path = tmp_path / "marker", tmp_path / "x.pt"
    evil = Call(os.system, f"touch {marker}") if name == "posix.system" else Stranger()
    torch.save({"w": torch.ones(2), "more": evil}, path)
    with pytest.raises(CheckpointError) as caught:
        load_torch(path)
    assert caught.value.lines == (
        f"{path} cannot be read: it holds an object of {name}, which is refused: no code of it was run",
    )
    assert not marker.exists()


@pytest.mark.parametrize("content", [None, b"", b"junk", b"PK\x03\x04junk"], ids=["absent", "empty", "junk", "torn"])
def test_what_is_no_torch_file_is_said(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_torch(tmp_path / "x.pt")
    (line,) = caught.value.lines
    assert line.startswith(f"{tmp_path / 'x.pt'} cannot be read: ")
    assert "trust" not in line


def test_reader_reads_no_metadata_again(tmp_path: Path) -> None:
    """What was read once is what torch gets, whatever the file has become since."""
    read = read_metadata(written(tmp_path, metadata()))
    written(tmp_path, Call(os.system, f"touch {tmp_path / 'marker'}"))
    assert SafeReader(tmp_path, read).read_metadata() is read
    assert not (tmp_path / "marker").exists()


def test_a_pickle_replaces_no_method(tmp_path: Path) -> None:
    path_class = f"c{type(tmp_path).__module__}\nPosixPath\n".encode()
    before = Path.rename
    refused(written(tmp_path, path_class + b"N}S'rename'\n" + path_class + b"s\x86b."))
    assert type(tmp_path).rename is before
