"""A training that kills itself at one of its file operations, or after some seconds."""

import builtins
import hashlib
import io
import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.facts.remote import RemotePath
from tools.prove.resume import parts

# A file of the run's folder: the steps whose checkpoints were published under their names.
PUBLISHED = "published"


_CALLS_WITH_ONE_PATH = (
    "mkdir",
    "rmdir",
    "unlink",
    "remove",
    "truncate",
    "ftruncate",
    "fsync",
    "fdatasync",
)
_CALLS_WITH_TWO_PATHS = ("rename", "replace", "link")


class Event(NamedTuple):
    """One file operation, by its place among equal ones.

    Attributes:
        what: the operation, such as "write" or "rename".
        path: below the folder of checkpoints; of a rename, both names.
        number: how often this operation was done to this path so far, from 1.
    """

    what: str
    path: str
    number: int


@dataclass(frozen=True)
class Death:
    """Where or when a training kills itself.

    Attributes:
        ranks: that kill themselves.
        event: they die before it, or, if it is a write, after half of it. None: at no event.
        after_s: they die this many seconds after the start of their loop. None: at no time.
    """

    ranks: tuple[int, ...] = (0,)
    event: Event | None = None
    after_s: float | None = None


class Trap:
    """Replace all calls that change files, and kill the process at one of them.

    It kills the process before ``event``, or in the middle of it if it is a write. torch writes
    through Python's files as well.

    Attributes:
        events: all operations below ``folder`` so far.
    """

    def __init__(self, folder: Path, event: Event | None) -> None:
        self.folder, self.event = f"{folder}{os.sep}", event
        self.events: list[Event] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._open, self._write = io.open, os.write
        for name in _CALLS_WITH_ONE_PATH:
            setattr(os, name, self._of_one_path(name, getattr(os, name)))
        for name in _CALLS_WITH_TWO_PATHS:
            setattr(os, name, self._of_two_paths(name, getattr(os, name)))
        os.write = self._write_to_descriptor
        builtins.open = io.open = self._open_file

    def meet(
        self, what: str, path: str, tear: Callable[[], object] | None = None, to: str = ""
    ) -> None:
        """Count an event, and die if it is the fatal one.

        ``tear`` does half of the operation first. ``to`` is the new path of a rename or link.
        """
        if not path.startswith(self.folder) and path != self.folder[:-1]:
            return
        path = path.removeprefix(self.folder[:-1])[1:] or "."
        if to:
            path += f" -> {to.removeprefix(self.folder)}"
        self._counts[what, path] += 1
        event = Event(what, path, self._counts[what, path])
        self.events.append(event)
        if event == self.event:
            if tear is not None:
                tear()
            os.kill(os.getpid(), signal.SIGKILL)

    def _of_one_path(self, name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *arguments: Any, dir_fd: int | None = None, **keywords: Any) -> Any:
            self.meet(name, absolute_path(path, dir_fd))
            # Some calls have no such keyword.
            if dir_fd is not None:
                keywords["dir_fd"] = dir_fd
            return right(path, *arguments, **keywords)

        return wrapped

    def _of_two_paths(self, name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(source: Any, target: Any, **keywords: Any) -> None:
            target_path = absolute_path(target)
            self.meet(name, absolute_path(source), to=target_path)
            right(source, target, **keywords)
            published = re.fullmatch(r"step-(\d{8})", os.path.basename(target))
            if published and target_path.startswith(self.folder):
                journal = Path(self.folder).parent / PUBLISHED
                append_line(journal, str(int(published[1])), self._write)

        return wrapped

    def _write_to_descriptor(self, descriptor: int, data: Any) -> int:
        def write_half() -> None:
            self._write(descriptor, data[: len(data) // 2])

        self.meet("write", absolute_path(descriptor), write_half)
        return self._write(descriptor, data)

    def _open_file(
        self, file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **keywords: Any
    ) -> Any:
        writes = bool(set(mode) & set("wax"))
        if not writes or not absolute_path(file).startswith(self.folder):
            return self._open(file, mode, buffering, *arguments, **keywords)
        self.meet("create", absolute_path(file))
        buffered = io.BufferedWriter(_File(file, mode.replace("b", "").replace("t", ""), self))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *arguments, **keywords)


class RemoteTrap:
    """Kill the process before one of the calls that change an object store.

    An object appears whole, when it is closed: "create" is the beginning of an upload, and "close"
    its end.

    Attributes:
        events: all calls so far, with paths below ``place``.
    """

    def __init__(self, place: RemotePath, journal: Path, event: Event | None) -> None:
        self.place, self.event = f"{place}/", event
        self.events: list[Event] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._journal = journal
        for name in ("write", "remove", "remove_tree"):
            setattr(RemotePath, name, self._of(name, getattr(RemotePath, name)))
        right = RemotePath.create

        @contextmanager
        def create(path: RemotePath, *arguments: Any) -> Iterator[Any]:
            self._meet("create", path)
            with right(path, *arguments) as stream:
                yield stream
                self._meet("close", path)

        RemotePath.create = create  # type: ignore[method-assign]

    def _of(self, name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: RemotePath, *arguments: Any) -> Any:
            self._meet(name, path)
            result = right(path, *arguments)
            published = re.fullmatch(r"step-(\d{8})/manifest\.json", self._below(path))
            if name == "write" and published:
                append_line(self._journal, str(int(published[1])), os.write)
            return result

        return wrapped

    def _below(self, path: RemotePath) -> str:
        return str(path).removeprefix(self.place)

    def _meet(self, what: str, path: RemotePath) -> None:
        below = self._below(path)
        self._counts[what, below] += 1
        event = Event(what, below, self._counts[what, below])
        self.events.append(event)
        if event == self.event:
            os.kill(os.getpid(), signal.SIGKILL)


class _File(io.FileIO):
    """The raw file below the buffer of a file open for writing; its writes reach the system."""

    def __init__(self, file: Any, mode: str, trap: Trap) -> None:
        super().__init__(file, mode)
        self._path, self._trap = absolute_path(file), trap

    def write(self, data: Any) -> int:
        self._trap.meet("write", self._path, lambda: self._write_half(data))
        return super().write(data)

    def _write_half(self, data: Any) -> None:
        super().write(data[: len(data) // 2])

    def close(self) -> None:
        if not self.closed:
            self._trap.meet("close", self._path)
        super().close()


def absolute_path(path: Any, dir_fd: int | None = None) -> str:
    """The absolute path of a path or a file descriptor."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    if dir_fd is not None:
        return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
    return os.path.abspath(os.fspath(path))


def append_line(path: Path, line: str, write: Callable[[int, bytes], int]) -> None:
    """Append a line to a file by ``write``, the call that is not counted."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def die_after(seconds: float) -> Callable[[], None]:
    """Have another process kill this one after some seconds; the returned function cancels that."""
    pid = os.getpid()
    killer = os.fork()
    if killer == 0:
        time.sleep(seconds)
        # A process that has ended has left its number to another.
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def cancel() -> None:
        os.kill(killer, signal.SIGKILL)
        os.waitpid(killer, 0)

    return cancel


@dataclass(frozen=True)
class Outcome:
    """What a rank that was not killed returns.

    Attributes:
        resumed: the number of steps that were done at its start.
        state: the digest of its parameters and of its optimizer's state at the end.
        events: all its file operations.
        loop_s: the seconds of its training loop.
    """

    resumed: int
    state: str
    events: tuple[Event, ...]
    loop_s: float


def train_once(
    recipe: str,
    folder: Path,
    sets: Sequence[str],
    death: Death | None,
    fault: Callable[[], None] | None = None,
) -> Outcome:
    """Run a rank of ``composer3d train`` to its end or its death; a task of ``launch.Pool``.

    ``fault`` is called first: a test plants a fault with it.
    """
    import torch

    from composer3d.recipe.resolve import load
    from composer3d.runtime.process_group import pool_world
    from composer3d.training.build import build
    from composer3d.training.loop import train

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if fault is not None:
        fault()
    rank = int(os.environ["RANK"])
    if death is None or rank not in death.ranks:
        death = Death(ranks=())
    resolved = load(
        recipe, [*sets, f"run.out_dir={folder}"], world_size=int(os.environ["WORLD_SIZE"])
    )
    place = resolved.recipe.checkpoint_folder
    trap: Trap | RemoteTrap
    if isinstance(place, RemotePath):
        trap = RemoteTrap(place, folder / "run" / PUBLISHED, death.event)
    else:
        trap = Trap(place, death.event)
    with pool_world() as device:
        run = build(resolved.recipe, device, resolved.to_toml())
        resumed, begin = run.step, time.monotonic()
        cancel = None if death.after_s is None else die_after(death.after_s)
        train(run)
        loop_s = time.monotonic() - begin
        if cancel is not None:
            cancel()
        return Outcome(resumed, digest(run), tuple(trap.events), loop_s)


def digest(run: Any) -> str:
    """The SHA-256 of this rank's shards of all parameters and of the optimizer's states."""
    out = hashlib.sha256()
    # A resume may fill the optimizer's states in another order.
    for key, _, _, local in sorted(parts(run), key=lambda part: part[0]):
        out.update(key.encode())
        out.update(local.contiguous().numpy().tobytes())
    return out.hexdigest()
