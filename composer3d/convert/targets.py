"""What ``convert`` writes, of any form, from a stream of tensors by our names, of which none is kept.

The place of each tensor is known before the first is there: safetensors begin with a header, and files of
``torch.save`` are made with their tensors' bytes left out, and filled in.
"""

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.utils.serialization import config as serialization

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.metadata import METADATA, StorageInfo, tensors_of
from composer3d.checkpoint.pickles import reading
from composer3d.checkpoint.torchfile import load_torch
from composer3d.convert.formats import (
    CODES,
    DIGESTS,
    Kind,
    Source,
    bytes_of,
    digest_of,
    facts_digest,
    flat,
    name_of,
    nbytes,
)
from composer3d.models.llama import names
from composer3d.models.llama.huggingface import config_of
from composer3d.models.llama.shape import ModelShape
from composer3d.spec.files import parse_json

Kinds = dict[str, Kind]
Stream = Iterator[tuple[str, Tensor]]
Slots = dict[str, list[tuple[Path, int]]]  # files and offsets where a tensor belongs
_EMBED, _DCP = "model.first.embed.weight", "__0_0.distcp"


def write(
    to: str, path: Path, source: Source, kinds: Kinds, stream: Stream, shard: int
) -> list[str]:
    """Write the tensors of ``stream`` at ``path``, where nothing but an empty folder is, or an empty file for torch.

    ``source`` says what the model is, and carries files; ``kinds`` are what is to come, by our names; ``shard`` is the
    largest size of one file of safetensors, in bytes. Returns the names of tensors that did not come. Raises
    CheckpointError where the form cannot hold such a model, KeyError where a tensor has come twice.
    """
    if to == "torch":
        return _torch(path, source, kinds, stream)
    others = path / "assets" if to == "dcp" and source.carried else path
    others.mkdir(exist_ok=True)
    for name, content in source.carried.items():
        (others / name).write_bytes(content)
    if to == "dcp":
        return _dcp(path, source.manifest, kinds, stream)
    if to == "meta":
        _write_json(path / "params.json", names.meta_params_of(source.shape))
        return _fill(
            _meta(path, source.shape, kinds), stream, lambda n, t: names.to_meta(n, t, source.shape)
        )
    with reading(f"the config.json that {source.path} carries", "; remove or mend it"):
        carried = parse_json(source.carried.get("config.json", b"{}"))
        if not isinstance(carried, dict):
            raise ValueError("it is no JSON object")
        config = config_of(source.shape, name_of(kinds[_EMBED][1]), carried)
    _write_json(path / "config.json", config)
    return _fill(_safetensors(path, kinds, names.hf_names(source.shape), shard), stream)


def _fill(
    slots: Slots, stream: Stream, form: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
) -> list[str]:
    """Write into files that have their full size already."""
    for name, tensor in stream:
        content = bytes_of(form(name, tensor))
        for path, offset in slots.pop(name):
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(content)
    return sorted(slots)


def _safetensors(folder: Path, kinds: Kinds, own: dict[str, str], limit: int) -> Slots:
    shards: list[list[str]] = []
    room = 0
    for name, kind in kinds.items():
        if nbytes(kind) > room:
            shards.append([])
            room = max(limit, nbytes(kind))
        shards[-1].append(name)
        room -= nbytes(kind)
    slots: Slots = {}
    index, codes = {}, {dtype: code for code, dtype in CODES.items()}
    for number, shard in enumerate(shards, 1):
        path = folder / (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if shards[1:]
            else "model.safetensors"
        )
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for name in sorted(
            shard, key=lambda name: -kinds[name][1].itemsize
        ):  # wide ones first: all are aligned
            (shape, dtype), key = kinds[name], own[name.removeprefix("model.")]
            begins[name], end = end, end + nbytes(kinds[name])
            header[key] = {
                "dtype": codes[dtype],
                "shape": shape,
                "data_offsets": [begins[name], end],
            }
            index[key] = path.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        slots |= {name: [(path, 8 + len(text) + begin)] for name, begin in begins.items()}
    if shards[1:]:
        total = {"total_size": sum(map(nbytes, kinds.values()))}
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": total, "weight_map": index}
        )
    return slots


