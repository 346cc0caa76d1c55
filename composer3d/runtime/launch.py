"""Processes: the ranks of a training on this machine, and a pool of workers for proofs and tests.

All of them are forked by one ``starter``, which has already imported torch, so a node pays for
that import once. They meet through a file without a name, and listen on the loopback interface
only.

This module does not import torch: the starter imports it while this process goes on.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.runtime import starter
from composer3d.runtime.starter import Answer, Call
from composer3d.spec.errors import UserError

# Seconds that ranks may take to finish their step and save, after a signal.
SHUTDOWN_S = 120.0

# A signal that arrives this many seconds after the first one ends the ranks at once.
_INSIST_S = 5.0

# A function at the top of a module, or its name as ``module:function``. With a name, this process
# does not import what the function's module imports.
Task = Callable[..., Any] | str

# Importing this module runs all slow imports of a rank.
_PRELOAD = "composer3d.training.loop"

# What a rank reports if it only lost its peers, in the words of gloo, NCCL and the stores.
_LOST_PEER = re.compile(
    "Connection (closed|reset) by peer|no answer after|Timed out waiting|Read timeout"
)


class _Starter:
    """The owner's side of the starter. Threads may share it.

    There is one in each process. It starts its process when it is first needed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def ensure_running(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return

            # Torch reads it when it is imported; the starter and all its processes inherit it.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            self._close()
            ours, theirs = socket.socketpair()
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                "from composer3d.runtime.starter import serve; "
                f"serve({theirs.fileno()}, {_PRELOAD!r})"
            )
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._socket = ours
            atexit.register(self._close)

    def _close(self) -> None:
        if self._process is not None and self._socket is not None:
            self._socket.close()
            # It may still be importing. Its users have already ended their processes.
            self._process.kill()
            self._process.wait()
        self._process = None
        self._socket = None
        atexit.unregister(self._close)

    def request(self, kind: bytes, path: str = "", descriptors: Sequence[int] = ()) -> None:
        path_bytes = os.fsencode(path)
        message = starter.REQUEST.pack(kind, len(path_bytes)) + path_bytes
        self.ensure_running()
        try:
            self._send(message, descriptors)
        except ConnectionError:
            # The starter was killed a moment ago: start another one.
            assert self._process is not None
            self._process.wait()
            self.ensure_running()
            self._send(message, descriptors)

    def _send(self, message: bytes, descriptors: Sequence[int]) -> None:
        with self._lock:
            assert self._socket is not None
            socket.send_fds(self._socket, [message], descriptors)


_starter = _Starter()


def warm_up() -> None:
    """Start the starter, which begins to import torch in the background."""
    _starter.ensure_running()


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a private folder, removed at the end of the context or when this process is killed."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        _starter.request(starter.REMOVE_AT_END, name)
        yield Path(name)


class _World(NamedTuple):
    """The things that all processes of one world share.

    Attributes:
        environment: the variables that are the same in all of them.
        store: the descriptor of the file of their store; empty if ``environment`` has its path.
    """

    environment: dict[str, str]
    store: tuple[int, ...]


@contextmanager
def _open_world(size: int) -> Iterator[_World]:
    """Make the environment and the store of a world of ``size`` processes.

    The store's file is in memory and has no name: no other user can open it, and nothing is left
    of it when the last process ends. On a system without such files, it is in a private folder.
    """
    environment = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}

    # By default gloo and NCCL listen on the interface of the host's name, where all hosts can
    # connect.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment[name] = os.environ.get(name, loopback)

    if hasattr(os, "memfd_create"):
        store = os.memfd_create("composer3d-store")
        try:
            yield _World(environment, (store,))
        finally:
            os.close(store)
    else:
        with temporary_folder("composer3d-store-") as folder:
            environment[starter.STORE_VARIABLE] = str(folder / "store")
            yield _World(environment, ())


