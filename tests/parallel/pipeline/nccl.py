"""When the messages and the actions of a pipeline run, by the rules of NCCL's process group.

The host waits for nothing. A rank has one queue of actions, and a stream for each communicator:

- an operation starts after the actions that the host launched before it, after the operation before
  it on its stream, and together with its partner on the other rank: nothing is buffered;
- the operations of a batch start together, and leave their stream together;
- an action starts after the messages that the host has waited for before it.

The nth send from a rank to another over a communicator goes to the nth receive.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Stream = Literal["as named", "one a pipeline", "one a message"]


class Message(NamedTuple):
    """One half of a message: a send, or a receive.

    Attributes:
        sends: whether it is a send.
        peer: the other rank.
        group: the name of its process group.
        number: how many of the same kind, peer and group were before it on this rank.
    """

    sends: bool
    peer: int
    group: str
    number: int


class Batch(NamedTuple):
    """Messages that the host launches together."""

    messages: tuple[Message, ...]


class Wait(NamedTuple):
    """The host lets all later actions wait for these messages."""

    messages: tuple[Message, ...]


class Action(NamedTuple):
    """A forward, a backward or a part of it.

    Attributes:
        name: such as "0F3".
        length: its time.
    """

    name: str
    length: float


Step = Sequence[Batch | Wait | Action]  # what the host of a rank does, in order


@dataclass(kw_only=True)
class _Rank:
    """What is left to do on a rank.

    Attributes:
        actions: each with the messages that it waits for.
        ended: when each finished action ended.
        streams: by stream, the batches that wait there, each with the number of actions before it.
        free: by stream, when its last batch left it.
        arrived: when each finished message ended.
    """

    actions: list[tuple[Action, list[Message]]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    streams: dict[Hashable, deque[tuple[Batch, int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    free: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))
    arrived: dict[Message, float] = field(default_factory=dict)

    def run_actions(self) -> bool:
        """Run the actions whose messages are there; return whether there was one."""
        before = len(self.ended)
        for action, needs in self.actions[before:]:
            if any(message not in self.arrived for message in needs):
                break
            begin = max(
                [*self.ended[-1:], *(self.arrived[message] for message in needs)], default=0.0
            )
            self.ended.append(begin + action.length)
        return len(self.ended) > before

    def heads(self) -> Iterator[tuple[Batch, float, Hashable]]:
        """The first batch of each stream that may start, with the time from which on it may."""
        for stream, waiting in self.streams.items():
            if waiting and waiting[0][1] <= len(self.ended):
                batch, n_before = waiting[0]
                launched = self.ended[n_before - 1] if n_before else 0.0
                yield batch, max(self.free[stream], launched), stream


class StuckError(Exception):
    """Ranks wait for each other."""


def length_of(steps: Mapping[int, Step], latency: float, stream: Stream = "as named") -> float:
    """Return when the last action of all ranks ends.

    Args:
        steps: what each rank does.
        latency: the time of a message.
        stream: which messages share a stream of a rank: those of a group, as NCCL has it; all; or
            none.

    Raises:
        StuckError: an action never starts.
    """
    ranks = {rank: _enqueue(step, stream) for rank, step in steps.items()}
    while _advance(ranks, latency):
        pass
    stuck = [
        f"rank {rank} at {held.actions[len(held.ended)][0].name}"
        for rank, held in ranks.items()
        if len(held.ended) < len(held.actions)
    ]
    if stuck:
        raise StuckError(", ".join(stuck))
    return max(held.ended[-1] for held in ranks.values())


def _enqueue(step: Step, stream: Stream) -> _Rank:
    made, needs = _Rank(), list[Message]()
    for one in step:
        if isinstance(one, Action):
            made.actions.append((one, needs))
            needs = []
        elif isinstance(one, Wait):
            needs += one.messages
        else:
            # Sends and receives of one batch are one operation of NCCL, those of one kind are not.
            mixed = len({message.sends for message in one.messages}) > 1
            together = mixed and stream != "one a message"
            for batch in [one] if together else [Batch((message,)) for message in one.messages]:
                first = batch.messages[0]
                key = {"as named": first.group, "one a pipeline": 0, "one a message": first}
                made.streams[key[stream]].append((batch, len(made.actions)))
    return made


def _advance(ranks: Mapping[int, _Rank], latency: float) -> bool:
    """Run what can run now; return whether there was anything."""
    moved = sum(held.run_actions() for held in ranks.values()) > 0
    ready = {
        (rank, message): time
        for rank, held in ranks.items()
        for batch, time, _ in held.heads()
        for message in batch.messages
    }
    for (rank, message), time in ready.items():
        partner = message._replace(sends=not message.sends, peer=rank)
        other = ready.get((message.peer, partner))
        if other is not None and message not in ranks[rank].arrived:
            end = max(time, other) + latency
            ranks[rank].arrived[message] = ranks[message.peer].arrived[partner] = end
            moved = True
    for held in ranks.values():
        for batch, _, stream in list(held.heads()):
            if all(message in held.arrived for message in batch.messages):
                held.free[stream] = max(held.arrived[message] for message in batch.messages)
                held.streams[stream].popleft()
    return moved
