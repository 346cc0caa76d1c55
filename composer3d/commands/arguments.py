"""How a command declares its arguments; those that several commands have, and their types."""

import argparse
import math
from dataclasses import field, fields
from typing import Any

from composer3d.commands.parser import Parser
from composer3d.facts.text import one_line

MOST_DIGITS = 18  # of a number on the command line


def argument(*names: str, one_of: str = "", **keywords: Any) -> Any:
    """Declare an argument of a command: a field of its ``Options``, which has its value.

    Args:
        names: such as ``-o`` and ``--out``; none if the argument is known by its place.
        one_of: the group to which the argument belongs, of which exactly one must be given.
        keywords: those of ``ArgumentParser.add_argument``.
    """
    return field(metadata={"names": names, "one_of": one_of, "keywords": keywords})


def add_arguments(command: Parser, options: type) -> None:
    """Add the arguments that the fields of ``options`` declare, in their order."""
    groups: dict[str, Any] = {}
    for entry in fields(options):
        names, one_of, keywords = (entry.metadata[key] for key in ("names", "one_of", "keywords"))
        if names:
            keywords = {**keywords, "dest": entry.name}
        else:
            names = (entry.name,)
        if not one_of:
            command.add_argument(*names, **keywords)
            continue
        if one_of not in groups:
            groups[one_of] = command.add_mutually_exclusive_group(required=True)
        command.note(groups[one_of].add_argument(*names, **keywords))


def recipe_argument(*, is_optional: bool = False) -> Any:
    """Declare the recipe of a command."""
    return argument(
        metavar="RECIPE",
        nargs="?" if is_optional else None,
        help="a TOML file, or the name of a recipe of composer3d",
    )


def set_option(*, help: str = "override a value; may be repeated") -> Any:
    """Declare ``--set``, whose values are overrides of a recipe, each ``table.key=value``."""
    return argument("--set", metavar="TABLE.KEY=VALUE", action="append", default=[], help=help)


def gpus_option(*, help: str = "number of processes that the mesh must fill") -> Any:
    """Declare ``--gpus``."""
    return argument("--gpus", metavar="N", type=positive, help=help)


def gpus_per_node_option(*, help: str = "default: %(default)s") -> Any:
    """Declare ``--gpus-per-node``: the devices that share a node."""
    return argument("--gpus-per-node", metavar="N", type=positive, default=8, help=help)


def json_option() -> Any:
    """Declare ``--json``."""
    return argument("--json", action="store_true", help="print JSON as the last line")


def model_dtype_option() -> Any:
    """Declare the dtype of the model of a checkpoint that a command runs."""
    return argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="dtype of the model; default: that of SRC, and float32 for float16",
    )


def device_option() -> Any:
    """Declare the device on which a command runs the model of a checkpoint."""
    return argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )


def own_recipe_option() -> Any:
    """Declare the recipe of the run that has made a checkpoint."""
    return argument(
        "--recipe",
        metavar="RECIPE",
        help="the recipe of the run, needed for an architecture of your own",
    )


def picture_option() -> Any:
    """Declare the file of a picture."""
    return argument(
        "-o", "--out", metavar="FILE.svg", help="write an SVG file; without it, print the picture"
    )


def positive(text: str) -> int:
    """Return a whole number above 0.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    if len(text) > MOST_DIGITS:
        raise argparse.ArgumentTypeError(
            f"must be a number of at most {MOST_DIGITS} digits, got {len(text):,} characters"
        )
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Return a whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    if text.startswith("-") or not text.isdecimal():
        words = f"must be a whole number of at least 0, got {one_line(text, MOST_DIGITS)}"
        raise argparse.ArgumentTypeError(words)
    return 0 if text == "0" else positive(text)


def number(text: str) -> float:
    """Return a finite number.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if len(text) > MOST_DIGITS or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {one_line(text)}")
    return value
