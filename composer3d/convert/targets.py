"""Write a checkpoint in any of the formats, from a stream of tensors that arrive one at a time.

Each tensor is written when it arrives, and is not kept. For ``hf``, ``meta`` and ``torch``, each
file is first written in its full size, without the bytes of its tensors. So the offset of each
tensor is known before the first one arrives, and the tensors can arrive in any order. A ``dcp``
file is written in the order of arrival.
"""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

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
from composer3d.checkpoint.manifest import Manifest, TensorSpec
from composer3d.checkpoint.metadata import METADATA, StorageInfo, tensor_specs
from composer3d.checkpoint.pickles import reading
from composer3d.checkpoint.torchfile import load_torch
from composer3d.convert.formats import (
    DIGESTS,
    SAFETENSORS_DTYPES,
    Format,
    Source,
    bytes_of,
    digest_of,
    dtype_name,
    facts_digest,
    flatten,
    nbytes,
)
from composer3d.facts.errors import CheckpointError
from composer3d.facts.files import parse_json
from composer3d.models.llama import names as llama_names
from composer3d.models.llama.huggingface_rope import LONGEST
from composer3d.models.llama.shape import ModelShape
from composer3d.models.locations import Location
from composer3d.models.registry import DEFAULT

EMBEDDING = "model.first.embed.weight"
_DCP_FILE = "__0_0.distcp"  # the name that DCP gives to the file of rank 0

Specs = Mapping[str, TensorSpec]
Stream = Iterator[tuple[str, Tensor]]
# Takes our name of a tensor and the tensor, and returns it in the layout of the format.
Layout = Callable[[str, Tensor], Tensor]


class Slot(NamedTuple):
    """The place of a tensor's bytes in a file."""

    path: Path
    offset: int  # bytes


# The slots of each tensor, by our name, or in the format ``hf`` by the name in its files, unless it
# is a part of a tensor there. A tensor that the format stores twice has two slots.
_Slots = dict[str, list[Slot]]


def write(
    to: Format, path: Path, source: Source, specs: Specs, stream: Stream, shard: int
) -> list[str]:
    """Write the tensors of ``stream`` at ``path``.

    Args:
        to: the format.
        path: an empty folder, or an empty file for ``torch``.
        source: the checkpoint to copy. Its shape, manifest and carried files are written as well,
            as far as the format has a place for them.
        specs: the shape and dtype of all tensors in ``stream``, by our names.
        stream: pairs of our name and a CPU tensor.
        shard: the largest size of one safetensors file, in bytes. A larger tensor gets a file of
            its own.

    Returns:
        The names of tensors that were not written: in the format ``hf``, those that they would have
        in the files, or else, as those of parts of tensors there, those in ``specs``.

    Raises:
        CheckpointError: the format cannot represent the model, or the carried config.json is wrong.
        KeyError: a tensor is twice in ``stream``, or is not in ``specs``.
        OSError: a file cannot be written.
    """
    if to == "meta" and source.architecture != DEFAULT:
        raise CheckpointError(
            f'Meta\'s format has no models of the architecture "{source.architecture}"; '
            "convert to hf, torch or dcp"
        )
    if to == "torch":
        return _write_torch(path, source, specs, stream)

    carried_folder = path / "assets" if to == "dcp" and source.carried else path
    carried_folder.mkdir(exist_ok=True)
    for name, content in source.carried.items():
        (carried_folder / name).parent.mkdir(exist_ok=True)
        (carried_folder / name).write_bytes(content)

    if to == "dcp":
        return _write_dcp(path, source.manifest, specs, stream)
    if to == "meta":
        return _write_meta(path, source.shape, specs, stream)
    return _write_hf(path, source, specs, stream, shard)


def _fill(slots: _Slots, stream: Stream, layout: Layout | None = None) -> list[str]:
    """Write the tensors into files that already have their full size.

    Returns the names in ``slots`` that were not in ``stream``.
    """
    for name, tensor in stream:
        content = bytes_of(tensor if layout is None else layout(name, tensor))
        for path, offset in slots.pop(name):
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(content)
    return sorted(slots)


