"""The variables that a launcher of ranks sets in their environment, checked and typed.

torchrun, ``launch``, or a script of the user's scheduler sets them. A wrong one would otherwise
show as a wait for ranks that never come. ``check`` compares them before anything waits. This module
does not import torch.
"""

import math
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from composer3d.facts.errors import LaunchError
from composer3d.facts.text import in_quotes

# The path of the store of a world that ``launch`` has started.
STORE_VARIABLE = "COMPOSER3D_STORE"

# The time (``time.monotonic``) at which the ranks of a job were asked for.
START_VARIABLE = "COMPOSER3D_START"

# How ``devices`` sets torch's allocator of GPU memory, unless one of these variables is set. Memory
# that is freed in one size can be used in another. Without it, sizes that change, such as those of
# packed documents and of experts, leave gaps.
ALLOCATOR = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# The number of NCCL's last collectives that torch's flight recorder keeps, under either of two
# names. It is torch's default where the recorder is on by default.
RECORDER_VARIABLES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
RECORDED_COLLECTIVES = "2000"

MOST_RANKS = 1_000_000

_MOST_THREADS = 4096

_TORCHRUN = "torchrun sets it, or your script that starts one process for each rank"
_USER = "you set it, or the image of the machine"
_OWN = "composer3d sets it for the processes that it starts: unset it"


class _Number(NamedTuple):
    least: int
    most: int
    set_by: str


_NUMBERS = {
    "RANK": _Number(0, MOST_RANKS - 1, _TORCHRUN),
    "WORLD_SIZE": _Number(1, MOST_RANKS, _TORCHRUN),
    "LOCAL_RANK": _Number(0, MOST_RANKS - 1, _TORCHRUN),
    "LOCAL_WORLD_SIZE": _Number(1, MOST_RANKS, _TORCHRUN),
    "GROUP_RANK": _Number(0, MOST_RANKS - 1, _TORCHRUN),
    "GROUP_WORLD_SIZE": _Number(1, MOST_RANKS, _TORCHRUN),
    "MASTER_PORT": _Number(1, 65535, _TORCHRUN),
    "TORCHELASTIC_RESTART_COUNT": _Number(0, 10**9 - 1, "torchrun sets it"),
    "TORCHELASTIC_MAX_RESTARTS": _Number(0, 10**9 - 1, "torchrun sets it"),
}

# What each of these may be: a pattern, and the same in words.
_TEXTS = {
    "MASTER_ADDR": (
        r"[A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}(%[A-Za-z0-9._-]+)?\]?",
        "the name or the address of a machine, without a port",
        _TORCHRUN,
    ),
    "OMP_NUM_THREADS": (
        r"[0-9]{1,9}(,[0-9]{1,9})*",
        f"a number of threads from 1 to {_MOST_THREADS}",
        _USER,
    ),
    "TORCHELASTIC_USE_AGENT_STORE": ("True|False", "True or False", "torchrun sets it"),
    "TORCH_GLOO_LAZY_INIT": (
        "(?i:0|1|y|yes|t|true|n|no|f|false)",
        "0 or 1",
        _USER,
    ),
    "CUDA_VISIBLE_DEVICES": (
        r"|-1|(?i:none|void|NoDevFiles)|([0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9/-]+)"
        r"(,([0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9/-]+))*",
        "numbers or names of GPUs with commas between them",
        _USER,
    ),
}


def is_rank() -> bool:
    """Return whether a launcher has started this process as a rank of a job."""
    return "RANK" in os.environ


def has_launcher() -> bool:
    """Return whether ``launch`` has started this process, on the machine of all ranks."""
    return STORE_VARIABLE in os.environ


def rank() -> int:
    """Return the rank of this process; 0 without a launcher. Raises LaunchError."""
    return _number("RANK", 0)


