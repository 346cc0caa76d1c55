"""What a training loop of one's own needs of a recipe: the model, batches and checkpoints.

``training.loop`` is the loop of ``composer3d train``, with all that watches and recovers a run. A
loop of a library's user has a ``Mesh``, these, an optimizer, and the two halves of a step in
``training.step``.
"""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from composer3d.checkpoint import Store
from composer3d.checkpoint.manifest import Manifest, model_of, require_readable
from composer3d.checkpoint.steps import published
from composer3d.convert.assets import make_assets
from composer3d.convert.start import load_hf
from composer3d.data import BatchesAhead
from composer3d.facts.errors import CheckpointError, MeshError
from composer3d.facts.step_folders import step_folder
from composer3d.parallel import Stages
from composer3d.parallel.context import implementation
from composer3d.recipe.schema import Recipe
from composer3d.recipe.tables import as_document
from composer3d.reliability.bad_steps import StepHistory
from composer3d.runtime import process_group
from composer3d.runtime.mesh import Mesh
from composer3d.training.batches import make_loader, open_data
from composer3d.training.build import build_stages
from composer3d.training.optimizers import Optimizer
from composer3d.training.resume import BatchState, require_tokens_of_model, resume
from composer3d.training.run_folder import claim_for_process


def build_model(recipe: Recipe, mesh: Mesh) -> Stages:
    """Compose the recipe's model on this rank, with its first weights. Collective over all ranks.

    The weights are those in the folder ``model.hf``, or else those that the seed gives, the same
    on every layout. ``compose`` is the function for a model that no recipe describes.

    Args:
        recipe: the whole recipe.
        mesh: the mesh of the job, ``Mesh.build(recipe.mesh, device)``.

    Raises:
        MeshError: the mesh has other sizes than the recipe, by which batches are cut.
        UserError: the model cannot be composed on this mesh, this device lacks what the recipe
            asks for, or the weights cannot be read.
    """
    if mesh.sizes != recipe.mesh:
        raise MeshError(f"the mesh is {mesh.sizes}, but the recipe has {recipe.mesh}")
    implementation.activate(recipe.parallel.attention_kernel, mesh.device)
    stages = build_stages(recipe, mesh)
    if recipe.model.hf is not None:
        load_hf(recipe.model.hf, stages)
    return stages


def open_batches(recipe: Recipe, mesh: Mesh) -> BatchesAhead:
    """Open the recipe's training data, and return this rank's batches. Collective over all ranks.

    Returns:
        An endless iterator: this rank's rows of each global batch, and its part of each row. The
        global batches are the same on every layout.

    Raises:
        DataError: the data cannot be used.
        UserError: the ranks see other data.
    """
    if recipe.model.hf is not None:
        process_group.on_main("tokenizers", partial(require_tokens_of_model, recipe))
    corpus, _ = process_group.on_all("data", lambda: open_data(recipe))
    process_group.check_same("the data", corpus.digest)
    return BatchesAhead(make_loader(recipe, mesh, corpus, seed=recipe.data.seed), mesh.device)


def _texts(state: dict[str, Any]) -> dict[str, str]:
    """Return a text of each value of a state; of one that no checkpoint can keep, its type."""
    texts = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        try:
            texts[str(name)] = json.dumps(value)
        except (TypeError, ValueError):
            texts[str(name)] = type(value).__name__
    return texts


