"""Files of ``torch.save`` are read as torch reads them; hostile ones are refused."""

import io
import os
import pickle
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.serialization import config as serialization

from composer3d.checkpoint.torchfile import StoredTensor, load_torch, read_tensor
from composer3d.facts.errors import CheckpointError
from tests.checkpoint.assemble import Call, call, dict_of, name, number, text, tuple_of

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16]


class Stranger:
    """A class that torch does not know."""


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_torch(path)
    (line,) = caught.value.lines
    assert line.startswith(f"{path} cannot be read: ")
    assert len(line) < len(str(path)) + 400
    assert "trusted source" not in line
    return line


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.complex64])
def test_every_dtype_and_layout_of_a_tensor_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    base = torch.arange(24).to(dtype).view(4, 6)
    tensors = {
        "whole": base,
        "transposed": base.t(),
        "part": base[1:3, 2:5],
        "step": base[::2],
        "row": base[2],
        "one": base[1, 1],
        "none": torch.empty(0, 3, dtype=dtype),
        "one of one": base.clone()[:1, :1],
    }
    torch.save(tensors, tmp_path / "x.pt")
    read = load_torch(tmp_path / "x.pt")
    for key, tensor in tensors.items():
        assert type(read[key]) is StoredTensor
        assert (read[key].shape, read[key].dtype) == (tuple(tensor.shape), dtype)
        loaded = read[key].read()
        if dtype.itemsize == 1:  # torch.equal does not know all dtypes of one byte
            loaded, tensor = loaded.view(torch.uint8), tensor.view(torch.uint8)
        assert torch.equal(loaded, tensor)


def test_state_of_a_module_is_read(tmp_path: Path) -> None:
    """It has parameters, a state_dict with an attribute, shared storages, and plain values."""
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    tied = module[0].weight
    beside = {"step": 7, "lr": 1e-5, "name": "é", "none": None, "all": [True, (1, 2)]}
    beside["dtype"] = torch.float16
    content = OrderedDict(model=module.state_dict(), parameter=tied, tied=tied.detach(), **beside)
    torch.save(content | {"size": torch.Size([2, 3])}, tmp_path / "x.pt")
    read = load_torch(tmp_path / "x.pt")
    for key, tensor in module.state_dict().items():
        assert torch.equal(read["model"][key].read(), tensor)
    assert torch.equal(read["parameter"].read(), tied)
    assert read["tied"].begin == read["parameter"].begin
    assert {key: read[key] for key in beside} == beside | {"dtype": "torch.float16"}
    assert read["size"] == (2, 3)


def test_a_tensor_within_a_larger_file_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write(b"before it")
        torch.save(torch.arange(5.0), file)
        end = file.tell()
        file.write(b"after it")
    with open(tmp_path / "x", "rb") as file:
        assert read_tensor(file, 9, end - 9).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        for begin, size in ((0, end), (9, end - 10), (9, end), (10, end), (9, 0), (9, 21)):
            with pytest.raises(ValueError, match=r"it is |its list"):
                read_tensor(file, begin, size)
    torch.save([torch.ones(2)] * 2, tmp_path / "x")
    with (
        open(tmp_path / "x", "rb") as file,
        pytest.raises(ValueError, match="something other than one tensor"),
    ):
        read_tensor(file, 0, (tmp_path / "x").stat().st_size)


