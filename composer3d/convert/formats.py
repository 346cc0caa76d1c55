"""Open a checkpoint of any format as a ``Source``, which reads one tensor at a time by our names.

The formats are:

- ``hf``: a Hugging Face folder, with config.json and either safetensors or pytorch_model*.bin;
- ``meta``: a folder as Meta publishes it, with params.json and consolidated.*.pth;
- ``torch``: one file that ``composer3d convert --to torch`` made;
- ``dcp``: a checkpoint of a training run.

Files are memory-mapped if their format allows it, so an open checkpoint takes no memory. Any of
these files may be untrusted: pickles are parsed as data by ``checkpoint.pickles`` and never run,
and every size is checked against a limit or against the file before memory is allocated for it.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import Manifest, TensorSpec
from composer3d.checkpoint.metadata import METADATA, read_metadata, read_whole, tensor_specs
from composer3d.checkpoint.pickles import reading
from composer3d.checkpoint.torchfile import StoredTensor, load_torch
from composer3d.convert import mxfp4
from composer3d.convert.carried import read_carried_files, select_carried_texts
from composer3d.convert.tensors import Box, ReadableTensor
from composer3d.facts.errors import CheckpointError, of_os_error
from composer3d.facts.files import MIB, open_plain, parse_json, read_json
from composer3d.facts.step_folders import STEP_FOLDER
from composer3d.facts.text import in_quotes, short_json
from composer3d.models import registry
from composer3d.models.llama import names as llama_names
from composer3d.models.llama.shape import ModelShape
from composer3d.models.locations import Location
from composer3d.models.shape import DecoderShape
from composer3d.recipe.changes import values_of
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.optimizers import DEFAULT, OPTIMIZERS
from composer3d.recipe.schema import OptimTable

Format = Literal["hf", "meta", "torch", "dcp"]

# The dtypes that the parameters of a model may have. Any other dtype is treated as quantized.
DTYPES = ("float32", "bfloat16", "float16", "float64")

# The dtype codes in the header of a safetensors file.
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}

# The first of these names that is in a folder decides the folder's format. The manifest comes last:
# a folder with only a manifest is a ``dcp`` checkpoint that has lost its metadata.
_MARKERS: dict[str, Format] = {
    METADATA: "dcp",
    "model.safetensors": "hf",
    "model.safetensors.index.json": "hf",
    "pytorch_model.bin": "hf",
    "pytorch_model.bin.index.json": "hf",
    "model-*-of-*.safetensors": "hf",
    "pytorch_model-*-of-*.bin": "hf",
    "consolidated.*.pth": "meta",
    manifests.FILE: "dcp",
}
_HF_WEIGHTS = [name for name, format in _MARKERS.items() if format == "hf" and "*" not in name]
_HF_SHARD = re.compile(r"(model|pytorch_model)-(\d{5})-of-(\d{5})\.(safetensors|bin)")

# Parts of names that wrappers of torch and of trainers add, and that a model does not have.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Beginnings of the names of a language model within a larger model, and the usual ones.
_NESTED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# Beginnings of names in a model that was saved without its head.
_WITHOUT_HEAD = ("layers.", "embed_tokens.", "norm.")
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_NAME = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\b")
_ADAPTER_ADVICE = (
    "is a LoRA adapter, which changes the weights of another model; merge it into that model with "
    "merge_and_unload and save_pretrained of peft, and give the folder that this makes"
)
_SHOWN_NAMES = 3

# A torch file that ``convert`` made has a tensor of digests under this key. The first row is the
# digest of ``facts_digest``, and each further row is the digest of one tensor, in their order.
DIGESTS = "digests"
_DIGEST_BYTES = 16

_INDEX_LIMIT = 8 * MIB  # the index of Llama 3 405B has 0.1 MB
_HEADER_LIMIT = 4 * MIB  # the largest safetensors header of Llama 3 405B has 3 kB
_FILE_COUNT_LIMIT = 4096
_TENSORS_PER_LAYER_LIMIT = 16  # besides those of experts; Qwen 2 has 12 tensors in a layer
_TENSORS_PER_EXPERT = 3
_SHOWN_PROBLEMS = 8

_LAYER_NUMBER = re.compile(r"(?:layers|blocks)\.(\d+)\.")

T = TypeVar("T")


class OwnModel(NamedTuple):
    """The model of a user's own architecture, which no checkpoint can describe.

    Attributes:
        architecture: its name, "package.module:NAME".
        shape: the shape of the model.
        parameters: the shape of each parameter, by name.
        trained: the names of the parameters that have an optimizer's state.
    """

    architecture: str
    shape: DecoderShape
    parameters: Mapping[str, tuple[int, ...]]
    trained: frozenset[str]


@dataclass(kw_only=True)
class Source:
    """An open checkpoint.

    Attributes:
        format: how the checkpoint is stored.
        path: its folder or file.
        tensors: its tensors, by the names that its files give them.
        locations: for each tensor by our name (``model.NAME``, ``optim.NAME.STATE``), its place
            in the files. Empty if there are problems.
        own: the user's own model that the checkpoint may hold, if its recipe was given.
        architecture: the name of the architecture of its model: one of ours, or that of ``own``.
        shape: the shape of its model. The attribute is missing if a problem prevented the shape
            from being read.
        manifest: facts about its run. The attribute is missing if a problem prevented them from
            being read.
        carried: the contents of other files that belong to the model, such as its tokenizer, by
            file name.
        problems: the reasons why the checkpoint cannot be used, one line each.
        is_other_model: whether one of the problems is that the checkpoint may be whole, but has
            another model than one of ours or ``own``.
        notes: other facts that the user should know, one line each.
        read_counts: how often each of ``tensors`` was read.
    """

    format: Format
    path: Path
    tensors: dict[str, ReadableTensor] = field(default_factory=dict)
    locations: dict[str, Location] = field(default_factory=dict)
    own: OwnModel | None = None
    architecture: str = registry.DEFAULT
    # Only ``inspect`` uses a checkpoint with problems, so only ``inspect`` handles the absence of
    # these two. With None as a default, all other code would have to check for it.
    shape: ModelShape = field(init=False)
    manifest: Manifest = field(init=False)
    carried: dict[str, bytes] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    is_other_model: bool = False
    notes: list[str] = field(default_factory=list)
    read_counts: Counter[str] = field(default_factory=Counter)

    @property
    def model_of(self) -> registry.Architecture:
        """The architecture of the model."""
        return registry.architecture(self.architecture)

    @property
    def huggingface(self) -> Any:
        """The module that knows the config.json of the model."""
        return registry.resolve(self.model_of.huggingface)

    def specs(self) -> dict[str, TensorSpec]:
        """Return the spec of each tensor, by our names."""
        return {
            name: TensorSpec(location.whole_shape, self.tensors[location.names[0]].spec.dtype)
            for name, location in self.locations.items()
        }

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor by our name, and return it on the CPU in the layout of our model.

        The tensor may be a view of the file.

        Args:
            name: our name of the tensor.
            box: the range in each dim to return; None: the whole tensor. No more is read, except in
                the format ``meta``.

        Raises:
            CheckpointError: the tensor cannot be read. The error names it.
        """
        location = self.locations[name]
        box = tuple(slice(0, size) for size in location.whole_shape) if box is None else box
        if self.format == "meta":
            (in_file,) = location.names
            whole = self._read_part(in_file, ())
            return llama_names.to_meta(name, whole, self.shape, inverse=True)[box]
        if location.is_stack:
            return torch.stack(
                [self._read_part(in_file, box[1:]) for in_file in location.names[box[0]]]
            )
        if location.rows is not None:
            dim, first_row = location.row_dim, location.rows[0]
            rows = slice(first_row + box[dim].start, first_row + box[dim].stop)
            box = (*box[:dim], rows, *box[dim + 1 :])
        if location.is_transposed:
            return self._read_part(location.names[0], (*box[:-2], *box[:-3:-1])).mT
        return self._read_part(location.names[0], box)

    def _read_part(self, in_file: str, box: Box) -> Tensor:
        """Read a box of a tensor by its name in the files. An empty box is the whole tensor."""
        self.read_counts[in_file] += 1
        tensor = self.tensors[in_file]
        with reading(f"{self.path}: {in_quotes(in_file)}"):
            return tensor.read()[box] if tensor.read_box is None else tensor.read_box(box)

    def carry_files(self, folder: Path, listed: Collection[str] | None = None) -> None:
        """Read the files of ``folder`` that belong to the model. Each refused file adds a note.

        ``listed`` has the paths in it that may be read; None: all.
        """
        self.carried, refusals = read_carried_files(folder, listed)
        self.notes += refusals

    def attempt(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of ``function``. If it fails, add a problem and return None.

        Only a CheckpointError is a problem of the checkpoint. Another UserError is raised: it is
        about something else, such as the recipe.
        """
        try:
            with reading(f"{self.path} as {self.format}"):
                return function(*arguments)
        except CheckpointError as error:
            self.problems += error.lines
            return None

    def match_to_model(self, parameters: Mapping[str, Location]) -> None:
        """Compare the tensors with those that the model's shape requires, in both directions.

        Each difference becomes a problem. If there is no problem, ``locations`` is set.

        Args:
            parameters: the place of each parameter in the files, by our name without ``model.``.
                Tensors of an optimizer have our names in every format.
        """
        has_optimizer = any(name.startswith("optim.") for name in self.tensors)
        optim, trainable = self._optim_of_run(), self._trainable()
        matrices = matrices_of(self.model_of, self.shape, optim)
        globs = ("*",) if optim.train is None else optim.train
        locations: dict[str, Location] = {}
        for name, location in parameters.items():
            locations[f"model.{name}"] = location
            was_trained = any(fnmatchcase(name, glob) for glob in globs)
            if has_optimizer and was_trained and name in trainable:
                shape = location.whole_shape
                for state in optim.optimizer.state_of(is_matrix=name in matrices):
                    state_name = f"optim.{name}.{state.name}"
                    state_shape = () if state.is_scalar else shape
                    locations[state_name] = Location((state_name,), state_shape)

        required = {name for location in locations.values() for name in location.names}
        unknown = [
            name
            for name in sorted(self.tensors.keys() - required)
            # These two tensors can be computed from the shape, so the model does not need them.
            if name != "rope.freqs" and not name.endswith(".rotary_emb.inv_freq")
        ]
        missing = sorted(required - self.tensors.keys())
        if len(missing) > _SHOWN_NAMES and len(unknown) > _SHOWN_NAMES:
            self.problems.append(
                f"{self.path} has the tensors of another model than its shape says: it holds "
                f"{_list_names(unknown)}, and lacks {_list_names(missing)}; take the files of one "
                "model, or rename the tensors"
            )
            return
        # By kind, so that one cause has one line, however many tensors have it.
        found: dict[str, list[str]] = {"missing": [], "shape": [], "dtype": [], "unknown": []}
        for location in locations.values():
            self._match_to_location(location, found)
        found["unknown"] += [
            f"{self.path} holds {in_quotes(name)}, which its model does not have; remove or "
            "rename it"
            for name in unknown
        ]
        for lines in found.values():
            if len(lines) > _SHOWN_PROBLEMS:
                lines[:] = [f"{lines[0]} (so it is with {len(lines) - 1:,} more tensors)"]
            self.problems += lines

        if not self.problems:
            self.locations = locations

    def _optim_of_run(self) -> OptimTable:
        """Return the table [optim] of the run, as far as its recipe is known.

        The recipe is not trusted: a value may be anything.
        """
        values: dict[str, Any] = {}
        manifest: Manifest | None = getattr(self, "manifest", None)
        if manifest is not None:
            with suppress(ValueError):
                values = values_of(manifest.recipe)
        name = values.get("optim.name")
        matrices, train = values.get("optim.matrices"), values.get("optim.train")
        return OptimTable(
            name=cast(Any, name if isinstance(name, str) and name in OPTIMIZERS else DEFAULT),
            matrices=matrices if isinstance(matrices, tuple) else None,
            train=train if isinstance(train, tuple) else None,
        )

    def _trainable(self) -> Collection[str]:
        """Return the parameters that can have an optimizer's state, without ``model.``."""
        if self.own is not None and self.architecture == self.own.architecture:
            return self.own.trained
        table = self.model_of.table_of(self.shape)
        return {name for unit in table.trainable_names() for name in unit}

    def _match_to_location(self, location: Location, found: dict[str, list[str]]) -> None:
        """Compare tensors in the files with those that one of our tensors requires.

        The problems are added to the lists in ``found``.
        """
        if location.rows is not None and location.rows[0] > 0:
            return  # the tensor in the file has been compared with the place of its first rows
        for name in location.names:
            tensor = self.tensors.get(name)
            if tensor is None:
                found["missing"].append(
                    f"{self.path} has no {in_quotes(name)} {location.shape}, which its model "
                    "needs; copy it again"
                )
            elif tensor.spec.shape != location.shape:
                found["shape"].append(
                    f"{self.path} holds {in_quotes(name)} as {tensor.spec.shape}, "
                    f"but its model needs {location.shape}"
                )
            elif tensor.spec.dtype not in DTYPES:
                found["dtype"].append(
                    f"{self.path} holds {in_quotes(name)} in {tensor.spec.dtype}; it must be one "
                    f"of {', '.join(DTYPES)}, and not quantized"
                )

        first_of_dtype = {
            self.tensors[name].spec.dtype: name
            for name in reversed(location.names)
            if name in self.tensors
        }
        if len(first_of_dtype) > 1:
            dtypes = " and ".join(
                f"{in_quotes(name)} in {dtype}" for dtype, name in first_of_dtype.items()
            )
            self.problems.append(
                f"{self.path} holds {dtypes}; the experts of a layer must have one dtype"
            )

    def drop_copy(self, copy: str, original: str) -> bool:
        """Remove the tensor ``copy`` if it equals ``original`` bit by bit.

        Args:
            copy: a name in the files.
            original: a name in the files.

        Returns:
            Whether ``copy`` was equal and has been removed. Both tensors are read for this, but
            these reads are not counted.
        """
        one, other = self.tensors[copy], self.tensors.get(original)
        is_copy = (
            other is not None
            and one.spec == other.spec
            and digest_of(one.read()) == digest_of(other.read())
        )
        if is_copy:
            del self.tensors[copy]
        return is_copy


def _list_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(map(in_quotes, names[:_SHOWN_NAMES]))
    others = len(names) - _SHOWN_NAMES
    return f"{shown} and {others:,} others" if others > 0 else shown


def open_source(path: Path, own: OwnModel | None = None) -> Source:
    """Open a checkpoint that has no problems.

    Args:
        path, own: as for ``inspect_source``.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, or composer3d does not
            support its model. The first eight problems are shown, and the others are counted.
        UserError: a later version of composer3d wrote the checkpoint.
    """
    source = inspect_source(path, own)
    if source.problems:
        raise _refusal(source)
    return source


def _refusal(source: Source) -> CheckpointError:
    """Return the error that names the problems of a checkpoint."""
    lines = source.problems[:_SHOWN_PROBLEMS]
    hidden = len(source.problems) - len(lines)
    if hidden:
        lines.append(f"{source.path}: {hidden} more problems")
    return CheckpointError(lines)


def inspect_source(path: Path, own: OwnModel | None = None) -> Source:
    """Open a checkpoint, and list its problems in the result.

    Args:
        path: a folder or file of any format. The folder of a run, or its folder of checkpoints,
            stands for the newest whole checkpoint in it; a note then names that checkpoint.
        own: the model that the checkpoint may hold, if it is of a user's own architecture. Without
            it, such a checkpoint has a problem: the module that it names is never imported.

    Raises:
        CheckpointError: there is no checkpoint at ``path``, no checkpoint of the run is whole, or
            the newest has another model than one of ours or ``own``.
        UserError: a later version of composer3d wrote the checkpoint. It is not damaged, so no
            older checkpoint of the run is used in its place.
    """
    format = detect_format(path)
    return _open_newest_of_run(path, own) if format == "run" else _open_as(path, format, own)


def detect_format(path: Path) -> Format | Literal["run"]:
    """Return the format of a checkpoint, or "run" for a folder that holds checkpoints.

    No file is read but the list of their names.

    Raises:
        CheckpointError: ``path`` is neither, or cannot be read.
    """
    require_valid_path(path)
    try:
        return _detect_format(path)
    except OSError as error:
        raise CheckpointError(
            f"{in_quotes(str(path))} cannot be read ({error}); give another path"
        ) from None


def require_valid_path(path: Path) -> None:
    """Raise CheckpointError if ``path`` contains a NUL or cannot be encoded for the file system."""
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("it holds a NUL byte")
    except ValueError as error:
        raise CheckpointError(
            f"{in_quotes(str(path))} is not a valid name of a file ({error}); give another path"
        ) from None


def _open_as(path: Path, format: Format, own: OwnModel | None) -> Source:
    source = Source(format=format, path=path, own=own)
    openers: dict[Format, Callable[[Source], None]] = {
        "hf": _open_hf,
        "meta": _open_meta,
        "torch": _open_torch,
        "dcp": _open_dcp,
    }
    source.attempt(openers[format], source)
    return source


def _detect_format(path: Path) -> Format | Literal["run"]:
    """Return what ``detect_format`` returns. Raises OSError if ``path`` cannot be read."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give another path")
    if not path.is_dir():
        with open_plain(path):  # raises an error that names a pipe, a socket or a device
            pass
        if path.suffix == ".safetensors":
            raise CheckpointError(
                f"{path} is one file of a checkpoint; give its folder, {path.parent}"
            )
        return "torch"

    file_names = os.listdir(path)
    for pattern, format in _MARKERS.items():
        if any(fnmatchcase(name, pattern) for name in file_names):
            return format
    # ``list_checkpoints`` comes first: it raises OSError if files in the folder cannot be accessed.
    if list_checkpoints(path) or {"checkpoints", "metrics.jsonl", "recipe.toml"} & set(file_names):
        return "run"
    if any(name.startswith("adapter_") for name in file_names):
        raise CheckpointError(f"{path} {_ADAPTER_ADVICE}")
    raise CheckpointError(
        f"{path} is not a checkpoint: it has none of {', '.join(_MARKERS)}, "
        "and no checkpoints/step-*"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of a run's checkpoints, oldest first.

    No link inside ``folder`` is followed: it could lead to a checkpoint of another user.

    Args:
        folder: the folder of the run, or its folder of checkpoints.
    """
    inner = folder / "checkpoints"
    places = (folder,) if inner.is_symlink() else (folder, inner)
    checkpoints = [
        path
        for place in places
        for path in place.glob("step-*")
        if STEP_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(checkpoints, key=lambda path: path.name)


def _open_newest_of_run(folder: Path, own: OwnModel | None) -> Source:
    checkpoints = list_checkpoints(folder)
    skipped: list[str] = []
    for path in reversed(checkpoints):
        source = _open_as(path, "dcp", own)
        if not source.problems:
            newest = f"{path} is the newest whole checkpoint of {folder}"
            source.notes = [*skipped, newest, *source.notes]
            return source
        if source.is_other_model:
            # So have the older checkpoints of the run.
            raise _refusal(source)
        others = len(source.problems) - 1
        count = f" (and {others} more)" if others else ""
        skipped.append(f"{path} is skipped, because it is not whole: {source.problems[0]}{count}")

    if not checkpoints:
        raise CheckpointError(
            f"{folder} has no checkpoint (step-* or checkpoints/step-*); train it first"
        )
    raise CheckpointError(
        [*skipped[:_SHOWN_PROBLEMS], f"{folder} has no whole checkpoint; give another run"]
    )


def _open_hf(source: Source) -> None:
    """Open a Hugging Face folder. Its weights may be links to plain files."""
    folder = source.path
    if (folder / _ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{folder} holds weights and a LoRA adapter ({_ADAPTER_CONFIG}), which is not applied; "
            "merge both with merge_and_unload of peft, or move the adapter away"
        )
    source.architecture = _find_architecture(folder)
    source.shape = source.huggingface.read_shape(folder)
    source.carry_files(folder)

    for file_name, indexed in _list_hf_files(source).items():
        tensors = source.attempt(_open_tensors, folder / file_name) or {}
        if tensors:
            for name in sorted(indexed - tensors.keys()):
                source.problems.append(
                    f"{folder / file_name} has no {in_quotes(name)}, which the index says is "
                    "there; download it again"
                )
        for name in sorted(source.tensors.keys() & tensors.keys()):
            source.problems.append(
                f"{folder} holds {in_quotes(name)} twice, once in {file_name}; remove one"
            )
        source.tensors |= tensors
        _refuse_too_many(source)

    source.manifest = Manifest(step=0, model={})  # no run of composer3d has trained the model
    if source.problems:
        return
    source.tensors = mxfp4.without_blocks(source.tensors)
    _simplify_names(source)
    _leave_out(source)
    _require_layers(source)
    _without_missing_prediction(source)

    try:
        parameters = source.model_of.hf_locations(source.shape, source.tensors)
    except CheckpointError as error:
        raise CheckpointError([f"{folder}: {line}" for line in error.lines]) from None
    head = "lm_head.weight"
    if source.shape.tied and head in source.tensors:
        (embedding,) = parameters["first.embed.weight"].names
        if not source.drop_copy(head, embedding):
            source.problems.append(
                f"{folder} holds an {in_quotes(head)} that is not the embedding, but its "
                "config.json ties them: set tie_word_embeddings to false, or remove it"
            )
    for copy, name in source.model_of.copies(source.shape).items():
        (original,) = parameters[name].names
        if copy in source.tensors and not source.drop_copy(copy, original):
            source.problems.append(
                f"{folder} holds an {in_quotes(copy)} that is not the same as {in_quotes(original)}"
                ", which its model shares; take the files of one model"
            )
    if not source.problems:
        source.match_to_model(parameters)


def _find_architecture(folder: Path) -> str:
    """Return the architecture of the model in a Hugging Face folder.

    It is the default one if config.json does not say: its ``read_shape`` then names the problem.
    """
    with suppress(OSError, ValueError):
        config = read_json(folder / "config.json")
        model_type = config.get("model_type") if isinstance(config, dict) else None
        if isinstance(model_type, str):
            return registry.huggingface_model_types().get(model_type, registry.DEFAULT)
    return registry.DEFAULT


def _list_hf_files(source: Source) -> dict[str, set[str]]:
    """Return the names of the files of weights, each with the tensors that the index puts in it.

    Without an index, there is one file or a whole set of shards, and the sets of tensors are empty.
    A file of the index that is missing, or is not in the folder, is left out and becomes a problem.

    Raises:
        CheckpointError: the index cannot be used, or one file lies beside the index of others.
    """
    found = [name for name in _HF_WEIGHTS if (source.path / name).exists()]
    if not found:
        return {name: set() for name in _list_shards(source.path)}
    index = source.path / found[0]
    if index.suffix != ".json":
        _refuse_other_weights(index)
        return {index.name: set()}

    advice = "; download it again"
    weight_map = _read_weight_map(index, advice)
    if weight_map is None or not all(
        isinstance(file_name, str) for file_name in weight_map.values()
    ):
        raise CheckpointError(f"{index} has no weight_map from names to files{advice}")

    indexed: dict[str, set[str]] = {}
    for tensor_name, file_name in weight_map.items():
        indexed.setdefault(file_name, set()).add(tensor_name)
    if len(indexed) > _FILE_COUNT_LIMIT:
        raise CheckpointError(
            f"{index} names {len(indexed):,} files; at most {_FILE_COUNT_LIMIT:,} are read"
        )

    present = {}
    for file_name, tensor_names in sorted(indexed.items()):
        if not _is_plain_name(file_name):
            source.problems.append(
                f"{index} names {short_json(file_name)}, which is not the name of a file in its "
                "folder; it is not opened"
            )
        elif not (source.path / file_name).exists():
            source.problems.append(
                f"{index} names {in_quotes(file_name)}, which is not there; download it as well"
            )
        else:
            present[file_name] = tensor_names
    return present


def _read_weight_map(index: Path, advice: str) -> dict[str, Any] | None:
    """Return the files of tensors that an index names, unchecked; None: it names none."""
    with reading(index, advice):
        content = read_json(index, limit=_INDEX_LIMIT)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    return weight_map if isinstance(weight_map, dict) else None


def _list_shards(folder: Path) -> list[str]:
    """Return the names of all shards in a folder without an index, in order.

    Raises:
        CheckpointError: a shard is missing, or there are shards of several sets.
    """
    shards = [found for name in os.listdir(folder) if (found := _HF_SHARD.fullmatch(name))]
    # Those of safetensors come first, as single files do.
    sets = sorted({(found[4] != "safetensors", found[1], found[3], found[4]) for found in shards})
    if not sets or (len(sets) > 1 and sets[0][0] == sets[1][0]):
        raise CheckpointError(
            f"{folder} has no index, and not one set of files such as model-00001-of-00002."
            "safetensors; copy all files of the model again"
        )
    _, stem, count, suffix = sets[0]
    if int(count) > _FILE_COUNT_LIMIT:
        raise CheckpointError(
            f"{folder} names {int(count):,} files; at most {_FILE_COUNT_LIMIT:,} are read"
        )
    names = [f"{stem}-{number:05}-of-{count}.{suffix}" for number in range(1, int(count) + 1)]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} has no index, and {len(missing)} of the {int(count)} files of its set are "
            f"missing, such as {missing[0]}; download them as well"
        )
    return names


