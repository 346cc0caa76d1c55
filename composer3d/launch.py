"""Starting processes: torch's elastic launcher for training, and a pool of workers for proofs and tests.

Both fork from one ``forkserver`` that has torch imported already, so that a node pays for that import once. This module
imports torch only inside functions: the forkserver imports it at the same time as whoever waits for it.
"""

import importlib
import logging
import multiprocessing as mp
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Any

from composer3d.errors import UserError

SHUTDOWN_S = 120
_PRELOAD = ["composer3d.preload"]


def warm_up() -> None:
    """Start the forkserver, which begins to import torch in the background."""
    from multiprocessing.forkserver import ensure_running

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, by whatever the forkserver forks
    mp.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    ensure_running()


def run_elastic(function: Callable[..., None], arguments: tuple[Any, ...], *, processes: int) -> int:
    """Run ``function(*arguments)`` as every rank of a job on this machine, under torch's elastic agent.

    The workers see what torchrun would set: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on. SIGINT and SIGTERM are
    passed on to them, and they have ``SHUTDOWN_S`` to end their step and save.

    Returns:
        0; the status of the rank that exited first with one; 1 where a rank raised, which is printed; 128 + N after
        signal N.
    """
    warm_up()
    os.environ.setdefault("TORCH_MP_PARALLEL_START", "1")
    # The ranks say what is wrong themselves; the agent's own account of it would bury that.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in (
        "distributed.elastic.agent.server.api",
        "distributed.elastic.multiprocessing.api",
        "multiprocessing.spawn",
    ):
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
            monitor_interval=0.1,
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
        self._tasks = 0

    def run(
        self,
        function: Callable[..., Any] | str,
        arguments: Mapping[str, Any],
        *,
        world_size: int,
        limit_s: float = 120.0,
    ) -> list[Any]:
        """Run a task and return what each rank returned, by rank.

        ``function`` may be a name, ``module:function``, so that what the task imports is not imported here.

        Raises:
            WorkerError: a rank raised, died, or had not answered after ``limit_s``. All of them have ended by then.
        """
        self._tasks += 1
        store = f"{self._folder}/store-{self._tasks}"
        context = mp.get_context("forkserver")
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            task = (theirs, function, dict(arguments), rank, world_size, store)
            process = context.Process(target=_serve, args=task, daemon=True, name=f"composer3d worker {rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            answers, failures = _collect(pipes, limit_s)
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                pipe.close()
                process.terminate()  # those that answered have nothing left to do
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
        if failures:
            raise WorkerError(_causes(failures))
        return [answers[rank] for rank in range(world_size)]


def _collect(pipes: list[Connection], limit_s: float) -> tuple[dict[int, Any], dict[int, UserError | str]]:
    """Wait for every rank's answer or failure."""
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    answers: dict[int, Any] = {}
    failures: dict[int, UserError | str] = {}
    until = time.monotonic() + limit_s
    while waiting:
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            return answers, failures | dict.fromkeys(waiting.values(), f"no answer after {limit_s:.0f} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                done, answer = pipe.recv()
            except EOFError:
                done, answer = False, "the process died"
            (answers if done else failures)[rank] = answer
        if failures:
            # The other ranks may wait in a collective for the one that failed: give them a moment to notice.
            until = min(until, time.monotonic() + 5.0)
    return answers, failures


def _causes(failures: dict[int, UserError | str]) -> dict[int, UserError | str]:
    """Leave out ranks that only lost their peers, where some rank says what really happened."""
    noise = re.compile("Connection (closed|reset) by peer|no answer after|Timed out waiting|Read timeout")
    real = {rank: why for rank, why in failures.items() if isinstance(why, UserError) or not noise.search(why)}
    return real or failures


def _serve(
    pipe: Connection, function: Callable[..., Any] | str, arguments: dict[str, Any], rank: int, size: int, store: str
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "COMPOSER3D_STORE": store}
    try:
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        assert callable(function)
        pipe.send((True, function(**arguments)))
    except UserError as error:
        pipe.send((False, error))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