def test_nothing_is_read_before_it_is_used(tmp_path: Path) -> None:
    """The file has a hole of 1 GB. The numbers are written into it after it was loaded."""
    with torch.serialization.skip_data():
        torch.save({"w": torch.empty(2**28), "v": torch.empty(4)}, tmp_path / "x.pt")
    read = load_torch(tmp_path / "x.pt")
    assert read["w"].shape == (2**28,)
    with open(tmp_path / "x.pt", "r+b") as file:
        file.seek(read["v"].begin)
        file.write(struct.pack("<4f", 1, 2, 3, 4))
    assert read["w"].read()[-1] == 0
    assert read["v"].read().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_flipped_bit_of_a_tensor_is_found_by_its_checksum(
    tmp_path: Path, has_checksums: bool
) -> None:
    """Torch writes checksums, and reads without comparing them."""
    with serialization.patch("save.compute_crc32", has_checksums):  # type: ignore[attr-defined]
        torch.save({"w": torch.zeros(4), "v": torch.ones(2)}, tmp_path / "x.pt")
    begin = load_torch(tmp_path / "x.pt")["w"].begin
    with open(tmp_path / "x.pt", "r+b") as file:
        file.seek(begin + 3)
        file.write(b"\x40")
    assert torch.load(tmp_path / "x.pt")["w"][0] == 2
    found = load_torch(tmp_path / "x.pt")
    assert found["v"].read().tolist() == [1, 1]
    if has_checksums:
        with pytest.raises(ValueError, match="do not have their checksum; copy the file again"):
            found["w"].read()
    else:
        assert found["w"].read()[0] == 2


def test_a_changed_pickle_is_found_by_its_checksum(tmp_path: Path) -> None:
    torch.save({"name": torch.ones(2)}, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(content.replace(b"name", b"nbme"))
    assert "the bytes of its data.pkl do not have their checksum" in refused(tmp_path / "x.pt")


def test_changes_in_memory_do_not_reach_the_file(tmp_path: Path) -> None:
    torch.save(torch.zeros(3), tmp_path / "x.pt")
    load_torch(tmp_path / "x.pt").read().add_(1)
    assert load_torch(tmp_path / "x.pt").read().tolist() == [0.0, 0.0, 0.0]


# Files that are something else.


@pytest.mark.parametrize("path", ["posix.system", f"{__name__}.Stranger"])
def test_another_class_is_refused_and_not_created(tmp_path: Path, path: str) -> None:
    marker = tmp_path / "marker"
    evil = Call(os.system, f"touch {marker}") if path == "posix.system" else Stranger()
    torch.save({"w": torch.ones(2), "extra": evil}, tmp_path / "x.pt")
    assert f"it names '{path}', which is refused: nothing of it was run" in refused(
        tmp_path / "x.pt"
    )
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", [None, b"", b"PK", b"junk", b"PK\x03\x04junk", b"PK\x05\x06" + bytes(18)]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.pt").write_bytes(content)
    assert str(tmp_path / "x.pt") in refused(tmp_path / "x.pt")


