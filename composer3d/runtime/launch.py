"""Starting processes: the ranks of a training on this machine, and a pool of workers for proofs and tests.

All are forked by one ``starter``, which has torch imported already, so that a node pays for that import once. They meet
through a file without a name, and listen on the loopback interface alone. This module imports torch nowhere: the
starter imports it at the same time as whoever waits for it.
"""

import atexit
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from composer3d.runtime import starter
from composer3d.spec.errors import UserError

SHUTDOWN_S = 120.0  # how long ranks may take to end their step and save, after a signal
AGAIN_S = 5.0  # a signal that comes this much later than the first one insists
Task = (
    Callable[..., Any] | str
)  # or its name, ``module:function``, so that what it imports is not imported here
_PRELOAD = "composer3d.training.loop"  # all slow imports of a rank


class _Starter:
    """The owner's side of the starter: one for this process, made when it is first needed. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def ensure_running(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            os.environ.setdefault(
                "OMP_NUM_THREADS", "1"
            )  # read when torch is loaded, by whatever the starter forks
            self._close()
            ours, theirs = socket.socketpair()
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from composer3d.runtime.starter import serve; "
                f"serve({theirs.fileno()}, {_PRELOAD!r})"
            )
            command = [sys.executable, "-c", code]
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            self._socket = ours
            atexit.register(self._close)

    def _close(self) -> None:
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.kill()  # it may be in the import still; whoever used it has cleaned up
            self._process.wait()
        self._process = self._socket = None
        atexit.unregister(self._close)

    def request(self, letter: bytes, text: str = "", descriptors: tuple[int, ...] = ()) -> None:
        path = os.fsencode(text)
        message = starter.REQUEST.pack(letter, len(path)) + path
        self.ensure_running()
        try:
            self._send(message, descriptors)
        except ConnectionError:  # it was killed just now
            assert self._process is not None
            self._process.wait()
            self.ensure_running()
            self._send(message, descriptors)

    def _send(self, message: bytes, descriptors: tuple[int, ...]) -> None:
        with self._lock:
            assert self._socket is not None
            socket.send_fds(self._socket, [message], descriptors)


_starter = _Starter()


def warm_up() -> None:
    """Start the starter, which begins to import torch in the background."""
    _starter.ensure_running()


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a private folder, removed at the end of the context or of this process, even where that is killed."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        _starter.request(starter.KEEP, name)
        yield Path(name)


@contextmanager
def _world(size: int) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """What the processes of one world share: their environment, and the descriptor of their store's file.

    The file is in memory and has no name: nothing is left of it when the last process ends, and no other user can open
    it. Where the system has no such files, it is in a private folder.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
    # gloo and NCCL listen on the interface of the host's name, for all hosts, unless they are told another one.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment[name] = os.environ.get(name, loopback)
    if hasattr(os, "memfd_create"):
        store = os.memfd_create("composer3d-store")
        try:
            yield environment, (store,)
        finally:
            os.close(store)
    else:
        with temporary_folder("composer3d-store-") as folder:
            yield environment | {starter.STORE: str(folder / "store")}, ()


@dataclass
class _Worker:
    """A forked process: the pipe for its task and its answer, and the one that says how it ended."""

    rank: int
    pipe: Connection
    end: Connection
    pid: int = 0
    exit_code: int | None = None

    @classmethod
    def start(cls, rank: int, task: bytes, store: tuple[int, ...]) -> "_Worker":
        ours, theirs = Pipe()
        read, write = os.pipe()
        with theirs:
            _starter.request(starter.FORK, "", (theirs.fileno(), write, *store))
        os.close(write)
        worker = cls(rank, ours, Connection(read, writable=False))
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead already: its end says so
            ours.send_bytes(pickle.dumps(starter.preparation()))
            ours.send_bytes(task)
        return worker

    def wait_for_start(self) -> None:
        self.pid = self._read()

    def ended(self) -> bool:
        """Whether the process has ended; ``exit_code`` says how."""
        if self.exit_code is None and self.end.poll():
            self.exit_code = self._read()
        return self.exit_code is not None

    def _read(self) -> int:
        told = os.read(self.end.fileno(), starter.STATUS.size)
        # Nothing: the starter was killed, and the kernel kills with it what it has forked.
        return int(starter.STATUS.unpack(told)[0]) if told else -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        # A signal handler calls this: it must not read the pipe, which the interrupted code may be about to read.
        if self.pid > 0 and self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def answer(self) -> tuple[bool, Any] | None:
        """What the process sent, or None where it died before that, or halfway."""
        try:
            return pickle.loads(self.pipe.recv_bytes()) if self.pipe.poll() else None
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        self.pipe.close()
        self.send_signal(signal.SIGKILL)  # one that has answered has nothing left to do
        while not self.ended():
            self.end.poll(None)
        self.end.close()


