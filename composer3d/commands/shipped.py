"""Files that come with composer3d: what the commands that list, show and copy them share."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from composer3d.commands.parser import Parser
from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line


@dataclass(frozen=True)
class Options:
    """What the user asks for.

    Attributes:
        action: "ls", "show" or "cp".
        name: the file to show or to copy, by its name in the list.
        dest: the file or the folder of the copy; None is a file in the working directory.
        as_json: whether ``ls`` prints one JSON object instead of a table.
    """

    action: str
    name: str | None = None
    dest: str | None = None
    as_json: bool = False


def add_actions(command: Parser, *, ls: str, show: str, cp: str, name: str, dest: str) -> None:
    """Add the arguments, whose names are those of ``Options``.

    Args:
        command: the parser of the command.
        ls, show, cp: the descriptions of the actions.
        name, dest: the help of their arguments.
    """
    actions = command.add_subparsers(metavar="ls|show|cp", required=True)
    parsers: dict[str, argparse.ArgumentParser] = {}
    for action, description in {"ls": ls, "show": show, "cp": cp}.items():
        parsers[action] = actions.add_parser(action, help=description, description=description)
        parsers[action].set_defaults(action=action)
        if action != "ls":
            parsers[action].add_argument("name", metavar="NAME", help=name)
    parsers["ls"].add_argument(
        "--json", dest="as_json", action="store_true", help="print JSON as the last line"
    )
    parsers["cp"].add_argument("dest", metavar="DEST", nargs="?", help=dest)


def make_files(contents: Mapping[Path, bytes]) -> list[Path]:
    """Make files. One that exists is never changed.

    Args:
        contents: the content of each file. The first one must be new. Another one may exist, with
            the same content.

    Returns:
        The files that were made, in order.

    Raises:
        UserError: a file exists with other content, or cannot be made. Nothing is left then.
    """
    made: list[Path] = []
    first = next(iter(contents))
    try:
        for place, content in contents.items():
            if place != first and _has_content(place, content):
                continue
            with place.open("xb") as output:  # refuses a file or a link that is there
                made.append(place)
                output.write(content)
    except OSError as error:
        for file_made in made:
            file_made.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise UserError(
                f"{one_line(place)} exists, and is not overwritten; give another DEST, or remove it"
            ) from None
        raise UserError(f"{one_line(place)}: the file cannot be made ({error.strerror})") from None
    return made


def _has_content(place: Path, content: bytes) -> bool:
    return os.path.isfile(place) and place.read_bytes() == content