def _write_hf(
    folder: Path, source: Source, specs: Specs, stream: Stream, shard_limit: int
) -> list[str]:
    """Write config.json, safetensors files of at most ``shard_limit`` bytes, and their index."""
    with reading(f"the config.json that {source.path} carries", "; remove it or correct it"):
        carried = parse_json(source.carried.get("config.json", b"{}"))
        if not isinstance(carried, dict):
            raise ValueError("it is not a JSON object")
        config = source.huggingface.make_config(source.shape, specs[EMBEDDING].dtype, carried)
    _write_json(folder / "config.json", config)
    length = config.get(LONGEST)
    if LONGEST not in carried and length is not None and source.shape.most_tokens is None:
        source.notes.append(
            f"config.json: {LONGEST} = {length:,} is a guess, because the source does not say how "
            "long the model's texts may be; correct it before others load the copy"
        )

    locations = {
        f"model.{name}": location
        for name, location in source.model_of.hf_locations(source.shape).items()
    }
    in_files: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        for in_file in locations[name].names:
            held = in_files.setdefault(in_file, TensorSpec(locations[name].shape, spec.dtype))
            if held.dtype != spec.dtype:
                raise CheckpointError(
                    f"{name} in {spec.dtype} is a part of {in_file}, of which another part is in "
                    f"{held.dtype}; give one --dtype"
                )
    copies = {
        copy: locations[f"model.{name}"].names[0]
        for copy, name in source.model_of.copies(source.shape).items()
    }
    in_files |= {copy: in_files[original] for copy, original in copies.items()}
    shards = _cut_into_shards(in_files, shard_limit)
    slots: _Slots = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        slots |= _write_hollow_safetensors(folder / file_name, in_files, shard)
        weight_map |= dict.fromkeys(_by_width(in_files, shard), file_name)
    if len(shards) > 1:
        total_size = sum(map(nbytes, in_files.values()))
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    for copy, original in copies.items():
        slots[original] += slots.pop(copy)
    _add_slots_of_parts(slots, specs, locations)
    return _fill(slots, _in_files(stream, locations))


def _add_slots_of_parts(slots: _Slots, specs: Specs, locations: Mapping[str, Location]) -> None:
    """Replace the slot of each tensor that joins several of ours by a slot for each of them.

    Our tensors are rows of the one in the file, so the bytes of each are one after the other.
    """
    for name, spec in specs.items():
        location = locations[name]
        if location.rows is not None:
            ((path, begin),) = slots[location.names[0]]
            row = TensorSpec(location.shape[1:], spec.dtype)
            slots[name] = [Slot(path, begin + location.rows[0] * nbytes(row))]
    for name in specs:
        if locations[name].rows is not None:
            slots.pop(locations[name].names[0], None)


def _in_files(stream: Stream, locations: Mapping[str, Location]) -> Stream:
    """Yield the tensors of ``stream`` by the keys of their slots, and each expert by itself."""
    for name, tensor in stream:
        location = locations[name]
        if location.rows is not None:
            yield name, tensor
            continue
        in_file = tensor.mT if location.is_transposed else tensor
        parts = in_file.unbind() if location.is_stack else (in_file,)
        yield from zip(location.names, parts, strict=True)


def _cut_into_shards(specs: Specs, limit: int) -> list[list[str]]:
    """Distribute tensors over files in their order. One larger than ``limit`` gets its own file."""
    shards: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        if nbytes(spec) > room:
            shards.append([])
            room = max(limit, nbytes(spec))
        shards[-1].append(name)
        room -= nbytes(spec)
    return shards


def _by_width(specs: Specs, shard: list[str]) -> list[str]:
    """Sort tensors by the size of their elements, largest first, so that all are aligned."""
    return sorted(shard, key=lambda name: -getattr(torch, specs[name].dtype).itemsize)


