"""Find the chat templates of a tokenizer, and the special tokens that they may name.

The rules are those of transformers: which file comes first, and which template is used.
"""

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from composer3d.data.special_tokens import (
    BY_NAME,
    TOKENIZER_CONFIG,
    named_tokens,
    parse_object,
    read_beside,
)
from composer3d.data.tokenizer import ChatSettings
from composer3d.facts.errors import DataError
from composer3d.facts.model_files import CHAT_TEMPLATE, CHAT_TEMPLATES
from composer3d.facts.text import one_line

_TEMPLATE_BYTES = 1 << 20
_CONFIG_BYTES = 64 << 20
_SUFFIX = ".jinja"

# The names of the templates that are used without being named.
_DEFAULT = "default"
_TOOL_USE = "tool_use"

# Earlier ones have holes in the sandbox.
_SAFE_JINJA = (3, 1, 6)


def read_chat_settings(
    path: Path, template: str | None, *, option: str, way_out: str
) -> ChatSettings:
    """Read the chat templates of a tokenizer in a folder.

    Args:
        path: the folder, or a file in it.
        template: what --chat-template names: a file, or one of the tokenizer's templates by its
            name. It renders conversations with tools as well. None: the tokenizer's templates.
        option: what needs a template, for messages.
        way_out: what a user can do who has no template, for messages.

    Raises:
        DataError: there is no template, or a file cannot be used; or jinja2 is missing.
    """
    require_jinja(option)
    folder = path if path.is_dir() else path.parent
    files = _read_files(folder)
    if template is None:
        place = f"--tokenizer {one_line(path)}"
        return make_chat_settings(files, folder, place=place, way_out=way_out)

    tokens = named_tokens(_parse_objects(files, folder))
    content = read_beside(Path(template), _TEMPLATE_BYTES)
    if content is not None:
        return ChatSettings(_decode(content, Path(template)), tokens)
    named = _named_templates(files, folder)
    if template not in named:
        raise DataError(
            f"--chat-template {one_line(template)}: there is no such file, and "
            f"{one_line(folder)} has {_names_of(named)}; give the path of a template"
        )
    return ChatSettings(named[template], tokens)


def make_chat_settings(
    files: Mapping[str, bytes], folder: Path, *, place: str, way_out: str
) -> ChatSettings:
    """Return the chat templates in the files of a tokenizer, and the special tokens.

    Args:
        files: the contents of the files, by their paths in the folder.
        folder: the folder, for messages.
        place: what messages begin with.
        way_out: as for ``read_chat_settings``.

    Raises:
        DataError: there is no template to use by default, or a file cannot be used.
    """
    tokens = named_tokens(_parse_objects(files, folder))
    named = _named_templates(files, folder)
    if _DEFAULT not in named:
        problem = ", and no default one" if named else ""
        raise DataError(f"{place}: {one_line(folder)} has {_names_of(named)}{problem}; {way_out}")
    return ChatSettings(named[_DEFAULT], tokens, named.get(_TOOL_USE))


def _read_files(folder: Path) -> dict[str, bytes]:
    """Read the files of a folder that have chat templates and name special tokens."""
    templates = [folder / CHAT_TEMPLATE, *sorted((folder / CHAT_TEMPLATES).glob(f"*{_SUFFIX}"))]
    limits = dict.fromkeys(templates, _TEMPLATE_BYTES)
    limits |= {folder / name: _CONFIG_BYTES for name in BY_NAME}
    contents = {
        path.relative_to(folder).as_posix(): read_beside(path, limit)
        for path, limit in limits.items()
    }
    return {name: content for name, content in contents.items() if content is not None}


def _parse_objects(files: Mapping[str, bytes], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the objects in the files that name special tokens, by the names of the files."""
    return {name: parse_object(files[name], folder / name) for name in BY_NAME if name in files}


def _named_templates(files: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """Return the chat templates by their names. Those of tokenizer_config.json come last.

    If there is any other file of a template, they are not used at all.
    """
    found = {}
    if CHAT_TEMPLATE in files:
        found[_DEFAULT] = _decode(files[CHAT_TEMPLATE], folder / CHAT_TEMPLATE)
    for path, content in files.items():
        if path.startswith(f"{CHAT_TEMPLATES}/"):
            name = path.removeprefix(f"{CHAT_TEMPLATES}/").removesuffix(_SUFFIX)
            found[name] = _decode(content, folder / path)
    if found or TOKENIZER_CONFIG not in files:
        return found

    config = folder / TOKENIZER_CONFIG
    value = parse_object(files[TOKENIZER_CONFIG], config).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}
        except (KeyError, TypeError):
            value = None
    named = {_DEFAULT: value} if isinstance(value, str) else value
    if not isinstance(named, dict) or not all(
        isinstance(text, str) for text in (*named, *named.values())
    ):
        raise DataError(
            f"{one_line(config)}: its chat_template must be a text, or a list of objects with a "
            "name and a template; correct it"
        )
    return named


def _decode(template: bytes, path: Path) -> str:
    try:
        return template.decode()
    except UnicodeDecodeError:
        raise DataError(f"{one_line(path)}: is not UTF-8; give a template in UTF-8") from None


def _names_of(templates: Mapping[str, str]) -> str:
    """Return which templates a folder has, for messages."""
    if not templates:
        return f"no chat template, neither {CHAT_TEMPLATE} nor in {TOKENIZER_CONFIG}"
    return f"chat templates of the names {one_line(', '.join(sorted(templates)))}"


def require_jinja(option: str) -> None:
    """Raise DataError if jinja2 is missing, or has known holes in its sandbox.

    ``option`` is what needs it, for the message.
    """
    try:
        found = version("jinja2")
    except ModuleNotFoundError:
        found = "none"
    numbers = tuple(map(int, re.findall(r"\d+", found)[:3]))
    if numbers < _SAFE_JINJA:
        raise DataError(
            f"{option} needs the package jinja2, 3.1.6 or newer, and {found} is installed; "
            "install it with pip install 'composer3d[data]'"
        )
