"""From a TOML file and ``--set`` overrides to a ``Recipe``, with the origin of every value.

All problems of a recipe are collected and raised as one RecipeError, each line with its place. A value that is wrong on
its own keeps its key out of the cross-field rules, so that one mistake gives one line.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from math import prod
from pathlib import Path

from composer3d import hf
from composer3d.errors import CheckpointError, PlanError, RecipeError
from composer3d.recipe.read import Draft
from composer3d.recipe.rules import PATHS, Violation, violations
from composer3d.recipe.schema import AXES, TABLES, MeshTable, Model, Recipe
from composer3d.recipe.values import mention, multiples_near, show, value_of
from composer3d.schedules import check_csv, read_csv
from composer3d.shape import PRESETS, ModelShape


@dataclass(frozen=True)
class Resolved:
    """A recipe that keeps every rule.

    ``origins``: for each key of the recipe (of ``model``, the fields of the shape) where its value came from:
    ``recipes/x.toml:4``, ``--set mesh.tp=4``, ``preset llama3-8b`` or ``default``.
    ``place``: the prefix of an error about a key; where no file gives the key, that of its table or of the file.
    """

    recipe: Recipe
    origins: dict[str, str]
    takes_what_is_left: bool  # the recipe says mesh.dp_shard = -1, or nothing
    place: Callable[[str], str] = field(repr=False)

    def to_toml(self) -> str:
        """The whole recipe as TOML, each value followed by its origin; loading it gives an equal recipe."""
        lines: list[str] = []
        for table, values in asdict(self.recipe).items():
            lines += ["", f"[{table}]"]
            for name, value in values.items():
                written = f"# {name} is absent" if value is None else f"{name} = {show(value)}"
                lines.append(f"{written:<30} # {self.origins[f'{table}.{name}']}")
        return "\n".join(lines[1:]) + "\n"


def load(
    path: str | os.PathLike[str], sets: Sequence[str] = (), *, world_size: int | None = None, check_files: bool = True
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
    draft.read(sets)
    tables = {table: cls(**draft.given(table)) for table, cls in TABLES.items() if table != "model"}
    is_open = tables["mesh"].dp_shard == -1
    model = _resolve_shape(draft)
    recipe = Recipe(**tables | {"model": model, "mesh": _fill_world(draft, tables["mesh"], world_size)})
    broken = violations(recipe)
    for violation in broken:
        if draft.spoiled.isdisjoint((violation.key, *violation.others)):
            _explain(violation, recipe, draft)
    if check_files:
        _check_files(draft, recipe, fits=not broken and not draft.spoiled)
    if draft.problems:
        raise RecipeError(draft.problems)
    keys = [f"{table}.{name}" for table, values in asdict(recipe).items() for name in values]
    return Resolved(recipe, {key: draft.origin(key) for key in keys}, is_open, draft.place)


def _resolve_shape(draft: Draft) -> Model:
    """The preset's row, or config.json's shape, with the fields that the recipe gives.

    What is missing is a problem, and borrowed meanwhile.
    """
    given = draft.given("model")
    preset, folder = given.pop("preset", None), given.get("hf")
    row, source, named = PRESETS.get(preset or ""), f"preset {preset}", "model.preset"
    if folder is not None:
        source, named = f"config.json of {folder}", "model.hf"
        try:
            row = hf.read_shape(folder)
        except CheckpointError as error:
            draft.blame(named, *(f"model.hf: {line}" for line in error.lines))
            draft.spoiled.add("model.preset")
        if preset is not None:
            draft.blame(named, "model.hf and model.preset both give a shape; remove one")
    missing: list[str] = []
    for entry in fields(ModelShape):
        key = f"model.{entry.name}"
        if entry.name in given:
            continue
        if row is not None and getattr(row, entry.name) != entry.default:
            given[entry.name] = getattr(row, entry.name)
            draft.origins[key], draft.places[key] = source, draft.places[named]
        elif row is None and entry.default is MISSING:
            given[entry.name] = getattr(PRESETS["debug-small"], entry.name)
            missing += [entry.name] if key not in draft.spoiled else []
            draft.spoiled.add(key)
    presets = ", ".join(PRESETS)
    if preset is not None and row is None:
        close = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f"did you mean {show(close[0])}? " if close else ""
        draft.blame("model.preset", f"unknown model.preset = {show(preset)}; {hint}The presets are {presets}")
    elif missing and "model.preset" not in draft.spoiled:
        draft.blame("model", f"model lacks {', '.join(missing)}; give them, or a preset: {presets}")
    return Model(**given)


def _fill_world(draft: Draft, mesh: MeshTable, world_size: int | None) -> MeshTable:
    """Gives ``mesh.dp_shard = -1`` its value, what the other axes leave, and has the mesh fill the world."""
    sizes: dict[str, int] = asdict(mesh)
    if is_open := mesh.dp_shard == -1:
        del sizes["dp_shard"]
        mesh = replace(mesh, dp_shard=1)
        if world_size is not None:
            draft.origins["mesh.dp_shard"] = f"{draft.origin('mesh.dp_shard')}, what is left of {world_size} processes"
    if world_size is None or min(sizes.values()) < 1 or not draft.spoiled.isdisjoint(f"mesh.{axis}" for axis in AXES):
        return mesh
    shown, product = " x ".join(f"{axis} {size}" for axis, size in sizes.items()), prod(sizes.values())
    shards, rest = divmod(world_size, product // sizes.get("dp_shard", 1))
    if rest == 0 and (is_open or shards == mesh.dp_shard):
        return replace(mesh, dp_shard=shards)
    if is_open:
        draft.spoiled.add("mesh.dp_shard")
        fault = f"mesh.dp_shard = -1 takes what is left of the world, but {world_size} processes are no multiple of"
        way_out = f"start {multiples_near(world_size, product)} processes, or change an axis of [mesh]"
        problem = f"{fault} {shown} = {product}; {way_out}"
    else:
        way_out = "change an axis of [mesh]" if rest else f"set mesh.dp_shard = {shards}"
        fault = f"mesh {shown} = {product} processes, but the world has {world_size}"
        problem = f"{fault}; start {product} processes, or {way_out}"
    # An override is to blame if there is one, else the first axis that is written and not 1.
    written = [key for axis, size in sizes.items() if (key := f"mesh.{axis}") in draft.places and size != 1]
    overrides = [key for key in written if draft.places[key].startswith("--set ")]
    draft.blame((overrides or written or ["mesh"])[0], problem)
    return mesh


def _explain(violation: Violation, recipe: Recipe, draft: Draft) -> None:
    """Blames the key of a violation, or another one of it that is written; the others get their origin."""
    keys, message = (violation.key, *violation.others), violation.message
    blamed = next((key for key in keys if key in draft.places), violation.key)
    for key in keys:
        found = re.search(rf"{re.escape(mention(recipe, key))}(?![\w.])", message)
        if found and key != blamed:
            message = f"{message[: found.end()]} ({draft.origin(key)}){message[found.end() :]}"
    draft.blame(blamed, message)


def _check_files(draft: Draft, recipe: Recipe, *, fits: bool) -> None:
    """What a recipe names on disk must be there; rules touch no disk. ``fits``: a schedule can be held against it."""
    tokenizers: list[object] = []
    for key in ("data.path", "validation.path"):
        path = value_of(recipe, key)
        if path is None or recipe.data.source not in PATHS or not draft.spoiled.isdisjoint((key, "data.source")):
            continue
        if problem := _data_problem(path, draft, recipe, tokenizers):
            draft.blame(key, f"{mention(recipe, key)} {problem}")
    csv, pp, each = recipe.parallel.schedule_csv, recipe.mesh.pp, recipe.parallel.stages_per_rank
    if csv is not None and pp > 1 and fits:
        try:
            check_csv(read_csv(csv), csv, pp=pp, each=each, micro_batches=recipe.micro_batches)
        except PlanError as error:
            draft.blame("parallel.schedule_csv", *error.lines)
    resume = recipe.checkpoint.resume
    if resume not in ("auto", "none") and not os.path.isdir(resume):
        way_out = 'use "auto", "none" or the folder of a checkpoint, relative to the working directory'
        draft.blame("checkpoint.resume", f"{mention(recipe, 'checkpoint.resume')} is no folder; {way_out}")


def _data_problem(path: str, draft: Draft, recipe: Recipe, tokenizers: list[object]) -> str | None:
    """What is wrong with a text or with token files. ``tokenizers``: of those read so far."""
    source, seq_len, vocab = recipe.data.source, recipe.data.seq_len, 0
    manifest = os.path.join(path, "tokens.json")
    if not os.path.exists(path):
        return f"does not exist; give {PATHS[source]}, relative to the working directory"
    if source == "tokens":
        try:
            found = json.loads(Path(manifest).read_bytes())
            size, unit, vocab = int(found["tokens"]), "tokens", int(found["vocab"])
            tokenizers.append((found["tokenizer"]["digest"], found["end_of_document"]))
        except (FileNotFoundError, NotADirectoryError):
            return f"has no tokens.json; give {PATHS[source]}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"has a tokens.json that cannot be read ({error!r}); make the folder again with composer3d prepare"
    elif os.path.exists(manifest):
        return 'holds tokens.json, made by composer3d prepare; use data.source = "tokens"'
    else:
        suffix = ".jsonl" if source == "jsonl" else ""
        files = Path(path).rglob(f"*{suffix}") if os.path.isdir(path) else [Path(path)]
        seen = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        size, unit = sum(file.stat().st_size for file in seen if file.is_file()), "bytes"
        if size == 0:
            return f"holds no text: no {f'{suffix} file'.lstrip()} in it that is not hidden has a byte"
    if size <= seq_len:
        more = "give more text or shorter samples"
        return f"holds {size} {unit}, and must hold more than data.seq_len = {seq_len}; {more}"
    if vocab > recipe.model.vocab and "model.vocab" not in draft.spoiled:
        mine = f"{mention(recipe, 'model.vocab')} ({draft.origin('model.vocab')})"
        return f"has a vocabulary of {vocab} tokens, more than {mine}; set model.vocab to {vocab} or more"
    if tokenizers[-1:] != tokenizers[:1]:
        return "was made with another tokenizer or end of document than data.path; make it again with the same"
    return None
