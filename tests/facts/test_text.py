"""Text of a stranger on terminals, in pages and as names, for every character that there is."""

import logging
import sys
import unicodedata

import pytest
import tomli

from composer3d.facts.errors import UserError
from composer3d.facts.markup import escape
from composer3d.facts.text import (
    bytes_text,
    clock_text,
    in_quotes,
    is_name,
    one_line,
    printable,
    printable_lines,
    rough_duration,
    short_json,
)
from composer3d.recipe.schema import FOLDER_NAME
from composer3d.recipe.values import as_toml
from composer3d.runtime.log import _IdentityFormatter

UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# Controls of 8 bits, the direction of text, no width, line ends, tags, and marks of the byte order.
NAMED = (
    "\x1b\x07\x9b\x85\u200b\u200e\u200f\u061c\u202a\u202e\u2066\u2069\u2028\u2029\ufeff\U000e0041"
)


def is_unsafe(char: str) -> bool:
    return unicodedata.category(char) in UNSAFE


def test_no_unsafe_character_of_unicode_reaches_a_terminal_or_a_page() -> None:
    assert all(is_unsafe(char) for char in NAMED)
    # So few that none is cut off.
    for begin in range(0, sys.maxunicode + 1, 64):
        text = "".join(map(chr, range(begin, begin + 64)))
        for quote in (printable, one_line, in_quotes, short_json):
            assert quote(text).isprintable(), hex(begin)
        unsafe = {char for char in text if is_unsafe(char) and char not in "\n\t"}
        for quote in (printable_lines, escape):
            assert unsafe.isdisjoint(quote(text)), hex(begin)
        assert set(text) - unsafe <= set(printable_lines(text)), hex(begin)


def test_every_reader_of_the_text_gets_it_escaped() -> None:
    formatter = _IdentityFormatter("rank 1")
    for char in NAMED:
        assert UserError(f"a{char}b").lines[0].isprintable()
        record = logging.makeLogRecord({"msg": f"a{char}b", "levelno": 30})
        assert formatter.format(record).isprintable()
        if char.isprintable():
            continue
        written = as_toml({"key": f"a{char}b"})
        assert written.isprintable()
        assert tomli.loads(f"x = {written}") == {"x": {"key": f"a{char}b"}}


def test_a_message_hides_the_password_in_a_url() -> None:
    record = logging.makeLogRecord({"msg": "no answer from http://a:b@c/d", "levelno": 30})
    assert "http://...@c/d" in _IdentityFormatter("rank 1").format(record)
    for quote in (printable, printable_lines, one_line):
        assert quote("s3://KEY:SECRET@x/y and https:/t@z\n") in (
            "s3://...@x/y and https:/...@z\n",
            "s3://...@x/y and https:/...@z\\n",
        )
        assert quote("hf://a/b@v1") == "hf://a/b@v1"
    assert UserError("s3://KEY:SECRET@x is no URL").lines == ("s3://...@x is no URL",)


@pytest.mark.parametrize(
    "name", ["a", "llama3-8b", "a b", "\u00e9 \u4e16\u754c", "v1.0", "_x", "console", "x" * 200]
)
def test_names(name: str) -> None:
    assert is_name(name)
    assert FOLDER_NAME.accepts(name)


@pytest.mark.parametrize(
    "name",
    ["", " ", ".", "..", ".git", "-rf", "--help", " a", "a ", "a.", "a/b", "a\\b", "CON", "nul.txt"]
    + ["com1", "x" * 201, "\u00e9" * 101, "a\u3000b", "a\nb"]
    + [f"a{char}b" for char in NAMED + "\ud800\ue000\u0378"],
)
def test_texts_that_are_no_names(name: str) -> None:
    assert not FOLDER_NAME.accepts(name)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1500, "1.5 kB"),
        (1.5e9, "1.5 GB"),
        (2.5e9, "2.5 GB"),
        (2e12, "2 TB"),
        (3e12, "3 TB"),
    ],
)
def test_bytes_have_three_digits(count: float, words: str) -> None:
    assert bytes_text(count) == words


def test_a_duration_has_hours_minutes_and_seconds() -> None:
    assert clock_text(89.6) == "0:01:30"
    assert clock_text(36_000) == "10:00:00"


def test_a_rough_duration_has_one_unit() -> None:
    durations = (0.4, 99.4, 99.6, 1996.0, 5969.0, 5971.0, 45_360.0, 99.5 * 3600)
    words = ["0 s", "99 s", "2 min", "33 min", "99 min", "1.7 h", "12.6 h", "4.1 days"]
    assert [rough_duration(seconds) for seconds in durations] == words


def test_a_long_text_is_cut_and_its_length_is_said() -> None:
    long = "x" * 5000
    assert one_line(long) == f"{long[:4096]}... (5,000 characters)"
    assert one_line(long, 3) == "xxx... (5,000 characters)"
    assert in_quotes(long) == f"'{long[:200]}... (5,000 characters)'"
    assert short_json(long) == f'"{long[:79]}... (5,002 characters)'
    assert short_json([long]) == f'["{long[:78]}...'


def test_a_value_is_shown_as_json() -> None:
    assert short_json({"a": [None, True, "\u4e16\n"]}) == '{"a": [null, true, "\u4e16\\n"]}'
    assert short_json(b"x") == "(bytes)"
    assert short_json(10**5000) == "(int)"
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert short_json(nested) == "[" * 80 + "..."
