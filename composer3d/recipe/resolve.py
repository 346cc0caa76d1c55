"""Resolve a TOML file and ``--set`` overrides to a ``Recipe``, with the origin of every value.

All problems of a recipe are collected and raised as one RecipeError, each line with its place. If
a value is wrong by itself, the rules that combine its key with others are skipped, so that one
mistake gives one line.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from math import gcd
from pathlib import Path
from typing import Any

from composer3d.facts import events
from composer3d.facts.errors import CheckpointError, DataError, PlanError, RecipeError
from composer3d.facts.remote import RemotePath, is_url
from composer3d.facts.schedules import check_csv, read_csv
from composer3d.facts.step_folders import list_steps
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import MANIFEST, TokenManifest, read_manifest
from composer3d.models import hub, registry
from composer3d.models.llama.shape import PRESETS
from composer3d.models.shape import DecoderShape
from composer3d.recipe.changes import kept_text, values_of
from composer3d.recipe.draft import DEFAULT, Draft, Source
from composer3d.recipe.machine import JSONL_AS_TEXT, count_bytes, find_jsonl
from composer3d.recipe.rules import PATHS, Violation, violations
from composer3d.recipe.schema import (
    ARCHITECTURE,
    AXES,
    MODEL_KEYS,
    PATH,
    MeshTable,
    Model,
    Recipe,
    RunTable,
)
from composer3d.recipe.tokenizers import find_difference, refuse_bytes
from composer3d.recipe.values import as_short_toml, as_toml, mention, nearest_multiples

# What ``Recipe.checkpoint_folder`` is made of.
_KEYS_OF_OWN_CHECKPOINTS = frozenset({"run.out_dir", "run.name", "checkpoint.folder"})


@dataclass(frozen=True)
class Resolved:
    """A recipe that obeys every rule.

    Attributes:
        recipe: the recipe.
        origins: where the value of each key came from: ``recipes/x.toml:4``, ``--set mesh.tp=4``,
            ``preset llama3-8b`` or ``default``.
        fills_world: the recipe sets ``mesh.dp_shard = -1``, or leaves it out, so that the mesh
            grows with the number of processes.
        place: returns the prefix of an error about a key: the place of the key, or of its table if
            no file gives the key, or else the file.
    """

    recipe: Recipe
    origins: dict[str, str]
    fills_world: bool
    place: Callable[[str], str] = field(repr=False)

    def to_toml(self, *, only_changed: bool = False) -> str:
        """Return the whole recipe as TOML, each value with its origin.

        Loading the text gives an equal recipe.

        Args:
            only_changed: leave out values that are defaults.
        """
        lines: list[str] = []
        for table, values in asdict(self.recipe).items():
            of_table = []
            for name, value in values.items():
                origin = self.origins[f"{table}.{name}"]
                if only_changed and origin == DEFAULT:
                    continue
                statement = f"# {name} is absent" if value is None else f"{name} = {as_toml(value)}"
                of_table.append(f"{statement:<30} # {one_line(origin)}")
            if of_table:
                lines += ["", f"[{table}]", *of_table]
        return "\n".join(lines[1:]) + "\n"


def load(
    source: Source,
    sets: Sequence[str] = (),
    *,
    world_size: int | None = None,
    check_files: bool = True,
    may_import: bool = False,
    hub_names: Collection[str] = (),
) -> Resolved:
    """Read, check and resolve a recipe.

    Args:
        source: the TOML file. Its ``base`` is relative to the file; all other paths are relative to
            the working directory. ``parallel.schedule_csv`` may also be relative to the file. It
            may also be a document, which ``draft.parse_document`` makes of a text.
        sets: overrides, each ``table.key=value``; a later one wins.
        world_size: number of processes, all of which the mesh must use. ``mesh.dp_shard = -1``
            becomes ``world_size`` divided by the other axes, or 1 if ``world_size`` is None.
        check_files: whether to check the files that the recipe names: the data, the pipeline
            schedule and the checkpoint. ``verify`` passes False: it needs no data or checkpoint.
        may_import: whether ``model.architecture`` may name a module of the user, which is imported
            and so runs, ``model.hf`` a name on the Hub, whose files are loaded, and the data an
            object store. Only a command passes True, for the recipe that the user gave it by name.
            A recipe in the folder of a run or in a checkpoint may be a stranger's.
        hub_names: names on the Hub that ``model.hf`` may have without ``may_import``, because the
            user has given them by themselves.

    Raises:
        RecipeError: the recipe cannot be used. The error has one line for each problem.
    """
    draft = Draft(source, may_import=may_import, hub_names=frozenset(hub_names))
    recipe, fills_world = _read(draft, sets, world_size)
    broken = violations(recipe)
    _blame_violations(draft, recipe, broken)
    if check_files:
        wrong_keys = draft.invalid_keys | {violation.key for violation in broken}
        _check_files(draft, recipe, wrong_keys)

    if draft.problems:
        raise RecipeError(draft.problems)
    origins = {key: draft.origin(key) for key in draft.entries}
    return Resolved(recipe, origins, fills_world, draft.place)


def broken_rules(
    source: Source,
    sets: Sequence[str] = (),
    *,
    world_size: int | None = None,
    hub_names: Collection[str] = (),
) -> tuple[Recipe, list[Violation]]:
    """Return a recipe, legal or not, and the rules that it breaks.

    Rules that read a wrong value are left out, and no file that the recipe names is checked.

    Args:
        source: as in ``load``.
        sets: as in ``load``.
        world_size, hub_names: as in ``load``.

    Raises:
        RecipeError: the recipe cannot be read.
    """
    draft = Draft(source, hub_names=frozenset(hub_names))
    recipe, _ = _read(draft, sets, world_size)
    return recipe, [broken for broken in violations(recipe) if _is_clear(draft, broken)]


def _read(draft: Draft, sets: Sequence[str], world_size: int | None) -> tuple[Recipe, bool]:
    """Read and complete a recipe, and return it, and whether its mesh fills the world."""
    draft.read(sets)
    _find_schedule(draft)

    tables = {
        table: cls(**draft.values[table]) for table, cls in draft.tables.items() if table != "model"
    }
    fills_world = tables["mesh"].dp_shard == -1
    tables["model"] = _resolve_shape(draft)
    tables["mesh"] = _resolve_mesh(draft, tables["mesh"], world_size)
    return Recipe(**tables), fills_world


def _is_clear(draft: Draft, violation: Violation) -> bool:
    """Return whether a broken rule reads no key with a wrong value, which is reported already."""
    return draft.invalid_keys.isdisjoint((violation.key, *violation.others))


def _find_schedule(draft: Draft) -> None:
    """Complete the path of a pipeline schedule that lies beside the recipe that names it.

    So recipes with a schedule work from any folder, also those of an installed wheel.
    """
    path = draft.values["parallel"].get("schedule_csv")
    file = draft.places.get("parallel.schedule_csv", "").rpartition(":")[0]
    if path is None or not PATH.accepts(path) or os.path.exists(path):
        return
    beside = os.path.join(os.path.dirname(file), path)
    if os.path.isfile(beside):
        draft.values["parallel"]["schedule_csv"] = beside


def _blame_violations(draft: Draft, recipe: Recipe, broken: Sequence[Violation]) -> None:
    """Add the broken rules to the draft's problems, except those that read an invalid key."""
    for violation in broken:
        if not _is_clear(draft, violation):
            continue
        keys = (violation.key, *violation.others)
        # Blame the first key that the user wrote, because a default has no place to change.
        blamed_key = next((key for key in keys if key in draft.places), violation.key)
        origins = {key: draft.origin(key) for key in keys if key != blamed_key}
        draft.blame(blamed_key, violation.message(recipe, origins))


