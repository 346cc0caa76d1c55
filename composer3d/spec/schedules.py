"""Pipeline schedules as facts, and which stage holds which layers. Pure: the planner and the drawings read it without
torch.

What torch's runtime builds for a name is compared with these facts in the tests. A schedule of one's own is a file of
comma-separated actions, a line for each pipeline rank: ``0F0`` is the forward of stage 0 on micro-batch 0, ``B`` a
whole backward, ``I`` and ``W`` its two halves (the gradients of inputs, and of weights), ``(0F1;3B0)OVERLAP_F_B`` two
in one place, and nothing between two commas is idle.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import itemgetter
from typing import NamedTuple

from composer3d.spec.errors import PlanError
from composer3d.spec.files import read_plain


class Kind(NamedTuple):
    """What is the same for every use of one schedule."""

    stages: tuple[int, int, int]  # least, most and default number that a rank holds
    v: bool = False  # rank r holds stages r and 2 pp - 1 - r, else r, r + pp, r + 2 pp and so on
    splits: bool = False  # backward comes in its two halves


_MANY = 1 << 16
SCHEDULES: dict[str, Kind] = {
    "GPipe": Kind(stages=(1, 1, 1)),  # Huang et al. 2019, arXiv 1811.06965
    "1F1B": Kind(stages=(1, 1, 1)),  # Narayanan et al. 2019, PipeDream-Flush, arXiv 2006.09503
    "LoopedBFS": Kind(stages=(2, _MANY, 2)),  # Lamy-Poirier 2022, breadth-first, arXiv 2211.05953
    "Interleaved1F1B": Kind(stages=(2, _MANY, 2)),  # Narayanan et al. 2021, arXiv 2104.04473
    "InterleavedZeroBubble": Kind(
        stages=(2, _MANY, 2), splits=True
    ),  # Qi et al. 2023, ZB1P, arXiv 2401.10241
    "ZBVZeroBubble": Kind(stages=(2, 2, 2), v=True, splits=True),  # the same, section 6
    "DualPipeV": Kind(
        stages=(2, 2, 2), v=True, splits=True
    ),  # DeepSeek-AI 2024, arXiv 2412.19437, cut in half
    "csv": Kind(stages=(1, _MANY, 1), splits=True),  # as its file says
}


def stages_of(rank: int, pp: int, each: int, *, v: bool) -> list[int]:
    """The stages of pipeline rank ``rank`` of ``pp``, ``each`` a rank, in order."""
    return [rank, 2 * pp - 1 - rank] if v else list(range(rank, pp * each, pp))


def micro_batches_wrong(schedule: str, count: int, pp: int, ranks: str) -> str | None:
    """What ``schedule`` needs of the number of micro-batches, where ``count`` is not it; ``ranks`` says pp in words."""
    rounds = max(1, count // pp)
    if schedule == "1F1B" and count < pp:
        return f"at least {ranks}"
    if schedule == "DualPipeV" and count < 2 * pp:
        return f"at least twice {ranks}"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        return f"as many in each of its {rounds} rounds of {ranks} or more"
    return None


def micro_batches_near(schedule: str, count: int, pp: int) -> list[int]:
    """The nearest numbers of micro-batches that ``schedule`` takes below and above ``count``, which it does not take.

    Computed, not searched for: ``count`` may be a billion. Below there may be none.
    """
    if schedule in ("1F1B", "DualPipeV"):
        return [pp if schedule == "1F1B" else 2 * pp]
    rounds = count // pp  # at least 2: with one round any count is taken
    below = count - count % rounds
    return [
        below,
        min(below + rounds, (rounds + 1) * pp),
    ]  # of rounds + 1 rounds, the first count fills each


Action = tuple[int, str, int]  # stage, F B I or W, micro-batch
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_GRADIENT = "B or I"  # what both of them send to the stage before
_CSV_BYTES = 4 << 20  # some hundred thousand actions
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read_csv(path: str) -> list[list[str]]:
    """The cells of a schedule's file, a list for each pipeline rank; idle ones are left out. Raises PlanError."""
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
    rows: Sequence[Sequence[str]], path: str, *, pp: int, each: int, micro_batches: int
) -> list[list[int]]:
    """Hold a schedule against what it is to run: every stage on one rank, every action once, in an order that ends.

    Returns the stages of each rank, in order; raises PlanError with the line of the file.
    """
    if len(rows) != pp:
        raise PlanError(
            f"{path} has {len(rows)} lines, one for each pipeline rank, but mesh.pp = {pp}"
        )
    most = 4 * each * micro_batches  # F, B, I and W of each: more than any schedule holds
    for number, given in enumerate(rows, 1):
        if len(given) > most:
            raise PlanError(
                f"{path}:{number} has {len(given)} cells, but {each} stages with {micro_batches} micro-batches make "
                f"at most {most}"
            )
    cells = [
        [_actions(cell, f"{path}:{number}") for cell in row] for number, row in enumerate(rows, 1)
    ]
    actions = [[action for cell in row for action in cell] for row in cells]
    stages = [sorted({stage for stage, _, _ in row}) for row in actions]
    total = pp * each
    if sorted(stage for held in stages for stage in held) != list(range(total)) or any(
        len(s) != each for s in stages
    ):
        shown = _brief("; ".join(f"line {number}: {held}" for number, held in enumerate(stages, 1)))
        raise PlanError(
            f"{path} must put stages 0 to {total - 1} on {pp} ranks, {each} on each "
            f"(mesh.pp x parallel.virtual_stages), but has {shown}"
        )
    for number, row in enumerate(actions, 1):
        _check_once(row, f"{path}:{number}", micro_batches)
    _check_ends(cells, path, last=total - 1)
    return stages


