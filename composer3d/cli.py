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
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import composer3d
from composer3d.commands.completion import SHELLS
from composer3d.commands.parser import Parser, TopParser, did_you_mean
from composer3d.facts.bounds import is_utf8
from composer3d.facts.errors import LaunchError, RecipeError, UserError
from composer3d.facts.interrupts import INTERRUPTED, Interrupts
from composer3d.facts.ranges import MOST_VOCAB
from composer3d.facts.tags import COUNTED_TOKENS
from composer3d.recipe.values import one_line
from composer3d.runtime import console, environment
from composer3d.runtime.shortage import lacks_memory, no_memory

# The exit status when nobody reads the output: 128 plus the number of SIGPIPE.
NO_READER = 141

# The commands that may be a rank of a job, or start the ranks of one.
_RANK_COMMANDS = frozenset({"doctor", "eval", "generate", "train", "verify"})

_LEAST_VOCAB = 257
_MOST_DIGITS = 18  # of a number on the command line


def enter(interrupts: Interrupts | None = None) -> int:
    """Run one command with the arguments of this process: what the program ``composer3d`` does.

    Threads of gloo still run when the interpreter ends, even if all groups were destroyed. If one
    of them then releases a tensor, it asks for the lock of the ending interpreter, and the process
    is aborted (https://github.com/pytorch/pytorch/pull/179291). So a process that has had groups
    ends without ending the interpreter, after all else that is done at the exit.

    Args:
        interrupts: handles Ctrl-C already; None: from now on.
    """
    if interrupts is None:
        interrupts = Interrupts()
        interrupts.catch()
    console.open_closed_descriptors()
    console.steady_errors()
    statuses = [1]  # of an error that ``main`` does not catch

    def leave() -> None:
        # An ending interpreter gives up its handlers: Ctrl-C would end it with another status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        process_group: Any = sys.modules.get("composer3d.runtime.process_group")
        if process_group is None or not process_group.has_had_groups():
            return
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(statuses[0])

    # Whatever is registered later runs earlier. Threads, such as that of a save, were waited for.
    atexit.register(leave)
    try:
        statuses[0] = main()
        interrupts.leave()
    except KeyboardInterrupt:
        statuses[0] = INTERRUPTED
        interrupts.leave()
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
        # A broken pipe must show here, where it is caught, and not when Python exits. No ``print``:
        # an unbuffered Python would write nothing, which a full disk refuses.
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError:
        try:
            print(flush=True)
        except OSError as error:
            # Python flushes the output once more when it exits, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return NO_READER
            print(
                f"standard output cannot be written ({error.strerror}); free space where it goes, "
                "or send it elsewhere",
                file=sys.stderr,
            )
            return UserError.status
        raise  # The output works, so another pipe or file does not.


def _run(argv: Sequence[str]) -> int:
    errors = sys.stderr if environment.reports_usage() else io.StringIO()
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
        if command in _RANK_COMMANDS:
            environment.check()
        if arguments.get("recipe") is not None:
            arguments["recipe"] = _find_recipe(arguments["recipe"])
        module: Any = import_module(f"composer3d.commands.{command}")
        status: int = module.run(**arguments)
        return status
    except Exception as caught:
        if isinstance(caught, UserError):
            failure: UserError = caught
        elif lacks_memory(caught):
            failure = no_memory(f"composer3d {command}", caught)
        else:
            raise
        if arguments.get("as_json"):
            answer: dict[str, Any] = {"ok": False, "errors": failure.lines}
            if command == "verify":  # the keys of a verdict on a refused layout
                answer = {"passed": False, "refused": True, "error": " | ".join(failure.lines)}
            print(json.dumps(answer))
        if isinstance(failure, LaunchError):
            # Another rank need not have this problem, and this one may not know its number.
            errors = sys.stderr
        print(*failure.lines, sep="\n", file=errors)
        return failure.status


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
    for name, value in arguments.items():
        if value == "" or (name == "sources" and "" in value):
            raise UserError("composer3d: an argument is empty; give it a value, or leave it out")
        is_overrides = isinstance(value, list) and name != "sources"
        for text in value if isinstance(value, list) else [value]:
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
    names = sorted(path.stem for path in folder.glob("*.toml"))
    hint = did_you_mean(stem, names)
    if name.endswith(".toml") and not hint:
        return name  # The reader of the recipe reports that there is no such file.
    raise RecipeError(
        f"{one_line(name)}: there is no such file, and no such recipe in composer3d"
        + (hint or f"; its recipes are {', '.join(names)}")
    )


