"""The command line.

A command is a module of ``composer3d.commands`` with a function ``run``. It is imported only when
it is dispatched, so that ``check`` never waits for torch.
"""

import argparse
import atexit
import contextlib
import io
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import composer3d
from composer3d.recipe.values import is_utf8, one_line
from composer3d.spec.errors import RecipeError, UserError

# Exit statuses: 128 plus the number of the signal, SIGINT or SIGPIPE.
INTERRUPTED = 130
NO_READER = 141

_MOST_DIGITS = 18  # of a number on the command line


def enter() -> int:
    """Run one command with the arguments of this process: what the program ``composer3d`` does.

    A process that leaves after an error still has its process groups. Threads of gloo may still
    hold tensors of the last collective then. When they release one, they ask for the lock of an
    interpreter that is ending, and torch aborts the process
    (https://github.com/pytorch/pytorch/pull/179291). So such a process ends without ending the
    interpreter, after all else that is done at the exit.
    """
    statuses = [1]  # of an error that ``main`` does not catch

    def leave() -> None:
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            return
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(statuses[0])

    # Whatever is registered later runs earlier. Threads, such as that of a save, were waited for.
    atexit.register(leave)
    statuses[0] = main()
    return statuses[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Under torchrun, only rank 0 prints errors about the arguments. ``commands.job`` decides which
    ranks print the errors of a job.

    Args:
        argv: the arguments; None means those of this process.

    Returns:
        The exit status: 0 done, 1 a proof, a checkpoint or a training failed, 2 the user's input is
        wrong, 130 interrupted, 141 nobody reads the output any more, as after ``| head``. If signal
        N stopped a training, the exit status is 128 + N.
    """
    for stream in (sys.stdout, sys.stderr):
        # File names may contain characters that the encoding of the terminal lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        # A broken pipe must show here, where it is caught, and not when Python exits.
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:
            # Python flushes the output once more when it exits, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NO_READER
        raise  # The output works, so another pipe is broken.


def _run(argv: Sequence[str]) -> int:
    errors = sys.stderr if os.environ.get("RANK", "0") == "0" else io.StringIO()
    try:
        _check_sets(argv)
        with contextlib.redirect_stderr(errors):
            arguments = vars(_parser().parse_args(argv))
    except SystemExit as stop:  # argparse has printed the help (0) or an error (2)
        return int(stop.code or 0)
    except UserError as error:
        print(*error.lines, sep="\n", file=errors)
        return error.status

    command = arguments.pop("command")
    try:
        _check_texts(arguments)
        if arguments.get("recipe") is not None:
            arguments["recipe"] = _find_recipe(arguments["recipe"])
        module: Any = import_module(f"composer3d.commands.{command}")
        status: int = module.run(**arguments)
        return status
    except UserError as error:
        if arguments.get("as_json"):
            answer: dict[str, Any] = {"ok": False, "errors": error.lines}
            if command == "verify":  # the keys of a verdict on a refused layout
                answer = {"passed": False, "refused": True, "error": " | ".join(error.lines)}
            print(json.dumps(answer))
        print(*error.lines, sep="\n", file=errors)
        return error.status


def _check_sets(argv: Sequence[str]) -> None:
    """Raise UserError if the key and the value of a ``--set`` are two arguments: ``--set a.b 1``.

    argparse would only say that the value is not recognized.
    """
    for index, argument in enumerate(argv):
        if argument != "--set" or index + 1 == len(argv):
            continue
        key = argv[index + 1]
        if "=" in key or key.startswith("-"):
            continue

        # Guess the value for the message. The next argument may also be the recipe.
        following = [text for text in argv[index + 2 : index + 4] if not text.startswith("--")]
        if following[:1] == ["="]:
            following = following[1:]
        value = following[0].removeprefix("=") if following else ""
        if not value or value.endswith(".toml"):
            value = "VALUE"

        correct = "--set TABLE.KEY=VALUE"
        if "." in key:
            correct = f"--set {one_line(key)}={one_line(value)}"
        raise UserError(f"--set {one_line(key)}: key and value are one argument; write {correct}")


def _check_texts(arguments: dict[str, Any]) -> None:
    """Raise UserError if an argument is empty, or cannot be a file name or a value of a recipe."""
    for value in arguments.values():
        if value == "":
            raise UserError("composer3d: an argument is empty; give it a value, or leave it out")
        is_overrides = isinstance(value, list)
        for text in value if is_overrides else [value]:
            if not isinstance(text, str):
                continue
            # An override that is not UTF-8 is left to the reader of the recipe, which names it.
            if "\0" in text or not (is_overrides or is_utf8(text)):
                raise UserError(
                    f"composer3d: the argument {one_line(text)} contains a NUL byte or bytes that "
                    "are not UTF-8; use a name in UTF-8"
                )


def _find_recipe(name: str) -> str:
    """Return the path of a recipe.

    ``name`` is a file, or else the name of a recipe of composer3d, with or without ``.toml``.
    """
    if os.path.lexists(name):
        return name
    stem = name.removeprefix("recipes/").removesuffix(".toml")
    if os.path.basename(stem) != stem:
        return name
    folder = Path(__file__).with_name("recipes")
    own = folder / f"{stem}.toml"
    if own.is_file():
        return str(own)
    if name.endswith(".toml"):
        return name  # The reader of the recipe reports that there is no such file.
    names = ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
    raise RecipeError(
        f"{one_line(name)}: there is no such file, and no such recipe in composer3d; its recipes "
        f"are {names}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer3d",
        description="Compose parallelisms for Llama-style models, and prove each of them exact.",
    )
    parser.add_argument(
        "--version", action=_Version, help="print the versions of composer3d, torch and Python"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add_command(name: str, description: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=description, description=description, allow_abbrev=False
        )
        command.set_defaults(command=name)
        return command

    check = add_command("check", "validate a recipe; print it with the origin of each value")
    _add_recipe(check, is_optional=True)
    _add_json(check)
    _add_gpus(check)
    check.add_argument(
        "--schema", action="store_true", help="print every key that a recipe may have, and exit"
    )

    train = add_command(
        "train", "train a recipe with all ranks on this machine, or as one rank under torchrun"
    )
    _add_recipe(train)

    doctor = add_command(
        "doctor",
        "check and measure the devices and the network of a recipe's mesh, before a training",
    )
    _add_recipe(doctor)
    _add_json(doctor)
    doctor.add_argument(
        "--write",
        metavar="FILE.toml",
        help="make FILE.toml, a row of hardware with the measured rates, for plan --gpu FILE.toml",
    )

    verify = add_command(
        "verify", "prove that a recipe's layout computes what one process computes"
    )
    _add_recipe(verify)
    _add_json(verify)
    verify.add_argument(
        "--dtype", choices=("float32", "float64"), default="float64", help="default: %(default)s"
    )
    verify.add_argument(
        "--steps",
        metavar="N",
        type=_positive,
        default=3,
        help="optimizer steps; default: %(default)s",
    )
    verify.add_argument(
        "--layouts",
        metavar="FILE",
        help="prove many layouts: each line of FILE has key=value overrides",
    )
    verify.add_argument(
        "--here",
        action="store_true",
        help="under torchrun: prove the recipe's own mesh on the devices and the network of this "
        "job, each process one rank, with a shrunk model",
    )

    _add_plan_arguments(
        add_command("plan", "rank the legal layouts of a recipe by predicted time and memory")
    )

    dryrun = add_command(
        "dryrun", "run a step of a job of any size on tensors without data: memory and collectives"
    )
    _add_recipe(dryrun)
    _add_json(dryrun)
    _add_gpus(dryrun)
    dryrun.add_argument(
        "--routing-skew",
        metavar="X",
        type=_number,
        default=1.0,
        help="rows of the busiest rank of ep, divided by the mean; default: %(default)g, even",
    )

    _add_prepare_arguments(add_command("prepare", 'make token files, for data.source = "tokens"'))
    _add_convert_arguments(
        add_command(
            "convert", "convert a checkpoint to another format, and prove that the copy is exact"
        )
    )

    _add_timeline_arguments(
        add_command(
            "timeline", "draw the pipeline of a recipe or of a run, and say how large its bubble is"
        )
    )

    layout = add_command(
        "layout", "draw which rank holds what, and the bytes that each axis sends in a step"
    )
    _add_picture(layout)
    layout.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=_positive,
        default=8,
        help="ranks of a node; default: %(default)s",
    )

    inspect = add_command(
        "inspect", "report what a checkpoint or token files contain, and whether they are complete"
    )
    _add_json(inspect)
    inspect.add_argument(
        "path", metavar="PATH", help="a checkpoint, as SRC of convert, or token files"
    )
    inspect.add_argument("--tensors", action="store_true", help="list each tensor")
    return parser


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    _add_recipe(plan)
    _add_json(plan)
    plan.add_argument(
        "--gpus", metavar="N", type=_positive, help="devices; default: as many as the recipe's mesh"
    )
    plan.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        default="H100",
        help="a device, such as A100-80GB, H100, H200, B200, GB200, MI300X or CPU, or a TOML file "
        "with a row of your own; default: %(default)s",
    )
    plan.add_argument(
        "--gpus-per-node", metavar="N", type=_positive, default=8, help="default: %(default)s"
    )
    plan.add_argument(
        "--top", metavar="N", type=_positive, default=10, help="layouts; default: %(default)s"
    )
    plan.add_argument(
        "--memory", action="store_true", help="only say whether the recipe, as it is, fits"
    )
    plan.add_argument(
        "--scale",
        action="store_true",
        help="also plan for 8, 64, 512 and 2048 devices, up to --gpus",
    )
    plan.add_argument("--write", metavar="FILE", help="make FILE, a recipe with the fastest layout")


def _add_timeline_arguments(timeline: argparse.ArgumentParser) -> None:
    _add_picture(timeline, is_optional=True)
    timeline.add_argument(
        "--compare",
        metavar="SCHEDULE",
        help="also draw this schedule, with the same ranks and micro-batches",
    )
    timeline.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help="predict the times of layers and messages on a device, as in plan; without it, all "
        "stages are equal and messages take no time",
    )
    timeline.add_argument(
        "--gpus-per-node", metavar="N", type=_positive, default=8, help="default: %(default)s"
    )
    timeline.add_argument(
        "--measured",
        metavar="RUN",
        help="draw what the run in this folder has done, from its trace (metrics.timeline_steps)",
    )
    timeline.add_argument(
        "--step", metavar="N", type=_positive, help="step of the run; default: the last traced one"
    )


def _add_prepare_arguments(prepare: argparse.ArgumentParser) -> None:
    _add_json(prepare)
    prepare.add_argument(
        "source",
        metavar="SRC",
        help="a text file, or a folder of them: each file is a document; or a .jsonl file, or a "
        "folder of them: each line is a document. A folder with both is refused. Hidden files and "
        "links to folders are skipped",
    )
    prepare.add_argument(
        "-o", "--out", metavar="DIR", required=True, help="folder to make; it must not exist"
    )
    prepare.add_argument(
        "--tokenizer",
        metavar="FILE|bytes",
        required=True,
        help="a tokenizer.json; or bytes, which makes each byte a token",
    )
    prepare.add_argument(
        "--eod",
        metavar="TOKEN",
        help="token after each document; default: the usual one of the tokenizer",
    )
    prepare.add_argument(
        "--field",
        metavar="KEY",
        help="key of the text in a line of JSONL; default: text. With this option, a file of any "
        "name is read as JSONL",
    )


def _add_convert_arguments(convert: argparse.ArgumentParser) -> None:
    _add_json(convert)
    convert.add_argument(
        "src",
        metavar="SRC",
        help="a checkpoint: a folder in Hugging Face or Meta format or of a run, or a torch file",
    )
    convert.add_argument("dst", metavar="DST", help="file or folder to make; it must not exist")
    convert.add_argument(
        "--to",
        choices=("hf", "meta", "torch", "dcp"),
        required=True,
        help="format of DST; torch makes one file, the others a folder",
    )
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="dtype of the weights; default: as in SRC",
    )
    convert.add_argument(
        "--weights-only", action="store_true", help="leave out the state of the optimizer"
    )
    convert.add_argument(
        "--logits", action="store_true", help="also run the models of SRC and DST, and compare them"
    )


def _add_recipe(command: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    command.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?" if is_optional else None,
        help="a TOML file, or the name of a recipe of composer3d",
    )
    command.add_argument(
        "--set",
        metavar="TABLE.KEY=VALUE",
        dest="sets",
        action="append",
        default=[],
        help="override a value; may be repeated",
    )


def _add_picture(command: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the arguments of commands that draw a recipe."""
    _add_recipe(command, is_optional=is_optional)
    _add_json(command)
    _add_gpus(command)
    command.add_argument(
        "-o", "--out", metavar="FILE.svg", help="write an SVG file; without it, print the picture"
    )


def _add_gpus(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gpus", metavar="N", type=_positive, help="number of processes that the mesh must fill"
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", dest="as_json", action="store_true", help="print JSON as the last line"
    )


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


def _positive(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(
            f"must be a number of at most {_MOST_DIGITS} digits, got {len(text):,} characters"
        )
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if len(text) > _MOST_DIGITS or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {one_line(text)}")
    return value
