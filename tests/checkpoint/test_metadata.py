"""A stranger's ``.metadata``: nothing in it runs, and all that it claims is checked."""

import gc
import io
import os
import pickle
import resource
import time
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composer3d.checkpoint import metadata as metadata_module
from composer3d.checkpoint import pickles
from composer3d.checkpoint.metadata import (
    METADATA,
    METADATA_LIMIT,
    fills,
    pack_metadata,
    read_metadata,
    read_parts,
    read_whole,
    tensor_specs,
    unpack_metadata,
)
from composer3d.facts.box import Box
from composer3d.facts.errors import CheckpointError
from composer3d.runtime.torch_private import StorageInfo
from tests.checkpoint import assemble as asm
from tests.checkpoint.assemble import (
    DATA,
    DATA_FILE,
    HALVES,
    PLACE,
    SOUND,
    STORED,
    Call,
    call,
    chunk,
    colliding_ints,
    dict_of,
    entry,
    index,
    info,
    metadata,
    metadata_of_w,
    name,
    number,
    object_of,
    text,
    tuple_of,
)
from tests.checkpoint.odd_files import NO_PLAIN_FILE, replace_by


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def written(folder: Path, content: bytes = SOUND) -> Path:
    """Write metadata, and the file that holds the parts of SOUND."""
    (folder / DATA_FILE).write_bytes(DATA)
    (folder / METADATA).write_bytes(content)
    return folder


def specs(folder: Path) -> dict[str, Any]:
    return tensor_specs(read_metadata(folder), "x")


SOUND_SPECS = {"w": ((2, 3), "float32")}


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_metadata(folder)
    (line,) = caught.value.lines
    assert line.startswith(f"{folder / METADATA} cannot be read: ")
    assert len(line) < 1000
    return line


STATE = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(()), "c": torch.empty(0, 3)}


def save(folder: Path, **more: Any) -> Path:
    dcp.save({**STATE, **more}, storage_writer=dcp.FileSystemWriter(folder))
    return folder


def test_checkpoint_of_torch_is_read(tmp_path: Path, alone: None) -> None:
    read = read_metadata(save(tmp_path, n=5))
    assert isinstance(read.state_dict_metadata.pop("n"), BytesStorageMetadata)
    assert tensor_specs(read, "x") == {
        "a": ((2, 3), "bfloat16"),
        "b": ((), "float32"),
        "c": ((0, 3), "float32"),
    }
    for tensor, value in STATE.items():
        assert torch.equal(read_whole(tmp_path, read, tensor), value)
    # The metadata that were checked are used, even if the file has changed since.
    (tmp_path / METADATA).write_bytes(b"junk")
    target = {tensor: torch.full_like(value, 7) for tensor, value in STATE.items()}
    read_parts(tmp_path, read, target)
    assert all(torch.equal(target[tensor], value) for tensor, value in STATE.items())


