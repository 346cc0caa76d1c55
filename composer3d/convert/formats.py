"""Checkpoints of four forms, each opened as one ``Source``: our names, shapes, and a reader of one tensor at a time.

hf: a folder of Hugging Face's (config.json; safetensors or pytorch_model*.bin). meta: Meta's (params.json and
consolidated.*.pth). torch: one file that ``convert`` made. dcp: a checkpoint of a training run. Files are mapped where
that can be, so that an open one takes no memory; pickles are read by ``checkpoint.pickles`` alone, as data.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch import Tensor

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import Manifest
from composer3d.checkpoint.metadata import METADATA, read_metadata, read_whole, tensors_of
from composer3d.checkpoint.pickles import reading
from composer3d.checkpoint.torchfile import Stored, load_torch
from composer3d.convert.carried import NAMES, TOTAL_LIMIT, carried_by, trusted_texts
from composer3d.models.llama import names
from composer3d.models.llama.huggingface import read_shape, shape_from, shown
from composer3d.models.llama.shape import ModelShape
from composer3d.spec.errors import CheckpointError
from composer3d.spec.files import MIB, open_plain, read_json

DTYPES = ("float32", "bfloat16", "float16", "float64")
CODES = {
    code: dtype for code, dtype in _TYPES.items() if dtype
}  # of safetensors, as far as this torch has them
_HF = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The first that a folder has says what it is; a manifest alone is a checkpoint of ours that has lost its metadata.
_MARKS = {
    METADATA: "dcp",
    **dict.fromkeys(_HF, "hf"),
    "consolidated.*.pth": "meta",
    manifests.FILE: "dcp",
}
_INDEX_LIMIT = 8 * MIB  # an index of Llama 405B has 0.1 MB
_HEADER_LIMIT = 4 * MIB  # of one file of safetensors: its largest file of Llama 405B has 3 kB
_LIMIT_FILES = 4096
_STEP = re.compile(r"step-\d{8}")
_LAYER = re.compile(r"(?:layers|blocks)\.(\d+)\.")
_LIMIT_OF_LAYER = 16  # tensors; Qwen 2 has 12
DIGESTS = "digests"  # in a torch file of ours: a tensor whose rows are the digests of its facts and of each tensor
T = TypeVar("T")
Kind = tuple[tuple[int, ...], torch.dtype]


class Entry(NamedTuple):
    """A tensor that can be read: on the CPU, and where its form allows a view of the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(kw_only=True)
