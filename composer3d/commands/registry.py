"""The commands by their names: the groups of the help, and the parser of the command line.

A command is a module of this folder, which owns its options:

- ``EXAMPLES``: one to three command lines for its help. A test parses them;
- ``DETAILS``, if it has any: sentences for its own help, after the description;
- ``Options``, a frozen dataclass of its arguments, each declared by ``arguments.argument``;
- ``add_arguments``, if its parser needs more than that;
- ``run``, which takes the options, and returns the exit status, 0 unless its docstring says more.

A module is imported only when its command is parsed, and none imports torch before it runs.
"""

import argparse
import platform
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import composer3d
from composer3d.commands.arguments import add_arguments
from composer3d.commands.parser import Parser, TopParser

# The groups of commands in the help.
_CHOOSE = "choose a recipe and a layout"
_PROVE = "check it before a long training"
_TRAIN = "train it"
_KEEP = "look at runs, checkpoints and data, and use them"
_SHELL = "set up the shell"


class _Command(NamedTuple):
    """A command in the help of ``composer3d``.

    Attributes:
        group: the heading below which it is listed.
        description: one line, for this help and its own.
    """

    group: str
    description: str


COMMANDS = {
    "recipes": _Command(_CHOOSE, "list, show and copy the recipes that come with composer3d"),
    "check": _Command(_CHOOSE, "validate a recipe; print it with the origin of each value"),
    "train": _Command(
        _TRAIN, "train a recipe with all ranks on this machine, or as one rank under torchrun"
    ),
    "doctor": _Command(
        _PROVE,
        "check and measure the devices and the network of a recipe's mesh, before a training",
    ),
    "verify": _Command(_PROVE, "prove that a recipe's layout computes what one process computes"),
    "plan": _Command(_CHOOSE, "rank the legal layouts of a recipe by predicted time and memory"),
    "dryrun": _Command(
        _CHOOSE, "run a step of a job of any size on tensors without data: memory and collectives"
    ),
    "prepare": _Command(_TRAIN, 'make token files, for data.source = "tokens"'),
    "convert": _Command(
        _KEEP, "convert a checkpoint to another format, and prove that the copy is exact"
    ),
    "generate": _Command(_KEEP, "go on with prompts, with any checkpoint that convert reads"),
    "eval": _Command(
        _KEEP, "compute the loss of a checkpoint on token files, or its figures on tasks of lm-eval"
    ),
    "timeline": _Command(
        _CHOOSE, "draw the pipeline of a recipe or of a run, and say how large its bubble is"
    ),
    "layout": _Command(
        _CHOOSE, "draw which rank holds what, and the bytes that each axis sends in a step"
    ),
    "import": _Command(
        _CHOOSE,
        "make a recipe of a configuration of Megatron-LM, Megatron-Bridge, DeepSpeed, torchtitan, "
        "nanotron or NeMo Automodel",
    ),
    "report": _Command(_KEEP, "write one page about a run, or about several that it compares"),
    "sweep": _Command(_TRAIN, "train with several values of keys in turn, and compare the runs"),
    "launch": _Command(
        _TRAIN, "list, show and copy scripts that start a training on several machines"
    ),
    "inspect": _Command(
        _KEEP, "report what a checkpoint or token files contain, and whether they are complete"
    ),
    "completion": _Command(
        _SHELL, "print a script that completes commands, options and recipes in a shell"
    ),
}

# ``import`` cannot name a module.
_MODULES = {"import": "import_recipe"}


class Parsed(NamedTuple):
    """A command line that has been parsed.

    Attributes:
        name: the command.
        run: the function of its module.
        options: the ``Options`` of this module, a frozen dataclass.
    """

    name: str
    run: Callable[[Any], int]
    options: Any


def _module_of(name: str) -> Any:
    """Import the module of a command."""
    return import_module(f"composer3d.commands.{_MODULES.get(name, name)}")


def parse(argv: Sequence[str]) -> Parsed:
    """Parse a command line. Only the module of its command is imported.

    argparse prints the help or an error, and raises SystemExit.
    """
    first = next((word for word in argv if not word.startswith("-")), None)
    parser = make_parser([name for name in COMMANDS if name == first])
    if sorted(argv) == ["--verbose", "--version"]:
        # An action of argparse for one of them would not know of the other yet.
        print(*import_module("composer3d.commands.versions").lines(), sep="\n")
        parser.exit()
    values = vars(parser.parse_args(argv))
    name = values.pop("command")
    module = _module_of(name)
    return Parsed(name, module.run, module.Options(**values))


def make_parser(names: Collection[str] = tuple(COMMANDS)) -> TopParser:
    """Return the parser of the command line.

    Args:
        names: the commands that get their arguments. The others are only listed.
    """
    parser = TopParser(
        prog="composer3d",
        description="Compose parallelisms for Llama-style models, and prove each of them exact.",
        examples=[
            "composer3d train quickstart     # train a small model on this machine",
            "composer3d verify quickstart    # prove that its layout is exact",
            "composer3d train --help         # what a command does, with examples",
        ],
        groups=(_CHOOSE, _PROVE, _TRAIN, _KEEP, _SHELL),
    )
    parser.add_argument(
        "--version", action=_Version, help="print the versions of composer3d, torch and Python"
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, (group, description) in COMMANDS.items():
        parser.groups[group][name] = description
        if name not in names:
            commands.add_parser(name, help=description)
            continue
        module = _module_of(name)
        details = getattr(module, "DETAILS", "")
        command: Parser = commands.add_parser(
            name,
            help=description,
            description=f"{description}. {details}" if details else description,
            examples=module.EXAMPLES,
        )
        command.set_defaults(command=name)
        if hasattr(module, "add_arguments"):
            module.add_arguments(command)
        else:
            add_arguments(command, module.Options)
    return parser


class _Version(argparse.Action):
    """Prints the versions of composer3d, torch and Python, which an issue should name, and exits.

    torch is not imported: its version is read from its metadata.
    """

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
