"""From a TOML file and ``--set`` overrides to a ``Recipe``, with the origin of every value.

All problems of a recipe are collected and raised as one RecipeError, each line with its place. A value that is wrong on
its own keeps its key out of the cross-field rules, so that one mistake gives one line.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path

from composer3d.models.llama import huggingface as hf
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.recipe.draft import Draft
from composer3d.recipe.machine import count_bytes
from composer3d.recipe.rules.layout import PATHS, violations
from composer3d.recipe.schema import AXES, PATH, TABLES, MeshTable, Model, Recipe
from composer3d.recipe.values import FIELDS, mention, multiples_near, show, value_of
from composer3d.spec.errors import CheckpointError, DataError, PlanError, RecipeError
from composer3d.spec.schedules import check_csv, read_csv
from composer3d.spec.token_manifest import MANIFEST, read_manifest


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

    Raises RecipeError, with one line for each problem.
    """
    draft = Draft(os.fspath(path))
    draft.read(sets)
    tables = {table: cls(**draft.given[table]) for table, cls in TABLES.items() if table != "model"}
    model = _resolve_shape(draft)
    recipe = Recipe(
        **tables | {"model": model, "mesh": _fill_world(draft, tables["mesh"], world_size)}
    )
    broken = violations(recipe)
    for violation in broken:
        keys = (violation.key, *violation.others)
        if draft.spoiled.isdisjoint(keys):
            blamed = next(
                (key for key in keys if key in draft.places), violation.key
            )  # one that is written
            origins = {key: draft.origin(key) for key in keys if key != blamed}
            draft.blame(blamed, violation.message(recipe, origins))
    if check_files:
        _check_files(draft, recipe, draft.spoiled | {violation.key for violation in broken})
    if draft.problems:
        raise RecipeError(draft.problems)
    return Resolved(
        recipe,
        {key: draft.origin(key) for key in FIELDS},
        tables["mesh"].dp_shard == -1,
        draft.place,
    )


def _resolve_shape(draft: Draft) -> Model:
    """The preset's row, or config.json's shape, with the fields that the recipe gives.

    What is missing is a problem, and borrowed meanwhile.
    """
    given = draft.given["model"]
    preset, folder = given.get("preset"), given.get("hf")
    row, source, named = PRESETS.get(preset or ""), f"preset {preset}", "model.preset"
    if folder is not None and not PATH[0](folder):  # ``violations`` says so
        draft.spoiled.add("model.preset")
    elif folder is not None:
        source, named = f"config.json of {folder}", "model.hf"
        try:
            row = hf.read_shape(folder)
        except CheckpointError as error:
            # A resolved recipe goes on without the folder that it started from.
            if os.path.isdir(folder) or not all(
                e.name in given for e in fields(ModelShape) if e.default is MISSING
            ):
                draft.blame(named, *(f"model.hf: {line}" for line in error.lines))
                draft.spoiled.add("model.preset")
        if preset is not None:
            draft.blame(named, "model.hf and model.preset both give a shape; remove one")
    missing: list[str] = []
    for entry in fields(ModelShape):
        key, value = f"model.{entry.name}", getattr(row or PRESETS["llama3-8b"], entry.name)
        if entry.name in given or value == entry.default:  # as all are in llama3-8b that have one
            continue
        given[entry.name] = value
        if row is not None:
            draft.origins[key], draft.places[key] = source, draft.places[named]
        else:
            missing += [entry.name] if key not in draft.spoiled else []
            draft.spoiled.add(key)
    if missing and preset is None and "model.preset" not in draft.spoiled:
        draft.blame(
            "model",
            f"model lacks {', '.join(missing)}; give them, or a preset: {', '.join(PRESETS)}",
        )
    return Model(**given)