def _refuse_other_weights(file: Path) -> None:
    """Refuse one file of weights beside an index that names other files.

    The index is that of the same format: many folders have their weights in both formats.
    """
    index = file.with_name(file.name + ".index.json")
    if not index.exists():
        return
    weight_map = _read_weight_map(index, "; remove it if it is not of these weights")
    if weight_map is None or set(map(str, weight_map.values())) != {file.name}:
        raise CheckpointError(
            f"{file.parent} holds {file.name}, and {index.name} that names other files: they may "
            f"be two models; move away {file.name}, or {index.name} with its files"
        )


def _simplify_names(source: Source) -> None:
    """Give tensors the usual names of Hugging Face if a wrapper has changed them.

    A note names what was left out or added.

    Raises:
        CheckpointError: the tensors are those of an adapter, or two of them get one name.
    """
    for name in source.tensors:
        if _ADAPTER_NAME.search(name):
            raise CheckpointError(f"{source.path}, with {in_quotes(name)}, {_ADAPTER_ADVICE}")
    bare = {
        name: ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        for name in source.tensors
    }
    for begin, usual in _NESTED.items():
        bare = {
            name: usual + short.removeprefix(begin) if short.startswith(begin) else short
            for name, short in bare.items()
        }
    if not any(short.startswith("model.") for short in bare.values()):
        bare = {
            name: f"model.{short}" if short.startswith(_WITHOUT_HEAD) else short
            for name, short in bare.items()
        }
    changed = [name for name, short in bare.items() if name != short]
    if not changed:
        return
    tensors: dict[str, ReadableTensor] = {}
    for name, short in bare.items():
        if short in tensors:
            raise CheckpointError(
                f"{source.path} holds {in_quotes(short)} twice, once as {in_quotes(name)}; "
                "remove one"
            )
        tensors[short] = source.tensors[name]
    source.tensors = tensors
    source.notes.append(
        f"{len(changed)} tensors have other names than usual: {in_quotes(changed[0])} is read as "
        f"{in_quotes(bare[changed[0]])}"
    )