@dataclass
class _Worker:
    """A forked process.

    Attributes:
        rank: in its world.
        call_pipe: carries the call to the process and the answer back.
        status_pipe: carries the process id, and later the exit code.
        pid: 0 before the process has started.
        exit_code: None before the process has ended; minus the signal's number after a signal.
    """

    rank: int
    call_pipe: Connection
    status_pipe: Connection
    pid: int = 0
    exit_code: int | None = None

    @classmethod
    def start(cls, rank: int, call: bytes, store: tuple[int, ...]) -> "_Worker":
        ours, theirs = Pipe()
        status_read, status_write = os.pipe()
        with theirs:
            _starter.request(starter.FORK, "", (theirs.fileno(), status_write, *store))
        os.close(status_write)
        worker = cls(rank, ours, Connection(status_read, writable=False))

        # If the process is dead already, its status pipe reports that.
        with suppress(BrokenPipeError, ConnectionResetError):
            ours.send_bytes(pickle.dumps(starter.preparation_data()))
            ours.send_bytes(call)
        return worker

    def wait_for_start(self) -> None:
        self.pid = self._read_status()

    def has_ended(self) -> bool:
        """Whether the process has ended; sets ``exit_code`` if so."""
        if self.exit_code is None and self.status_pipe.poll():
            self.exit_code = self._read_status()
        return self.exit_code is not None

    def _read_status(self) -> int:
        content = os.read(self.status_pipe.fileno(), starter.STATUS.size)
        if not content:
            # The starter was killed, and the kernel killed its processes with it.
            return -signal.SIGKILL
        (status,) = starter.STATUS.unpack(content)
        return int(status)

    def send_signal(self, number: int) -> None:
        # A signal handler calls this. It must not read the pipe: the interrupted code may be
        # reading it.
        if self.pid > 0 and self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def answer(self) -> Answer | None:
        """The answer of the process; None if it died before it had sent all of it."""
        try:
            return pickle.loads(self.call_pipe.recv_bytes()) if self.call_pipe.poll() else None
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        self.call_pipe.close()
        # A process that has answered has nothing left to do.
        self.send_signal(signal.SIGKILL)
        while not self.has_ended():
            self.status_pipe.poll(None)
        self.status_pipe.close()


def _start_workers(
    cleanup: ExitStack, task: Task, arguments: Mapping[str, Any], size: int
) -> list[_Worker]:
    """Start the processes of a new world. When ``cleanup`` is closed, all of them have ended."""
    world = cleanup.enter_context(_open_world(size))
    workers = []
    for rank in range(size):
        environment = {**world.environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        call = pickle.dumps(Call(task, dict(arguments), environment))
        worker = _Worker.start(rank, call, world.store)
        cleanup.callback(worker.close)
        workers.append(worker)
    for worker in workers:
        worker.wait_for_start()
    return workers


@dataclass
class JobResult:
    """How the ranks of a job ended.

    Attributes:
        status: the exit status of the command.
        died: rank -> the signal that ended it, or minus its exit status.
        stuck: ranks that went on after another one had failed, and were killed.
    """

    status: int = 0
    died: dict[int, int] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)


def run_ranks(task: Task, arguments: Mapping[str, Any], *, processes: int) -> JobResult:
    """Run ``task(**arguments)`` as every rank of a job on this machine. It returns an exit status.

    The ranks see the variables of torchrun: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and
    GROUP_RANK. SIGINT and SIGTERM are forwarded to them. They then have ``SHUTDOWN_S`` to finish
    their step and save. If a rank fails, the others get a moment to report a better reason or to
    end by themselves. After that they are killed.

    Returns:
        The result, with one of these statuses: 0; the status of the first rank that failed with
        one; 1 if a rank died, or raised an error (its traceback is printed); 128 + N after signal
        N.
    """
    answers: dict[int, Answer | None] = {}  # of the ranks that have ended, in that order
    stuck: list[int] = []
    deadline_s = float("inf")
    with ExitStack() as cleanup, _forward_signals() as stop:
        workers = _start_workers(cleanup, task, arguments, processes)
        stop.workers = workers
        running = list(workers)
        while running:
            now_s = time.monotonic()
            if stop.number and not stop.is_forwarded:
                # The signal arrived before all ranks were started.
                stop.forward(stop.number)
            if stop.number:
                deadline_s = min(deadline_s, stop.since_s + SHUTDOWN_S)
            if now_s >= deadline_s:
                stuck = [worker.rank for worker in running]
                break

            status_pipes = [worker.status_pipe for worker in running]
            wait(status_pipes, timeout=min(0.5, deadline_s - now_s))
            for worker in [worker for worker in running if worker.has_ended()]:
                running.remove(worker)
                answer = worker.answer()
                answers[worker.rank] = answer
                deadline_s = min(deadline_s, now_s + _patience_s(worker, answer))
    return _job_result(workers, answers, stuck, stop.number)


def _patience_s(worker: _Worker, answer: Answer | None) -> float:
    """The number of seconds that the other ranks may go on after ``worker`` has ended."""
    if answer is None:
        if worker.exit_code == -signal.SIGABRT:
            # NCCL's watchdog aborts each rank that waited too long, at a time of its own.
            return 30.0
        # The others may die of the same cause.
        return 0.5
    if not answer.succeeded:
        return 1.0
    if answer.value == 0:
        return float("inf")
    if answer.value > 128:
        # A signal: all ranks stop and save.
        return SHUTDOWN_S
    # An error that all ranks see and report.
    return 5.0


