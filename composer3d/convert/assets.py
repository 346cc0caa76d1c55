"""What a run's checkpoints hold of its model besides tensors: the files in their folder ``assets``.

A checkpoint is exported long after its run, on a machine that may hold neither the data nor the
folder that the run began from. So each one carries the tokenizer of the data, the ids of special
tokens and the longest sequence, in the words of Hugging Face.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from composer3d.convert.carried import TOKENIZER_NAMES, carried_by
from composer3d.models.llama.huggingface import config_of
from composer3d.models.llama.shape import ModelShape
from composer3d.recipe.schema import Recipe
from composer3d.runtime import log
from composer3d.spec.errors import CheckpointError
from composer3d.spec.files import parse_json
from composer3d.spec.token_manifest import TOKENIZER, read_manifest

FOLDER = "assets"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>", "[BOS]")
_PAD = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "<｜▁pad▁｜>", "[PAD]")
_BYTE_0 = "\0"  # the token of byte 0, which ends documents of bytes
Json = dict[str, Any]


def assets_of(recipe: Recipe, end_of_document: int, earlier: Path | None) -> dict[str, bytes]:
    """Return the contents of the files that belong to the model of a run, by their names.

    What came with the model counts first: the assets of the checkpoint ``earlier`` that the run
    goes on from, or the folder ``model.hf``. The data decides what a token is: where its tokenizer
    is another one, that one is taken, and the old one is dropped with all ids of its tokens.

    Args:
        end_of_document: the token that follows each document of the data. Generation stops at it.
        earlier: the checkpoint that was loaded, or None.

    Raises:
        DataError: the tokenizer of the data cannot be read, or is a link.
    """
    found = _given(recipe, earlier)
    config, generation = (_parsed(found.get(name)) for name in (_CONFIG, _GENERATION))
    tokenizer = _tokenizer_of(recipe)
    if _parsed(found.get("tokenizer.json")) != _parsed(tokenizer):
        found = {name: content for name, content in found.items() if name not in TOKENIZER_NAMES}
        found["tokenizer.json"] = tokenizer
        config = {key: value for key, value in config.items() if not key.endswith("_token_id")}
        generation = {}
    special = _Special(_parsed(found.get("tokenizer.json")), recipe.model, end_of_document)
    longest = _longest(recipe, config)
    config |= {
        "bos_token_id": _known(config, "bos_token_id", special.bos),
        "eos_token_id": special.ends(config),
        # Not the end of a document: transformers trains no embedding of a padding token.
        "pad_token_id": _known(config, "pad_token_id", special.pad),
        "max_position_embeddings": longest,
    }
    generation |= {
        "bos_token_id": _known(generation, "bos_token_id", config["bos_token_id"]),
        "eos_token_id": special.ends(generation or config),
        "pad_token_id": _known(generation, "pad_token_id", config["pad_token_id"]),
    }
    if generation["pad_token_id"] is None:
        generation["pad_token_id"] = special.end
    try:
        shape = ModelShape(**{f.name: getattr(recipe.model, f.name) for f in fields(ModelShape)})
        config = config_of(shape, recipe.precision.params, config)
    except CheckpointError:  # transformers has no such model, so that there is no form to export to
        found.pop(_CONFIG, None)
    else:
        found[_CONFIG] = _encoded(config)
    found[_GENERATION] = _encoded(generation)
    if "tokenizer_config.json" not in found and special.end_name:
        found["tokenizer_config.json"] = _encoded(special.tokenizer_config(longest))
    return dict(sorted(found.items()))


class _Special:
    """Special tokens: ids that the model has, or None, and their names in the tokenizer."""

    def __init__(self, tokenizer: Json, shape: ModelShape, end: int) -> None:
        self._names = _names_of(tokenizer)
        self._vocab = shape.vocab
        self.end = end
        self.end_name = self._names.get(end)
        ids = {name: number for number, name in self._names.items() if number < shape.vocab}
        self.bos = next((ids[name] for name in _BOS if name in ids), None)
        self.pad = next((ids[name] for name in _PAD if name in ids and ids[name] != end), None)

    def ends(self, config: Json) -> int | list[int]:
        """Return the ids at which generation stops: those of ``config``, and the data's first."""
        given = config.get("eos_token_id")
        ids = given if isinstance(given, list) else [given]
        others = [each for each in ids if type(each) is int and 0 <= each < self._vocab]
        if self.end in others:
            return others if len(others) > 1 else self.end
        return [self.end, *others] if others else self.end

    def tokenizer_config(self, longest: int) -> Json:
        names = {
            "bos_token": None if self.bos is None else self._names[self.bos],
            "eos_token": self.end_name,
            "pad_token": self.end_name if self.pad is None else self._names[self.pad],
        }
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{key: name for key, name in names.items() if name is not None},
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
        }


