"""Folders of token files, made without ``prepare``, and how they are opened and changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer3d.data import open_corpus, tokens
from composer3d.facts.errors import DataError
from composer3d.facts.token_manifest import digest_of, digest_of_manifest


def write_tokens(
    folder: Path,
    ids: np.ndarray,
    *,
    starts: list[int] | None = None,
    tokenizer_file: bytes = b"{}",
    **changed: Any,
) -> Path:
    """Write token files of one shard.

    Args:
        folder: is made.
        ids: the tokens. The last one is the one that ends documents.
        starts: where documents begin, and where the last one ends. By default, after each end.
        tokenizer_file: the content of tokenizer.json.
        changed: other facts of the manifest.
    """
    folder.mkdir(parents=True)
    if starts is None:
        starts = [0, *(np.flatnonzero(ids == ids[-1]) + 1)]
    (folder / "tokens.bin").write_bytes(ids.tobytes())
    (folder / "documents.bin").write_bytes(np.array(starts, dtype="<i8").tobytes())
    (folder / "tokenizer.json").write_bytes(tokenizer_file)
    facts = {
        "dtype": ids.dtype.name,
        "vocab": int(ids.max()) + 1,
        "tokens": len(ids),
        "documents": len(starts) - 1,
        "end_of_document": int(ids[-1]),
        "tokenizer": {"name": "t", "digest": digest_of(tokenizer_file)},
    }
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