def _write_hollow_safetensors(path: Path, specs: Specs, shard: list[str]) -> _Slots:
    """Write the header of a file, extend the file to its full size, and return its slots.

    Args:
        path: the file.
        specs: the shape and dtype of tensors, by their names in the files.
        shard: the names of the tensors of this file.
    """
    codes = {dtype_name(dtype): code for code, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins = {}
    end = 0
    for name in _by_width(specs, shard):
        spec = specs[name]
        begin, end = end, end + nbytes(spec)
        begins[name] = begin
        header[name] = {
            "dtype": codes[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [begin, end],
        }

    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data_begins = 8 + len(text)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(data_begins + end)
    return {name: [Slot(path, data_begins + begin)] for name, begin in begins.items()}


def _write_meta(folder: Path, shape: ModelShape, specs: Specs, stream: Stream) -> list[str]:
    """Write params.json and one file of weights. A tied embedding is also written as the head."""
    _write_json(folder / "params.json", llama_names.make_meta_params(shape))

    path = folder / "consolidated.00.pth"
    meta_names = {f"model.{name}": meta for name, meta in llama_names.meta_names(shape).items()}
    hollow = {meta_names[name]: spec for name, spec in specs.items()}
    if shape.tied:
        hollow["output.weight"] = specs[EMBEDDING]
    offsets = _save_hollow(path, _hollow_tensors(hollow))

    slots = {name: [Slot(path, offsets[meta_names[name]])] for name in specs}
    if shape.tied:
        slots[EMBEDDING].append(Slot(path, offsets["output.weight"]))
    return _fill(slots, stream, lambda name, tensor: llama_names.to_meta(name, tensor, shape))


def _write_torch(path: Path, source: Source, specs: Specs, stream: Stream) -> list[str]:
    """Write one file. Its last tensor holds the digests, and is filled in at the end."""
    facts = asdict(replace(source.manifest, files={}, tensors={}))
    texts = {name: content.decode("latin-1") for name, content in source.carried.items()}
    tree: dict[str, Any] = {"composer3d": facts, "files": texts}
    for name, tensor in _hollow_tensors(specs).items():
        branch, _, leaf = name.partition(".")
        tree.setdefault(branch, {})[leaf] = tensor
    tree[DIGESTS] = torch.empty(1 + len(specs), 16, dtype=torch.uint8)

    offsets = _save_hollow(path, tree)
    order = [name for name in offsets if name != DIGESTS]
    digest_of_facts = facts_digest(facts, texts, {name: specs[name] for name in order})

    digests: dict[str, str] = {}

    def with_digests() -> Stream:
        for name, tensor in stream:
            digests[name] = digest_of(tensor)
            yield name, tensor

    unwritten = _fill({name: [Slot(path, offsets[name])] for name in order}, with_digests())
    rows = [digest_of_facts, *(digests[name] for name in order if name in digests)]
    with open(path, "r+b") as file:
        file.seek(offsets[DIGESTS])
        file.write(b"".join(map(bytes.fromhex, rows)))
    return unwritten


def _hollow_tensors(specs: Specs) -> dict[str, Tensor]:
    """Make tensors without values. Their elements are never touched, so they take no memory."""
    return {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for name, spec in specs.items()
    }


def _save_hollow(path: Path, tree: dict[str, Any]) -> dict[str, int]:
    """Write ``tree`` as ``torch.save`` does, but without the bytes of its tensors.

    Returns the offset of each tensor's bytes in the file, by the name that ``flatten`` gives it.
    """
    with torch.serialization.skip_data():
        _save(tree, path)
    return {name: stored.begin for name, stored in flatten(load_torch(path))}


def _save(content: Any, file: Path | IO[bytes]) -> None:
    """Call ``torch.save``. If it cannot write, raise OSError with the reason of the system.

    ``torch.save`` itself raises a RuntimeError, which hides this reason.
    """
    try:
        torch.save(content, file)
    except RuntimeError as error:
        raise OSError(f"{error.__context__ or error}; is the disk full?") from None


def _write_dcp(folder: Path, manifest: Manifest, specs: Specs, stream: Stream) -> list[str]:
    """Write a file with the output of ``torch.save`` for each tensor, the metadata, the manifest.

    The first two files are as DCP's own writer makes them, but it would keep all tensors in memory.
    """
    missing = dict(specs)
    storage: dict[MetadataIndex, StorageInfo] = {}
    entries = Metadata({}).state_dict_metadata
    # CRC-32 checksums are not needed, because the manifest has digests of the files.
    without_crc32 = serialization.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
    with open(folder / _DCP_FILE, "wb") as file, without_crc32:
        for name, tensor in stream:
            del missing[name]
            begin = file.tell()
            # torch.save writes the whole storage of a tensor, so a view of a part of it is copied.
            is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
            _save(tensor.clone() if is_view else tensor, file)

            origin = torch.Size([0] * tensor.dim())
            size = file.tell() - begin
            storage[MetadataIndex(name, origin)] = StorageInfo(_DCP_FILE, begin, size)
            entries[name] = TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                tensor.shape,
                [ChunkStorageMetadata(origin, tensor.shape)],
            )

    metadata = Metadata(
        entries, {name: (name,) for name in specs}, storage, StorageMeta(), CURRENT_DCP_VERSION
    )
    (folder / METADATA).write_bytes(pickle.dumps(metadata))

    files = {
        str(path.relative_to(folder)): manifests.file_entry(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    tensors = tensor_specs(metadata, str(folder))
    manifests.write(folder, replace(manifest, files=files, tensors=tensors))
    return sorted(missing)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