@pytest.mark.parametrize("names", ["abc", "cba"])
def test_parts_are_read_in_their_order_on_disk(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    begins: list[int] = []
    read_tensor = metadata_module.read_tensor

    def record(file: BinaryIO, begin: int, length: int) -> torch.Tensor:
        begins.append(begin)
        return read_tensor(file, begin, length)

    monkeypatch.setattr(metadata_module, "read_tensor", record)
    read = read_metadata(save(tmp_path))
    read_parts(tmp_path, read, {name: torch.full_like(STATE[name], 7) for name in names})
    assert len(begins) >= 2
    assert begins == sorted(begins)


def tiled_metadata() -> Metadata:
    """A matrix of 6 x 4 in parts of 2 x 2, a scalar, and a matrix without elements."""
    corners = list(product((0, 2, 4), (0, 2)))
    chunks = {
        "w": [ChunkStorageMetadata(torch.Size(at), torch.Size((2, 2))) for at in corners],
        "s": [ChunkStorageMetadata(torch.Size(()), torch.Size(()))],
        "e": [ChunkStorageMetadata(torch.Size((0, 3)), torch.Size((0, 3)))],
    }
    shapes = {"w": (6, 4), "s": (), "e": (0, 3)}
    properties = TensorProperties(torch.bfloat16)
    return Metadata(
        {
            name: TensorStorageMetadata(properties, torch.Size(shapes[name]), parts)
            for name, parts in chunks.items()
        },
        storage_data={
            f"{name}:{tuple(part.offsets)}": StorageInfo(f"__{number % 2}_0.distcp", number, 1)
            for name, parts in chunks.items()
            for number, part in enumerate(parts)
        },
        storage_meta=StorageMeta(),
    )


@pytest.mark.parametrize(
    ("box", "corners"),
    [
        (Box((0, 0), (6, 4)), list(product((0, 2, 4), (0, 2)))),
        (Box((1, 0), (2, 2)), [(0, 0), (2, 0)]),
        (Box((2, 2), (2, 2)), [(2, 2)]),
        (Box((3, 1), (1, 2)), [(2, 0), (2, 2)]),
        (Box((6, 0), (0, 4)), []),
    ],
)
def test_a_rank_keeps_the_parts_of_its_own_elements(
    box: Box, corners: list[tuple[int, int]]
) -> None:
    whole = tiled_metadata()
    names = ["e", "s", "w"]
    boxes = {"w": box, "s": Box((), ()), "e": Box((0, 0), (0, 3))}
    own = unpack_metadata(pickle.loads(pickle.dumps(pack_metadata(whole, names))), boxes)
    assert tensor_specs(own, "x") == tensor_specs(whole, "x")
    (entry_w, entry_s) = own.state_dict_metadata["w"], own.state_dict_metadata["s"]
    assert isinstance(entry_w, TensorStorageMetadata)
    assert [tuple(part.offsets) for part in entry_w.chunks] == corners
    assert entry_s == whole.state_dict_metadata["s"]
    kept = {key: whole.storage_data[key] for key in [*(f"w:{at}" for at in corners), "s:()"]}
    assert own.storage_data == kept


def test_garbage_collector_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/runtime`` has the rest of ``collector.paused``."""
    seen: list[bool] = []
    fill = metadata_module.fills
    noted = lambda *args: seen.append(gc.isenabled()) or fill(*args)  # noqa: E731
    monkeypatch.setattr(metadata_module, "fills", noted)
    assert gc.isenabled()
    read_metadata(written(tmp_path))
    assert gc.isenabled()
    assert seen == [False]


def test_strides_of_a_later_torch_are_ignored(tmp_path: Path) -> None:
    # Each of the attacks below differs from this one in one detail.
    assert specs(written(tmp_path)) == SOUND_SPECS
    strides = tuple_of(number(3), number(1))
    later = SOUND.replace(asm.properties(), asm.properties(strides))
    assert len(later) > len(SOUND)
    assert specs(written(tmp_path, later)) == SOUND_SPECS
    too_many = SOUND.replace(asm.properties(), asm.properties(tuple_of(), tuple_of()))
    assert "'w' has no properties of a tensor" in refused(written(tmp_path, too_many))


def test_an_enum_may_be_pickled_by_its_name(tmp_path: Path) -> None:
    """Python 3.11.2 does so. Nothing is looked up."""
    enum = f"{PLACE}._MEM_FORMAT_ENCODING"
    by_name = call("builtins.getattr", name(enum), text("TORCH_CONTIGUOUS_FORMAT"))
    whole = SOUND.replace(call(enum, number(0)), by_name)
    assert by_name in whole
    assert specs(written(tmp_path, whole)) == SOUND_SPECS


# Attacks that run code in torch. ``tools/prove/hostile/checkpoints.py`` has more of them.


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def program(marker: Path) -> bytes:
    """Return a file of ``torch.save`` that makes ``marker`` if torch unpickles it."""
    return saved(Call(os.system, f"touch {marker}"))


def test_reader_refuses_an_object(tmp_path: Path) -> None:
    """Should one ever get past the metadata."""
    marker = tmp_path / "marker"
    (tmp_path / DATA_FILE).write_bytes(program(marker))
    place = StorageInfo(DATA_FILE, 0, len(program(marker)))
    read = Metadata({"w": BytesStorageMetadata()}, storage_data={"w:None": place})
    with pytest.raises(CheckpointError, match="'w' is an object, and only tensors are loaded"):
        read_parts(tmp_path, read, {"w": torch.ones(2)})
    assert not marker.exists()
    torch.load(tmp_path / DATA_FILE, weights_only=False)
    assert marker.exists()


def test_objects_that_torch_would_unpickle_are_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        tensor_specs(Metadata({"extra": BytesStorageMetadata()}), "x")
    assert caught.value.lines == (
        "x holds objects that are not tensors, and only tensors are loaded: 'extra'",
    )


# Metadata that contradict themselves or the files.


def stored_with(second: bytes) -> bytes:
    """Sound metadata, but for the place of the second part."""
    return metadata_of_w(*HALVES, stored={**STORED, index("w", 1, 0): second})


FIRST_ALONE = {index("w", 0, 0): info()}
NOT_ONCE = "the parts of 'w' do not hold each element of (2, 3) exactly once"
NO_SHAPE = "a shape that no tensor has"
NO_TENSOR = "something else in place of a TensorStorageMetadata"
NO_NAME = "a tensor whose name is not a text"
NO_RANGE = "'w' has no valid range of bytes in '__0_0.distcp'"
OVERLAP = "'__0_0.distcp' has 200 bytes, but parts of tensors overlap in it or end beyond it"
# One of each cause; ``tools/prove/hostile/checkpoints.py`` has more of most of them.
WRONG: dict[str, tuple[bytes, str]] = {
    "a gap": (metadata_of_w(HALVES[0], stored=FIRST_ALONE), NOT_ONCE),
    "other dimensions": (metadata_of_w(chunk((0,), (6,))), NOT_ONCE),
    "two empty parts": (
        metadata_of_w(
            *HALVES,
            *[chunk((2, 0), (0, 3))] * 2,
            stored={**STORED, index("w", 2, 0): info("b"), index("v", 2, 0): info("b")},
        ),
        "two parts of 'w' begin at (2, 0)",
    ),
    "a part that is not stored": (
        metadata_of_w(*HALVES, stored={**FIRST_ALONE, index("v", 0, 0): info("b")}),
        "the part of 'w' at (1, 0) is stored nowhere",
    ),
    "more parts than are stored": (
        metadata_of_w(*HALVES, stored=FIRST_ALONE),
        "its tensors have more parts than the 1 that are stored",
    ),
    "stored twice": (
        metadata_of_w(*HALVES, stored={**STORED, index("w", 0, 0) + b"q\x00": info()}),
        "it stores a part of 'w' twice",
    ),
    "stored and no part": (
        metadata_of_w(*HALVES, stored={**STORED, index("v", 0, 0): info("b")}),
        "it stores a part of 'v' that no tensor has",
    ),
    "too few bytes": (
        metadata_of_w(
            chunk((0, 0), (2, 30)), shape=(2, 30), stored={index("w", 0, 0): info(length=200)}
        ),
        "the part of 'w' at (0, 0) has 200 bytes of 240",
    ),
    "negative sizes": (metadata_of_w(chunk((0,), (-1,)), shape=(-1,)), NO_SHAPE),
    "a truth as a size": (
        SOUND.replace(asm.sizes(2, 3), call("torch.Size", tuple_of(b"\x88", number(3)))),
        NO_SHAPE,
    ),
    "65 dimensions": (metadata_of_w(shape=(1,) * 65, stored={}), NO_SHAPE),
    "shared bytes": (stored_with(info(begin=99)), OVERLAP),
    "beyond the file": (stored_with(info(begin=101)), OVERLAP),
    "before the file": (stored_with(info(begin=-1)), NO_RANGE),
    "transformed": (
        SOUND.replace(
            text("offset") + number(100),
            text("transform_descriptors") + b"]" + text("offset") + number(100),
        ),
        "'w' is transformed (compressed), which composer3d does not read",
    ),
    "sparse": (SOUND.replace(b"strided", b"striped"), "'w' is not a dense tensor"),
    "an entry of another class": (
        SOUND.replace(b"TensorStorageMetadata", b"ChunkStorageMetadata"),
        NO_TENSOR,
    ),
    "a name that is a number": (metadata({number(1): entry((2, 3), *HALVES)}, STORED), NO_NAME),
    "a text without end": (metadata_of_w(*HALVES, before=text("x" * 4001)), "it holds a text"),
    "a name without end": (
        metadata({text("w" * 1001): entry((2, 3), *HALVES)}, STORED),
        NO_NAME,
    ),
    "arguments of a class": (
        SOUND.replace(b"\nMetadataIndex\n)\x81", b"\nMetadataIndex\nN\x85\x81"),
        "something else in place of a MetadataIndex",
    ),
    "no dtype": (SOUND.replace(name("torch.float32"), name("torch.Size")), "'w' has no dtype"),
    "no fields": (
        object_of(f"{PLACE}.Metadata", tuple_of(number(1))) + b".",
        "a Metadata whose fields have no names",
    ),
    "no Metadata": (b"\x80\x04].", "something else in place of a Metadata"),
    "empty": (b"", "it has 0 bytes, and at least 1"),
    "cut off": (SOUND[:-50], "it is cut off"),
    **{
        f"a file called {file!r:.20}": (
            metadata_of_w(
                *HALVES, stored={index("w", 0, 0): info(file), index("w", 1, 0): info(begin=9)}
            ),
            "which is not a file of the folder",
        )
        for file in ("../x", "/etc/passwd", "a/b", "", ".", "..", "a\0b", "x" * 256, "x/", "./x")
    },
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_wrong_metadata_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refused(written(tmp_path, content))


def test_a_list_of_parts_under_many_names_costs_little(tmp_path: Path) -> None:
    """9,000 names for one tensor of 9,000 empty parts: walking each would take minutes."""
    count, memo = 9_000, b"r\x00\x00\x00\x00"
    part = chunk((0,), (0,)) + memo + b"j" + memo[1:]
    shared = entry((0,), part, *[b"j" + memo[1:]] * count) + b"r\x01\x00\x00\x00"
    again = {text(f"w{at}"): b"j\x01\x00\x00\x00" for at in range(count)}
    written(tmp_path, metadata({text("w"): shared, **again}, STORED))
    began = time.process_time()
    assert "it lists 9,001 tensors and 2 parts in" in refused(tmp_path)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("file", [DATA_FILE, METADATA])
@pytest.mark.parametrize("kind", [*NO_PLAIN_FILE, "nothing"])
def test_files_are_plain_and_in_the_folder(tmp_path: Path, kind: str, file: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    replace_by(kind, written(folder) / file)
    line = refused(folder)
    if kind == "nothing":
        assert "No such file" in line
    else:
        assert (NO_PLAIN_FILE[kind] if file == METADATA else "which is not a plain file") in line


@pytest.mark.parametrize(
    ("size", "message"),
    [(1 << 40, "at most 3,221,225,472 are read"), (METADATA_LIMIT, "its byte 0 is an instruction")],
)
def test_metadata_that_claims_to_be_huge_is_not_read(
    tmp_path: Path, size: int, message: str
) -> None:
    with open(tmp_path / METADATA, "wb") as file:
        file.truncate(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    assert message in refused(tmp_path)
    assert time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


SPOILT = {
    "another shape": (torch.ones(3, 2, dtype=torch.bfloat16), "a part is .3, 2."),
    "another dtype": (torch.ones(2, 3), "torch.float32, but should be"),
    "another file": (None, "not an archive"),
    "a program": (None, "posix.system"),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_part_that_differs_from_the_metadata_is_not_loaded(
    tmp_path: Path, alone: None, spoil: str
) -> None:
    marker = tmp_path / "marker"
    folder = save(tmp_path / "folder")
    read = read_metadata(folder)
    where = read.storage_data["a:(0, 0)"]
    other, message = SPOILT[spoil]
    if spoil == "another file":
        content = b"x" * where.length
    elif spoil == "a program":
        content = program(marker)
    else:
        content = saved(other)
    (folder / where.relative_path).write_bytes(content)
    where.offset, where.length = 0, len(content)
    target = {"a": STATE["a"].clone()}
    with pytest.raises(CheckpointError, match=message):
        read_parts(folder, read, target)
    with pytest.raises(ValueError, match=message):
        read_whole(folder, read, "a")
    assert torch.equal(target["a"], STATE["a"])
    assert not marker.exists()


# The parts of a tensor.


Part = tuple[tuple[int, ...], tuple[int, ...]]


def counted(shape: tuple[int, ...], boxes: list[Part]) -> bool:
    """Do the same as ``fills``, by counting every element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        ends = [at + size for at, size in zip(offsets, sizes, strict=True)]
        if any(end > most for end, most in zip(ends, shape, strict=True)):
            return False
        counts[tuple(map(slice, offsets, ends))] += 1
    return bool((counts == 1).all())


@st.composite
def grids(draw: st.DrawFn) -> list[Part]:
    """A sound grid of boxes in a cube with sides of 5."""
    sides = []
    for _ in range(draw(st.integers(0, 3))):
        cuts = draw(st.sets(st.integers(1, 4), max_size=2))
        sides.append(list(pairwise(sorted({0, 5, *cuts}))))
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in product(*sides)]


