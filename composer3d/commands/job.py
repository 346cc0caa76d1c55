"""Start the ranks of a job, or join one: what ``train``, ``doctor`` and ``verify --here`` share.

Functions import the modules that need torch when they need them, so that the starter of the ranks
can begin to import torch first.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from composer3d.facts.errors import (
    DeviceError,
    LaunchError,
    LostPeersError,
    NoMemoryError,
    RankDataError,
    RankLogError,
    RecipeError,
    UserError,
)
from composer3d.recipe.resolve import Resolved, load
from composer3d.recipe.schema import MeshTable, Recipe
from composer3d.runtime import environment, launch, log
from composer3d.runtime.console import output_error, say, steady_output
from composer3d.runtime.ends import describe_died, describe_left
from composer3d.runtime.ranks import describe_rank, identity
from composer3d.runtime.shortage import lacks_memory, no_memory

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# The limit of processes per core in a CPU job. With more, even a short trial would be too slow.
_PROCESSES_PER_CORE = 16


# Loads the recipe of a job for a number of processes.
Resolve = Callable[[int], Resolved]


def count_processes(resolved: Resolved, resolve: Resolve) -> tuple[Resolved, int]:
    """Return the recipe for the devices of this machine, and the number of ranks to start on it.

    It starts the starter of ranks, unless there is one rank.

    Args:
        resolved: the recipe for no given number of processes.
        resolve: loads it for one.

    Raises:
        RecipeError: the recipe needs too many processes for this machine.
        DeviceError: this machine has fewer GPUs than the recipe needs.
    """
    device = resolved.recipe.run.device
    processes = resolved.recipe.world_size
    if device == "cpu":
        require_cores(resolved)
    if processes > 1:
        launch.warm_up()
    if device != "cpu":
        # Imported here because this module imports torch.
        from composer3d.runtime.process_group import count_gpus

        gpus = count_gpus()
        if gpus and resolved.fills_world:
            resolved = resolve(gpus)
            processes = gpus
        elif gpus < processes and (gpus or device == "cuda"):
            raise DeviceError(
                f"{resolved.place('mesh.dp_shard')}: the mesh needs {processes} GPUs, but this "
                f"machine shows {gpus}; change [mesh], start several nodes with torchrun, or set "
                'run.device = "cpu"'
            )
        if not gpus:
            require_cores(resolved)
    return resolved, processes


def require_cores(resolved: Resolved) -> None:
    """Refuse a CPU job with too many processes for this machine.

    Raises:
        RecipeError: there are more than ``_PROCESSES_PER_CORE`` processes per core, and
            ``run.oversubscribe`` is false.
    """
    recipe = resolved.recipe
    cores = launch.usable_cores()
    most = _PROCESSES_PER_CORE * cores
    if recipe.world_size > most and not recipe.run.oversubscribe:
        raise RecipeError(
            f"{resolved.place('mesh.dp_shard')}: the mesh needs {recipe.world_size} processes, but "
            f"this machine has {cores} cores: at most {most} processes, {_PROCESSES_PER_CORE} a "
            "core, are started on them; change [mesh], or set run.oversubscribe = true"
        )


def own_recipe(file: str | None) -> Recipe | None:
    """Load the recipe that ``--recipe`` names, for ``generate.load.open_checkpoint``.

    Raises:
        RecipeError: the recipe cannot be used.
    """
    return None if file is None else load(file, check_files=False, may_import=True).recipe


def run_rank(
    function: Callable[[Resolved, int], int],
    resolve: Resolve,
    *,
    report: Callable[[UserError], None] | None = None,
    keep: Callable[[Recipe], AbstractContextManager[None]] | None = None,
) -> int:
    """Run ``function`` as the rank that RANK, LOCAL_RANK and WORLD_SIZE name.

    Without these variables it is rank 0 of 1. A UserError is printed by the ranks that must report
    it, and becomes the exit status, and so is a lack of memory. Any other exception is raised.

    Args:
        function: is called with the resolved recipe and the rank, and returns the exit status.
        resolve: loads the recipe.
        report: is called on rank 0 with a UserError, before it is printed.
        keep: returns a context for all that this rank does with the recipe, and for its errors.

    Returns:
        The exit status of this rank.

    Raises:
        UserError: only to the launcher of this machine (``launch.run_ranks``): rank 0 prints it.
    """
    rank, world_size = environment.rank(), environment.world_size()
    with suppress(OSError):
        # The name that top and ps show, on Linux.
        Path("/proc/self/comm").write_text(f"c3d rank {rank}")
    name = f"rank {rank}"
    with ExitStack() as kept:
        try:
            # Before the groups are gone, a rank that could not print would be a lost peer of
            # others.
            steady_output()
            resolved = resolve(world_size)
            name = describe_rank(rank, resolved.recipe.mesh)
            if keep is not None:
                kept.enter_context(keep(resolved.recipe))
            status = function(resolved, rank)
            if report is not None:
                _require_output()
            return status
        except Exception as caught:
            if isinstance(caught, UserError):
                error = caught
            elif lacks_memory(caught):
                error = no_memory(name, caught)
            else:
                raise
            if report is not None and rank == 0 and error.lines:
                report(error)
            tell(error, rank)
            if environment.has_launcher() and _has_group() and not _must_report(error, rank):
                # The launcher lets rank 0 print it, and does so itself if rank 0 cannot.
                raise
            if isinstance(error, LostPeersError) and environment.has_launcher():
                # The launcher of this machine may start all ranks again.
                return launch.LOST_PEERS
            if isinstance(error, NoMemoryError) and environment.has_launcher():
                return launch.NO_MEMORY
            return error.status


def tell(error: UserError, rank: int) -> None:
    """Print an error, if this rank must report it and has not done so yet."""
    if error.is_told or not error.lines or not _must_report(error, rank):
        return
    error.is_told = True
    # These name their ranks themselves.
    names_rank = isinstance(error, LostPeersError | NoMemoryError)
    prefix = f"rank {rank}: " if rank and not names_rank else ""
    lines = [prefix + line for line in error.lines]
    log.keep(lines)
    say(lines)


def _require_output() -> None:
    """Raise UserError if a result could not be printed. A reader that has gone wants no result."""
    error = output_error()
    if error is not None and not isinstance(error, BrokenPipeError):
        raise UserError(
            f"standard output cannot be written ({error.strerror}); free space where it goes, or "
            "send it elsewhere"
        )


def print_lost_ranks(result: launch.JobResult, mesh: MeshTable) -> None:
    """Name, on standard error, the ranks that died, were killed, or left the others."""
    lines = describe_died(result.died, mesh)
    lines += [f"{describe_rank(rank, mesh)} was killed because it hung" for rank in result.stuck]
    lines += describe_left(result.left, mesh)
    if lines:
        say(lines)


def _must_report(error: UserError, rank: int) -> bool:
    """Return whether this rank prints an error.

    Once there is a process group, all ranks raise an error together (``process_group.on_all``), and
    rank 0 prints it. Before that, the error may concern a single node or rank: then the first rank
    of each node prints it, and every rank prints its own DeviceError. Only one rank has a
    LostPeersError with lines, so it always prints them. Others are known to no other rank.
    """
    if rank == 0 or isinstance(
        error, LostPeersError | RankDataError | NoMemoryError | RankLogError
    ):
        return True
    if _has_group():
        return False
    return isinstance(error, DeviceError | LaunchError) or environment.local_rank() == 0


def _has_group() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


class World(NamedTuple):
    """The world that this rank has joined.

    Attributes:
        device: the device of this rank.
        store: the store through which the ranks have met.
    """

    device: "torch.device"
    store: "dist.Store"


@contextmanager
def join(
    resolved: Resolved,
    rank: int,
    *,
    timeout_s: float,
    advice: Callable[[], str],
    write_report: Callable[[str], str | None] | None = None,
    write_trace: Callable[[bytes, str], str | None] | None = None,
) -> Iterator[World]:
    """Set this process up as a rank of the recipe's job, and form the group of all ranks.

    Args:
        resolved: the recipe.
        rank: the rank of this process.
        timeout_s: how long a collective may wait for its peers.
        advice: returns what the user should do after a rank is lost.
        write_report: keeps a report of what all ranks did then, and returns the path of its file;
            None keeps none.
        write_trace: keeps the last collectives of this rank on a GPU then, which torch has as
            bytes; its second argument is the time. It returns the path of their file.

    Raises:
        UserError: the device cannot be used, or ranks are missing or lost.
    """
    import torch

    from composer3d.runtime import devices, peers, process_group
    from composer3d.runtime.torch_private import dump_nccl_trace

    recipe = resolved.recipe
    threads = environment.threads()
    if recipe.world_size > 1 or threads is not None:
        torch.set_num_threads(threads or 1)
    device = process_group.pick_device(recipe.run.device)
    settings = None
    if device.type == "cpu":
        process_group.keep_freed_memory()
    else:
        settings = devices.prepare_gpu(recipe, cores=launch.usable_cores())

    name = identity(rank, recipe.mesh, device.type)
    log.setup(name, main=rank == 0)
    restarts, most = environment.restart_count(), environment.most_restarts()
    if restarts and not environment.has_launcher():
        log.get().info(f"restarted by torchrun, {restarts} of at most {most}")
    if _cannot_replace_nodes():
        log.get().info(
            "a lost node cannot come back while this job runs: "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is not set for torchrun (docs/launching.md)"
        )
    if settings is not None:
        log.get().info(settings)

    def keep_trace(moment: str) -> str | None:
        trace = dump_nccl_trace()
        return None if write_trace is None or trace is None else write_trace(trace, moment)

    keeps_traces = write_trace is not None and device.type == "cuda"
    began_s = log.PROCESS_BEGAN_S
    with suppress(KeyError, ValueError):
        began_s = float(os.environ[environment.START_VARIABLE])
    log.add_phase("processes", began_s)
    try:
        with ExitStack() as joined:
            with log.phase("meeting of ranks"):
                store = process_group.open_store(timeout_s=timeout_s)
                peer_watch = peers.PeerWatch(
                    # The thread of the watch needs a client of its own. Torch's type stubs lack
                    # ``clone``.
                    cast(Any, store).clone(),
                    rank=rank,
                    size=environment.world_size(),
                    describe=lambda peer: describe_rank(peer, recipe.mesh),
                    advice=advice,
                    write_report=write_report,
                    store_host=(
                        describe_rank(0, recipe.mesh)
                        if process_group.rank_0_holds_store()
                        else "the agent of its node"
                    ),
                    is_first_of_node=environment.local_rank() == 0,
                    write_trace=keep_trace if keeps_traces else None,
                    has_launcher=environment.has_launcher(),
                )
                joined.enter_context(peer_watch)
                joined.enter_context(process_group.world(device, timeout_s=timeout_s, store=store))
            yield World(device, store)
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"[{name}]")
        raise


def _cannot_replace_nodes() -> bool:
    """Return whether torchrun has several nodes and restarts, but keeps one store for all of them.

    After a node has joined, its agent waits for the address of the store, which the agent of rank
    0 has published only in its own first round (torch 2.13 to 2.15). Both agents give up after
    60 s. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, each round has a store of its own.
    """
    return (
        environment.uses_store_of_agent()
        and environment.nodes() > 1
        and environment.most_restarts() > 0
    )
