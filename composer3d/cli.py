"""The command line.

A command is a module of ``composer3d.commands``, which owns its options (``commands.registry``). It
is imported only when it is named, so that ``check`` never waits for torch.
"""

import atexit
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer3d.commands import registry
from composer3d.commands.arguments import refuse_idle
from composer3d.commands.parser import did_you_mean
from composer3d.facts.bounds import is_utf8
from composer3d.facts.errors import LaunchError, RecipeError, UserError
from composer3d.facts.interrupts import INTERRUPTED, Interrupts
from composer3d.facts.text import one_line
from composer3d.runtime import console, environment
from composer3d.runtime.shortage import lacks_memory, no_memory

# The exit status when nobody reads the output: 128 plus the number of SIGPIPE.
_NO_READER = 141

# The commands that may be a rank of a job, or start the ranks of one.
_RANK_COMMANDS = frozenset({"doctor", "eval", "generate", "train", "verify"})


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
                return _NO_READER
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
            parsed = registry.parse(argv)
    except SystemExit as stop:  # argparse has printed the help (0) or an error (2)
        return int(stop.code or 0)
    except UserError as error:
        print(*error.lines, sep="\n", file=errors)
        return error.status

    command, options = parsed.name, parsed.options
    try:
        _check_texts(vars(options))
        refuse_idle(command, options)
        if command in _RANK_COMMANDS:
            environment.check()
        recipe = getattr(options, "recipe", None)
        if recipe is not None:
            options = replace(options, recipe=_find_recipe(recipe))
        return parsed.run(options)
    except Exception as caught:
        if isinstance(caught, UserError):
            failure: UserError = caught
        elif lacks_memory(caught):
            failure = no_memory(f"composer3d {command}", caught)
        else:
            raise
        if getattr(options, "as_json", False):
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


def _check_texts(arguments: Mapping[str, Any]) -> None:
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
    if os.path.isfile(own):
        return str(own)
    names = sorted(path.stem for path in folder.glob("*.toml"))
    hint = did_you_mean(stem, names)
    if name.endswith(".toml") and not hint:
        return name  # The reader of the recipe reports that there is no such file.
    raise RecipeError(
        f"{one_line(name)}: there is no such file, and no such recipe in composer3d"
        + (hint or f"; its recipes are {', '.join(names)}")
    )