@settings(max_examples=200)
@given(grid=grids(), data=st.data())
def test_fills_agrees_with_counting(grid: list[Part], data: st.DataObject) -> None:
    """Sound grids, and grids with a box moved, doubled, dropped, replaced, grown or shrunk."""
    dims = len(grid[0][0])
    shape, places = (5,) * dims, st.integers(0, len(grid) - 1)
    assert fills(shape, grid)
    assert not fills(shape, [*grid, grid[data.draw(places)]])
    assert not fills(shape, grid[1:])

    offsets, sizes = grid[data.draw(places)]
    corners = st.tuples(*[st.integers(0, 4)] * dims)
    extents = st.tuples(*[st.integers(0, 5)] * dims)
    changed = list(grid)
    changed[data.draw(places)] = data.draw(
        st.one_of(
            st.tuples(corners, st.just(sizes)),
            st.tuples(st.just(offsets), extents),
            st.sampled_from(grid),
        )
    )
    assert fills(shape, changed) == counted(shape, changed), (shape, changed)


def test_many_parts_are_checked_in_time() -> None:
    """20,000 parts in a grid of rows and columns: all right, then the last one wrong."""
    grid = [((row, column), (1, 2)) for row in range(200) for column in range(0, 200, 2)]
    began = time.process_time()
    assert fills((200, 200), grid)
    grid[-1] = ((199, 197), (1, 2))
    assert not fills((200, 200), grid)
    assert time.process_time() - began < 2


