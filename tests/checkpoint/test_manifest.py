"""The manifest: no flipped bit of it passes, and what it says of the other files is held to."""

import json
import math
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from composer3d.checkpoint.manifest import (
    FILE,
    Manifest,
    damage,
    digest_file,
    model_of,
    read,
    write,
)
from composer3d.models.llama.shape import PRESETS
from composer3d.recipe.schema import Model
from composer3d.spec.errors import CheckpointError, UserError

FULL = Manifest(
    step=3,
    world_size=2,
    layout={"pp": 2},
    model={"model.dim": 8, "precision.params": "float32"},
    recipe='[run]\nname = "é"\n',
    data={"next_step": 3},
    lr=1e-5,
    tensors={"model.w": ((2, 3), "float32")},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    for name in ("a", "b"):
        (made / name).write_bytes(name.encode() * 100)
    files = {name: (100, digest_file(made / name)) for name in ("a", "b")}
    write(made, Manifest(**{**vars(FULL), "files": files}))
    return made


def test_what_was_written_is_read(folder: Path) -> None:
    manifest = read(folder)
    assert manifest == Manifest(**{**vars(FULL), "files": manifest.files})
    assert manifest.files["a"] == (100, xxhash.xxh3_128_hexdigest(b"a" * 100))
    assert damage(folder, manifest) == []


def test_every_flipped_bit_of_it_is_found(folder: Path) -> None:
    """Also one that makes another spelling of the same number: 1e-05 and 1E-05."""
    whole = (folder / FILE).read_bytes()
    assert b"1e-05" in whole
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / FILE).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=rf"^{folder / FILE} "):
            read(folder)


