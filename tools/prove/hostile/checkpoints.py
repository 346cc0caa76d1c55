"""Hostile checkpoints and torch files, for ``train`` (to resume from), ``inspect`` and ``convert``.

Who changes a file can also change its digest, so every checkpoint here gets right digests again.
"""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

from tools.prove.hostile.base import CHECKPOINT
from tools.prove.hostile.case import Case, cases_of, marker_of
from tools.prove.hostile.files import (
    Change,
    each_value,
    flipped,
    pipe,
    place_of,
    replaced,
    secret,
    sparse,
    write,
)
from tools.prove.proof import overrides

_EMBED = "model.first.embed.weight"
_SEED = 20261122


class Call:
    """An object that calls ``function(*arguments)`` when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def touch(folder: Path) -> Call:
    """An object that creates the marker of the case in ``folder`` when it is unpickled."""
    return Call(os.system, f"touch {marker_of(folder)}")


def command(name: str, path: str) -> list[str]:
    """The command line of a user who opens the checkpoint or file ``path``."""
    if name == "resume":
        sets = overrides(f"checkpoint.resume={path}", "data.path=../base/tokens")
        return ["train", "../base/recipe.toml", *sets]
    return ["inspect", path] if name == "inspect" else ["convert", path, "out", "--to", "hf"]


def seal(folder: Path) -> None:
    """Give the manifest the sizes and digests that the files of ``folder`` now have."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            manifest["files"][name] = [len(content), xxhash.xxh3_128_hexdigest(content)]
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest`` with a digest of its own."""

    def canonical(content: dict[str, Any]) -> bytes:
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    manifest.pop("digest", None)
    digest = xxhash.xxh3_128_hexdigest(canonical(manifest))
    (folder / "manifest.json").write_bytes(canonical(manifest | {"digest": digest}))


def checkpoint_case(name: str, change: Change, message: str | None, *commands: str) -> list[Case]:
    """The changed checkpoint as a case of each of ``commands``, by default of all three."""

    def make(met: str, folder: Path) -> list[str]:
        evil = folder / "evil"
        shutil.copytree(folder.parent / "base" / CHECKPOINT, evil)
        change(evil)
        manifest = evil / "manifest.json"
        if manifest.is_file() and not manifest.is_symlink() and not name.startswith("manifest"):
            seal(evil)
        return command(met, "evil")

    return cases_of(name, make, message, commands or ("resume", "inspect", "convert"))


# Pickles that are programs.


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR, _BYTES, _FORMAT = (
    _global(_METADATA, name)
    for name in ("TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING")
)


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def touching(folder: Path) -> bytes:
    """Opcodes that create the marker of the case in ``folder``, and push what the call returns."""
    (command_line,) = touch(folder).call[1]
    return _global("os", "system") + _text(command_line) + b"\x85R"


def _set_attribute(owner: bytes, name: str, value: bytes) -> bytes:
    """Opcodes that set an attribute of the object that ``owner`` pushes.

    BUILD with a state of slots calls setattr.
    """
    return owner + b"(N}" + _text(name) + value + b"st" + b"b0"


def _class_as_tensor(evil: Path) -> None:
    """Make the enum of memory formats a subclass of both kinds of entry.

    Its member passes as a tensor. DCP's reader then takes the entry for bytes, and passes them to
    ``torch.load(weights_only=False)``.
    """
    metadata = pickle.loads((evil / ".metadata").read_bytes())
    payload = pickle.dumps(touch(evil.parent))
    name = next(iter(metadata.state_dict_metadata))
    entry = metadata.state_dict_metadata[name]
    data = evil / "__0_0.distcp"
    begin = data.stat().st_size
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer)
    archive = write(data.with_suffix(".zip"), buffer.getvalue())
    _pickled(payload)(archive)
    with open(data, "ab") as file:
        file.write(archive.read_bytes())
    length = data.stat().st_size - begin
    archive.unlink()
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo(data.name, begin, length)
    del metadata.state_dict_metadata[name]
    fields = {"properties": entry.properties, "size": entry.size, "chunks": entry.chunks}
    memo_index = struct.pack("<I", 100_000)  # which nothing else uses
    program = (
        b"\x80\x02}("
        + _items(fields)
        + b"u"
        + b"r"
        + memo_index
        + b"0"
        # Only now: with other bases, members of the enum cannot be compared, which making them
        # does.
        + pickle.dumps(metadata, 2)[2:-1]
        + b"}"
        + _text("state_dict_metadata")
        + b"}("
        + _items(metadata.state_dict_metadata)
        + _set_attribute(_FORMAT, "__bases__", b"(" + _TENSOR + _BYTES + b"t")
        + _text(name)
        + _FORMAT
        + b"(K\x00tR"
        + b"j"
        + memo_index
        + b"b"
        + b"us"
        + b"b."
    )
    (evil / ".metadata").write_bytes(program)


def _items(values: dict[str, Any]) -> bytes:
    """Keys and values as opcodes between a mark and SETITEMS."""
    return b"".join(_text(key) + pickle.dumps(value, 2)[2:-1] for key, value in values.items())


def _replaced_method(owner: tuple[str, str], name: str) -> Change:
    def change(evil: Path) -> None:
        program = b"\x80\x02" + _set_attribute(_global(*owner), name, _TENSOR)
        rest = (evil / ".metadata").read_bytes()
        (evil / ".metadata").write_bytes(program + pickle.dumps(pickle.loads(rest), 2)[2:])

    return change


def _program(body: Callable[[Path], object] | bytes) -> Change:
    """Write as ``.metadata`` bytes, or the pickle of the object that ``body`` returns."""

    def change(evil: Path) -> None:
        content = body if isinstance(body, bytes) else pickle.dumps(body(evil))
        (evil / ".metadata").write_bytes(content)

    return change


def _double(evil: Path) -> None:
    (evil / ".metadata").write_bytes((evil / ".metadata").read_bytes() * 2)


def _edit(edit: Callable[[Metadata], object]) -> Change:
    def change(evil: Path) -> None:
        metadata: Metadata = pickle.loads((evil / ".metadata").read_bytes())
        edit(metadata)
        (evil / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def _entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata[_EMBED]


# Where valid metadata may hold a call.
_CALLS: dict[str, Callable[[Metadata, Any], object]] = {
    "planner_data": lambda metadata, call: setattr(metadata, "planner_data", call),
    "storage_meta": lambda metadata, call: setattr(metadata, "storage_meta", call),
    "key": lambda metadata, call: metadata.state_dict_metadata.update(
        {call: BytesStorageMetadata()}
    ),
    "size": lambda metadata, call: setattr(_entry(metadata), "size", call),
    "dtype": lambda metadata, call: setattr(_entry(metadata).properties, "dtype", call),
    "storage": lambda metadata, call: metadata.storage_data.update(
        {call: _StorageInfo("__0_0.distcp", 0, 1)}
    ),
}


def _with_call(put: Callable[[Metadata, Any], object]) -> Change:
    return lambda evil: _edit(lambda metadata: put(metadata, touch(evil.parent)))(evil)


def nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


# Lists of lists of the same list: who walks through them meets 10^30 items.
_MEMO_BOMB = (
    b"\x80\x02]q\x00" + b"".join(b"](" + b"h\x00" * 10 + b"eq\x00" for _ in range(30)) + b"."
)
_LONG = b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"."

PROGRAMS: dict[str, Change] = {
    "class-as-tensor": _class_as_tensor,
    "metadata-init": _replaced_method((_METADATA, "Metadata"), "__init__"),
    "metadata-setstate": _replaced_method((_METADATA, "TensorProperties"), "__setstate__"),
    "chunk-class": _replaced_method((_METADATA, "ChunkStorageMetadata"), "sizes"),
    "size-class": _replaced_method(("torch", "Size"), "numel"),
    "function": _replaced_method(("torch.serialization", "_get_layout"), "x"),
    "whole": _program(lambda evil: touch(evil.parent)),
    "eval": _program(lambda evil: Call(eval, f"open({str(marker_of(evil.parent))!r}, 'w')")),
    "torch-load": _program(lambda evil: Call(torch.load, str(evil / "x"))),
    "deep": _program(nested(200_000)),
    "memo-bomb": _program(_MEMO_BOMB),
    "long": _program(_LONG),
    "text": _program(b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"."),
    "frame": _program(b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"."),
    "doubled": _double,
    "persistent": _program(b"\x80\x02X\x01\x00\x00\x00aQ."),
    "extension": _program(b"\x80\x02\x82\x01."),
    **{f"call-in-{field}": _with_call(put) for field, put in _CALLS.items()},
}
# Others match "evil". A second pickle after the first one does no harm.
PROGRAM_MESSAGES = {"whole": r"posix\.system|cannot be read", "doubled": None}


# Metadata that is data, and wrong.


def _storage(metadata: Metadata) -> tuple[MetadataIndex, _StorageInfo]:
    return next((k, v) for k, v in metadata.storage_data.items() if k.fqn == _EMBED)


def _stored_as(**fields: Any) -> Callable[[Metadata], object]:
    def edit(metadata: Metadata) -> None:
        key, info = _storage(metadata)
        values = {"relative_path": info.relative_path, "offset": info.offset, "length": info.length}
        metadata.storage_data[key] = _StorageInfo(**values | fields)

    return edit


def _chunks(
    make: Callable[[torch.Size], list[tuple[tuple[int, ...], tuple[int, ...]]]],
) -> Callable[[Metadata], object]:
    def edit(metadata: Metadata) -> None:
        entry, (_, info) = _entry(metadata), _storage(metadata)
        entry.chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in make(entry.size)
        ]
        for chunk in entry.chunks:
            metadata.storage_data[MetadataIndex(_EMBED, chunk.offsets)] = info

    return edit


_STORAGE: dict[str, list[Any]] = {
    "relative_path": ["../../outside/secret.txt", "/etc/passwd", ".", "", 5, "a\0b"],
    "offset": [-8, 2**70, "0"],
    "length": [2**62, 0],
}
STRUCTURES: dict[str, Callable[[Metadata], object]] = {
    "no-chunks": _chunks(lambda size: []),
    "half": _chunks(lambda size: [((0, 0), (size[0] // 2, size[1]))]),
    "twice": _chunks(lambda size: [((0, 0), tuple(size))] * 2),
    "overlap": _chunks(
        lambda size: [((0, 0), (size[0] - 1, size[1])), ((1, 0), (size[0] - 1, size[1]))]
    ),
    "beyond": _chunks(lambda size: [((1, 0), tuple(size))]),
    "thin": _chunks(lambda size: [((0, 0), (size[0], 0))]),
    "many": _chunks(lambda size: [((0, 0), (1, 1))] * 50_000),
    "one-dimension": _chunks(lambda size: [((0,), (size[0] * size[1],))]),
    "no-storage": lambda metadata: metadata.storage_data.pop(_storage(metadata)[0]),
    **{name: _stored_as(**{key: value}) for name, key, value in each_value(_STORAGE)},
    "huge-size": lambda metadata: setattr(_entry(metadata), "size", torch.Size((2**40, 2**20))),
    "size-list": lambda metadata: setattr(_entry(metadata), "size", [1, 2]),
    "no-properties": lambda metadata: setattr(_entry(metadata), "properties", None),
    "no-entries": lambda metadata: metadata.state_dict_metadata.clear(),
    "bytes-entry": lambda metadata: metadata.state_dict_metadata.update(
        {_EMBED: BytesStorageMetadata()}
    ),
    "extra-bytes": lambda metadata: metadata.state_dict_metadata.update(
        {"extra": BytesStorageMetadata()}
    ),
    "number-key": lambda metadata: metadata.state_dict_metadata.update(
        {5: _entry(metadata)}  # type: ignore[dict-item]
    ),
    "storage-none": lambda metadata: setattr(metadata, "storage_data", None),
    "storage-list": lambda metadata: setattr(metadata, "storage_data", [1]),
}


# What lies in the folder.


FOLDERS: dict[str, Change] = {
    f"{what}-{name}": replaced(name, kind)
    for what, kind in (("link", secret), ("pipe", pipe))
    for name in (".metadata", "__0_0.distcp", "manifest.json")
}
# These lie beside the files that the manifest lists. Such a file is named, and not read.
UNLISTED: dict[str, Change] = {
    f"{what}-extra": replaced("extra", kind) for what, kind in (("link", secret), ("pipe", pipe))
}


def _manifest(field: str, value: Any) -> Change:
    """Change a field of the manifest, which ``place_of`` finds."""

    def change(evil: Path) -> None:
        manifest = json.loads((evil / "manifest.json").read_text())
        owner, name = place_of(manifest, field)
        owner[name] = value
        write_manifest(evil, manifest)

    return change


def _raw_manifest(content: bytes) -> Change:
    return lambda evil: (evil / "manifest.json").write_bytes(content)


_WRONG_NUMBERS = (-1, "x", 1e30, None, [], True, 10**30)
# By field, which ``place_of`` finds.
_FIELDS: dict[str, Sequence[Any]] = {
    "data/next_step": _WRONG_NUMBERS,
    "step": _WRONG_NUMBERS,
    "lr": ("x", -1e400, [], {}),
    "layout": (5, [], {"pp": "x"}, {"pp": -1}, None),
    "files": (5, [], {"a": 1}, {"../x": [1, "a"]}, None),
    "tensors": (5, [], {"a": 1}, {"a": [1, 2]}),
    "model": (5, [], {}, {"model.dim": "x"}),
    "model/model.n_layers": (10**7,),
    "model/model.dim": (10**18, -4),
    "model/model.tied": ("false",),
    "world_size": (-3,),
    "recipe": (5, "[[[", "a = " + "[" * 50_000),
    "extra": (1,),
    "format": (10**30,),
}
MANIFESTS: dict[str, Change] = {
    **{name: _manifest(field, value) for name, field, value in each_value(_FIELDS)},
    "deep": _raw_manifest(b"[" * 200_000),
    "digits": _raw_manifest(b'{"step": ' + b"9" * 100_000 + b"}"),
    "list": _raw_manifest(b"[]"),
    "empty": _raw_manifest(b""),
    "constant": _raw_manifest(b"NaN"),
    "bytes": _raw_manifest(bytes(range(256)) * 10),
    "sparse": lambda evil: sparse(evil / "manifest.json", 1 << 36),
}


def _another_folder(name: str) -> Change:
    """A recipe inside the checkpoint that names a folder outside of it."""

    def change(evil: Path) -> None:
        outside = evil.parent.parent / "outside"
        recipe = f'[model]\nhf = "{outside}"\n[data]\nsource = "tokens"\npath = "{outside}"\n'
        if name == "assets":
            shutil.rmtree(evil / "assets")
            (evil / "assets").symlink_to(outside)
        _manifest("recipe", recipe)(evil)

    return change


# Files of torch.save.


def torch_case(name: str, change: Callable[[Path], object], message: str | None) -> list[Case]:
    """The changed one-file export, as cases of ``inspect`` and ``convert``."""

    def make(met: str, folder: Path) -> list[str]:
        shutil.copy(folder.parent / "base/one.pt", folder / "evil.pt")
        change(folder / "evil.pt")
        return command(met, "evil.pt")

    return cases_of(f"torch-{name}", make, message, ("inspect", "convert"))


def _saved(edit: Callable[[Any, Path], Any]) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        changed = edit(content, path.parent)
        torch.save(content if changed is None else changed, path)

    return change


def _pickled(
    body: Callable[[Path], bytes] | bytes, *, compress: bool = False
) -> Callable[[Path], object]:
    """Replace ``data.pkl`` in the file by ``body``, or what it returns for the folder."""

    def change(path: Path) -> None:
        items, pickled = read_archive(path)
        items[pickled] = body if isinstance(body, bytes) else body(path.parent)
        write_archive(path, items, zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED)

    return change


def read_archive(path: Path) -> tuple[dict[str, bytes], str]:
    """The items of a file of torch.save, and which of them is the pickle.

    They are read without their checksums. Our export leaves those of tensors empty, and torch does
    not check them.
    """
    items = {}
    with zipfile.ZipFile(path) as archive:
        for item in archive.namelist():
            with archive.open(item) as file:
                file._expected_crc = None  # type: ignore[attr-defined]
                items[item] = file.read()
    (pickled,) = [item for item in items if item.endswith("data.pkl")]
    return items, pickled


def write_archive(path: Path, items: dict[str, bytes], method: int) -> None:
    """Write items as ``read_archive`` returns them; ``method`` is how they are compressed."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for item, content in items.items():
            archive.writestr(item, content)