def _start(
    world: ExitStack,
    task: Task,
    arguments: Mapping[str, Any],
    size: int,
    environment: Mapping[str, str],
) -> list[_Worker]:
    """The processes of a new world. All have ended when ``world`` is closed."""
    shared, store = world.enter_context(_world(size))
    workers = []
    for rank in range(size):
        own = {**shared, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        workers.append(_Worker.start(rank, pickle.dumps((task, dict(arguments), own)), store))
        world.callback(workers[-1].close)
    for worker in workers:
        worker.wait_for_start()
    return workers


@dataclass
class Ended:
    """How the ranks of a job ended."""

    status: int = 0  # what the command exits with
    died: dict[int, int] = field(
        default_factory=dict
    )  # rank: the signal that ended it, or minus its exit status
    stuck: list[int] = field(
        default_factory=list
    )  # ranks that went on when another had failed, and were killed


def run_ranks(task: Task, arguments: Mapping[str, Any], *, processes: int) -> Ended:
    """Run ``task(**arguments)``, which returns an exit status, as every rank of a job on this machine.

    The ranks see what torchrun would set: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and GROUP_RANK. SIGINT and
    SIGTERM are passed on to them, and they have ``SHUTDOWN_S`` to end their step and save. Where one fails, the others
    get a moment, for a better reason or to end by themselves, and are killed then.

    The status is 0, that of the first rank that failed with one, 1 where a rank died or raised (its traceback is
    printed), and 128 + N after signal N.
    """
    out, answers, deadline = Ended(), {}, float("inf")
    with ExitStack() as world, _forwarding() as stop:
        workers = _start(world, task, arguments, processes, {})
        stop.workers = workers
        running = list(workers)
        while running:
            now = time.monotonic()
            if stop.number and not stop.told:  # it came while they were being started
                stop.tell(stop.number)
            if stop.number:
                deadline = min(deadline, stop.since + SHUTDOWN_S)
            if now >= deadline:
                out.stuck = [worker.rank for worker in running]
                break
            wait([worker.end for worker in running], timeout=min(0.5, deadline - now))
            for worker in [each for each in running if each.ended()]:
                running.remove(worker)
                answers[worker.rank] = answer = worker.answer()
                deadline = min(deadline, now + _patience(worker, answer))
    first: list[str] = []
    for worker in workers:
        answer = answers.get(worker.rank)
        if worker.rank in out.stuck:
            continue
        if answer is None:
            if not stop.number or worker.exit_code not in (-stop.number, 128 + stop.number):
                out.died[worker.rank] = -(worker.exit_code or 0)
        elif not answer[0]:
            first.append(str(answer[1]).strip())
    statuses = [answer[1] for answer in answers.values() if answer and answer[0] and answer[1]]
    # A save that failed on the way out must not look like a run that was stopped and saved.
    stopped = all(status == 128 + stop.number for status in statuses) and not out.died
    if (
        stop.number
        and (statuses or out.stuck or None in answers.values())
        and stopped
        and not first
    ):
        out.status = 128 + stop.number
    elif first:
        print(first[0], file=sys.stderr)
        out.status = 1
    else:
        out.status = 1 if out.died else statuses[0] if statuses else 0
    return out


def _patience(worker: _Worker, answer: tuple[bool, Any] | None) -> float:
    """How many seconds the other ranks may go on after this one has ended."""
    if answer is None and worker.exit_code == -signal.SIGABRT:
        return 30.0  # NCCL's watchdogs end the ranks that waited in vain, each when its own time is over
    if answer is None:
        return 0.5  # others may die of the same
    fine, status = answer
    if not fine:
        return 1.0
    if status == 0:
        return float("inf")
    return (
        SHUTDOWN_S if status > 128 else 5.0
    )  # all were told to stop and save; or all see what is wrong


class _Stop:
    """The signal that asks this process to stop, and the ranks that are told of it."""

    def __init__(self) -> None:
        self.number, self.since, self.told = 0, 0.0, False
        self.workers: list[_Worker] = []

    def receive(self, number: int, frame: Any) -> None:
        if not self.number:
            self.number, self.since = number, time.monotonic()
        elif time.monotonic() - self.since > AGAIN_S:
            self.since = float("-inf")  # it insists: the time for the end is over
        if self.workers:
            self.tell(number)

    def tell(self, number: int) -> None:
        self.told = True
        for worker in self.workers:
            worker.send_signal(number)


@contextmanager
def _forwarding() -> Iterator[_Stop]:
    stop = _Stop()
    before = {
        number: signal.signal(number, stop.receive) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class WorkerError(Exception):
    """A task failed on some ranks. ``failures`` maps the rank to its error or its traceback as text."""

    def __init__(self, failures: Mapping[int, UserError | str]) -> None:
        self.failures = dict(failures)
        super().__init__("\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items()))

    @property
    def user_error(self) -> UserError | None:
        """The error a user can act on, where that is what the lowest failing rank met."""
        first = self.failures[min(self.failures)]
        return first if isinstance(first, UserError) else None


class Pool(ExitStack):
    """Runs tasks one after another, each as the ranks of a fresh world of freshly forked processes.

    A task is a function at the top of a module, called as ``function(**arguments)`` on ranks 0 to world_size - 1, with
    RANK, WORLD_SIZE and the path of a store's file in the environment (see ``dist.pool_world``). Processes are not used
    again: DTensor caches meshes by their shape, and would send the next world's tensors over the groups of the last.
    """

    def __init__(self) -> None:
        super().__init__()
        warm_up()

    def run(
        self, task: Task, arguments: Mapping[str, Any], *, world_size: int, limit_s: float = 120.0
    ) -> list[Any]:
        """Run a task and return what each rank returned, by rank.

        Raises WorkerError where a rank raised, died, or had not answered after ``limit_s``. All have ended by then.
        """
        with ExitStack() as world:
            return _collect(
                [worker.pipe for worker in _start(world, task, arguments, world_size, {})], limit_s
            )


def _collect(pipes: list[Connection], limit_s: float) -> list[Any]:
    """Every rank's answer. Raises WorkerError, without ranks that only lost their peers where another says why."""
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    answers: dict[int, Any] = {}
    failures: dict[int, UserError | str] = {}
    until = time.monotonic() + limit_s
    while waiting:
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            failures |= dict.fromkeys(waiting.values(), f"no answer after {limit_s:.0f} s")
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                done, answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # before it answered, or halfway
                done, answer = False, "the process died"
            (answers if done else failures)[rank] = answer
        if failures:
            # The other ranks may wait in a collective for the one that failed: give them a moment to notice.
            until = min(until, time.monotonic() + 5.0)
    if failures:
        real = {
            rank: why
            for rank, why in failures.items()
            if isinstance(why, UserError) or not NOISE.search(why)
        }
        raise WorkerError(real or failures)
    return [answers[rank] for rank in sorted(answers)]


# What a rank says that only lost its peers, in words of gloo, NCCL and the stores.
NOISE = re.compile(
    "Connection (closed|reset) by peer|no answer after|Timed out waiting|Read timeout"
)