def _actions(cell: str, place: str) -> list[Action]:
    """What a cell holds: one action, or those that overlap."""
    overlap = _OVERLAP.fullmatch(cell)
    parts = [
        _ACTION.fullmatch(part.strip()) for part in (overlap[1].split(";") if overlap else [cell])
    ]
    if not all(parts):
        raise PlanError(
            f"{place}: {_brief(repr(cell))} is no action; write a stage, F, B, I or W, and a micro-batch: 0F0"
        )
    return [(int(part[1]), part[2], int(part[3])) for part in parts if part]


def _brief(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


def _check_once(row: Sequence[Action], place: str, micro_batches: int) -> None:
    seen: set[Action] = set()
    for stage, what, number in row:
        name = f"{stage}{what}{number}"
        before = {"F": "", "B": "F", "I": "F", "W": "I"}[what]
        if number >= micro_batches:
            raise PlanError(
                f"{place}: {name} is beyond the {micro_batches} micro-batches that a rank runs in a step"
            )
        if (stage, what, number) in seen:
            raise PlanError(f"{place}: {name} comes twice")
        if before and (stage, before, number) not in seen:
            raise PlanError(f"{place}: {name} comes before {stage}{before}{number}")
        seen.add((stage, what, number))
    for stage in {action[0] for action in row}:
        for number in range(micro_batches):
            if "".join(back for back in "BIW" if (stage, back, number) in seen) not in ("B", "IW"):
                raise PlanError(
                    f"{place}: it must hold either {stage}B{number}, or both {stage}I{number} and {stage}W{number}; "
                    f"a step of this recipe has {micro_batches} micro-batches"
                )


def _check_ends(cells: Sequence[Sequence[Sequence[Action]]], path: str, *, last: int) -> None:
    """Run it: an action waits for what the stage before it, or in backward the one after it, has yet to send.

    What overlaps starts together: torch receives for all of a cell before it runs any of it.
    """
    done: set[Action] = set()
    following = [0] * len(cells)  # by rank, the cell that it runs next
    waiting: dict[
        Action, list[int]
    ] = {}  # ranks, by what wakes them: each is looked at again only then
    awake = list(range(len(cells)))

    def missing(cell: Sequence[Action]) -> tuple[Action, Action] | None:
        """The first action of a cell that has to wait, and what for."""
        for stage, what, number in cell:
            need = (stage - 1, "F", number) if what == "F" else (stage + 1, _GRADIENT, number)
            if what != "W" and stage != (0 if what == "F" else last) and need not in done:
                return (stage, what, number), need
        return None

    while awake:
        rank = awake.pop()
        while following[rank] < len(cells[rank]):
            cell = cells[rank][following[rank]]
            if found := missing(cell):
                waiting.setdefault(found[1], []).append(rank)
                break
            following[rank] += 1
            for stage, what, number in cell:
                sent = (stage, _GRADIENT if what in "BI" else what, number)
                done.add(sent)
                awake += waiting.pop(sent, [])
    for number, (row, at) in enumerate(zip(cells, following, strict=True), 1):
        if at < len(row) and (found := missing(row[at])):
            stage, what, micro_batch = found[0]
            raise PlanError(
                f"{path}:{number}: {stage}{what}{micro_batch} waits for ever: ranks wait for each other"
            )


def forward_order(
    stages: Sequence[Sequence[int]], micro_batches: int
) -> list[list[tuple[int, int] | None]]:
    """Forwards alone, in step: for each tick what each rank runs, (stage, micro-batch) or None.

    A rank runs the last of its ``stages`` (in order) that has an input, which empties the pipeline first. What is made
    in a tick can be read in the next one.
    """
    count = sum(len(held) for held in stages)
    ready: list[list[int]] = [
        list(range(micro_batches)),
        *([] for _ in range(count)),
    ]  # the last holds what is done
    ticks: list[list[tuple[int, int] | None]] = []
    while len(ready[count]) < micro_batches:
        tick: list[tuple[int, int] | None] = []
        for held in stages:
            stage = next((stage for stage in reversed(held) if ready[stage]), None)
            tick.append(None if stage is None else (stage, ready[stage].pop(0)))
        for stage, number in filter(None, tick):
            ready[stage + 1].append(number)
        ticks.append(tick)
    return ticks


def balanced_cut(first: float, blocks: Sequence[float], last: float, stages: int) -> list[range]:
    """Cut consecutive blocks into ``stages`` ranges so that the slowest stage is as fast as can be.

    Args:
        first, blocks, last: the cost of what precedes the blocks (the embedding), of each block, and of what follows
            them (norm and head), in one unit. ``first`` is paid by the first stage and ``last`` by the last one.
        stages: number of stages, each of which gets at least one block.

    Among the cuts with the smallest maximum it takes the one with the smallest sum of squares, so that the others are
    even. Raises PlanError where there are fewer blocks than stages.
    """
    count = len(blocks)
    if count < stages:
        raise PlanError(
            f"{count} layers cannot be cut into {stages} pipeline stages; use mesh.pp of at most {count}"
        )
    costs = [*blocks]
    costs[0] += first
    costs[-1] += last
    before = [0.0, *accumulate(costs)]
    most = inf  # that a stage may cost
    for aim in (
        0,
        1,
    ):  # the smallest maximum, and then, where no stage is above that, the smallest sum of squares
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {
            0: (0.0, 0.0, ())
        }  # by end: both of them, and cuts
        for stage in range(stages):
            following = {}
            for end in range(stage + 1, count - (stages - stage - 1) + 1):
                options = [
                    (max(worst, cost), squares + cost * cost, (*cuts, end))
                    for begin, (worst, squares, cuts) in best.items()
                    if begin < end and (cost := before[end] - before[begin]) <= most
                ]
                if options:
                    following[end] = min(options, key=itemgetter(aim))
            best = following
        most, _, cuts = best[count]
    return [range(begin, end) for begin, end in pairwise((0, *cuts))]
