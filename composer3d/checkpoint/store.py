"""Save and load the checkpoints of a run.

Each checkpoint is a folder named after its step. It is written under another name beside its place,
synced, and published by a rename.

Its tensors have flat names that do not depend on the layout: ``model.NAME`` and
``optim.NAME.exp_avg`` contain the parameter's global name. A DTensor knows its place in the whole
tensor, so a checkpoint can be loaded on another layout. No random generator is saved: each step
seeds its own.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import FileEntry, Manifest, TensorSpec
from composer3d.checkpoint.metadata import (
    METADATA,
    METADATA_LIMIT,
    CheckedReader,
    TensorLoadPlanner,
    read_metadata,
    tensor_specs,
)
from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.checkpoint.pickles import explain
from composer3d.parallel import Stages
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.runtime import log
from composer3d.runtime import process_group as distributed
from composer3d.runtime.files import publish, sync
from composer3d.spec.errors import CheckpointError, TrainingError, UserError

_STEP_FOLDER = re.compile(r"step-[0-9]{8}")
_LEFTOVER = re.compile(r"step-[0-9]{8}(\.old)?\.tmp")
_ASSETS = "assets"  # a folder within a checkpoint


class Store:
    """The checkpoints of one run: ``FOLDER/step-00000100``.

    A folder of that name is whole: its files are on the disk, and its ``manifest.json`` describes
    them. A folder that is being written or removed is called ``*.tmp``.

    Every method but ``newest`` is collective over the job. Collectives run on a gloo group of the
    store's own, so that a save in the background does not interfere with those of training.

    Args:
        folder: the folder of the checkpoints.
        keep: how many checkpoints are kept.
        background: whether ``save`` writes in a thread while training goes on.
        timeout_s: how much longer the writes of one rank may take than those of another.

    Attributes:
        assets: files that belong to the model besides its tensors, by name. Only rank 0's count.
        guard: called on rank 0 before the folder is changed. It raises TrainingError if the folder
            belongs to another job now.
        loaded: the checkpoint that was loaded last.
    """

    def __init__(
        self, folder: Path, *, keep: int, background: bool = False, timeout_s: float = 3600.0
    ) -> None:
        self.folder = folder
        self.assets: Mapping[str, bytes] = {}
        self.guard: Callable[[], None] | None = None
        self.loaded: Path | None = None
        self._keep = keep
        self._background = background
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

        # A new thread does not inherit the current GPU.
        select_gpu = None
        if torch.cuda.is_initialized():
            select_gpu = partial(torch.cuda.set_device, torch.cuda.current_device())
        self._thread = ThreadPoolExecutor(1, initializer=select_gpu)
        self._pending_save: Future[None] | None = None
        self._host_copies: dict[str, Tensor] = {}  # local shards; each save uses the memory again

        self._known_damaged: set[Path] = set()
        self._reported_links: set[Path] = set()

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed, as far as this rank knows.

        ``wait`` raises its error.
        """
        save = self._pending_save
        return save is not None and save.done() and save.exception() is not None

    def newest(self) -> Path | None:
        """Return the checkpoint with the highest step that is not known to be damaged, or None.

        Waits for a save in the background to end.
        """
        if self._pending_save is not None:
            self._pending_save.exception()
        return max(self._usable_folders(), default=None)

    def _step_folders(self) -> list[Path]:
        """List the folders named after a step, lowest first.

        Anything under another name belongs to the user. Links, pipes and files are left out as
        well: a link could lead to anybody's checkpoint.
        """
        return sorted(
            path
            for path in self.folder.glob("step-*")
            if _STEP_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )

    def _usable_folders(self) -> list[Path]:
        """List the step folders that have a manifest and are not known to be damaged."""
        return [
            path
            for path in self._step_folders()
            if path not in self._known_damaged and (path / manifests.FILE).exists()
        ]

    def _warn_of_links(self) -> None:
        """Warn once of each link that is named like a checkpoint.

        A user who has moved a checkpoint to another disk would wonder why it is not used.
        """
        for path in sorted(self.folder.glob("step-*")):
            is_link = _STEP_FOLDER.fullmatch(path.name) and path.is_symlink()
            if is_link and path not in self._reported_links:
                self._reported_links.add(path)
                log.get().warning(f"{path} is a link, which is not followed: move the folder there")

    # Saving.

    def save(self, manifest: Manifest, stages: Stages, optimizer: torch.optim.AdamW) -> None:
        """Write the state after ``manifest.step`` steps, then remove the oldest checkpoints.

        Waits for the save before. In the background, it then returns as soon as the state has been
        copied to the host.

        Args:
            manifest: all of it but the files and tensors.

        Raises:
            CheckpointError: a rank cannot write. Raised on every rank; in the background by
                ``wait``.
            TrainingError: another job has taken the run's folder. Raised as the other.
        """
        began = time.perf_counter()
        self.wait()
        state = gather_state(stages, optimizer)
        if not self._background:
            shards = {name: local_shard(tensor) for name, tensor in state.items()}
            self._write(manifest, state, shards)
            return
        shards = self._copy_to_host(state)
        self._pending_save = self._thread.submit(self._write, manifest, state, shards)
        seconds = time.perf_counter() - began
        log.get().info(
            f"saving step {manifest.step} in the background: "
            f"training stood still for {seconds:.3f} s"
        )

    def warm_up(self, stages: Stages, optimizer: torch.optim.AdamW) -> None:
        """Allocate the memory of saves in the background, so that the first stalls no longer."""
        if self._background:
            self._copy_to_host(gather_state(stages, optimizer))

    def wait(self) -> None:
        """Wait for the save in the background. Its error is raised, the same on every rank.

        Raises:
            CheckpointError: a rank could not write.
            TrainingError: another job has taken the run's folder.
        """
        save, self._pending_save = self._pending_save, None
        if save is not None:
            save.result()

    def _copy_to_host(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the local shards of ``state`` to host memory, which is pinned for a GPU's."""
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
        final = self.folder / f"step-{manifest.step:08d}"
        staging = final.with_suffix(".tmp")
        try:
            self._on_rank_0(lambda: self._make_staging(staging))
            # Files are synced below: torch 2.13 calls fsync before it has flushed. Nothing is
            # copied ahead: that would need a GPU's stream.
            writer = _Writer(staging, sync_files=False, per_thread_copy_ahead=0)
            metadata = dcp.save(
                state,
                storage_writer=writer,
                planner=_ShardSavePlanner(shards),
                process_group=self._group,
            )
            own_files = distributed.on_all("writing", lambda: _sync_own_files(staging), self._group)
            files = {
                name: entry
                for files_of_rank in distributed.all_gather_objects(own_files, self._group)
                for name, entry in files_of_rank.items()
            }
            tensors = tensor_specs(metadata, str(staging))
            complete = replace(manifest, files=files, tensors=tensors)
            self._on_rank_0(lambda: self._publish(staging, final, complete))
        except TrainingError:
            # The folder belongs to another job now: nothing in it may be removed.
            raise
        except (UserError, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise CheckpointError(self._describe_failure(manifest.step, staging, error)) from error
        log.get().info(f"saved {final} in {time.perf_counter() - began:.2f} s")

    def _describe_failure(
        self, step: int, staging: Path, error: UserError | CheckpointException
    ) -> list[str]:
        lines = [
            f"step {step} could not be saved in {staging}: {cause}" for cause in _causes(error)
        ]
        kept = max(self._usable_folders(), default=None)
        if kept is None:
            lines.append("the newest checkpoint is none; the same command starts anew")
        else:
            lines.append(f"the newest checkpoint is {kept}: the same command goes on from it")
        return lines

    def _on_rank_0(self, function: Callable[[], None]) -> None:
        """Run ``function`` on rank 0. If it fails, all ranks fail."""
        is_rank_0 = dist.get_rank() == 0
        distributed.on_all("writing", function if is_rank_0 else lambda: None, self._group)

    def _require_own_folder(self) -> None:
        if self.guard is not None:
            self.guard()

    def _make_staging(self, staging: Path) -> None:
        """Remove what killed saves have left, and make the staging folder with the assets."""
        self._require_own_folder()
        for path in self.folder.glob("step-*.tmp"):
            # Other names are left alone: an export may be writing beside the checkpoints.
            if _LEFTOVER.fullmatch(path.name):
                _clear(path)
        staging.mkdir(parents=True)
        for name, content in self.assets.items():
            (staging / _ASSETS).mkdir(exist_ok=True)
            (staging / _ASSETS / name).write_bytes(content)
        sync(self.folder.parent)

    def _publish(self, staging: Path, final: Path, manifest: Manifest) -> None:
        """Complete a checkpoint with its manifest, give it its name, and remove old ones."""
        manifests.write(staging, manifest)
        sync(staging)
        self._require_own_folder()
        replaced = final.with_suffix(".old.tmp")
        # A checkpoint of this step is damaged: a run does not repeat a step that it has saved.
        if os.path.lexists(final):
            final.rename(replaced)
        publish(staging, final)
        self._known_damaged.discard(final)
        _clear(replaced)
        self._remove_old(final)

    def _remove_old(self, saved: Path) -> None:
        """Keep ``saved`` and the newest other usable checkpoints; remove the other usable ones.

        Damaged checkpoints are removed as well if they are older than all that are kept. Newer ones
        are left to the user.
        """
        others = [path for path in self._usable_folders() if path != saved]
        newest_first = others[::-1]
        kept = [saved, *newest_first[: self._keep - 1]]
        for path in self._step_folders():
            if path not in kept and (path in others or path < min(kept)):
                _remove(path)

    # Loading.

    def check(self, path: Path) -> Manifest:
        """Compare a checkpoint with its manifest, and return the manifest.

        Each rank reads a share of the files, and all ranks come to the same verdict.

        Raises:
            CheckpointError: on every rank, with everything that is wrong.
        """
        manifest = distributed.on_all("checkpoint", lambda: manifests.read(path), self._group)
        share = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        own_problems = manifests.find_damage(path, manifest, share)
        problems = distributed.all_gather_objects(own_problems, self._group)
        lines = list(dict.fromkeys(line for of_rank in problems for line in of_rank))
        if lines:
            raise CheckpointError(lines)
        return manifest

    def newest_whole(self) -> tuple[Path, Manifest] | None:
        """Find and check the newest checkpoint that is whole. Warns of damaged ones that it skips.

        Returns:
            Its path and its manifest; None if there is no checkpoint.

        Raises:
            CheckpointError: on every rank, if all checkpoints are damaged.
        """
        if dist.get_rank() == 0:
            self._warn_of_links()
        # Rank 0's list counts: another node may have an old one in its cache.
        folders = distributed.all_gather_objects(self._step_folders(), self._group)[0]
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
                f"no checkpoint in {self.folder} is whole (damaged: {names}); "
                "restore one, or remove them to start anew"
            )
        return None

    def load(self, path: Path, stages: Stages, optimizer: torch.optim.AdamW) -> None:
        """Load ``path`` into the live model and optimizer, on any layout.

        A checkpoint of weights alone leaves the optimizer as it is.

        Args:
            path: a checkpoint that ``check`` has found whole.

        Raises:
            CheckpointError: on every rank: names, shapes or dtypes are not those of this job,
                tensors have gaps, or it names a class that does not belong in a checkpoint. Nothing
                that it names is run.
        """
        metadata = distributed.on_all("checkpoint", lambda: read_metadata(path), self._group)
        saved = tensor_specs(metadata, str(path))
        state = gather_state(stages, optimizer)
        if not any(name.startswith("optim.") for name in saved):
            state = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        way_out = "it is of another model: point checkpoint.resume elsewhere"
        manifests.require_same_tensors(global_specs(state), saved, path, way_out)
        try:
            dcp.load(
                state,
                storage_reader=CheckedReader(path, metadata),
                planner=TensorLoadPlanner(),
                process_group=self._group,
            )
        except CheckpointException as error:
            lines = [f"{path} cannot be read: {cause}" for cause in _causes(error)]
            raise CheckpointError(lines) from None
        self.loaded = path


def gather_state(stages: Stages, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return this rank's live tensors under their global names, to save or to load into."""
    state = {f"model.{name}": parameter.detach() for name, parameter in stages.named_parameters()}
    return state | optimizer_state(optimizer, stages.named_parameters())


def global_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return shape and dtype of all whole tensors that ranks of the job hold, by name.

    Collective: ranks of different pipeline stages hold different names.
    """
    own = {
        name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    return {
        name: spec
        for specs_of_rank in distributed.all_gather_objects(own)
        for name, spec in specs_of_rank.items()
    }


class _ShardSavePlanner(dcp.DefaultSavePlanner):
    """Plans a save by the live tensors, and writes ``shards`` in place of their local values.

    Args:
        shards: the local value of each tensor, or a copy of it.
    """

    def __init__(self, shards: dict[str, Tensor]) -> None:
        super().__init__()
        self._shards = shards

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._shards[index.fqn]


class _Writer(dcp.FileSystemWriter):
    """A file writer that fails with the error of the system.

    Torch's zip writer fails once more when it is closed, and hides that error.
    """

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            raise first from None


def _sync_own_files(staging: Path) -> dict[str, FileEntry]:
    """Wait until this rank's files are on the disk, and return their entries for the manifest.

    Rank 0 also owns DCP's metadata and the assets.
    """
    rank = dist.get_rank()
    own = [*staging.glob(f"__{rank}_*")]
    if rank == 0:
        assets = [*staging.glob(f"{_ASSETS}/*")]
        own += [staging / METADATA, *assets]
        if assets:
            sync(staging / _ASSETS)
    for path in own:
        sync(path)
    if rank == 0:
        size = (staging / METADATA).stat().st_size
        if size > METADATA_LIMIT:
            raise CheckpointError(
                f"{METADATA} would have {size:,} bytes for all parts of tensors, and at most "
                f"{METADATA_LIMIT:,} are read again; shard over fewer ranks (raise "
                "mesh.dp_replicate)"
            )
    return {path.relative_to(staging).as_posix(): manifests.file_entry(path) for path in own}


def _clear(path: Path) -> None:
    """Remove what a killed save has left at ``path``, or what is there in its place.

    Folders are removed as far as possible. No link is followed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove an old checkpoint. A failure is only logged: it must not end a healthy run.

    The folder gets another name first: half of a checkpoint must not look like one.
    """
    try:
        shutil.rmtree(path.rename(path.with_suffix(".tmp")))
    except OSError as error:
        log.get().warning(f"cannot remove {path}, an old checkpoint: {error}")


def _causes(error: UserError | CheckpointException) -> list[str]:
    """Describe what went wrong on which rank, one line each."""
    if isinstance(error, UserError):
        return list(error.lines)
    return [f"rank {rank}: {explain(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
