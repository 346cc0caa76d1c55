"""What a stranger may put in the place of a file, and files that are changed at random."""

import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Changes the folder of a case.
Change = Callable[[Path], object]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def sparse(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def empty_folder(path: Path) -> None:
    path.mkdir()


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        # The name of a socket has at most 107 bytes.
        os.chdir(path.parent)
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


NO_PLAIN: dict[str, Callable[[Path], None]] = {
    "pipe": pipe,
    "device": device,
    "folder": empty_folder,
    "socket": listening,
}


def secret(path: Path) -> None:
    """A link to a secret outside of the folder of the case, in whose folder ``path`` lies."""
    path.symlink_to(path.parents[2] / "outside" / "secret.txt")


def replaced(name: str, kind: Callable[[Path], object]) -> Change:
    """Put something else in the place of a file, whether it is there or not."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        kind(folder / name)

    return change


def place_of(document: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The object that has a key of a JSON object, and its name there: ``a/b`` is b in a."""
    *outer, name = key.split("/")
    for each in outer:
        document = document[each]
    return document, name


def each_value(values: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield each value of each key, after a name and the key."""
    for key, of_key in values.items():
        for number, value in enumerate(of_key):
            yield f"{key.replace('/', '.')}-{number}", key, value


def safetensors(header: object, data: bytes) -> bytes:
    """A file of ``data`` with a header, as bytes or JSON, that may say anything."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


def flipped(
    name: str,
    seed: int,
    *,
    counts: tuple[int, ...] = (1, 2, 8),
    most: int | None = None,
    cuts: bool = True,
) -> Change:
    """Change some bytes of a file at random. Most changes damage it, some are harmless.

    Args:
        name: of the file.
        seed: of the random numbers.
        counts: how many bytes may be changed.
        most: only so many bytes at the beginning are changed; None: all may be.
        cuts: whether one file in five also loses its end.
    """

    def change(folder: Path) -> None:
        generator = random.Random(seed)
        content = bytearray((folder / name).read_bytes())
        end = len(content) if most is None else min(len(content), most)
        for _ in range(generator.choice(counts)):
            content[generator.randrange(end)] = generator.randrange(256)
        if cuts and generator.random() < 0.2:
            del content[generator.randrange(len(content)) :]
        (folder / name).write_bytes(bytes(content))

    return change