# The groups of commands in the help.
_CHOOSE = "choose a recipe and a layout"
_PROVE = "check it before a long training"
_TRAIN = "train it"
_KEEP = "look at runs, checkpoints and data, and use them"
_SHELL = "set up the shell"
_GROUPS = (_CHOOSE, _PROVE, _TRAIN, _KEEP, _SHELL)


def _parser() -> TopParser:
    parser = TopParser(
        prog="composer3d",
        description="Compose parallelisms for Llama-style models, and prove each of them exact.",
        examples=[
            "composer3d train quickstart     # train a small model on this machine",
            "composer3d verify quickstart    # prove that its layout is exact",
            "composer3d train --help         # what a command does, with examples",
        ],
        groups=_GROUPS,
    )
    parser.add_argument(
        "--version", action=_Version, help="print the versions of composer3d, torch and Python"
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )

    def add_command(
        name: str, description: str, *, group: str, examples: Sequence[str], details: str = ""
    ) -> Parser:
        """Add a command.

        Args:
            name: that of its module in ``composer3d.commands``.
            description: one line for both helps.
            group: the heading below which the help of ``composer3d`` lists it.
            examples: one to three command lines for its help. A test parses them.
            details: sentences for its own help, after the description.
        """
        own = f"{description}. {details}" if details else description
        command: Parser = commands.add_parser(
            name, help=description, description=own, examples=examples
        )
        command.set_defaults(command=name)
        parser.groups[group][name] = description
        return command

    _add_recipes_arguments(
        add_command(
            "recipes",
            "list, show and copy the recipes that come with composer3d",
            group=_CHOOSE,
            examples=[
                "composer3d recipes ls",
                "composer3d recipes show quickstart",
                "composer3d recipes cp quickstart my.toml",
            ],
        )
    )

    check = add_command(
        "check",
        "validate a recipe; print it with the origin of each value",
        group=_CHOOSE,
        examples=[
            "composer3d check quickstart",
            "composer3d check quickstart --set mesh.pp=4 --set mesh.dp_shard=1",
            "composer3d check --schema",
        ],
    )
    _add_recipe(check, is_optional=True)
    _add_json(check)
    _add_gpus(check)
    check.add_argument(
        "--schema", action="store_true", help="print every key that a recipe may have, and exit"
    )

    train = add_command(
        "train",
        "train a recipe with all ranks on this machine, or as one rank under torchrun",
        group=_TRAIN,
        examples=[
            "composer3d train quickstart",
            "composer3d train quickstart --set run.steps=300 --set optim.lr=1e-3",
            "torchrun --nproc-per-node 8 -m composer3d train quickstart",
        ],
        details=f"Of each logged step, it prints tok/s of all ranks together. {COUNTED_TOKENS}",
    )
    _add_recipe(train)

    doctor = add_command(
        "doctor",
        "check and measure the devices and the network of a recipe's mesh, before a training",
        group=_PROVE,
        examples=[
            "composer3d doctor debug-2-dp",
            "torchrun --nproc-per-node 8 -m composer3d doctor llama3-8b-8-fsdp --write own.toml",
        ],
    )
    _add_recipe(doctor)
    _add_json(doctor)
    doctor.add_argument(
        "--write",
        metavar="FILE.toml",
        help="make FILE.toml, a row of hardware with the measured rates, for plan --gpu FILE.toml",
    )

    verify = add_command(
        "verify",
        "prove that a recipe's layout computes what one process computes",
        group=_PROVE,
        examples=[
            "composer3d verify debug-2-dp",
            "composer3d verify llama3-70b-64-fsdp-tp --set mesh.tp=4",
            "torchrun --nproc-per-node 2 -m composer3d verify debug-2-dp --here",
        ],
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
        add_command(
            "plan",
            "rank the legal layouts of a recipe by predicted time and memory",
            group=_CHOOSE,
            examples=[
                "composer3d plan llama3-8b-8-fsdp --gpu H100",
                "composer3d plan llama3-8b-8-fsdp --gpus 16 --write fastest.toml",
                "composer3d plan llama3-8b-8-fsdp --gpu A100-80GB --memory",
            ],
        )
    )

    dryrun = add_command(
        "dryrun",
        "run a step of a job of any size on tensors without data: memory and collectives",
        group=_CHOOSE,
        examples=["composer3d dryrun quickstart", "composer3d dryrun llama3-405b-16384-3d --json"],
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

    _add_prepare_arguments(
        add_command(
            "prepare",
            'make token files, for data.source = "tokens"',
            group=_TRAIN,
            examples=[
                "composer3d prepare corpus/ -o data/train --tokenizer tokenizer.json",
                "composer3d prepare chats.jsonl -o data/chats --tokenizer llama-hf --kind chat",
                "composer3d prepare wiki.parquet -o data/wiki --train-tokenizer 32000",
            ],
        )
    )
    _add_convert_arguments(
        add_command(
            "convert",
            "convert a checkpoint to another format, and prove that the copy is exact",
            group=_KEEP,
            examples=[
                "composer3d convert runs/quickstart quickstart-hf --to hf",
                "composer3d convert Llama-3.2-1B/ llama-dcp --to dcp --logits",
            ],
        )
    )

    _add_generate_arguments(
        add_command(
            "generate",
            "go on with prompts, with any checkpoint that convert reads",
            group=_KEEP,
            examples=[
                'composer3d generate runs/quickstart --prompt "def main("',
                "composer3d generate llama-hf --prompts prompts.txt --temperature 0.8 --top-p 0.95",
            ],
        )
    )
    _add_eval_arguments(
        add_command(
            "eval",
            "compute the loss and the perplexity of a checkpoint on token files",
            group=_KEEP,
            examples=["composer3d eval runs/quickstart data/held-out"],
        )
    )

    _add_timeline_arguments(
        add_command(
            "timeline",
            "draw the pipeline of a recipe or of a run, and say how large its bubble is",
            group=_CHOOSE,
            examples=[
                "composer3d timeline quickstart",
                "composer3d timeline llama-175b-512-3d --gpu H100 --compare GPipe -o timeline.svg",
                "composer3d timeline --measured runs/quickstart",
            ],
        )
    )

    layout = add_command(
        "layout",
        "draw which rank holds what, and the bytes that each axis sends in a step",
        group=_CHOOSE,
        examples=[
            "composer3d layout quickstart",
            "composer3d layout llama3-405b-16384-3d -o layout.svg",
        ],
    )
    _add_picture(layout)
    layout.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=_positive,
        default=8,
        help="ranks of a node; default: %(default)s",
    )

    _add_import_arguments(
        add_command(
            "import",
            "make a recipe of a configuration of Megatron-LM, DeepSpeed, torchtitan or nanotron",
            group=_CHOOSE,
            examples=[
                "composer3d import pretrain_gpt.sh --gpus 64 -o my.toml",
                "composer3d import ds_config.json --gpus 16 --model llama3-8b -o my.toml",
            ],
        )
    )
    _add_report_arguments(
        add_command(
            "report",
            "write one page about a run, or about two that it compares",
            group=_KEEP,
            examples=["composer3d report runs/quickstart", "composer3d report runs/a runs/b"],
            details=f"It says tokens/s and the tokens seen. {COUNTED_TOKENS}",
        )
    )

    inspect = add_command(
        "inspect",
        "report what a checkpoint or token files contain, and whether they are complete",
        group=_KEEP,
        examples=["composer3d inspect runs/quickstart", "composer3d inspect data/train --json"],
    )
    _add_json(inspect)
    inspect.add_argument(
        "path", metavar="PATH", help="a checkpoint, as SRC of convert, or token files"
    )
    inspect.add_argument("--tensors", action="store_true", help="list each tensor")
    inspect.add_argument(
        "--samples",
        metavar="N",
        type=_samples,
        default=3,
        help="documents of token files to show as text; default: %(default)s; 0: none",
    )
    inspect.add_argument(
        "--full",
        action="store_true",
        help="read all token files, and compare them with their digests; without it, only their "
        "sizes are checked. A checkpoint is always read whole",
    )

    completion = add_command(
        "completion",
        "print a script that completes commands, options and recipes in a shell",
        group=_SHELL,
        examples=[
            "composer3d completion bash > ~/.local/share/bash-completion/completions/composer3d",
            "composer3d completion zsh > ~/.zfunc/_composer3d",
        ],
    )
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or tcsh")
    completion.set_defaults(parser=parser)
    return parser


