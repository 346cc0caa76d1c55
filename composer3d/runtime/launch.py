"""Start processes on this machine: the ranks of a training, and workers for proofs and tests.

One ``starter`` process forks all of them. It has already imported torch, so a node pays for that
import once. The ranks of a world meet through a file store that has no name. They listen on the
loopback interface only, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names another one.

This module does not import torch: the starter imports it while this process goes on.
"""

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.facts.errors import UserError
from composer3d.facts.interrupts import INSIST_S, STOP_SIGNALS, signals_to_catch
from composer3d.facts.text import printable_lines
from composer3d.runtime import starter
from composer3d.runtime.console import say
from composer3d.runtime.ends import DIED, is_no_answer, no_answer
from composer3d.runtime.environment import START_VARIABLE, STORE_VARIABLE
from composer3d.runtime.lost_words import tells_lost_peer
from composer3d.runtime.shortage import no_memory
from composer3d.runtime.starter import Answer, Call

# Seconds after a signal in which ranks must end that have nothing to save. Others have as long to
# end after the first rank that has saved. If a save takes longer than this, a line says so.
SHUTDOWN_S = 120.0

# Seconds that the other ranks may take to report what they did (``peers``), after a rank has ended.
# In most cases they need about one.
REPORT_S = 10.0

# Seconds that rank 0 may take to print an error that all ranks have, and to close what it alone
# has: each service of metrics takes at most 25, and the copy of the run's folder as many.
CLOSE_S = 120.0

# Seconds between two looks for a stop signal, while the starter imports torch.
_STOP_CHECK_S = 0.2

# A function at the top of a module, or its name as ``module:function``. With a name, this process
# does not import what the function's module imports, and no process runs the main module of this
# one.
Task = Callable[..., Any] | str

# What a rank returns to ``run_ranks`` after a LostPeersError. The job's exit status is then 1.
LOST_PEERS = 64

# What a rank returns to ``run_ranks`` after it has lacked memory. The job's exit status is then 1.
NO_MEMORY = 65

