"""What a stranger may put in the place of a file, and files that are changed at random."""

import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.prove.fuzz.mutate import flip

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


def safetensors(header: object, data: bytes) -> bytes:
    """A file of ``data`` with a header, as bytes or JSON, that may say anything."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


def flipped(name: str, seed: int, most: int = 1 << 30) -> Change:
    """Change a file at random, within its first ``most`` bytes.

    Most changes damage the file, some are harmless, none may do harm.
    """

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        within = (0, min(len(content), most))
        (folder / name).write_bytes(flip(content, random.Random(seed), within=within))

    return change
