"""The actions of each pipeline schedule, in the order in which each pipeline rank runs them.

They are the compute actions that torch's runtime runs, which adds the sends and receives between
them; a test compares both, action by action. The papers are those named in ``facts.schedules``.
"""

from collections import Counter, deque
from collections.abc import Sequence

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import (
    SCHEDULES,
    Action,
    Cell,
    micro_batch_requirement,
    parse_csv,
    read_csv,
    stages_of,
)
from composer3d.recipe.schema import ParallelTable


def recipe_actions(pp: int, parallel: ParallelTable, micro_batches: int) -> list[list[Cell]]:
    """Return the cells of each pipeline rank of a recipe, also if its schedule is a CSV file.

    Args:
        pp: pipeline ranks. One rank runs its only stage, one micro-batch after the other.
        parallel: the recipe's ``[parallel]``.
        micro_batches: micro-batches that a rank runs in a step.

    Raises:
        PlanError: the schedule cannot run this number of micro-batches; or its file cannot be read
            or run.
    """
    if pp == 1:
        return [[(Action(0, kind, index),) for index in range(micro_batches) for kind in "FB"]]
    return cells_of(
        parallel.schedule, pp, parallel.stages_per_rank, micro_batches, parallel.schedule_csv
    )


def cells_of(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, path: str | None = None
) -> list[list[Cell]]:
    """Return the cells of each rank: of ``facts.schedules``, or of a CSV file.

    Raises:
        PlanError: the schedule cannot run with these numbers, or its file cannot be read.
    """
    if schedule == "csv":
        return parse_csv(
            read_csv(path or ""),
            path or "",
            pp=pp,
            stages_per_rank=stages_per_rank,
            micro_batches=micro_batches,
        )
    return actions(schedule, pp, stages_per_rank, micro_batches)


def keeps_gradients_of_loss(pp: int, parallel: ParallelTable, micro_batches: int) -> bool:
    """Return whether each loss has its backward before the next forward of the last stage.

    ``memory.loss_chunks`` then computes gradients with the loss: those of one micro-batch exist at
    a time.

    Args:
        pp, parallel, micro_batches: as for ``recipe_actions``, which says what is raised.
    """
    rows = recipe_actions(pp, parallel, micro_batches)
    last = max(action.stage for row in rows for cell in row for action in cell)
    waiting = most = 0
    for row in rows:
        for cell in row:
            for action in cell:
                if action.stage == last and action.kind != "W":
                    waiting += 1 if action.kind == "F" else -1
                    most = max(most, waiting)
    return most == 1


_ACTIVE_STAGES = 3  # torch's runtime keeps the parameters of this many stages gathered


def active_stages(cells: Sequence[Cell]) -> list[list[int]]:
    """Return, for each cell, the next stages that its rank runs, at most ``_ACTIVE_STAGES``."""
    windows: list[list[int]] = []
    upcoming: list[int] = []
    for cell in reversed(cells):
        stages = [action.stage for action in cell]
        upcoming = [*stages, *(other for other in upcoming if other not in stages)]
        windows.append(upcoming[:_ACTIVE_STAGES])
    return windows[::-1]


