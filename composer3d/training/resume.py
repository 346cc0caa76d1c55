"""Resume a run: choose its checkpoint, compare it with the recipe, and load it."""

import os
from pathlib import Path
from shlex import quote
from typing import Any, Protocol, get_args

from composer3d.checkpoint import Store
from composer3d.checkpoint.manifest import (
    FILE,
    PARAMS,
    Manifest,
    model_of,
    require_known_fields,
    with_later_fields,
)
from composer3d.checkpoint.steps import published
from composer3d.convert.assets import FOLDER as ASSETS
from composer3d.facts import events
from composer3d.facts.errors import CheckpointError, DataError
from composer3d.facts.remote import Place, RemotePath, local_copy, place_of, same_folder
from composer3d.facts.text import one_line
from composer3d.models.registry import DEFAULT, is_ours
from composer3d.parallel import Stages
from composer3d.recipe.advice import decays_over_run, refuses_newer_checkpoints, way_to_go_on
from composer3d.recipe.changes import Change, changes, kept_text, values_of
from composer3d.recipe.schema import Recipe
from composer3d.recipe.tokenizers import find_difference, refuse_bytes
from composer3d.recipe.values import as_toml, type_of
from composer3d.reliability.bad_steps import StepHistory
from composer3d.runtime import environment, log, process_group
from composer3d.runtime.run_files import WRITER
from composer3d.training.optim import learning_rate
from composer3d.training.optimizers import Optimizer

# With another value, the optimizer would have another state.
_KEYS_OF_STATE = ("optim.name", "optim.matrices", "optim.train")


class BatchState(Protocol):
    """What a checkpoint needs of batches: plain values from which they go on.

    ``open_batches`` has it. A loader of your own may have it: a dict from names to numbers, texts,
    and lists of these, the same on every rank and on every layout. An integer is from -2^63 to
    2^64 - 1, and all texts and lists have at most 2^20 characters and values. A save refuses
    anything else; make a text of it, such as with ``json.dumps``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was used."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue from a state that ``state_dict`` returned."""


def resume(
    recipe: Recipe,
    store: Store,
    stages: Stages,
    optimizer: Optimizer,
    loader: BatchState,
    history: StepHistory,
) -> int | None:
    """Load the run's newest whole checkpoint, or the one that the recipe names. Collective.

    The recipe names one in ``checkpoint.resume``, or in ``checkpoint.init`` for its weights alone.

    Differences between the recipe and that of the checkpoint are logged. A run that resumes its own
    checkpoint must keep its seeds, its data and its model. A new run that starts from another run's
    checkpoint may have another ``run.seed``.

    Args:
        recipe: the recipe of this run.
        store: the checkpoints of this run.
        stages, optimizer, loader, history: the checkpoint is loaded into them.

    Returns:
        The number of steps done, or 0 for a checkpoint that has only weights. None if nothing was
        loaded.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another model; the run would
            resume its own checkpoint with another ``run.seed``; or ``checkpoint.resume`` would
            discard newer checkpoints of the run; or another ``run.steps`` would raise the learning
            rate, and ``optim.decay`` is not set; or there is none, but the run's folder shows that
            they stand in another place.
        DataError: the checkpoint was made with other data, or another order of samples; or it has
            weights alone, of a model with another tokenizer.
        UserError: a later version of composer3d wrote the checkpoint.
    """
    found = _choose(recipe, store)
    if stages.mesh.rank == 0:
        _warn_of_refused_restarts(recipe)
    if found is None and recipe.checkpoint.init is not None:
        _start_from_weights(recipe, place_of(recipe.checkpoint.init), store, stages)
        return 0
    if found is None:
        log.get().info(f"no checkpoint in {store.folder}: starting from the beginning")
        if stages.mesh.rank == 0 and environment.restart_count():
            log.get().warning(
                "torchrun has started the ranks again, but there is no checkpoint: if there was "
                f"one, {store.folder} was removed or renamed"
            )
        return None
    path, manifest = found
    _require_same_model(path, manifest, recipe)
    changed = _changes_since(path, manifest, recipe)
    is_own = _is_own(path, store)
    for change in changed:
        if change.key == "run.seed" and is_own:
            raise CheckpointError(
                f"{path} was made with run.seed = {change.then}, but the recipe says {change.now}: "
                "a run keeps its seed; set it back, or give the run another run.name"
            )
        if change.key in _KEYS_OF_STATE and manifest.data is not None:
            raise CheckpointError(
                f"{path} was made with {change.key} = {change.then}, but the recipe says "
                f"{change.now}: it has the optimizer's state of the first only; set it back, or "
                f"start a run under another run.name with checkpoint.init = {as_toml(str(path))}"
            )
    _refuse_reheating(manifest, recipe, changed)
    if manifest.data is None:
        # Weights alone, such as those of ``convert``: the loader knows no data to compare.
        _require_same_tokenizer(path, manifest, recipe, "checkpoint.resume")
    else:
        # Before the weights are loaded: the loader refuses other data and another order of samples.
        try:
            loader.load_state_dict(manifest.data)
        except KeyError as key:
            raise CheckpointError(
                f"{path}: the state of its loader lacks {key}; it cannot be resumed"
            ) from None

    store.load(path, stages, optimizer)
    history.load_state_dict(manifest.history)

    if changed:
        shown = [f"  {change.key}: {change.then} -> {change.now}" for change in changed]
        log.get().info("\n".join([f"the recipe differs from that of {path}:", *shown]))
    if manifest.data is None:
        log.get().info(f"starting from the weights of {path}")
        return 0
    if stages.mesh.rank == 0:
        _warn_of_another_rate(manifest, recipe)
    log.get().info(f"resumed from {path}: {manifest.step} of {recipe.run.steps} steps are done")
    return manifest.step


