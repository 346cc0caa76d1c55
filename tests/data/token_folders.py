"""Folders of token files, made without ``prepare``, and how they are opened and changed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer3d.data import open_corpus, tokens
from composer3d.facts.errors import DataError
from composer3d.facts.token_manifest import (
    digest_of,
    digest_of_manifest,
    mask_file,
    shard_files,
)


def write_tokens(
    folder: Path,
    ids: np.ndarray,
    *,
    cuts: Sequence[int] = (),
    starts: list[int] | None = None,
    mask: np.ndarray | None = None,
    tokenizer_file: bytes | None = b"{}",
    **changed: Any,
) -> Path:
    """Write token files.

    Args:
        folder: is made.
        ids: the tokens. The last one is the one that ends documents.
        cuts: where another shard begins, each after an end of a document.
        starts: where documents begin, and where the last one ends. By default, after each end.
        mask: uint8, as long as ``ids``: 1 where a token is learned. None: the folder has no masks.
        tokenizer_file: the content of tokenizer.json; None: the tokens are bytes.
        changed: other facts of the manifest.
    """
    folder.mkdir(parents=True)
    shards = []
    is_numbered = bool(cuts) or mask is not None
    if mask is not None:
        for number, part in enumerate(np.split(mask, cuts)):
            (folder / mask_file(number)).write_bytes(part.tobytes())
        changed["learned"] = int(mask.sum())
    for number, part in enumerate(np.split(ids, cuts)):
        tokens_file, documents_file = shard_files(number if is_numbered else None)
        bounds = [0, *(np.flatnonzero(part == ids[-1]) + 1)] if starts is None else starts
        (folder / tokens_file).write_bytes(part.tobytes())
        (folder / documents_file).write_bytes(np.array(bounds, dtype="<i8").tobytes())
        shards.append({"tokens": len(part), "documents": len(bounds) - 1})
    digest = None
    if tokenizer_file is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer_file)
        digest = digest_of(tokenizer_file)
    facts = {
        "dtype": ids.dtype.name,
        "vocab": int(ids.max()) + 1,
        "tokens": len(ids),
        "documents": sum(shard["documents"] for shard in shards),
        "end_of_document": int(ids[-1]),
        "tokenizer": {"name": "t", "digest": digest},
    }
    if is_numbered:
        facts["shards"] = shards
    tokens.write_manifest(folder, {**facts, **changed})
    return folder


def opened(folder: Path) -> Any:
    return open_corpus("tokens", folder, split="train")


def refuses(pattern: str) -> Any:
    """Expect a DataError that matches ``pattern``."""
    return pytest.raises(DataError, match=pattern)


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and give it a digest that fits, as a forger does."""
    manifest = json.loads((folder / "tokens.json").read_text())
    change(manifest)
    manifest["digest"] = digest_of_manifest(manifest)
    (folder / "tokens.json").write_text(json.dumps(manifest))