def _add_recipes_arguments(recipes: argparse.ArgumentParser) -> None:
    actions = recipes.add_subparsers(metavar="ls|show|cp", required=True)

    def add_action(name: str, description: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=description, description=description
        )
        action.set_defaults(action=name)
        if name != "ls":
            action.add_argument("name", metavar="NAME", help="a recipe, as ls lists it")
        return action

    _add_json(add_action("ls", "list the recipes with their size, mesh and purpose"))
    add_action("show", "print a recipe as it is written; composer3d check NAME resolves it")
    add_action(
        "cp", "copy a recipe, with the recipes that it inherits, to change it; overwrites nothing"
    ).add_argument(
        "dest",
        metavar="DEST",
        nargs="?",
        help="a folder, or a file that ends with .toml; default: NAME.toml in this folder",
    )


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


def _add_report_arguments(report: argparse.ArgumentParser) -> None:
    _add_json(report)
    report.add_argument("run", metavar="RUN", help="the folder of a run")
    report.add_argument(
        "other", metavar="RUN", nargs="?", help="the folder of another run, to compare them"
    )
    report.add_argument(
        "-o",
        "--out",
        metavar="FILE.html",
        help="default: report.html in the folder of the run, or compare-NAME.html, where NAME is "
        "that of the other run",
    )
    report.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help="the device whose speed is predicted, as in plan; default: that of the run",
    )
    report.add_argument(
        "--gpus-per-node", metavar="N", type=_positive, default=8, help="default: %(default)s"
    )


