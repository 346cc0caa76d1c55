"""The command line. A command imports what it needs when it is dispatched, so that ``check`` never waits for torch."""

import argparse
import contextlib
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import composer3d
from composer3d.recipe.values import is_utf8, one_line
from composer3d.spec.errors import RecipeError, UserError

if TYPE_CHECKING:
    pass

DONE, INTERRUPTED, NO_READER = 0, 130, 141
_VERIFY = "verify:main_verify"
_RECIPES = {
    "check:main_check": "recipe",
    "train:main_train": "path",
    _VERIFY: "recipe",
}  # the argument that names a recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 the check failed, 2 the user's input is wrong.

    Under torchrun only rank 0 prints what is wrong with the input. 141: nobody reads the output, as after ``| head``.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # names in a file may hold what the terminal's encoding does not
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # Python flushes once more as it ends
            return NO_READER
        raise  # another pipe than ours


def _run(argv: Sequence[str]) -> int:
    errors = sys.stderr if os.environ.get("RANK", "0") == "0" else io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            given = vars(_parser().parse_args(_check_sets(argv)))
    except SystemExit as stop:  # argparse has printed its help (0) or what is wrong (2)
        return int(stop.code or 0)
    except UserError as error:
        print(*error.lines, sep="\n", file=errors)
        return error.status
    module, _, name = (run := given.pop("run")).partition(":")
    try:
        _check_texts(given)
        if (argument := _RECIPES.get(run)) is not None:
            given[argument] = _find_recipe(given[argument])
        function: Callable[..., int] = getattr(import_module(f"composer3d.commands.{module}"), name)
        return function(**given)
    except UserError as error:
        if given.get("as_json") and run != _VERIFY:  # which has a form of its own
            print(json.dumps({"ok": False, "errors": error.lines}))
        print(*error.lines, sep="\n", file=errors)
        return error.status


def _check_sets(argv: Sequence[str]) -> Sequence[str]:
    """Return the command line. Raises UserError where the value of a ``--set`` stands apart from its key.

    argparse would only say that the value is not recognized.
    """
    for at, argument in enumerate(argv):
        text = argv[at + 1] if argument == "--set" and at + 1 < len(argv) else None
        if text is None or "=" in text or text.startswith("-"):
            continue
        after = [part for part in argv[at + 2 : at + 4] if not part.startswith("--")]
        if after[:1] == ["="]:
            after = after[1:]
        value = after[0].removeprefix("=") if after else ""
        if not value or value.endswith(".toml"):  # it is the recipe
            value = "VALUE"
        form = (
            f"--set {one_line(text)}={one_line(value)}" if "." in text else "--set TABLE.KEY=VALUE"
        )
        raise UserError(f"--set {one_line(text)}: key and value are one argument; write {form}")
    return argv


def _check_texts(given: dict[str, Any]) -> None:
    """Raises UserError where an argument is empty or holds what no file name and no key of a recipe can hold."""
    for value in given.values():
        if value == "":
            raise UserError("composer3d: an argument is empty; give it a value, or leave it out")
        for text in value if isinstance(value, list) else [value]:
            # Of an override that is not UTF-8, the recipe's reader says which it is.
            if isinstance(text, str) and (
                "\0" in text or not (is_utf8(text) or isinstance(value, list))
            ):
                raise UserError(
                    f"composer3d: the argument {one_line(text)} holds a NUL byte or bytes that are not UTF-8; "
                    "give the file or the value a name in UTF-8"
                )


