"""Find the chat template of a tokenizer, and the special tokens that it may name."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from composer3d.data.special_tokens import (
    TOKENIZER_CONFIG,
    parse_object,
    read_beside,
    token_name,
)
from composer3d.data.tokenizer import ChatSettings
from composer3d.facts.errors import DataError
from composer3d.facts.text import one_line

_TEMPLATE_BYTES = 1 << 20
_CONFIG_BYTES = 64 << 20
TEMPLATE = "chat_template.jinja"

# The special tokens that a template may name. Each is a key of tokenizer_config.json.
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)

# Earlier ones have holes in the sandbox.
_SAFE_JINJA = (3, 1, 6)


def read_chat_settings(path: Path, template: str | None, *, option: str) -> ChatSettings:
    """Read the chat template of a tokenizer in a folder.

    Args:
        path: the folder, or a file in it.
        template: a file with another template, which --chat-template names; None: the tokenizer's.
        option: what needs the template, for messages.

    Raises:
        DataError: there is no template, or a file cannot be used; or jinja2 is missing.
    """
    require_jinja(option)
    folder = path if path.is_dir() else path.parent
    config = read_beside(folder / TOKENIZER_CONFIG, _CONFIG_BYTES)
    file = folder / TEMPLATE if template is None else Path(template)
    content = read_beside(file, _TEMPLATE_BYTES)
    if content is None and template is not None:
        raise DataError(f"--chat-template {one_line(template)}: there is no such file")
    settings = make_chat_settings(content, config, template_file=file, folder=folder)
    if settings is None:
        raise DataError(
            f"--tokenizer {one_line(path)}: {one_line(folder)} has no chat template, "
            f"neither {TEMPLATE} nor in {TOKENIZER_CONFIG}; give one by --chat-template"
        )
    return settings


def make_chat_settings(
    template: bytes | None, config: bytes | None, *, template_file: Path, folder: Path
) -> ChatSettings | None:
    """Return the chat template, and the special tokens that it may name; None without a template.

    Args:
        template: the content of the file of a template, if there is one. It comes before that in
            ``config``.
        config: the content of tokenizer_config.json, if there is one.
        template_file, folder: the first file, and the folder of the second one, for messages.

    Raises:
        DataError: a file cannot be used.
    """
    entries: dict[str, Any] = {}
    if config is not None:
        entries = parse_object(config, folder / TOKENIZER_CONFIG)
    text: Any = _default_template(entries.get("chat_template"))
    if template is not None:
        try:
            text = template.decode()
        except UnicodeDecodeError:
            raise DataError(
                f"{one_line(template_file)}: is not UTF-8; give a template in UTF-8"
            ) from None
    if not isinstance(text, str):
        return None
    named = {name: token_name(entries.get(name)) for name in _SPECIAL_TOKENS}
    return ChatSettings(text, {name: token for name, token in named.items() if token is not None})


def _default_template(value: Any) -> Any:
    """Return the default one of several templates with names, or the only one."""
    if not isinstance(value, list):
        return value
    for entry in value:
        if isinstance(entry, dict) and entry.get("name") == "default":
            return entry.get("template")
    return None


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
