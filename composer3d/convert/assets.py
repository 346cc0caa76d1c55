"""Make the files in a checkpoint's folder ``assets``: tokenizer, config.json and the like.

A checkpoint may be exported long after its run, on a machine that has neither the data nor the
folder that the run started from. So each checkpoint carries the tokenizer of the data, the ids of
special tokens and the longest sequence. The names and keys of these files are those of Hugging
Face.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import ASSETS
from composer3d.convert.carried import read_carried_files
from composer3d.data.chat_settings import make_chat_settings
from composer3d.facts.errors import CheckpointError, DataError
from composer3d.facts.files import parse_json
from composer3d.facts.model_files import is_of_tokenizer
from composer3d.facts.remote import Place, RemotePath, local_copy
from composer3d.facts.token_manifest import (
    TOKENIZER,
    TokenManifest,
    digest_of,
    read_manifest,
)
from composer3d.facts.tokenizer_file import is_same, token_names
from composer3d.models import hub, registry
from composer3d.models.shape import DecoderShape
from composer3d.recipe.schema import Recipe
from composer3d.recipe.tokenizers import read_tokenizer
from composer3d.runtime import log

FOLDER = ASSETS
_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"

# The usual names of the token that begins a text, and of the padding token. The first name that a
# tokenizer has is used.
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>", "[BOS]")
_PAD_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "<｜▁pad▁｜>", "[PAD]")

_Json = dict[str, Any]


def make_assets(
    recipe: Recipe, end_of_document: int | None, earlier: Place | None
) -> dict[str, bytes]:
    """Return the contents of the files that belong to a run's model, by file name.

    The result is based on the files that came with the model: the assets of the checkpoint
    ``earlier``, or the folder ``model.hf``. If the data was made with another tokenizer, that
    tokenizer replaces the model's, and all token ids of the model's files are dropped.

    Args:
        recipe: the recipe of the run.
        end_of_document: the id of the token that follows each document of the data. Generation
            stops at it. None: the data is not known, and the model's files are taken as they are.
        earlier: the checkpoint that was loaded, or None.

    Returns:
        The contents by their paths in the folder. The dict is empty if the architecture is not one
        of ours: such a model cannot be exported.

    Raises:
        DataError: the tokenizer of the data cannot be read, or is a link.
    """
    if not registry.is_ours(recipe.model.architecture):
        return {}  # there is no other format to export such a model to
    files = _read_files_of_model(recipe, earlier)
    if end_of_document is None:
        return dict(sorted(files.items()))
    config, generation = _parse(files.get(_CONFIG)), _parse(files.get(_GENERATION))

    tokenizer = read_tokenizer(recipe.data)
    if not is_same(tokenizer, files.get(TOKENIZER, b"")):
        ids = sorted(key for key in config if key.endswith("_token_id"))
        _say_left_out(files, ids)
        files = {path: content for path, content in files.items() if not is_of_tokenizer(path)}
        files[TOKENIZER] = tokenizer
        config = {key: value for key, value in config.items() if key not in ids}
        generation = {}

    token_files = _read_token_manifests(recipe)
    _say_other_template(files, token_files)
    special = _SpecialTokens(_parse(files.get(TOKENIZER)), recipe.model, end_of_document)
    longest = _longest_sequence(recipe, config)
    config |= {
        "bos_token_id": _int_or(config.get("bos_token_id"), special.bos),
        "eos_token_id": special.stops(config),
        # The end of a document is not used as padding here: transformers does not train the
        # embedding of the padding token.
        "pad_token_id": _int_or(config.get("pad_token_id"), special.pad),
        "max_position_embeddings": longest,
    }
    generation |= {
        "bos_token_id": _int_or(generation.get("bos_token_id"), config["bos_token_id"]),
        "eos_token_id": special.stops(generation or config, _turn_ends(token_files)),
        "pad_token_id": _int_or(generation.get("pad_token_id"), config["pad_token_id"]),
    }
    if generation["pad_token_id"] is None:
        generation["pad_token_id"] = special.end

    architecture = registry.architecture(recipe.model.architecture)
    shape = architecture.shape(
        **{entry.name: getattr(recipe.model, entry.name) for entry in fields(architecture.shape)}
    )
    make_config = registry.resolve(architecture.huggingface).make_config
    try:
        files[_CONFIG] = _encode(make_config(shape, recipe.precision.params, config))
    except CheckpointError:
        # transformers has no such model, so there is no config.json to write.
        files.pop(_CONFIG, None)
    files[_GENERATION] = _encode(generation)
    if _TOKENIZER_CONFIG not in files and special.end_name:
        files[_TOKENIZER_CONFIG] = _encode(special.tokenizer_config(longest))
    return dict(sorted(files.items()))


def _say_left_out(files: Mapping[str, bytes], ids: Sequence[str]) -> None:
    """Log what of the model's files is not carried, as its tokenizer is not that of the data."""
    left_out = [path for path in files if is_of_tokenizer(path)]
    left_out += [_GENERATION] if _GENERATION in files else []
    if ids:
        left_out.append(f"{', '.join(ids)} in {_CONFIG}")
    if left_out:
        log.get().warning(
            "the data has another tokenizer than the model's files: checkpoints carry that of the "
            f"data; left out of the model's files: {', '.join(left_out)}"
        )


