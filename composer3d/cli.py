"""The command line. A command imports what it needs when it is dispatched, so that ``check`` never waits for torch."""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from composer3d.errors import UserError
from composer3d.recipe.schema import Recipe

DONE, INTERRUPTED, NO_READER = 0, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 the check failed, 2 the user's input is wrong.

    Under torchrun only rank 0 prints what is wrong with the input. 141: nobody reads the output, as after ``| head``.
    """
    try:
        status = _run(argv)
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
            return NO_READER
        raise  # another pipe than ours


def _run(argv: Sequence[str] | None) -> int:
    try:
        with contextlib.nullcontext() if _speaks() else contextlib.redirect_stderr(io.StringIO()):
            args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its help (0) or what is wrong (2)
        return int(stop.code or 0)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except UserError as error:
        if getattr(args, "json", False) and command is not _verify:  # which has a form of its own
            print(json.dumps({"ok": False, "errors": error.lines}))
        if _speaks():
            print(*error.lines, sep="\n", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return INTERRUPTED


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _check(args: argparse.Namespace) -> int:
    from composer3d.recipe.load import load
    from composer3d.recipe.values import schema_text

    if args.schema:
        print(schema_text(), end="")
        return DONE
    if args.recipe is None:
        raise UserError("composer3d check: give a RECIPE, or --schema for the vocabulary of recipes")
    resolved = load(args.recipe, args.set, world_size=args.gpus)
    recipe = resolved.recipe
    if args.json:
        answer = {"ok": True, "world_size": recipe.world_size, "recipe": asdict(recipe), "origins": resolved.origins}
        print(json.dumps(answer))
    else:
        print(resolved.to_toml(), _summary(recipe), sep="\n")
        if resolved.takes_what_is_left and args.gpus is None:
            print("# mesh.dp_shard takes what is left of the world; --gpus N shows the recipe in a world of N")
    return DONE


def _summary(recipe: Recipe) -> str:
    from composer3d.planner.counts import parameters

    axes = {axis: size for axis, size in asdict(recipe.mesh).items() if size > 1}
    mesh = " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "no parallelism"
    data = recipe.data
    tokens = data.global_batch * data.seq_len
    lines = {
        "world size": f"{recipe.world_size} ({mesh})",
        "global batch": f"{data.global_batch} = micro_batch {data.micro_batch} x {recipe.micro_batches} micro-batches "
        f"x {recipe.batch_ranks} data-parallel ranks",
        "tokens": f"{tokens:,} a step, {tokens * recipe.run.steps:,} in {recipe.run.steps:,} steps",
        "parameters": f"{parameters(recipe.model):,}",
    }
    return "\n".join(f"# {name:<13} {value}" for name, value in lines.items())


def _train(args: argparse.Namespace) -> int:
    from composer3d.job import main_train

    return main_train(args.recipe, args.set)


def _verify(args: argparse.Namespace) -> int:
    from composer3d.verify import main_verify

    given = {name: getattr(args, name) for name in ("recipe", "dtype", "steps", "layouts")}
    return main_verify(**given, sets=args.set, as_json=args.json)


def _prepare(args: argparse.Namespace) -> int:
    from composer3d.data.prepare import main_prepare

    given = {name: getattr(args, name) for name in ("source", "out", "tokenizer", "eod", "field")}
    if "" in given.values():
        raise UserError("composer3d prepare: SRC, -o, --tokenizer, --eod and --field must not be empty")
    return main_prepare(**given, as_json=args.json)


def _convert(args: argparse.Namespace) -> int:
    from composer3d.convert.convert import main_convert

    given = {name: getattr(args, name) for name in ("src", "dst", "to", "dtype", "weights_only", "logits")}
    return main_convert(**given, as_json=args.json)


def _inspect(args: argparse.Namespace) -> int:
    from composer3d.convert.inspect import main_inspect

    return main_inspect(args.path, tensors=args.tensors, as_json=args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer3d", description="Compose parallelisms for Llama-style models, and prove each composition exact."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    check = _command(
        commands, "check", _check, "validate a recipe and print it resolved, with the origin of each value"
    )
    check.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file")
    check.add_argument("--gpus", metavar="N", type=_count, help="processes of the world that the mesh must fill")
    check.add_argument("--json", action="store_true", help="print one JSON object instead")
    check.add_argument("--schema", action="store_true", help="print every key of a recipe, and read none")

    train = _command(commands, "train", _train, "train; under torchrun as one rank, else with processes of its own")
    train.add_argument("recipe", metavar="RECIPE", help="a TOML file")

    verify = _command(commands, "verify", _verify, "prove that a recipe's layout computes what one process computes")
    verify.add_argument("recipe", metavar="RECIPE", help="a TOML file")
    verify.add_argument("--dtype", choices=("float32", "float64"), default="float64", help="default: %(default)s")
    verify.add_argument("--steps", metavar="N", type=_count, default=2, help="optimizer steps; default: %(default)s")
    verify.add_argument("--layouts", metavar="FILE", help="prove many: a line of FILE is key=value overrides")
    verify.add_argument("--json", action="store_true", help="print one JSON object as the last line")

    prepare = _command(commands, "prepare", _prepare, 'make token files, for data.source = "tokens"', recipe=False)
    prepare.add_argument(
        "source",
        metavar="SRC",
        help="a text file, or a folder of them: a document each; or a .jsonl file, or a folder of them: a document a "
        "line; a folder of both is refused; hidden files and links to folders are passed over",
    )
    prepare.add_argument("-o", "--out", metavar="DIR", required=True, help="folder to make; it must not exist")
    prepare.add_argument("--tokenizer", metavar="FILE|bytes", required=True, help="a tokenizer.json, or plain bytes")
    prepare.add_argument("--eod", metavar="TOKEN", help="token after each document; default: the tokenizer's usual one")
    field = "key of the text in a line of JSONL; default: text; with it, a file of any name is JSONL"
    prepare.add_argument("--field", metavar="KEY", help=field)
    prepare.add_argument("--json", action="store_true", help="print one JSON object as the last line")

    convert = _command(
        commands, "convert", _convert, "write a checkpoint in another form, and prove it the same", recipe=False
    )
    convert.add_argument("src", metavar="SRC", help="a folder of Hugging Face's, Meta's or a run's, or a torch file")
    convert.add_argument("dst", metavar="DST", help="what to make; it must not exist")
    convert.add_argument("--to", choices=("hf", "meta", "torch", "dcp"), required=True, help="torch is one file")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    convert.add_argument("--dtype", choices=dtypes, help="dtype of the weights; default: as they are")
    convert.add_argument("--weights-only", action="store_true", help="leave the optimizer's state behind")
    convert.add_argument("--logits", action="store_true", help="run the model of both sides as well, and compare")
    convert.add_argument("--json", action="store_true", help="print one JSON object as the last line")

    inspect = _command(
        commands, "inspect", _inspect, "say what a checkpoint holds and whether it is whole", recipe=False
    )
    inspect.add_argument("path", metavar="PATH", help="as convert's SRC")
    inspect.add_argument("--tensors", action="store_true", help="list each tensor")
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    does: str,
    *,
    recipe: bool = True,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=does, description=does, allow_abbrev=False)
    command.set_defaults(command=run)
    if recipe:
        command.add_argument(
            "--set", metavar="TABLE.KEY=VALUE", action="append", default=[], help="override a value; may be repeated"
        )
    return command


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return number