def _pinned(draft: Draft, place: str) -> str:
    """Return a name on the Hub with its commit.

    Raises:
        CheckpointError: it cannot be loaded, or nobody has named the recipe.
    """
    if not draft.may_import and place not in draft.hub_names:
        raise CheckpointError(
            f"{place}: files of the Hub are loaded only for a recipe that you name yourself; "
            "here, name a folder"
        )
    return hub.pinned(place, _kept(draft))


def _kept(draft: Draft) -> str | None:
    """Return ``model.hf`` of a run that has checkpoints already, from its own recipe.

    A run without one begins anew, and takes what the recipe names now.
    """
    run = RunTable(**draft.values["run"])
    folder = Path(run.out_dir, run.name)
    try:
        # Checkpoints that stand elsewhere are not looked for: the run says that it has saved.
        is_elsewhere = draft.values["checkpoint"].get("folder") is not None
        if not (events.has_saved(folder) if is_elsewhere else list_steps(folder / "checkpoints")):
            return None
        text = kept_text(folder)
        kept = values_of(text).get("model.hf")
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, str) else None


def _resolve_shape(draft: Draft) -> Model:
    """Return the table [model], completed with fields from the preset or from config.json.

    A field that is still missing is reported. Its value is then borrowed from llama3-8b, so that
    the rules on other keys can run.
    """
    values = draft.values["model"]
    table = draft.tables["model"]
    shape_fields = [entry for entry in fields(table) if entry.name not in MODEL_KEYS]
    # ``violations`` reports a name outside of its range, and the table has the default's fields.
    name = values.get("architecture", registry.DEFAULT)
    architecture = registry.architecture(name if ARCHITECTURE.accepts(name) else registry.DEFAULT)
    preset, folder = values.get("preset"), values.get("hf")

    # ``row`` is the shape that completes the recipe's fields. ``row_key`` is the key that chose it.
    row = architecture.presets.get(preset or "")
    row_origin, row_key = f"preset {preset}", "model.preset"
    if folder is not None and architecture.huggingface is None:
        draft.blame("model.hf", "model.hf: this architecture has no Hugging Face format; remove it")
        draft.invalid_keys.add("model.preset")
    elif folder is not None and not PATH.accepts(folder):  # ``violations`` reports it
        draft.invalid_keys.add("model.preset")
    elif folder is not None:
        row_key = "model.hf"
        try:
            if hub.is_place(folder):
                # A run goes on with the weights of one commit, whatever its revision becomes.
                folder = values["hf"] = _pinned(draft, folder)
            files = hub.folder(folder, hub.CONFIG)
            row_origin = f"config.json of {folder}"
            # A recipe asks for multi-token prediction itself: transformers writes the number of its
            # layers, but not their tensors.
            row = registry.resolve(architecture.huggingface).read_shape(files).without_mtp
        except CheckpointError as error:
            # A resolved recipe has the whole shape, so it does not need the folder any more.
            is_whole = all(
                entry.name in values for entry in shape_fields if entry.default is MISSING
            )
            if os.path.isdir(folder) or not is_whole:
                draft.blame(row_key, *(f"model.hf: {line}" for line in error.lines))
                if _has_our_checkpoints(folder):
                    draft.blame(
                        row_key,
                        "model.hf: the folder has checkpoints of composer3d; start from them with "
                        f"checkpoint.resume = {as_toml(folder)} and the model that made them",
                    )
                draft.invalid_keys.add("model.preset")
        if preset is not None:
            draft.blame(row_key, "model.hf and model.preset both give a shape; remove one")

    if row is not None:
        _refuse_lost_choice(draft, row_key, row, shape_fields)
    missing: list[str] = []
    for entry in shape_fields:
        key = f"model.{entry.name}"
        if entry.name in values:
            continue
        if row is not None:
            value = getattr(row, entry.name)
            if value != entry.default:
                values[entry.name] = value
                draft.origins[key] = row_origin
                draft.places[key] = draft.places[row_key]
        elif entry.default is MISSING:
            values[entry.name] = getattr(PRESETS["llama3-8b"], entry.name, None)
            if key not in draft.invalid_keys:
                missing.append(entry.name)
            draft.invalid_keys.add(key)

    if missing and preset is None and "model.preset" not in draft.invalid_keys:
        way_out = "set them"
        if architecture.presets:
            way_out += f", or use one of the presets {', '.join(architecture.presets)}"
        draft.blame("model", f"[model] lacks {', '.join(missing)}; {way_out}")
    return table(**values)


