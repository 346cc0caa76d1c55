"""Where the checkpoints of a run stand: a folder on a disk, or one in an object store.

On a disk, a checkpoint is written to a staging folder beside its final path, synced, and published
by a rename. An object store has no rename: a checkpoint is written to its final path, and its
manifest, which comes last, publishes it. What has no manifest is no checkpoint.
"""

import io
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from platform import node
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import ASSETS, FileEntry, Manifest, TensorSpec
from composer3d.checkpoint.metadata import METADATA, METADATA_LIMIT, tensor_specs
from composer3d.checkpoint.steps import is_there
from composer3d.facts.errors import CheckpointError, TrainingError, UserError
from composer3d.facts.remote import Place, RemotePath
from composer3d.facts.step_folders import STEP_FOLDER
from composer3d.runtime.files import publish, sync
from composer3d.runtime.run_files import WRITER

_REPLACED = ".old.tmp"  # the ending of the name of a checkpoint that is being replaced
_LEFTOVER = re.compile(rf"{STEP_FOLDER.pattern}(\.old)?\.tmp")
_ATTEMPT = re.compile(r"^[0-9a-f]{12}(?=__)")  # of the name of a file of tensors in a store
_NOTE_BYTES = 4096  # the most of it that is read
_METADATA_DRAFT = ".tmp"  # torch's ending of the name of metadata that are not whole


class CheckpointFolder(Protocol):
    """What a save needs of either kind of folder. The methods run no collective.

    ``name`` is that of the checkpoint: ``step-00000100``. Every method may raise OSError.
    """

    def claim(self) -> None:
        """On rank 0: tell other jobs that this one writes here. A second call does nothing."""

    def owner(self) -> str:
        """Return what says which job writes here, for ranks to compare; empty on a disk."""

    def restore(self) -> None:
        """On rank 0: give checkpoints their names back that a killed save has moved aside.

        Call it before the checkpoints are listed, while no save is running.
        """

    def begin(self, name: str, assets: Mapping[str, bytes], *, is_damaged: bool) -> None:
        """On rank 0: make room for a checkpoint, without leftovers of killed saves.

        Args:
            name: the checkpoint.
            assets: the files that belong to the model besides its tensors, by their paths.
            is_damaged: whether a checkpoint of this name is known to be damaged.

        Raises:
            TrainingError: another job writes here.
        """

    def writer(self, name: str) -> "Writer":
        """Return what writes this rank's tensors, and on rank 0 the metadata."""

    def hand_over(self, name: str, writer: "Writer") -> dict[str, FileEntry]:
        """Wait until this rank's files are kept, and return their entries for the manifest.

        Rank 0 also has the metadata and the assets.

        Raises:
            CheckpointError: the metadata are too large to be loaded.
        """

    def publish(self, name: str, manifest: Manifest, guard: Callable[[], None]) -> None:
        """On rank 0: make a checkpoint of files that all ranks have handed over.

        Args:
            name: the checkpoint.
            manifest: what describes it.
            guard: is called last, before anything is replaced.

        Raises:
            TrainingError: another job writes here.
        """

    def discard(self, name: str) -> None:
        """On rank 0: remove what a failed save has written, as far as possible."""

    def remove(self, name: str) -> None:
        """On rank 0: remove a checkpoint. Half of it must never look like a whole one."""

    def free_bytes(self) -> int | None:
        """Return how much can still be written; None: that is not known."""


def folder_of(place: Place) -> CheckpointFolder:
    """Return the folder of checkpoints at ``place``. It need not exist."""
    return RemoteFolder(place) if isinstance(place, RemotePath) else DiskFolder(place)