def _is_plain_name(text: str) -> bool:
    """Return whether ``text`` is the name of a file, and not a path that leads elsewhere."""
    return text == Path(text).name and text not in ("", ".", "..")


def _open_tensors(path: Path) -> dict[str, ReadableTensor]:
    """Open the tensors of one safetensors or torch file, by their names."""
    if path.suffix != ".safetensors":
        return _readable_tensors(load_torch(path))

    with reading(path, "; cut off, or no safetensors: copy it again"):
        with open_plain(path) as plain:
            header_size = int.from_bytes(plain.read(8), "little")
            if header_size > _HEADER_LIMIT:
                raise ValueError(
                    f"its header claims {header_size:,} bytes, at most {_HEADER_LIMIT:,} are read"
                )
            header = plain.read(header_size)
        file = safe_open(path, framework="pt")
        _refuse_duplicates(header, len(file.keys()))
        tensors = {}
        for name in file.keys():  # noqa: SIM118 - a safetensors file is not a dict
            entry = file.get_slice(name)
            dtype = SAFETENSORS_DTYPES[entry.get_dtype()]
            spec = TensorSpec(tuple(entry.get_shape()), dtype_name(dtype))
            tensors[name] = ReadableTensor(spec, partial(file.get_tensor, name))
        return tensors


