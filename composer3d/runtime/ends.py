"""Say in words how the processes of a job have ended. No torch here.

The end of a process is one number: the signal that ended it, or minus its exit status.
"""

import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence

from composer3d.recipe.schema import MeshTable
from composer3d.runtime.ranks import describe_rank, describe_several

# What is said of a process of which nothing is known but that it gave no answer before its end.
DIED = "the process died"

_NO_ANSWER = "no answer after"


def no_answer(limit_s: float) -> str:
    """Return what is said of a process that still ran when its time was over."""
    return f"{_NO_ANSWER} {limit_s:.0f} s"


def is_no_answer(text: str) -> bool:
    """Return whether a text is one of ``no_answer``."""
    return text.startswith(_NO_ANSWER)


def describe_end(end: int, processes: int = 1) -> str:
    """Return how some processes ended: ``was ended by signal 11 (SIGSEGV)``.

    Args:
        end: the signal, or minus the exit status.
        processes: how many they are.
    """
    if end <= 0:
        return f"ended with status {-end}"
    were = "was" if processes == 1 else "were"
    return f"{were} ended by {_describe_signal(end)}"


def _describe_signal(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else "a real-time signal"
    if number == signal.SIGKILL:
        name += "; the kernel often sends it when memory runs out: see dmesg"
    return f"signal {number} ({name})"


def describe_died(ends: Mapping[int, int], mesh: MeshTable) -> list[str]:
    """Return a line for each way in which ranks died.

    Args:
        ends: the ends of the ranks, by rank (``launch.JobResult.died``).
        mesh: the sizes of the job's mesh.
    """
    return [
        f"{_names_of(ranks, mesh)} {describe_end(end, len(ranks))}"
        for end, ranks in _ranks_by_end(ends).items()
    ]


def describe_left(ends: Mapping[int, int], mesh: MeshTable) -> list[str]:
    """Return a line for each way in which ranks ended while others needed them.

    Args:
        ends: the ends of the ranks, by rank (``launch.JobResult.left``).
        mesh: the sizes of the job's mesh.
    """
    lines = []
    for end, ranks in _ranks_by_end(ends).items():
        words = describe_end(end, len(ranks)) if end else "ended"
        lines.append(f"{_names_of(ranks, mesh)} {words} before the others")
    return lines


def _names_of(ranks: Sequence[int], mesh: MeshTable) -> str:
    return describe_several(ranks, lambda rank: describe_rank(rank, mesh))


def _ranks_by_end(ends: Mapping[int, int]) -> dict[int, list[int]]:
    ranks_by_end: dict[int, list[int]] = defaultdict(list)
    for rank, end in sorted(ends.items()):
        ranks_by_end[end].append(rank)
    return ranks_by_end
