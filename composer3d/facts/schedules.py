"""Facts about pipeline schedules, and the assignment of layers to stages.

This module does not import torch, so that the rules of recipes and the drawings can use it. Tests
compare these facts with the schedules that torch's runtime builds.

A user's own schedule is a CSV file with a line for each pipeline rank, and an action in each cell:

- ``0F0`` is the forward of stage 0 on micro-batch 0;
- ``0B0`` is its whole backward;
- ``0I0`` and ``0W0`` are the two halves of its backward: the gradients of inputs, and of weights;
- ``(0F1;3B0)OVERLAP_F_B`` is two actions that overlap;
- an empty cell is idle.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple

from composer3d.facts.errors import PlanError
from composer3d.facts.files import read_plain
from composer3d.facts.text import in_quotes, shorten


class StageCount(NamedTuple):
    """How many stages a pipeline rank may hold."""

    least_per_rank: int
    most_per_rank: int
    default_per_rank: int


class Schedule(NamedTuple):
    """The facts about one schedule that do not depend on the recipe.

    Attributes:
        stages: how many stages a rank may hold.
        v_shaped: whether rank r holds stages r and 2 pp - 1 - r. Otherwise it holds stages r,
            r + pp, r + 2 pp, and so on.
        splits_backward: whether backward may run in two halves: the gradients of inputs, and later
            the gradients of weights.
    """

    stages: StageCount
    v_shaped: bool = False
    splits_backward: bool = False


_ONE_STAGE = StageCount(least_per_rank=1, most_per_rank=1, default_per_rank=1)
_TWO_STAGES = StageCount(least_per_rank=2, most_per_rank=2, default_per_rank=2)
_SEVERAL_STAGES = StageCount(least_per_rank=2, most_per_rank=1 << 16, default_per_rank=2)
_ANY_STAGES = StageCount(least_per_rank=1, most_per_rank=1 << 16, default_per_rank=1)

SCHEDULES: dict[str, Schedule] = {
    # Huang et al. 2019, arXiv 1811.06965
    "GPipe": Schedule(_ONE_STAGE),
    # PipeDream-Flush: Narayanan et al. 2019, arXiv 2006.09503
    "1F1B": Schedule(_ONE_STAGE),
    # Breadth-first: Lamy-Poirier 2022, arXiv 2211.05953
    "LoopedBFS": Schedule(_SEVERAL_STAGES),
    # Narayanan et al. 2021, arXiv 2104.04473
    "Interleaved1F1B": Schedule(_SEVERAL_STAGES),
    # ZB1P: Qi et al. 2023, arXiv 2401.10241
    "InterleavedZeroBubble": Schedule(_SEVERAL_STAGES, splits_backward=True),
    # The same paper, section 6
    "ZBVZeroBubble": Schedule(_TWO_STAGES, v_shaped=True, splits_backward=True),
    # DeepSeek-AI 2024, arXiv 2412.19437, cut in half
    "DualPipeV": Schedule(_TWO_STAGES, v_shaped=True, splits_backward=True),
    # Whatever its file says
    "csv": Schedule(_ANY_STAGES, splits_backward=True),
}


def stages_of(rank: int, pp: int, stages_per_rank: int, *, v_shaped: bool) -> list[int]:
    """Return the stages of pipeline rank ``rank`` of ``pp``, in ascending order.

    A V-shaped schedule has two stages per rank; ``stages_per_rank`` is not read then.
    """
    if v_shaped:
        return [rank, 2 * pp - 1 - rank]
    return list(range(rank, pp * stages_per_rank, pp))


def rank_of(stage: int, pp: int, *, v_shaped: bool) -> int:
    """Return the pipeline rank that ``stages_of`` gives a stage to."""
    return 2 * pp - 1 - stage if v_shaped and stage >= pp else stage % pp


def micro_batch_requirement(schedule: str, count: int, pp: int, pp_text: str) -> str | None:
    """Return what the schedule requires of the number of micro-batches, or None if it is met.

    Args:
        schedule: a key of ``SCHEDULES``.
        count: the number of micro-batches that a rank runs in a step.
        pp: the number of pipeline ranks.
        pp_text: the words for ``pp`` in the returned text, such as "pp = 4".

    Returns:
        The end of a sentence, such as "at least pp = 4".
    """
    if schedule == "1F1B" and count < pp:
        return f"at least {pp_text}"
    if schedule == "DualPipeV" and count < 2 * pp:
        return f"at least twice {pp_text}"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, count // pp)
        if count % rounds:
            return (
                f"a multiple of {rounds}, to form {rounds} equal rounds of at least {pp_text} "
                "micro-batches"
            )
    return None


def fewest_micro_batches(schedule: str, pp: int) -> int:
    """Return the fewest micro-batches, but two or more, that a schedule takes on several ranks."""
    return next(
        count
        for count in range(2, 2 * pp + 1)
        if micro_batch_requirement(schedule, count, pp, "") is None
    )


def nearest_micro_batches(schedule: str, count: int, pp: int) -> list[int]:
    """Return the nearest legal numbers of micro-batches below and above ``count``, in order.

    ``count`` must violate ``micro_batch_requirement``. If no number below it is legal, the list has
    one number only. The numbers are computed and not searched for, because ``count`` may be a
    billion.
    """
    if schedule == "1F1B":
        return [pp]
    if schedule == "DualPipeV":
        return [2 * pp]
    rounds = count // pp  # at least 2: one round may have any size
    below = count - count % rounds
    # Either the same number of rounds, each longer by one micro-batch, or one more round of pp.
    above = min(below + rounds, (rounds + 1) * pp)
    return [below, above]


# --- schedules from a file ---

_CSV_BYTES = 4 << 20  # a few hundred thousand actions
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")

# For each kind of action, the kind that the same stage must run before it on a micro-batch.
PREDECESSORS = {"F": None, "B": "F", "I": "F", "W": "I"}


class Action(NamedTuple):
    """One action of a schedule; ``kind`` is F, B, I or W."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


