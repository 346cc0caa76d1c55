"""Text that a stranger may have written: what of it reaches a terminal, a message or a file name.

Python's ``str.isprintable`` says which characters are safe on one line. It excludes controls (Cc),
formats such as overrides of the direction and characters without a width (Cf), surrogates (Cs),
private and unassigned characters (Co, Cn), and all separators besides the space (Zl, Zp, Zs).
"""

import unicodedata

NAME_BYTES = 200  # A file system accepts 255; suffixes are appended to the name.
NAME_RULE = (
    "must not be empty, must not begin with . - or a space, must not end with . or a space, must "
    "not contain / or \\ or characters that are not printable, must not be a name that Windows "
    f"reserves, and must have at most {NAME_BYTES} bytes in UTF-8"
)
_RESERVED = {"con", "prn", "aux", "nul"} | {
    f"{port}{n}" for port in ("com", "lpt") for n in range(10)
}


def printable(text: str, *, keep: str = "") -> str:
    """Return a text in which every character that is not printable is escaped, as in ``\\n``.

    The names of files and tensors may come from a stranger. A line break in one would make two
    lines of an error, and a control character could change what the terminal shows.

    Args:
        text: any text.
        keep: characters that are not escaped, although they are not printable.
    """
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
        return text
    spaces = {char for char in text if unicodedata.category(char) == "Zs"}
    return printable(text, keep="\n\t" + "".join(spaces))


def is_name(value: str) -> bool:
    """Return whether a text can be the name of a file or folder, as ``NAME_RULE`` says."""
    return (
        value.isprintable()
        and not value.startswith((".", "-", " "))
        and not value.endswith((".", " "))
        and 0 < len(value.encode()) <= NAME_BYTES
        and "/" not in value
        and "\\" not in value
        and value.partition(".")[0].rstrip().lower() not in _RESERVED
    )