# Importing this module runs all slow imports of a rank.
_PRELOAD = "composer3d.training.loop"


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Starter:
    """The connection from this process, the owner, to its starter. Threads may share it.

    Each process has one connection. The starter is launched when it is first needed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def ensure_running(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return

            # Torch reads this variable at import. The starter and the processes that it forks
            # inherit it.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            self._close()
            ours, theirs = socket.socketpair()
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                "from composer3d.runtime.starter import serve; "
                f"serve({theirs.fileno()}, {_PRELOAD!r})"
            )
            # A Ctrl-C reaches the starter too. The starter inherits the mask, and takes it off when
            # it ignores stop signals, so that none ends it with a traceback while it imports.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", code],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._socket = ours
            atexit.register(self._close)

    def abandon(self) -> None:
        """End the starter at once, although it may still import torch, and all that it has forked.

        The next request launches another one.
        """
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._process is not None and self._socket is not None:
            self._socket.close()
            # The starter may still be importing, and would not notice the closed socket. Its users
            # have already ended their workers.
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
    """Launch the starter now, so that it imports torch while this process goes on."""
    _starter.ensure_running()


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a private folder, and remove it when the context ends or this process is killed."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        _starter.request(starter.REMOVE_AT_END, name)
        yield Path(name)


@contextmanager
def unnamed_file(name: str) -> Iterator[Path]:
    """Create an empty file that the ranks of this machine can open by the path that is yielded.

    The file is in memory and has no name, so that nothing remains even if all processes are killed.
    On a system without ``memfd_create``, it is in a private folder.
    """
    if not hasattr(os, "memfd_create"):
        with temporary_folder(f"composer3d-{name}-") as folder:
            path = folder / name
            path.touch()
            yield path
        return
    descriptor = os.memfd_create(name)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


class _World(NamedTuple):
    """The environment and the store that all processes of one world share.

    Attributes:
        environment: the environment variables that are the same in all processes.
        store: one descriptor, that of the store's file; empty if ``environment`` has its path.
    """

    environment: dict[str, str]
    store: tuple[int, ...]


@contextmanager
def _open_world(size: int) -> Iterator[_World]:
    """Create the environment and the store of a world of ``size`` processes.

    The store's file is in memory and has no name: no other user can open it, and it disappears
    with the last process. On a system without ``memfd_create``, the file is in a private folder.
    """
    environment = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        START_VARIABLE: f"{time.monotonic():.3f}",
    }

    # By default gloo and NCCL listen on the interface that the host's name resolves to, which
    # other hosts can reach.
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
            environment[STORE_VARIABLE] = str(folder / "store")
            yield _World(environment, ())


@dataclass
class _Worker:
    """A forked process.

    Attributes:
        rank: the rank of the process in its world.
        call_pipe: carries the call to the process and the answer back.
        status_pipe: carries the process id, and later the exit code.
        pid: the process id; 0 before the process has started.
        exit_code: None before the process has ended. If a signal ended the process, this is minus
            the number of the signal.
    """

    rank: int
    call_pipe: Connection
    status_pipe: Connection
    pid: int = 0
    exit_code: int | None = None

    @classmethod
    def start(cls, rank: int, preparation: bytes, call: bytes, store: tuple[int, ...]) -> "_Worker":
        ours, theirs = Pipe()
        status_read, status_write = os.pipe()
        with theirs:
            _starter.request(starter.FORK, "", (theirs.fileno(), status_write, *store))
        os.close(status_write)
        worker = cls(rank, ours, Connection(status_read, writable=False))

        # If the process has died already, its status pipe reports the death.
        with suppress(BrokenPipeError, ConnectionResetError):
            ours.send_bytes(preparation)
            ours.send_bytes(call)
        return worker

    def wait_for_start(self) -> None:
        """Wait until the process has its id. Raises NoMemoryError if it could not be forked."""
        status = self._read_status()
        if status < 0 and -status != signal.SIGKILL:
            reason = OSError(-status, os.strerror(-status))
            raise no_memory(f"the process of rank {self.rank} could not be started", reason)
        self.pid = max(0, status)

    def has_ended(self) -> bool:
        """Return whether the process has ended, and set ``exit_code`` if it has."""
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
        # A signal handler calls this method. So it must not read the status pipe, which the
        # interrupted code may be reading.
        if self.pid > 0 and self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def answer(self) -> Answer | None:
        """Return the answer of the process, or None if it died before it sent a whole answer."""
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


class _StoppedEarlyError(Exception):
    """A stop signal came before the starter could fork."""


def _start_workers(
    cleanup: ExitStack,
    task: Task,
    arguments: Mapping[str, Any],
    size: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[_Worker]:
    """Start the processes of a new world. Closing ``cleanup`` ends all of them.

    Raises _StoppedEarlyError if ``is_stopped`` before the starter has imported torch.
    """
    world = cleanup.enter_context(_open_world(size))
    with_main = not isinstance(task, str)
    preparation = pickle.dumps(starter.preparation_data(with_main=with_main))
    workers = []
    for rank in range(size):
        environment = {**world.environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        call = pickle.dumps(Call(task, dict(arguments), environment))
        worker = _Worker.start(rank, preparation, call, world.store)
        cleanup.callback(worker.close)
        workers.append(worker)
    # The first process is forked when the starter has imported torch, and the others at once.
    while not workers[0].status_pipe.poll(_STOP_CHECK_S):
        if is_stopped():
            _starter.abandon()
            raise _StoppedEarlyError
    for worker in workers:
        worker.wait_for_start()
    return workers


@dataclass
class JobResult:
    """How the ranks of a job ended.

    Attributes:
        status: the exit status of the command.
        died: the ranks that died without an answer, unless the forwarded signal ended them. The
            value is the signal that ended the rank, or minus its exit status.
        stuck: the ranks that were killed because they still ran after a failure or a signal.
        raised: whether a rank raised an error that is no UserError. An error of a lost connection
            does not count if a rank has died.
        lost_peers: whether every rank that failed says that a collective failed: a rank hung and
            went on too late, or the network was gone for a while.
        left: if a rank says that a collective failed, the ranks that ended otherwise: with an exit
            status, or by the forwarded signal. The values are those of ``died``.
        lacked_memory: the ranks that have ended because memory was refused. They have said so.
        stopped_by: the signal that was forwarded to the ranks; 0 if there was none.
        was_insisted: whether Ctrl-C came again, so that ranks were killed at once.
        patience_s: how many seconds after the end of another rank the ``stuck`` ones were killed;
            infinite if the time after the signal was over.
        was_cut_off: whether the time after the signal was over before any rank had saved.
        traceback: the traceback of the lowest rank that ``raised``, which was printed; "" if there
            is none.
        gave_reason: whether a rank ended with a UserError before any rank died or raised another
            error. The next start would end in the same way.
        reason: the lines of that error, if ``run_ranks`` has printed them in place of rank 0.
    """

    status: int = 0
    died: dict[int, int] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)
    raised: bool = False
    lost_peers: bool = False
    left: dict[int, int] = field(default_factory=dict)
    lacked_memory: list[int] = field(default_factory=list)
    stopped_by: int = 0
    was_insisted: bool = False
    patience_s: float = float("inf")
    was_cut_off: bool = False
    traceback: str = ""
    gave_reason: bool = False
    reason: tuple[str, ...] = ()

    @property
    def is_lost(self) -> bool:
        """Whether the same job may do better if it is started again, and nobody has stopped it."""
        was_lost = self.died or self.stuck or self.raised or self.lost_peers or self.lacked_memory
        is_final = self.gave_reason or self.stopped_by
        return self.status == 1 and bool(was_lost) and not is_final


def run_ranks(
    task: Task,
    arguments: Mapping[str, Any],
    *,
    processes: int,
    save_limit_s: float | None = None,
) -> JobResult:
    """Run ``task(**arguments)`` on every rank of a job on this machine.

    The environment of a rank has the variables of torchrun: RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE and GROUP_RANK. SIGINT, SIGTERM, SIGUSR1 and SIGHUP are forwarded to the ranks,
    which then have ``save_limit_s`` to finish their step and save. If a rank fails, the others get
    a short time (``_patience_s``) to report a better reason or to end by themselves. Then they are
    killed. A rank that leaves its UserError to rank 0 raises it: if rank 0 ends without a reason of
    its own, the error is printed here.

    Must be called from the main thread, because it installs signal handlers.

    Args:
        task: returns the exit status of its rank, 0 for success.
        arguments: the keyword arguments of ``task``, the same on every rank.
        processes: the number of ranks.
        save_limit_s: the seconds that ranks may take after a signal until the first of them has
            saved; None: they have nothing to save, and get ``SHUTDOWN_S``.

    Returns:
        The result. Its status is 0 if all ranks succeeded, and 128 + N if signal N stopped them. It
        is 1 if they were killed before they had saved.
        Otherwise it is the status of the first UserError, or 1 if a rank died or raised another
        error before. The traceback of the lowest rank with another error is printed.
    """
    # The answers of the ranks that have ended, in the order of their ends.
    answers: dict[int, Answer | None] = {}
    stuck: list[int] = []
    # When the ranks that still run are killed, and how long after the end of another one that is:
    # infinite if the time after a signal is over then.
    deadline_s = patience_s = float("inf")
    limit_s = SHUTDOWN_S if save_limit_s is None else save_limit_s
    has_told = False
    with ExitStack() as cleanup, _forward_signals() as stop:
        try:
            workers = _start_workers(
                cleanup, task, arguments, processes, is_stopped=lambda: stop.number > 0
            )
        except _StoppedEarlyError:
            return JobResult(128 + stop.number, stopped_by=stop.number)
        stop.workers = workers
        running = list(workers)
        while running:
            now_s = time.monotonic()
            if stop.number and not stop.is_forwarded:
                # The signal arrived before all ranks were started.
                stop.forward(stop.number)
            if stop.number and stop.since_s + limit_s < deadline_s:
                deadline_s, patience_s = stop.since_s + limit_s, float("inf")
            if now_s >= deadline_s:
                stuck = [worker.rank for worker in running]
                break
            if stop.number and not has_told and now_s >= stop.since_s + SHUTDOWN_S:
                has_told = True
                say([_describe_wait(stop.number, len(running), deadline_s - now_s)])

            status_pipes = [worker.status_pipe for worker in running]
            wait(status_pipes, timeout=min(0.5, deadline_s - now_s))
            for worker in [worker for worker in running if worker.has_ended()]:
                running.remove(worker)
                answer = worker.answer()
                answers[worker.rank] = answer
                further_s = _patience_s(worker, answer)
                if now_s + further_s < deadline_s:
                    deadline_s, patience_s = now_s + further_s, further_s
    has_saves = save_limit_s is not None
    return _job_result(workers, answers, stuck, stop, patience_s, has_saves=has_saves)


def _describe_wait(number: int, n_ranks: int, left_s: float) -> str:
    return (
        f"{n_ranks} ranks still run {SHUTDOWN_S:.0f} s after signal {number}: they finish a step "
        f"or a save, for at most {left_s / 60:.0f} more minutes; Ctrl-C ends them at once"
    )


def _patience_s(worker: _Worker, answer: Answer | None) -> float:
    """Return how many seconds the other ranks may run on after ``worker`` has ended."""
    if answer is None and worker.exit_code == -signal.SIGABRT:
        # NCCL's watchdog aborts the ranks that waited too long, each at a different time.
        return 30.0
    if answer is not None and isinstance(answer.value, UserError):
        return CLOSE_S
    if answer is None or not answer.succeeded:
        return REPORT_S
    if answer.value == 0:
        return float("inf")
    if answer.value > 128:
        # A signal stopped the rank. All ranks have saved when one ends: only closing is left.
        return SHUTDOWN_S
    # The rank has printed its error, or is rank 0, which ends last.
    return 5.0


def _status_of(answer: Answer | None) -> int | None:
    """Return the status with which a rank has ended; None if it died or raised no UserError."""
    if answer is None:
        return None
    if isinstance(answer.value, UserError):
        return answer.value.status
    return int(answer.value) if answer.succeeded else None


def _is_reason(status: int | None) -> bool:
    """Return whether a status is that of a UserError which is no loss of ranks or memory."""
    return status is not None and 0 < status < 128 and status not in (LOST_PEERS, NO_MEMORY)


def _job_result(
    workers: list[_Worker],
    answers: Mapping[int, Answer | None],
    stuck: list[int],
    stop: "_StopRequest",
    patience_s: float,
    *,
    has_saves: bool,
) -> JobResult:
    """Combine how the ranks ended. Print the traceback of the lowest rank that raised an error.

    Args:
        workers: all ranks, by rank.
        answers: the answers of the ranks that ended by themselves, in the order of their ends.
        stuck: the other ranks, which were killed.
        stop: the signals that were forwarded to the ranks.
        patience_s: as in ``JobResult``.
        has_saves: whether the ranks save after a signal.
    """
    stop_signal = stop.number
    ends = _ends_of(workers, answers, stuck, stop.numbers)
    tracebacks = ends.tracebacks
    if ends.died:
        # The rank that died is the cause of these.
        tracebacks = [text for text in tracebacks if not _has_only_lost_a_peer(text)]

    ended_with = [_status_of(answer) for answer in answers.values()]
    failures = [status for status in ended_with if status]
    statuses = [1 if status in (LOST_PEERS, NO_MEMORY) else status for status in failures]
    reason_status = _first_reason(answers, ends)
    reason = _unsaid_reason(answers)
    was_stopped = stop_signal and (statuses or stuck or None in answers.values())
    # All ranks have saved when one has done its last step, or ends by itself after the signal.
    has_saved = not has_saves or 0 in ended_with or 128 + stop_signal in failures
    was_cut_off = False

    if reason:
        say(reason)
    if tracebacks:
        say([printable_lines(tracebacks[0])])
    if reason_status:
        status = reason_status
    elif tracebacks:
        status = 1
    elif was_stopped and not _has_other_failure(ends, failures, stop_signal):
        is_limit_over = bool(stuck) and patience_s == float("inf")
        was_cut_off = is_limit_over and not stop.is_insisted and not has_saved
        is_ended_at_once = stop.is_insisted and not has_saved
        status = 128 + (signal.SIGINT if is_ended_at_once else stop_signal)
        if was_cut_off:
            status = 1
    elif ends.died:
        status = 1
    else:
        status = statuses[0] if statuses else 0
    return JobResult(
        status,
        ends.died,
        stuck,
        raised=bool(tracebacks),
        lost_peers=bool(failures) and all(status == LOST_PEERS for status in failures),
        left=ends.left if LOST_PEERS in failures and not ends.lacked_memory else {},
        lacked_memory=ends.lacked_memory,
        stopped_by=stop_signal,
        was_insisted=stop.is_insisted,
        patience_s=patience_s,
        was_cut_off=was_cut_off,
        traceback=tracebacks[0] if tracebacks else "",
        gave_reason=reason_status > 0,
        reason=reason,
    )


def _first_reason(answers: Mapping[int, Answer | None], ends: "_Ends") -> int:
    """Return the status of the first UserError; 0 if a rank died or raised another error before.

    Ranks lose their peers, or memory, in between: such an end says nothing of its cause.
    """
    for rank, answer in answers.items():
        status = _status_of(answer)
        if _is_reason(status):
            return status or 0
        if rank in ends.died or (answer is not None and status is None):
            return 0
    return 0


def _unsaid_reason(answers: Mapping[int, Answer | None]) -> tuple[str, ...]:
    """Return the lines of the UserError that a rank has left to rank 0, if rank 0 gave no reason.

    Rank 0 was killed while it still ran, has died, or knows only that its peers are lost.
    """
    if _is_reason(_status_of(answers.get(0))):
        return ()
    for rank, answer in sorted(answers.items()):
        if answer is not None and isinstance(answer.value, UserError):
            return tuple(f"rank {rank}: {line}" for line in answer.value.lines)
    return ()


@dataclass
class _Ends:
    """How the ranks ended that are not stuck.

    Attributes:
        died, left: the ranks that died without an answer, and those that ended otherwise, with the
            values of ``JobResult``.
        lacked_memory: the ranks that had no more memory.
        tracebacks: of ranks that raised an error, by rank.
        is_by_stop: whether a stop signal has ended a rank that does not catch it yet.
    """

    died: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    lacked_memory: list[int] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    is_by_stop: bool = False


def _ends_of(
    workers: Sequence[_Worker],
    answers: Mapping[int, Answer | None],
    stuck: Sequence[int],
    stop_signals: Sequence[int],
) -> _Ends:
    # Schedulers send several signals: a later one can end a rank that has saved and is leaving.
    codes_of_stop = {code for number in stop_signals for code in (-number, 128 + number)}
    ends = _Ends()
    for worker in workers:
        if worker.rank in stuck:
            continue
        answer = answers[worker.rank]
        if answer is None:
            end = -(worker.exit_code or 0)
            if worker.exit_code in codes_of_stop:
                ends.is_by_stop = True
                ends.left[worker.rank] = end
            else:
                ends.died[worker.rank] = end
            continue
        status = _status_of(answer)
        if status is None:
            ends.tracebacks.append(str(answer.value).strip())
        elif status == NO_MEMORY:
            ends.lacked_memory.append(worker.rank)
        elif status != LOST_PEERS:
            ends.left[worker.rank] = -status
    return ends


def _has_other_failure(ends: _Ends, failures: Sequence[int], stop_signal: int) -> bool:
    """Return whether a rank failed for another reason than the stop signal.

    If the save after the signal failed, the job must not look as if it had stopped and saved. But a
    rank that the signal has ended before the first step leaves peers without a connection.
    """
    if ends.died:
        return True
    for status in failures:
        is_left_by_a_peer = status == LOST_PEERS and ends.is_by_stop
        if status != 128 + stop_signal and not is_left_by_a_peer:
            return True
    return False


def _has_only_lost_a_peer(text: str) -> bool:
    """Return whether a traceback ends with the failure of a collective that lost a connection."""
    # Notes may follow the line of the error.
    end = "\n".join(text.splitlines()[-3:])
    return tells_lost_peer(end)


class _StopRequest:
    """The signals that ask this process to stop, and the ranks to which they are forwarded."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.since_s = 0.0
        self.is_forwarded = False
        self.is_insisted = False
        self.workers: list[_Worker] = []

    @property
    def number(self) -> int:
        """The first signal; 0 if there was none."""
        return self.numbers[0] if self.numbers else 0

    def receive(self, number: int, frame: Any) -> None:
        self.numbers.append(number)
        if len(self.numbers) == 1:
            self.since_s = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since_s > INSIST_S:
            # The user does not want to wait any longer: end the time for the shutdown. Schedulers
            # send several other signals, which must not cut off a save.
            self.is_insisted = True
            self.since_s = float("-inf")
        if self.workers:
            self.forward(number)

    def forward(self, number: int) -> None:
        self.is_forwarded = True
        for worker in self.workers:
            worker.send_signal(number)