def _fact(field: str, value: Any) -> Callable[[Path], object]:
    def edit(content: Any, folder: Path) -> None:
        content["composer3d"][field] = value

    return _saved(edit)


_FACTS: dict[str, list[Any]] = {
    "layout": [5],
    "step": ["x", 10**30, -1],
    "model": [[1], None],
    "data": ["x"],
    "recipe": [5],
    "extra": [5],
}
TORCH: dict[str, Callable[[Path], object]] = {
    "call": _saved(lambda content, folder: {**content, "x": touch(folder)}),
    "call-as-key": _saved(lambda content, folder: {touch(folder): 1}),
    "program": _pickled(lambda folder: pickle.dumps(touch(folder))),
    "deep": _pickled(nested(200_000)),
    "memo-bomb": _pickled(_MEMO_BOMB),
    "long": _pickled(_LONG),
    # It takes 100 MB, so it is only made when the case is.
    "compressed": _pickled(lambda folder: b"\x80\x02]" + b"N0" * 50_000_000 + b".", compress=True),
    **{name: _fact(field, value) for name, field, value in each_value(_FACTS)},
    "no-facts": _saved(lambda content, folder: content.pop("composer3d") and None),
    "facts-number": _saved(lambda content, folder: content.update(composer3d=5)),
    "facts-tensor": _saved(lambda content, folder: content.update(composer3d=torch.ones(2))),
    "files-number": _saved(lambda content, folder: content.update(files=5)),
    "files-elsewhere": _saved(
        lambda content, folder: content.update(files={"../tokenizer.json": "x"})
    ),
    "files-number-name": _saved(lambda content, folder: content.update(files={5: "x"})),
    "tensor": _saved(lambda content, folder: torch.ones(3)),
    "list": _saved(lambda content, folder: [torch.ones(3)]),
    "sparse-tensor": _saved(
        lambda content, folder: content["model"].update(x=torch.ones(2, 2).to_sparse())
    ),
    "meta-tensor": _saved(
        lambda content, folder: content["model"].update(x=torch.empty(3, device="meta"))
    ),
    "expanded": _saved(
        lambda content, folder: content["model"].update(
            {
                "first.embed.weight": torch.ones(1).expand(
                    content["model"]["first.embed.weight"].shape
                )
            }
        )
    ),
    "empty": lambda path: path.write_bytes(b""),
    "junk": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "legacy": lambda path: torch.save(
        {"x": touch(path.parent)}, path, _use_new_zipfile_serialization=False
    ),
    "sparse": lambda path: os.truncate(path, 1 << 36),
}


