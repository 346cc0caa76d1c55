"""The manifest: every flipped bit in it, and in the files that it lists, is found."""

import errno
import json
import math
import os
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import (
    FILE,
    Manifest,
    TensorSpec,
    describe_unlisted,
    file_entry,
    find_damage,
    model_of,
    read,
    require_readable,
    require_same_tensors,
    write,
)
from composer3d.facts import files
from composer3d.facts.errors import CheckpointError, UserError
from composer3d.models.llama.shape import PRESETS
from composer3d.models.shape import DecoderShape, key
from composer3d.recipe.changes import TEXT_LIMIT, values_of
from composer3d.recipe.schema import Model
from tests.checkpoint.odd_files import NO_PLAIN_FILE, replace_by

FULL = Manifest(
    step=3,
    world_size=2,
    layout={"pp": 2},
    model={"model.dim": 8, "precision.params": "float32"},
    recipe='[run]\nname = "é"\n',
    data={"next_step": 3},
    lr=1e-5,
    history={"losses": [2.5, 0.1], "norms": [1.0, 3.5], "bad_in_a_row": 1},
    tensors={"model.w": TensorSpec((2, 3), "float32")},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    for name in ("a", "b"):
        (path / name).write_bytes(name.encode() * 100)
    files = {name: file_entry(path / name) for name in ("a", "b")}
    write(path, replace(FULL, files=files))
    return path


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    (line,) = caught.value.lines
    return line


def test_manifest_is_read_as_it_was_written(folder: Path) -> None:
    manifest = read(folder)
    assert manifest == replace(FULL, files=manifest.files)
    assert manifest.files["a"] == (100, xxhash.xxh3_128_hexdigest(b"a" * 100))
    assert find_damage(folder, manifest) == []


def test_a_history_that_remembers_nothing_is_not_written(tmp_path: Path) -> None:
    """So versions that know no history read the manifest."""
    write(tmp_path, replace(FULL, history={}))
    assert b"history" not in (tmp_path / FILE).read_bytes()
    assert read(tmp_path) == replace(FULL, history={})


def test_every_flipped_bit_is_found(folder: Path) -> None:
    """A bit of each byte, and one that only spells the same number in another way: 1E-05."""
    whole = (folder / FILE).read_bytes()
    capital = 8 * (whole.index(b"1e-05") + 1) + 5
    for bit in [*(8 * at + at % 8 for at in range(len(whole))), capital]:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / FILE).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=rf"^{folder / FILE} "):
            read(folder)


