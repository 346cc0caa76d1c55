"""The arguments that several commands have, and their types."""

import argparse
import math

from composer3d.facts.text import one_line

MOST_DIGITS = 18  # of a number on the command line


def add_recipe(command: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the recipe, and ``--set``, which overrides its values."""
    command.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?" if is_optional else None,
        help="a TOML file, or the name of a recipe of composer3d",
    )
    add_sets(command)


def add_sets(
    command: argparse.ArgumentParser, *, help: str = "override a value; may be repeated"
) -> None:
    """Add ``--set``, whose values are ``sets``."""
    command.add_argument(
        "--set",
        metavar="TABLE.KEY=VALUE",
        dest="sets",
        action="append",
        default=[],
        help=help,
    )


def add_gpus(command: argparse.ArgumentParser) -> None:
    """Add ``--gpus``, which names the processes that a mesh must fill."""
    command.add_argument(
        "--gpus", metavar="N", type=positive, help="number of processes that the mesh must fill"
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """Add ``--json``, whose value is ``as_json``."""
    command.add_argument(
        "--json", dest="as_json", action="store_true", help="print JSON as the last line"
    )


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that run the model of a checkpoint."""
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="dtype of the model; default: that of SRC, and float32 for float16",
    )
    command.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )
    command.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="the recipe of the run, needed for an architecture of your own",
    )


def add_picture(command: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the arguments of commands that draw a recipe."""
    add_recipe(command, is_optional=is_optional)
    add_json(command)
    add_gpus(command)
    command.add_argument(
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