def _refuse_duplicates(header: bytes, n_tensors: int) -> None:
    """Raise ValueError if a safetensors header names a tensor twice, which its format forbids.

    The safetensors library takes the last entry of a name.

    Args:
        header: the header, which the library has accepted.
        n_tensors: the number of names that the library has found.
    """
    # Each entry has this key. Without a backslash no string hides it, and nothing need be parsed.
    if b"\\" not in header and header.count(b'"data_offsets"') == n_tensors:
        return
    parse_json(header)


def _leave_out(source: Source) -> None:
    """Forget the tensors that are no part of the model."""
    names = source.model_of.left_out(source.shape, source.tensors)
    for name in names:
        del source.tensors[name]
    if names:
        source.notes.append(
            f"left out: {len(names)} tensors that are no part of the model, such as "
            f"{in_quotes(min(names))}"
        )


def _require_layers(source: Source) -> None:
    """Refuse a shape with more layers than the files have, before a model of it is built."""
    layers = {match[1] for name in source.tensors if (match := _LAYER_NUMBER.search(name))}
    if len(layers) < source.shape.n_layers:
        raise CheckpointError(
            f"{source.path} holds tensors of {len(layers)} layers, but its model has "
            f"{source.shape.n_layers}; copy the missing files"
        )


def _without_missing_prediction(source: Source) -> None:
    """Forget the layers of multi-token prediction that config.json names and no file holds.

    transformers leaves their tensors out when it saves a model, but not the number of layers.
    """
    begin = f"model.layers.{source.shape.n_layers}."
    if source.shape.mtp_layers and not any(name.startswith(begin) for name in source.tensors):
        source.shape = source.shape.without_mtp
        source.notes.append(
            "left out: the layers of multi-token prediction that config.json names, of which the "
            "files hold no tensor"
        )


