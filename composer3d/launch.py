"""Starting processes: torch's elastic launcher for training, and a pool of workers for proofs and tests.

Both fork from one ``forkserver`` that has torch imported already, so that a node pays for that import once. This module
imports torch only inside functions: the forkserver imports it at the same time as whoever waits for it.
"""

import logging
import multiprocessing as mp
import os
import pkgutil
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from composer3d.errors import UserError

SHUTDOWN_S = 120
Task = Callable[..., Any] | str  # or its name, ``module:function``, so that what it imports is not imported here


def warm_up() -> None:
    """Start the forkserver, which begins to import torch in the background."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, by whatever the forkserver forks
    forkserver.set_forkserver_preload(["composer3d.train"])  # all slow imports of a rank
    # A terminal's Ctrl-C reaches every process. The forkserver and the pool's workers ignore it: whoever started them
    # ends them, and they would only print tracebacks. A rank of a training takes it again (``job``).
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def run_elastic(function: Callable[..., None], arguments: tuple[Any, ...], *, processes: int) -> int:
    """Run ``function(*arguments)`` as every rank of a job on this machine, under torch's elastic agent.

    The workers see what torchrun would set: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on. SIGINT and SIGTERM are
    passed on to them, and they have ``SHUTDOWN_S`` to end their step and save. Returns 0; the status of the rank that
    exited first with one; 1 where a rank raised, which is printed; 128 + N after signal N.
    """
    warm_up()
    os.environ.setdefault("TORCH_MP_PARALLEL_START", "1")
    # The ranks say what is wrong themselves; the agent's own account of it would bury that.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    elastic = "distributed.elastic"
    for name in (f"{elastic}.agent.server.api", f"{elastic}.multiprocessing.api", "multiprocessing.spawn"):
        logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="composer3d-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"composer3d-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="forkserver",
            shutdown_timeout=SHUTDOWN_S,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, function)(*arguments)
        except SignalException as stop:
            return 128 + int(stop.sigval)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            if isinstance(failure.message, dict):  # it raised; a rank that exits has said why itself
                print(failure.message["extraInfo"]["py_callstack"].strip(), file=sys.stderr)
            elif failure.exitcode < 0:
                print(f"rank {failure.local_rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
            return max(failure.exitcode, 1)
    return 0


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
    RANK, WORLD_SIZE and a rendezvous file in the environment (see ``dist.pool_world``). Processes are not used again:
    DTensor caches meshes by their shape, and would send the next world's tensors over the groups of the last.
    """

    def __init__(self) -> None:
        super().__init__()
        warm_up()
        self._folder = self.enter_context(tempfile.TemporaryDirectory(prefix="composer3d-pool-"))

    def run(self, task: Task, arguments: Mapping[str, Any], *, world_size: int, limit_s: float = 120.0) -> list[Any]:
        """Run a task and return what each rank returned, by rank.

        Raises WorkerError where a rank raised, died, or had not answered after ``limit_s``. All have ended by then.
        """
        environment = {"WORLD_SIZE": str(world_size), "COMPOSER3D_STORE": f"{tempfile.mkdtemp(dir=self._folder)}/store"}
        context = mp.get_context("forkserver")
        workers = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                told = (theirs, task, dict(arguments), environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                process = context.Process(target=_serve, args=told, daemon=True, name=f"composer3d worker {rank}")
                process.start()
                theirs.close()
                workers.append((process, ours))
            return _collect([pipe for _, pipe in workers], limit_s)
        finally:
            for process, pipe in workers:
                pipe.close()
                process.kill()  # those that answered have nothing left to do
            for process, _ in workers:
                process.join()


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
                done, answer = pipe.recv()
            except (EOFError, OSError):  # before it answered, or halfway
                done, answer = False, "the process died"
            (answers if done else failures)[rank] = answer
        if failures:
            # The other ranks may wait in a collective for the one that failed: give them a moment to notice.
            until = min(until, time.monotonic() + 5.0)
    if failures:
        noise = re.compile("Connection (closed|reset) by peer|no answer after|Timed out waiting|Read timeout")
        real = {rank: why for rank, why in failures.items() if isinstance(why, UserError) or not noise.search(why)}
        raise WorkerError(real or failures)
    return [answers[rank] for rank in sorted(answers)]


def _serve(pipe: Connection, task: Task, arguments: dict[str, Any], environment: dict[str, str]) -> None:
    if pipe.poll():  # the end of the pipe: whoever wanted this task was interrupted before it began
        return
    os.environ |= environment
    with suppress(BrokenPipeError):  # interrupted since
        try:
            function = pkgutil.resolve_name(task) if isinstance(task, str) else task
            pipe.send((True, function(**arguments)))
        except UserError as error:
            pipe.send((False, error))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