def changed_manifest(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Encode a manifest that somebody has changed, with its new digest."""
    content: dict[str, Any] = {"format": 1, **vars(FULL)}
    change(content)
    encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    return encode(
        {**content, "digest": xxhash.xxh3_128_hexdigest(encode(content).encode())}
    ).encode()


def field(**changed: Any) -> bytes:
    return changed_manifest(lambda content: content.update(changed))


HEX = "0" * 32
ANOTHER_FORMAT = (
    "is not of format 1, the only one that this composer3d reads; use a newer composer3d"
)


def wrong(name: str, form: str) -> str:
    return f"the content of {name} is wrong; it must be {form}"


WRONG_FILES = wrong("files", "an object from paths within the folder to size and digest (XXH3-128)")
WRONG_HISTORY = wrong(
    "history",
    "an object of losses and norms, lists of equally many finite numbers, and bad_in_a_row, an "
    "integer from 0 to 2^53",
)
WRONG_LAYOUT = wrong("layout", "an object of integers from 0 to 2^53")
WRONG_MODEL = wrong("model", "an object of numbers, texts, true, false")
WRONG_DATA = wrong("data", "")
WRONG_TENSORS = wrong("tensors", "an object from names to shape and dtype")
NO_STEP = "step is {}, but must be an integer from 0 to 2^53"
NO_RECIPE = "but must be a text of at most 2^20 characters"
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be used: Expecting value"),
    "pickle": (b"\x80\x04cposix\nsystem\n", "cannot be used: 'utf-8' codec can't decode"),
    "deep": (b"[" * 100_000, "cannot be used: it nests too deep"),
    "list": (b"[]", "cannot be used: its content does not match its digest"),
    "later": (field(format=2), ANOTHER_FORMAT),
    "no format": (changed_manifest(lambda content: content.pop("format")), ANOTHER_FORMAT),
    "true format": (field(format=True), ANOTHER_FORMAT),
    "lacking": (
        changed_manifest(lambda content: content.pop("tensors")),
        "cannot be used: it lacks tensors",
    ),
    "later field": (
        field(extra=[{"a": 1}], **{"step 2": None}),
        "has the field 'extra' (and 1 more), which this version does not know; use a newer compo",
    ),
    "not a number": (field(lr=math.nan), "cannot be used: it holds NaN, which JSON does not have"),
    "step -1": (field(step=-1), NO_STEP.format(-1)),
    "step 10^30": (field(step=10**30), NO_STEP.format(10**30)),
    "step true": (field(step=True), NO_STEP.format(True)),
    "step text": (
        field(step="x" * 10**6),
        NO_STEP.format(f"'{'x' * 60}... (1,000,000 characters)'"),
    ),
    "no ranks": (field(world_size=0), "world_size is 0, but must be an integer from 1 to 2^53"),
    "history of one list": (field(history={"losses": [1.0]}), WRONG_HISTORY),
    "history of integers": (field(history={"losses": [1], "norms": [1]}), WRONG_HISTORY),
    "history of another key": (field(history={"steps": []}), WRONG_HISTORY),
    "history of -1 steps": (field(history={"bad_in_a_row": -1}), WRONG_HISTORY),
    "history list": (field(history=[1.0]), WRONG_HISTORY),
    "layout number": (
        field(layout=5),
        "layout is 5, but must be an object of integers from 0 to 2^53",
    ),
    "layout texts": (field(layout={"pp": "2"}), WRONG_LAYOUT),
    "model list": (field(model=[1]), WRONG_MODEL),
    "model wide": (field(model={"model.dim": 10**30}), WRONG_MODEL),
    "recipe of a book": (field(recipe="x" * (2**20 + 1)), NO_RECIPE),
    "data text": (
        field(data="gASVJAAAAAAAAACMBXBvc2l4"),
        "data is 'gASVJAAAAAAAAACMBXBvc2l4', but must be null, or an object of",
    ),
    **{
        f"next step {value!r:.20}": (
            field(data={"next_step": value, "digest": ""}),
            "next_step is an integer from 0 to 2^53",
        )
        for value in (-1, 2**53 + 1, True)
    },
    "data digest": (field(data={"digest": 5, "next_step": 0}), WRONG_DATA),
    "data seed": (field(data={"seed": "0", "digest": "", "next_step": 0}), WRONG_DATA),
    "data long": (field(data={"a": "x" * 2**20}), WRONG_DATA),
    "data of lists": (field(data={"a": [[1]]}), WRONG_DATA),
    "model of lists": (field(model={"model.a": [1, [2]]}), WRONG_MODEL),
    "data nested": (field(data={"extra": {"a": 1}}), WRONG_DATA),
    "lr text": (field(lr="1e-5"), "lr is '1e-5', but must be null or a finite number"),
    "files list": (field(files=[]), WRONG_FILES),
    "tensors": (field(tensors=[1]), WRONG_TENSORS),
}
# Wrong entries of files and tensors, and wrong names of files.
ENTRIES = [5, [5], [5, HEX, 5], [-1, HEX], ["5", HEX], [5, "0"], [5, "G" * 32], [5, None]]
NAMES = ["", ".", "..", "../a", "/etc/passwd", "a/../../b", "a//b", "./a", "a/", "a\0", "a\x1b[2J"]
SPECS = [5, [[1]], [[-1], "float32"], [[1.5], "float32"], [[True], "float32"], [[1], 5]]
for entry in [*ENTRIES, [5.0, HEX]]:
    WRONG[f"files {entry!r:.40}"] = field(files={"a": entry}), WRONG_FILES
for name in [*NAMES, FILE]:
    WRONG[f"file called {name!r:.20}"] = field(files={name: [5, HEX]}), WRONG_FILES
for spec in [*SPECS, ["1", "float32"]]:
    WRONG[f"tensor {spec!r:.20}"] = field(tensors={"w": spec}), WRONG_TENSORS


def test_a_damaged_manifest_with_a_later_field_is_damaged(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(field(extra="a").replace(b'"extra":"a"', b'"extra":"b"'))
    assert "its content does not match its digest" in refusal(tmp_path)


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_wrong_manifests_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    # A resume skips a damaged checkpoint, but not one of a later version.
    assert isinstance(caught.value, CheckpointError) == ("use a newer" not in message)
    (line,) = caught.value.lines
    assert message in line
    assert line.startswith(str(tmp_path / FILE))
    assert len(line) < len(str(tmp_path)) + 300


def test_a_manifest_that_is_too_large_is_not_read(tmp_path: Path) -> None:
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


def test_a_manifest_that_is_too_large_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_MAX_BYTES", 32_000)
    monkeypatch.setattr(manifests, "_MAX_VALUES", 1500)
    spec = TensorSpec((1,), "float32")
    # Many bytes of few tensors, and many values of few bytes.
    long_names = {f"{number}{'x' * 1000}": spec for number in range(34)}
    many_sizes = {"x": TensorSpec((1,) * 1501, "float32")}
    for tensors in (long_names, many_sizes):
        with pytest.raises(CheckpointError, match="would be too large to be read"):
            write(tmp_path, replace(FULL, tensors=tensors))
        assert list(tmp_path.iterdir()) == []


def test_what_a_model_and_batches_of_a_user_say_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A shape with a field of several values, and names that our loader gives other types."""

    @dataclass(frozen=True, kw_only=True)
    class Wide(DecoderShape):
        widths: tuple[int, ...] = key((64, 128), "widths")
        note: str = key("x" * 5000, "note")

    sizes = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "ffn": 32, "vocab": 256}
    model = model_of(Wide(**sizes, widths=(32, 64)), "float32")
    data = {"rng": "f" * 5056, "order": 7, "seed": None, "next_step": -1, "buffer": [1, "a", 0.5]}
    written = replace(FULL, model=model, data=data)
    require_readable(written)
    write(tmp_path, written)
    assert read(tmp_path) == written
    assert read(tmp_path).model["model.widths"] == (32, 64)


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "wide": ({"data": {"state": 2**100}}, "cannot keep 'state' = 1267650600228229401496703205376 "),
    "nan": ({"data": {"epoch": math.nan}}, "cannot keep 'epoch' = NaN of the batches' state: it"),
    "nested": ({"data": {"rng": {"a": 1}}}, """cannot keep 'rng' = {"a": 1} of the batches'"""),
    "lists": ({"data": {"rng": (3, (1, 2), None)}}, "cannot keep 'rng' = [3, [1, 2], null] of"),
    "object": ({"data": {"rng": object()}}, "cannot keep 'rng' = (object) of the batches' state"),
    "number": ({"data": {0: 5}}, "cannot keep 0 = 5 of the batches' state: it must be a finite"),
    "no dict": ({"data": 7}, "could not be read again: data is 7, but must be null, or an object"),
    "digest": ({"data": {"next_step": 0, "digest": 0}}, "the content of data is wrong"),
    "model": ({"model": {"model.a": ({"b": 1},)}}, "cannot keep 'model.a' = [{\"b\": 1}] of the m"),
    "recipe": ({"recipe": "x" * (TEXT_LIMIT + 1)}, "but must be a text of at most 2^20 characters"),
    "rate": ({"lr": math.inf}, "could not be read again: it holds Infinity"),
}