def _add_prepare_arguments(prepare: Parser) -> None:
    _add_json(prepare)
    prepare.add_argument(
        "sources",
        metavar="SRC",
        nargs="+",
        help="a text file, or a folder of them: each file is a document; or a .jsonl or .parquet "
        "file, or a folder of one of them, or a folder that save_to_disk of datasets made: each "
        "line or row is a document. Text beside the others is refused. Files of text and JSONL may "
        "end in .gz or .zst. Hidden files and links to folders are skipped",
    )
    prepare.add_argument(
        "-o", "--out", metavar="DIR", required=True, help="folder to make; it must not exist"
    )
    tokenizers = prepare.add_mutually_exclusive_group(required=True)
    prepare.note(
        tokenizers.add_argument(
            "--tokenizer",
            metavar="FILE|DIR|bytes",
            help="a tokenizer.json, or a Hugging Face folder that has one; or bytes, which makes "
            "each byte a token",
        )
    )
    prepare.note(
        tokenizers.add_argument(
            "--train-tokenizer",
            metavar="N",
            type=_vocabulary,
            help="train a byte-level BPE of N tokens on the sources, write DIR/tokenizer.json and "
            "DIR/tokenizer_config.json, and prepare with it",
        )
    )
    prepare.add_argument(
        "--kind",
        choices=("text", "answers", "chat"),
        default="text",
        help="text: all tokens are learned; answers: lines of JSONL with a prompt and an answer, "
        "which alone is learned; chat: conversations, of which the turns of the assistant are "
        "learned. Lines of ShareGPT and Alpaca are read too; default: %(default)s",
    )
    prepare.add_argument(
        "--prompt-field",
        metavar="KEY",
        help="with --kind answers: key of the prompt; default: prompt",
    )
    prepare.add_argument(
        "--answer-field",
        metavar="KEY",
        help="with --kind answers: key of the answer, such as completion; default: answer",
    )
    prepare.add_argument(
        "--chat-template",
        metavar="FILE",
        help="with --kind chat: the chat template; default: the one of the tokenizer, in "
        "chat_template.jinja or tokenizer_config.json beside it",
    )
    prepare.add_argument(
        "--eod",
        metavar="TOKEN",
        help="token after each document; default: the eos_token that files beside the tokenizer "
        "name, or a usual one; <|endoftext|> of one that is trained",
    )
    prepare.add_argument(
        "--field",
        metavar="KEY",
        help="key of the text in a line of JSONL, or its column in a table; default: text. With "
        "this option, a file of any other name is read as JSONL. With --kind chat: key of the "
        "messages; default: messages",
    )
    prepare.add_argument(
        "--processes",
        metavar="N",
        type=_positive,
        help="processes that tokenize; the output does not depend on it; default: one a core",
    )
    prepare.add_argument(
        "--split",
        metavar="SHARE",
        type=_share,
        help="make DIR/train and DIR/validation, with this share of the documents in the latter, "
        "such as 0.01; the text of a document decides, so that equal documents stay together",
    )
    prepare.add_argument(
        "--shard-tokens",
        metavar="N",
        type=_positive,
        default=100_000_000,
        help="a shard ends with the document that reaches N tokens; an interrupted prepare goes on "
        "after its last shard; default: %(default)s",
    )
    prepare.add_argument(
        "--max-expansion",
        metavar="N",
        type=_positive,
        default=100,
        help="refuse a compressed file or a table that holds more than N bytes of text for each of "
        "its bytes, and over 64 MiB of text; default: %(default)s",
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


def _add_import_arguments(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command="import_recipe")  # ``import`` cannot name a module
    _add_json(command)
    command.add_argument(
        "file",
        metavar="FILE",
        help="a shell script or a Python dict with arguments of Megatron-LM, a DeepSpeed JSON, a "
        "torchtitan TOML or JSON, or a YAML of nanotron, NeMo Automodel or Megatron-Bridge; it is "
        "read as text, and nothing in it is executed",
    )
    command.add_argument(
        "-o",
        "--out",
        metavar="FILE.toml",
        help="recipe to make; it must not exist. Without it, the recipe is printed, and the report "
        "goes to standard error",
    )
    command.add_argument(
        "--gpus", metavar="N", type=_positive, help="number of GPUs, if it is not in the file"
    )
    command.add_argument(
        "--model",
        metavar="PRESET",
        help="model whose sizes complete those of the file; a DeepSpeed JSON has none",
    )
    command.add_argument(
        "--accept",
        metavar="KEY",
        action="append",
        default=[],
        help="accept an open point: something that decides what is trained, and that the recipe "
        "does not say. With open points, the recipe is a draft, which no command runs, and the "
        "exit status is 1; may be repeated",
    )
    _add_sets(command)


def _add_generate_arguments(generate: argparse.ArgumentParser) -> None:
    _add_json(generate)
    generate.add_argument("src", metavar="SRC", help="a checkpoint, as SRC of convert")
    generate.add_argument(
        "--prompt", metavar="TEXT", action="append", default=[], help="may be repeated"
    )
    generate.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt on each line; in a .jsonl, {"prompt": "..."} or {"prompt": [1, 2]}, tokens',
    )
    generate.add_argument(
        "--max-tokens",
        metavar="N",
        type=_positive,
        default=64,
        help="the most tokens after a prompt; default: %(default)s",
    )
    generate.add_argument(
        "--temperature",
        metavar="X",
        type=_temperature,
        default=0.0,
        help="divides the logits; 0, the default, always takes the most likely token",
    )
    generate.add_argument(
        "--top-p",
        metavar="P",
        type=_probability,
        default=1.0,
        help="choose among the most likely tokens that together have this probability; default: 1",
    )
    generate.add_argument(
        "--seed", metavar="N", type=_whole, default=0, help="of random choices; default: 0"
    )
    generate.add_argument(
        "--batch",
        metavar="N",
        type=_positive,
        default=8,
        help="prompts that go on together; default: %(default)s",
    )
    generate.add_argument(
        "--tokenizer",
        metavar="FILE|bytes",
        help="a tokenizer.json; or bytes, which makes each byte a token; default: that of SRC",
    )
    generate.add_argument(
        "--no-special-tokens",
        action="store_true",
        help="take prompts without the tokens that the tokenizer adds, such as <s>",
    )
    _add_run(generate)
    generate.add_argument(
        "--tp",
        metavar="N",
        type=_positive,
        help="processes that share each layer; default: 1, or all under torchrun",
    )
    generate.add_argument(
        "--out", metavar="FILE.jsonl", help="make FILE.jsonl, with a line for each prompt"
    )


