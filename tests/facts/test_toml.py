"""TOML of strangers is read within bounds, and what is refused has its line."""

import pytest

from composer3d.facts.toml import TomlBoundsError, TomlError, parse_toml, parse_toml_with_lines

HUGE = "f" * 4000
QUOTED = ".".join(['"a,"'] * 900)

REFUSED = {
    "hex": (f"a = 1\nx = 0x{HUGE}", 2, "'x' must be an int of 64 bits, got one of 16,000 bits"),
    "binary": (
        f"[t]\nx = [1, 0b1{'0' * 64}]",
        2,
        "'t.x.1' must be an int of 64 bits, got 18446744",
    ),
    "inline": (
        f"x = {{ a = {{ b = {2**63} }} }}",
        1,
        "'x.a.b' must be an int of 64 bits, got 92233",
    ),
    "array of tables": (
        f"[[t]]\n[[t]]\nx = {-(2**63) - 1}",
        1,
        "'t.1.x' must be an int of 64 bits",
    ),
    "decimal": (f"a = 1\n\nx = {'9' * 4400}", 3, "an integer has more than 64 bits"),
    "long key": (f"{'k' * 9000} = 0x{HUGE}", 1, "'kkkkk"),
    "dotted": (
        ".".join("a" * 900) + " = 1",
        None,
        "line 1 nests the parts of a key deeper than 16",
    ),
    "quoted": (f"{QUOTED} = 1", None, "line 1 nests the parts of a key deeper than 16"),
    "quoted header": (f"\n[{QUOTED}]", None, "line 2 nests the parts of a key deeper than 16"),
    "quoted inside": (f"x = {{ {QUOTED} = 1 }}", None, "line 1 nests the parts of a key"),
    "levels": ("[a.b.c.d.e.f.g.h.i]\nx.y.z.k = [[[[[1]]]]]", 1, "'a' nests deeper than 16 levels"),
    "not UTF-8": (b"x = '\xed\xa0\x80'", None, "'utf-8' codec can't decode byte 0xed"),
    "surrogate": ("x = '\ud800'", 1, "'x' has a lone surrogate, which is no character"),
    "NUL": ("x = 'a\0b'", 1, "not TOML: Found invalid character"),
    "two BOMs": (b"\xef\xbb\xbf\xef\xbb\xbfx = 1", 1, "not TOML: Invalid"),
    "UTF-16": ("x = 1".encode("utf-16"), None, "'utf-8' codec can't decode byte 0xff"),
}


@pytest.mark.parametrize(("text", "line", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_out_of_bounds_is_refused(text: str | bytes, line: int | None, words: str) -> None:
    with pytest.raises(TomlError) as caught:
        parse_toml(text)
    assert caught.value.line == line
    assert words in caught.value.problem
    assert len(str(caught.value)) < 400
    is_bound = " must be an int" in words or "64 bits" in words or "levels" in words
    assert isinstance(caught.value, TomlBoundsError) or not is_bound


def test_the_bounds_are_wide_enough() -> None:
    numbers = ", ".join(["1.5"] * 1000)
    nested = "[" * 14 + "]" * 14
    text = f"\ufeffx = [{numbers}]\n[a.b]\nc.d = {{ e.f = -9223372036854775808 }}\ny = {nested}\n"
    tables, lines = parse_toml_with_lines(text.encode())
    assert tables["a"]["b"]["c"]["d"]["e"]["f"] == -(2**63)
    assert len(tables["x"]) == 1000
    assert lines["a", "b", "c", "d", "e", "f"] == 3
