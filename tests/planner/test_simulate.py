"""The simulation of schedules: closed forms, dependencies, messages, and refusals."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import SCHEDULES, Action, Cell, micro_batch_requirement
from composer3d.planner.schedule import actions
from composer3d.planner.simulate import (
    UNIT_TIMES,
    Span,
    StageTimes,
    bubble,
    closed_form,
    sends,
    simulate,
    step_s,
)

BUILT_IN = [name for name in SCHEDULES if name != "csv"]
EQUAL_HALVES = StageTimes(3.0, 5.0, 2.5, 2.5)
LATE_WEIGHTS = StageTimes(1.0, 3.5, 0.5, 3.0)
EARLY_WEIGHTS = StageTimes(2.0, 2.5, 2.0, 0.5)


class Pipeline(NamedTuple):
    """A schedule and its numbers."""

    schedule: str
    pp: int
    per_rank: int
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.pp * self.per_rank

    def cells(self) -> list[list[Cell]]:
        return actions(*self)

    def spans(self, times: StageTimes = UNIT_TIMES, send_s: float = 0.0) -> list[list[Span]]:
        return simulate(self.cells(), [times] * self.stages, send_s)


def pipelines(schedule: str) -> list[Pipeline]:
    """Return pipelines of 1 to 6 ranks that the schedule can run."""
    stages = SCHEDULES[schedule].stages
    return [
        Pipeline(schedule, pp, per_rank, micro_batches)
        for pp in (1, 2, 3, 4, 6)
        for per_rank in range(stages.least_per_rank, min(stages.most_per_rank, 4) + 1)
        for micro_batches in range(1, 4 * pp + 3)
        if micro_batch_requirement(schedule, micro_batches, pp, "") is None
    ]


@pytest.mark.parametrize("schedule", BUILT_IN)
def test_the_bubble_is_the_closed_form_where_there_is_one(schedule: str) -> None:
    n_forms = 0
    for times in (UNIT_TIMES, EQUAL_HALVES, LATE_WEIGHTS, EARLY_WEIGHTS):
        for pipeline in pipelines(schedule):
            form = closed_form(*pipeline, times)
            if form is None:
                continue
            found = bubble(pipeline.spans(times))
            assert found.of_ideal == pytest.approx(form.of_ideal, abs=1e-12), (pipeline, form)
            assert found.of_total == pytest.approx(form.of_total, abs=1e-12), (pipeline, form)
            n_forms += 1
    assert n_forms >= 40


def ideal(*numbers: Any, times: StageTimes = UNIT_TIMES) -> float | None:
    """The closed form as a share of the ideal."""
    form = closed_form(*numbers, times)
    return None if form is None else form.of_ideal


def test_closed_forms_are_those_of_the_papers() -> None:
    # Narayanan et al. 2021: (P-1)/M, and V times less with V stages on a rank.
    assert ideal("1F1B", 4, 1, 8) == ideal("GPipe", 4, 1, 8) == 3 / 8
    assert ideal("Interleaved1F1B", 8, 3, 32) == ideal("LoopedBFS", 8, 3, 32) == 7 / 96
    # Qi et al. 2023: ZB-H1 has (P-1) (F + I - W), which is a third of the bubble of 1F1B.
    assert ideal("InterleavedZeroBubble", 4, 2, 8) == pytest.approx(3 / 16 / 3)
    assert ideal("InterleavedZeroBubble", 4, 2, 8, times=EARLY_WEIGHTS) == pytest.approx(
        3 * 3.5 / (16 * 4.5)
    )
    # Only if F, I and W take equally long, and the V is full.
    assert ideal("ZBVZeroBubble", 4, 2, 8, times=EQUAL_HALVES) is None
    assert ideal("ZBVZeroBubble", 4, 2, 6) is None
    assert ideal("Interleaved1F1B", 4, 2, 3) is None

    # (P-1)/(V M + P-1) of the total.
    form = closed_form("Interleaved1F1B", 8, 3, 32, UNIT_TIMES)
    assert form is not None
    assert form.of_total == pytest.approx(7 / (96 + 7))


def test_zbv_leaves_no_bubble_inside_of_a_rank_if_all_actions_take_equally_long() -> None:
    for pp in (2, 4, 8):
        for micro_batches in (2 * pp - 1, 2 * pp, 5 * pp):
            spans = Pipeline("ZBVZeroBubble", pp, 2, micro_batches).spans()
            for rank, row in enumerate(spans):
                # Rank r waits for r forwards, and then it computes without a break.
                assert row[0].start_s == rank
                assert row[-1].end_s - row[0].start_s == 6 * micro_batches


@given(data=st.data())
@settings(max_examples=60)
def test_every_cell_starts_after_what_it_needs_and_as_early_as_it_can(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(BUILT_IN))
    pipeline = data.draw(st.sampled_from(pipelines(schedule)))
    seconds = st.floats(0.125, 4).map(lambda value: round(value * 8) / 8)
    times = [
        StageTimes(*data.draw(st.tuples(seconds, seconds, seconds, seconds)))
        for _ in range(pipeline.stages)
    ]
    send_s = data.draw(
        st.lists(seconds, min_size=pipeline.stages - 1, max_size=pipeline.stages - 1)
    )
    spans = simulate(pipeline.cells(), times, send_s)

    end_of = {action: span.end_s for row in spans for span in row for action in span.cell}
    rank_of = {
        action.stage: rank for rank, row in enumerate(spans) for span in row for action in span.cell
    }

    def arrival_s(sender: int, kinds: str, action: Action) -> float:
        """When a message of stage ``sender`` for ``action`` arrives."""
        end_s = next(
            end_of[sent]
            for sent in (action._replace(stage=sender, kind=kind) for kind in kinds)
            if sent in end_of
        )
        is_local = rank_of[sender] == rank_of[action.stage]
        return end_s + (0.0 if is_local else send_s[min(sender, action.stage)])

    assert [[span.cell for span in row] for row in spans] == pipeline.cells()
    for row in spans:
        free_s = 0.0
        for span in row:
            needed_s = [free_s]
            for action in span.cell:
                if action.kind == "F" and action.stage > 0:
                    needed_s.append(arrival_s(action.stage - 1, "F", action))
                if action.kind in "BI" and action.stage + 1 < pipeline.stages:
                    needed_s.append(arrival_s(action.stage + 1, "BI", action))
                if action.kind in "BI":
                    assert end_of[action._replace(kind="F")] <= span.start_s
                if action.kind == "W":
                    assert end_of[action._replace(kind="I")] <= span.start_s
            assert span.start_s == max(needed_s)
            duration_s = sum(times[action.stage]["FBIW".index(action.kind)] for action in span.cell)
            assert span.end_s == span.start_s + duration_s
            free_s = span.end_s


@given(data=st.data())
@settings(max_examples=40)
def test_no_cell_starts_earlier_if_a_duration_grows(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(BUILT_IN))
    pipeline = data.draw(st.sampled_from(pipelines(schedule)))
    seconds = st.integers(1, 9).map(float)
    times = [
        StageTimes(*data.draw(st.tuples(seconds, seconds, seconds, seconds)))
        for _ in range(pipeline.stages)
    ]
    send_s = float(data.draw(st.integers(0, 3)))
    before = simulate(pipeline.cells(), times, send_s)

    stage = data.draw(st.integers(0, pipeline.stages - 1))
    field = data.draw(st.sampled_from(StageTimes._fields))
    longer = list(times)
    longer[stage] = times[stage]._replace(**{field: getattr(times[stage], field) + 2.0})
    for after in (
        simulate(pipeline.cells(), longer, send_s),
        simulate(pipeline.cells(), times, send_s + 1.0),
    ):
        for old, new in zip(before, after, strict=True):
            assert all(a.start_s <= b.start_s for a, b in zip(old, new, strict=True))
            assert all(a.end_s <= b.end_s for a, b in zip(old, new, strict=True))


def cells(*texts: str) -> list[list[Cell]]:
    """Return the cells of ranks; each text has the actions of one, such as "0F0 0B0"."""
    return [
        [(Action(int(word[0]), word[1], int(word[2:])),) for word in text.split()] for text in texts
    ]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (cells("0F0 0B1 0F1 0B0", "1F0 1F1 1B0 1B1"), "0B1 waits for ever"),
        (cells("0F0 0B0", "1B0 1F0"), "(0B0|1B0) waits for ever"),
        (cells("0F0 0W0 0I0", "1F0 1B0"), "0W0 waits for ever"),
        # The forward of the first stage is missing.
        (cells("", "1F0 1B0"), "1F0 waits for ever"),
        (cells("0F0 0B0", "2F0 2B0"), "the action 2F0 is of stage 2, but there are times of 2"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(ranks: list[list[Cell]], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        simulate(ranks, [UNIT_TIMES] * 2)


def test_messages_must_fit_the_boundaries() -> None:
    with pytest.raises(PlanError, match="send_s has 2 times, but 2 stages have 1 boundaries"):
        simulate(cells("0F0 0B0", "1F0 1B0"), [UNIT_TIMES] * 2, [1.0, 1.0])


def test_messages_are_those_between_ranks() -> None:
    pipeline = Pipeline("1F1B", 3, 1, 4)
    spans = pipeline.spans(send_s=0.5)
    messages = sends(spans, pipeline.stages, 0.5)
    assert len(messages) == 2 * 2 * 4
    assert sum(message.is_gradient for message in messages) == 2 * 4
    first = messages[0]
    assert (first.micro_batch, first.from_stage, first.to_stage) == (0, 0, 1)
    assert (first.start_s, first.end_s) == (1.0, 1.5)

    # On a V, the turn of the V needs no message.
    pipeline = Pipeline("ZBVZeroBubble", 3, 2, 5)
    messages = sends(pipeline.spans(), pipeline.stages, 0.0)
    assert len(messages) == 2 * 4 * 5
    assert not [m for m in messages if {m.from_stage, m.to_stage} == {2, 3}]


def idle_s(spans: Sequence[Sequence[Span]]) -> float:
    busy_s = sum(span.end_s - span.start_s for row in spans for span in row)
    return step_s(spans) * len(spans) - busy_s


def test_the_bubble_is_the_idle_time() -> None:
    spans = Pipeline("1F1B", 4, 1, 8).spans(send_s=0.25)
    found = bubble(spans)
    assert found.of_total == pytest.approx(idle_s(spans) / (4 * step_s(spans)))
    assert found.of_ideal == pytest.approx(idle_s(spans) / (4 * 8 * 3))
    assert found.of_ideal > 3 / 8
    assert bubble([]) == (0.0, 0.0)


def test_a_large_schedule_is_simulated_at_once() -> None:
    large = Pipeline("Interleaved1F1B", 16, 2, 128)
    ranks, times = large.cells(), [UNIT_TIMES] * 32
    durations_s = []
    for _ in range(5):
        begin_s = time.process_time()
        simulate(ranks, times, 0.1)
        durations_s.append(time.process_time() - begin_s)
    # 50 ms on a quiet core; the bound leaves room for a busy one.
    assert min(durations_s) < 0.15