def _find_recipe(name: str | None) -> str | None:
    """The path of a recipe: a file, or one that comes with composer3d, by its name with or without ``.toml``."""
    if name is None or os.path.lexists(name):
        return name
    own = Path(__file__).with_name("recipes")
    bare = name.removeprefix("recipes/").removesuffix(".toml")
    if os.path.basename(bare) != bare:
        return name
    if (found := own / f"{bare}.toml").is_file():
        return str(found)
    if name.endswith(".toml"):
        return name  # it is said that there is no such file
    names = ", ".join(sorted(path.stem for path in own.glob("*.toml")))
    raise RecipeError(
        f"{one_line(name)}: no such file, nor a recipe of composer3d; those are {names}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer3d",
        description="Compose parallelisms for Llama-style models, and prove each composition exact.",
    )
    parser.add_argument(
        "--version", action=_Version, help="print the versions of composer3d, torch and Python"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: str, does: str, *, recipe: str = "", answers: bool = True
    ) -> Callable[..., Any]:
        """A command, for which ``run``, MODULE:FUNCTION, gets its arguments by their names: ``recipe`` of RECIPE."""
        made = commands.add_parser(name, help=does, description=does, allow_abbrev=False)
        made.set_defaults(run=run)
        if recipe:
            made.add_argument(
                recipe,
                metavar="RECIPE",
                nargs="?" if name == "check" else None,
                help="a TOML file, or the name of one of composer3d's own",
            )
            form, again = "TABLE.KEY=VALUE", "override a value; may be repeated"
            made.add_argument(
                "--set", metavar=form, dest="sets", action="append", default=[], help=again
            )
        if answers:
            made.add_argument(
                "--json", dest="as_json", action="store_true", help="print JSON as the last line"
            )
        return made.add_argument

    add = command(
        "check",
        "check:main_check",
        "validate a recipe; print it with each value's origin",
        recipe="recipe",
    )
    add("--gpus", metavar="N", type=_count, help="processes of the world that the mesh must fill")
    add("--schema", action="store_true", help="print every key of a recipe, and read none")

    does = "train; under torchrun as one rank, else with processes of its own"
    command("train", "train:main_train", does, recipe="path", answers=False)

    add = command(
        "verify",
        _VERIFY,
        "prove that a recipe's layout computes what one process computes",
        recipe="recipe",
    )
    add("--dtype", choices=("float32", "float64"), default="float64", help="default: %(default)s")
    add(
        "--steps", metavar="N", type=_count, default=3, help="optimizer steps; default: %(default)s"
    )
    add("--layouts", metavar="FILE", help="prove many: a line of FILE is key=value overrides")

    add = command("prepare", "prepare:main_prepare", 'make token files, for data.source = "tokens"')
    source = (
        "a text file, or a folder of them: a document each; or a .jsonl file, or a folder of them: a document a "
        "line; a folder of both is refused; hidden files and links to folders are passed over"
    )
    add("source", metavar="SRC", help=source)
    add("-o", "--out", metavar="DIR", required=True, help="folder to make; it must not exist")
    add("--tokenizer", metavar="FILE|bytes", required=True, help="a tokenizer.json, or plain bytes")
    add(
        "--eod",
        metavar="TOKEN",
        help="token after each document; default: the tokenizer's usual one",
    )
    field = (
        "key of the text in a line of JSONL; default: text; with it, a file of any name is JSONL"
    )
    add("--field", metavar="KEY", help=field)

    add = command(
        "convert",
        "convert:main_convert",
        "write a checkpoint in another form, proven the same",
    )
    add("src", metavar="SRC", help="a folder of Hugging Face's, Meta's or a run's, or a torch file")
    add("dst", metavar="DST", help="what to make; it must not exist")
    add("--to", choices=("hf", "meta", "torch", "dcp"), required=True, help="torch is one file")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    add("--dtype", choices=dtypes, help="dtype of the weights; default: as they are")
    add("--weights-only", action="store_true", help="leave the optimizer's state behind")
    add("--logits", action="store_true", help="run the model of both sides as well, and compare")

    add = command(
        "inspect",
        "inspect:main_inspect",
        "say what a checkpoint holds and whether it is whole",
    )
    add("path", metavar="PATH", help="as convert's SRC")
    add("--tensors", action="store_true", help="list each tensor")
    return parser


class _Version(argparse.Action):
    """Prints the versions that an issue should name, and ends. torch is not imported: its metadata says the version."""

    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **keywords)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = f"torch {version('torch')}"
        except PackageNotFoundError:
            torch = "no torch"
        print(f"composer3d {composer3d.__version__} ({torch}, Python {platform.python_version()})")
        parser.exit()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)
