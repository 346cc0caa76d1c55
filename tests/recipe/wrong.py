"""Parts of the tables of wrong recipes."""

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from composer3d.facts.token_manifest import digest_of, digest_of_manifest

# A config.json of a Llama.
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
HF = json.dumps(SIZES | {"model_type": "llama", "vocab_size": 300})
# Lines 1 and 2: dim 64, 4 layers, 4 heads, 2 key-value heads, ffn 160, vocab 256.
TINY = '[model]\npreset = "debug-tiny"\n'


class Wrong(NamedTuple):
    """A recipe that is refused, with the lines that ``messages.txt`` has under its name.

    Attributes:
        name: of the case.
        files: the text of x.toml, or several files by name.
        sets: overrides.
        world: the number of processes for --gpus.
    """

    name: str
    files: str | bytes | Mapping[str, str | bytes]
    sets: tuple[str, ...] = ()
    world: int | None = None


def shape(**changed: object) -> str:
    """Write a [model] without a preset: the table is on line 1, its keys on lines 2 to 7."""
    sizes = {
        "dim": 64,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn": 160,
        "vocab": 256,
    } | changed
    return "[model]\n" + "".join(f"{name} = {size}\n" for name, size in sizes.items())


def token_files(folder: str, *, tokenizer: bytes = b"{}", **changed: Any) -> dict[str, str | bytes]:
    """Make the files of a folder of 100 tokens in one document.

    ``changed`` replaces keys of tokens.json, whose digest is right nevertheless.
    """
    files = {
        "tokens.bin": struct.pack("<100H", *[1] * 99, 0),
        "documents.bin": struct.pack("<2q", 0, 100),
        "tokenizer.json": tokenizer,
    }
    manifest = {
        "format": "composer3d tokens",
        "version": 1,
        "dtype": "uint16",
        "vocab": 256,
        "tokens": 100,
        "documents": 1,
        "end_of_document": 0,
        "tokenizer": {"name": "t.json", "digest": digest_of(tokenizer)},
        "files": {
            name: {"bytes": len(content), "digests": [digest_of(content)]}
            for name, content in files.items()
        },
    }
    manifest |= changed
    manifest["digest"] = digest_of_manifest(manifest)
    return {f"{folder}/{name}": content for name, content in files.items()} | {
        f"{folder}/tokens.json": json.dumps(manifest)
    }
