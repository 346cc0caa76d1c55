"""What ranks launch in a step never makes them wait for each other."""

from itertools import pairwise

import pytest

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tools.prove.matrix.cover import read, sets, world
from tools.prove.order import Batch, Collective, Event, Group, Message, Wait, events_of, problem_of
from tools.prove.paths import RECIPE

# Rows of the covering matrix; the proof replays every twelfth.
MATRIX = read().rows
# In the second one, messages of a pipeline overlap with exchanges of experts.
ROWS = {
    "dense": MATRIX[0],
    "experts": next(
        row
        for row in MATRIX
        if (row["schedule"], row["ep"]) == ("DualPipeV", "2") and world(row) == 4
    ),
}

A, B, C = (Group(ranks, 0) for ranks in ((0, 1), (1, 2), (0, 2)))


def events_of_layout(pool: Pool, *overrides: str) -> list[list[Event]]:
    return events_of(pool, load(RECIPE, overrides, check_files=False).recipe)


@pytest.mark.parametrize("name", ROWS)
def test_a_layout_comes_to_an_end(name: str, pool: Pool) -> None:
    events = events_of_layout(pool, *sets(ROWS[name]))
    assert all(events)
    assert problem_of(events) is None


def test_a_swap_of_two_collectives_on_one_rank_is_found(pool: Pool) -> None:
    """Of one communicator, or of two of which one has all ranks of the other.

    Other ranks can come to the collectives of two others in either order.
    """
    small = ("model.n_layers=1", "data.global_batch=2", "data.micro_batch=1")
    events = events_of_layout(pool, "mesh.dp_shard=2", "mesh.tp=2", *small)
    found: set[bool] = set()
    for place, (one, following) in enumerate(pairwise(events[1])):
        assert isinstance(one, Collective)
        assert isinstance(following, Collective)
        if one != following and set(one.group.ranks) <= set(following.group.ranks):
            swapped = [*events[1][:place], following, one, *events[1][place + 2 :]]
            problem = problem_of([events[0], swapped, *events[2:]])
            assert problem is not None, (one, following)
            found.add("wait for each other" in problem)
    assert found == {False, True}


def batch(group: Group, sender: int, receiver: int, *, sends: bool) -> Batch:
    return Batch((Message(group, sender, receiver, 1, sends),))


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        # Three ranks, each in two groups of two.
        ([[(A), (C)], [(A), (B)], [(B), (C)]], True),
        ([[(A), (C)], [(B), (A)], [(C), (B)]], False),
    ],
)
def test_a_circle_of_collectives(events: list[list[Group]], *, ends: bool) -> None:
    launched: list[list[Event]] = [[Collective(group, "sum") for group in own] for own in events]
    assert (problem_of(launched) is None) is ends


def test_messages() -> None:
    ways = Group((0, 1), 1)
    send, receive = batch(A, 0, 1, sends=True), batch(A, 0, 1, sends=False)
    back, reception = (batch(ways, 1, 0, sends=sends) for sends in (True, False))
    # Each rank receives first: over two communicators both messages are on their way.
    waits = [[reception, send, Wait(reception.messages)], [receive, back, Wait(receive.messages)]]
    assert problem_of(waits) is None
    # The host of each lets what it sends wait for what it receives.
    late = [[reception, Wait(reception.messages), send], [receive, Wait(receive.messages), back]]
    assert problem_of(late) is not None
    # Over one communicator, a receive holds up the send behind it; in one batch, it does not.
    one = [[batch(A, 1, 0, sends=False), send], [receive, batch(A, 1, 0, sends=True)]]
    assert problem_of(one) is not None
    together = [[Batch((*first.messages, *second.messages))] for first, second in one]
    assert problem_of(together) is None
    # A collective waits for the messages before it on its communicator, and others do not.
    assert problem_of([[send, Collective(B, "sum")], [Collective(B, "sum")]]) is not None
