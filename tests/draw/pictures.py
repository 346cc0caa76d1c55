"""Reads SVG pictures back: their texts and rectangles, and which texts overlap."""

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
CHARACTER_WIDTH = 0.58  # of the font size, the mean of Helvetica and DejaVu Sans
START = {"start": 0.0, "middle": 0.5, "end": 1.0}


class Text(NamedTuple):
    """A text and about the place that it takes."""

    words: str
    left: float
    top: float
    right: float
    bottom: float


class Rectangle(NamedTuple):
    """A rectangle, and the words that a browser shows above it."""

    tip: str
    left: float
    top: float
    right: float
    bottom: float


class Page(NamedTuple):
    """The contents of a picture."""

    width: float
    height: float
    texts: list[Text]
    rectangles: list[Rectangle]
    n_lines: int


def read(picture: str) -> Page:
    """Parse a picture; it must be well-formed XML."""
    root = ElementTree.fromstring(picture)
    texts = []
    for element in root.iter(f"{SVG}text"):
        words, size = element.text or "", float(element.get("font-size", 0))
        width = CHARACTER_WIDTH * size * len(words)
        left = float(element.get("x", 0)) - START[element.get("text-anchor", "start")] * width
        base = float(element.get("y", 0))
        texts.append(Text(words, left, base - 0.75 * size, left + width, base + 0.2 * size))
    rectangles = []
    for element in root.iter(f"{SVG}rect"):
        left, top = float(element.get("x", 0)), float(element.get("y", 0))
        right = left + float(element.get("width", 0))
        bottom = top + float(element.get("height", 0))
        rectangles.append(Rectangle(element.findtext(f"{SVG}title", ""), left, top, right, bottom))
    n_lines = sum(1 for _ in root.iter(f"{SVG}line"))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    return Page(width, height, texts, rectangles, n_lines)


def overlapping_texts(page: Page) -> list[tuple[str, str]]:
    """Return the pairs of texts that cover each other. Texts on one line are compared in order."""
    found = []
    rows: dict[int, list[Text]] = defaultdict(list)
    for text in page.texts:
        # Texts in the same or in neighbouring bands may touch.
        rows[int(text.bottom // 8)].append(text)
    for band, own in rows.items():
        near = sorted((*own, *rows.get(band + 1, [])), key=lambda text: text.left)
        for index, text in enumerate(near):
            for other in near[index + 1 : index + 6]:
                if other.left < text.right - 0.5 and (
                    other.top < text.bottom - 0.5 and text.top < other.bottom - 0.5
                ):
                    found.append((text.words, other.words))
    return found


def outside(page: Page) -> list[str]:
    """Return the texts and rectangles that are not inside of the page."""
    return [
        str(shape)
        for shape in (*page.texts, *page.rectangles)
        if shape.left < -0.01
        or shape.top < -0.01
        or shape.right > page.width + 0.01
        or shape.bottom > page.height + 0.01
    ]


def overlapping_rectangles(rectangles: list[Rectangle]) -> list[tuple[str, str]]:
    """Return the pairs of neighbours in a row of rectangles that cover each other."""
    rows: dict[tuple[float, float], list[Rectangle]] = defaultdict(list)
    for rectangle in rectangles:
        rows[rectangle.top, rectangle.bottom].append(rectangle)
    found = []
    for row in rows.values():
        row.sort(key=lambda rectangle: rectangle.left)
        found += [(a.tip, b.tip) for a, b in pairwise(row) if b.left < a.right - 0.02]
    return found
