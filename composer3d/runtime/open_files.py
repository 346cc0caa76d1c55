"""How many files a process may open: each connection to another rank is one. No torch here."""

import resource

from composer3d.facts.errors import MachineError

# The groups of gloo that have all ranks: that of the world, or beside NCCL that of the host; and
# that of saves (``checkpoint.store``).
GROUPS_OF_ALL_RANKS = 2
# For shards of data and checkpoints, logs, devices and libraries.
_ALL_ELSE = 256


def needed(rank: int, size: int, *, hosts_store: bool) -> int:
    """Return how many open files a rank of a job may need at once.

    Rank 0 is connected to every rank in each group of all ranks. The process that hosts the job's
    store has one more connection from each.

    Args:
        rank: the rank.
        size: the number of ranks.
        hosts_store: whether the store is in this process.
    """
    of_groups = GROUPS_OF_ALL_RANKS * (size - 1) if rank == 0 else 0
    return of_groups + (size if hosts_store else 0) + _ALL_ELSE


def allow(rank: int, size: int, *, hosts_store: bool) -> None:
    """Raise the soft limit of open files to the hard one, and check that it is enough.

    Args:
        rank, size, hosts_store: as for ``needed``.

    Raises:
        MachineError: the hard limit is below what the rank may need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # macOS refuses an unlimited soft limit: the soft limit counts then
    need = needed(rank, size, hosts_store=hosts_store)
    if soft != resource.RLIM_INFINITY and soft < need:
        raise MachineError(
            f"rank {rank} of {size} needs up to {need:,} open files for its connections to other "
            f"ranks, but the limit is {soft:,} (ulimit -Hn): raise it on the node of this rank, "
            "such as by LimitNOFILE of the service or --ulimit nofile of the container"
        )