class Source:
    """An open checkpoint.

    Attributes:
        raw: its tensors by the names that its files give them.
        names: ours (``model.NAME``, ``optim.NAME.exp_avg``) to those; empty where there are problems.
        shape, manifest: of its model and of its run; not there where a problem has kept them from being read.
        carried: other files that belong to the model, such as its tokenizer.
        problems: why it cannot be used, one line each.
        reads: how often each of ``raw`` was read.
    """

    kind: str
    path: Path
    raw: dict[str, Entry] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    shape: ModelShape = field(init=False)
    manifest: Manifest = field(init=False)
    carried: dict[str, bytes] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reads: Counter[str] = field(default_factory=Counter)

    def kinds(self) -> dict[str, Kind]:
        """Shape and dtype of each tensor, by our names."""
        return {ours: self.raw[own][:2] for ours, own in self.names.items()}

    def read(self, ours: str) -> Tensor:
        """A tensor by our name, as we have it. Whoever holds what it returns holds its memory."""
        own = self.names[ours]
        self.reads[own] += 1
        with reading(f"{self.path}: {own!r}"):
            tensor = self.raw[own].read()
            return (
                names.to_meta(ours, tensor, self.shape, back=True)
                if self.kind == "meta"
                else tensor
            )

    def carry(self, folder: Path) -> None:
        """Take along what belongs to the model in ``folder``, and note what is left behind."""
        self.carried, left = carried_by(folder)
        self.notes += left

    def attempt(self, step: Callable[..., T], *given: Any) -> T | None:
        """What ``step`` returns; None where it fails, which becomes a problem."""
        try:
            with reading(f"{self.path} as {self.kind}"):
                return step(*given)
        except CheckpointError as error:
            self.problems += error.lines
            return None

    def match(self, own_names: dict[str, str]) -> None:
        """Hold the tensors against those that the shape asks for, both ways; parameters are there by ``own_names``."""
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
        optimizer = any(own.startswith("optim.") for own in self.raw)
        for ours, shape in names.shapes(self.shape).items():
            wanted[f"model.{ours}"] = own_names[ours], shape
            for key in ("exp_avg", "exp_avg_sq", "step") if optimizer else ():
                wanted[f"optim.{ours}.{key}"] = (
                    f"optim.{ours}.{key}",
                    () if key == "step" else shape,
                )
        for own, shape in wanted.values():
            entry = self.raw.get(own)
            if entry is None:
                self.problems.append(
                    f"{self.path} has no {own!r} {shape}, which its model needs; copy it again"
                )
            elif entry.shape != shape:
                self.problems.append(
                    f"{self.path} holds {own!r} as {entry.shape}, but its model needs {shape}"
                )
            elif name_of(entry.dtype) not in DTYPES:
                kind = f"{name_of(entry.dtype)}; it must not be quantized, but {', '.join(DTYPES)}"
                self.problems.append(f"{self.path} holds {own!r} in {kind}")
        for own in sorted(self.raw.keys() - {own for own, _ in wanted.values()}):
            if own != "rope.freqs" and not own.endswith(
                ".rotary_emb.inv_freq"
            ):  # which follow from the shape
                self.problems.append(
                    f"{self.path} holds {own!r}, which its model does not have; remove or rename it"
                )
        if not self.problems:
            self.names = {ours: own for ours, (own, _) in wanted.items()}

    def drop_copy(self, copy: str, original: str) -> bool:
        """Whether ``copy`` is the other bit by bit; it then is no tensor of its own. Reads both."""
        one, other = self.raw[copy], self.raw.get(original)
        same = (
            other is not None
            and one[:2] == other[:2]
            and digest_of(one.read()) == digest_of(other.read())
        )
        if same:
            del self.raw[copy]
        return same


def open_source(path: Path) -> Source:
    """Open a checkpoint; a CheckpointError where it is not whole, or of no model that composer3d has."""
    source = survey(path)
    if source.problems:
        more = (
            [f"{path}: {len(source.problems) - 8} more problems"]
            if len(source.problems) > 8
            else []
        )
        raise CheckpointError([*source.problems[:8], *more])
    return source


def survey(path: Path) -> Source:
    """Open whatever there is of a checkpoint, its problems listed.

    A run's folder, or its folder of checkpoints, stands for the newest of them that is whole; a
    note says which that is.

    Raises CheckpointError where there is no checkpoint at all.
    """
    require_name(path)
    try:
        kind = _kind(path)
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({error}); give another path"
        ) from None
    return _newest_of_run(path) if kind == "run" else _survey(path, kind)


def require_name(path: Path) -> None:
    """Raise CheckpointError where no file can have this name: it holds NUL, or what is no text."""
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("it holds a NUL byte")
    except ValueError as error:
        raise CheckpointError(
            f"{str(path)!r} is no name of a file ({error}); give another"
        ) from None


def _survey(path: Path, kind: str) -> Source:
    source = Source(kind=kind, path=path)
    openers = {"hf": _open_hf, "meta": _open_meta, "torch": _open_torch, "dcp": _open_dcp}
    source.attempt(openers[kind], source)
    return source


