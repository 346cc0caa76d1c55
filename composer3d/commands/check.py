"""``composer3d check``: validate a recipe and print it. It answers without torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from composer3d.commands.arguments import (
    argument,
    gpus_option,
    json_option,
    recipe_argument,
    set_option,
)
from composer3d.facts.errors import RecipeError, UserError
from composer3d.models.registry import architecture
from composer3d.recipe.machine import folder_problem, package_problems, shows_a_gpu
from composer3d.recipe.resolve import Resolved, load
from composer3d.recipe.schema import AXES, Recipe
from composer3d.recipe.values import schema_text

EXAMPLES = (
    "composer3d check quickstart",
    "composer3d check quickstart --set mesh.pp=4 --set mesh.dp_shard=1",
    "composer3d check quickstart --changed",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str | None = recipe_argument(is_optional=True, without=("--schema",))
    sets: Sequence[str] = set_option(without=("--schema",))
    as_json: bool = json_option()
    gpus: int | None = gpus_option(without=("--schema",))
    changed: bool = argument(
        "--changed",
        without=("--schema", "--json"),
        action="store_true",
        help='leave out values that are defaults, which "origins" says with --json',
    )
    schema: bool = argument(
        "--schema", action="store_true", help="print every key that a recipe may have, and exit"
    )


def run(options: Options) -> int:
    """Print the resolved recipe with the origin of each value, or every key of recipes.

    Raises:
        UserError: the recipe or this machine cannot be used.
    """
    if options.schema:
        text = schema_text()
        print(json.dumps({"ok": True, "schema": text}) + "\n" if options.as_json else text, end="")
        return 0
    if options.recipe is None:
        raise UserError(
            "composer3d check: name a RECIPE, or use --schema for the vocabulary of recipes"
        )
    resolved = load(options.recipe, options.sets, world_size=options.gpus, may_import=True)
    _check_machine(resolved, will_train_here=options.gpus is None)
    if options.as_json:
        answer: dict[str, Any] = {
            "ok": True,
            "world_size": resolved.recipe.world_size,
            "recipe": asdict(resolved.recipe),
            "origins": resolved.origins,
        }
        print(json.dumps(answer))
        return 0
    print(resolved.to_toml(only_changed=options.changed), _summary(resolved.recipe), sep="\n")
    if resolved.fills_world and options.gpus is None:
        print(
            "# mesh.dp_shard uses all remaining processes; --gpus N shows the recipe for N of them"
        )
    return 0


def _check_machine(resolved: Resolved, *, will_train_here: bool) -> None:
    """Raise RecipeError if this machine lacks something that training needs."""
    lines = []
    problem = folder_problem(resolved.recipe)
    if problem is not None:
        lines.append(f"{resolved.place('run.out_dir')}: run.out_dir: {problem}")
    if will_train_here and resolved.recipe.run.device == "cuda" and not shows_a_gpu():
        lines.append(
            f'{resolved.place("run.device")}: run.device = "cuda", but this machine shows no GPU; '
            'use --gpus N to check for another machine, or run.device = "auto" or "cpu"'
        )
    if will_train_here:
        lines += [
            f"{resolved.place(key)}: {text}" for key, text in package_problems(resolved.recipe)
        ]
    if lines:
        raise RecipeError(lines)


def _summary(recipe: Recipe) -> str:
    sizes = {axis: getattr(recipe.mesh, axis) for axis in AXES}
    axes = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    mesh = " x ".join(axes) or "no parallelism"
    if recipe.mesh.ep > 1:
        mesh += f", ep {recipe.mesh.ep} of them"
        if recipe.parallel.zero > 0:
            mesh += f", experts sharded over {recipe.mesh.efsdp}"
    data, steps = recipe.data, recipe.run.steps
    tokens = data.global_batch * data.seq_len
    model_of = architecture(recipe.model.architecture)
    parameters = f"{model_of.count_parameters(recipe.model):,}"
    active = model_of.count_active_parameters(recipe.model)
    if active is not None:
        parameters += f", of which {active:,} compute each token"
    lines = {
        "world size": f"{recipe.world_size} ({mesh})",
        "global batch": (
            f"{data.global_batch} = micro_batch {data.micro_batch} x {recipe.micro_batches} "
            f"micro-batches x {recipe.mesh.batch_ranks} data-parallel ranks"
        ),
        "tokens": f"{tokens:,} a step, {tokens * steps:,} in {steps:,} steps",
        "parameters": parameters,
    }
    return "\n".join(f"# {name:<13} {value}" for name, value in lines.items())
