"""The tokenizer of a recipe's data, compared with the one of the weights that it starts from."""

from composer3d.facts.errors import DataError
from composer3d.facts.files import read_plain
from composer3d.facts.token_manifest import (
    MOST_TOKENIZER_BYTES,
    TOKENIZER,
    TokenManifest,
    read_manifest,
)
from composer3d.facts.tokenizer_file import first_difference, make_byte_tokenizer
from composer3d.models import hub
from composer3d.recipe.schema import DataTable
from composer3d.recipe.values import as_short_toml


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


def find_difference(data: DataTable, folder: str) -> str | None:
    """Return how the tokenizer of the data differs from the one in the folder of a model.

    Args:
        data: the data.
        folder: the folder, which may have a tokenizer.json, or the model's name on the Hub.

    Returns:
        Words that can follow a colon. None if a token means the same in both, if one of them cannot
        be read, or if ``data.other_tokenizer`` allows a difference. Text that a recipe has read as
        bytes is not compared: its user knows that a token is a byte.

    Raises:
        CheckpointError: the tokenizer of a name on the Hub cannot be loaded.
    """
    if data.other_tokenizer or data.source != "tokens":
        return None
    files = hub.folder(folder, hub.TOKENIZER)
    try:
        theirs = read_plain(files / TOKENIZER, limit=MOST_TOKENIZER_BYTES)
        ours = read_tokenizer(data)
    except (OSError, ValueError, DataError):
        return None
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