def remade(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A manifest that someone has changed, and given its digest."""
    content: dict[str, Any] = {"format": 1, **vars(FULL)}
    change(content)
    encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    return encode(
        {**content, "digest": xxhash.xxh3_128_hexdigest(encode(content).encode())}
    ).encode()


def field(**changed: Any) -> bytes:
    return remade(lambda content: content.update(changed))


HEX = "0" * 32
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be used: Expecting value"),
    "pickle": (b"\x80\x04cposix\nsystem\n", "cannot be used: 'utf-8' codec can't decode"),
    "deep": (b"[" * 100_000, "cannot be used: it nests too deep"),
    "deep within": (b'{"a":' * 100_000, "cannot be used: it nests too deep"),
    "list": (b"[]", "cannot be used: it is not what its digest says"),
    "text": (b'"x"', "cannot be used: it is not what its digest says"),
    "later": (field(format=2), "is not of format 1"),
    "no format": (remade(lambda content: content.pop("format")), "is not of format 1"),
    "true format": (field(format=True), "is not of format 1"),
    "lacking": (remade(lambda content: content.pop("tensors")), "cannot be used: it lacks tensors"),
    "unknown": (field(more=1), "cannot be used: it has a field 'more', which no manifest has"),
    "not a number": (field(lr=math.nan), "cannot be used: it holds NaN, which JSON does not have"),
    "infinite": (
        field(lr=-math.inf),
        "cannot be used: it holds -Infinity, which JSON does not have",
    ),
    "step -1": (field(step=-1), "step is -1, but must be an integer from 0 to 2^53"),
    "step 10^30": (field(step=10**30), f"step is {10**30}, but must be an integer from 0 to 2^53"),
    "step true": (field(step=True), "step is True, but must be an integer"),
    "step 1.5": (field(step=1.5), "step is 1.5, but must be an integer"),
    "step text": (field(step="x" * 10**6), f"step is '{'x' * 59}, but must be an integer"),
    "no ranks": (field(world_size=0), "world_size is 0, but must be an integer from 1 to 2^53"),
    "layout number": (field(layout=5), "layout is 5, but must be integers from 0 to 2^53 by name"),
    "layout texts": (field(layout={"pp": "2"}), "layout is another, but must be integers"),
    "layout negative": (field(layout={"pp": -2}), "layout is another, but must be integers"),
    "model list": (
        field(model=[1]),
        "model is another, but must be numbers, texts or null by name",
    ),
    "model nested": (field(model={"model.dim": [8]}), "model is another, but must be"),
    "model wide": (field(model={"model.dim": 10**30}), "model is another, but must be"),
    "recipe": (field(recipe=None), "recipe is None, but must be a text of at most 2^20 characters"),
    "recipe of a book": (
        field(recipe="x" * (2**20 + 1)),
        "but must be a text of at most 2^20 characters",
    ),
    "data text": (
        field(data="gASVJAAAAAAAAACMBXBvc2l4"),
        "data is 'gASVJAAAAAAAAACMBXBvc2l4', but must be null, or",
    ),
    **{
        f"next step {value!r:.20}": (
            field(data={"next_step": value}),
            "next_step is an integer from 0 to 2^53",
        )
        for value in (-1, "x", 1e30, None, 2**53 + 1, True, [1])
    },
    "data digest": (field(data={"digest": 5}), "data is another, but must be"),
    "data seed": (field(data={"seed": "0"}), "data is another, but must be"),
    "data rows": (field(data={"global_batch": -4}), "data is another, but must be"),
    "data nested": (field(data={"more": {"a": 1}}), "data is another, but must be"),
    "lr text": (field(lr="1e-5"), "lr is '1e-5', but must be null or a finite number"),
    "files list": (field(files=[]), "files is another, but must be size and digest"),
    **{
        f"files {value!r:.40}": (
            field(files={"a": value}),
            "files is another, but must be size and digest",
        )
        for value in (
            5,
            [5],
            [5, HEX, 5],
            [-1, HEX],
            ["5", HEX],
            [5, "0"],
            [5, "G" * 32],
            [5, None],
            [5.0, HEX],
        )
    },
    **{
        f"file called {name!r:.20}": (
            field(files={name: [5, HEX]}),
            "by their names within the folder",
        )
        for name in (
            "",
            ".",
            "..",
            "../a",
            "/etc/passwd",
            "a/../../b",
            "a//b",
            "./a",
            "a/",
            "a\0",
            "a\x1b[2J",
            FILE,
        )
    },
    "tensors": (field(tensors=[1]), "tensors is another, but must be shape and dtype by name"),
    **{
        f"tensor {value!r:.20}": (
            field(tensors={"w": value}),
            "tensors is another, but must be shape and dtype by name",
        )
        for value in (
            5,
            [[1]],
            [[-1], "float32"],
            [[1.5], "float32"],
            [[True], "float32"],
            [[1], 5],
            ["1", "float32"],
        )
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_cannot_be_is_said(tmp_path: Path, case: str) -> None:
    content, said = WRONG[case]
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    # A resume passes over damage alone.
    assert isinstance(caught.value, CheckpointError) == ("format" not in said)
    (line,) = caught.value.lines
    assert said in line
    assert line.startswith(str(tmp_path / FILE))
    assert len(line) < len(str(tmp_path)) + 300


def test_what_is_too_large_or_too_much_is_not_read(tmp_path: Path) -> None:
    began = time.process_time()
    with open(tmp_path / FILE, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="it is larger than 33,554,432 bytes"):
        read(tmp_path)
    for flood in (b"[" + b"[]," * 10_000_000 + b"[]]", b"[" + b"1," * 10_000_000 + b"1]"):
        (tmp_path / FILE).write_bytes(flood)
        tracemalloc.start()
        with pytest.raises(CheckpointError, match="it holds more than 1,500,000 values"):
            read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 100e6
        tracemalloc.stop()
    assert time.process_time() - began < 2


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    many = {str(number): ((1,), "float32") for number in range(500_000)}
    with pytest.raises(CheckpointError, match="would be too large to be read"):
        write(tmp_path, Manifest(**{**vars(FULL), "tensors": many}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_it_is_a_plain_file(folder: Path, kind: str) -> None:
    (folder / FILE).rename(folder.parent / "elsewhere")
    {"link": lambda: (folder / FILE).symlink_to("../elsewhere"), "pipe": lambda: os.mkfifo(folder / FILE),
     "folder": (folder / FILE).mkdir}[kind]()  # fmt: skip
    said = {"link": "is a symbolic link", "pipe": "is a named pipe", "folder": "is a folder"}[kind]
    with pytest.raises(CheckpointError, match=f"{FILE} cannot be used: it {said}"):
        read(folder)


def test_folder_without_it_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert caught.value.lines == (
        f"{tmp_path} is not a checkpoint: it has no manifest.json; name a step-* folder",
    )


def test_each_kind_of_damage_is_named(folder: Path) -> None:
    manifest = read(folder)
    (folder / "a").write_bytes(b"a" * 99)
    assert damage(folder, manifest) == [f"{folder / 'a'} has 99 bytes, the manifest says 100"]
    (folder / "a").write_bytes(b"a" * 99 + b"\x60")
    assert damage(folder, manifest) == [f"{folder / 'a'} has another digest than the manifest says"]
    assert damage(folder, manifest, ["b"]) == []
    (folder / "a").unlink()
    (folder / "c").touch()
    assert damage(folder, manifest) == [
        f"{folder / 'a'} cannot be read (No such file or directory)",
        f"{folder / 'c'} is not in the manifest",
    ]
    assert damage(folder, manifest, ["b"]) == [f"{folder / 'c'} is not in the manifest"]


def test_links_and_pipes_are_named_and_never_opened(folder: Path) -> None:
    """Of the same content even: what lies elsewhere can change at any time, and a pipe has no end."""
    manifest = read(folder)
    (folder / "a").rename(folder.parent / "elsewhere")
    (folder / "a").symlink_to(folder.parent / "elsewhere")
    (folder / "b").unlink()
    os.mkfifo(folder / "b")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/")
    assert damage(folder, manifest) == [
        f"{folder / 'a'} cannot be read (is a symbolic link, which is not followed here)",
        f"{folder / 'b'} cannot be read (is a named pipe, not a plain file)",
        f"{folder / 'link'} is not in the manifest",
        f"{folder / 'pipe'} is not in the manifest",
    ]


def test_a_folder_within_is_no_link(folder: Path) -> None:
    (folder / "assets").mkdir()
    (folder / "assets/x").write_bytes(b"a" * 100)
    files = read(folder).files | {"assets/x": read(folder).files["a"]}
    manifest = Manifest(**{**vars(FULL), "files": files})
    assert damage(folder, manifest) == []
    (folder / "assets").rename(folder.parent / "elsewhere")
    (folder / "assets").symlink_to(folder.parent / "elsewhere")
    assert damage(folder, manifest) == [
        f"{folder / 'assets/x'} cannot be read (assets is a symbolic link, which is not followed here)",
        f"{folder / 'assets'} is not in the manifest",
    ]


def test_many_files_too_many_are_counted(folder: Path) -> None:
    for number in range(20):
        (folder / f"x{number:02d}").touch()
    lines = damage(folder, read(folder))
    assert lines[7:] == [
        f"{folder / 'x07'} is not in the manifest",
        f"{folder}: 12 more files are not in the manifest",
    ]


def test_where_the_first_weights_came_from_makes_no_other_model() -> None:
    shape = PRESETS["debug-tiny"]
    with_folder = Model(**vars(shape), hf="folder")
    assert model_of(with_folder, "float32") == model_of(shape, "float32")
    assert model_of(shape, "float32")["model.n_layers"] == 4
    assert model_of(shape, "float32") != model_of(shape, "bfloat16")
