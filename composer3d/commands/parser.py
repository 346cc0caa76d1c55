"""The parsers of the command line: errors suggest what was meant, and help has examples."""

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from composer3d.facts.text import one_line

_MOST_COLUMNS = 100  # of help
_SHOWN = 80  # characters of a wrong argument in a message
_SIMILARITY = 0.7  # of a word and a suggestion; 1 for equal words


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` with the word of ``known`` most like ``word``, or ""."""
    nearest = difflib.get_close_matches(word[:_SHOWN], list(known), n=1, cutoff=_SIMILARITY)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _shorten(argument: str) -> str:
    """Return an argument on one line, cut at 80 characters, for a message."""
    return one_line(argument, _SHOWN)


def _choice_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a ``type`` for ``add_argument`` that accepts ``choices``, and suggests the nearest."""

    def choice(text: str) -> str:
        if text in choices:
            return text
        raise argparse.ArgumentTypeError(
            f"'{_shorten(text)}' is not one of {', '.join(choices)}{did_you_mean(text, choices)}"
        )

    return choice


class Parser(argparse.ArgumentParser):
    """The parser of one command. Unlike argparse's, it

    - reports unknown arguments with the usage of the command itself;
    - suggests the commands, options and choices nearest to unknown ones;
    - shows ``examples`` at the end of its help.

    Args:
        examples: command lines that work as they stand. A test parses each of them.
    """

    def __init__(
        self, *, examples: Sequence[str] = (), description: str | None = None, **keywords: Any
    ) -> None:
        self.examples = tuple(examples)
        self.arguments: list[argparse.Action] = []
        self.option_names: list[str] = []
        self.commands: Mapping[str, argparse.ArgumentParser] | None = None
        # The formatter keeps the lines of the examples, and those of the description as well.
        keywords["formatter_class"] = argparse.RawDescriptionHelpFormatter
        keywords["allow_abbrev"] = False
        super().__init__(
            description=textwrap.fill(description, _columns()) if description else None,
            epilog="\n  ".join(["examples:", *examples]) if examples else None,
            **keywords,
        )

    def add_argument(self, *names: Any, **keywords: Any) -> argparse.Action:
        """Add an argument as argparse does. A wrong one of ``choices`` gets a suggestion."""
        if "choices" in keywords and "type" not in keywords:
            keywords["type"] = _choice_of(keywords["choices"])
        return self.note(super().add_argument(*names, **keywords))

    def note(self, argument: argparse.Action) -> argparse.Action:
        """Make an argument of a group of this parser known to its suggestions. Returns it."""
        self.option_names += argument.option_strings
        self.arguments.append(argument)
        return argument

    def add_subparsers(self, **keywords: Any) -> Any:
        """Add commands as argparse does. An unknown command gets a suggestion."""
        action = super().add_subparsers(**keywords)
        self.commands = action.choices
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and report all that are unknown. Nothing is left to the caller."""
        if args is not None:
            self._report_unknown_names(args)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._report_unexpected(unknown[0])
        return namespace, unknown

    def _report_unknown_names(self, args: Sequence[str]) -> None:
        """Report an unknown option or command before argparse reports what seems to be missing.

        Options of a command stand after its name, and are left to its own parser.
        """
        for argument in args:
            if argument == "--":
                return
            name = argument.partition("=")[0]
            # Like argparse, take an argument with a space for a value.
            if name.startswith("--") and " " not in argument and name not in self.option_names:
                self._report_unexpected(name)
            if self.commands is not None and not argument.startswith("-"):
                if argument not in self.commands:
                    self._report_unknown_command(argument)
                return
        if self.commands is not None and not args:
            self.error(f"name a command; {self.prog} --help lists them")

    def _report_unknown_command(self, word: str) -> None:
        commands = self.commands or {}
        hint = did_you_mean(word, commands)
        if not hint and word.endswith(".toml"):
            hint = f"; to train a recipe, write {self.prog} train {_shorten(word)}"
        hint = hint or f"; the commands are {', '.join(commands)}"
        self.error(f"unknown command '{_shorten(word)}'{hint}")

    def _report_unexpected(self, argument: str) -> None:
        shown = _shorten(argument)
        if not argument.startswith("-"):
            key, has_value, _ = argument.partition("=")
            is_override = has_value and "." in key and "--set" in self.option_names
            hint = f"; to override a value, write --set {shown}" if is_override else ""
            self.error(f"unexpected argument '{shown}'{hint}")
        hint = did_you_mean(argument, self.option_names)
        if not hint and self.commands is not None:
            hint = "; options of a command stand after its name"
        self.error(f"unknown option {shown}{hint}")


class TopParser(Parser):
    """The parser of ``composer3d``. Its help shows the commands in groups.

    Args:
        groups: the headings of the groups, in their order.

    Attributes:
        groups: the names and descriptions of commands, by the heading of their group.
    """

    def __init__(self, *, groups: Sequence[str], **keywords: Any) -> None:
        super().__init__(**keywords)
        self.groups: dict[str, dict[str, str]] = {heading: {} for heading in groups}

    def format_help(self) -> str:
        """Return usage, description, and the commands by group."""
        options = {
            "-h, --help": "show this help, or after a command its own, and exit",
            "--version": "print the versions of composer3d, torch and Python, and exit",
            "--version --verbose": "print also the system and its devices, for a bug report",
        }
        rows = {**self.groups, "options": options}
        indent = 4 + max(len(name) for group in rows.values() for name in group)
        parts = [self.format_usage(), self.description or ""]
        for heading, group in rows.items():
            parts += ["", f"{heading}:"]
            parts += [_row(name, text, indent) for name, text in group.items()]
        parts += ["", self.epilog or ""]
        return "\n".join(parts).rstrip() + "\n"


def _row(name: str, text: str, indent: int) -> str:
    return textwrap.fill(
        text,
        _columns(),
        initial_indent=f"  {name}".ljust(indent),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def _columns() -> int:
    """Return the width of help, as argparse chooses it for a terminal of a usual width."""
    return max(40, min(_MOST_COLUMNS, shutil.get_terminal_size().columns) - 2)