def _kind(path: Path) -> str:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        with open_plain(path):  # a named pipe, a socket or a device is refused by its name
            pass
        if path.suffix == ".safetensors":
            raise CheckpointError(
                f"{path} is one file of a checkpoint; give its folder, {path.parent}"
            )
        return "torch"
    names = os.listdir(path)
    for mark, kind in _MARKS.items():
        if any(fnmatchcase(name, mark) for name in names):
            return kind
    if checkpoints_of(path) or {"checkpoints", "metrics.jsonl", "recipe.toml"} & set(names):
        return "run"
    raise CheckpointError(
        f"{path} is not a checkpoint: it has none of {', '.join(_MARKS)}, nor checkpoints/step-*"
    )


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, or in its folder of checkpoints, oldest first.

    Within ``folder`` no link is followed: one could lead to anybody's checkpoint.
    """
    inner = folder / "checkpoints"
    places = (folder,) if inner.is_symlink() else (folder, inner)
    found = [
        path for place in places for path in place.glob("step-*") if _STEP.fullmatch(path.name)
    ]
    plain = (path for path in found if path.is_dir() and not path.is_symlink())
    return sorted(plain, key=lambda path: path.name)


def _newest_of_run(folder: Path) -> Source:
    steps = checkpoints_of(folder)
    passed: list[str] = []
    for path in reversed(steps):
        source = _survey(path, "dcp")
        if not source.problems:
            source.notes[:0] = [*passed, f"{path} is the newest whole checkpoint of {folder}"]
            return source
        more = f" (and {len(source.problems) - 1} more)" if source.problems[1:] else ""
        passed.append(f"{path} is passed over, it is not whole: {source.problems[0]}{more}")
    if not steps:
        raise CheckpointError(
            f"{folder} has no checkpoint (step-* or checkpoints/step-*); train it first"
        )
    raise CheckpointError(
        [*passed[:8], f"{folder} has no checkpoint that is whole; give another run"]
    )


def _open_hf(source: Source) -> None:
    """Open a folder of Hugging Face's. Files of weights may be links to plain files."""
    folder = source.path
    source.shape = read_shape(folder)
    source.carry(folder)
    for file, listed in _hf_files(source).items():
        held = source.attempt(_tensors_of_file, folder / file) or {}
        for name in sorted(listed - held.keys()) if held else ():
            source.problems.append(
                f"{folder / file} has no {name!r}, which the index says is there; download it again"
            )
        for name in sorted(source.raw.keys() & held.keys()):
            source.problems.append(f"{folder} holds {name!r} twice, once in {file}; remove one")
        source.raw |= held
        _refuse_too_many(source)
    source.manifest = Manifest(step=0, model={})  # of a model that no run of ours has trained
    if source.problems:
        return
    _require_layers(source)
    own, head = names.hf_names(source.shape), "lm_head.weight"
    if (
        source.shape.tied
        and head in source.raw
        and not source.drop_copy(head, own["first.embed.weight"])
    ):
        way = "its config.json ties them: set tie_word_embeddings to false, or remove it"
        source.problems.append(f"{folder} holds an {head!r} that is not the embedding, but {way}")
    if not source.problems:
        source.match(own)


def _hf_files(source: Source) -> dict[str, set[str]]:
    """Files of weights, with the tensors that the index says are there."""
    index = source.path / next(name for name in _HF if (source.path / name).exists())
    if index.suffix != ".json":
        return {index.name: set()}
    again = "; download it again"
    with reading(index, again):
        content = read_json(index, limit=_INDEX_LIMIT)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{index} has no weight_map from names to files{again}")
    files: dict[str, set[str]] = {}
    for name, file in listed.items():
        files.setdefault(file, set()).add(name)
    if len(files) > _LIMIT_FILES:
        raise CheckpointError(
            f"{index} names {len(files):,} files; at most {_LIMIT_FILES:,} are read"
        )
    kept = {}
    for file, held in sorted(files.items()):
        if not _is_name(file):
            problem = "which is not a name of a file in its folder: it is not opened"
            source.problems.append(f"{index} names {shown(file)}, {problem}")
        elif not (source.path / file).exists():
            problem = "which is not there; download it as well"
            source.problems.append(f"{index} names {file!r}, {problem}")
        else:
            kept[file] = held
    return kept


def _is_name(text: str) -> bool:
    """Whether ``text`` names a file in a folder, and not one elsewhere."""
    return text == Path(text).name and text not in ("", ".", "..")


def _tensors_of_file(path: Path) -> dict[str, Entry]:
    if path.suffix != ".safetensors":
        with reading(path), open_plain(path):
            pass
        return _entries(load_torch(path))
    with reading(path, "; cut off, or no safetensors: copy it again"):
        with open_plain(path) as plain:
            size = int.from_bytes(plain.read(8), "little")
        if size > _HEADER_LIMIT:
            raise ValueError(
                f"its header claims {size:,} bytes, at most {_HEADER_LIMIT:,} are read"
            )
        file = safe_open(path, framework="pt")
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        reads = {name: partial(file.get_tensor, name) for name in parts}
        return {
            n: Entry(tuple(part.get_shape()), CODES[part.get_dtype()], reads[n])
            for n, part in parts.items()
        }