def _cases() -> list[Case]:
    cases: list[Case] = []
    for name, change in PROGRAMS.items():
        message = PROGRAM_MESSAGES.get(name, "evil")
        cases += checkpoint_case(f"program-{name}", change, message)
    for name, edit in STRUCTURES.items():
        cases += checkpoint_case(f"structure-{name}", _edit(edit), "evil")
    for name, change in FOLDERS.items():
        cases += checkpoint_case(f"folder-{name}", change, "evil")
    for name, change in UNLISTED.items():
        message = "evil/extra is not in the manifest: it is not read"
        accepted = checkpoint_case(f"folder-{name}", change, message)
        cases += [replace(case, statuses=(0,)) for case in accepted]
    for name, change in MANIFESTS.items():
        # A recipe in a manifest is only shown: one that is no TOML does no harm.
        message = None if name.startswith("recipe-") else "evil"
        cases += checkpoint_case(f"manifest-{name}", change, message, "resume", "inspect")
    for name in ("hf", "assets"):
        cases += checkpoint_case(f"manifest-names-{name}", _another_folder(name), None)
    for name, change in TORCH.items():
        cases += torch_case(name, change, "evil.pt|out")
    cases += torch_case("pipe", lambda path: replaced(path.name, pipe)(path.parent), "plain file")
    for number in range(60):
        change = flipped(".metadata", _SEED + number)
        cases += checkpoint_case(
            f"flip-{number:02d}", change, None, ("resume", "inspect", "convert")[number % 3]
        )
    for number in range(30):
        change = flipped("manifest.json", _SEED + number)
        cases += checkpoint_case(
            f"manifest-flip-{number:02d}", change, None, ("resume", "inspect")[number % 2]
        )
    for number in range(30):

        def flip(path: Path, seed: int = _SEED + number) -> None:
            flipped(path.name, seed)(path.parent)

        cases += torch_case(f"flip-{number:02d}", flip, None)[number % 2 : number % 2 + 1]
    return cases


CASES = _cases()