def actions(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> list[list[Cell]]:
    """Return the cells that each pipeline rank runs in a step, in its order.

    Args:
        schedule: a key of ``facts.schedules.SCHEDULES``, except "csv".
        pp: pipeline ranks.
        stages_per_rank: stages that each rank holds.
        micro_batches: micro-batches that a rank runs in a step.

    Returns:
        A list for each pipeline rank. A cell is one action, or a forward and a backward that
        overlap (DualPipeV only).

    Raises:
        PlanError: the schedule is unknown, or cannot run with these numbers.
    """
    facts = SCHEDULES.get(schedule)
    if facts is None or schedule == "csv":
        names = ", ".join(name for name in SCHEDULES if name != "csv")
        raise PlanError(f"the schedule {schedule!r} has no rule; the schedules are {names}")
    least, most = facts.stages.least_per_rank, facts.stages.most_per_rank
    if not least <= stages_per_rank <= most:
        raise PlanError(
            f"{schedule} cannot have {stages_per_rank} stages on a rank; use {least}"
            + ("" if most == least else " or more")
        )
    if pp < 1 or micro_batches < 1:
        raise PlanError(
            f"{schedule} has {pp} pipeline ranks and {micro_batches} micro-batches; use at least "
            "one of each"
        )
    need = micro_batch_requirement(schedule, micro_batches, pp, f"pp = {pp}")
    if need is not None:
        raise PlanError(f"{schedule} has {micro_batches} micro-batches, but needs {need}")

    orders = []
    for rank in range(pp):
        stages = stages_of(rank, pp, stages_per_rank, v_shaped=facts.v_shaped)
        if schedule == "GPipe":
            order = _gpipe(stages, micro_batches)
        elif schedule == "1F1B":
            order = _one_forward_one_backward(stages, pp - 1 - rank, micro_batches)
        elif schedule == "LoopedBFS":
            order = _breadth_first(stages, micro_batches)
        elif schedule == "Interleaved1F1B":
            order = _interleaved(stages, pp, rank, micro_batches)
        elif schedule == "InterleavedZeroBubble":
            order = _interleaved_zero_bubble(stages, pp, rank, micro_batches)
        elif schedule == "ZBVZeroBubble":
            order = _zbv(stages, pp, rank, micro_batches)
        else:
            order = _dual_pipe_v(stages, pp, rank, micro_batches)
        orders.append(order)
    return orders


def _gpipe(stages: Sequence[int], micro_batches: int) -> list[Cell]:
    """Run all forwards, then all backwards, both in the order of micro-batches."""
    (stage,) = stages
    return [(Action(stage, kind, index),) for kind in "FB" for index in range(micro_batches)]


def _breadth_first(stages: Sequence[int], micro_batches: int) -> list[Cell]:
    """Run all micro-batches through a stage before the next stage begins; then the reverse."""
    forwards = [Action(stage, "F", index) for stage in stages for index in range(micro_batches)]
    backwards = [action._replace(kind="B") for action in reversed(forwards)]
    return [(action,) for action in (*forwards, *backwards)]


def _one_forward_one_backward(stages: Sequence[int], warmup: int, micro_batches: int) -> list[Cell]:
    forwards = _in_rounds(stages, micro_batches, micro_batches, "F")
    backwards = _in_rounds(stages, micro_batches, micro_batches, "B")
    return _alternate(forwards, backwards, warmup)


def _interleaved(stages: Sequence[int], pp: int, rank: int, micro_batches: int) -> list[Cell]:
    """Alternate forwards and backwards; both go through the stages in rounds of micro-batches.

    Each hop from the last rank adds two forwards to the warm-up: with two micro-batches under way
    for each boundary, a message has time to arrive while the rank computes.
    """
    per_round = _micro_batches_per_round(pp, micro_batches)
    forwards = _in_rounds(stages, per_round, micro_batches, "F")
    backwards = _in_rounds(stages[::-1], per_round, micro_batches, "B")
    warmup = (len(stages) - 1) * per_round + 2 * (pp - 1 - rank)
    return _alternate(forwards, backwards, warmup)


def _interleaved_zero_bubble(
    stages: Sequence[int], pp: int, rank: int, micro_batches: int
) -> list[Cell]:
    """Run as ``_interleaved``, but put the weight gradients off, by one more on each later rank.

    They fill the time in which a rank waits at the end of the step (ZB-H1). Each hop from the last
    rank adds one forward to the warm-up, so that activations need no more memory than in 1F1B.
    """
    per_round = _micro_batches_per_round(pp, micro_batches)
    forwards = _in_rounds(stages, per_round, micro_batches, "F")
    input_halves = _in_rounds(stages[::-1], per_round, micro_batches, "I")
    warmup = (len(stages) - 1) * per_round + (pp - 1 - rank)

    order: list[Cell] = []
    waiting: deque[Action] = deque()
    for cell in _alternate(forwards, input_halves, warmup):
        order.append(cell)
        if cell[0].kind == "I":
            waiting.append(cell[0]._replace(kind="W"))
            if len(waiting) > rank:
                order.append((waiting.popleft(),))
    return order + [(action,) for action in waiting]


def _micro_batches_per_round(pp: int, micro_batches: int) -> int:
    """Return the size of a round: pp micro-batches, or more if there is a remainder to spread."""
    return micro_batches // max(1, micro_batches // pp)


def _in_rounds(
    stages: Sequence[int], per_round: int, micro_batches: int, kind: str
) -> list[Action]:
    """Return the actions of one kind: each round passes all ``stages`` before the next begins."""
    return [
        Action(stage, kind, index)
        for begin in range(0, micro_batches, per_round)
        for stage in stages
        for index in range(begin, begin + per_round)
    ]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Cell]:
    """Run ``warmup`` forwards, then one forward and one backward in turn, then what is left."""
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    steady = len(forwards) - warmup
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        order += [forward, backward]
    order += backwards[steady:]
    return [(action,) for action in order]


