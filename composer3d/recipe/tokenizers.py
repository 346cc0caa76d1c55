"""The tokenizer of a recipe's data, compared with the one of the weights that it starts from."""

import os
from collections.abc import Collection
from pathlib import Path

from composer3d.facts.errors import DataError
from composer3d.facts.files import read_plain
from composer3d.facts.model_files import VOCABULARY_NAMES
from composer3d.facts.token_manifest import (
    MOST_TOKENIZER_BYTES,
    TOKENIZER,
    TokenManifest,
    read_manifest,
)
from composer3d.facts.tokenizer_file import first_difference, make_byte_tokenizer
from composer3d.models import hub
from composer3d.recipe.schema import DataTable, Recipe
from composer3d.recipe.values import as_short_toml, mention


def read_tokenizer(data: DataTable) -> bytes:
    """Return the tokenizer.json of the training data, whose parts all have the same one.

    Raises DataError if it cannot be read.
    """
    if data.source != "tokens":
        return make_byte_tokenizer()
    return tokenizer_of(read_manifest(data.paths[0]))


def tokenizer_of(manifest: TokenManifest) -> bytes:
    """Return the tokenizer.json of token files.

    Raises DataError if it cannot be read.
    """
    if manifest.tokenizer_digest is None:
        return make_byte_tokenizer()
    return manifest.read(TOKENIZER)


def find_difference(
    data: DataTable, folder: str, listed: Collection[str] | None = None
) -> str | None:
    """Return how the tokenizer of the data differs from the one in the folder of a model.

    Args:
        data: the data. The tokens of text that a recipe reads as bytes are those of a tokenizer of
            bytes.
        folder: the folder, which may have a tokenizer.json, or the model's name on the Hub.
        listed: the files in it that count; None: all.

    Returns:
        Words that can follow a colon. None if a token means the same in both, if one of them cannot
        be read, or if ``data.other_tokenizer`` allows a difference.

    Raises:
        CheckpointError: the tokenizer of a name on the Hub cannot be loaded.
    """
    if data.other_tokenizer:
        return None
    files = hub.folder(folder, hub.TOKENIZER)
    if listed is not None and TOKENIZER not in listed:
        return _difference_from_bytes(data, files, listed)
    try:
        theirs = read_plain(files / TOKENIZER, limit=MOST_TOKENIZER_BYTES)
        ours = read_tokenizer(data)
    except (OSError, ValueError, DataError):
        return _difference_from_bytes(data, files, listed)
    try:
        difference = first_difference(ours, theirs)
    except ValueError as error:
        return f"they cannot be compared: {error}"
    if difference is None:
        return None
    here, there = (
        "absent" if value is None else as_short_toml(value)
        for value in (difference.ours, difference.theirs)
    )
    return f"{difference.what} is {here} in the data and {there} in the model"


def refuse_bytes(recipe: Recipe, difference: str) -> str:
    """Return the message that a recipe reads text as bytes for a model of another tokenizer.

    ``difference`` is what ``find_difference`` returns.
    """
    assert recipe.model.hf is not None
    folder = hub.folder(recipe.model.hf, hub.TOKENIZER)
    way_out = "make token files of the text with it by composer3d prepare"
    if not os.path.lexists(folder / TOKENIZER):
        way_out = (
            f"write a {TOKENIZER} with transformers: {code_that_writes_tokenizer(folder)}, make "
            "token files of the text by composer3d prepare with --tokenizer FOLDER"
        )
    return (
        f"{mention(recipe, 'data.source')} makes each byte a token, but "
        f"{mention(recipe, 'model.hf')} has another tokenizer: {difference}; {way_out}, and use "
        'data.source = "tokens", or set data.other_tokenizer = true to train on bytes nevertheless'
    )


def code_that_writes_tokenizer(folder: Path) -> str:
    """Return the Python that writes a tokenizer.json to FOLDER, from what else ``folder`` has."""
    name = as_short_toml(str(folder))
    return f'AutoTokenizer.from_pretrained({name}).save_pretrained("FOLDER")'


def _difference_from_bytes(
    data: DataTable, folder: Path, listed: Collection[str] | None
) -> str | None:
    """Return the difference if the data is read as bytes, and the model has another vocabulary.

    The file of the vocabulary is of a kind that is not read, but none of them is of bytes.
    """
    if data.source == "tokens":
        return None
    names = [name for name in VOCABULARY_NAMES if listed is None or name in listed]
    found = [name for name in names if (folder / name).exists()]
    return f"a token is a byte in the data, and the model has {found[0]}" if found else None