def _refuse_too_many(source: Source) -> None:
    in_layer = _TENSORS_PER_LAYER_LIMIT + _TENSORS_PER_EXPERT * source.shape.experts
    limit = in_layer * (source.shape.all_layers + 1)
    if len(source.tensors) > limit:
        raise CheckpointError(
            f"{source.path} holds more than {limit:,} tensors; its model has fewer"
        )


def _readable_tensors(tree: Any) -> dict[str, ReadableTensor]:
    return {
        name: ReadableTensor(
            TensorSpec(stored.shape, dtype_name(stored.dtype)), stored.read, has_checksum=True
        )
        for name, stored in flatten(tree)
    }


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors in nested dicts, each with its keys joined by dots.

    Values that are neither a dict nor a ``StoredTensor`` are skipped.
    """
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        if isinstance(value, StoredTensor):
            yield f"{prefix}{key}", value
        else:
            yield from flatten(value, f"{prefix}{key}.")


def _open_meta(source: Source) -> None:
    """Open a folder as Meta publishes it, with one file for each model-parallel rank."""
    folder = source.path
    source.carry_files(folder)
    files = sorted(folder.glob("consolidated.*.pth"))
    for number, file in enumerate(files):
        expected = f"consolidated.{number:02d}.pth"
        if file.name != expected:
            raise CheckpointError(f"{folder} has {file.name}, but no {expected}; copy all of them")

    shards = [_open_tensors(file) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if shard.keys() != shards[0].keys():
            raise CheckpointError(
                f"{file} does not hold the names that {files[0].name} holds; copy it again"
            )
    source.tensors = shards[0]

    with reading(folder / "params.json", "; take the one that came with the files"):
        params = read_json(folder / "params.json")
        if not isinstance(params, dict):
            raise ValueError("it is not a JSON object")

    # params.json does not have these two sizes. Meta shards both tensors by rows in every model.
    vocab = len(files) * _count_rows(files[0], shards[0], "output.weight")
    ffn = len(files) * _count_rows(files[0], shards[0], "layers.0.feed_forward.w1.weight")
    shape = llama_names.parse_meta_params(params, vocab=vocab, ffn=ffn, tied=False)
    source.shape = shape
    source.manifest = Manifest(step=0, model={})
    _require_layers(source)

    sizes = source.model_of.table_of(shape).shapes()
    parameters = {
        name: Location((in_file,), sizes[name])
        for name, in_file in llama_names.meta_names(shape).items()
    }
    if len(files) > 1:
        for location in parameters.values():
            (in_file,) = location.names
            if in_file in shards[0]:
                parts = [shard[in_file] for shard in shards]
                source.tensors[in_file] = _join_shards(parts, location.shape)

    tied = source.drop_copy("output.weight", "tok_embeddings.weight")
    if tied:
        del parameters["last.head.weight"]
    source.shape = llama_names.parse_meta_params(params, vocab=vocab, ffn=ffn, tied=tied)
    source.match_to_model(parameters)


def _count_rows(file: Path, tensors: Mapping[str, ReadableTensor], name: str) -> int:
    if name not in tensors or len(tensors[name].spec.shape) != 2:
        raise CheckpointError(
            f"{file} holds no matrix {in_quotes(name)}, which its model needs; copy it again"
        )
    return tensors[name].spec.shape[0]


def _join_shards(shards: list[ReadableTensor], whole_shape: tuple[int, ...]) -> ReadableTensor:
    """Return one tensor that is read from the shards of all model-parallel ranks.

    A tensor that is not sharded must be the same in all files. Otherwise, reading it raises
    ValueError.
    """
    # The sharded dim is found by its size, because the name does not determine it: Llama 2 shards
    # the embedding by columns, and Llama 3 by rows.
    first = shards[0].spec
    dim = next((dim for dim, size in enumerate(first.shape) if size != whole_shape[dim]), None)

    def read() -> Tensor:
        tensors = [shard.read() for shard in shards]
        if dim is not None:
            return torch.cat(tensors, dim)
        if len({digest_of(tensor) for tensor in tensors}) > 1:
            raise ValueError("the files of the model-parallel ranks hold different values of it")
        return tensors[0]

    shape = list(first.shape)
    if dim is not None:
        shape[dim] = sum(shard.spec.shape[dim] for shard in shards)
    return ReadableTensor(TensorSpec(tuple(shape), first.dtype), read, has_checksum=True)


def _open_torch(source: Source) -> None:
    """Open one file that ``convert --to torch`` made.

    Raises UserError if a later version of composer3d wrote it.
    """
    path = source.path
    content = load_torch(path)
    advice = (
        "; put a Hugging Face file into a folder, as pytorch_model.bin beside its config.json, "
        "or a Meta file as consolidated.00.pth beside its params.json"
    )
    with reading(f"the facts that convert --to torch writes into {path}", advice):
        facts, texts = content["composer3d"], content["files"]
        known = manifests.without_later_fields(facts) if DIGESTS in content else facts
        manifest = manifests.parse(known)
        source.carried = select_carried_texts(texts)

    trees = {name: part for name, part in content.items() if name != DIGESTS}
    source.tensors = _readable_tensors(trees)
    _check_digests(source, content)
    if not source.problems:
        manifests.require_no_later_fields(facts, path)
    _open_with_our_names(source, manifest)


def _check_digests(source: Source, content: dict[str, Any]) -> None:
    """Compare a file of ``convert --to torch`` with its own digests: of its facts and its tensors.

    The sizes are limited first, because a small file could make the digests take very long: many
    names can share one text or one storage.
    """
    path = source.path
    if DIGESTS not in content:
        source.notes.append(
            f"nothing verifies {path}: an earlier composer3d wrote it without digests; "
            "convert adds them"
        )
        return

    stored = content[DIGESTS]
    specs = {name: tensor.spec for name, tensor in source.tensors.items()}
    if not (
        isinstance(stored, StoredTensor)
        and stored.shape == (1 + len(specs), _DIGEST_BYTES)
        and stored.dtype == torch.uint8
    ):
        source.problems.append(f"{path} has no digest for each of its tensors; copy it again")
        return
    facts, texts = content["composer3d"], content["files"]
    if not isinstance(texts, dict) or texts.keys() != source.carried.keys():
        source.problems.append(f"{path} carries files that no export has; copy it again")
        return
    if sum(map(nbytes, specs.values())) > path.stat().st_size:
        source.problems.append(f"{path} has fewer bytes than its tensors; copy it again")
        return

    actual = {"the description of its model": facts_digest(facts, texts, specs)}
    for name, tensor in source.tensors.items():
        actual[repr(name)] = digest_of(tensor.read())
    expected = [bytes(row).hex() for row in stored.read().tolist()]
    for (name, digest), expected_digest in zip(actual.items(), expected, strict=True):
        if digest != expected_digest:
            source.problems.append(
                f"{path}: {name} has another digest than the file says; copy it again"
            )


def facts_digest(facts: Any, texts: Any, specs: Mapping[str, TensorSpec]) -> str:
    """Return the digest of a torch file without the bytes of its tensors, in hexadecimal.

    Args:
        facts: the manifest, as plain values.
        texts: the carried files, as texts by file name.
        specs: the shape and dtype of each tensor by name.
    """
    listed = {name: [list(spec.shape), spec.dtype] for name, spec in specs.items()}
    text = json.dumps([facts, texts, listed], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _open_dcp(source: Source) -> None:
    """Open a checkpoint of a training run, and compare all of its files with their digests.

    Raises UserError if the machine cannot read a file, which says nothing of the checkpoint.
    """
    folder = source.path
    try:
        manifest = manifests.read(folder)
        source.problems += manifests.find_damage(folder, manifest)
        source.notes += manifests.describe_unlisted(folder, manifest)
    except CheckpointError as error:
        manifest = None
        source.problems += error.lines
    except OSError as error:
        raise of_os_error("a checkpoint cannot be read", error) from None
    metadata = read_metadata(folder, None if manifest is None else manifest.files)
    for name, spec in tensor_specs(metadata, str(folder)).items():
        source.tensors[name] = ReadableTensor(spec, partial(read_whole, folder, metadata, name))
    if manifest is None:
        return

    # Files are carried from this folder only. The recipe in an untrusted manifest may name any
    # folder of this machine, and is not used here.
    assets = folder / "assets"
    if assets.is_symlink():
        source.notes.append(
            f"{assets} is a link, which is not followed: none of its files is copied"
        )
    elif assets.is_dir():
        source.carry_files(assets, manifest.assets)
    else:
        source.notes.append(f"{folder} has no assets: no tokenizer is copied")
    _open_with_our_names(source, manifest)


def _open_with_our_names(source: Source, manifest: Manifest) -> None:
    """Read the model's shape from the manifest, and match the tensors, which have our names.

    Raises UserError if a later version of composer3d wrote the manifest.
    """
    source.manifest = manifest
    architecture = manifest.model.get("model.architecture", registry.DEFAULT)
    if source.own is not None:
        _open_with_own_model(source, manifest, source.own)
        return
    if not registry.is_ours(architecture):
        # A checkpoint is untrusted, so the module that it names is not imported.
        source.is_other_model = True
        raise CheckpointError(
            f"{source.path} has a model of the architecture {short_json(architecture)}: composer3d "
            "converts and inspects its own architectures only; generate and eval need its recipe, "
            "--recipe FILE"
        )
    source.architecture = architecture
    shape = registry.architecture(architecture).shape
    manifests.require_known_fields(source.path, manifest.model, shape)
    then = manifests.with_later_fields(manifest.model, shape)
    with reading(f"{source.path}: the shape of its model"):
        values = {entry.name: then[f"model.{entry.name}"] for entry in fields(shape)}
    try:
        source.shape = source.huggingface.make_shape(values)
    except CheckpointError as error:
        raise CheckpointError([f"{source.path}: model.{line}" for line in error.lines]) from None
    _require_layers(source)
    sizes = source.model_of.table_of(source.shape).shapes()
    source.match_to_model(
        {name: Location((f"model.{name}",), size) for name, size in sizes.items()}
    )


def _open_with_own_model(source: Source, manifest: Manifest, own: OwnModel) -> None:
    """Match the tensors to the user's own model, and compare its shape with the manifest's.

    Tensors alone do not show everything: the number of heads, for example, changes no shape.
    """
    source.architecture = own.architecture
    source.shape = cast(ModelShape, own.shape)
    dtype = manifest.model.get("precision.params", "float32")
    expected = manifests.model_of(own.shape, dtype, own.architecture)
    then = manifests.with_later_fields(manifest.model, own.shape)
    for key in sorted(expected.keys() | then.keys()):
        if key.removeprefix("model.") in own.shape.training_fields:
            continue
        if expected.get(key) != then.get(key):
            source.is_other_model = True
            source.problems.append(
                f"{source.path} has {key} = {short_json(then.get(key))}, but the recipe "
                f"has {short_json(expected.get(key))}; give the recipe of its run"
            )
    source.match_to_model(
        {name: Location((f"model.{name}",), size) for name, size in own.parameters.items()}
    )


def nbytes(spec: TensorSpec) -> int:
    """Return the size of a tensor's elements in bytes."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return prod(spec.shape) * dtype.itemsize


def count_not_finite(tensor: Tensor) -> str:
    """Return how many numbers of a tensor of any shape are not finite, in words, or ""."""
    if not tensor.is_floating_point() or dtype_name(tensor.dtype) not in DTYPES:
        return ""
    # One pass, and no memory, in the usual case: a sum of finite numbers may overflow, but a NaN or
    # an infinity never becomes finite.
    if tensor.numel() == 0 or tensor.sum(dtype=torch.float64).isfinite():
        return ""
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    if nan + infinite == 0:
        return ""
    return f"{nan:,} NaN and {infinite:,} infinite of {tensor.numel():,} numbers"


def digest_of(tensor: Tensor) -> str:
    """Return the XXH3-128 digest of the elements of a CPU tensor of any shape, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor of any shape, in row-major order.

    Those of a contiguous tensor are not copied.
    """
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``, such as "float32"."""
    return str(dtype).removeprefix("torch.")