class _InOrder:
    """The order of a rank that runs each kind of action of each stage in micro-batch order."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self._runs: Counter[tuple[int, str]] = Counter()

    def run(self, *parts: tuple[int, str]) -> None:
        """Append one cell: the next micro-batch of each (stage, kind); several overlap."""
        self.cells.append(tuple(self._next(stage, kind) for stage, kind in parts))

    def _next(self, stage: int, kind: str) -> Action:
        # The two halves of a backward count as one, so that whole backwards may follow them.
        counter = (stage, "I" if kind == "B" else kind)
        action = Action(stage, kind, self._runs[counter])
        self._runs[counter] += 1
        if kind == "B":
            self._runs[stage, "W"] += 1
        return action


def _zbv(stages: Sequence[int], pp: int, rank: int, micro_batches: int) -> list[Cell]:
    """Zero bubble on a V: a rank's first stage goes down the ranks, its second one comes back.

    If F, I and W take equally long, a rank never waits between its first and its last action.
    """
    down, up = stages
    hops = pp - rank  # to the turn of the V, this rank counted
    # Fewer micro-batches than fill the V: the order is that of a full one, without what is missing.
    count = max(micro_batches, 2 * pp - 1)
    order = _InOrder()

    # Warm-up: fill the way down, then the way back up.
    for _ in range(2 * hops - 1):
        order.run((down, "F"))
    for _ in range(rank):
        order.run((up, "F"))
        order.run((down, "F"))
    for _ in range(hops):
        order.run((up, "F"))
        order.run((up, "I"))
        order.run((up, "W"))

    # Steady state: one micro-batch goes down and one comes up, with both whole backwards.
    forwards_left = count - (2 * hops - 1 + rank)
    for turn in range(count - pp):
        if turn < forwards_left:
            order.run((down, "F"))
        order.run((down, "I"))
        order.run((down, "W"))
        order.run((up, "F"))
        order.run((up, "I"))
        order.run((up, "W"))

    # The end: input halves first, because other ranks wait for them. Weight halves fill the gaps.
    for _ in range(rank):
        order.run((down, "I"))
        order.run((up, "I"))
    for _ in range(hops):
        order.run((down, "I"))
        order.run((down, "W"))
    for stage in (up, down):
        for _ in range(rank):
            order.run((stage, "W"))
    return [cell for cell in order.cells if cell[0].micro_batch < micro_batches]


def _dual_pipe_v(stages: Sequence[int], pp: int, rank: int, micro_batches: int) -> list[Cell]:
    """DualPipe on a V: in the steady state, each forward overlaps with a backward.

    In the end, half of the backwards are split; their weight halves fill the gaps.
    """
    down, up = stages
    hops = pp - 1 - rank  # to the turn of the V
    order = _InOrder()
    waiting: deque[int] = deque()  # the stages of the input halves whose weight half is missing

    def run_input_half(stage: int) -> None:
        order.run((stage, "I"))
        waiting.append(stage)

    def run_oldest_weight_half() -> None:
        order.run((waiting.popleft(), "W"))

    for _ in range(2 * hops):
        order.run((down, "F"))
    for _ in range(rank + 1):
        order.run((down, "F"))
        order.run((up, "F"))
    for _ in range(hops):
        run_input_half(up)
        run_oldest_weight_half()
        order.run((up, "F"))

    for turn in range(micro_batches - 2 * pp + rank + 1):
        if turn == 0 and hops == 0:
            # At the turn of the V, the overlap would delay the first backward.
            order.run((down, "F"))
            order.run((up, "B"))
        else:
            order.run((down, "F"), (up, "B"))
        order.run((up, "F"), (down, "B"))

    for _ in range(hops):
        order.run((up, "B"))
        order.run((up, "F"), (down, "B"))
    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        if turn <= rank:
            order.run((stage, "B"))
        else:
            run_input_half(stage)
    for _ in range(hops):
        run_oldest_weight_half()
        run_input_half(down)
    for _ in range(rank + 1):
        run_oldest_weight_half()
    return order.cells
