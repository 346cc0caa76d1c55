"""The times at which the actions of a pipeline schedule run, and the bubble that they leave.

A rank runs its cells in order. A cell starts when its rank is free and the messages of all its
actions have arrived. A message leaves at the end of the cell that makes it, as in torch's runtime,
and arrives ``send_s`` later. Ranks compute while messages are on their way. A stage on the same
rank gets its input without a message.
"""

from collections.abc import Sequence
from typing import NamedTuple

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import Action, Cell


class StageTimes(NamedTuple):
    """Seconds that one stage takes for one micro-batch.

    Attributes:
        forward_s: the forward (F).
        backward_s: the whole backward (B).
        backward_input_s: the half of the backward that computes gradients of inputs (I).
        backward_weight_s: the half that computes gradients of weights (W).
    """

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float


# The times of schematic drawings: a backward costs twice a forward, and its halves are equal.
UNIT_TIMES = StageTimes(forward_s=1.0, backward_s=2.0, backward_input_s=1.0, backward_weight_s=1.0)


class Span(NamedTuple):
    """A cell and the time in which it runs, in seconds from the start of the step."""

    cell: Cell
    start_s: float
    end_s: float


class Bubble(NamedTuple):
    """The time in which pipeline ranks wait, as two shares of other times.

    Attributes:
        of_total: idle time of all ranks, as a share of (ranks x length of the step).
        of_ideal: the same idle time, as a share of the time in which ranks compute. Papers quote
            this one, such as (P-1)/(V M).
    """

    of_total: float
    of_ideal: float


class Send(NamedTuple):
    """A message between two stages: activations to the next one, or gradients to the previous."""

    micro_batch: int
    from_stage: int
    to_stage: int
    start_s: float
    end_s: float

    @property
    def is_gradient(self) -> bool:
        """Whether the message carries gradients, to the previous stage."""
        return self.to_stage < self.from_stage


def simulate(
    ranks: Sequence[Sequence[Cell]],
    times: Sequence[StageTimes],
    send_s: float | Sequence[float] = 0.0,
) -> list[list[Span]]:
    """Return when each cell of each pipeline rank starts and ends.

    The time is linear in the number of actions. The actions of a cell that overlap take the sum of
    their times.

    Args:
        ranks: the cells of each pipeline rank, in its order.
        times: the times of each stage.
        send_s: seconds from the end of a cell to the arrival of its message on another rank: one
            number, or one for each boundary (item i is for stages i and i + 1).

    Raises:
        PlanError: a rank would wait for ever; or the times do not fit the stages.
    """
    return _Simulation(ranks, times, send_s).run()


