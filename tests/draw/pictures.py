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
    size: float
    ink: str


class Rectangle(NamedTuple):
    """A rectangle, and the words that a browser shows above it."""

    tip: str
    left: float
    top: float
    right: float
    bottom: float
    fill: str
    has_outline: bool


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
        top, bottom = base - 0.75 * size, base + 0.2 * size
        texts.append(Text(words, left, top, left + width, bottom, size, element.get("fill", "")))
    rectangles = []
    for element in root.iter(f"{SVG}rect"):
        left, top = float(element.get("x", 0)), float(element.get("y", 0))
        right = left + float(element.get("width", 0))
        bottom = top + float(element.get("height", 0))
        tip, fill = element.findtext(f"{SVG}title", ""), element.get("fill", "")
        has_outline = element.get("stroke") is not None
        rectangles.append(Rectangle(tip, left, top, right, bottom, fill, has_outline))
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


def crossed_texts(page: Page) -> list[str]:
    """Return the texts that an outline crosses: they are neither inside of it nor outside."""
    outlines = [rectangle for rectangle in page.rectangles if rectangle.has_outline]
    return [
        text.words
        for text in page.texts
        for box in outlines
        if text.left < box.right
        and box.left < text.right
        and text.top < box.bottom
        and box.top < text.bottom
        and not (
            box.left <= text.left
            and text.right <= box.right
            and box.top <= text.top
            and text.bottom <= box.bottom
        )
    ]


def illegible_texts(page: Page) -> list[tuple[str, float, float]]:
    """Return the texts below 9 pixels, or with a contrast below 4.5, with size and contrast.

    4.5 is what the Web Content Accessibility Guidelines 2.2 (success criterion 1.4.3) ask for.
    """
    rows: dict[int, list[Rectangle]] = defaultdict(list)  # by bands of 8 pixels
    for box in page.rectangles:
        if box.fill != "none":
            for band in range(int(box.top // 8), int(box.bottom // 8) + 1):
                rows[band].append(box)
    found = []
    for text in page.texts:
        x, y = (text.left + text.right) / 2, (text.top + text.bottom) / 2
        below = "#ffffff"
        for box in rows[int(y // 8)]:  # later ones cover earlier ones
            if box.left <= x <= box.right and box.top <= y <= box.bottom:
                below = box.fill
        contrast = _contrast(text.ink, below)
        if text.size < 9 or contrast < 4.5:
            found.append((text.words, text.size, contrast))
    return found


def _contrast(first: str, second: str) -> float:
    """Return the contrast of two colours "#rrggbb", from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
