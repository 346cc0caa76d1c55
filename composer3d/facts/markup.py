"""Text in HTML and SVG. Whatever stands in the folder of a run may have been written by anyone."""

from html import escape as _escape

from composer3d.facts.text import printable_lines


def escape(text: str) -> str:
    """Return text for the content of an element, or for an attribute in quotes.

    Control characters, and those that change the direction of the text after them, are shown by
    their number. Line breaks, tabs and spaces stay.
    """
    return _escape(printable_lines(text), quote=True)


def quoted(text: str) -> str:
    """Return text as the value of an attribute, with its quotes."""
    return f'"{escape(text)}"'
