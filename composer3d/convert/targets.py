"""What ``convert`` writes: each form takes one tensor after another, by our names, and is then closed.

The place of each tensor is known before the first is there, so that no tensor is kept: safetensors begin with a header,
files of ``torch.save`` are made with their tensors' bytes left out, and filled in.
"""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.utils.serialization import config as serialization

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.pickles import METADATA, tensors_of
from composer3d.convert import names
from composer3d.convert.formats import CODES, FACTS, Kind, Source, bytes_of, flat, name_of, nbytes
from composer3d.errors import CheckpointError
from composer3d.hf import config_of
from composer3d.shape import ModelShape

Kinds = dict[str, Kind]
_EMBED = "model.first.embed.weight"


def make_target(to: str, path: Path, source: Source, kinds: Kinds, shard: int) -> "_Slots | _Dcp":
    """Begin a checkpoint at ``path``, where nothing is, of what ``source`` says and carries.

    Its ``put(name, tensor)`` writes a tensor by our name; a KeyError is one that was put before. Its ``close()`` writes
    what comes last, and returns those that never were.

    Args:
        to: hf, meta, torch or dcp.
        shard: largest size of one file of safetensors, in bytes.

    Raises:
        CheckpointError: the form cannot hold such a model.
    """
    if to == "torch":
        texts = {name: content.decode("latin-1") for name, content in source.carried.items()}
        tree: dict[str, Any] = {"composer3d": {name: getattr(source.manifest, name) for name in FACTS}, "files": texts}
        for name, tensor in _hollow(kinds).items():
            part, _, rest = name.partition(".")
            tree.setdefault(part, {})[rest] = tensor
        return _Slots({name: [(path, offset)] for name, offset in _save_hollow(path, tree).items()})
    others = path / "assets" if to == "dcp" and source.carried else path
    others.mkdir(exist_ok=True)
    for name, content in source.carried.items():
        (others / name).write_bytes(content)
    if to == "dcp":
        return _Dcp(path, source.manifest, kinds)
    if to == "meta":
        _write_json(path / "params.json", names.meta_params_of(source.shape))
        return _meta(path, source.shape, kinds)
    try:
        carried = json.loads(source.carried.get("config.json", "{}"))
    except ValueError:
        raise CheckpointError(f"the config.json that {source.path} carries is no JSON; remove or mend it") from None
    _write_json(path / "config.json", config_of(source.shape, name_of(kinds[_EMBED][1]), carried))
    return _safetensors(path, kinds, names.hf_names(source.shape), shard)


class _Slots:
    """Files of their full size, into which tensors are written where they belong."""

    def __init__(self, slots: dict[str, list[tuple[Path, int]]], form: Callable[[str, Tensor], Tensor] | None = None):
        self._slots, self._form = slots, form

    def put(self, name: str, tensor: Tensor) -> None:
        tensor = self._form(name, tensor) if self._form else tensor
        for path, offset in self._slots.pop(name):
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(bytes_of(tensor))

    def close(self) -> list[str]:
        return sorted(self._slots)


def _safetensors(folder: Path, kinds: Kinds, own: dict[str, str], limit: int) -> _Slots:
    shards: list[list[str]] = []
    room = 0
    for name, kind in kinds.items():
        if nbytes(kind) > room:
            shards.append([])
            room = max(limit, nbytes(kind))
        shards[-1].append(name)
        room -= nbytes(kind)
    slots: dict[str, list[tuple[Path, int]]] = {}
    index, codes = {}, {dtype: code for code, dtype in CODES.items()}
    for number, shard in enumerate(shards, 1):
        path = folder / (f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else "model.safetensors")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for name in sorted(shard, key=lambda name: -kinds[name][1].itemsize):  # wide ones first: all are aligned
            (shape, dtype), key = kinds[name], own[name.removeprefix("model.")]
            begins[name], end = end, end + nbytes(kinds[name])
            header[key] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [begins[name], end]}
            index[key] = path.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        slots |= {name: [(path, 8 + len(text) + begin)] for name, begin in begins.items()}
    if shards[1:]:
        total = {"total_size": sum(map(nbytes, kinds.values()))}
        _write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": index})
    return _Slots(slots)


def _meta(folder: Path, shape: ModelShape, kinds: Kinds) -> _Slots:
    path, own = folder / "consolidated.00.pth", {f"model.{k}": v for k, v in names.meta_names(shape).items()}
    copy = {"output.weight": kinds[_EMBED]} if shape.tied else {}  # Meta's files hold a tied head as well
    offsets = _save_hollow(path, _hollow({own[name]: kind for name, kind in kinds.items()} | copy))
    slots = {name: [(path, offsets[own[name]])] for name in kinds}
    slots[_EMBED] += [(path, offsets[name]) for name in copy]
    return _Slots(slots, lambda name, tensor: names.to_meta(name, tensor, shape))


def _hollow(kinds: Kinds) -> dict[str, Tensor]:
    """Tensors that nobody touches: they take addresses and no memory."""
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}


def _save_hollow(path: Path, tree: dict[str, Any]) -> dict[str, int]:
    """Write ``tree`` as ``torch.save`` does, without the bytes of its tensors; where these go, by names of ``flat``."""
    with torch.serialization.skip_data():
        torch.save(tree, path)
    laid_out = torch.load(path, map_location="meta", weights_only=True)
    return {name: cast(int, tensor.untyped_storage()._checkpoint_offset) for name, tensor in flat(laid_out)}


class _Dcp:
    """One file with a ``torch.save`` of each tensor, as DCP's own writer makes it, which would keep them all."""

    def __init__(self, folder: Path, manifest: manifests.Manifest, kinds: Kinds) -> None:
        self._folder, self._manifest, self._left = folder, manifest, dict(kinds)
        self._metadata = Metadata({}, {name: (name,) for name in kinds}, {}, StorageMeta(), CURRENT_DCP_VERSION)
        self._file = "__0_0.distcp"

    def put(self, name: str, tensor: Tensor) -> None:
        shape, dtype = self._left.pop(name)
        with open(self._folder / self._file, "ab") as file:
            begin = file.tell()
            alone = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
            with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # the digests say more
                torch.save(alone, file)
            where = _StorageInfo(self._file, begin, file.tell() - begin)
        origin = torch.Size([0] * len(shape))
        self._metadata.storage_data[MetadataIndex(name, origin)] = where
        self._metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype), torch.Size(shape), [ChunkStorageMetadata(origin, torch.Size(shape))]
        )

    def close(self) -> list[str]:
        (self._folder / METADATA).write_bytes(pickle.dumps(self._metadata))
        files = {
            str(path.relative_to(self._folder)): (path.stat().st_size, manifests.digest_file(path))
            for path in sorted(self._folder.rglob("*"))
            if path.is_file()
        }
        tensors = tensors_of(self._metadata, str(self._folder))
        manifests.write(self._folder, replace(self._manifest, files=files, tensors=tensors))
        return sorted(self._left)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
