"""What a terminal can show: its width, colours, and characters beyond ASCII."""

import os
import shutil
from typing import NamedTuple, TextIO

NARROWEST, WIDEST = 60, 200  # columns
_DEFAULT_WIDTH = 100  # of an output that is not a terminal


class Style(NamedTuple):
    """How to draw with characters.

    Attributes:
        width: columns.
        has_colours: whether escape sequences of colours may be written.
        has_unicode: whether the encoding has lines and blocks.
    """

    width: int
    has_colours: bool
    has_unicode: bool

    def paint(self, words: str, colour: int) -> str:
        """Return ``words`` in black on one of the 256 colours of terminals, if it has colours."""
        return f"\x1b[30;48;5;{colour}m{words}\x1b[0m" if self.has_colours else words


def style_of(stream: TextIO) -> Style:
    """Return what an output can show. ``NO_COLOR`` in the environment turns colours off."""
    is_terminal = stream.isatty()
    width = (
        shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns if is_terminal else _DEFAULT_WIDTH
    )
    return Style(
        width=min(max(width, NARROWEST), WIDEST),
        has_colours=is_terminal and not os.environ.get("NO_COLOR"),
        has_unicode=_can_encode(stream, "│─┌┐└┘·▕"),
    )


def _can_encode(stream: TextIO, characters: str) -> bool:
    try:
        characters.encode(stream.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True