def test_coordinates_of_one_hash_cost_little() -> None:
    """Each number of such a chain would take half a millisecond in a dict of integers."""
    ints = colliding_ints(170_000)
    began = time.process_time()
    assert not fills((1 << 20,), [((at,), (0,)) for at in ints + ints[-1:] * 20_000])
    assert time.process_time() - began < 5


def colliding_offsets(count: int) -> list[tuple[int, int]]:
    """Offsets that have the same hash: for each row, the column that completes the hash.

    The constants are those of xxHash, with which Python hashes a tuple.
    """
    bits, seed = (1 << 64) - 1, 2870177450012600261
    first, second = 11400714785074694791, 14029467366897019727
    found: list[tuple[int, int]] = []
    row = 0
    while len(found) < count:
        mixed = seed + row * second & bits
        mixed = (mixed << 31 | mixed >> 33) * first & bits
        column = -mixed * pow(second, -1, 1 << 64) & bits
        if column < 2**61 - 1:  # the hash of a larger int is another number
            found.append((row, column))
        row += 1
    assert len(set(map(hash, found))) == 1
    return found


def test_parts_of_one_hash_cost_little(tmp_path: Path) -> None:
    """The time would grow with the square of the number of parts: 5 s for these 6,000."""
    stored = {index("w", *offsets): info() for offsets in colliding_offsets(6000)}
    written(tmp_path, metadata_of_w(*HALVES, stored=stored))
    began = time.process_time()
    assert "the part of 'w' at (0, 0) is stored nowhere" in refused(tmp_path)
    assert time.process_time() - began < 2