def _say_other_template(files: Mapping[str, bytes], token_files: Sequence[TokenManifest]) -> None:
    """Warn if the conversations of the data were rendered with another template than the model's.

    Without a template among the model's files, ``generate --chat`` asks for one.
    """
    rendered = {manifest.template_digest for manifest in token_files} - {None}
    try:
        chat = make_chat_settings(files, Path(), place="", way_out="")
    except DataError:
        return
    if rendered and rendered != {digest_of(chat.template.encode())}:
        log.get().warning(
            "the conversations of the data were rendered with another chat template than that of "
            "the model's files, which checkpoints carry and generate --chat uses: give generate a "
            "folder with the template of the data by --tokenizer"
        )


class _SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        end: the id of the token that ends a document.
        end_name: the name of this token, or None if the tokenizer has no name for it.
        bos: the id of the token that begins a text, or None if there is no such token.
        pad: the id of the padding token, or None if there is no such token.
    """

    def __init__(self, tokenizer: _Json, shape: DecoderShape, end: int) -> None:
        self._names = token_names(tokenizer)
        self._vocab = shape.vocab
        self.end = end
        self.end_name = self._names.get(end)
        ids = {name: token for token, name in self._names.items() if token < shape.vocab}
        self.bos = next((ids[name] for name in _BOS_NAMES if name in ids), None)
        self.pad = next(
            (ids[name] for name in _PAD_NAMES if name in ids and ids[name] != end), None
        )

    def stops(self, config: _Json, turn_ends: Sequence[int] = ()) -> int | list[int]:
        """Return the ids of tokens that stop generation.

        These are those in ``config``; ``end``, which is put first if ``config`` does not have it;
        and ``turn_ends``. A single id is returned without a list.
        """
        eos = config.get("eos_token_id")
        tokens = eos if isinstance(eos, list) else [eos]
        known = [token for token in tokens if type(token) is int and 0 <= token < self._vocab]
        if self.end not in known:
            known = [self.end, *known]
        known += [token for token in turn_ends if token not in known]
        return known if len(known) > 1 else self.end

    def tokenizer_config(self, longest: int) -> _Json:
        """Return the content of a tokenizer_config.json for texts of up to ``longest`` tokens."""
        token_names = {
            "bos_token": None if self.bos is None else self._names[self.bos],
            "eos_token": self.end_name,
            "pad_token": self.end_name if self.pad is None else self._names[self.pad],
        }
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{key: name for key, name in token_names.items() if name is not None},
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
        }


def _read_files_of_model(recipe: Recipe, earlier: Place | None) -> dict[str, bytes]:
    """Read the files that came with the model, from the earlier checkpoint or from ``model.hf``."""
    if earlier is not None and _is_folder(earlier / FOLDER):
        listed = manifests.read(earlier).assets
        with local_copy(earlier / FOLDER) as folder:
            return _read_carried(folder, listed)
    return _read_carried(hub.folder(recipe.model.hf)) if recipe.model.hf else {}


def _is_folder(place: Place) -> bool:
    """Return whether there is a folder, and no link to one."""
    if isinstance(place, RemotePath):
        return place.exists()
    return place.is_dir() and not place.is_symlink()


def _read_carried(folder: Path, listed: Collection[str] | None = None) -> dict[str, bytes]:
    files, refusals = read_carried_files(folder, listed)
    for line in refusals:
        log.get().warning(line)
    return files


def _read_token_manifests(recipe: Recipe) -> list[TokenManifest]:
    """Return the manifests of the training data; none if it is no token files."""
    if recipe.data.source != "tokens":
        return []
    return [read_manifest(path) for path in recipe.data.paths]


def _turn_ends(token_files: Sequence[TokenManifest]) -> list[int]:
    """Return the tokens that end learned turns of conversations in the training data."""
    return sorted({end for manifest in token_files for end in manifest.turn_ends})


def _longest_sequence(recipe: Recipe, config: _Json) -> int:
    """Return the longest sequence that the model supports, in tokens.

    It is the maximum of three lengths: the training sequences, the context that RoPE scaling
    extends, and ``max_position_embeddings`` in ``config``. A model may have a limit of its own.
    """
    if recipe.model.most_tokens is not None:
        return recipe.model.most_tokens
    configured = config.get("max_position_embeddings")
    return max(
        recipe.data.seq_len,
        recipe.model.stretched_context or 0,
        configured if type(configured) is int else 0,
    )


def _int_or(value: Any, default: int | None) -> int | None:
    """Return ``value`` if it is an integer, else ``default``."""
    return value if type(value) is int else default


def _parse(content: bytes | None) -> _Json:
    """Return the JSON object in ``content``, or an empty dict if it has none."""
    try:
        value = parse_json(content or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _encode(content: _Json) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
