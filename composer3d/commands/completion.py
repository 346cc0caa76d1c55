"""``composer3d completion``: print a script that completes words in a shell. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from composer3d.commands.arguments import argument
from composer3d.commands.parser import Parser
from composer3d.commands.recipes import names
from composer3d.commands.registry import make_parser
from composer3d.facts.errors import UserError

SHELLS = ("bash", "zsh", "tcsh")

# The metavars of arguments that name a recipe, a file or a folder.
_RECIPE, _OWN_RECIPE = "RECIPE", "NAME"
_PATHS = ("SRC", "DST", "DEST", "DIR", "PATH", "RUN")

EXAMPLES = (
    "composer3d completion bash > ~/.local/share/bash-completion/completions/composer3d",
    "composer3d completion zsh > ~/.zfunc/_composer3d",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    shell: str = argument(metavar="SHELL", choices=SHELLS, help="bash, zsh or tcsh")


def run(options: Options) -> int:
    """Print the script for a shell, which completes commands, options, choices and recipes.

    Raises:
        UserError: shtab, which writes the script, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise UserError(
            "composer3d completion needs shtab: pip install 'composer3d[completion]'"
        ) from None

    parser = make_parser()
    for one in _parsers(parser):
        for entry in one.arguments:
            completion = _completion_of(entry.metavar, dict(shtab.FILE))
            if completion is not None and entry.choices is None:
                # shtab reads this attribute.
                cast(Any, entry).complete = completion
    print(shtab.complete(parser, options.shell))
    return 0


def _parsers(parser: Parser) -> Iterator[Parser]:
    yield parser
    for command in (parser.commands or {}).values():
        if isinstance(command, Parser):
            yield from _parsers(command)


def _completion_of(metavar: Any, files: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the shells complete an argument, in shtab's form; None: not at all."""
    known = " ".join(names())
    if metavar in (_RECIPE, _OWN_RECIPE):
        or_files = metavar == _RECIPE
        name = "_composer3d_recipe_or_file" if or_files else "_composer3d_recipe"
        in_bash = f'compgen -W "{known}" -- "$1"'
        in_zsh = f"'recipes:recipe:({known})'"
        if or_files:
            in_bash += '\n  compgen -f -- "$1"'
            in_zsh += " 'files:file:_files'"
        return {
            "bash": name,
            "zsh": name,
            "tcsh": f"({known})",
            "preamble": {
                "bash": f"{name}() {{\n  {in_bash}\n}}\n",
                "zsh": f"{name}() {{\n  _alternative {in_zsh}\n}}\n",
            },
        }
    if isinstance(metavar, str) and (metavar in _PATHS or "FILE" in metavar):
        return files
    return None