class _Simulation:
    """One simulation. A message has an index: its receiving stage and its micro-batch, in a row."""

    def __init__(
        self,
        ranks: Sequence[Sequence[Cell]],
        times: Sequence[StageTimes],
        send_s: float | Sequence[float],
    ) -> None:
        self._ranks = ranks
        n_stages = len(times)
        self._last_stage = n_stages - 1
        self._send_s = _by_boundary(send_s, n_stages)
        self._n_micro_batches = 1
        self._rank_of = [-1] * n_stages
        for rank, cells in enumerate(ranks):
            for cell in cells:
                for action in cell:
                    if not 0 <= action.stage < n_stages:
                        raise PlanError(
                            f"the action {action} is of stage {action.stage}, but there are times "
                            f"of {n_stages} stages"
                        )
                    self._rank_of[action.stage] = rank
                    self._n_micro_batches = max(self._n_micro_batches, action.micro_batch + 1)
        self._durations = {
            (stage, kind): seconds
            for stage, row in enumerate(times)
            for kind, seconds in zip("FBIW", row, strict=True)
        }

        # Arrival times. Activations are at [0], gradients at [1]. None: not sent yet.
        size = n_stages * self._n_micro_batches
        self._arrivals: list[list[float | None]] = [[None] * size, [None] * size]
        # The forwards, and the input halves of backwards, that have run.
        self._done: set[Action] = set()
        # The rank that waits for each message.
        self._waiting: dict[tuple[int, int], int] = {}

    def run(self) -> list[list[Span]]:
        spans: list[list[Span]] = [[] for _ in self._ranks]
        runnable = list(range(len(self._ranks)))
        while runnable:
            rank = runnable.pop()
            cells, done = self._ranks[rank], spans[rank]
            free_s = done[-1].end_s if done else 0.0
            while len(done) < len(cells):
                cell = cells[len(done)]
                start_s = self._start(rank, cell, free_s)
                if start_s is None:
                    break
                free_s = start_s
                for action in cell:
                    free_s += self._durations[action.stage, action.kind]
                done.append(Span(cell, start_s, free_s))
                for action in cell:
                    self._finish(action, free_s, runnable)
        for cells, done in zip(self._ranks, spans, strict=True):
            if len(done) < len(cells):
                stuck = " and ".join(map(str, cells[len(done)]))
                raise PlanError(f"the schedule cannot run: {stuck} waits for ever")
        return spans

    def _start(self, rank: int, cell: Cell, free_s: float) -> float | None:
        """Return when a cell can start; None, after noting what the rank waits for, if not yet."""
        start_s = free_s
        for stage, kind, micro_batch in cell:
            if kind == "F":
                if stage == 0:
                    continue
                direction = 0
            elif kind == "W":
                if Action(stage, "I", micro_batch) not in self._done:
                    return None
                continue
            else:
                if Action(stage, "F", micro_batch) not in self._done:
                    return None
                if stage == self._last_stage:
                    continue
                direction = 1
            message = stage * self._n_micro_batches + micro_batch
            arrival_s = self._arrivals[direction][message]
            if arrival_s is None:
                self._waiting[direction, message] = rank
                return None
            if arrival_s > start_s:
                start_s = arrival_s
        return start_s

    def _finish(self, action: Action, end_s: float, runnable: list[int]) -> None:
        """Send the message of an action, and let the rank that waits for it run."""
        stage, kind, micro_batch = action
        if kind == "W":
            return
        self._done.add(action)
        if kind == "F":
            receiver, direction, boundary = stage + 1, 0, stage
        else:
            receiver, direction, boundary = stage - 1, 1, stage - 1
        if not 0 <= receiver <= self._last_stage:
            return
        is_local = self._rank_of[receiver] == self._rank_of[stage]
        message = receiver * self._n_micro_batches + micro_batch
        self._arrivals[direction][message] = end_s + (0.0 if is_local else self._send_s[boundary])
        waiter = self._waiting.pop((direction, message), None)
        if waiter is not None:
            runnable.append(waiter)


def _by_boundary(send_s: float | Sequence[float], n_stages: int) -> list[float]:
    """Return the seconds of a message over each boundary between stages."""
    n_boundaries = max(0, n_stages - 1)
    if isinstance(send_s, int | float):
        return [float(send_s)] * n_boundaries
    if len(send_s) != n_boundaries:
        raise PlanError(
            f"send_s has {len(send_s)} times, but {n_stages} stages have {n_boundaries} boundaries"
        )
    return list(send_s)


def sends(
    spans: Sequence[Sequence[Span]], n_stages: int, send_s: float | Sequence[float]
) -> list[Send]:
    """Return the messages between ranks, in the order of ranks and cells.

    Args:
        spans: from ``simulate``.
        n_stages: the number of stages.
        send_s: as ``simulate`` had it.
    """
    send_s = _by_boundary(send_s, n_stages)
    rank_of = {
        action.stage: rank for rank, row in enumerate(spans) for span in row for action in span.cell
    }
    found = []
    for row in spans:
        for span in row:
            for stage, kind, micro_batch in span.cell:
                receiver = stage + 1 if kind == "F" else stage - 1
                if kind == "W" or not 0 <= receiver < n_stages:
                    continue
                if rank_of[receiver] == rank_of[stage]:
                    continue
                arrival_s = span.end_s + send_s[min(stage, receiver)]
                found.append(Send(micro_batch, stage, receiver, span.end_s, arrival_s))
    return found