@contextmanager
def _forward_signals() -> Iterator[_StopRequest]:
    """Forward stop signals to the ``workers`` of the yielded request."""
    stop = _StopRequest()
    previous_handlers = {
        number: signal.signal(number, stop.receive) for number in signals_to_catch()
    }
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class WorkerError(Exception):
    """A task failed on some ranks.

    Attributes:
        failures: each failed rank, with its UserError or a text: the traceback of any other error,
            or that the process died or did not answer in time.
        timed_out: whether time was the only limit: no rank failed, and some did not answer.
    """

    def __init__(self, failures: Mapping[int, UserError | str], *, timed_out: bool = False) -> None:
        self.failures = dict(failures)
        self.timed_out = timed_out
        super().__init__("\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items()))

    @property
    def user_error(self) -> UserError | None:
        """The error of the lowest failing rank if it is a UserError, or else None."""
        first = self.failures[min(self.failures)]
        return first if isinstance(first, UserError) else None


class Pool(ExitStack):
    """Runs tasks one after another, each on all ranks of a new world of newly forked processes.

    A task is a function at the top of a module. It is called as ``function(**arguments)`` on
    ranks 0 to world_size - 1. The environment has RANK, WORLD_SIZE and the path of a store's file,
    from which ``process_group.pool_world`` forms the process group.

    A process runs one task only: DTensor caches meshes by their shape, and would send the next
    world's tensors over the groups of the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        warm_up()

    def run(
        self, task: Task, arguments: Mapping[str, Any], *, world_size: int, limit_s: float = 120.0
    ) -> list[Any]:
        """Run a task in a new world and wait until all its processes have ended.

        Args:
            task: the function, or its name as ``module:function``.
            arguments: its keyword arguments, the same on every rank. They are sent pickled.
            world_size: the number of ranks.
            limit_s: the seconds after which a rank that has not answered counts as failed.

        Returns:
            The value that each rank returned, by rank.

        Raises:
            WorkerError: a rank raised an error, died, or did not answer in time. All processes have
                ended by then.
        """
        with ExitStack() as cleanup:
            workers = _start_workers(cleanup, task, arguments, world_size)
            return _collect([worker.call_pipe for worker in workers], limit_s, time.monotonic())

    def run_each(
        self,
        task: Task,
        calls: Sequence[Mapping[str, Any]],
        *,
        at_once: int,
        limit_s: float = 120.0,
    ) -> Iterator[Any]:
        """Run a task once for each of some arguments, each time in a world of one process.

        Args:
            task: as in ``run``.
            calls: the keyword arguments of each call.
            at_once: how many run at the same time.
            limit_s: the seconds after which a process that has not answered counts as failed.

        Yields:
            The values that the calls returned, in their order.

        Raises WorkerError as ``run`` does.
        """
        values: dict[int, Any] = {}
        waiting = deque(enumerate(calls))
        with ExitStack() as cleanup:
            # By the pipe of each process: the number of its call, when it has begun, and its end.
            running: dict[Any, tuple[int, float, ExitStack]] = {}
            for next_number in range(len(calls)):
                while next_number not in values:
                    while waiting and len(running) < at_once:
                        number, arguments = waiting.popleft()
                        end = cleanup.enter_context(ExitStack())
                        (worker,) = _start_workers(end, task, arguments, 1)
                        running[worker.call_pipe] = number, time.monotonic(), end
                    # The first one has run for longest.
                    first = next(iter(running))
                    left_s = running[first][1] + limit_s - time.monotonic()
                    ready: list[Any] = wait(list(running), timeout=max(0.0, left_s))
                    for pipe in ready or [first]:
                        number, begin_s, end = running.pop(pipe)
                        (values[number],) = _collect([pipe], limit_s, begin_s)
                        end.close()
                yield values.pop(next_number)


def _collect(pipes: list[Connection], limit_s: float, begin_s: float) -> list[Any]:
    """Return the values of all ranks' answers, by rank. They have ``limit_s`` from ``begin_s`` on.

    Raises WorkerError if a rank fails. The error leaves out ranks that only lost their peers,
    unless no rank gives another reason.
    """
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    values: dict[int, Any] = {}
    failures: dict[int, UserError | str] = {}
    timed_out = False
    deadline_s = begin_s + limit_s
    while waiting:
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            timed_out = not failures
            for rank in waiting.values():
                failures[rank] = no_answer(limit_s)
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                answer: Answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                # The pipe was closed before the whole answer had arrived.
                answer = Answer(False, DIED)
            if answer.succeeded:
                values[rank] = answer.value
            else:
                failures[rank] = answer.value
        if failures:
            # The other ranks may be waiting for the failed one in a collective. Give them time to
            # notice.
            deadline_s = min(deadline_s, time.monotonic() + 5.0)

    if failures:
        causes = {
            rank: failure
            for rank, failure in failures.items()
            if isinstance(failure, UserError)
            or not (is_no_answer(failure) or _has_only_lost_a_peer(failure))
        }
        raise WorkerError(causes or failures, timed_out=timed_out)
    return [values[rank] for rank in sorted(values)]
