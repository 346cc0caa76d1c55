"""``composer3d import``: make a recipe of a configuration of another program. No torch."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer3d.commands.arguments import (
    argument,
    gpus_option,
    json_option,
    set_option,
)
from composer3d.facts.errors import UserError
from composer3d.imports.result import Imported, import_file

EXAMPLES = (
    "composer3d import pretrain_gpt.sh --gpus 64 -o my.toml",
    "composer3d import ds_config.json --gpus 16 --model llama3-8b -o my.toml",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    as_json: bool = json_option()
    file: str = argument(
        metavar="FILE",
        help="a shell script or a Python dict with arguments of Megatron-LM, a DeepSpeed JSON, a "
        "torchtitan TOML or JSON, or a YAML of nanotron, NeMo Automodel or Megatron-Bridge; it is "
        "read as text, and nothing in it is executed",
    )
    out: str | None = argument(
        "-o",
        "--out",
        metavar="FILE.toml",
        help="recipe to make; it must not exist. Without it, the recipe is printed, and the report "
        "goes to standard error",
    )
    gpus: int | None = gpus_option(help="number of GPUs, if it is not in the file")
    model: str | None = argument(
        "--model",
        metavar="PRESET",
        help="model whose sizes complete those of the file; a DeepSpeed JSON has none",
    )
    accept: Sequence[str] = argument(
        "--accept",
        metavar="KEY",
        action="append",
        default=[],
        help="accept an open point: something that decides what is trained, and that the recipe "
        "does not say. With open points, the recipe is a draft, which no command runs, and the "
        "exit status is 1; may be repeated",
    )
    sets: Sequence[str] = set_option()


def run(options: Options) -> int:
    """Write the recipe, and print what was taken over, what has no equal and what is open.

    Returns:
        The exit status: 0, or 1 if the recipe is a draft with open points.

    Raises:
        UserError: no recipe can be made, or ``out`` cannot be written.
    """
    if options.out is not None and os.path.lexists(options.out):
        raise UserError(f"-o {options.out}: the file exists; choose another name")
    imported = import_file(
        options.file, options.sets, gpus=options.gpus, model=options.model, accept=options.accept
    )
    status = 1 if imported.made.open else 0
    if options.out is not None:
        _write(imported.text, Path(options.out))
    if options.as_json:
        print(json.dumps(_as_json(imported)))
        return status
    if options.out is None:
        print(imported.text, end="")
    report = sys.stderr if options.out is None else sys.stdout
    print(*_report(imported, options.out), sep="\n", file=report)
    return status


def _write(text: str, path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"-o {path}: the file cannot be made ({error.strerror})") from None


def _as_json(imported: Imported) -> dict[str, Any]:
    made = imported.made
    return {
        "ok": not made.open,
        "program": made.program,
        "world_size": imported.resolved.recipe.world_size,
        "recipe": imported.text,
        "taken_over": made.taken,
        "not_in_the_file": made.assumed,
        "no_equal": made.lost,
        "no_difference": made.harmless,
        "contradictions": made.contradictions,
        "open": made.open,
    }


def _report(imported: Imported, out: str | None) -> list[str]:
    made, recipe = imported.made, imported.resolved.recipe
    lines = [f"{made.file}: {made.program}, {recipe.world_size:,} GPUs"]
    for title, entries in (
        ("taken over", made.taken),
        ("not in the file", made.assumed),
        ("no equal", made.lost),
        ("contradictions", made.contradictions),
        ("open points", [f"{key}: {line}" for key, line in made.open.items()]),
    ):
        lines.append(f"{title}:" if entries else f"{title}: none")
        lines += [f"  {entry}" for entry in entries]
    if made.harmless:
        lines.append(f"no difference here: {', '.join(made.harmless)}")
    if made.open:
        lines.append(
            f"{out or 'the recipe'} is a draft, which no command runs: settle each open point in "
            "it and delete its line in [open], or import again with --accept KEY for each"
        )
    elif out is not None:
        lines.append(
            f"the recipe is {out}; next: composer3d check {out} --gpus {recipe.world_size}"
        )
    return lines
