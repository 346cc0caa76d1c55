"""From a TOML file and ``--set`` overrides to a ``Recipe``, with the origin of every value.

All problems of a recipe are collected and raised as one RecipeError, each line with its place. A value that is wrong on
its own keeps its key out of the cross-field rules, so that one mistake gives one line.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import prod
from typing import Any

from composer3d.errors import PlanError, RecipeError
from composer3d.recipe.joint import PATHS
from composer3d.recipe.read import Draft
from composer3d.recipe.rules import Violation, violations
from composer3d.recipe.schema import AXES, TABLES, Recipe
from composer3d.recipe.values import FIELDS, either, mention, show, value_of
from composer3d.schedules import check_csv, read_csv
from composer3d.shape import PRESETS, ModelShape


@dataclass(frozen=True)
class Resolved:
    """A recipe that keeps every rule.

    ``origins``: for each key of the recipe (of ``model``, the fields of the shape) where its value came from:
    ``recipes/x.toml:4``, ``--set mesh.tp=4``, ``preset llama3-8b`` or ``default``.
    """

    recipe: Recipe
    origins: dict[str, str]
    takes_what_is_left: bool  # the recipe says mesh.dp_shard = -1, or nothing
    _places: dict[str, str] = field(repr=False)

    def place(self, key: str) -> str:
        """The prefix of an error about ``key``; where no file gives the key, that of its table or of the file."""
        return self._places[key]

    def to_toml(self) -> str:
        """The whole recipe as TOML, each value followed by its origin; loading it gives an equal recipe."""
        lines: list[str] = []
        for table in TABLES:
            lines += ["", f"[{table}]"]
            for entry in fields(getattr(self.recipe, table)):
                value = getattr(getattr(self.recipe, table), entry.name)
                written = f"# {entry.name} is absent" if value is None else f"{entry.name} = {show(value)}"
                lines.append(f"{written:<30} # {self.origins[f'{table}.{entry.name}']}")
        return "\n".join(lines[1:]) + "\n"


def load(
    path: str | os.PathLike[str],
    sets: Sequence[str] = (),
    *,
    world_size: int | None = None,
    check_files: bool = True,
) -> Resolved:
    """Reads, checks and resolves a recipe.

    Args:
        path: the TOML file. Its ``base`` is relative to it; all other paths are relative to the working directory.
        sets: overrides, ``table.key=value`` each; a later one wins.
        world_size: processes of the world, which the mesh must fill exactly; ``mesh.dp_shard = -1`` takes what the
            other axes leave of it. None: ``mesh.dp_shard = -1`` becomes 1.
        check_files: whether the data and the checkpoint that the recipe names must be there; a proof needs neither.

    Raises:
        RecipeError: one line for each problem.
    """
    draft = Draft(os.fspath(path))
    draft.read_files()
    draft.read_sets(sets)
    if not draft.whole:  # rules on half a recipe would only blame what is missing
        raise RecipeError(draft.problems)
    shape = _resolve_shape(draft)
    left = draft.values.get("mesh.dp_shard", -1) == -1
    _resolve_shards(draft, world_size)
    tables: dict[str, Any] = {table: {} for table in TABLES if table != "model"}
    for key in FIELDS:
        table, name = key.split(".")
        if table != "model":
            draft.origins.setdefault(key, "default")
            if key in draft.values:
                tables[table][name] = draft.values[key]
    recipe = Recipe(model=shape, **{table: TABLES[table](**values) for table, values in tables.items()})
    _apply_rules(draft, recipe)
    _check_world(draft, recipe, world_size)
    if check_files:
        _check_paths(draft, recipe)
    if draft.problems:
        raise RecipeError(draft.problems)
    origins = {
        f"{t}.{entry.name}": draft.origins[f"{t}.{entry.name}"] for t in TABLES for entry in fields(getattr(recipe, t))
    }
    return Resolved(recipe, origins, left, {key: draft.place(key) for key in origins})


def _resolve_shape(draft: Draft) -> ModelShape:
    """The preset's row with the fields that the recipe gives. What is missing is a problem, and borrowed meanwhile."""
    preset, given = draft.values.get("model.preset"), {}
    row = PRESETS.get(preset or "")
    missing: list[str] = []
    for entry in fields(ModelShape):
        key = f"model.{entry.name}"
        if key in draft.values:
            given[entry.name] = draft.values[key]
        elif row is not None and getattr(row, entry.name) != entry.default:
            given[entry.name] = getattr(row, entry.name)
            draft.origins[key] = f"preset {preset}"
            draft.places[key] = draft.places["model.preset"]
        elif entry.default is not MISSING:
            given[entry.name] = entry.default
            draft.origins[key] = "default"
        else:
            given[entry.name] = getattr(PRESETS["debug-small"], entry.name)
            if key not in draft.spoiled:
                missing.append(entry.name)
            draft.spoiled.add(key)
    draft.origins.pop("model.preset", None)
    presets = ", ".join(PRESETS)
    if preset is not None and row is None:
        close = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f"did you mean {show(close[0])}? " if close else ""
        draft.problems.append(
            f"{draft.place('model.preset')}: unknown model.preset = {show(preset)}; {hint}The presets are {presets}"
        )
    elif missing and "model.preset" not in draft.spoiled:
        draft.problems.append(
            f"{draft.place('model')}: model lacks {', '.join(missing)}; give them, or a preset: {presets}"
        )
    return ModelShape(**given)