def _start_from_weights(recipe: Recipe, wanted: Place, store: Store, stages: Stages) -> None:
    """Load the weights of a checkpoint of another run, and nothing else. Collective."""
    path, manifest = _open(wanted, store, "checkpoint.init")
    _require_same_model(path, manifest, recipe)
    _require_same_tokenizer(path, manifest, recipe, "checkpoint.init")
    store.load(path, stages, None)
    log.get().info(f"starting at step 0 from the weights of {path}, step {manifest.step}")


def _require_same_tokenizer(path: Place, manifest: Manifest, recipe: Recipe, key: str) -> None:
    """Raise DataError if a checkpoint that ``key`` names is of another tokenizer. Collective."""
    difference = process_group.on_main(
        "tokenizers", lambda: _find_difference(recipe, path, manifest)
    )
    if difference is not None:
        raise DataError(
            f"{key}: {path} is of a model with another tokenizer than the data: "
            f"{difference}; prepare the data with the tokenizer of the model, or set "
            "data.other_tokenizer = true to train nevertheless"
        )


def require_tokens_of_model(recipe: Recipe) -> None:
    """Raise DataError if text is read as bytes, and ``model.hf`` has another tokenizer.

    Token files have been compared when the recipe was read.
    """
    assert recipe.model.hf is not None
    if recipe.data.source != "tokens":
        difference = find_difference(recipe.data, recipe.model.hf)
        if difference is not None:
            raise DataError(refuse_bytes(recipe, difference))


def _find_difference(recipe: Recipe, path: Place, manifest: Manifest) -> str | None:
    """Compare the tokenizer of the data with that of a checkpoint: see ``find_difference``."""
    with local_copy(path / ASSETS) as assets:
        return find_difference(recipe.data, str(assets), manifest.assets)


def _choose(recipe: Recipe, store: Store) -> tuple[Place, Manifest] | None:
    """Choose the checkpoint to load. Once a run has checkpoints of its own, it resumes the newest.

    So a run that was started from another run's checkpoint does not start over when the same
    command is run again.
    """
    wanted = recipe.checkpoint.resume
    newest = store.newest_whole()
    if newest is None and wanted != "none":
        process_group.on_main("checkpoint", lambda: _refuse_to_forget(recipe))
    if wanted == "auto":
        return newest
    if wanted == "none":
        if newest is not None:
            raise CheckpointError(_would_discard(recipe, store, newest[0], "its checkpoints"))
        return None
    path = place_of(wanted)
    is_own = _is_own(path, store)
    if newest is None:
        return _open(path, store, "checkpoint.resume")
    if is_own and path.name != newest[0].name:
        raise CheckpointError(_would_discard(recipe, store, newest[0], "the newer ones"))
    return newest