def _require_layers(source: Source) -> None:
    """Refuse a shape of more layers than the tensors can be of, before a model of it is built."""
    layers = {match[1] for name in source.raw if (match := _LAYER.search(name))}
    if len(layers) < source.shape.n_layers:
        raise CheckpointError(
            f"{source.path} holds tensors of {len(layers)} layers, but its model has "
            f"{source.shape.n_layers}; copy the missing files"
        )


def _refuse_too_many(source: Source) -> None:
    most = _LIMIT_OF_LAYER * (source.shape.n_layers + 1)
    if len(source.raw) > most:
        raise CheckpointError(
            f"{source.path} holds more than {most:,} tensors; its model has fewer"
        )


def _entries(tree: Any) -> dict[str, Entry]:
    return {name: Entry(stored.shape, stored.dtype, stored.read) for name, stored in flat(tree)}


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Stored]]:
    """The tensors of nested dicts, by their keys joined with dots."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, Stored):
            yield f"{prefix}{key}", value
        else:
            yield from flat(value, f"{prefix}{key}.")


def _open_meta(source: Source) -> None:
    folder = source.path
    source.carry(folder)
    files = sorted(folder.glob("consolidated.*.pth"))
    for number, file in enumerate(files):
        if file.name != f"consolidated.{number:02d}.pth":
            raise CheckpointError(
                f"{folder} has {file.name}, but no consolidated.{number:02d}.pth; copy all of them"
            )
    parts = [_tensors_of_file(file) for file in files]
    for file, part in zip(files, parts, strict=True):
        if part.keys() != parts[0].keys():
            raise CheckpointError(
                f"{file} does not hold the names that {files[0].name} holds; copy it again"
            )
    source.raw = parts[0]
    with reading(folder / "params.json", "; take the one that came with the files"):
        params = read_json(folder / "params.json")
        if not isinstance(params, dict):
            raise ValueError("it is no JSON object")
    # All of Meta's models cut the rows of these two. Llama 3 cuts the embedding's rows too, Llama 2 its columns.
    sizes = {}
    for size, name in (("vocab", "output.weight"), ("ffn", "layers.0.feed_forward.w1.weight")):
        if name not in parts[0] or len(parts[0][name].shape) != 2:
            raise CheckpointError(
                f"{files[0]} holds no matrix {name!r}, which its model needs; copy it again"
            )
        sizes[size] = parts[0][name].shape[0] * len(files)
    source.shape = shape = names.shape_of_meta(params, **sizes, tied=False)
    source.manifest = Manifest(step=0, model={})
    _require_layers(source)
    own, whole = names.meta_names(shape), names.shapes(shape)
    if len(files) > 1:
        source.raw |= {
            own[n]: _joined([part[own[n]] for part in parts], whole[n])
            for n in own
            if own[n] in parts[0]
        }
    tied = source.drop_copy("output.weight", "tok_embeddings.weight")
    source.shape = names.shape_of_meta(params, **sizes, tied=tied)
    source.match(own)


def _joined(parts: list[Entry], whole: tuple[int, ...]) -> Entry:
    """One tensor of its model-parallel parts; one that is not cut is the same in all files."""
    # By their sizes, not by name: Llama 2 cuts the columns of the embedding, Llama 3 its rows.
    cut = next((dim for dim, size in enumerate(parts[0].shape) if size != whole[dim]), None)

    def read() -> Tensor:
        tensors = [part.read() for part in parts]
        if cut is None and len({digest_of(tensor) for tensor in tensors}) > 1:
            raise ValueError("the files of model-parallel ranks disagree on it")
        return tensors[0] if cut is None else torch.cat(tensors, cut)

    sizes = [
        sum(p.shape[i] for p in parts) if i == cut else size
        for i, size in enumerate(parts[0].shape)
    ]
    return Entry(tuple(sizes), parts[0].dtype, read)


def _open_torch(source: Source) -> None:
    content = load_torch(source.path)
    way = "; put a file of Hugging Face's into a folder, as pytorch_model.bin beside its config.json, Meta's as "
    with reading(
        f"what convert --to torch says in {source.path}",
        f"{way}consolidated.00.pth beside its params.json",
    ):
        facts, texts = content["composer3d"], content["files"]
        saved = manifests.parse(facts)
        files = trusted_texts(texts)
    source.raw = _entries({name: part for name, part in content.items() if name != DIGESTS})
    _check_digests(source, content)
    source.carried = files
    _open_ours(source, saved)


def _check_digests(source: Source, content: dict[str, Any]) -> None:
    """Hold a file of ours to its own digests: each tensor, and what it says of the model and its tokenizer."""
    if DIGESTS not in content:
        source.notes.append(
            f"nothing verifies {source.path}: an earlier composer3d wrote it, without digests; convert adds them"
        )
        return
    kept = content[DIGESTS]
    form = (kept.shape, kept.dtype) if isinstance(kept, Stored) else None
    if form != ((1 + len(source.raw), 16), torch.uint8):
        source.problems.append(
            f"{source.path} has no digest for each of its tensors; copy it again"
        )
        return
    if not _is_carried(content["files"]):
        source.problems.append(f"{source.path} carries files that no export has; copy it again")
        return
    if sum(nbytes(entry[:2]) for entry in source.raw.values()) > source.path.stat().st_size:
        source.problems.append(f"{source.path} has fewer bytes than its tensors; copy it again")
        return
    wanted = [facts_digest(content["composer3d"], content["files"], source.raw)]
    wanted += [digest_of(entry.read()) for entry in source.raw.values()]
    found = [bytes(row).hex() for row in kept.read().tolist()]
    names_of_rows = ["what it says of its model", *map(repr, source.raw)]
    for name, have, want in zip(names_of_rows, found, wanted, strict=True):
        if have != want:
            source.problems.append(
                f"{source.path}: {name} has another digest than the file says; copy it again"
            )


def _is_carried(texts: Any) -> bool:
    """Whether ``texts`` are what an export carries; one text held many times would be written out for each."""
    if (
        type(texts) is not dict
        or not texts.keys() <= set(NAMES)
        or not all(type(text) is str for text in texts.values())
    ):
        return False
    return sum(map(len, texts.values())) <= TOTAL_LIMIT


def facts_digest(facts: Any, texts: Any, tensors: Mapping[str, Any]) -> str:
    """Of all that a torch file of ours holds beside the bytes of tensors, whose entries begin with shape and dtype."""
    forms = {name: [list(entry[0]), name_of(entry[1])] for name, entry in tensors.items()}
    text = json.dumps([facts, texts, forms], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _open_dcp(source: Source) -> None:
    folder = source.path
    saved = source.attempt(manifests.read, folder)
    source.problems += manifests.damage(folder, saved) if saved else []
    metadata = read_metadata(folder)
    for name, (shape, dtype) in tensors_of(metadata, str(folder)).items():
        source.raw[name] = Entry(
            shape, getattr(torch, dtype), partial(read_whole, folder, metadata, name)
        )
    if saved is None:
        return
    # Only these: a recipe in the manifest may name any folder of this machine.
    assets = folder / "assets"
    if assets.is_symlink():
        source.notes.append(f"{assets} is a link, which is not followed: nothing is carried along")
    elif assets.is_dir():
        source.carry(assets)
    else:
        source.notes.append(f"{folder} has no assets: no tokenizer is carried along")
    _open_ours(source, saved)


def _open_ours(source: Source, saved: Manifest) -> None:
    """A form with our names: what the manifest says the model is against what there is."""
    source.manifest = saved
    with reading(f"{source.path}: what its model is"):
        values = {f.name: saved.model[f"model.{f.name}"] for f in fields(ModelShape)}
    try:
        source.shape = shape_from(values)
    except CheckpointError as error:
        raise CheckpointError([f"{source.path}: model.{line}" for line in error.lines]) from None
    _require_layers(source)
    source.match({name: f"model.{name}" for name in names.shapes(source.shape)})


def digest_of(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements in their order, without a copy where they lie so."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def nbytes(kind: Kind) -> int:
    return prod(kind[0]) * kind[1].itemsize


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