def _resolve_shards(draft: Draft, world_size: int | None) -> None:
    """Gives ``mesh.dp_shard = -1`` its value: what the other axes leave of the world."""
    if draft.values.get("mesh.dp_shard", -1) != -1:
        return
    sizes = {axis: draft.values.get(f"mesh.{axis}", 1) for axis in AXES if axis != "dp_shard"}
    rest, shards = prod(sizes.values()), 1
    origin = draft.origins.get("mesh.dp_shard", "default")
    if world_size is not None:
        origin = f"{origin}, what is left of {world_size} processes"
        if min(sizes.values()) >= 1 and not _mesh_is_spoiled(draft):
            shards = world_size // rest
            if world_size % rest:
                shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
                near = either([str(each) for each in (shards * rest, shards * rest + rest) if each])
                draft.problems.append(
                    f"{_mesh_place(draft, sizes)}: mesh.dp_shard = -1 takes what is left of the world, but "
                    f"{world_size} processes are no multiple of {shown} = {rest}; "
                    f"start {near} processes, or change an axis of [mesh]"
                )
                draft.spoiled.add("mesh.dp_shard")
    draft.values["mesh.dp_shard"], draft.origins["mesh.dp_shard"] = max(shards, 1), origin


def _mesh_is_spoiled(draft: Draft) -> bool:
    return any(f"mesh.{axis}" in draft.spoiled for axis in AXES)


def _mesh_place(draft: Draft, sizes: dict[str, int]) -> str:
    """Where to blame a product of axes: an override if there is one, else the first axis that is written and not 1."""
    written = [
        draft.places[key] for axis, size in sizes.items() if (key := f"mesh.{axis}") in draft.places and size != 1
    ]
    return next((place for place in written if place.startswith("--set ")), next(iter(written), draft.place("mesh")))


def _apply_rules(draft: Draft, recipe: Recipe) -> None:
    for violation in violations(recipe):
        if draft.spoiled.isdisjoint((violation.key, *violation.others)):
            draft.problems.append(_explain(violation, recipe, draft))


def _explain(violation: Violation, recipe: Recipe, draft: Draft) -> str:
    """The line of a violation: the place of its key, or of another one that is written; the others get their origin."""
    blamed = next((key for key in (violation.key, *violation.others) if key in draft.places), violation.key)
    message = violation.message
    for key in (violation.key, *violation.others):
        found = re.search(rf"{re.escape(mention(recipe, key))}(?![\w.])", message)
        if found and key != blamed:
            message = f"{message[: found.end()]} ({draft.origins[key]}){message[found.end() :]}"
    return f"{draft.place(blamed)}: {message}"


def _check_world(draft: Draft, recipe: Recipe, world_size: int | None) -> None:
    sizes: dict[str, int] = {axis: getattr(recipe.mesh, axis) for axis in AXES}
    if world_size in (None, recipe.world_size) or min(sizes.values()) < 1 or _mesh_is_spoiled(draft):
        return
    rest = recipe.world_size // recipe.mesh.dp_shard
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    way_out = f"set mesh.dp_shard = {world_size // rest}" if world_size % rest == 0 else "change an axis of [mesh]"
    draft.problems.append(
        f"{_mesh_place(draft, sizes)}: mesh {shown} = {recipe.world_size} processes, but the world has {world_size}; "
        f"start {recipe.world_size} processes, or {way_out}"
    )