# What a rank runs at a time: one action, or several that overlap.
Cell = tuple[Action, ...]


def parse_action(text: str) -> Action | None:
    """Return the action that a text such as "0F0" names, or None if it names none."""
    match = _ACTION.fullmatch(text)
    return None if match is None else Action(int(match[1]), match[2], int(match[3]))


def read_csv(path: str) -> list[list[str]]:
    """Read a schedule's file. Return the cells of each pipeline rank, without the idle ones.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        lines = read_plain(path, limit=_CSV_BYTES).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise PlanError(f"the schedule {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise PlanError(f"the schedule {path} cannot be read ({error})") from None
    return [
        [cell.strip() for cell in line.split(",") if cell.strip()] for line in lines if line.strip()
    ]


def check_csv(
    rows: Sequence[Sequence[str]],
    path: str,
    *,
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
) -> list[list[int]]:
    """Check that a schedule can run, as ``parse_csv`` does; return the stages of each rank."""
    cells = parse_csv(
        rows, path, pp=pp, stages_per_rank=stages_per_rank, micro_batches=micro_batches
    )
    return [sorted({action.stage for cell in row for action in cell}) for row in cells]


def parse_csv(
    rows: Sequence[Sequence[str]],
    path: str,
    *,
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
) -> list[list[Cell]]:
    """Check that a schedule is complete, and that no rank waits for ever; return its actions.

    Every stage must be on one rank. Every action must come exactly once, after the actions that it
    depends on.

    Args:
        rows: the cells of each pipeline rank, from ``read_csv``.
        path: the file, for messages.
        pp: the number of pipeline ranks.
        stages_per_rank: the number of stages that each rank must hold.
        micro_batches: the number of micro-batches that a rank runs in a step.

    Returns:
        The cells of each pipeline rank, in order.

    Raises:
        PlanError: the schedule cannot run; the message names the line of the file.
    """
    if len(rows) != pp:
        raise PlanError(
            f"{path} has {len(rows)} lines, but needs one for each of mesh.pp = {pp} pipeline ranks"
        )
    # A bound that no valid schedule reaches: F, B, I and W for every stage and micro-batch.
    most_cells = 4 * stages_per_rank * micro_batches
    for line, row in enumerate(rows, 1):
        if len(row) > most_cells:
            raise PlanError(
                f"{path}:{line} has {len(row)} cells, but {stages_per_rank} stages with "
                f"{micro_batches} micro-batches need at most {most_cells}"
            )

    cells = [
        [_parse_cell(cell, f"{path}:{line}") for cell in row] for line, row in enumerate(rows, 1)
    ]
    actions = [[action for cell in row for action in cell] for row in cells]
    stages = [sorted({action.stage for action in row}) for row in actions]
    _check_stages(stages, path, stages_per_rank)
    for line, row_of_actions in enumerate(actions, 1):
        _check_actions(row_of_actions, f"{path}:{line}", micro_batches)
    _check_dependencies(cells, path, last_stage=pp * stages_per_rank - 1)
    return cells


def _parse_cell(cell: str, place: str) -> Cell:
    """Return the actions of a cell: one action, or several that overlap."""
    overlap = _OVERLAP.fullmatch(cell)
    actions = []
    for text in overlap[1].split(";") if overlap else [cell]:
        action = parse_action(text.strip())
        if action is None:
            raise PlanError(
                f"{place}: {in_quotes(cell)} is not an action; write a stage, one of F, B, I and "
                "W, and a micro-batch, such as 0F0"
            )
        actions.append(action)
    return tuple(actions)


def _check_stages(stages: Sequence[Sequence[int]], path: str, stages_per_rank: int) -> None:
    """Check that every stage is on one rank, and that each rank has the same number of stages."""
    count = len(stages) * stages_per_rank
    is_complete = sorted(stage for held in stages for stage in held) == list(range(count))
    if is_complete and all(len(held) == stages_per_rank for held in stages):
        return
    found = "; ".join(f"line {line}: {held}" for line, held in enumerate(stages, 1))
    raise PlanError(
        f"{path} must put stages 0 to {count - 1} on {len(stages)} ranks, {stages_per_rank} on "
        f"each (mesh.pp x parallel.virtual_stages), but has {shorten(found, 300)}"
    )


def _check_actions(row: Sequence[Action], place: str, micro_batches: int) -> None:
    """Check that a rank runs every action of its stages once, and in an order that can run."""
    seen: set[Action] = set()
    for action in row:
        if action.micro_batch >= micro_batches:
            raise PlanError(
                f"{place}: {action} is beyond the {micro_batches} micro-batches that a rank runs "
                "in a step"
            )
        if action in seen:
            raise PlanError(f"{place}: {action} comes twice")
        predecessor_kind = PREDECESSORS[action.kind]
        if predecessor_kind is not None:
            predecessor = action._replace(kind=predecessor_kind)
            if predecessor not in seen:
                raise PlanError(f"{place}: {action} comes before {predecessor}")
        seen.add(action)

    for stage in sorted({action.stage for action in row}):
        for micro_batch in range(micro_batches):
            backward = [kind for kind in "BIW" if Action(stage, kind, micro_batch) in seen]
            if backward not in (["B"], ["I", "W"]):
                raise PlanError(
                    f"{place}: it must have either {stage}B{micro_batch}, or both "
                    f"{stage}I{micro_batch} and {stage}W{micro_batch}; a step of this recipe has "
                    f"{micro_batches} micro-batches"
                )


class StageMessage(NamedTuple):
    """A message of a stage: its activation for the next stage, or a gradient for the previous."""

    sender: int  # a stage
    is_gradient: bool
    micro_batch: int

    @property
    def boundary(self) -> int:
        """The boundary that it crosses: number i is between the stages i and i + 1."""
        return self.sender - self.is_gradient


def message_of(action: Action) -> StageMessage | None:
    """Return the message that an action sends; W sends none.

    The forward of the last stage and the backward of the first one have a message that nobody
    needs.
    """
    if action.kind == "W":
        return None
    return StageMessage(action.stage, action.kind != "F", action.micro_batch)


def message_for(action: Action, last_stage: int) -> StageMessage | None:
    """Return the message that an action must receive first.

    W needs none, nor do the forward of the first stage and the backward of the last one.
    """
    if action.kind == "F" and action.stage > 0:
        return StageMessage(action.stage - 1, False, action.micro_batch)
    if action.kind in "BI" and action.stage < last_stage:
        return StageMessage(action.stage + 1, True, action.micro_batch)
    return None


class RunnableCell(NamedTuple):
    """A cell that can run, its rank, and the messages that it needs and sends."""

    rank: int
    cell: Cell
    needed: list[StageMessage]
    sent: list[StageMessage]


def in_order_of_messages(
    ranks: Sequence[Sequence[Cell]], last_stage: int
) -> Iterator[RunnableCell]:
    """Yield each cell after all cells that send what it needs.

    Actions that overlap start together: torch receives for all actions of a cell before it runs any
    of them. A cell that waits for ever is left out, and so is all that its rank runs after it.
    """
    sent: set[StageMessage] = set()
    next_cells = [0] * len(ranks)  # by rank: the index of the cell that it runs next
    # The ranks that wait for each message. A rank is tried again only when its message is sent.
    waiting: dict[StageMessage, list[int]] = {}
    runnable = list(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        while next_cells[rank] < len(ranks[rank]):
            cell = ranks[rank][next_cells[rank]]
            needed = [
                message
                for action in cell
                if (message := message_for(action, last_stage)) is not None
            ]
            missing = [message for message in needed if message not in sent]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            next_cells[rank] += 1
            own = [message for action in cell if (message := message_of(action)) is not None]
            yield RunnableCell(rank, cell, needed, own)
            for message in own:
                sent.add(message)
                runnable += waiting.pop(message, ())


def _check_dependencies(cells: Sequence[Sequence[Cell]], path: str, *, last_stage: int) -> None:
    """Check that no rank waits for ever for a message."""
    done = [0] * len(cells)
    sent: set[StageMessage | None] = {None}
    for rank, _, _, own in in_order_of_messages(cells, last_stage):
        done[rank] += 1
        sent.update(own)
    for line, (row, index) in enumerate(zip(cells, done, strict=True), 1):
        if index < len(row):
            blocked = next(one for one in row[index] if message_for(one, last_stage) not in sent)
            raise PlanError(f"{path}:{line}: {blocked} waits for ever: ranks wait for each other")


# --- forward only, and the cut into stages ---


class Forward(NamedTuple):
    """The forward of one stage on one micro-batch."""

    stage: int
    micro_batch: int


def forward_order(
    stages: Sequence[Sequence[int]], micro_batches: int
) -> list[list[Forward | None]]:
    """Return a schedule of forwards alone, in ticks.

    In each tick, a rank runs its last stage that has an input, which empties the pipeline first.
    The output of a tick can be read in the next tick.

    Args:
        stages: the stages of each pipeline rank, in ascending order.
        micro_batches: the number of micro-batches.

    Returns:
        For each tick, the forward that each rank runs, or None if it is idle.
    """
    count = sum(len(held) for held in stages)
    # For each stage, the micro-batches whose input is there. The last list has the finished ones.
    ready: list[list[int]] = [list(range(micro_batches)), *([] for _ in range(count))]
    ticks: list[list[Forward | None]] = []
    while len(ready[count]) < micro_batches:
        tick: list[Forward | None] = []
        for held in stages:
            stage = next((stage for stage in reversed(held) if ready[stage]), None)
            tick.append(None if stage is None else Forward(stage, ready[stage].pop(0)))
        for forward in tick:
            if forward is not None:
                ready[forward.stage + 1].append(forward.micro_batch)
        ticks.append(tick)
    return ticks


class _Cut(NamedTuple):
    """A cut of the blocks before some index into stages."""

    maximum: float  # the cost of the slowest stage
    squares: float  # the sum of the squared costs
    ends: tuple[int, ...]  # the end of each stage


def balanced_cut(first: float, blocks: Sequence[float], last: float, stages: int) -> list[range]:
    """Cut consecutive blocks into stages so that the slowest stage costs as little as possible.

    Among the cuts with the smallest maximum, the one with the smallest sum of squares is chosen, so
    that the other stages are even.

    Args:
        first: the cost of the part before the blocks (the embedding), paid by the first stage.
        blocks: the cost of each block, in the same unit.
        last: the cost of the part after the blocks (norm and head), paid by the last stage.
        stages: the number of stages; each gets at least one block.

    Returns:
        For each stage, the range of its blocks.

    Raises:
        PlanError: there are fewer blocks than stages.
    """
    if len(blocks) < stages:
        raise PlanError(
            f"{len(blocks)} layers cannot be cut into {stages} pipeline stages; use mesh.pp of at "
            f"most {len(blocks)}"
        )
    costs = [*blocks]
    costs[0] += first
    costs[-1] += last

    # First find the smallest maximum, then the most even cut that does not exceed it.
    smallest = _best_cut(costs, stages, "maximum").maximum
    best = _best_cut(costs, stages, "squares", limit=smallest)
    return [range(begin, end) for begin, end in pairwise((0, *best.ends))]


def _best_cut(
    costs: Sequence[float],
    stages: int,
    criterion: Literal["maximum", "squares"],
    limit: float = inf,
) -> _Cut:
    """Return the cut with the least ``criterion`` in which no stage costs more than ``limit``.

    This is dynamic programming over the stages: ``best_by_end`` has, for each index, the best cut
    of the blocks before it into the stages so far.
    """
    total = [0.0, *accumulate(costs)]  # the cost of the blocks before each index
    best_by_end = {0: _Cut(0.0, 0.0, ())}
    for stage in range(stages):
        next_by_end: dict[int, _Cut] = {}
        stages_left = stages - stage - 1
        for end in range(stage + 1, len(costs) - stages_left + 1):
            options = []
            for begin, cut in best_by_end.items():
                cost = total[end] - total[begin]
                if begin < end and cost <= limit:
                    options.append(
                        _Cut(max(cut.maximum, cost), cut.squares + cost * cost, (*cut.ends, end))
                    )
            if options:
                next_by_end[end] = min(options, key=attrgetter(criterion))
        best_by_end = next_by_end
    return best_by_end[len(costs)]