def world_size() -> int:
    """Return the number of ranks; 1 without a launcher. Raises LaunchError."""
    return _number("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return the number of this process on its node, from 0. Raises LaunchError."""
    return _number("LOCAL_RANK", 0)


def local_world_size(default: int | None = None) -> int:
    """Return the number of ranks on this node. Raises LaunchError.

    Args:
        default: the number if LOCAL_WORLD_SIZE is absent; None for that of all ranks.
    """
    return _number("LOCAL_WORLD_SIZE", world_size() if default is None else default)


def node() -> int:
    """Return the number of this node, from 0. Raises LaunchError."""
    return _number("GROUP_RANK", 0)


def nodes() -> int:
    """Return the number of nodes that torchrun has. Raises LaunchError."""
    return _number("GROUP_WORLD_SIZE", 1)


def restart_count() -> int:
    """Return how often torchrun has started all ranks again. Raises LaunchError."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def most_restarts() -> int:
    """Return how often torchrun would start all ranks again. Raises LaunchError."""
    return _number("TORCHELASTIC_MAX_RESTARTS", 0)


def uses_store_of_agent() -> bool:
    """Return whether an agent of torchrun holds the store of the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_address() -> tuple[str, int] | None:
    """Return the machine and the port at which the ranks meet; None if this process is alone.

    The image of a cluster may set MASTER_ADDR for a process that is no rank.

    Raises:
        LaunchError: one of MASTER_ADDR and MASTER_PORT is absent, or wrong.
    """
    if not is_rank() or has_launcher() or "MASTER_ADDR" not in os.environ:
        return None
    problems = [*_problems_of_text("MASTER_ADDR"), *_problems_of_number("MASTER_PORT")]
    if "MASTER_PORT" not in os.environ:
        problems.append(_absent("MASTER_PORT", "MASTER_ADDR is set"))
    if problems:
        raise LaunchError(problems)
    return os.environ["MASTER_ADDR"].strip("[]"), _number("MASTER_PORT", 0)


def threads() -> int | None:
    """Return the first number of OMP_NUM_THREADS; None if it is absent. Raises LaunchError."""
    problems = _problems_of_text("OMP_NUM_THREADS")
    if problems:
        raise LaunchError(problems)
    value = os.environ.get("OMP_NUM_THREADS")
    return None if value is None else int(value.partition(",")[0])


def reports_usage() -> bool:
    """Return whether this process prints errors that all ranks have: not as a rank above 0."""
    value = os.environ.get("RANK", "0")
    return not value.isascii() or not value.isdigit() or int(value[:9]) == 0


def check() -> None:
    """Check all variables, each for itself and with the others, before anything waits.

    Raises:
        LaunchError: a line for each problem: the variable, its value, what is allowed, and who
            usually sets it.
    """
    problems = [line for name in _NUMBERS for line in _problems_of_number(name)]
    problems += [line for name in _TEXTS for line in _problems_of_text(name)]
    problems += _problems_of_interfaces()
    problems += _problems_of_own()
    # Wrong numbers cannot be compared.
    problems = problems or _problems_together()
    if problems:
        raise LaunchError(problems)


def _number(name: str, default: int) -> int:
    problems = _problems_of_number(name)
    if problems:
        raise LaunchError(problems)
    return int(os.environ.get(name, default))


def _problems_of_number(name: str) -> list[str]:
    value = os.environ.get(name)
    least, most, set_by = _NUMBERS[name]
    # Python's ``int`` would also take " 1", "1_0" and digits of other scripts.
    if value is None or (re.fullmatch("[0-9]{1,9}", value) and least <= int(value) <= most):
        return []
    return [f"{_with_value(name)}: it must be a whole number from {least} to {most}; {set_by}"]


def _problems_of_text(name: str) -> list[str]:
    value = os.environ.get(name)
    pattern, allowed, set_by = _TEXTS[name]
    if value is None:
        return []
    is_right = re.fullmatch(pattern, value) is not None
    if is_right and name == "OMP_NUM_THREADS":
        is_right = all(1 <= int(part) <= _MOST_THREADS for part in value.split(","))
    return [] if is_right else [f"{_with_value(name)}: it must be {allowed}; {set_by}"]


def _problems_of_interfaces() -> list[str]:
    """Find network interfaces that this machine lacks. NCCL's variable has patterns instead."""
    name = "GLOO_SOCKET_IFNAME"
    value = os.environ.get(name)
    if value is None:
        return []
    try:
        known = [interface for _, interface in socket.if_nameindex()]
    except OSError:
        return []
    if all(part in known for part in value.split(",")):
        return []
    allowed = f"network interfaces of this machine, of {', '.join(known)}"
    return [f"{_with_value(name)}: it must name {allowed}; {_USER}"]


def _problems_of_own() -> list[str]:
    problems = []
    store = os.environ.get(STORE_VARIABLE)
    if store is not None and not (store and Path(store).parent.is_dir()):
        problems.append(f"{_with_value(STORE_VARIABLE)}: it must be the path of a store; {_OWN}")
    start = os.environ.get(START_VARIABLE)
    if start is not None:
        try:
            is_right = start.isascii() and math.isfinite(float(start))
        except ValueError:
            is_right = False
        if not is_right:
            problems.append(f"{_with_value(START_VARIABLE)}: it must be a time in seconds; {_OWN}")
    return problems


def _problems_together() -> list[str]:
    """Compare the variables. Each one is right for itself."""
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", STORE_VARIABLE)
    given = [name for name in of_ranks if name in os.environ]
    absent = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if given and absent:
        return [_absent(name, f"{_with_value(given[0])} is set") for name in absent]
    if not given:
        return []
    problems = []
    size, local_size = world_size(), local_world_size()
    for name, value, limit_name, limit in (
        ("RANK", rank(), "WORLD_SIZE", size),
        ("LOCAL_RANK", local_rank(), "LOCAL_WORLD_SIZE", local_size),
    ):
        if value >= limit:
            problems.append(
                f"{name} = {value} and {limit_name} = {limit}: {name} must be from 0 to "
                f"{limit - 1}; {_TORCHRUN}"
            )
    for name, value in (
        ("LOCAL_WORLD_SIZE", local_size),
        ("GROUP_WORLD_SIZE", nodes()),
        ("GROUP_RANK", node() + 1),
    ):
        if value > size:
            problems.append(
                f"{_with_value(name)} and WORLD_SIZE = {size}: {name} must be at most "
                f"{size - (name == 'GROUP_RANK')}; {_TORCHRUN}"
            )
    if not has_launcher():
        master = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if size > 1 or len(master) == 1:
            reason = f"WORLD_SIZE = {size}" if size > 1 else "the other of the two is set"
            problems += [_absent(name, reason) for name in master]
    return problems


def _absent(name: str, reason: str) -> str:
    set_by = _TORCHRUN
    return f"{name} is not set, but {reason}: set both, or unset all variables of ranks; {set_by}"


def _with_value(name: str) -> str:
    return f"{name} = {in_quotes(os.environ[name], 40)}"