@pytest.mark.parametrize(("values", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_manifest_that_would_be_refused_is_not_written(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    """A run would save for weeks what no one can load."""
    for refuse in (lambda manifest: write(tmp_path, manifest), require_readable):
        with pytest.raises(CheckpointError) as caught:
            refuse(replace(FULL, **values))
        (line,) = caught.value.lines
        assert message in line
        assert len(line) < len(str(tmp_path)) + 400
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_of_any_length_that_is_saved_can_be_compared(tmp_path: Path) -> None:
    text = "[run]\n" + "#" * (TEXT_LIMIT - 6)
    write(tmp_path, replace(FULL, recipe=text))
    assert values_of(read(tmp_path).recipe) == {}


@pytest.mark.parametrize("kind", NO_PLAIN_FILE)
def test_manifest_is_a_plain_file(folder: Path, kind: str) -> None:
    replace_by(kind, folder / FILE)
    with pytest.raises(CheckpointError, match=f"{FILE} cannot be used: it {NO_PLAIN_FILE[kind]}"):
        read(folder)


def test_error_of_the_system_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300)
    assert refusal(folder) == (
        f"{folder / FILE} cannot be used: File name too long; copy the checkpoint again"
    )


def fail_to_open(
    monkeypatch: pytest.MonkeyPatch, path: Path, number: int, times: int = 1 << 20
) -> None:
    """Let the first so many times that a file is opened fail."""
    left = [times]

    def opened(opening: Any, **keywords: Any) -> Any:
        if Path(opening) == path and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return files.open_plain(opening, **keywords)

    def read_whole(opening: Any, **keywords: Any) -> bytes:
        with opened(opening, follow_links=False):
            return files.read_plain(opening, **keywords)

    monkeypatch.setattr(manifests, "open_plain", opened)
    monkeypatch.setattr(manifests, "read_plain", read_whole)
    monkeypatch.setattr(manifests, "_PAUSE_S", 0.0)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_a_file_that_this_process_cannot_read_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A run would take an older checkpoint, and replace or remove this one, which is healthy."""
    manifest = read(folder)
    calls = {"b": lambda: find_damage(folder, manifest), FILE: lambda: read(folder)}
    for name, call in calls.items():
        fail_to_open(monkeypatch, folder / name, number)
        with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
            call()
        assert (caught.value.errno, caught.value.filename) == (number, f"{folder}/{name}")


def test_a_disk_that_fails_is_asked_once_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read(folder)
    for name in ("b", FILE):
        fail_to_open(monkeypatch, folder / name, errno.EIO, times=1)
        assert (read(folder), find_damage(folder, manifest)) == (manifest, [])
    fail_to_open(monkeypatch, folder / "b", errno.EIO, times=2)
    assert find_damage(folder, manifest) == [f"{folder}/b cannot be read (Input/output error)"]
    fail_to_open(monkeypatch, folder / FILE, errno.EIO, times=2)
    assert "cannot be used: Input/output error" in refusal(folder)


def test_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"{tmp_path} is not a checkpoint: it has no manifest.json; name a step-* folder"
    )


def test_each_kind_of_damage_is_named(folder: Path) -> None:
    manifest = read(folder)
    a = folder / "a"
    a.write_bytes(b"a" * 99)
    assert find_damage(folder, manifest) == [f"{a} has 99 bytes, but the manifest says 100"]
    a.write_bytes(b"a" * 99 + b"\x60")
    assert find_damage(folder, manifest) == [f"{a} has another digest than the manifest says"]
    assert find_damage(folder, manifest, ["b"]) == []
    a.unlink()
    assert find_damage(folder, manifest) == [f"{a} cannot be read (No such file or directory)"]
    assert find_damage(folder, manifest, ["b"]) == []


def test_each_piece_of_a_checked_file_is_reported(folder: Path) -> None:
    pieces: list[int] = []
    manifest = read(folder)
    assert find_damage(folder, manifest, report=pieces.append) == []
    assert sum(pieces) == sum(entry.size for entry in manifest.files.values()) > 0


def test_links_and_pipes_are_reported_and_never_opened(folder: Path) -> None:
    """Even a link to the same content is refused: a file elsewhere can change at any time."""
    manifest = read(folder)
    (folder / "a").rename(folder.parent / "elsewhere")
    (folder / "a").symlink_to(folder.parent / "elsewhere")
    (folder / "b").unlink()
    os.mkfifo(folder / "b")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/")
    assert find_damage(folder, manifest) == [
        f"{folder / 'a'} cannot be read (is a symbolic link, which is not followed here)",
        f"{folder / 'b'} cannot be read (is a named pipe, not a plain file)",
    ]
    assert describe_unlisted(folder, manifest) == [
        f"{folder / 'link'} is not in the manifest: it is not read",
        f"{folder / 'pipe'} is not in the manifest: it is not read",
    ]


def test_a_folder_within_must_not_be_a_link(folder: Path) -> None:
    (folder / "assets").mkdir()
    (folder / "assets/x").write_bytes(b"a" * 100)
    files = read(folder).files | {"assets/x": read(folder).files["a"]}
    manifest = replace(FULL, files=files)
    assert find_damage(folder, manifest) == []
    (folder / "assets").rename(folder.parent / "elsewhere")
    (folder / "assets").symlink_to(folder.parent / "elsewhere")
    assert find_damage(folder, manifest) == [
        f"{folder / 'assets/x'} cannot be read "
        "(assets is a symbolic link, which is not followed here)",
    ]
    line = f"{folder / 'assets'} is not in the manifest: it is not read"
    assert describe_unlisted(folder, manifest) == [line]


def test_files_that_are_not_listed_are_named_or_counted(folder: Path) -> None:
    """They are no damage: a desktop may have put one there, and no loader reads it."""
    assert describe_unlisted(folder, read(folder)) == []
    for number in range(20):
        (folder / f"x{number:02d}").touch()
    assert find_damage(folder, read(folder)) == []
    lines = describe_unlisted(folder, read(folder))
    assert lines[7:] == [
        f"{folder / 'x07'} is not in the manifest: it is not read",
        f"{folder}: 12 more files are not in the manifest",
    ]


def test_origin_of_the_first_weights_does_not_change_the_model() -> None:
    shape = PRESETS["debug-tiny"]
    with_folder = Model(**vars(shape), hf="folder")
    assert model_of(with_folder, "float32") == model_of(shape, "float32")
    assert model_of(shape, "float32")["model.n_layers"] == 4
    assert model_of(shape, "float32") != model_of(shape, "bfloat16")


def test_fields_that_came_later_have_the_defaults_with_which_a_model_is_the_same() -> None:
    """What a checkpoint of composer3d said of its model before rotary stretches had kinds."""
    shape = PRESETS["llama3.1-8b"]
    now = manifests.model_of(shape, "float32")
    later = {key for key in now if "rope_" in key and "rope_theta" not in key} - {
        *("model.rope_factor", "model.rope_low_freq", "model.rope_high_freq", "model.rope_context")
    }
    later |= {"model.full_every", "model.nope_every"}
    assert len(later) == 7
    then = {key: value for key, value in now.items() if key not in later}
    assert manifests.with_later_fields(then, shape) == now
    assert manifests.with_later_fields(now | {"model.window": 7}, shape)["model.window"] == 7
    # A field without a default has always been there.
    assert "model.dim" not in manifests.with_later_fields({}, type(shape))
    # What this version does not know is not left out.
    own = {"model.architecture": "my_models.gpt:ARCHITECTURE"}
    manifests.require_known_fields(Path("a"), now | own, shape)
    for more, newer in (({}, "composer3d"), (own, "version of 'my_models.gpt:ARCHITECTURE'")):
        with pytest.raises(UserError, match=f"a has 'model.cap' = 1, .*; use a newer {newer}$"):
            manifests.require_known_fields(Path("a"), now | {"model.cap": 1} | more, shape)


def test_differences_of_tensors_are_named() -> None:
    expected = {
        "same": TensorSpec((1,), "float32"),
        "missing": TensorSpec((2,), "float32"),
        "other": TensorSpec((3,), "float32"),
    }
    saved = {
        "same": TensorSpec((1,), "float32"),
        "other": TensorSpec((3,), "bfloat16"),
        "unexpected": TensorSpec((), "int64"),
    }
    require_same_tensors(expected, expected, "PLACE", "way out")
    with pytest.raises(CheckpointError) as caught:
        require_same_tensors(expected, saved, "PLACE", "way out")
    assert caught.value.lines == (
        "PLACE has no 'missing', but the model needs it as float32 (2,)",
        "PLACE holds 'other' as bfloat16 (3,), but the model needs float32 (3,)",
        "PLACE holds 'unexpected' as int64 (), which the model does not have",
        "PLACE: 3 differences; way out",
    )
