"""Read the prompts that a user gives, as text or as tokens. No torch here."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from composer3d.facts.bounds import is_utf8
from composer3d.facts.errors import DataError
from composer3d.facts.files import parse_json, read_plain
from composer3d.facts.text import one_line

_FILE_BYTES = 64 << 20
_SHOWN_CHARACTERS = 80


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        place: how messages name it, such as ``prompts.jsonl:3``.
        text: its text; None if it is given as tokens.
        tokens: its tokens, if it is given so.
    """

    place: str
    text: str | None
    tokens: tuple[int, ...] | None = None


def read_prompts(texts: Sequence[str], path: str | None) -> list[Prompt]:
    """Return the prompts of the command line, then those of a file.

    Args:
        texts: the prompts of the command line.
        path: a text file, each line of which is a prompt; or a .jsonl file, each line of which is
            an object whose ``prompt`` is a text or a list of tokens. Blank lines are skipped.

    Raises:
        DataError: there is no prompt, or the file or a line of it cannot be used.
    """
    prompts = []
    for number, text in enumerate(texts, 1):
        place = f"--prompt {one_line(text, _SHOWN_CHARACTERS)}"
        if len(texts) > 1:
            place = f"--prompt number {number}"
        if not is_utf8(text):
            raise DataError(f"{place}: it has bytes that are not UTF-8; give text in UTF-8")
        prompts.append(Prompt(place, text))
    if path is not None:
        prompts += _read_file(path)
    if not prompts:
        raise DataError("there is no prompt; give one with --prompt TEXT or --prompts FILE")
    return prompts


def _read_file(path: str) -> list[Prompt]:
    shown = f"--prompts {one_line(path)}"
    try:
        # Some editors begin a file with a byte order mark, which is no part of its text.
        content = read_plain(path, limit=_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{shown}: byte 0x{error.object[error.start]:02x} at offset {error.start} is not "
            "UTF-8; convert the file"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"{shown}: cannot be read: {reason or error}; give a file") from None
    is_jsonl = path.lower().endswith(".jsonl")
    prompts = []
    # ``splitlines`` would also cut at characters such as U+2028, which a JSON text may contain.
    for number, line in enumerate(content.split("\n"), 1):
        place = f"{one_line(path)}:{number}"
        if line.strip():
            line = line.removesuffix("\r")
            prompts.append(_parse_line(line, place) if is_jsonl else Prompt(place, line))
    return prompts


def _parse_line(line: str, place: str) -> Prompt:
    """Return the prompt in a line of JSONL. Raises DataError if there is none."""
    problem = f"got {one_line(line, _SHOWN_CHARACTERS)}"
    try:
        entry: Any = parse_json(line.encode())
    except ValueError as error:
        entry, problem = None, one_line(error, 300)
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if isinstance(prompt, str) and is_utf8(prompt):
        return Prompt(place, prompt)
    if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
        return Prompt(place, None, tuple(prompt))
    raise DataError(
        f'{place}: must be a JSON object such as {{"prompt": "..."}} or {{"prompt": [1, 2]}}: '
        f"{problem}; correct the line"
    )