def byte_tokenizer() -> bytes:
    """Return a tokenizer.json whose tokens are the bytes of UTF-8, and whose ids are their values.

    Each byte has the character that GPT-2 gives it, but for byte 0, which is itself: so no text but
    that character becomes the token that ends documents.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = dict(zip([*plain, *others], [*plain, *range(256, 256 + len(others))], strict=True))
    vocab = {chr(characters[byte]) if byte else _BYTE_0: byte for byte in range(256)}
    end = {
        "id": 0,
        "content": _BYTE_0,
        "special": True,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    bytewise = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    model: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [],
    }
    return _encoded(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": bytewise,
            "post_processor": None,
            "decoder": bytewise,
            "model": model,
        }
    )


def _given(recipe: Recipe, earlier: Path | None) -> dict[str, bytes]:
    """Read what came with the model."""
    kept = earlier and earlier / FOLDER
    if kept and kept.is_dir() and not kept.is_symlink():
        place = kept
    elif recipe.model.hf:
        place = Path(recipe.model.hf)
    else:
        return {}
    found, left = carried_by(place)
    for line in left:
        log.get().warning(line)
    return found


def _tokenizer_of(recipe: Recipe) -> bytes:
    """Return the tokenizer.json of the training data."""
    if recipe.data.source != "tokens":
        return byte_tokenizer()
    manifest = read_manifest(str(recipe.data.path))
    if manifest.tokenizer_digest is None:
        return byte_tokenizer()
    with manifest.open(TOKENIZER) as file:
        return file.read()


def _names_of(tokenizer: Json) -> dict[int, str]:
    """Return the names of a tokenizer.json's tokens by their ids."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    names: dict[int, str] = {}
    if isinstance(vocab, dict):
        names = {number: name for name, number in vocab.items() if type(number) is int}
    elif isinstance(vocab, list):  # Unigram: pairs of a name and its score
        rows = [
            (number, row[0]) for number, row in enumerate(vocab) if isinstance(row, list) and row
        ]
        names = {number: name for number, name in rows if isinstance(name, str)}
    added = tokenizer.get("added_tokens")
    for row in added if isinstance(added, list) else []:
        number, name = (
            (row.get("id"), row.get("content")) if isinstance(row, dict) else (None, None)
        )
        if type(number) is int and isinstance(name, str):
            names[number] = name
    return names


def _longest(recipe: Recipe, config: Json) -> int:
    """Return the longest sequence that the model has been made for."""
    given, shape = config.get("max_position_embeddings"), recipe.model
    stretched = int(shape.rope_context * shape.rope_factor) if shape.rope_factor != 1 else 0
    return max(recipe.data.seq_len, stretched, given if type(given) is int else 0)


def _known(config: Json, key: str, otherwise: int | None) -> int | None:
    value = config.get(key)
    return value if type(value) is int else otherwise


def _parsed(content: bytes | None) -> Json:
    """Return a JSON object; an empty one where ``content`` is none."""
    try:
        value = parse_json(content or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _encoded(content: Json) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
