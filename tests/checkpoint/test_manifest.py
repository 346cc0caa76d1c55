"""The manifest: no flipped bit of it passes, and what it says of the other files is held to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from composer3d.checkpoint.manifest import FILE, Manifest, damage, digest_file, model_of, read, write
from composer3d.errors import CheckpointError, UserError
from composer3d.recipe.schema import Model
from composer3d.shape import PRESETS

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
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    files = {name: (100, digest_file(tmp_path / name)) for name in ("a", "b")}
    write(tmp_path, Manifest(**{**vars(FULL), "files": files}))
    return tmp_path


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
    return encode({**content, "digest": xxhash.xxh3_128_hexdigest(encode(content).encode())}).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be used (JSONDecodeError"),
        (b"\x80\x04cposix\nsystem\n", "cannot be used (UnicodeDecodeError"),
        (b"[" * 100_000, "cannot be used (RecursionError"),
        (b"[]", "cannot be used (AttributeError"),
        (remade(lambda content: content.update(format=2)), "is not of format 1"),
        (remade(lambda content: content.pop("tensors")), "cannot be used (KeyError: 'tensors')"),
        (remade(lambda content: content.update(data="gASVJAAAAAAAAACMBXBvc2l4")), "data must be of another type"),
        (remade(lambda content: content.update(more=1)), "unexpected keyword argument 'more'"),
        (remade(lambda content: content.update(files={"a": 5})), "cannot be used (TypeError"),
    ],
    ids=["empty", "pickle", "deep", "list", "later", "lacking", "type", "unknown", "files"],
)
def test_what_it_cannot_be_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    assert isinstance(caught.value, CheckpointError) == ("format" not in said)  # a resume passes over damage alone
    assert said in caught.value.lines[0]
    assert caught.value.lines[0].startswith(str(tmp_path / FILE))


def test_folder_without_it_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert caught.value.lines == (f"{tmp_path} is not a checkpoint: it has no manifest.json; name a step-* folder",)


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


def test_where_the_first_weights_came_from_makes_no_other_model() -> None:
    shape = PRESETS["debug-tiny"]
    with_folder = Model(**vars(shape), hf="folder")
    assert model_of(with_folder, "float32") == model_of(shape, "float32")
    assert model_of(shape, "float32")["model.n_layers"] == 4
    assert model_of(shape, "float32") != model_of(shape, "bfloat16")