def _job_result(
    workers: list[_Worker],
    answers: Mapping[int, Answer | None],
    stuck: list[int],
    stop_signal: int,
) -> JobResult:
    """Combine how the ranks ended. Print the traceback of the lowest rank that raised an error.

    Args:
        answers: of the ranks that ended, in the order of their ends.
        stuck: the other ranks, which were killed.
        stop_signal: the signal that was forwarded to the ranks; 0 if there was none.
    """
    died: dict[int, int] = {}
    tracebacks: list[str] = []
    for worker in workers:
        if worker.rank in stuck:
            continue
        answer = answers[worker.rank]
        if answer is None:
            was_asked_to = stop_signal and worker.exit_code in (-stop_signal, 128 + stop_signal)
            if not was_asked_to:
                died[worker.rank] = -(worker.exit_code or 0)
        elif not answer.succeeded:
            tracebacks.append(str(answer.value).strip())

    statuses = [
        answer.value
        for answer in answers.values()
        if answer is not None and answer.succeeded and answer.value
    ]
    was_stopped = stop_signal and (statuses or stuck or None in answers.values())
    # A save that failed during the stop must not look like a run that was stopped and saved.
    has_other_failure = died or any(status != 128 + stop_signal for status in statuses)

    if tracebacks:
        print(tracebacks[0], file=sys.stderr)
        status = 1
    elif was_stopped and not has_other_failure:
        status = 128 + stop_signal
    elif died:
        status = 1
    else:
        status = statuses[0] if statuses else 0
    return JobResult(status, died, stuck)


class _StopRequest:
    """The signal that asks this process to stop, and the ranks to which it is forwarded."""

    def __init__(self) -> None:
        self.number = 0
        self.since_s = 0.0
        self.is_forwarded = False
        self.workers: list[_Worker] = []

    def receive(self, number: int, frame: Any) -> None:
        if not self.number:
            self.number = number
            self.since_s = time.monotonic()
        elif time.monotonic() - self.since_s > _INSIST_S:
            # The user insists: the time for the shutdown is over.
            self.since_s = float("-inf")
        if self.workers:
            self.forward(number)

    def forward(self, number: int) -> None:
        self.is_forwarded = True
        for worker in self.workers:
            worker.send_signal(number)


@contextmanager
def _forward_signals() -> Iterator[_StopRequest]:
    """Forward SIGINT and SIGTERM to the workers of the request that it yields."""
    stop = _StopRequest()
    previous_handlers = {
        number: signal.signal(number, stop.receive) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class WorkerError(Exception):
    """A task failed on some ranks.

    Attributes:
        failures: rank -> its UserError, or the traceback of any other error as text.
    """

    def __init__(self, failures: Mapping[int, UserError | str]) -> None:
        self.failures = dict(failures)
        super().__init__("\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items()))

    @property
    def user_error(self) -> UserError | None:
        """The error of the lowest failing rank, if it is one that a user can act on."""
        first = self.failures[min(self.failures)]
        return first if isinstance(first, UserError) else None


class Pool(ExitStack):
    """Runs tasks one after another, each as the ranks of a new world of newly forked processes.

    A task is a function at the top of a module. It is called as ``function(**arguments)`` on
    ranks 0 to world_size - 1, with RANK, WORLD_SIZE and the path of a store's file in the
    environment (see ``process_group.pool_world``).

    A process runs one task only: DTensor caches meshes by their shape, and would send the next
    world's tensors over the groups of the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        warm_up()

    def run(
        self, task: Task, arguments: Mapping[str, Any], *, world_size: int, limit_s: float = 120.0
    ) -> list[Any]:
        """Run a task and return what each rank returned, by rank.

        By then all processes have ended, also after an error. Raises WorkerError if a rank raised
        an error, died, or had not answered after ``limit_s``.
        """
        with ExitStack() as cleanup:
            workers = _start_workers(cleanup, task, arguments, world_size)
            return _collect([worker.call_pipe for worker in workers], limit_s)


def _collect(pipes: list[Connection], limit_s: float) -> list[Any]:
    """Return the values of all ranks' answers, by rank.

    Raises WorkerError if a rank fails. The error leaves out ranks that only lost their peers,
    unless no rank gives another reason.
    """
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    values: dict[int, Any] = {}
    failures: dict[int, UserError | str] = {}
    deadline_s = time.monotonic() + limit_s
    while waiting:
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                failures[rank] = f"no answer after {limit_s:.0f} s"
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                answer: Answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                # Before it had sent all of its answer.
                answer = Answer(False, "the process died")
            if answer.succeeded:
                values[rank] = answer.value
            else:
                failures[rank] = answer.value
        if failures:
            # The others may wait in a collective for the rank that failed: give them time to
            # notice.
            deadline_s = min(deadline_s, time.monotonic() + 5.0)

    if failures:
        causes = {
            rank: failure
            for rank, failure in failures.items()
            if isinstance(failure, UserError) or not _LOST_PEER.search(failure)
        }
        raise WorkerError(causes or failures)
    return [values[rank] for rank in sorted(values)]
