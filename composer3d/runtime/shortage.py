"""Tell apart errors of a machine that lacks memory from all others. No torch here."""

import errno
import re
from pathlib import Path

from composer3d.facts.errors import NoMemoryError

# The words of libraries whose error has no class of its own: torch's allocators, the C++ library,
# the dynamic loader, Python's threads.
_WORDS = re.compile(
    r"not enough memory|out of memory|(cannot|can't|could not|unable to) allocate|bad_alloc|"
    r"can't start new thread|failed to map segment|Resource temporarily unavailable|"
    r"error code (12|-12) \(",
    re.IGNORECASE,
)

# What a user can do about it. The commands say what a layout needs before it is started.
WAY_OUT = (
    "lower data.micro_batch or data.seq_len, set memory.activation_checkpoint, shard over more "
    "ranks, or start fewer ranks on a machine; composer3d plan --memory predicts what a rank needs"
)

_SHOWN = 200  # characters of the library's own words


def kernel_kills() -> int:
    """Return how many processes the kernel has killed since its start because memory ran out.

    0 if the system does not tell. In a container, it may count those of the whole machine.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError):
        return 0


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory, or the room for a thread or process, was refused.

    The causes and contexts of ``error`` are searched too.
    """
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, MemoryError | NoMemoryError):
            return True
        if isinstance(current, OSError):
            if current.errno == errno.ENOMEM:
                return True
        elif isinstance(current, RuntimeError | ImportError) and _WORDS.search(str(current)):
            # torch.OutOfMemoryError is a RuntimeError.
            return True
        current = current.__cause__ or current.__context__
    return False


def describe(error: BaseException) -> str:
    """Return a phrase for an error of which ``lacks_memory`` is true, with the library's words."""
    words = " ".join(str(error).split()) or type(error).__name__
    # The position in torch's sources says nothing to a user.
    words = re.sub(r"^\[enforce fail at [^\]]*\]\.?\s*", "", words)[:_SHOWN]
    return f"there is not enough memory ({words})"


def no_memory(where: str, error: BaseException) -> NoMemoryError:
    """Return the error of one line for an error of which ``lacks_memory`` is true.

    Args:
        where: what lacks memory, such as the name of the rank.
        error: the error.
    """
    return NoMemoryError(f"{where}: {describe(error)}; {WAY_OUT}")
