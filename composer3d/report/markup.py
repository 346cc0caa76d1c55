"""Text in HTML. Whatever stands in the folder of a run may have been written by anyone."""

from html import escape as _escape


def escape(text: str) -> str:
    """Return text for the content of an element, or for an attribute in quotes.

    Control characters, and those that change the direction of the text after them, are shown by
    their number. Line breaks and tabs stay.
    """
    shown = "".join(
        char if char.isprintable() or char in "\n\t" else f"\\u{ord(char):04x}" for char in text
    )
    return _escape(shown, quote=True)


def quoted(text: str) -> str:
    """Return text as the value of an attribute, with its quotes."""
    return f'"{escape(text)}"'
