"""No order of NCCL's operations makes ranks wait for each other: a step of every rank, replayed.

NCCL runs the operations of one communicator in the order in which a rank launches them, and those
of two communicators may have to wait for each other, because a GPU may have room for one at a time.
If two ranks launch two collectives in different orders, the job can hang, on some GPUs, some day.
The CPU's backend never does. So every rank of a layout takes a step without data here, what it
launches is written down, and all of it is replayed under the strictest of these rules:

- A collective starts when all its ranks have come to it. A rank launches nothing after it before.
- A message starts when both ranks have come to it, and after those before it on its communicator.
  Messages of one batch start together. Other communicators go on beside it.
- Where the host lets computing wait for a message, everything later waits for it as well.

All ranks must then reach the end of the step, and a collective must be the same on all its ranks.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from composer3d.dryrun.collectives import message_of
from composer3d.dryrun.memory import MemoryLedger
from composer3d.dryrun.stage import Recorder, compose_without_data
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime import environment
from composer3d.runtime.launch import Pool
from composer3d.runtime.progress import Progress
from composer3d.runtime.torch_private import around_pipeline_start, body_of
from tools.prove.matrix.cover import read, sets
from tools.prove.paths import RECIPE
from tools.prove.proof import add_number, make_parser

# Every so many rows of the covering matrix are replayed.
EVERY = 12

# That ranks may take to record their steps: sixteen of them share two cores.
_LIMIT_S = 600.0


class Group(NamedTuple):
    """A communicator, as all its ranks name it: ``number`` of the same ranks came before it."""

    ranks: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"group {self.number} of ranks {', '.join(map(str, self.ranks))}"


class Collective(NamedTuple):
    """A collective: the operation, the dtype and the bytes of a rank, as all ranks call it."""

    group: Group
    what: str

    def __str__(self) -> str:
        return f"{self.what} over {self.group}"


class Message(NamedTuple):
    """One half of a message.

    Attributes:
        group: its communicator.
        sender, receiver: ranks.
        number: how many of the same group, sender and receiver were before it.
        sends: whether this half is the send.
    """

    group: Group
    sender: int
    receiver: int
    number: int
    sends: bool

    def __str__(self) -> str:
        kind = "send" if self.sends else "receive"
        return f"{kind} {self.number} from {self.sender} to {self.receiver}"


class Batch(NamedTuple):
    """Messages that start together, over one communicator."""

    messages: tuple[Message, ...]

    @property
    def group(self) -> Group:
        """The communicator."""
        return self.messages[0].group

    def __str__(self) -> str:
        return ", ".join(map(str, self.messages))


class Wait(NamedTuple):
    """All that is launched later waits for these messages."""

    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return f"the wait for {', '.join(map(str, self.messages))}"


Event = Collective | Batch | Wait


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("order", __doc__)
    add_number(parser, "--every", EVERY, "every Nth layout of matrix.txt", least=1)
    options = parser.parse_args(arguments)
    rows = read().rows[:: options.every]
    begin, stuck = time.monotonic(), 0
    with Pool() as pool, Progress("order", len(rows), "layouts") as progress:
        for row in rows:
            recipe = load(RECIPE, sets(row), check_files=False).recipe
            events = events_of(pool, recipe)
            problem = nothing_seen(recipe, events) or problem_of(events)
            stuck += problem is not None
            with progress.paused():
                print(f"{problem or 'ends'}: {' '.join(sets(row))}", flush=True)
            progress.advance()
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(rows) - stuck} of {len(rows)} layouts come to an end, in {minutes:.1f} minutes")
    return int(stuck > 0)


# --- what a rank launches ---


def events_of(pool: Pool, recipe: Recipe) -> list[list[Event]]:
    """Return what each rank of a job launches in its second step."""
    events: list[list[Event]] = pool.run(
        record, {"recipe": recipe}, world_size=recipe.world_size, limit_s=_LIMIT_S
    )
    return events


def nothing_seen(recipe: Recipe, events: Sequence[Sequence[Event]]) -> str | None:
    """Return which rank launches less than a step must, so that the replay would say nothing."""
    mesh = recipe.mesh
    sends_messages = mesh.pp > 1 or (mesh.cp > 1 and recipe.parallel.cp_method == "ring")
    for rank, own in enumerate(events):
        if mesh.world_size > 1 and not any(isinstance(event, Collective) for event in own):
            return f"rank {rank} launches no collective"
        if sends_messages and not any(isinstance(event, Batch) for event in own):
            return f"rank {rank} launches no message"
    return None


def record(recipe: Recipe) -> list[Event]:
    """Return what this rank launches. The process must end afterwards."""
    recorder = _Events()
    rank = environment.rank()
    with compose_without_data(recipe, rank, 1.0, recorder) as composed, recorder.of_messages():
        for _ in range(2):
            recorder.events.clear()
            recorder.numbers.clear()
            with around_pipeline_start(recorder.ignoring):
                composed.take_a_step()
    return recorder.events


class _Events(Recorder):
    """Writes down what a rank launches.

    Attributes:
        events: in order.
        numbers: of messages so far, by group, sender, receiver and half.
    """

    def __init__(self) -> None:
        super().__init__(MemoryLedger(offload=False))
        self.events: list[Event] = []
        self.numbers: Counter[tuple[Group, int, int, bool]] = Counter()

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(operator, types, arguments, keywords)
        if result is NotImplemented or body_of(operator) is not None or self.ignores:
            return result
        message = message_of(operator, arguments)
        # Messages are seen where they are posted, because only there batches are known.
        if message is None or message.operation in ("send", "recv") or message.group.size() == 1:
            return result
        what = f"{message.operation} of {message.dtype}"
        if message.operation != "all_to_all":  # in which each rank may send another number of rows
            what += f", {message.sent_bytes} bytes"
        self.events.append(Collective(_name_of(message.group), what))
        return result

    @contextmanager
    def of_messages(self) -> Iterator[None]:
        """Write down messages, too."""
        post, batch = torch_schedules._batch_p2p, dist.batch_isend_irecv

        def post_of_pipeline(operations: list[dist.P2POp], desc: str | None = None) -> list[Any]:
            # Of one kind, torch launches each alone.
            mixed = len({one.op for one in operations}) > 1
            with self._unseen(operations, together=mixed) as messages:
                works = post(operations, desc)
            return [_Waiter(works, partial(self._wait, messages))] if operations else []

        def wait_of_pipeline(works: list[_Waiter]) -> None:
            for work in works:
                work.wait()

        def post_batch(operations: list[dist.P2POp]) -> list[Any]:
            if self.ignores:
                return batch(operations)
            with self._unseen(operations, together=True) as messages:
                works = batch(operations)
            return [_Waiter(works, partial(self._wait, messages))]

        with (
            mock.patch.object(torch_schedules, "_batch_p2p", post_of_pipeline),
            mock.patch.object(torch_schedules, "_wait_batch_p2p", wait_of_pipeline),
            mock.patch.object(dist, "batch_isend_irecv", post_batch),
        ):
            yield

    @contextmanager
    def _unseen(
        self, operations: Sequence[dist.P2POp], *, together: bool
    ) -> Iterator[tuple[Message, ...]]:
        """Write down messages; what posts them inside of the context is not written again."""
        if self.ignores:
            yield ()
            return
        messages = tuple(map(self._message, operations))
        batches = [messages] if together else [(message,) for message in messages]
        self.events += map(Batch, batches)
        with self.ignoring():
            yield messages

    def _message(self, operation: dist.P2POp) -> Message:
        group, own = _name_of(operation.group), dist.get_rank()
        sends = operation.op is dist.isend
        ends = (own, operation.peer) if sends else (operation.peer, own)
        self.numbers[group, *ends, sends] += 1
        return Message(group, *ends, self.numbers[group, *ends, sends], sends)

    def _wait(self, messages: tuple[Message, ...]) -> None:
        if messages and not self.ignores:
            self.events.append(Wait(messages))


class _Waiter:
    """Stands for the works of a batch."""

    def __init__(self, works: Sequence[Any], then: Callable[[], None]) -> None:
        self._works, self._then = works, then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._then()


def _name_of(group: dist.ProcessGroup) -> Group:
    ranks = tuple(dist.get_process_group_ranks(group))
    alike = [
        other.group_name
        for other in dist.distributed_c10d._world.pg_map
        if tuple(dist.get_process_group_ranks(other)) == ranks
    ]
    return Group(ranks, alike.index(group.group_name))


# --- the replay ---


def problem_of(events: Sequence[Sequence[Event]]) -> str | None:
    """Return why ranks do not come to the end of what each of them launches; None: they do."""
    left = [list(own) for own in events]
    arrived: set[Message] = set()
    while any(left):
        n_left = sum(map(len, left))
        ready = [_drop_and_look(own, arrived) for own in left]
        posted = {
            message
            for own in ready
            for event in own
            if isinstance(event, Batch)
            for message in event.messages
        }
        met = {one for one in posted - arrived if one._replace(sends=not one.sends) in posted}
        arrived |= met
        # The last of what may start on a rank, because nothing is launched after it.
        calls = {
            rank: own[-1]
            for rank, own in enumerate(ready)
            if own and isinstance(own[-1], Collective)
        }
        for rank, call in calls.items():
            if rank != call.group.ranks[0]:
                continue
            others = [calls.get(other) for other in call.group.ranks]
            if any(other is None or other.group != call.group for other in others):
                continue
            for other_rank, other in zip(call.group.ranks, others, strict=True):
                if other != call:
                    return f"rank {rank} calls {call}, and rank {other_rank} {other}"
                left[other_rank].remove(call)
        if not met and sum(map(len, left)) == n_left:
            places = (f"rank {rank} at {own[0]}" for rank, own in enumerate(left) if own)
            return f"ranks wait for each other: {', '.join(places)}"
    return None


def _drop_and_look(left: list[Event], arrived: set[Message]) -> list[Event]:
    """Drop what is done, and return what may start: batches, and perhaps a collective at last."""
    ready: list[Event] = []
    unfinished: list[Event] = []
    busy: set[Group] = set()
    while left:
        event = left[0]
        if isinstance(event, Collective):
            if event.group not in busy:
                ready.append(event)
            break
        if isinstance(event, Wait) and not arrived.issuperset(event.messages):
            break
        del left[0]
        if isinstance(event, Batch) and not arrived.issuperset(event.messages):
            unfinished.append(event)
            if event.group not in busy:
                ready.append(event)
            busy.add(event.group)
    left[:0] = unfinished
    return ready
