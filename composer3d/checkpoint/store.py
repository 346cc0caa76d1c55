"""Where checkpoints are kept: one folder a step, written beside its place, synced, and published by a rename.

What they hold has flat names that do not depend on the layout: ``model.NAME`` and ``optim.NAME.exp_avg`` use the
parameter's global name, and a DTensor knows its place in the whole tensor, so that a checkpoint can be read on another
layout. No generator is kept: each step seeds its own.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
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
from composer3d.checkpoint.manifest import Manifest
from composer3d.checkpoint.metadata import (
    METADATA,
    METADATA_LIMIT,
    Planner,
    Reader,
    read_metadata,
    tensors_of,
)
from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.checkpoint.pickles import explain
from composer3d.parallel import Stages
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.runtime import log
from composer3d.runtime import process_group as distributed
from composer3d.runtime.files import sync
from composer3d.spec.errors import CheckpointError, TrainingError, UserError

_ASSETS = "assets"  # folder of a checkpoint


class Store:
    """The checkpoints of one run: ``FOLDER/step-00000100``. Every method but ``newest`` is collective over the job.

    A folder of that name is whole: its files are on the disk, and ``manifest.json`` says what they are. What is being
    written, and what is being removed, is called ``*.tmp``.

    Collectives run on a gloo group of the store's own: a save in the background must not meet those of training.
    """

    def __init__(
        self, folder: Path, *, keep: int, background: bool = False, timeout_s: float = 3600.0
    ) -> None:
        # timeout_s: how much longer than another rank's the writes of one may take.
        self.folder = folder
        self.assets: Mapping[
            str, bytes
        ] = {}  # rank 0's: files that belong to the model, without its tensors
        self.guard: Callable[[], None] = lambda: (
            None
        )  # rank 0's: raises TrainingError where the folder is not ours now
        self.loaded: Path | None = None  # the checkpoint that was loaded last
        self._keep, self._background = keep, background
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        gpu = (
            torch.cuda.current_device() if torch.cuda.is_initialized() else None
        )  # where a new thread is not
        self._thread = ThreadPoolExecutor(
            1, initializer=lambda: None if gpu is None else torch.cuda.set_device(gpu)
        )
        self._flight: Future[None] | None = None
        self._host: dict[str, Tensor] = {}
        self._damaged: set[Path] = set()
        self._links: set[Path] = set()  # those that were warned of

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed, as far as this rank knows: ``wait`` raises its error."""
        return (
            self._flight is not None
            and self._flight.done()
            and self._flight.exception() is not None
        )

    def newest(self) -> Path | None:
        """The checkpoint with the highest step that is not known to be damaged, or None. Waits for a save to end."""
        if self._flight is not None:
            self._flight.exception()
        return max(self._whole(), default=None)

    def _steps(self) -> list[Path]:
        """Folders of checkpoints by step: what a user has put beside them under another name is not ours.

        Nor is a link, a pipe or a file of such a name: a link could lead to anybody's checkpoint.
        """
        found = (
            path for path in self.folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8}", path.name)
        )
        return sorted(path for path in found if path.is_dir() and not path.is_symlink())

    def _warn_of_links(self) -> None:
        """Once for each: a user who has moved a checkpoint to another disk would wonder why it is not used."""
        for path in sorted(self.folder.glob("step-*")):
            if (
                re.fullmatch(r"step-[0-9]{8}", path.name)
                and path.is_symlink()
                and path not in self._links
            ):
                self._links.add(path)
                log.get().warning(f"{path} is a link, which is not followed: move the folder there")

    def _whole(self) -> list[Path]:
        return [
            path
            for path in self._steps()
            if path not in self._damaged and (path / manifests.FILE).exists()
        ]

    def save(self, manifest: Manifest, stages: Stages, optimizer: torch.optim.AdamW) -> None:
        """Write the state after ``manifest.step`` steps, then drop the oldest checkpoints beyond ``keep``.

        In the background this returns as soon as the state is copied to the host, and waits for the save before.

        Args:
            manifest: all but the files and tensors.

        Raises:
            CheckpointError: on every rank, where one cannot write; in the background ``wait`` raises it.
        """
        began = time.perf_counter()
        self.wait()
        state = gather_state(stages, optimizer)
        if not self._background:
            self._write(
                manifest, state, {name: local_shard(tensor) for name, tensor in state.items()}
            )
            return
        self._flight = self._thread.submit(self._write, manifest, state, self._copy(state))
        seconds = time.perf_counter() - began
        log.get().info(
            f"saving step {manifest.step} in the background: training stood still for {seconds:.3f} s"
        )

    def _copy(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The local parts of ``state`` in memory of the host (pinned for a GPU's), which the next save uses again."""
        for name, part in ((name, local_shard(tensor)) for name, tensor in state.items()):
            if name not in self._host:
                self._host[name] = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
            self._host[name].copy_(part, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._host

    def warm_up(self, stages: Stages, optimizer: torch.optim.AdamW) -> None:
        """Take the memory of copies in the background before training: the first save then stalls no longer."""
        if self._background:
            self._copy(gather_state(stages, optimizer))

    def wait(self) -> None:
        """Wait for the save in the background, and raise its error, which is the same on every rank.

        Raises:
            CheckpointError: a rank could not write.
            TrainingError: another job has taken the run's folder.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.result()

    def _write(
        self, manifest: Manifest, state: dict[str, Tensor], parts: dict[str, Tensor]
    ) -> None:
        began = time.perf_counter()
        final = self.folder / f"step-{manifest.step:08d}"
        staging = final.with_suffix(".tmp")
        try:
            self._on_first(lambda: self._prepare(staging))
            # Synced below: torch 2.13 calls fsync before it has flushed. No copy ahead: it would need a GPU's stream.
            writer = _Writer(staging, sync_files=False, per_thread_copy_ahead=0)
            saved = dcp.save(
                state, storage_writer=writer, planner=_Planner(parts), process_group=self._group
            )
            own = distributed.on_all("writing", lambda: _seal(staging), self._group)
            files = {
                name: entry
                for part in distributed.gather(own, self._group)
                for name, entry in part.items()
            }
            full = replace(manifest, files=files, tensors=tensors_of(saved, str(staging)))
            self._on_first(lambda: self._publish(staging, final, full))
        except TrainingError:  # the folder is another job's now: nothing in it is ours to remove
            raise
        except (UserError, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(staging, ignore_errors=True)
            lines = [
                f"step {manifest.step} could not be saved in {staging}: {cause}"
                for cause in _causes(error)
            ]
            kept = max(self._whole(), default="none")
            raise CheckpointError(
                [*lines, f"the newest checkpoint is {kept}: the same command goes on from it"]
            ) from error
        log.get().info(f"saved {final} in {time.perf_counter() - began:.2f} s")

    def _on_first(self, function: Callable[[], None]) -> None:
        """Run ``function`` on rank 0; where it fails, all ranks do."""
        distributed.on_all(
            "writing", function if dist.get_rank() == 0 else lambda: None, self._group
        )

    def _prepare(self, staging: Path) -> None:
        self.guard()
        for crashed in self.folder.glob("step-*.tmp"):
            if re.fullmatch(
                r"step-[0-9]{8}(\.old)?\.tmp", crashed.name
            ):  # an export beside them may be at work
                _clear(crashed)
        staging.mkdir(parents=True)
        for name, content in self.assets.items():
            (staging / _ASSETS).mkdir(exist_ok=True)
            (staging / _ASSETS / name).write_bytes(content)
        sync(self.folder.parent)

    def _publish(self, staging: Path, final: Path, manifest: Manifest) -> None:
        manifests.write(staging, manifest)
        sync(staging)
        self.guard()
        replaced = final.with_suffix(".old.tmp")
        if os.path.lexists(
            final
        ):  # it is damaged: a run does not come twice to a step that it has saved
            final.rename(replaced)
        staging.rename(final)
        sync(self.folder)
        self._damaged.discard(final)
        _clear(replaced)
        others = [path for path in self._whole() if path != final]
        kept = [final, *others[::-1][: self._keep - 1]]
        for path in self._steps():
            if path not in kept and (path in others or path < min(kept)):
                _remove(path)

    def check(self, path: Path) -> Manifest:
        """Hold a checkpoint to its manifest. Each rank reads a share of the files, and all come to one verdict.

        Raises:
            CheckpointError: on every rank, with all that is wrong.
        """
        manifest = distributed.on_all("checkpoint", lambda: manifests.read(path), self._group)
        share = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        problems = distributed.gather(manifests.damage(path, manifest, share), self._group)
        lines = list(dict.fromkeys(line for part in problems for line in part))
        if lines:
            raise CheckpointError(lines)
        return manifest

    def find(self) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that is whole, or None where there is no checkpoint. Warns of what it passes over.

        Raises:
            CheckpointError: on every rank, where all are damaged.
        """
        if dist.get_rank() == 0:
            self._warn_of_links()
        steps = distributed.gather(self._steps(), self._group)[
            0
        ]  # rank 0's: what another node remembers may be old
        for path in reversed(steps):
            try:
                return path, self.check(path)
            except CheckpointError as error:
                self._damaged.add(path)
                if dist.get_rank() == 0:
                    log.get().warning(
                        "\n".join([*error.lines, f"{path} is damaged: it is passed over"])
                    )
        if steps:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole (damaged: {', '.join(path.name for path in steps)}); "
                "restore one, or remove them to start anew"
            )
        return None

    def load(self, path: Path, stages: Stages, optimizer: torch.optim.AdamW) -> None:
        """Read ``path``, which ``check`` has found whole, into the live model and optimizer, on whatever layout.

        A checkpoint without moments leaves the optimizer as it is.

        Raises:
            CheckpointError: on every rank: its names, shapes and dtypes are not this job's, its tensors have gaps, or
                it names a class that does not belong in a checkpoint; nothing of it is run.
        """
        metadata = distributed.on_all("checkpoint", lambda: read_metadata(path), self._group)
        saved = tensors_of(metadata, str(path))
        state = gather_state(stages, optimizer)
        if not any(name.startswith("optim.") for name in saved):
            state = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        manifests.compare(
            forms(state), saved, path, "it is of another model: point checkpoint.resume elsewhere"
        )
        try:
            dcp.load(
                state,
                storage_reader=Reader(path, metadata),
                planner=Planner(),
                process_group=self._group,
            )
        except CheckpointException as error:
            raise CheckpointError(
                [f"{path} cannot be read: {cause}" for cause in _causes(error)]
            ) from None
        self.loaded = path


def gather_state(stages: Stages, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """This rank's live tensors under their global names: what is saved, and what a load writes into."""
    state = {f"model.{name}": parameter.detach() for name, parameter in stages.named_parameters()}
    return state | optimizer_state(optimizer, stages.named_parameters())


def forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of all whole tensors that ranks of the job hold. Collective: they hold different names."""
    mine = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    return {name: form for part in distributed.gather(mine) for name, form in part.items()}


class _Planner(dcp.DefaultSavePlanner):
    """Plans a save by the tensors given to it, and writes ``parts``, which may be copies of their local parts."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        super().__init__()
        self._parts = parts

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn]


class _Writer(dcp.FileSystemWriter):
    """Fails with what the system said: torch's zip writer fails once more at its end, and hides that."""

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__
            raise cause from None


def _seal(staging: Path) -> dict[str, tuple[int, str]]:
    """Have this rank's files on the disk; their sizes and digests."""
    rank = dist.get_rank()
    own = [*staging.glob(f"__{rank}_*")]
    if rank == 0:
        assets = [*staging.glob(f"{_ASSETS}/*")]
        own += [staging / METADATA, *assets]
        if assets:
            sync(staging / _ASSETS)
    for path in own:
        sync(path)
    if rank == 0 and (size := (staging / METADATA).stat().st_size) > METADATA_LIMIT:
        raise CheckpointError(
            f"{METADATA} would have {size:,} bytes for all parts of tensors, and at most {METADATA_LIMIT:,} are read "
            "again; shard over fewer ranks (raise mesh.dp_replicate)"
        )
    names = {path: path.relative_to(staging).as_posix() for path in own}
    return {names[path]: (path.stat().st_size, manifests.digest_file(path)) for path in own}


def _clear(path: Path) -> None:
    """Remove what a save has left, or another has put in its place, as far as that can be. No link is followed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Space that cannot be freed must not end a healthy run. The new name comes first: half of it is no checkpoint."""
    try:
        shutil.rmtree(path.rename(path.with_suffix(".tmp")))
    except OSError as error:
        log.get().warning(f"cannot remove {path}, an old checkpoint: {error}")


def _causes(error: UserError | CheckpointException) -> list[str]:
    """What went wrong on which rank, one line each."""
    if isinstance(error, UserError):
        return list(error.lines)
    return [f"rank {rank}: {explain(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
