"""Pictures as PNG, for programs that cannot show SVG. It needs the package resvg-py."""

from composer3d.draw.svg import FONT

# With the fonts of the pictures: the renderer has no other font in place of its default one.
_PROBE = (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" font-family="{FONT}">'
    "{}</svg>"
)


def png_of(svg: str) -> bytes | None:
    """Return a picture as PNG, on white. None if resvg-py is missing, or this machine has no font.

    Without a font the picture would have no words.
    """
    try:
        import resvg_py
    except ImportError:
        return None

    def render(text: str) -> bytes:
        return bytes(resvg_py.svg_to_bytes(svg_string=text, background="#ffffff"))

    word = '<text x="2" y="12" font-size="12">x</text>'
    if render(_PROBE.format(word)) == render(_PROBE.format("")):
        return None
    return render(svg)
