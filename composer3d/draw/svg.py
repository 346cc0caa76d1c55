"""A few shapes of SVG 1.1, as text. Lengths are in pixels, and y grows downwards."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from composer3d.facts.markup import escape, quoted

PAGE_INK, QUIET_INK, PAPER, FAINT = "#1f2328", "#59636e", "#ffffff", "#d0d7de"
# Pixels: the width of every picture, and its margin.
WIDTH, MARGIN = 1200, 20

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"

# The width of a character as a share of the font size: digits and lower case letters in the widest
# of the fonts above.
_CHARACTER_WIDTH = 0.64

Anchor = Literal["start", "middle", "end"]


class Area(NamedTuple):
    """A rectangle: its upper left corner and its size."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of the lower edge."""
        return self.y + self.height

    @property
    def middle_x(self) -> float:
        """The x of the centre."""
        return self.x + self.width / 2

    @property
    def middle_y(self) -> float:
        """The y of the centre."""
        return self.y + self.height / 2


# So that a narrow window shows the whole picture, smaller.
_FITS = ' style="max-width:100%;height:auto"'


def for_page(document: str) -> str:
    """Return an SVG document for a page whose policy allows no style in attributes."""
    return document.replace(_FITS, "", 1)


class Picture:
    """Shapes in the order in which they are drawn; later ones cover earlier ones."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def heading(self, words: str, notes: Sequence[str]) -> float:
        """Draw the heading of a picture and the notes below it; return the last base line."""
        y = 34.0
        self.text(MARGIN, y, words, size=17, bold=True)
        for note in notes:
            for line in wrap(note, 12, WIDTH - 2 * MARGIN):
                y += 18
                self.text(MARGIN, y, line, size=12, ink=QUIET_INK)
        return y

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float,
        anchor: Anchor = "start",
        bold: bool = False,
        ink: str = PAGE_INK,
    ) -> None:
        """Draw one line of text; y is its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}"{weight} '
            f'text-anchor="{anchor}" fill="{ink}">{escape(words)}</text>'
        )

    def rectangle(
        self,
        box: Area,
        *,
        fill: str,
        stroke: str | None = None,
        stroke_width: float = 1,
        radius: float = 0,
        dashed: bool = False,
        tip: str = "",
    ) -> None:
        """Draw a rectangle. A browser shows ``tip`` when the mouse is over it."""
        line = ""
        if stroke is not None:
            line = f' stroke="{stroke}" stroke-width="{_number(stroke_width)}"'
            line += ' stroke-dasharray="4 3"' if dashed else ""
        corner = f' rx="{_number(radius)}"' if radius else ""
        shape = (
            f'<rect x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" '
            f'height="{_number(box.height)}"{corner} fill="{fill}"{line}'
        )
        self._shapes.append(f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>")

    def line(
        self, x0: float, y0: float, x1: float, y1: float, *, ink: str, width: float = 1
    ) -> None:
        """Draw a straight line."""
        self._shapes.append(
            f'<line x1="{_number(x0)}" y1="{_number(y0)}" x2="{_number(x1)}" y2="{_number(y1)}" '
            f'stroke="{ink}" stroke-width="{_number(width)}"/>'
        )

    def arrow(
        self, x0: float, y0: float, x1: float, y1: float, *, ink: str, width: float = 2
    ) -> None:
        """Draw a line with a point at its end; it is horizontal or vertical."""
        length, half = 6.0, 4.0
        sign = 1 if (x1 - x0) + (y1 - y0) > 0 else -1
        if y0 == y1:
            base_x = x1 - sign * length
            self.line(x0, y0, base_x, y0, ink=ink, width=width)
            points = ((x1, y1), (base_x, y1 - half), (base_x, y1 + half))
        else:
            base_y = y1 - sign * length
            self.line(x0, y0, x0, base_y, ink=ink, width=width)
            points = ((x1, y1), (x1 - half, base_y), (x1 + half, base_y))
        text = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._shapes.append(f'<polygon points="{text}" fill="{ink}"/>')

    def document(self, width: float, height: float, title: str) -> str:
        """Return the whole SVG file; ``title`` is what screen readers say."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label={quoted(title)} '
            f'viewBox="0 0 {_number(width)} {_number(height)}" width="{_number(width)}" '
            f'height="{_number(height)}"{_FITS} font-family="{FONT}">'
        )
        page = f'<rect width="{_number(width)}" height="{_number(height)}" fill="{PAPER}"/>'
        return "\n".join([head, page, *self._shapes, "</svg>"]) + "\n"


def text_width(words: str, size: float) -> float:
    """Return about the width of a line of text; it is rather too large than too small."""
    return _CHARACTER_WIDTH * size * len(words)


def wrap(words: str, size: float, width: float) -> list[str]:
    """Cut a text into lines of at most ``width``; a single longer word stays whole."""
    lines: list[str] = []
    for word in words.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _number(value: float) -> str:
    """Return a number with at most two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