def _refuse_lost_choice(
    draft: Draft, row_key: str, row: DecoderShape, shape_fields: Sequence[Field[Any]]
) -> None:
    """Report a preset or folder that an override chooses, while files write out another shape.

    In the recipe of a run's folder all sizes are written out, so a preset would change none of
    them. So it is if a recipe chooses a preset, and its base writes out the sizes. A recipe with
    some sizes beside a preset is no such case: they are meant as changes of any preset.
    """
    values = draft.values["model"]
    choice = values[row_key.partition(".")[2]]
    if _is_same_choice(draft.hidden.get(row_key), choice):
        return
    farther = [
        key
        for key in (f"model.{entry.name}" for entry in shape_fields)
        if draft.distances.get(key, 0) > draft.distances[row_key]
    ]
    # With those that an override sets too.
    written_out = {*farther, *draft.hidden}
    needed = {f"model.{entry.name}" for entry in shape_fields if entry.default is MISSING}
    if not needed <= written_out:
        return

    differing = []
    for key in farther:
        name = key.partition(".")[2]
        written = values[name]
        # Presets and readers of config.json leave out the usual width of a head.
        chosen = row.head_width if name == "head_dim" else getattr(row, name)
        if written != chosen:
            instead = "an absent one" if chosen is None else as_short_toml(chosen)
            place = draft.place(key)
            differing.append(f"{key} = {as_short_toml(written)} ({place}) instead of {instead}")
    if differing:
        draft.blame(
            row_key,
            f"{row_key} = {as_short_toml(choice)} replaces no size that is written out, and these "
            f"differ: {', '.join(differing)}; remove these keys, or set them too",
        )
        draft.invalid_keys.add(row_key)


