"""Predicts goodput: the share of time spent training, despite failures and saves.

Failures are a Poisson process, as in Young (doi 10.1145/361147.361115) and Daly (doi
10.1016/j.future.2004.11.016). The share is exact for such failures, which may hit a save, a
restart, or repeated work. A background save counts only once it is written; a failure before that
falls back to the previous checkpoint. No torch here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, expm1, log
from typing import NamedTuple

from composer3d.facts.errors import UserError
from composer3d.facts.hardware import Generation, Hardware
from composer3d.models.registry import architecture
from composer3d.planner.activations import unit_of
from composer3d.planner.memory import RankMemory, predict_memory
from composer3d.planner.setup import Setup
from composer3d.planner.traffic import DTYPE_BYTES
from composer3d.planner.trained import Share, is_trained
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.schema import CheckpointTable, Recipe

_HOUR_S = 3600.0


class FailureRate(NamedTuple):
    """How often jobs on some devices failed.

    Attributes:
        device_hours: device-hours per failure.
        source: the devices and the publication, in words.
    """

    device_hours: float
    source: str


# Llama 3 counts all unplanned interruptions of one job. RSC-1 counts failed nodes of 8 GPUs, and no
# software errors.
_FAILURE_RATES: dict[Generation, FailureRate] = {
    "ampere": FailureRate(
        8 * 24.0 * 1000 / 6.50,
        "Meta's RSC-1, 6.50 in 1,000 days of a node with 8 A100, arXiv 2410.21680",
    ),
    "hopper": FailureRate(
        16_384 * 54 * 24.0 / 419, "Llama 3, 419 in 54 days on 16,384 H100, arXiv 2407.21783"
    ),
}

# Storage bandwidth per device: 2 TB/s, sustained, for 16,384 devices (Llama 3, arXiv 2407.21783,
# section 3.3.1).
STORAGE_BYTES_S = 2e12 / 16_384

# From the end of a job to the load of its checkpoint: how long recovery stalled synchronous jobs on
# the order of 100,000 GPUs (arXiv 2602.00277).
RESTART_S = 600.0


def published_failures(hardware: Hardware) -> FailureRate:
    """Return the published failure rate of a device's generation, or H100's if there is none.

    Raises:
        UserError: the device is a CPU.
    """
    if hardware.generation == "cpu":
        raise UserError(
            f"--goodput published: nobody published failures of {hardware.name}; give the hours "
            "between two failures of the job"
        )
    found = _FAILURE_RATES.get(hardware.generation)
    if found is not None:
        return found
    other = _FAILURE_RATES["hopper"]
    return FailureRate(other.device_hours, f"not of {hardware.name}: {other.source}")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What saves and failures cost a job. All times are in seconds and nonnegative.

    Attributes:
        mttf_s: mean time from the start of the ranks to a failure.
        step_s: time of an optimizer step.
        stop_s: how long a save stops training.
        write_s: time from the end of ``stop_s`` until the checkpoint can be loaded; the next save
            waits for it.
        notice_s: time from a failure until the ranks are started again.
        restart_s: time from that start until they train.
    """

    mttf_s: float
    step_s: float
    stop_s: float
    write_s: float = 0.0
    notice_s: float = 0.0
    restart_s: float = 0.0


class Goodput(NamedTuple):
    """Where the time of a long run goes. The shares add up to 1.

    Attributes:
        every: steps between checkpoints.
        trains: the share spent on steps that no failure undoes.
        saves: the share in which a save stops training.
        notices: the share in which a failure is not noticed yet.
        restarts: the share in which the ranks start and load.
        redoes: the share spent on steps and saves that a failure undoes.
    """

    every: float
    trains: float
    saves: float
    notices: float
    restarts: float
    redoes: float


def goodput(costs: Costs, every: float) -> Goodput:
    """Return where the time goes with a checkpoint after ``every`` steps, which may be a mean."""
    mttf_s = costs.mttf_s
    # On average, the time until a failure, and until it is noticed.
    cycle_s = mttf_s + costs.notice_s
    trains = exp(-_log_cost(costs, every) - costs.restart_s / mttf_s) * mttf_s / cycle_s
    work_s = every * costs.step_s
    waits_s = max(0.0, costs.write_s - work_s)
    saves = trains * (costs.stop_s + waits_s) / work_s
    notices = costs.notice_s / cycle_s
    restarts = -expm1(-costs.restart_s / mttf_s) * mttf_s / cycle_s
    # Rounding must not make it negative.
    redoes = max(0.0, 1.0 - trains - saves - notices - restarts)
    return Goodput(every, trains, saves, notices, restarts, redoes)


def best_every(costs: Costs, most: int) -> int:
    """Return the steps between checkpoints, up to ``most``, with the largest share of training.

    The share rises up to the best number, and falls after it. That number does not depend on
    ``notice_s`` or ``restart_s``, which each failure costs whenever it comes.
    """
    return _first(1, most, lambda every: _log_cost(costs, every + 1) >= _log_cost(costs, every))