def _fill_world(draft: Draft, mesh: MeshTable, world_size: int | None) -> MeshTable:
    """Gives ``mesh.dp_shard = -1`` its value, what the other axes leave, and has the mesh fill the world."""
    is_open = mesh.dp_shard == -1
    filled = replace(mesh, dp_shard=1) if is_open else mesh
    if (
        world_size is None
        or min(asdict(filled).values()) < 1
        or draft.spoiled & {f"mesh.{axis}" for axis in AXES}
    ):
        return filled
    taken = filled.world_size  # by the axes that are given
    if is_open and world_size % taken == 0:
        draft.origins["mesh.dp_shard"] = (
            f"{draft.origin('mesh.dp_shard')}, what is left of {world_size} processes"
        )
        return replace(mesh, dp_shard=world_size // taken)
    if is_open or taken != world_size:
        shown = " x ".join(f"{axis} {size}" for axis, size in asdict(mesh).items() if size != -1)
        fault = f"mesh {shown} = {taken} processes, but the world has {world_size}"
        start = multiples_near(world_size, taken) if is_open else taken
        draft.blame(
            "mesh.dp_shard", f"{fault}; start {start} processes, or change an axis of [mesh]"
        )
        draft.spoiled.add("mesh.dp_shard")
    return filled


def _check_files(draft: Draft, recipe: Recipe, wrong: set[str]) -> None:
    """What a recipe names on disk must be there; rules touch no disk. ``wrong``: keys whose values break a rule."""
    tokenizers: list[object] = []
    for key in ("data.path", "validation.path"):
        path = value_of(recipe, key)
        known = (
            path is not None
            and recipe.data.source in PATHS
            and wrong.isdisjoint((key, "data.source"))
        )
        if known and (problem := _data_problem(path, draft, recipe, tokenizers)):
            draft.blame(key, f"{mention(recipe, key)} {problem}")
        elif known or (recipe.data.source == "python" and key == "data.path"):
            _check_length(key, path, draft, recipe)
    csv, pp, each = recipe.parallel.schedule_csv, recipe.mesh.pp, recipe.parallel.stages_per_rank
    if csv is not None and pp > 1 and not wrong:
        try:
            check_csv(read_csv(csv), csv, pp=pp, each=each, micro_batches=recipe.micro_batches)
        except PlanError as error:
            draft.blame("parallel.schedule_csv", *error.lines)
    # A run that has checkpoints of its own needs no seed.
    resume, own = recipe.checkpoint.resume, Path(recipe.run.out_dir, recipe.run.name, "checkpoints")
    known = (
        "checkpoint.resume" in wrong
        or resume in ("auto", "none")
        or os.path.isdir(resume)
        or own.is_dir()
    )
    if not known:
        way_out = (
            'use "auto", "none" or the folder of a checkpoint, relative to the working directory'
        )
        draft.blame(
            "checkpoint.resume", f"{mention(recipe, 'checkpoint.resume')} is no folder; {way_out}"
        )


def _check_length(key: str, path: str | None, draft: Draft, recipe: Recipe) -> None:
    """Blame a sequence that is longer than the text. What cannot be counted is left for training to say."""
    data = recipe.data
    is_read = key == "data.path" or recipe.validation.every > 0
    if not is_read or not draft.spoiled.isdisjoint(("data.seq_len", "data.source", "data.field")):
        return
    if data.source == "tokens":
        try:
            count = read_manifest(path or "").tokens
        except DataError:
            return
    else:
        counted = count_bytes(data.source, path, data.field, enough=data.seq_len + 1)
        if counted is None:
            return
        count = counted
    if count <= data.seq_len:
        where = mention(recipe, key) if path is not None else mention(recipe, "data.source")
        draft.blame(
            "data.seq_len",
            f"{mention(recipe, 'data.seq_len')} needs {data.seq_len + 1} tokens, but {where} has {count}; "
            "shorten data.seq_len or give more text",
        )


def _data_problem(path: str, draft: Draft, recipe: Recipe, tokenizers: list[object]) -> str | None:
    """What is wrong with a text or with token files. ``tokenizers``: of those read so far."""
    source = recipe.data.source
    if not os.path.exists(path):
        return f"does not exist; give {PATHS[source]}, relative to the working directory"
    if source != "tokens":
        if os.path.exists(os.path.join(path, MANIFEST)):
            return f'holds {MANIFEST}, made by composer3d prepare; use data.source = "tokens"'
        if not (os.path.isdir(path) or os.path.isfile(path)):
            return f"is neither a file nor a folder; give {PATHS[source]}"
        return None
    try:
        found = read_manifest(path)
        found.check_files()
    except DataError as error:
        return f"cannot be used: {error.lines[0]}"
    tokenizers.append((found.tokenizer_digest, found.end_of_document))
    if found.vocab > recipe.model.vocab and "model.vocab" not in draft.spoiled:
        mine = f"{mention(recipe, 'model.vocab')} ({draft.origin('model.vocab')})"
        return f"has a vocabulary of {found.vocab} tokens, more than {mine}; set model.vocab to {found.vocab} or more"
    if tokenizers[-1] != tokenizers[0]:
        return "was made with another tokenizer or end of document than data.path; make it again with the same"
    return None
