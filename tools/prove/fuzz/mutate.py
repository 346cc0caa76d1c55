"""Random changes of bytes, JSON and files. Each returns or describes what it did."""

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Values of a wrong type, out of any range, or at the edge of one.
ODD_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 255, 65_535, 65_536, 2**31, 2**32, 2**53, 2**53 + 1, 2**62),
    *(2**63 - 1, 2**63, 10**18, 10**30, -(2**63)),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e30, 1e300, True, False, None),
    *("", "x", "1", "a\0b", "a\nb", "\x1b[2J", "../x", "/etc/passwd", "\ud800", "\u202e"),
    "x" * 5000,
    *([], {}, [1], [[]], {"x": 1}, list(range(3000))),
)


def flip(content: bytes, draw: random.Random, *, within: tuple[int, int] | None = None) -> bytes:
    """Change one bit or a few bytes, cut, extend, repeat, swap, drop or zero a part."""
    changed = bytearray(content)
    begin, end = within or (0, len(changed))
    if end <= begin:
        return bytes(draw.randbytes(draw.choice((1, 8, 100))))
    way = draw.choice(("bit", "bit", "byte", "bytes", "cut", "extend", "repeat", "swap", "zero"))
    at = draw.randrange(begin, end)
    size = min(draw.choice((1, 2, 4, 8, 64, 512)), end - at)
    if way == "bit":
        changed[at] ^= 1 << draw.randrange(8)
    elif way == "byte":
        changed[at] = draw.randrange(256)
    elif way == "bytes":
        for _ in range(draw.choice((2, 8, 32))):
            changed[draw.randrange(begin, end)] = draw.randrange(256)
    elif way == "cut":
        del changed[at:]
    elif way == "extend":
        changed += draw.choice((b"\0", b"\xff", changed[:64])) * draw.choice((1, 8, 512))
    elif way == "repeat":
        changed[at:at] = changed[at : at + size]
    elif way == "swap":
        other = draw.randrange(begin, end - size + 1)
        here, there = bytes(changed[at : at + size]), bytes(changed[other : other + size])
        changed[at : at + size], changed[other : other + size] = there, here
    else:
        changed[at : at + size] = bytes(size)
    return bytes(changed)


def is_plain(path: Path, most: int = 1 << 20) -> bool:
    """Whether a path names a file of at most ``most`` bytes: an earlier change may replace any."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size <= most


def read_json(path: Path) -> Any:
    """The JSON value in a file, or None if it is none that can be changed."""
    if not is_plain(path):
        return None
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a JSON value with each of its keys."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from places(value[key])
    elif isinstance(value, list):
        for index in range(min(len(value), 200)):
            yield value, index
            yield from places(value[index])


def odd_like(value: Any, draw: random.Random) -> Any:
    """Return a value that a program may take for ``value``, or an odd one."""
    if draw.random() < 0.5:
        if type(value) is int:
            return draw.choice((value + 1, value - 1, -value, value * 2, value // 2, float(value)))
        if type(value) is float:
            return draw.choice((value * 2, value / 2, -value, int(value), str(value)))
        if type(value) is str and value:
            cut = draw.randrange(len(value))
            return draw.choice(
                (value[:cut], value + value[-1], value.swapcase(), value[::-1], f" {value}")
            )
        if type(value) is bool:
            return draw.choice((not value, int(value), str(value).lower()))
    return copy.deepcopy(draw.choice(ODD_VALUES))


def change_json(document: Any, draw: random.Random) -> tuple[Any, str]:
    """Return a changed copy of a JSON value, and what was changed."""
    changed = copy.deepcopy(document)
    found = list(places(changed))
    if not found:
        return copy.deepcopy(draw.choice(ODD_VALUES)), "the whole value"
    container, key = draw.choice(found)
    way = draw.choice(("value", "value", "value", "drop", "swap", "rename", "add", "wrap", "copy"))
    shown = f"{way} {str(key)[:60]!r}"
    if way == "value":
        container[key] = odd_like(container[key], draw)
        shown += f" to {str(container[key])[:60]!r}"
    elif way == "drop":
        del container[key]
    elif way == "swap":
        other, other_key = draw.choice(found)
        # A value that holds the other one cannot be swapped with it.
        here, there = copy.deepcopy(container[key]), copy.deepcopy(other[other_key])
        container[key], other[other_key] = there, here
        shown += f" with {str(other_key)[:60]!r}"
    elif way == "rename" and isinstance(container, dict):
        container[draw.choice((f"{key}s", str(key).upper(), "", "\u0000", "x" * 3000))] = (
            container.pop(key)
        )
    elif way == "add" and isinstance(container, dict):
        container[draw.choice(("x", "", "__class__", "\u202e", "version"))] = draw.choice(
            ODD_VALUES
        )
    elif way == "wrap":
        for _ in range(draw.choice((1, 2, 500))):
            container[key] = draw.choice(([container[key]], {"x": container[key]}))
    elif isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    return changed, shown


def written(document: Any, draw: random.Random) -> bytes:
    """Write a JSON value; at times with a key twice, or in a form that strict readers refuse."""
    text = json.dumps(document)
    way = draw.random()
    if way < 0.05 and text.startswith("{") and len(text) > 2:
        key = draw.choice(list(document))
        text = f"{{{json.dumps(key)}: {json.dumps(draw.choice(ODD_VALUES))}, {text[1:]}"
    elif way < 0.08:
        text = text.replace(": ", draw.choice((": NaN, ", ":\t", " :\n", ": +")), 1)
    elif way < 0.1:
        text = draw.choice(("\ufeff" + text, text + text, f"[{text}]", text[:-1] + ",}"))
    return text.encode(errors="surrogatepass")


def replace_file(path: Path, outside: Path, draw: random.Random) -> str:
    """Put something else in place of a file: a link, a pipe, a folder, a huge or an empty file."""
    siblings = [other for other in path.parent.iterdir() if other != path and other.is_file()]
    ways = ("missing", "empty", "link out", "link to itself", "link to a device", "pipe", "folder")
    way = draw.choice((*ways, "huge", "sibling", "copy of a sibling", "socket", "dangling"))
    content = path.read_bytes() if path.is_file() else b""
    if path.is_file() or path.is_symlink():
        path.unlink()
    if way == "empty":
        path.touch()
    elif way == "link out":
        path.symlink_to(outside / "secret.txt")
    elif way == "link to itself":
        path.symlink_to(path)
    elif way == "link to a device":
        path.symlink_to(draw.choice(("/dev/zero", "/dev/urandom", "/dev/stdin")))
    elif way == "dangling":
        path.symlink_to(path.with_name("not-there"))
    elif way == "pipe":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
        (path / "x").touch()
    elif way == "huge":
        with open(path, "wb") as file:
            file.write(content)
            file.truncate(draw.choice((1 << 30, 1 << 40)))
    elif way == "sibling" and siblings:
        other = draw.choice(siblings)
        other.replace(path)
        other.write_bytes(content)
        way = f"{way} {other.name}"
    elif way == "copy of a sibling" and siblings:
        path.write_bytes(draw.choice(siblings).read_bytes())
    elif way == "socket":
        os.mknod(path, 0o140600)
    return way