class DiskFolder(CheckpointFolder):
    """The folder of a run's checkpoints on a disk that all ranks share.

    A folder that is being written or removed is called ``*.tmp``, and one that is being replaced
    ``*.old.tmp``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claim(self) -> None:
        """Do nothing: the folder of the run has a lock."""

    def owner(self) -> str:
        return ""

    def restore(self) -> None:
        for replaced in self._folder.glob(f"step-*{_REPLACED}"):
            is_folder = stat.S_ISDIR(replaced.lstat().st_mode)
            # One without a manifest was no whole checkpoint before it was moved aside.
            if (
                is_folder
                and _LEFTOVER.fullmatch(replaced.name)
                and is_there(replaced / manifests.FILE)
            ):
                _name_back(replaced)

    def begin(self, name: str, assets: Mapping[str, bytes], *, is_damaged: bool) -> None:
        self.restore()
        for path in self._folder.glob("step-*.tmp"):
            # Other names are left alone: an export may be writing beside the checkpoints.
            if _LEFTOVER.fullmatch(path.name):
                _clear(path)
        staging = self._staging(name)
        staging.mkdir(parents=True)
        for file_name, content in assets.items():
            path = staging / ASSETS / file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        sync(self._folder.parent)

    def writer(self, name: str) -> "Writer":
        return Writer(self._staging(name))

    def hand_over(self, name: str, writer: "Writer") -> dict[str, FileEntry]:
        staging, rank = self._staging(name), dist.get_rank()
        own = [*staging.glob(f"__{rank}_*")]
        if rank == 0:
            assets = [*staging.glob(f"{ASSETS}/**/*")]
            own += [staging / METADATA, *(path for path in assets if path.is_file())]
            for folder in {path.parent for path in assets}:
                sync(folder)
        for path in own:
            sync(path)
        entries = {path.relative_to(staging).as_posix(): manifests.file_entry(path) for path in own}
        _require_loadable(entries)
        return entries

    def publish(self, name: str, manifest: Manifest, guard: Callable[[], None]) -> None:
        staging, final = self._staging(name), self._folder / name
        manifests.write(staging, manifest)
        sync(staging)
        guard()
        replaced = final.with_name(final.name + _REPLACED)
        # A checkpoint that is already there is damaged, or the run would have resumed after it; a
        # loop of one's own may also save a step twice.
        if os.path.lexists(final):
            final.rename(replaced)
        try:
            publish(staging, final)
        except BaseException:
            # The error of the save is the one to raise. What stays here, the next start restores.
            with suppress(OSError):
                _name_back(replaced)
            raise
        _clear(replaced)

    def discard(self, name: str) -> None:
        shutil.rmtree(self._staging(name), ignore_errors=True)

    def remove(self, name: str) -> None:
        # The folder is renamed first, so that half of a checkpoint does not look like a whole one.
        path = self._folder / name
        shutil.rmtree(path.rename(path.with_suffix(".tmp")))

    def _staging(self, name: str) -> Path:
        return self._folder / f"{name}.tmp"

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._folder).free


class RemoteFolder(CheckpointFolder):
    """The folder of a run's checkpoints in an object store.

    There are no locks. A job that begins writes the file ``writer``, and looks before each
    checkpoint whether it is still its own: the job that began last may write, and an older one
    ends at its next save.
    """

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder
        # On rank 0: whether this job writes here, and what it has published last, by its name.
        self._is_claimed = False
        self._last: dict[str, Manifest] = {}
        # Of the save that has begun, on rank 0: the assets, and what is sent last, by its path in
        # the checkpoint; None: nothing.
        self._assets: dict[str, FileEntry] = {}
        self._late: dict[str, bytes] | None = None

    def claim(self) -> None:
        if not self._is_claimed:
            (self._folder / WRITER).write(job_note())
            self._is_claimed = True

    def restore(self) -> None:
        """Do nothing: what is replaced keeps its name."""

    def owner(self) -> str:
        return (self._folder / WRITER).read(_NOTE_BYTES).decode(errors="replace")

    def begin(self, name: str, assets: Mapping[str, bytes], *, is_damaged: bool) -> None:
        # Until it is known that there is no whole checkpoint of this step, none is removed.
        self._late = {}
        self.claim()
        path = self._folder / name
        # A whole one stays until the new one has all of its tensors, whose files have names of
        # their own. Those of other files are the same, so they are sent last.
        if is_damaged or not (path / manifests.FILE).exists():
            self.remove(name)
            self._late = None
        else:
            self.require_own()
        self._assets = {}
        for file_name, content in assets.items():
            place = f"{ASSETS}/{file_name}"
            if self._late is None:
                (path / ASSETS / file_name).write(content)
            else:
                self._late[place] = content
            digest = xxhash.xxh3_128_hexdigest(content)
            self._assets[place] = FileEntry(len(content), digest)

    def writer(self, name: str) -> "Writer":
        return RemoteWriter(self._folder / name, self._late)

    def hand_over(self, name: str, writer: "Writer") -> dict[str, FileEntry]:
        # An object is kept as soon as it is closed.
        entries = {**writer.entries, **self._assets}
        _require_loadable(entries)
        return entries

    def publish(self, name: str, manifest: Manifest, guard: Callable[[], None]) -> None:
        guard()
        self.require_own()
        path = self._folder / name
        if self._late is None:
            manifests.write(path, manifest)
            self._last = {name: manifest}
            return
        # A loop may save its last step twice: then the first checkpoint stays, if it is there.
        kept, sizes = self._last.get(name), path.files()
        is_there = kept is not None and all(
            sizes.get(file_name) == entry.size for file_name, entry in kept.files.items()
        )
        if kept is None or not is_there or _state_of(kept) != _state_of(manifest):
            kept = manifest
            # A job that is killed between these requests leaves what counts as damaged.
            for file_name, content in self._late.items():
                (path / file_name).write(content)
            manifests.write(path, manifest)
        self._last = {name: kept}
        self._remove_others(path, kept)

    def _remove_others(self, path: RemotePath, manifest: Manifest) -> None:
        """Remove the files of a checkpoint's folder that its manifest does not list, if possible.

        They do no harm: nobody reads them.
        """
        with suppress(OSError):
            for file_name in path.files().keys() - manifest.files.keys() - {manifests.FILE}:
                (path / file_name).remove()

    def require_own(self) -> None:
        """Raise TrainingError if another job has begun to write here since this one has."""
        owner = self.owner()
        if owner != job_note().decode():
            raise TrainingError(
                f"{self._folder} is written by another job now, {owner}: nothing more is written "
                "there; start again, under another run.name if that job goes on"
            )

    def discard(self, name: str) -> None:
        # If another job writes here, the checkpoint of this name may be its own.
        with suppress(OSError, UserError):
            if self._late is None:
                self.remove(name)
            else:
                self.require_own()
                path = self._folder / name
                self._remove_others(path, manifests.read(path))

    def remove(self, name: str) -> None:
        self.require_own()
        # The manifest goes first, so that half of a checkpoint does not look like a whole one.
        path = self._folder / name
        (path / manifests.FILE).remove()
        path.remove_tree()

    def free_bytes(self) -> int | None:
        return None


def _state_of(manifest: Manifest) -> Manifest:
    """Return what two manifests share if they describe the same state, saved by two attempts.

    The metadata name the files of tensors, and these begin with the number of the attempt.
    """
    files = {
        _ATTEMPT.sub("", name): entry for name, entry in manifest.files.items() if name != METADATA
    }
    return replace(manifest, files=files)


@cache
def job_note() -> bytes:
    """Return what this process writes into the file ``writer``, to say which job it is."""
    return f"process {os.getpid()} on {node()} (job {uuid.uuid4().hex})".encode()


def _require_loadable(entries: Mapping[str, FileEntry]) -> None:
    """Raise CheckpointError if the metadata, if they are among these files, exceed their limit."""
    size = entries[METADATA].size if METADATA in entries else 0
    if size > METADATA_LIMIT:
        raise CheckpointError(
            f"{METADATA} would have {size:,} bytes for all parts of tensors, and at most "
            f"{METADATA_LIMIT:,} can be loaded; shard over fewer ranks (raise mesh.dp_replicate)"
        )


class Writer(dcp.FileSystemWriter):
    """A file writer that raises the first error, which is that of the operating system.

    Torch's zip writer raises a second error when it is closed, which would hide the first one.

    Args:
        place: the folder that gets the files.

    Attributes:
        tensors: the shape and dtype of each tensor that ``finish`` has written; only on rank 0.
        entries: the files that this rank has written, if they are known before they are read.
    """

    tensors: dict[str, TensorSpec]

    def __init__(self, place: Place) -> None:
        # Files are synced when they are handed over: torch 2.13 calls fsync before it flushes.
        # Nothing is copied ahead, because that would need a stream of a GPU.
        super().__init__(str(place), sync_files=False, per_thread_copy_ahead=0)
        self.entries: dict[str, FileEntry] = {}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, as the base class does, and remember what they describe."""
        super().finish(metadata, results)
        self.tensors = tensor_specs(metadata, str(self.path))
        # Torch broadcasts the metadata now, which can describe millions of parts. No rank reads it.
        metadata.state_dict_metadata = {}
        metadata.storage_data = None
        metadata.planner_data = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, as the base class does. Raises the first error."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            raise first from None


