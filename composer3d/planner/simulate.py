"""The times at which the actions of a pipeline schedule run, and the bubble that they leave.

A rank runs its cells in order. A cell starts when its rank is free and the messages of all its
actions have arrived. A message leaves at the end of the cell that makes it, as in torch's runtime,
and arrives ``send_s`` later. Ranks compute while messages are on their way. A stage on the same
rank gets its input without a message.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import (
    PREDECESSORS,
    Action,
    Cell,
    StageMessage,
    in_order_of_messages,
)


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


# The kinds of actions, in the order of the times of a stage.
KINDS = "FBIW"

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
    n_stages = len(times)
    sends_s = _by_boundary(send_s, n_stages)
    rank_of: dict[int, int] = {}
    for rank, cells in enumerate(ranks):
        for action in chain(*cells):
            if not 0 <= action.stage < n_stages:
                raise PlanError(
                    f"the action {action} is of stage {action.stage}, but there are times "
                    f"of {n_stages} stages"
                )
            rank_of[action.stage] = rank

    spans: list[list[Span]] = [[] for _ in ranks]
    sent_s: dict[StageMessage, float] = {}
    done: set[Action] = set()
    for rank, cell, needed, own_messages in in_order_of_messages(ranks, n_stages - 1):
        start_s = spans[rank][-1].end_s if spans[rank] else 0.0
        for message in needed:
            hop_s = 0.0 if rank_of[message.sender] == rank else sends_s[message.boundary]
            start_s = max(start_s, sent_s[message] + hop_s)
        end_s = start_s
        for action in cell:
            before = PREDECESSORS[action.kind]
            if before and Action(action.stage, before, action.micro_batch) not in done:
                raise waits_for_ever(cell)
            end_s += times[action.stage][KINDS.index(action.kind)]
        spans[rank].append(Span(cell, start_s, end_s))
        done.update(cell)
        sent_s.update(dict.fromkeys(own_messages, end_s))
    for cells, row in zip(ranks, spans, strict=True):
        if len(row) < len(cells):
            raise waits_for_ever(cells[len(row)])
    return spans


def waits_for_ever(cell: Cell) -> PlanError:
    """Return the error about a schedule in which a rank waits for ever before a cell."""
    stuck = " and ".join(map(str, cell))
    return PlanError(f"the schedule cannot run: {stuck} waits for ever")


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
