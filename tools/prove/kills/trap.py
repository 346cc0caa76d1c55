"""A training that can be told to kill itself: at one of its file operations, or after some seconds."""

import builtins
import hashlib
import io
import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PUBLISHED = (
    "published"  # a file of the run's folder: the steps whose checkpoints have got their names
)


class Event(NamedTuple):
    """The ``number``-th time, from 1, that ``what`` is done to ``path`` (below the folder of checkpoints)."""

    what: str
    path: str
    number: int


@dataclass(frozen=True)
class Death:
    """Where and when a training kills itself: ``rank`` does, at ``event`` or ``after_s`` into its loop; never: None."""

    ranks: tuple[int, ...] = (0,)
    event: Event | None = None
    after_s: float | None = None


class Trap:
    """Stands in for everything that changes files in ``folder``. Kills the process before ``event``, or amid a write.

    ``events`` is what has been done so far. torch writes through Python's files as well.
    """

    def __init__(self, folder: Path, event: Event | None) -> None:
        self.folder, self.event = f"{folder}{os.sep}", event
        self.events: list[Event] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._open, self._write = io.open, os.write
        for name in (
            "mkdir",
            "rmdir",
            "unlink",
            "remove",
            "truncate",
            "ftruncate",
            "fsync",
            "fdatasync",
        ):
            setattr(os, name, self._of_one_path(name, getattr(os, name)))
        for name in ("rename", "replace", "link"):
            setattr(os, name, self._of_two_paths(name, getattr(os, name)))
        os.write = self._write_to_descriptor
        builtins.open = io.open = self._open_file

    def meet(
        self, what: str, path: str, tear: Callable[[], object] | None = None, to: str = ""
    ) -> None:
        """Count an event, of a rename by both names; die where it is the one to die at, after ``tear``."""
        if not path.startswith(self.folder) and path != self.folder[:-1]:
            return
        path = path.removeprefix(self.folder[:-1])[1:] or "."
        path += f" -> {to.removeprefix(self.folder)}" if to else ""
        self._counts[what, path] += 1
        event = Event(what, path, self._counts[what, path])
        self.events.append(event)
        if event == self.event:
            if tear is not None:
                tear()
            os.kill(os.getpid(), signal.SIGKILL)

    def _of_one_path(self, name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *given: Any, dir_fd: int | None = None, **named: Any) -> Any:
            self.meet(name, where(path, dir_fd))
            return right(path, *given, **named, **({} if dir_fd is None else {"dir_fd": dir_fd}))

        return wrapped

    def _of_two_paths(self, name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(source: Any, target: Any, **named: Any) -> None:
            self.meet(name, where(source), to=where(target))
            right(source, target, **named)
            if re.fullmatch(r"step-\d{8}", os.path.basename(target)) and where(target).startswith(
                self.folder
            ):
                note(
                    Path(self.folder).parent / PUBLISHED,
                    f"{int(os.path.basename(target)[5:])}\n",
                    self._write,
                )

        return wrapped

    def _write_to_descriptor(self, descriptor: int, data: Any) -> int:
        self.meet(
            "write", where(descriptor), lambda: self._write(descriptor, data[: len(data) // 2])
        )
        return self._write(descriptor, data)

    def _open_file(
        self, file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any
    ) -> Any:
        if not set(mode) & set("wax") or not where(file).startswith(self.folder):
            return self._open(file, mode, buffering, *given, **named)
        self.meet("create", where(file))
        buffered = io.BufferedWriter(_File(file, mode.replace("b", "").replace("t", ""), self))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *given, **named)


class _File(io.FileIO):
    """What lies below the buffer of a file open for writing: its writes are those that reach the system."""

    def __init__(self, file: Any, mode: str, trap: Trap) -> None:
        super().__init__(file, mode)
        self._path, self._trap = where(file), trap

    def write(self, data: Any) -> int:
        self._trap.meet(
            "write", self._path, lambda: super(_File, self).write(data[: len(data) // 2])
        )
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            self._trap.meet("close", self._path)
        super().close()


def where(path: Any, dir_fd: int | None = None) -> str:
    """The whole path of what is named by a path or a descriptor."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    if dir_fd is not None:
        return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
    return os.path.abspath(os.fspath(path))


def note(path: Path, text: str, write: Callable[[int, bytes], int]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write(descriptor, text.encode())
    os.close(descriptor)


def die_after(seconds: float) -> Callable[[], None]:
    """Have this process killed from outside; what is returned calls that off."""
    me = os.getpid()
    killer = os.fork()
    if not killer:
        time.sleep(seconds)
        if os.getppid() == me:
            os.kill(me, signal.SIGKILL)
        os._exit(0)

    def call_off() -> None:
        os.kill(killer, signal.SIGKILL)
        os.waitpid(killer, 0)

    return call_off


@dataclass(frozen=True)
class Outcome:
    """What a rank that lived says: steps done at its start, what its state became, events, seconds in the loop."""

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
    """A task of ``launch.Pool``: a rank of ``composer3d train``, in ``folder``, up to its end or its death."""
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
    mine = death if death is not None and rank in death.ranks else None
    trap = Trap(folder / "run" / "checkpoints", mine.event if mine else None)
    with pool_world() as device:
        resolved = load(
            recipe, [*sets, f"run.out_dir={folder}"], world_size=int(os.environ["WORLD_SIZE"])
        )
        run = build(resolved.recipe, device, resolved.to_toml())
        resumed, begin = run.step, time.monotonic()
        call_off = die_after(mine.after_s) if mine and mine.after_s is not None else None
        train(run)
        loop_s = time.monotonic() - begin
        if call_off is not None:
            call_off()
        return Outcome(resumed, digest(run), tuple(trap.events), loop_s)


def digest(run: Any) -> str:
    """Of this rank's part of every parameter and of its optimizer's state."""
    from composer3d.parallel.init import local_part

    out = hashlib.sha256()
    for name, parameter in sorted(run.stages.named_parameters()):
        for key, tensor in (("", parameter), *sorted(run.optimizer.state[parameter].items())):
            out.update(
                f"{name} {key}".encode() + local_part(tensor)[0].contiguous().numpy().tobytes()
            )
    return out.hexdigest()
