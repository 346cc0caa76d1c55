"""Pictures as PNG."""

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer3d.draw.png import png_of

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="60" height="30">'
    '<rect width="60" height="30" fill="red"/></svg>'
)


def test_a_picture_has_its_size() -> None:
    pytest.importorskip("resvg_py", reason="resvg-py is not installed")
    if not Path("/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf").exists():
        pytest.skip("this machine may have no font of the pictures")
    png = png_of(SVG)
    assert png is not None
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (60, 30)


def test_without_the_package_or_a_font_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert png_of(SVG) is None

    def without_font(svg_string: str, background: str) -> bytes:
        return b"blank"

    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=without_font))
    assert png_of(SVG) is None

    def with_font(svg_string: str, background: str) -> bytes:
        return svg_string.encode()

    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=with_font))
    assert png_of(SVG) == SVG.encode()