def _add_eval_arguments(evaluate: argparse.ArgumentParser) -> None:
    _add_json(evaluate)
    evaluate.add_argument("src", metavar="SRC", help="a checkpoint, as SRC of convert")
    evaluate.add_argument("data", metavar="DATA", help="a folder that prepare made")
    evaluate.add_argument(
        "--batch",
        metavar="N",
        type=_positive,
        default=8,
        help="sequences that a process computes at once; default: %(default)s",
    )
    evaluate.add_argument(
        "--seq-len",
        metavar="N",
        type=_positive,
        help="tokens of a sequence; default: that of the run, or at most 2048",
    )
    evaluate.add_argument(
        "--packing",
        choices=("none", "documents"),
        help="as data.packing of a recipe; default: that of the run, or none",
    )
    _add_run(evaluate)
    _add_sets(evaluate, help="a value of the job's recipe, such as mesh.tp=2; may be repeated")


def _add_run(command: argparse.ArgumentParser) -> None:
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


def _add_recipe(command: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    command.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?" if is_optional else None,
        help="a TOML file, or the name of a recipe of composer3d",
    )
    _add_sets(command)


def _add_sets(
    command: argparse.ArgumentParser, *, help: str = "override a value; may be repeated"
) -> None:
    command.add_argument(
        "--set",
        metavar="TABLE.KEY=VALUE",
        dest="sets",
        action="append",
        default=[],
        help=help,
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


def _vocabulary(text: str) -> int:
    number = _positive(text)
    if not _LEAST_VOCAB <= number <= MOST_VOCAB:
        raise argparse.ArgumentTypeError(
            f"must be from {_LEAST_VOCAB} (the bytes, and the end of a document) to "
            f"{MOST_VOCAB:,}, got {number}"
        )
    return number


def _whole(text: str) -> int:
    if text.startswith("-") or not text.isdecimal():
        words = f"must be a whole number of at least 0, got {one_line(text[:_MOST_DIGITS])}"
        raise argparse.ArgumentTypeError(words)
    return 0 if text == "0" else _positive(text)


def _temperature(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1000, got {one_line(text)}")
    return value


def _probability(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {one_line(text)}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {value:g}")
    return value


def _samples(text: str) -> int:
    if len(text) > 4 or not text.isdecimal() or int(text) > 1000:
        raise argparse.ArgumentTypeError("must be a whole number from 0 to 1000")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if len(text) > _MOST_DIGITS or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {one_line(text)}")
    return value