def large_metadata(n_tensors: int, n_parts: int, dims: int = 2) -> bytes:
    """The pickle that torch writes of tensors in equal parts, with as few bytes as it can have."""
    entries: dict[str, Any] = {}
    stored = {}
    for number_of_tensor in range(n_tensors):
        fqn = f"model.layers.{number_of_tensor}.w"
        rest = (4,) * (dims - 1)
        shape = (2 * n_parts, *rest) if dims else ()
        chunks = []
        for part in range(n_parts):
            offsets = torch.Size((2 * part, *(0 for _ in rest)) if dims else ())
            chunks.append(ChunkStorageMetadata(offsets, torch.Size((2, *rest) if dims else ())))
            place = StorageInfo(f"__{part}_0.distcp", number_of_tensor * 1000, 1000)
            stored[dcp.metadata.MetadataIndex(fqn, offsets, part)] = place
        entries[fqn] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size(shape), chunks
        )
    return pickle.dumps(Metadata(entries, storage_data=stored, storage_meta=StorageMeta()))


@pytest.mark.parametrize(("n_tensors", "n_parts", "dims"), [(2000, 1, 0), (4, 1024, 1)])
def test_what_real_files_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_tensors: int, n_parts: int, dims: int
) -> None:
    """The limits of the parser and of the number of parts leave a quarter to spare.

    Of 1 to 2,000 tensors of 0 to 4 dims in 1 to 4,096 parts, the first has the fewest bytes for
    each part, and the second takes the most memory for each byte.
    """
    assert pickles._MAX_MEMORY_PER_BYTE >= 16
    monkeypatch.setattr(pickles, "_MAX_MEMORY_PER_BYTE", 13)
    monkeypatch.setattr(pickles, "_FREE_MEMORY", 0)
    monkeypatch.setattr(metadata_module, "_MIN_BYTES_PER_PART", 88)
    for part in range(n_parts):
        with (tmp_path / f"__{part}_0.distcp").open("wb") as file:
            file.truncate(1000 * n_tensors)
    (tmp_path / METADATA).write_bytes(large_metadata(n_tensors, n_parts, dims))
    assert len(read_metadata(tmp_path).storage_data) == n_tensors * n_parts


