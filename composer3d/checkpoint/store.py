"""Save and load the checkpoints of a run.

Each checkpoint is a folder named after its step, on a disk or in an object store (``folders``).

Its tensors have flat names that do not depend on the layout: ``model.NAME`` and
``optim.NAME.STATE`` contain the parameter's global name. A DTensor knows which part of the whole
tensor it holds, so a checkpoint can be loaded on another layout. No state of a random generator is
saved, because each step seeds its own generator.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.folders import folder_of
from composer3d.checkpoint.manifest import Manifest, TensorSpec
from composer3d.checkpoint.metadata import (
    PackedTensor,
    pack_metadata,
    read_metadata,
    read_parts,
    tensor_specs,
    unpack_metadata,
)
from composer3d.checkpoint.optimizer_state import SavedOptimizer, optimizer_state
from composer3d.checkpoint.pickles import explain
from composer3d.checkpoint.steps import published
from composer3d.facts.box import Box
from composer3d.facts.errors import (
    CheckpointError,
    SaveError,
    TrainingError,
    UserError,
    reason_in_one_line,
)
from composer3d.facts.remote import Place
from composer3d.facts.step_folders import LAST_STEP, STEP_FOLDER, list_steps, step_folder
from composer3d.parallel import Stages
from composer3d.parallel.init import local_part
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.runtime import log
from composer3d.runtime import process_group as distributed
from composer3d.runtime.progress import Progress

# The words of the operating system for a full disk, and for a quota that is used up.
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


class Store:
    """The checkpoints of one run: ``FOLDER/step-00000100``.

    A folder of that name with a ``manifest.json`` is whole: the manifest describes its files, and
    is written after them.

    All ranks of the job must call the constructor, ``save``, ``wait``, ``check``, ``newest_whole``
    and ``load``. The collectives of a save run on a gloo group that only the store uses, so that a
    save in the background does not interfere with the collectives of training.

    Args:
        folder: the folder of the checkpoints, on a disk or in an object store.
        keep: how many checkpoints are kept.
        background: whether ``save`` writes in a thread while training goes on.
        timeout_s: how much longer the writes of one rank may take than those of another.

    Attributes:
        assets: the contents of files that belong to the model besides its tensors, by file name.
            Only those of rank 0 are written.
        guard: called on rank 0 before the folder is changed. It raises TrainingError if the folder
            belongs to another job now.
        way_to_go_on: what continues the run from its newest checkpoint, for the error of a save.
        loaded: the checkpoint that was loaded last, or None.
    """

    def __init__(
        self, folder: Place, *, keep: int, background: bool = False, timeout_s: float = 3600.0
    ) -> None:
        self.folder = folder
        self._files = folder_of(folder)
        self.assets: Mapping[str, bytes] = {}
        self.guard: Callable[[], None] = lambda: None
        self.way_to_go_on = "the same command goes on"
        self.loaded: Place | None = None
        self._keep = keep
        self._background = background
        self._group = distributed.form_group(backend="gloo", timeout_s=timeout_s)

        # A new thread does not inherit the current GPU.
        select_gpu = None
        if torch.cuda.is_initialized():
            select_gpu = partial(torch.cuda.set_device, torch.cuda.current_device())
        self._thread = futures.ThreadPoolExecutor(1, initializer=select_gpu)
        self._pending_save: futures.Future[None] | None = None
        self._host_copies: dict[str, Tensor] = {}  # local shards; each save reuses the memory

        self._known_damaged: set[Place] = set()
        self._reported_links: set[Path] = set()
        self._reported_files: set[str] = set()  # lines of ``describe_unlisted``

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed, as far as this rank knows.

        ``wait`` raises its error.
        """
        save = self._pending_save
        return save is not None and save.done() and save.exception() is not None

    def newest(self) -> Place | None:
        """Return the checkpoint with the highest step that is not known to be damaged, or None.

        Waits for a save in the background to end. It is for messages: a folder that cannot be read
        has none.
        """
        if self._pending_save is not None:
            self._pending_save.exception()
        # An error here would hide the one that the message is about.
        with suppress(OSError):
            return self._newest_usable()
        return None

    def _usable_folders(self) -> list[Place]:
        """List the step folders that have a manifest and are not known to be damaged."""
        return [path for path in published(self.folder) if path not in self._known_damaged]

    def _newest_usable(self) -> Place | None:
        return next(reversed(self._usable_folders()), None)

    def _warn_of_links(self, folder: Place) -> None:
        """Warn once of each link in ``folder`` that is named like a checkpoint.

        A user who has moved a checkpoint to another disk would wonder why it is not used. An object
        store has no links.
        """
        for path in sorted(folder.glob("step-*")) if isinstance(folder, Path) else ():
            is_link = STEP_FOLDER.fullmatch(path.name) and path.is_symlink()
            if is_link and path not in self._reported_links:
                self._reported_links.add(path)
                log.get().warning(
                    f"{path} is a link, which is not followed: replace it by the folder"
                )

    def _warn_of_unlisted(self, path: Place, manifest: Manifest) -> None:
        """Warn once of each file of a checkpoint that its manifest does not list."""
        for line in manifests.describe_unlisted(path, manifest):
            if line not in self._reported_files:
                self._reported_files.add(line)
                log.get().warning(line)

    # Saving.

    def claim(self) -> None:
        """Tell other jobs that this one writes here, and find out whether it can. Collective.

        Without it, the first save does so. A folder on a disk is claimed with that of the run.

        Raises:
            UserError: an object store refuses it, cannot be reached, or is another one for some
                ranks. Every rank raises it.
        """
        self._on_rank_0(self._files.claim)
        owner = distributed.on_all("checkpoint.folder", self._files.owner, self._group)
        distributed.check_same(f"the folder {self.folder} (checkpoint.folder)", owner)

    def save(
        self,
        manifest: Manifest,
        stages: Stages,
        optimizer: SavedOptimizer,
        tell: Callable[[float], None] = lambda stopped_s: None,
    ) -> None:
        """Write the state after ``manifest.step`` steps, then remove the oldest checkpoints.

        Waits for the previous save first. A save in the background returns as soon as the state has
        been copied to host memory.

        Args:
            manifest: the description of the checkpoint. ``save`` fills in its files and tensors.
            stages: this rank's pipeline stages, which hold the parameters.
            optimizer: the optimizer of these parameters.
            tell: is called on every rank once the checkpoint is whole, with the seconds for which
                this function held the training up. A save in the background calls it in its thread.

        Raises:
            CheckpointError: the manifest has what no manifest may have, or its step is above
                ``LAST_STEP``. Every rank raises it.
            SaveError: a rank cannot write. Every rank raises it. If the save is in the background,
                the next ``wait`` or ``save`` raises it.
            TrainingError: another job has taken the run's folder. It is raised in the same way.
        """
        began = time.perf_counter()
        self.wait()
        # First, and not only when it is written: what cannot be read again must not be saved.
        distributed.on_main("checkpoint", lambda: _require_findable(manifest))
        state = gather_state(stages, optimizer)
        if dist.get_rank() == 0:
            # It writes the manifest last, when the batches may have changed the state that it has.
            manifest = deepcopy(manifest)
        if not self._background:
            shards = {name: local_shard(tensor) for name, tensor in state.items()}
            self._write(manifest, state, shards)
            tell(time.perf_counter() - began)
            return
        shards = self._copy_to_host(state)
        stopped_s = time.perf_counter() - began

        def write_and_tell() -> None:
            self._write(manifest, state, shards)
            tell(stopped_s)

        self._pending_save = self._thread.submit(write_and_tell)
        log.get().info(
            f"saving step {manifest.step} in the background: "
            f"training stood still for {stopped_s:.3f} s"
        )

    def warm_up(self, stages: Stages, optimizer: SavedOptimizer) -> None:
        """Allocate the host memory of background saves, so that the first one is not slower.

        Does nothing if the store does not save in the background. There is no collective.
        """
        if self._background:
            self._copy_to_host(gather_state(stages, optimizer))

    def wait(self) -> None:
        """Wait for the save in the background, if there is one, and raise its error.

        Raises:
            SaveError: on every rank, if a rank could not write.
            TrainingError: on every rank, if another job has taken the run's folder.
        """
        save, self._pending_save = self._pending_save, None
        if save is not None:
            save.result()

    def finish(self, limit_s: float) -> None:
        """Wait, after an error that is not the save's own, until the save in the background ends.

        If it fails, or has not ended after ``limit_s`` seconds, rank 0 warns of that. There is no
        collective: the ranks end at about the same time, because their parts wait for each other.
        """
        save, self._pending_save = self._pending_save, None
        if save is None:
            return
        futures.wait([save], limit_s)
        if dist.get_rank():
            return
        if not save.done():
            log.get().warning(f"a save in {self.folder} has not ended after {limit_s:.0f} s")
        elif isinstance(error := save.exception(), Exception):
            log.get().warning(f"a save has failed as well: {reason_in_one_line(error)}")

    def _copy_to_host(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the local shards of ``state`` to host memory, pinned if they are on a GPU."""
        for name, tensor in state.items():
            shard = local_shard(tensor)
            if name not in self._host_copies:
                self._host_copies[name] = torch.empty_like(
                    shard, device="cpu", pin_memory=shard.is_cuda
                )
            self._host_copies[name].copy_(shard, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._host_copies

    def _write(
        self, manifest: Manifest, state: dict[str, Tensor], shards: dict[str, Tensor]
    ) -> None:
        """Write ``shards``, the local values of ``state``, as a new checkpoint, and publish it."""
        began = time.perf_counter()
        name = step_folder(manifest.step)
        final = self.folder / name
        try:
            self._on_rank_0(lambda: self._begin(name))
            writer = self._files.writer(name)
            dcp.save(
                state,
                storage_writer=writer,
                planner=_ShardSavePlanner(shards),
                process_group=self._group,
            )
            hand_over = partial(self._files.hand_over, name, writer)
            own_files = distributed.on_all("writing", hand_over, self._group)
            files_of_ranks = distributed.gather_objects(own_files, self._group)
            if files_of_ranks is not None:  # on rank 0
                files = {name: entry for files in files_of_ranks for name, entry in files.items()}
                manifest = replace(manifest, files=files, tensors=writer.tensors)
            self._on_rank_0(lambda: self._publish(name, manifest))
        except TrainingError:
            # The folder belongs to another job now: nothing in it may be removed.
            raise
        except (UserError, CheckpointException) as error:
            # Every rank has this error, and none ends before rank 0 has removed what was written.
            self._on_rank_0(partial(self._discard, name))
            lines = self._describe_failure(final, state, _causes(error))
            raise SaveError(lines) from error
        log.get().info(f"saved {final} in {time.perf_counter() - began:.2f} s")

    def _describe_failure(
        self, final: Place, state: Mapping[str, Tensor], causes: list[str]
    ) -> list[str]:
        """Collective: all ranks have the same causes."""
        lines = [f"{final} could not be saved: {cause}" for cause in causes]
        if any(words in cause for cause in causes for words in _FULL):
            lines.append(self._describe_space(state))
        try:
            kept = self._newest_usable()
        except OSError as reason:
            return [*lines, f"{self.folder} cannot be read: {reason.strerror or reason}"]
        if kept is None:
            lines.append(f"there is no checkpoint in {self.folder}: the same command starts anew")
        else:
            lines.append(f"the newest checkpoint is {kept}: {self.way_to_go_on} from it")
        return lines

    def _describe_space(self, state: Mapping[str, Tensor]) -> str:
        """Say how much a checkpoint needs, and how much rank 0 sees free. Collective."""
        own = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
        of_ranks = distributed.gather_objects(own, self._group)
        text = None
        if of_ranks is not None:
            # A DTensor has the size of the whole tensor, on each rank that holds a part of it.
            sizes = {name: size for of_rank in of_ranks for name, size in of_rank.items()}
            text = f"a checkpoint needs about {sum(sizes.values()):,} bytes"
            with suppress(OSError):
                free = self._files.free_bytes()
                text += "" if free is None else f"; {free:,} bytes are free in {self.folder}"
        return str(distributed.broadcast_object(text, self._group))

    def _on_rank_0(self, function: Callable[[], None]) -> None:
        """Run ``function`` on rank 0. If it fails, all ranks fail."""
        is_rank_0 = dist.get_rank() == 0
        distributed.on_all("writing", function if is_rank_0 else lambda: None, self._group)

    def _begin(self, name: str) -> None:
        """Make room for a checkpoint, and write the assets."""
        self.guard()
        is_damaged = self.folder / name in self._known_damaged
        self._files.begin(name, self.assets, is_damaged=is_damaged)

    def _publish(self, name: str, manifest: Manifest) -> None:
        """Publish a checkpoint of which all other files are kept, and remove old ones."""
        self._files.publish(name, manifest, self.guard)
        self._known_damaged.discard(self.folder / name)
        self._remove_old(name)

    def _discard(self, name: str) -> None:
        """Remove what a failed save has written."""
        # It may have failed because the folder was replaced, and another job writes there now.
        self.guard()
        self._files.discard(name)

    def _remove_old(self, saved: str) -> None:
        """Keep ``saved`` and the newest older checkpoints, ``keep`` in all, and remove the others.

        Damaged checkpoints that are older than all kept ones are removed as well. Newer ones than
        ``saved`` are never removed. This run did not go on from them, so they are damaged, or were
        out of sight when it started: then they hold more training than all that is kept.
        """
        try:
            names = [path.name for path in list_steps(self.folder)]
            older = [path.name for path in self._usable_folders() if path.name < saved]
        except OSError as error:
            # The new checkpoint is whole: a failure here must not end a healthy run.
            log.get().warning(f"cannot look for old checkpoints in {self.folder}: {error}")
            return
        kept = [saved, *older[::-1][: self._keep - 1]]
        for name in names:
            if name not in kept and (name in older or name < min(kept)):
                try:
                    self._files.remove(name)
                except OSError as error:
                    # It must not end a healthy run.
                    path = self.folder / name
                    log.get().warning(f"cannot remove {path}, an old checkpoint: {error}")

    # Loading.

    def check(self, path: Place) -> Manifest:
        """Compare a checkpoint with its manifest, and return the manifest.

        Each rank reads a share of the files, and all ranks return or raise the same. Rank 0 warns
        of files that the manifest does not list, which are not read.

        Raises:
            CheckpointError: the checkpoint is damaged. There is one line for each problem.
            UserError: a later version of composer3d wrote the manifest, or a rank cannot read a
                file, which says nothing of its content.
        """
        manifest = distributed.on_main("checkpoint", lambda: manifests.read(path), self._group)
        rank = dist.get_rank()
        share = sorted(manifest.files)[rank :: dist.get_world_size()]
        # A list of the folder has a name for each rank of the job that saved: one rank reads it.
        if rank == 0:
            self._warn_of_unlisted(path, manifest)
        n_bytes = sum(manifest.files[name].size for name in share)
        with _progress("check of the checkpoint", n_bytes) as report:
            find_damage = partial(manifests.find_damage, path, manifest, share, report=report)
            own_problems = distributed.on_all("checkpoint", find_damage, self._group)
        problems = distributed.gather_objects(own_problems, self._group)
        lines = None
        if problems is not None:  # on rank 0
            lines = list(dict.fromkeys(line for of_rank in problems for line in of_rank))
        lines = distributed.broadcast_object(lines, self._group)
        if lines:
            raise CheckpointError(lines)
        return manifest

    def newest_whole(
        self, folder: Place | None = None, *, before: int | None = None
    ) -> tuple[Place, Manifest] | None:
        """Find and check the newest checkpoint that is whole, and warn of damaged ones it skips.

        Args:
            folder: the folder of the checkpoints, also of another run; None: the one of this store.
            before: only checkpoints of steps below it count; None: all.

        Returns:
            The path and the manifest of the checkpoint, the same on every rank. None if there is
            no checkpoint.

        Raises:
            CheckpointError: all checkpoints are damaged. Every rank raises it.
            UserError: a later version of composer3d wrote a manifest, or the folder or a file in it
                cannot be read, which is no damage; or a checkpoint that a killed save has moved
                aside cannot be moved back. Every rank raises it.
            TrainingError: another job has taken the run's folder. Every rank raises it.
        """
        place = folder or self.folder
        if dist.get_rank() == 0:
            self._warn_of_links(place)
        # All ranks use the list of rank 0: another node may have an old list in its cache.
        folders = distributed.on_main("checkpoint", lambda: self._candidates(place), self._group)
        if before is not None:
            folders = [path for path in folders if path.name < step_folder(before)]
        for path in reversed(folders):
            try:
                return path, self.check(path)
            except CheckpointError as error:
                self._known_damaged.add(path)
                if dist.get_rank() == 0:
                    lines = [*error.lines, f"{path} is damaged: it is skipped"]
                    log.get().warning("\n".join(lines))
        if folders:
            names = ", ".join(path.name for path in folders)
            raise CheckpointError(
                f"no checkpoint in {place} is whole (damaged: {names}); "
                "restore one, or remove them to start anew"
            )
        return None

    def _candidates(self, place: Place) -> list[Place]:
        """List the step folders in ``place`` that may be whole, lowest first. Only on rank 0.

        On a disk, one without a manifest has lost it, and is reported as damaged. In an object
        store, it is what a killed save has left.

        Raises:
            OSError: the folder cannot be read, or a checkpoint that a killed save has moved aside
                cannot be moved back.
            TrainingError: the folder belongs to another job now.
        """
        # In the folder of another run, the save that has moved it aside may be running now.
        is_saving = self._pending_save is not None and not self._pending_save.done()
        if place == self.folder and not is_saving:
            self.guard()
            self._files.restore()
        return list_steps(place) if isinstance(place, Path) else published(place)

    def load(self, path: Place, stages: Stages, optimizer: SavedOptimizer | None) -> None:
        """Load a checkpoint, saved on any layout, into the parameters and the optimizer.

        The tensors are changed in place. A checkpoint of weights alone leaves the optimizer as it
        is.

        Args:
            path: a checkpoint that ``check`` has found whole.
            stages: this rank's pipeline stages, which hold the parameters.
            optimizer: the optimizer of these parameters. None: only weights are loaded.

        Raises:
            CheckpointError: the names, shapes or dtypes are not those of this job, the parts of a
                tensor do not cover it, or the file names a class that no checkpoint needs. Every
                rank raises it. No code in the checkpoint is run.
        """
        whole: Metadata | None = None  # on rank 0

        def read() -> dict[str, TensorSpec]:
            nonlocal whole
            whole = read_metadata(path, manifests.read(path).files)
            return tensor_specs(whole, str(path))

        saved = distributed.on_main("checkpoint", read, self._group)
        if optimizer is None:
            saved = {name: spec for name, spec in saved.items() if name.startswith("model.")}
        if optimizer is None or not any(name.startswith("optim.") for name in saved):
            state = _gather_weights(stages)
        else:
            state = gather_state(stages, optimizer)
        key = "checkpoint.init" if optimizer is None else "checkpoint.resume"
        way_out = f"it is of another model: point {key} elsewhere"
        manifests.require_same_tensors(global_specs(state), saved, path, way_out)
        metadata = self._share_metadata(whole, state)
        distributed.on_all("checkpoint", lambda: _read_tensors(path, metadata, state), self._group)
        self.loaded = path

    def _share_metadata(self, whole: Metadata | None, state: Mapping[str, Tensor]) -> Metadata:
        """Return the part of ``whole``, rank 0's metadata, that describes this rank's elements.

        Collective over all ranks. The parts of all tensors can be millions, so a rank unpacks only
        those of its own tensors, and keeps those that overlap with its shards.
        """
        own_names = sorted(state)
        own: list[PackedTensor] = []
        for names in distributed.distinct_objects(own_names, self._group):
            packed = None if whole is None else pack_metadata(whole, names)
            is_own = names == own_names
            packed = distributed.broadcast_object(packed, self._group, keep=is_own)
            if is_own and packed is not None:
                own = packed
        boxes = {}
        for name, tensor in state.items():
            shard, offset = local_part(tensor)
            boxes[name] = Box(offset, tuple(shard.shape))
        return unpack_metadata(own, boxes)


def gather_state(stages: Stages, optimizer: SavedOptimizer) -> dict[str, Tensor]:
    """Return this rank's parameters and optimizer state by global name, to save or to load into.

    The names are ``model.NAME`` and those of ``optimizer_state``. A tensor has the shape and the
    placements of its parameter, except for the scalars ``optim.NAME.step``. The tensors are live:
    they share memory with the parameters and the optimizer. There is no collective.
    """
    return _gather_weights(stages) | optimizer_state(optimizer, stages.named_parameters())


def _gather_weights(stages: Stages) -> dict[str, Tensor]:
    """Return this rank's parameters as ``model.NAME``, with their shapes, as ``gather_state`` does.

    The tensors are detached and live. There is no collective.
    """
    return {f"model.{name}": parameter.detach() for name, parameter in stages.named_parameters()}


def global_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return the shape and dtype of each whole tensor of the job, by global name.

    Collective over the default group: ranks of different pipeline stages hold different tensors.

    Args:
        tensors: this rank's tensors by global name. A DTensor counts with its global shape.
    """
    own = {
        name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    # All ranks of a pipeline stage have the same ones.
    return {
        name: spec for specs in distributed.distinct_objects(own) for name, spec in specs.items()
    }


def _require_findable(manifest: Manifest) -> None:
    """Raise CheckpointError if a checkpoint could not be read again, or would not be found.

    A manifest that is read may have any step: a user names its folder.
    """
    manifests.require_readable(manifest)
    if manifest.step > LAST_STEP:
        raise CheckpointError(
            f"step {manifest.step:,} cannot be saved: the last step whose checkpoint has a name is "
            f"{LAST_STEP:,}; count steps of the optimizer, not tokens or samples"
        )


class _ShardSavePlanner(dcp.DefaultSavePlanner):
    """A save planner that plans with the live tensors, and writes ``shards`` as their values.

    Args:
        shards: the local value of each tensor, or a copy of it.
    """

    def __init__(self, shards: dict[str, Tensor]) -> None:
        super().__init__()
        self._shards = shards

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._shards[index.fqn]


def _read_tensors(path: Place, metadata: Metadata, state: dict[str, Tensor]) -> None:
    """Read this rank's shards of ``state`` in place. Raises CheckpointError if that fails."""
    try:
        with _progress("load", sum(local_shard(each).nbytes for each in state.values())) as report:
            read_parts(path, metadata, state, report)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {explain(error)}") from None


@contextmanager
def _progress(what: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
    """Say on rank 0 how far its share of the work is; yield what to call with the bytes done."""
    if dist.get_rank() > 0:
        yield lambda n_bytes: None
        return
    with Progress(what, n_bytes, "B") as progress:
        yield progress.advance


def _causes(error: UserError | CheckpointException) -> list[str]:
    """Return a line for each failure, with the rank that failed."""
    if isinstance(error, UserError):
        return list(error.lines)
    return [f"rank {rank}: {explain(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