def longest_every(costs: Costs, best: int, most: int, loss: float) -> int:
    """Return the most steps between checkpoints, ``best`` to ``most``, that lose at most ``loss``.

    ``best`` comes from ``best_every``; ``loss`` is a share of time. Fewer saves load the storage
    less, and what a save costs besides its bytes is not predicted.
    """
    least = goodput(costs, best).trains - loss
    return _first(best, most, lambda every: goodput(costs, every + 1).trains < least)


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the first number from which on ``holds`` is true, or ``high``."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _log_cost(costs: Costs, every: float) -> float:
    """Return the logarithm of how many times as long a run takes, without notices and restarts.

    Two written checkpoints are T = max(work, write) + stop seconds apart. A failure comes in this
    time with probability 1 - exp(-T/M), where M is the mean time to a failure. Then the restart, of
    R seconds, and work, stop and write, of T' seconds, must pass without another failure, which
    takes exp((R + T')/M) tries. So there are f = (1 - exp(-T/M)) exp((R + T')/M) failures for each
    checkpoint, and f (M + notice) seconds, of which only the work counts. With write = 0, this is
    Daly's formula. The logarithm cannot overflow.
    """
    work_s = every * costs.step_s
    between_s = max(work_s, costs.write_s) + costs.stop_s
    again_s = work_s + costs.stop_s + costs.write_s
    fails = -expm1(-between_s / costs.mttf_s)
    return log(fails) + again_s / costs.mttf_s - log(work_s / costs.mttf_s)


def own_every(checkpoint: CheckpointTable, steps: int, step_s: float) -> float:
    """Return the mean number of steps between the checkpoints of a recipe.

    Both ``checkpoint.every`` and ``checkpoint.every_minutes`` trigger saves. The minutes count from
    the last save.

    Args:
        checkpoint: the table of the recipe.
        steps: steps of the whole run; its end always saves.
        step_s: seconds of a step.
    """
    every = min(checkpoint.every or steps, steps)
    if checkpoint.every_minutes == 0:
        return float(every)
    by_clock = ceil(60.0 * checkpoint.every_minutes / step_s)
    return every / ceil(every / by_clock)


@dataclass(frozen=True, kw_only=True)
class Saves:
    """What the checkpoints of a job cost.

    Attributes:
        bytes: bytes of a checkpoint, as ``checkpoint_bytes`` counts them.
        stop_s: how long a save stops training, in seconds.
        write_s: how long it is written during training, in seconds.
        load_s: how long it takes to check and load one, in seconds.
    """

    bytes: int
    stop_s: float
    write_s: float
    load_s: float


def checkpoint_bytes(recipe: Recipe) -> int:
    """Return the bytes of a checkpoint: parameters and optimizer state, each element once.

    They do not depend on the layout. Counters of steps, a scalar for each parameter, are left out.
    """
    optim = recipe.optim
    matrices = matrices_of(architecture(recipe.model.architecture), recipe.model, optim)
    elements = 0
    for name, row in recipe.parameters.parameters():
        tensors = 1
        if row.trains and is_trained(optim, name):
            tensors += optim.optimizer.copies(is_matrix=name in matrices)
        elements += tensors * row.elements
    return elements * DTYPE_BYTES[recipe.precision.params]


def predict_saves(
    recipe: Recipe,
    setup: Setup,
    memory: Sequence[RankMemory],
    storage_bytes_s: float,
) -> Saves:
    """Predict what a checkpoint costs, if the storage limits writes and loads.

    Each element is written once. At a start, all files are read once to verify their digests, and
    each rank reads what it holds.

    Args:
        recipe: the recipe of the job.
        setup: its setup.
        memory: the result of ``predict_memory`` for it, by pipeline rank.
        storage_bytes_s: bytes per second that all ranks together write to the storage, or read.
    """
    links = setup.machine.hardware.links
    n_bytes = checkpoint_bytes(recipe)
    write_s = n_bytes / storage_bytes_s
    in_host_memory = setup.software.offloads
    held = memory
    if in_host_memory:
        held = predict_memory(replace(setup, software=replace(setup.software, offloads=False)))
    saved = _saved_by_ranks(setup, held)
    read_bytes = n_bytes + setup.layout.ranks_of("stage").size * sum(saved)
    # What is in host memory already needs no copy.
    copy_s = 0.0
    if links is not None and not in_host_memory:
        copy_s = max(saved) / links.host_bytes_s
    in_background = recipe.checkpoint.async_save
    return Saves(
        bytes=n_bytes,
        stop_s=copy_s if in_background else copy_s + write_s,
        write_s=write_s if in_background else 0.0,
        load_s=read_bytes / storage_bytes_s,
    )


def _saved_by_ranks(setup: Setup, memory: Sequence[RankMemory]) -> list[float]:
    """Return the bytes that a rank holds of what a checkpoint has, by pipeline rank."""
    saved = [rank.weights + rank.optimizer for rank in memory]
    layout, sizes = setup.layout, setup.sizes
    if sizes.shares_embedding and layout.stages > 1:
        # The last stage has a copy of the embedding, which the first one saves.
        copy = unit_of(setup, sizes.embedding_parameters / layout.tp, 0.0, Share())
        last = layout.rank_of(layout.stages - 1)
        saved[last] -= setup.precision.gradients * copy.shard
    return saved