class RemoteWriter(Writer):
    """A writer to an object store: files go there as they are made, and nothing to a disk.

    Args:
        place: the folder that gets the files.
        late: as in ``_RemoteFiles``.
    """

    def __init__(self, place: RemotePath, late: dict[str, bytes] | None = None) -> None:
        super().__init__(place)
        # The base class has a path on a disk, and the files of a disk.
        self.__dict__ |= {"path": place, "fs": _RemoteFiles(self.entries, late)}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the files of this save names of their own. Only rank 0 plans.

        A rank of a job that has lost its place may still be sending a file of the same step. So it
        cannot replace one of this save.
        """
        attempt = uuid.uuid4().hex[:12]
        return [
            replace(
                plan,
                storage_data=replace(plan.storage_data, prefix=attempt + plan.storage_data.prefix),
            )
            for plan in super().prepare_global_plan(plans)
        ]

    @property
    def checkpoint_id(self) -> str:
        """The path as it is pickled into the metadata: readers know no class of ours."""
        return str(self.path)


class _RemoteFiles(FileSystemBase):
    """The part of a file system that torch's writer uses, on an object store.

    Every path is a RemotePath.

    Args:
        entries: gets an entry for each file that is made.
        late: gets the content of the metadata, by their name, in place of the store. None: the
            store gets them.
    """

    def __init__(self, entries: dict[str, FileEntry], late: dict[str, bytes] | None) -> None:
        self._entries, self._late = entries, late

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        if self._late is not None and path.name == METADATA + _METADATA_DRAFT:
            content = io.BytesIO()
            yield content
            self._late[METADATA] = content.getvalue()
            digest_of_late = xxhash.xxh3_128_hexdigest(self._late[METADATA])
            self._entries[METADATA] = FileEntry(content.tell(), digest_of_late)
            return
        # An object appears whole, so it needs no other name before that.
        path = path.parent / path.name.removesuffix(_METADATA_DRAFT)
        digest = xxhash.xxh3_128()
        with path.create(digest.update) as stream:
            yield stream
            size = stream.tell()
        self._entries[path.name] = FileEntry(size, digest.hexdigest())

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        """Do nothing: the file has this name already."""
        assert path.name == new_path.name + _METADATA_DRAFT

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        """Do nothing: an object store has no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, RemotePath)

    def exists(self, path: Any) -> bool:
        """Return False: what ``RemoteFolder.begin`` has left has other names, or is replaced."""
        return False

    def rm_file(self, path: Any) -> None:
        path.remove()


def _name_back(replaced: Path) -> None:
    """Rename a checkpoint that was moved aside to its own name, if nothing has that name.

    Raises OSError. A run that went on without the checkpoint would lose its steps.
    """
    final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
    if os.path.lexists(replaced) and not os.path.lexists(final):
        replaced.rename(final)


def _clear(path: Path) -> None:
    """Remove the file, link or folder at ``path``, if there is one.

    A folder is removed as far as possible. No link is followed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