def _meta(folder: Path, shape: ModelShape, kinds: Kinds) -> Slots:
    path, own = (
        folder / "consolidated.00.pth",
        {f"model.{k}": v for k, v in names.meta_names(shape).items()},
    )
    copy = (
        {"output.weight": kinds[_EMBED]} if shape.tied else {}
    )  # Meta's files hold a tied head as well
    offsets = _save_hollow(path, _hollow({own[name]: kind for name, kind in kinds.items()} | copy))
    slots = {name: [(path, offsets[own[name]])] for name in kinds}
    slots[_EMBED] += [(path, offsets[name]) for name in copy]
    return slots


def _torch(path: Path, source: Source, kinds: Kinds, stream: Stream) -> list[str]:
    """One file, with the digests of what it holds as its last tensor: they are known when all others are written."""
    facts = asdict(replace(source.manifest, files={}, tensors={}))
    texts = {name: content.decode("latin-1") for name, content in source.carried.items()}
    tree: dict[str, Any] = {"composer3d": facts, "files": texts}
    for name, tensor in _hollow(kinds).items():
        part, _, rest = name.partition(".")
        tree.setdefault(part, {})[rest] = tensor
    tree[DIGESTS] = torch.empty(1 + len(kinds), 16, dtype=torch.uint8)
    offsets = _save_hollow(path, tree)
    order = [name for name in offsets if name != DIGESTS]
    digests = {
        "": facts_digest(
            json.loads(json.dumps(facts)), texts, {name: kinds[name] for name in order}
        )
    }

    def digested() -> Stream:
        for name, tensor in stream:
            digests[name] = digest_of(tensor)
            yield name, tensor

    left = _fill({name: [(path, offsets[name])] for name in order}, digested())
    with open(path, "r+b") as file:
        file.seek(offsets[DIGESTS])
        file.write(
            b"".join(bytes.fromhex(digests[name]) for name in ("", *order) if name in digests)
        )
    return left


def _hollow(kinds: Kinds) -> dict[str, Tensor]:
    """Tensors that nobody touches: they take addresses and no memory."""
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}


def _save_hollow(path: Path, tree: dict[str, Any]) -> dict[str, int]:
    """Write ``tree`` as ``torch.save`` does, without the bytes of its tensors; where these go, by names of ``flat``."""
    with torch.serialization.skip_data():
        _save(tree, path)
    return {name: stored.begin for name, stored in flat(load_torch(path))}


def _save(content: Any, file: Path | IO[bytes]) -> None:
    """``torch.save``; where that cannot write, it hides what the system said in an error of its own."""
    try:
        torch.save(content, file)
    except RuntimeError as error:
        raise OSError(f"{error.__context__ or error}; is the disk full?") from None


def _dcp(folder: Path, manifest: manifests.Manifest, kinds: Kinds, stream: Stream) -> list[str]:
    """One file with a ``torch.save`` of each tensor, as DCP's own writer makes it, which would keep them all."""
    left, stored, entries = dict(kinds), {}, Metadata({}).state_dict_metadata
    with open(folder / _DCP, "wb") as file, serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # the digests say more
        for name, tensor in stream:
            del left[name]
            begin, origin = file.tell(), torch.Size([0] * tensor.dim())
            _save(
                tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor,
                file,
            )
            stored[MetadataIndex(name, origin)] = StorageInfo(_DCP, begin, file.tell() - begin)
            chunks = [ChunkStorageMetadata(origin, tensor.shape)]
            entries[name] = TensorStorageMetadata(
                TensorProperties(tensor.dtype), tensor.shape, chunks
            )
    metadata = Metadata(
        entries, {name: (name,) for name in kinds}, stored, StorageMeta(), CURRENT_DCP_VERSION
    )
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {
        str(path.relative_to(folder)): (path.stat().st_size, manifests.digest_file(path))
        for path in paths
    }
    manifests.write(
        folder, replace(manifest, files=files, tensors=tensors_of(metadata, str(folder)))
    )
    return sorted(left)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
