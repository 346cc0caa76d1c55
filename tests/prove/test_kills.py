"""A killed training resumes bitwise: a slice of the proof, and planted faults that it finds."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer3d.runtime.launch import Pool
from tests.long import some_of
from tools.prove.faults.plant import instead_of
from tools.prove.faults.resume import go_on_a_step_later
from tools.prove.kills import run as kill
from tools.prove.kills.trap import Event

SCENARIOS = {scenario.name: scenario for scenario in kill.SCENARIOS}


@pytest.fixture(scope="module")
def killer(pool: Pool) -> Iterator[kill.Killer]:
    with kill.Killer(pool) as out:
        yield out


@pytest.fixture(scope="module")
def points(killer: kill.Killer) -> kill.Points:
    return kill.Points(killer, SCENARIOS["save"])


def of_each_kind(events: list[Event]) -> list[Event]:
    """The last event of each kind of operation, and the rename that publishes."""
    last = {event.what: event for event in events}
    return [
        *last.values(),
        *(event for event in events if event.path.endswith(f".tmp -> step-{kill.BASE + 1:08d}")),
    ]


def test_the_points_are_all_of_a_save(points: kill.Points) -> None:
    assert len(points.events) >= 60
    assert {event.what for event in points.events} >= {
        "create",
        "write",
        "fsync",
        "rename",
        "mkdir",
        "unlink",
        "rmdir",
    }
    assert sum(scenario.before != "empty" for scenario in kill.SCENARIOS) >= 5


def test_killed_in_a_save(points: kill.Points) -> None:
    kills = [points.kill(event) for event in of_each_kind(points.events)]
    assert [killed for killed in kills if killed.problem is not None] == []
    assert {killed.resumed for killed in kills} == {kill.BASE, kill.BASE + 1}


@some_of(
    2,
    "name",
    [
        "save in the background",
        "save over a damaged one",
        "save after a kill",
        "2 ranks, background, rank 1 dies",
    ],
)
def test_killed_in_a_save_of_another_kind(killer: kill.Killer, name: str) -> None:
    points = kill.Points(killer, SCENARIOS[name])
    renames = [event for event in points.events if event.what == "rename"] or points.events[-1:]
    if SCENARIOS[name].before == "damaged":
        # A kill at the second one leaves no checkpoint under this name.
        step = f"step-{kill.BASE + 1:08d}"
        paths = [event.path for event in renames]
        moved_aside = paths.index(f"{step} -> {step}.old.tmp")
        assert paths[moved_aside + 1] == f"{step}.tmp -> {step}"
    kills = [points.kill(event) for event in renames]
    assert [killed for killed in kills if killed.problem is not None] == []


@pytest.mark.long
def test_killed_while_an_object_store_changes() -> None:
    # Its own workers, which know the server.
    with kill.Killer() as killer:
        points = kill.Points(killer, SCENARIOS["object store"])
        assert len(points.events) >= 60
        # Before the last manifest, and when half of an old checkpoint is removed.
        kills = [points.kill(event) for event in (points.events[-3], points.events[-1])]
    assert [killed for killed in kills if killed.problem is not None] == []
    assert [killed.resumed for killed in kills] == [kill.STEPS - 1, kill.STEPS]


def test_killed_at_random(killer: kill.Killer) -> None:
    chosen = kill.instants(100)
    assert sum(world == 2 for _, world, *_ in chosen) == 10
    kills = [kill.kill_at_random(killer, chosen[number]) for number in (3, 5, 20)]
    assert [killed for killed in kills if killed.problem is not None] == []


def test_renamed_files_are_on_the_disk(points: kill.Points) -> None:
    assert kill.not_durable(points.events) == []
    for sync in [event for event in points.events if event.what == "fsync"]:
        assert kill.not_durable([event for event in points.events if event != sync]), sync


def resume_from_the_oldest() -> None:
    from composer3d.checkpoint import Store

    @instead_of(Store, Store._candidates)
    def wrong(right: Any, self: Any, place: Path) -> Any:
        return right(self, place)[:1]


def forget_a_moment() -> None:
    from composer3d.checkpoint import Store

    @instead_of(Store, Store.load)
    def wrong(right: Any, self: Any, path: Path, stages: Any, optimizer: Any) -> None:
        right(self, path, stages, optimizer)
        next(iter(optimizer.state.values()))["exp_avg"].zero_()


def leave_the_old() -> None:
    shutil.rmtree = lambda path, **_: None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (resume_from_the_oldest, "it resumed from step"),
        (go_on_a_step_later, "its losses are"),
        (forget_a_moment, "its losses are|its last state differs"),
        (leave_the_old, "it leaves|it does not start again"),
    ],
)
def test_a_wrong_store_is_found(
    killer: kill.Killer,
    points: kill.Points,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[], None],
    message: str,
) -> None:
    monkeypatch.setattr(killer, "_fault", fault)
    (publishing,) = [
        event for event in points.events if event.path.endswith(f" -> step-{kill.BASE + 1:08d}")
    ]
    problem = points.kill(publishing).problem
    assert problem is not None
    assert re.search(message, problem)