def _open(path: Place, store: Store, key: str) -> tuple[Place, Manifest]:
    """Check a checkpoint, or the newest whole one of the run in the folder ``path``.

    ``key`` is the key of the recipe that names it, for messages.

    Raises:
        CheckpointError: it is damaged, or there is none.
        UserError: a later version of composer3d wrote it.
    """
    # All ranks do what rank 0 finds: another node may have an old list in its cache.
    folder = process_group.on_main(key, lambda: _checkpoints_of_run(path))
    if folder is None:
        return path, store.check(path)
    found = store.newest_whole(folder)
    if found is None:
        raise CheckpointError(f"{path} has no checkpoint (step-* or checkpoints/step-*)")
    log.get().info(f"{found[0]} is the newest whole checkpoint of {path}")
    return found


def _checkpoints_of_run(path: Place) -> Place | None:
    """Return the folder of a run's checkpoints, or None if ``path`` is no folder of a run.

    ``path`` may be the folder of the run, or its folder of checkpoints. No link in it is followed.
    In an object store, a run has its checkpoints only.
    """
    if isinstance(path, RemotePath):
        return None if (path / FILE).exists() else path
    if os.path.lexists(path / FILE):
        return None
    inner = path / "checkpoints"
    if inner.is_dir() and not inner.is_symlink():
        return inner
    return path if any(path.glob("step-*")) else None


def _is_own(path: Place, store: Store) -> bool:
    return same_folder(path.parent, store.folder)


def _refuse_to_forget(recipe: Recipe) -> None:
    """Raise CheckpointError if the run's folder shows that it has checkpoints in another place.

    A run that begins anew empties its metrics and replaces its recipe, and nobody would learn of
    the checkpoints. Before its first one, a run may begin anew anywhere. So may one that goes on
    from these checkpoints (``checkpoint.resume``). Raises OSError.
    """
    folder, place = recipe.run.folder, recipe.checkpoint_folder
    on_disk = folder / "checkpoints"
    newest = None if same_folder(on_disk, place) else next(reversed(published(on_disk)), None)
    if newest is not None:
        there, found, origin = str(folder), f"{newest} is one of this run", str(newest)
    else:
        # It is not looked into: a file of the run names it, which may be a stranger's.
        then = _place_of_last_start(folder)
        is_gone = then == str(place) and _may_be_unmounted(place)
        if then is None or (then == str(place) and not is_gone) or not events.has_saved(folder):
            return  # it has none, or they were removed
        there, origin = then, one_line(then, 200)
        found = f"the run in {folder} has saved into {origin}"
        found += ", where nothing is now: mount it again" if is_gone else ""
    wanted = recipe.checkpoint.resume
    if wanted != "auto" and _lies_in(place_of(wanted), there):
        return
    raise CheckpointError(
        f"there is no checkpoint in {place}, but {found}; set checkpoint.folder back, or copy the "
        f"checkpoints; or set checkpoint.resume = {as_toml(origin)} to go on from there, or "
        f'checkpoint.resume = "none" to begin anew and replace the metrics in {folder}; or give '
        "the run another run.name"
    )


def _place_of_last_start(folder: Path) -> str | None:
    """Return where a run had its checkpoints when it last started: a URL; None: on its disk.

    The recipe in its folder says that, and may be a stranger's. None as well if there is none.
    """
    try:
        text = kept_text(folder)
        values = values_of(text)
    except (OSError, ValueError):
        return None
    place = values.get("checkpoint.folder")
    return f"{place.rstrip('/')}/{values.get('run.name')}" if isinstance(place, str) else None


def _lies_in(path: Place, folder: str) -> bool:
    """Return whether ``path`` is ``folder``, or something in it; both may be URLs."""
    if isinstance(path, RemotePath):
        return f"{path}/".startswith(f"{folder}/")
    return path.resolve().is_relative_to(Path(folder).resolve())


def _may_be_unmounted(place: Place) -> bool:
    """Return whether ``place`` is on a disk that may be gone: each job leaves a note there."""
    return isinstance(place, RemotePath) and place.kind == "file" and not (place / WRITER).exists()


def _would_discard(recipe: Recipe, store: Store, newest: Place, discarded: str) -> str:
    return (
        f'checkpoint.resume = "{recipe.checkpoint.resume}", but the newest checkpoint in '
        f"{store.folder} is {newest.name}; {way_to_go_on(recipe)} from it; or give the run another "
        f"run.name, or remove {discarded}"
    )