class _NoState:
    """The state of batches that need none."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        pass


class Checkpoints:
    """The checkpoints of a loop of your own, in the folder that ``Recipe.checkpoint_folder`` names.

    They are those of ``composer3d train``: written beside their place and renamed when they are
    whole, checked before they are loaded, and loaded on any layout. ``inspect``, ``generate``,
    ``convert`` and ``train`` read them.

    One job at a time may use a folder. The constructor makes and locks it, as ``train`` does, and
    the lock lasts until the process ends. The process may make several objects for one folder: each
    waits for a save in the background of another one.

    All ranks call the constructor and each method.

    Args:
        recipe: names the folder (``run``), the model, and how checkpoints are kept
            (``checkpoint``).
        stages, optimizer: what is saved and loaded.
        batches: from ``open_batches``, or of your own; None if their state is not to be kept.

    Raises:
        UserError: on every rank: another job has locked the folder, it cannot be written, or the
            nodes do not share it.
        CheckpointError: the model has a field that no checkpoint can keep.
    """

    def __init__(
        self,
        recipe: Recipe,
        stages: Stages,
        optimizer: Optimizer,
        batches: BatchState | None = None,
    ) -> None:
        self._recipe, self._stages, self._optimizer = recipe, stages, optimizer
        # A loader of one's own may have a length, and be empty now.
        self._batches: BatchState = _NoState() if batches is None else batches
        # A loader need not have a state before its first batch: the first save looks at that.
        require_readable(self._manifest(0, {}))
        claim = claim_for_process(recipe.run.folder)
        self._store = Store(
            recipe.checkpoint_folder,
            keep=recipe.checkpoint.keep,
            background=recipe.checkpoint.async_save,
            timeout_s=60 * recipe.checkpoint.timeout_minutes,
        )
        if claim is not None:
            self._store.guard = claim.require_held
        self._saves = f"saves in {self._store.folder}"  # of all objects for it
        self._goes_on = False  # whether what is saved next follows all that is in the folder

    def load(self) -> int:
        """Load the newest whole checkpoint, or the one that ``checkpoint`` of the recipe names.

        Returns:
            The number of steps done; 0 if there is no checkpoint.

        Raises:
            CheckpointError: all checkpoints are damaged, or they belong to another model, seed or
                optimizer, or stand in another place.
            DataError: the checkpoint was made with other data, or another order of samples.
            SaveError: a save in the background could not be written.
        """
        # A loop of its own judges its steps itself: nothing is remembered of them.
        history = StepHistory(self._recipe.reliability)
        store, batches = self._store, self._batches
        self.wait()
        done = resume(self._recipe, store, self._stages, self._optimizer, batches, history) or 0
        self._goes_on = True
        return done

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps, and remove the oldest checkpoints.

        With ``checkpoint.async_save`` it is written while training goes on. The next ``save`` or
        ``load`` of this folder waits for it, and so does the end of ``world``; in a process group
        of your own, call ``wait`` at the end.

        Raises:
            MeshError: the state of the batches is not the same on all ranks.
            CheckpointError: that state has what no checkpoint can keep, or ``step`` is above
                99,999,999; or nothing was loaded, and the folder has a checkpoint of this step or a
                later one, which the next ``load`` would take. Every rank raises it, and nothing is
                written.
            SaveError: a rank cannot write. Every rank raises it; of a save in the background, what
                waits for it does.
            TrainingError: likewise, if the folder was removed or replaced.
        """
        recipe = self._recipe
        self.wait()
        if not self._goes_on:
            process_group.on_main("checkpoint", partial(self._refuse_to_be_older, step))
        if not self._store.assets:
            end = None  # of batches of one's own
            if isinstance(self._batches, BatchesAhead):
                end = self._batches.loader.corpus.end_of_document
            find = partial(make_assets, recipe, end, self._store.loaded)
            is_main = self._stages.mesh.rank == 0
            self._store.assets = process_group.on_all("assets", find if is_main else dict)
        state = self._batches.state_dict()
        # Rank 0 saves its state, and every rank loads that one.
        process_group.check_same_table("the state of the batches", _texts(state))
        self._store.save(self._manifest(step, state), self._stages, self._optimizer)
        self._goes_on = True
        process_group.begin_in_background(self._saves, self._store.wait)

    def wait(self) -> None:
        """Wait for a save in the background, also that of another object for the same folder.

        Raises:
            SaveError: on every rank, if a rank could not write.
        """
        process_group.wait_for(self._saves)

    def _refuse_to_be_older(self, step: int) -> None:
        newest = next(reversed(published(self._store.folder)), None)
        if newest is not None and newest.name >= step_folder(step):
            raise CheckpointError(
                f"{self._store.folder} has {newest.name} of an earlier training, which the next "
                f"load would take in place of step {step}; call load() first to go on from it, or "
                "give the run another run.name, or remove its checkpoints"
            )

    def _manifest(self, step: int, data: dict[str, Any]) -> Manifest:
        recipe = self._recipe
        return Manifest(
            step=step,
            world_size=recipe.world_size,
            layout=asdict(recipe.mesh),
            model=model_of(recipe.model, recipe.precision.params),
            recipe=as_document(recipe),
            data=data,
        )