def _is_same_choice(hidden: object, choice: str) -> bool:
    """Return whether an override names what the recipe names too, perhaps with its commit."""
    return hidden == choice or (isinstance(hidden, str) and hub.is_commit_of(choice, hidden))


def _has_our_checkpoints(folder: str) -> bool:
    """Return whether ``folder`` is that of a run with checkpoints, or that of a checkpoint."""
    return os.path.isdir(os.path.join(folder, "checkpoints")) or os.path.isfile(
        os.path.join(folder, "manifest.json")
    )


def _resolve_mesh(draft: Draft, mesh: MeshTable, world_size: int | None) -> MeshTable:
    """Replace ``mesh.dp_shard = -1`` by its value, and check that the mesh fills the world."""
    is_open = mesh.dp_shard == -1
    closed = replace(mesh, dp_shard=_least_dp_shard(mesh)) if is_open else mesh
    axis_keys = {f"mesh.{axis}" for axis in AXES}
    if world_size is None or min(asdict(closed).values()) < 1 or draft.invalid_keys & axis_keys:
        if closed.dp_shard > 1 and is_open:
            draft.origins["mesh.dp_shard"] = (
                f"{draft.origin('mesh.dp_shard')}, the least for ep {mesh.ep}"
            )
        return closed

    needed = closed.world_size  # processes, with the least dp_shard if it is open
    if is_open and world_size % needed == 0:
        draft.origins["mesh.dp_shard"] = (
            f"{draft.origin('mesh.dp_shard')}, to fill {world_size} processes"
        )
        return replace(mesh, dp_shard=world_size // needed * closed.dp_shard)

    if is_open or needed != world_size:
        # ep groups ranks of other axes: it is no factor of the product.
        shown = [axis for axis in AXES if axis != "dp_shard" or closed.dp_shard > 1 or not is_open]
        sizes = " x ".join(f"{axis} {getattr(closed, axis)}" for axis in shown)
        has_least = is_open and closed.dp_shard > 1
        reason = f" (the least dp_shard for ep {mesh.ep})" if has_least else ""
        possible = nearest_multiples(world_size, needed) if is_open else needed
        draft.blame(
            "mesh.dp_shard",
            f"mesh {sizes} = {needed} processes{reason}, but the world has {world_size}; "
            f"start {possible} processes, or change an axis of [mesh]",
        )
        draft.invalid_keys.add("mesh.dp_shard")
    return closed


def _least_dp_shard(mesh: MeshTable) -> int:
    """The least dp_shard with which ep can group ranks of dp_shard, cp and tp; 1 without ep."""
    others = mesh.cp * mesh.tp
    return mesh.ep // gcd(mesh.ep, others) if min(mesh.ep, others) >= 1 else 1


def _check_files(draft: Draft, recipe: Recipe, wrong_keys: set[str]) -> None:
    """Check that the files named in the recipe exist and fit it. Rules never read files.

    ``wrong_keys`` are the keys that are invalid or break a rule.
    """
    _check_data(draft, recipe, wrong_keys)
    _check_weights(draft, recipe, wrong_keys)
    _check_tokenizer(draft, recipe, wrong_keys)
    _check_schedule(draft, recipe, wrong_keys)
    _check_checkpoint(draft, recipe, wrong_keys)


def _check_data(draft: Draft, recipe: Recipe, wrong_keys: set[str]) -> None:
    source = recipe.data.source
    # Each folder of token files, read once: one in an object store is far away.
    manifests: list[TokenManifest] = []
    # The parts of a blend, by what identifies their text.
    parts: dict[str, str] = {}
    for key, path in _data_paths(recipe, wrong_keys):
        has_path = (
            path is not None and source in PATHS and wrong_keys.isdisjoint((key, "data.source"))
        )
        problem = _data_problem(path, draft, recipe, manifests) if path and has_path else None
        if path and has_path and problem is None and key == "data.sources":
            content = manifests[-1].content if source == "tokens" else None
            problem = _repetition(path, content, parts)
        if problem is not None:
            draft.blame(key, f"{_mention_path(recipe, key, path)} {problem}")
        elif has_path or (source == "python" and key == "data.path"):
            n_tokens = manifests[-1].tokens if source == "tokens" else None
            _check_length(key, path, draft, recipe, wrong_keys, n_tokens=n_tokens)


def _repetition(path: str, content: str | None, parts: dict[str, str]) -> str | None:
    """Return what is wrong if an earlier part of a blend has the same text as this one.

    Args:
        path: of this part. It exists, unless it is the URL of an object store.
        content: the digest of its documents, if it is known.
        parts: the paths of the earlier parts, by what identifies their text. This one is added.
    """
    if is_url(path):
        place = path.rstrip("/")
    else:
        # Not the path itself: a link may lead there too.
        status = os.stat(path)
        place = f"{status.st_dev}:{status.st_ino}"
    identities = [place, *([content] if content is not None else [])]
    earlier = next((parts[each] for each in identities if each in parts), None)
    for each in identities:
        parts.setdefault(each, path)
    if earlier is None:
        return None
    return (
        f"has the same text as path = {as_short_toml(earlier)}, so that the blend would see it "
        "with both weights; keep one of them, with the sum of the weights"
    )


def _data_paths(recipe: Recipe, wrong_keys: set[str]) -> list[tuple[str, str | None]]:
    """Return the paths of the data, each with its key. ``data.sources`` may have several."""
    paths = [("data.path", recipe.data.path), ("validation.path", recipe.validation.path)]
    if recipe.data.sources is not None and "data.sources" not in wrong_keys:
        paths[1:1] = [("data.sources", source.path) for source in recipe.data.sources]
    return paths


def _mention_path(recipe: Recipe, key: str, path: str | None) -> str:
    """Return a key of ``_data_paths`` with its path, as messages show it."""
    if key == "data.sources":
        return f"{key}: path = {as_short_toml(path)}"
    return mention(recipe, key)


def _check_weights(draft: Draft, recipe: Recipe, wrong_keys: set[str]) -> None:
    """Check that the folder of ``model.hf`` is there, if a run starts from its weights.

    A recipe that has all sizes of the model is read without the folder, so nothing has looked for
    it yet.
    """
    key, hf = "model.hf", recipe.model.hf
    # ``_resolve_shape`` marks "model.preset" where it has reported the folder already.
    keys = {key, "model.preset", "checkpoint.resume"} | _KEYS_OF_OWN_CHECKPOINTS
    if hf is None or wrong_keys & keys:
        return
    if _may_have_checkpoints(recipe) or recipe.checkpoint.resume not in ("auto", "none"):
        return
    if not hub.is_place(hf) and not os.path.isdir(hf):
        draft.blame(
            key,
            f"{mention(recipe, key)} is not a folder; give a folder in the format of Hugging Face, "
            "relative to the working directory",
        )


def _check_tokenizer(draft: Draft, recipe: Recipe, wrong_keys: set[str]) -> None:
    """Check that the tokens of the data mean the same to the model of ``model.hf``.

    A run that has checkpoints of its own does not read the weights in ``model.hf``. A recipe with
    the source "python" names no data, and may be meant for a plan: only a training refuses it.
    """
    data, hf = recipe.data, recipe.model.hf
    keys = {
        "model.hf",
        "data.source",
        "data.path",
        "data.sources",
        "data.other_tokenizer",
    }
    if hf is None or wrong_keys & (keys | _KEYS_OF_OWN_CHECKPOINTS) or _has_checkpoints(recipe):
        return
    if data.source == "python":
        return
    if not draft.may_import and any(map(is_url, data.paths)):
        return  # ``_data_problem`` refuses it
    try:
        difference = find_difference(data, hf)
    except CheckpointError as error:
        draft.blame("model.hf", *(f"model.hf: {line}" for line in error.lines))
        return
    if difference is None:
        return
    if data.source != "tokens":
        draft.blame("data.source", refuse_bytes(recipe, difference))
        return
    key = "data.path" if data.sources is None else "data.sources"
    draft.blame(
        key,
        f"{_mention_path(recipe, key, data.paths[0])} has another tokenizer than "
        f"{mention(recipe, 'model.hf')}: {difference}; prepare the data with the tokenizer of the "
        "model, or set data.other_tokenizer = true to train nevertheless",
    )


def _check_schedule(draft: Draft, recipe: Recipe, wrong_keys: set[str]) -> None:
    """Check the file of a pipeline schedule, unless any key is wrong: the check reads many keys."""
    csv, pp = recipe.parallel.schedule_csv, recipe.mesh.pp
    if csv is None or pp == 1 or wrong_keys:
        return
    try:
        check_csv(
            read_csv(csv),
            csv,
            pp=pp,
            stages_per_rank=recipe.parallel.stages_per_rank,
            micro_batches=recipe.micro_batches,
        )
    except PlanError as error:
        draft.blame("parallel.schedule_csv", *error.lines)


def _has_checkpoints(recipe: Recipe) -> bool:
    """Return whether the run has checkpoints on a disk, or a folder that cannot be read."""
    folder = recipe.checkpoint_folder
    if not isinstance(folder, Path):
        return False
    try:
        return bool(list_steps(folder))
    except OSError:
        return True


def _may_have_checkpoints(recipe: Recipe) -> bool:
    """Return whether the run may have checkpoints of its own.

    Only training asks an object store, which may have some.
    """
    return isinstance(recipe.checkpoint_folder, RemotePath) or _has_checkpoints(recipe)


def _check_checkpoint(draft: Draft, recipe: Recipe, wrong_keys: set[str]) -> None:
    # A run that has checkpoints of its own resumes from them, and does not need these folders.
    if wrong_keys & ({"checkpoint.resume", "checkpoint.init"} | _KEYS_OF_OWN_CHECKPOINTS):
        return
    if _may_have_checkpoints(recipe):
        return
    key, resume = "checkpoint.resume", recipe.checkpoint.resume
    if resume not in ("auto", "none") and not is_url(resume) and not os.path.isdir(resume):
        draft.blame(
            key,
            f'{mention(recipe, key)} is not a folder; use "auto", "none" or the folder of a '
            "checkpoint, relative to the working directory",
        )
    key, init = "checkpoint.init", recipe.checkpoint.init
    if init is None or is_url(init):
        return
    if not os.path.isdir(init):
        draft.blame(
            key,
            f"{mention(recipe, key)} is not a folder; give the folder of a checkpoint or of a run, "
            "relative to the working directory",
        )
    elif os.path.isfile(os.path.join(init, "config.json")):
        draft.blame(
            key,
            f"{mention(recipe, key)} is a folder in Hugging Face format; start from it with "
            f"model.hf = {as_toml(init)}",
        )


def _check_length(
    key: str,
    path: str | None,
    draft: Draft,
    recipe: Recipe,
    wrong_keys: set[str],
    *,
    n_tokens: int | None,
) -> None:
    """Check that the data that ``key`` names has enough tokens for one sample.

    Nothing is reported if the tokens cannot be counted: training reports the reason.
    ``n_tokens`` is the number of tokens of a folder of token files, and None of any other source.
    """
    data = recipe.data
    is_read = key != "validation.path" or recipe.validation.every > 0
    needed_keys = ("data.seq_len", "data.source", "data.field")
    if not is_read or not wrong_keys.isdisjoint(needed_keys):
        return

    count: int | None
    if data.source == "tokens":
        count = n_tokens
    else:
        count = count_bytes(data.source, path, data.field, enough=data.seq_len + 1)
    # Samples of whole documents are filled up.
    least = 1 if data.packing == "whole_documents" else data.seq_len + 1
    if count is None or count >= least:
        return

    text = mention(recipe, "data.source") if path is None else _mention_path(recipe, key, path)
    if count == 0:
        reader = mention(recipe, "data.source")
        draft.blame(key, f"{text} has no text that {reader} reads; give another path")
        return
    draft.blame(
        "data.seq_len",
        f"{mention(recipe, 'data.seq_len')} needs {least} tokens, but {text} has {count}; use a "
        "smaller data.seq_len or more text",
    )


def _data_problem(
    path: str, draft: Draft, recipe: Recipe, manifests: list[TokenManifest]
) -> str | None:
    """Return what is wrong with the text or the token files in ``path``, or None.

    ``manifests`` has those of the folders of token files that were checked before. That of ``path``
    is appended, and its tokenizer must be that of the first one.
    """
    source = recipe.data.source
    if is_url(path):  # of token files, by a rule
        if not draft.may_import:
            return (
                "is in an object store, which is read only for a recipe that you name yourself; "
                "here, name a folder"
            )
    elif not os.path.exists(path):
        return f"does not exist; give {PATHS[source]}, relative to the working directory"

    if source != "tokens":
        if os.path.exists(os.path.join(path, MANIFEST)):
            return f'contains {MANIFEST}, which composer3d prepare made; use data.source = "tokens"'
        if not (os.path.isdir(path) or os.path.isfile(path)):
            return f"is neither a file nor a folder; give {PATHS[source]}"
        found = find_jsonl(path) if source == "text" else None
        if found is not None:
            which = "" if found == path else f"has {one_line(found)}, which "
            return f"{which}{JSONL_AS_TEXT}"
        return None

    try:
        manifest = read_manifest(path)
        manifest.check_files()
    except DataError as error:
        return f"cannot be used: {error.lines[0]}"
    manifests.append(manifest)
    if manifest.vocab > recipe.model.vocab and "model.vocab" not in draft.invalid_keys:
        model_vocab = f"{mention(recipe, 'model.vocab')} ({draft.origin('model.vocab')})"
        return (
            f"has a vocabulary of {manifest.vocab} tokens, more than {model_vocab}; "
            f"set model.vocab to {manifest.vocab} or more"
        )
    if _tokenizer_of(manifest) != _tokenizer_of(manifests[0]):
        first = "data.path" if recipe.data.sources is None else "the first of data.sources"
        return (
            f"was made with another tokenizer or end of document than {first}; "
            f"prepare it again with the --tokenizer and --eod of {first}"
        )
    return None


def _tokenizer_of(manifest: TokenManifest) -> tuple[str | None, int]:
    """Return what identifies the tokenizer that made a folder of token files."""
    return manifest.tokenizer_digest, manifest.end_of_document