def _check_paths(draft: Draft, recipe: Recipe) -> None:
    """What a recipe names on disk must be there. It is checked here, since rules touch no disk."""
    tokenizers: list[object] = []
    for key in ("data.path", "validation.path"):
        path, source = value_of(recipe, key), recipe.data.source
        if source in PATHS and isinstance(path, str) and draft.spoiled.isdisjoint((key, "data.source")):
            problem: str | None
            if not os.path.exists(path):
                problem = f"does not exist; give {PATHS[source]}, relative to the working directory"
            elif source != "tokens" and os.path.exists(os.path.join(path, "tokens.json")):
                problem = 'holds tokens.json, made by composer3d prepare; use data.source = "tokens"'
            elif source == "tokens":
                problem = _tokens_problem(path, draft, recipe, tokenizers)
            else:
                problem = _text_problem(path, recipe.data.seq_len, ".jsonl" if source == "jsonl" else "")
            if problem:
                draft.problems.append(f"{draft.place(key)}: {mention(recipe, key)} {problem}")
    if recipe.parallel.schedule == "csv" and draft.spoiled.isdisjoint(_OF_CSV):
        draft.problems += _csv_problems(draft, recipe)
    resume = recipe.checkpoint.resume
    if resume not in ("auto", "none") and not os.path.isdir(resume):
        draft.problems.append(
            f"{draft.place('checkpoint.resume')}: checkpoint.resume = {show(resume)} is no folder; "
            'use "auto", "none" or the folder of a checkpoint, relative to the working directory'
        )


_OF_CSV = ("parallel.schedule", "parallel.schedule_csv", "parallel.virtual_stages", "mesh.pp", "data.global_batch")


def _csv_problems(draft: Draft, recipe: Recipe) -> list[str]:
    path, pp = recipe.parallel.schedule_csv, recipe.mesh.pp
    if path is None or pp == 1 or violations(recipe):
        return []
    try:
        check_csv(read_csv(path), path, pp=pp, each=recipe.parallel.stages_per_rank, micro_batches=recipe.micro_batches)
    except PlanError as error:
        return [f"{draft.place('parallel.schedule_csv')}: {line}" for line in error.lines]
    return []


def _tokens_problem(path: str, draft: Draft, recipe: Recipe, tokenizers: list[object]) -> str | None:
    """What is wrong with token files by what their tokens.json says. ``tokenizers``: of those read so far."""
    try:
        with open(os.path.join(path, "tokens.json"), "rb") as file:
            found = json.load(file)
        tokens, vocab = int(found["tokens"]), int(found["vocab"])
        tokenizers.append((found["tokenizer"]["digest"], found["end_of_document"]))
    except (FileNotFoundError, NotADirectoryError):
        return "has no tokens.json; give " + PATHS["tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"has a tokens.json that cannot be read ({error!r}); make the folder again with composer3d prepare"
    if tokens <= recipe.data.seq_len:
        return (
            f"holds {tokens} tokens, and must hold more than data.seq_len = {recipe.data.seq_len}; "
            "give more text or shorter samples"
        )
    if vocab > recipe.model.vocab and "model.vocab" not in draft.spoiled:
        mine = f"{mention(recipe, 'model.vocab')} ({draft.origins['model.vocab']})"
        return f"has a vocabulary of {vocab} tokens, more than {mine}; set model.vocab to {vocab} or more"
    if tokenizers[-1] != tokenizers[0]:
        return "was made with another tokenizer or end of document than data.path; make it again with the same"
    return None


def _text_problem(path: str, seq_len: int, suffix: str) -> str | None:
    size = sum(os.path.getsize(file) for file in _text_files(path, suffix))
    if size == 0:
        return f"holds no text: no {suffix + ' ' * bool(suffix)}file in it that is not hidden has a byte"
    if size <= seq_len:
        return (
            f"holds {size} bytes, and must hold more than data.seq_len = {seq_len}; give more text or shorter samples"
        )
    return None


def _text_files(path: str, suffix: str) -> Iterable[str]:
    if not os.path.isdir(path):
        return [path]
    found: list[str] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(folder, name) for name in names if name[0] != "." and name.endswith(suffix)]
    return [file for file in found if os.path.isfile(file)]