def step_s(spans: Sequence[Sequence[Span]]) -> float:
    """Return the end of the last cell."""
    return max((row[-1].end_s for row in spans if row), default=0.0)


def bubble(spans: Sequence[Sequence[Span]]) -> Bubble:
    """Return the share of time in which ranks wait, from 0 to the end of the last cell."""
    busy_s = sum(span.end_s - span.start_s for row in spans for span in row)
    total_s = step_s(spans) * len(spans)
    if busy_s == 0:
        return Bubble(0.0, 0.0)
    idle_s = max(0.0, total_s - busy_s)
    return Bubble(of_total=idle_s / total_s, of_ideal=idle_s / busy_s)


class ClosedForm(NamedTuple):
    """The bubble that a paper gives for a schedule with equal stages and free messages.

    Attributes:
        of_ideal: idle time of a rank, as a share of the time in which it computes.
        formula: the same in symbols. P is the pipeline ranks, V the stages of each, M the
            micro-batches. F, B, I and W are the times of one stage and micro-batch.
        formula_of_total: ``of_total`` in symbols; empty if it is no short formula.
    """

    of_ideal: float
    formula: str
    formula_of_total: str = ""

    @property
    def of_total(self) -> float:
        """Idle time of a rank, as a share of the time of the step."""
        return self.of_ideal / (1 + self.of_ideal)


def closed_form(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, times: StageTimes
) -> ClosedForm | None:
    """Return the bubble that a schedule leaves if all stages take ``times``, or None.

    None: no closed form is known for this schedule, or not for these numbers and times.

    Sources: arXiv 2104.04473, section 2.2 (1F1B, interleaved); arXiv 2211.05953 (breadth-first);
    arXiv 2401.10241, table 2 (ZB-H1) and section 6 (ZB-V); arXiv 2412.19437, table 2 (DualPipe, of
    which DualPipeV is a half). The time until a rank's first action, and after its last one, counts
    as idle in all of them. The papers on zero bubble leave it out for ZB-V: their bubble is then 0.
    """
    forward_s, backward_s, input_s, weight_s = times
    cells = stages_per_rank * micro_batches
    whole_s = forward_s + backward_s
    split_s = forward_s + input_s + weight_s
    if whole_s <= 0 or split_s <= 0:
        return None
    match schedule:
        case "GPipe" | "1F1B":
            return ClosedForm((pp - 1) / micro_batches, "(P-1)/M", "(P-1)/(M + P-1)")
        case "LoopedBFS" | "Interleaved1F1B" if micro_batches >= pp:
            return ClosedForm((pp - 1) / cells, "(P-1)/(V M)", "(P-1)/(V M + P-1)")
        case "InterleavedZeroBubble" if micro_batches >= pp:
            # The paper has W <= F and W <= I, and so F + I - W. Tests compare the others too.
            idle_s = (pp - 1) * max(forward_s, input_s, forward_s + input_s - weight_s)
            formula = "(P-1) max(F, I, F+I-W) / (V M (F+I+W))"
            return ClosedForm(idle_s / (cells * split_s), formula)
        case "ZBVZeroBubble" if micro_batches >= 2 * pp - 1 and forward_s == input_s == weight_s:
            return ClosedForm((pp - 1) / (3 * cells), "(P-1)/(3 V M)", "(P-1)/(3 V M + P-1)")
        case "DualPipeV" if forward_s == input_s >= weight_s and backward_s == input_s + weight_s:
            # An overlapped pair takes F + B here.
            idle_s = (pp - 1) * (whole_s + backward_s - 3 * weight_s)
            return ClosedForm(idle_s / (cells * whole_s), "(P-1) (F+2B-3W) / (V M (F+B))")
    return None
