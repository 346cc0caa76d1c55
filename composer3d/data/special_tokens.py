"""The special tokens that the files beside a tokenizer.json name: which begin and end a text.

Templates of chats call them by the same names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer3d.facts.errors import DataError
from composer3d.facts.files import parse_json, read_plain
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import TOKENIZER

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

# The files that name the token that ends a text, best first: by a name, then by its number.
BY_NAME = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)
BY_NUMBER = ("generation_config.json", "config.json")
_FILE_BYTES = 64 << 20

# Keys whose value may be an object of special tokens by their names.
_NAMED_APART = ("model_specific_special_tokens", "extra_special_tokens")


def read_own_ends(path: Path) -> tuple[str | int, ...]:
    """Return the tokens that end a text, as ``own_ends``, by the files beside a tokenizer.json.

    Args:
        path: its path. Files beside a file of another name belong to something else.

    Raises:
        DataError: a file cannot be read, or is no JSON object.
    """
    return own_ends(_read_files(path, (*BY_NAME, *BY_NUMBER)))


def read_own_begins(path: Path) -> tuple[str, ...]:
    """Return the tokens that begin a text, as ``own_begins``.

    ``path`` and the errors are those of ``read_own_ends``.
    """
    return own_begins(_read_files(path, BY_NAME))


def _read_files(path: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the objects in the files beside a tokenizer.json, by their names."""
    files = {}
    for name in names if path.name == TOKENIZER else ():
        content = read_beside(path.with_name(name), _FILE_BYTES)
        if content is not None:
            files[name] = parse_object(content, path.with_name(name))
    return files


def own_ends(files: Mapping[str, Mapping[str, Any]]) -> tuple[str | int, ...]:
    """Return the names or numbers of tokens that end a text, best first.

    The tuple is empty if the files name none. Of several numbers in a file, the first ends a text,
    and the others end turns of conversations.

    Args:
        files: the objects in the files of a model, by the names of the files.
    """
    found: list[str | int] = [*_names(files, "eos_token")]
    for name in BY_NUMBER:
        numbers = files.get(name, {}).get("eos_token_id")
        first = numbers[0] if isinstance(numbers, list) and numbers else numbers
        if type(first) is int:
            found.append(first)
    return tuple(dict.fromkeys(found))


def own_begins(files: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of tokens that begin a text, best first. ``files`` is that of ``own_ends``.

    As in transformers, only the files of the tokenizer count, not the number in a config.json.
    """
    return tuple(dict.fromkeys(_names(files, "bos_token")))


def named_tokens(files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the special tokens by their names, such as ``bos_token``, as transformers does.

    ``files`` is that of ``own_ends``. special_tokens_map.json comes first, and is not read if
    tokenizer_config.json has ``added_tokens_decoder``. Tokens of an object such as
    ``extra_special_tokens`` come before those of equal names outside of it.
    """
    config = files.get(TOKENIZER_CONFIG, {})
    in_use = [config]
    if "added_tokens_decoder" not in config:
        in_use.append(files.get(SPECIAL_TOKENS_MAP, {}))
    values: dict[str, Any] = {}
    for file in in_use:
        values |= {key: value for key, value in file.items() if key.endswith("_token")}
    for file in in_use:
        for key in _NAMED_APART:
            apart = file.get(key)
            values |= apart if isinstance(apart, dict) else {}
    names = {key: token_name(value) for key, value in values.items()}
    return {key: name for key, name in names.items() if name is not None}


def _names(files: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    values = [token_name(files.get(name, {}).get(key)) for name in BY_NAME]
    return [value for value in values if value is not None]


def token_name(value: Any) -> str | None:
    """Return the name of a token in a tokenizer_config.json: a text, or an object with one."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_beside(path: Path, limit: int) -> bytes | None:
    """Read a file; None if there is none. Raises DataError if it cannot be read."""
    try:
        return read_plain(path, limit=limit)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{one_line(path)}: cannot be read: {reason}") from None


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises DataError, which names ``path``, if it is none."""
    try:
        value = parse_json(content)
        if not isinstance(value, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise DataError(f"{one_line(path)}: cannot be used: {one_line(error, 300)}") from None
    return value