def test_the_largest_job_can_be_loaded() -> None:
    """405B, 16,384 ranks: 126 layers of 9 tensors and 3 more, with two moments, on pp = 4."""
    per_part = len(large_metadata(4, 1024)) / 4096 + len("model.layers.125.w_gate")
    assert 3 * (126 * 9 + 3) * (16_384 // 4) * per_part < metadata_module.METADATA_LIMIT


def kept(*values: bytes) -> bytes:
    """A tuple of values that are kept in the memo, from number 0 on."""
    return tuple_of(*(value + b"q%c" % place for place, value in enumerate(values)))


def get(place: int) -> bytes:
    return b"h%c" % place


def small_metadata_of_many_parts(case: str, count: int = 5_000) -> bytes:
    """Metadata that refers to a few values of the memo again and again."""
    empty_entry = object_of(
        f"{asm.PLACE}.TensorStorageMetadata",
        dict_of(properties=asm.properties(), size=asm.sizes(0), chunks=b"]"),
    )
    shared = kept(
        name(f"{PLACE}.MetadataIndex"), b")", info(), text("n" * 1000), text("fqn"), text("offset"),
        empty_entry,
    )  # fmt: skip
    if case == "entries":
        return metadata({text(str(at)): get(6) for at in range(count)}, {}, before=shared)
    stored = {}
    for place in range(count):
        offset = name("torch.Size") + b"M" + place.to_bytes(2, "little") + b"\x85\x85R"
        state = b"}(" + get(4) + get(3) + get(5) + offset + b"u"
        stored[get(0) + get(1) + b"R" + state + b"b"] = get(2)
    return metadata({text("w"): empty_entry}, stored, before=shared)


@pytest.mark.parametrize("case", ["entries", "long names"])
def test_many_parts_take_memory_in_proportion_to_the_file(tmp_path: Path, case: str) -> None:
    content = small_metadata_of_many_parts(case)
    written(tmp_path, content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_metadata(tmp_path)
        # A real file takes 15 times its size while it is read.
        assert tracemalloc.get_traced_memory()[1] < 16 * len(content)
    finally:
        tracemalloc.stop()
