"""Text for a terminal, a message or a file name: that of a stranger, and quantities with units.

Python's ``str.isprintable`` says which characters are safe on one line. It excludes controls (Cc),
formats such as overrides of the direction and characters without a width (Cf), surrogates (Cs),
private and unassigned characters (Co, Cn), and all separators besides the space (Zl, Zp, Zs).
"""

import json
import os
import re
import unicodedata
from datetime import timedelta
from typing import Any

_NAME_BYTES = 200  # A file system accepts 255; suffixes are appended to the name.
NAME_RULE = (
    "must not be empty, must not begin with . - or a space, must not end with . or a space, must "
    "not contain / or \\ or characters that are not printable, must not be a name that Windows "
    f"reserves, and must have at most {_NAME_BYTES} bytes in UTF-8"
)
_LONGEST_LINE = 4096  # characters of a path or a key in a message
# The name and the password in a URL such as https://NAME:PASSWORD@HOST. ``Path`` makes one slash of
# two.
_SECRET = re.compile(r"(:/{1,2})[^\s/@]+@")
_JSON = json.JSONEncoder(ensure_ascii=False)
_RESERVED = {"con", "prn", "aux", "nul"} | {
    f"{port}{n}" for port in ("com", "lpt") for n in range(10)
}


def printable(text: str, *, keep: str = "") -> str:
    """Return a text in which every character that is not printable is escaped, as in ``\\n``.

    The names of files and tensors may come from a stranger. A line break in one would make two
    lines of an error, and a control character could change what the terminal shows. Name and
    password in a URL become ``...``: messages are kept in logs.

    Args:
        text: any text.
        keep: characters that are not escaped, although they are not printable.
    """
    text = _SECRET.sub(r"\1...@", text)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def printable_lines(text: str) -> str:
    """Return a text of several lines for a terminal: line breaks, tabs and spaces stay.

    The other characters that are not printable are escaped, as in ``printable``.
    """
    if text.isprintable():
        return printable(text)
    spaces = {char for char in text if unicodedata.category(char) == "Zs"}
    return printable(text, keep="\n\t" + "".join(spaces))


def shorten(text: str, most: int) -> str:
    """Return a text, or its beginning if it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def one_line(text: str | os.PathLike[str] | Exception, most: int = _LONGEST_LINE) -> str:
    """Return a text, a path or the words of an error on one line, for a message or a comment.

    Text with a character that is not printable is escaped. It is cut at ``most`` characters.
    """
    return shorten(printable(str(text)), most)


def in_quotes(name: object, most: int = 200) -> str:
    """Return a name that a stranger has given, such as that of a tensor, in quotes and short.

    Whatever stands in the place of a name is shown as Python shows it.
    """
    if isinstance(name, str):
        return repr(shorten(name, most))
    return one_line(repr(name), most)


def short_json(value: Any, most: int = 80) -> str:
    """Return a value from a stranger's file as JSON, on one line and short.

    A value that is not JSON becomes the name of its type in parentheses. The length of a list or an
    object is not said.
    """
    text = ""
    try:
        # A list may have millions of values: only the first ones become text.
        for part in _JSON.iterencode(value):
            text += part
            if len(text) > most and isinstance(value, list | tuple | dict):
                return one_line(text[:most]) + "..."
    except (TypeError, ValueError, RecursionError):
        text = f"({type(value).__name__})"
    return one_line(text, most)


def bytes_text(count: float) -> str:
    """Return a number of bytes with three digits and a decimal unit: ``1.5 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def clock_text(seconds: float) -> str:
    """Return a duration in hours, minutes and whole seconds: ``0:01:30``."""
    return str(timedelta(seconds=round(seconds)))


def rough_duration(seconds: float) -> str:
    """Return a duration with two or three digits and one unit: ``52 s``, ``33 min``, ``12.6 h``."""
    for unit, unit_s, decimals in (("s", 1, 0), ("min", 60, 0), ("h", 3600, 1)):
        # What would be rounded to 100 of a unit is said in the next one.
        if seconds < 99.5 * unit_s:
            return f"{seconds / unit_s:.{decimals}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def is_name(value: str) -> bool:
    """Return whether a text can be the name of a file or folder, as ``NAME_RULE`` says."""
    return (
        value.isprintable()
        and not value.startswith((".", "-", " "))
        and not value.endswith((".", " "))
        and 0 < len(value.encode()) <= _NAME_BYTES
        and "/" not in value
        and "\\" not in value
        and value.partition(".")[0].rstrip().lower() not in _RESERVED
    )


def gib_form(most_gib: float, usual: str = ".1f") -> str:
    """Return the format of figures in GiB up to ``most_gib``.

    Of a model that a laptop trains, one digit after the point is none.
    """
    return ".4f" if most_gib < 1 else usual
