"""How a command declares its arguments; those that several commands have, and their types."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import Field, field, fields
from typing import Any

from composer3d.commands.parser import Parser
from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line

MOST_DIGITS = 18  # of a number on the command line


def argument(
    *names: str,
    one_of: str = "",
    needs: Sequence[str] = (),
    without: Sequence[str] = (),
    unless: Sequence[str] = (),
    **keywords: Any,
) -> Any:
    """Declare an argument of a command: a field of its ``Options``, which has its value.

    Arguments that have no effect beside others, or without them, are refused: ``refuse_idle``.
    Others are named as the help names them, such as ``--tasks`` or ``DATA``.

    Args:
        names: such as ``-o`` and ``--out``; none if the argument is known by its place.
        one_of: the group to which the argument belongs, of which exactly one must be given.
        needs: others, one of which it needs to have an effect.
        without: others, each of which takes its effect away.
        unless: others, each of which gives it an effect all the same.
        keywords: those of ``ArgumentParser.add_argument``.
    """
    metadata = {"names": names, "one_of": one_of, "keywords": keywords}
    return field(metadata={**metadata, "needs": needs, "without": without, "unless": unless})


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


def refuse_idle(command: str, options: Any) -> None:
    """Refuse arguments that have no effect in their combination, as ``argument`` declares.

    An argument that has its default counts as not given.

    Raises:
        UserError: with a line for each such argument.
    """
    declared = [entry for entry in fields(options) if "needs" in entry.metadata]
    given = {
        _shown_name(entry)
        for entry in declared
        if _is_given(getattr(options, entry.name), entry.metadata["keywords"].get("default"))
    }
    lines = []
    for entry in declared:
        name, rule = _shown_name(entry), entry.metadata
        if name not in given or given & set(rule["unless"]):
            continue
        beside = given & set(rule["without"])
        if beside:
            lines.append(f"{name} has no effect with {' and '.join(sorted(beside))}; leave it out")
        elif rule["needs"] and not given & set(rule["needs"]):
            others = " or ".join(rule["needs"])
            lines.append(f"{name} has no effect without {others}; give both, or leave it out")
    if lines:
        raise UserError([f"composer3d {command}: {line}" for line in lines])


def _is_given(value: object, default: object) -> bool:
    """Return whether a value is none that an argument has where it is not given."""
    return value is not None and value is not False and value != default


def _shown_name(entry: Field[Any]) -> str:
    """Return the name of an argument in the help: its long name, or what stands in its place."""
    names, keywords = entry.metadata["names"], entry.metadata["keywords"]
    return str(names[-1] if names else keywords.get("metavar", entry.name))


def recipe_argument(*, is_optional: bool = False, **rule: Any) -> Any:
    """Declare the recipe of a command, with what ``argument`` takes as a rule."""
    return argument(
        **rule,
        metavar="RECIPE",
        nargs="?" if is_optional else None,
        help="a TOML file, or the name of a recipe of composer3d",
    )


def set_option(*, help: str = "override a value; may be repeated", **rule: Any) -> Any:
    """Declare ``--set``, whose values are overrides of a recipe, each ``table.key=value``."""
    return argument(
        "--set", **rule, metavar="TABLE.KEY=VALUE", action="append", default=[], help=help
    )


def gpus_option(*, help: str = "number of processes that the mesh must fill", **rule: Any) -> Any:
    """Declare ``--gpus``."""
    return argument("--gpus", **rule, metavar="N", type=positive, help=help)


def gpus_per_node_option(*, help: str = "default: %(default)s", **rule: Any) -> Any:
    """Declare ``--gpus-per-node``: the devices that share a node."""
    return argument("--gpus-per-node", **rule, metavar="N", type=positive, default=8, help=help)


def json_option(**rule: Any) -> Any:
    """Declare ``--json``."""
    return argument("--json", **rule, action="store_true", help="print JSON as the last line")


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