@pytest.mark.parametrize("kind", ["pickles", "tar"])
def test_error_for_formats_before_torch_1_6_has_a_way_out(tmp_path: Path, kind: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    if kind == "tar":
        (tmp_path / "x.pt").write_bytes(bytes(257) + b"ustar" + bytes(10_000))
    assert refused(tmp_path / "x.pt").endswith(
        "if you trust it, load it with torch.load and write it with torch.save"
    )


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    assert "is a named pipe, not a plain file" in refused(tmp_path / "x.pt")


# Files of torch.save that contradict themselves.


def archive(path: Path, pickled: bytes, method: int = zipfile.ZIP_STORED, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("x/data.pkl", pickled)
        for key, content in records.items():
            file.writestr(f"x/data/{key[1:]}", content)
    return path


def rebuilt(storage: bytes, *arguments: bytes) -> bytes:
    return call("torch._utils._rebuild_tensor_v2", storage, *arguments, b"\x89", b"N")


def tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    offset: int = 0,
    count: int = 4,
    key: str = "0",
) -> bytes:
    kind = name("torch.FloatStorage")
    storage = tuple_of(text("storage"), kind, text(key), text("cpu"), number(count)) + b"Q"
    sizes = tuple_of(*map(number, shape)), tuple_of(*map(number, stride))
    return rebuilt(storage, number(offset), *sizes)


ROOM = bytes(16)  # four numbers
BEYOND = "in a storage of 4 elements"
NO_SHAPE = "a shape that no tensor has"
NO_STRIDES = "strides or an offset that no tensor has"
NO_CALL = "in a way that torch.save does not"
WRONG: dict[str, tuple[bytes, str]] = {
    "beyond by its offset": (tensor((4,), (1,), offset=1), BEYOND),
    "beyond by its strides": (tensor((2, 2), (3, 1)), BEYOND),
    "one number without end": (tensor((10**15,), (0,)), BEYOND),
    "no numbers far away": (tensor((0,), (1,), offset=-1), NO_STRIDES),
    "strides of other dimensions": (tensor((2, 2), (1,)), NO_STRIDES),
    "sizes beyond all": (tensor((2**62,), (1,)), NO_SHAPE),
    "sizes that multiply beyond all": (tensor((2**61, 2**61), (1, 1)), BEYOND),
    "a storage below its bytes": (tensor((2,), (1,), count=2), "declares a storage of 2"),
    "a storage that is not there": (
        tensor((4,), (1,), key="1"),
        "it has no 'data/1', to which it refers",
    ),
    "a storage elsewhere": (tensor((4,), (1,), key="../../x"), "it has no 'data/../../x'"),
    "no storage": (
        rebuilt(b"N", number(0), tuple_of(), tuple_of()),
        "a tensor without a storage",
    ),
    "a storage alone": (
        tuple_of(text("storage"), number(1)) + b"Q",
        "a storage that belongs to no tensor",
    ),
    "another call": (call("torch.Size", tuple_of(text("a"))), NO_SHAPE),
    "a parameter of itself": (
        b"]q\x00" + name("torch._utils._rebuild_parameter") + b"h\x00\x85R",
        NO_CALL,
    ),
    "a Storage called": (call("torch.FloatStorage", number(10**12)), NO_CALL),
    "dict with calls": (call("collections.OrderedDict", tuple_of(number(1))), NO_CALL),
    "keys that are objects": (
        b"}" + call("collections.OrderedDict") + b"Ns",
        "keys that are neither texts nor integers",
    ),
    "deep": (b"N" + b"\x85" * 65, "it nests deeper than 64"),
    "doubled": (b")" + b"q\x00h\x00\x86" * 30, "or holds more than 200,000"),
}


@pytest.mark.parametrize(("program", "message"), WRONG.values(), ids=WRONG)
def test_false_declarations_of_a_pickle_are_refused(
    tmp_path: Path, program: bytes, message: str
) -> None:
    began = time.process_time()
    assert message in refused(archive(tmp_path / "x.pt", b"\x80\x02" + program + b".", _0=ROOM))
    assert time.process_time() - began < 5


def test_archive_assembled_by_hand_is_sound(tmp_path: Path) -> None:
    archive(
        tmp_path / "x.pt",
        b"\x80\x02" + dict_of(w=tensor((2, 2), (2, 1))) + b".",
        _0=struct.pack("<4f", 1, 2, 3, 4),
    )
    assert load_torch(tmp_path / "x.pt")["w"].read().tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("order", [b"big", b"", b"little ", b"little"])
def test_another_order_of_bytes_is_refused(tmp_path: Path, order: bytes) -> None:
    archive(tmp_path / "x.pt", pickle.dumps({"a": 1}, 2))
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as file:
        file.writestr("x/byteorder", order)
    if order == b"little":
        assert load_torch(tmp_path / "x.pt") == {"a": 1}
    else:
        assert "its numbers are not little endian" in refused(tmp_path / "x.pt")


def test_a_repeated_tensor_is_made_once_and_counts_each_time(tmp_path: Path) -> None:
    def written(times: int, dims: int) -> Path:
        one = tensor((1,) * dims, (1,) * dims) + b"q\x00"
        program = b"\x80\x02](" + one + b"h\x00" * (times - 1) + b"e."
        return archive(tmp_path / "x.pt", program, _0=ROOM)

    found = load_torch(written(1000, 60))
    assert len({id(each) for each in found}) == 1
    assert "holds more than 200,000" in refused(written(4000, 60))


def test_a_part_that_is_no_tensor_is_not_walked_through(tmp_path: Path) -> None:
    """The outermost value is checked first: it is no tensor."""
    archive(tmp_path / "x.pt", b"\x80\x02" + b")" + b"q\x00h\x00\x86" * 30 + b".", _0=ROOM)
    with (
        open(tmp_path / "x.pt", "rb") as file,
        pytest.raises(ValueError, match="something other than one tensor"),
    ):
        read_tensor(file, 0, (tmp_path / "x.pt").stat().st_size)


def test_a_compressed_pickle_is_not_unpacked(tmp_path: Path) -> None:
    archive(tmp_path / "x.pt", b"\x80\x02" + bytes(10**8), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.pt").stat().st_size < 10**6
    assert "its 'x/data.pkl' is compressed, which torch.save never does" in refused(
        tmp_path / "x.pt"
    )


def patched(path: Path, change: Callable[[bytearray, int], object]) -> Path:
    """Write a sound archive, changed.

    Args:
        change: gets the bytes of the archive, and the offset of its list of records.
    """
    archive(path, pickle.dumps({"a": 1}, 2), _0=ROOM)
    content = bytearray(path.read_bytes())
    change(content, struct.unpack("<I", content[-6:-2])[0])
    path.write_bytes(content)
    return path


def put(form: str, *values: Any, at: int) -> Callable[[bytearray, int], object]:
    return lambda content, begin: struct.pack_into(
        form, content, begin + at if at >= 0 else len(content) + at, *values
    )


NO_END = "it is cut off, or something was added to it"
DAMAGED_LIST = "its list of records is damaged"
WRONG_LISTS: list[tuple[Callable[[bytearray, int], object], str]] = [
    (
        put("<II", 10**9, 10**9, at=20),
        "its 'x/data.pkl' has 1,000,000,000 bytes, more than the file",
    ),
    (put("<II", 0xFFFFFFFF, 0xFFFFFFFF, at=20), "has 0 bytes|more than the file|cut off"),
    (put("<I", 10**9, at=42), "more than the file"),
    (put("<I", 1, at=42), "does not lie within it"),
    (put("<4s", b"PK\x01\x03", at=0), DAMAGED_LIST),
    (put("<I", 10**9, at=-10), "it has|its list of records has 1,000,000,000 bytes|cut off"),
    (put("<II", 0xFFFFFFFF, 0xFFFFFFFF, at=-10), "the end of its archive is damaged|cut off"),
    (lambda content, begin: content.extend(b"more"), NO_END),
    (lambda content, begin: content.pop(), NO_END),
]


@pytest.mark.parametrize(("change", "message"), WRONG_LISTS)
def test_a_false_list_of_records_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    line = refused(patched(tmp_path / "x.pt", change))
    assert any(each in line for each in message.split("|")), line


@pytest.mark.parametrize(
    "change",
    [put("<H", 5, at=-2), lambda content, begin: content.__setitem__(slice(30, 40), b"y" * 10)],
    ids=["length of the comment", "name in the header of a record"],
)
def test_what_is_not_used_of_an_archive_may_be_anything(tmp_path: Path, change: Any) -> None:
    assert load_torch(patched(tmp_path / "x.pt", change)) == {"a": 1}


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("x/data.pkl", pickle.dumps(1, 2))
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("x/data.pkl", pickle.dumps(2, 2))
    (tmp_path / "x.pt").write_bytes(content.getvalue())
    assert "its list of records is damaged" in refused(tmp_path / "x.pt")


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("a/b/data.pkl", b"N.")
    assert "an archive without a data.pkl" in refused(tmp_path / "x.pt")