def _warn_of_refused_restarts(recipe: Recipe) -> None:
    """Warn if this job's restarts by torchrun would be refused once it has saved.

    A rank that torchrun has restarted cannot tell its job's checkpoints from those before it.
    """
    most = environment.most_restarts()
    is_of_torchrun = not environment.has_launcher()
    if most and is_of_torchrun and refuses_newer_checkpoints(recipe):
        log.get().warning(
            f'checkpoint.resume = "{recipe.checkpoint.resume}": once the run has saved a newer '
            f"checkpoint, each restart by torchrun (--max-restarts {most}) will be refused; set "
            'checkpoint.resume = "auto", which takes the newest checkpoint, and begins anew if '
            "there is none"
        )


def _require_same_model(path: Place, manifest: Manifest, recipe: Recipe) -> None:
    now = {"model.architecture": DEFAULT} | model_of(recipe.model, recipe.precision.params)
    then = {"model.architecture": DEFAULT} | with_later_fields(manifest.model, recipe.model)
    training_fields = recipe.model.training_fields
    lines = [
        f"{path} was made with {key} = {one_line(str(then.get(key)), 200)}, but the recipe says "
        f"{one_line(str(value), 200)}"
        for key, value in now.items()
        if then.get(key) != value and key.removeprefix("model.") not in training_fields
    ]
    if lines:
        raise CheckpointError([*lines, *_ways_out(path, then, recipe, len(lines))])
    require_known_fields(path, manifest.model, recipe.model)


def _ways_out(path: Place, then: dict[str, Any], recipe: Recipe, n_differences: int) -> list[str]:
    """Say what to change for a checkpoint of another model, by ``n_differences`` values.

    Args:
        path: the checkpoint.
        then: the values of its model.
        recipe: the recipe of this run.
        n_differences: the number of values that differ.
    """
    params = recipe.precision.params
    can_be_converted = is_ours(recipe.model.architecture)
    is_impossible = can_be_converted and then.get(PARAMS) not in get_args(type_of(PARAMS))
    lines = []
    if n_differences > 1 or not is_impossible:
        lines.append("a checkpoint can only be resumed with its own model; set these back")
    if is_impossible:
        # Converted weights keep their dtype, and published ones are in bfloat16.
        source = quote(one_line(str(path)))
        lines.append(
            f"a run cannot have these parameters: composer3d convert {source} DST --to dcp "
            f"--dtype {params} makes a checkpoint in {params}; name DST instead"
        )
    return lines


def _changes_since(path: Place, manifest: Manifest, recipe: Recipe) -> list[Change]:
    if not manifest.recipe:
        # These are weights that no run of composer3d has made.
        return []
    try:
        return changes(manifest.recipe, recipe)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: the recipe in its manifest cannot be read: {error}"
        ) from None


def _refuse_reheating(manifest: Manifest, recipe: Recipe, changed: list[Change]) -> None:
    """Refuse a learning rate that rises because ``run.steps`` has changed, in or after its decay.

    Raises:
        CheckpointError: the rate rises, and the recipe does not say where the decay ends.
    """
    steps = next((change for change in changed if change.key == "run.steps"), None)
    if steps is None or manifest.data is None or not decays_over_run(recipe):
        return
    if not steps.then.isdecimal():
        return
    before = learning_rate(manifest.step, recipe.optim, int(steps.then))
    after = learning_rate(manifest.step, recipe.optim, recipe.run.steps)
    if after > before:
        raise CheckpointError(
            f"run.steps: {steps.then} -> {steps.now}: the learning rate of step "
            f"{manifest.step + 1} would rise from {before:.3g} to {after:.3g}, because its decay "
            f"ends at run.steps; set optim.decay = {steps.then} to keep the old rate (then "
            f"optim.min_lr), or optim.decay = {steps.now} to take the new one"
        )


def _warn_of_another_rate(manifest: Manifest, recipe: Recipe) -> None:
    """Warn if the recipe now gives the checkpoint's last step another learning rate."""
    lr = learning_rate(manifest.step - 1, recipe.optim, recipe.run.steps)
    if manifest.lr is not None and lr != manifest.lr:
        log.get().warning(
            f"another schedule of the learning rate: step {manifest.step} had {manifest.lr:.3g}; "
            f"this recipe would give it {lr:.3g} (optim.decay, run.steps)"
        )
