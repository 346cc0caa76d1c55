"""The step of one pipeline rank, put together from what another one has run. No torch here.

Pipeline ranks that hold equal layers run the same actions (forward, backward) in another order and
with other numbers of micro-batches in memory. A tape holds what each action of one rank has done:
its operators, its collectives, and how the bytes in memory rose and fell. ``replay`` adds this up
in the order of another rank, or of a longer step.

Most actions of a stage do the same. Those that do something else are told apart by ``Key``. The
messages between pipeline ranks belong to no action, because each micro-batch sends the same, at
times that depend on the order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from composer3d.dryrun.report import Memory, Operation, StageReport
from composer3d.facts.schedules import Action

# Calls, and bytes that they send, by axis and operation.
Traffic = dict[tuple[str, str], tuple[int, int]]

# The axis of messages between pipeline ranks.
_PIPELINE = "pp"

# GPUs of a node: whether an axis stays inside of one.
_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Lap:
    """What has happened between two marks.

    Attributes:
        operators: operators that have run.
        traffic: what was sent.
        begin: bytes in memory at the first mark: of each kind, and on the device.
        most: the most bytes of each of them at one time.
    """

    operators: int
    traffic: Traffic
    begin: tuple[int, ...]
    most: tuple[int, ...]


class Key(NamedTuple):
    """What tells actions with different effects apart.

    Attributes:
        place: of the stage among those of the rank.
        kind: F, B, I or W.
        position: among the actions of this stage and kind. The first backward makes gradients,
            and the last one reduces them.
        before: the kind of the action before it on the same stage; "" if there is none. FSDP may
            have kept the parameters of the stage gathered since then.
    """

    place: int
    kind: str
    position: Literal["first", "middle", "last", "only"]
    before: str


@dataclass
class Tape:
    """The step of one pipeline rank.

    Attributes:
        actions: those that the rank has run, in order.
        laps: one before the first action; one for each action, until the next one begins; and one
            from the end of the last action to the end of the step.
        end: bytes in memory at the end, as in ``Lap``.
    """

    actions: list[Action] = field(default_factory=list)
    laps: list[Lap] = field(default_factory=list)
    end: tuple[int, ...] = ()


@dataclass
class Totals:
    """What a whole step does.

    Attributes:
        operators: operators that run.
        traffic: what is sent, by axis and operation.
        most: the most bytes of each kind at one time, and on the device.
    """

    operators: int
    traffic: Traffic
    most: tuple[int, ...]


def keys(actions: Sequence[Action]) -> list[Key]:
    """Return the key of each action of a rank; ``actions`` are all of them, in order."""
    stages = sorted({action.stage for action in actions})
    whole = Counter((action.stage, action.kind) for action in actions)
    seen: Counter[tuple[int, str]] = Counter()
    before: dict[int, str] = {}
    found = []
    for stage, kind, _ in actions:
        seen[stage, kind] += 1
        is_first, is_last = seen[stage, kind] == 1, seen[stage, kind] == whole[stage, kind]
        position: Literal["first", "middle", "last", "only"] = "middle"
        if is_first or is_last:
            position = "only" if is_first and is_last else "first" if is_first else "last"
        found.append(Key(stages.index(stage), kind, position, before.get(stage, "")))
        before[stage] = kind
    return found


def replay(tape: Tape, actions: Sequence[Action]) -> Totals | None:
    """Return the totals of a rank that runs ``actions``, or None if the tape lacks one of them.

    Args:
        tape: of a rank that holds equal layers.
        actions: all actions of the other rank, in order.
    """
    last = len(tape.laps) - 1
    if list(actions) == tape.actions:
        # Each lap as it was: two of one key may differ, if torch has gathered parameters in one.
        indices = list(range(len(tape.laps)))
    else:
        index_of = {key: index for index, key in enumerate(keys(tape.actions), start=1)}
        order = keys(actions)
        if not index_of.keys() >= set(order):
            return None
        indices = [0, *(index_of[key] for key in order), last]

    operators, traffic = 0, Traffic()
    for lap in (tape.laps[index] for index in indices):
        operators += lap.operators - sum(calls for calls, _ in _messages(lap).values())
        _add(traffic, {name: x for name, x in lap.traffic.items() if name[0] != _PIPELINE})
    per_tape = 1 + max(action.micro_batch for action in tape.actions)
    repeats = 1 + max(action.micro_batch for action in actions)
    messages = Traffic()
    for lap in tape.laps:
        _add(messages, _messages(lap))
    for name, (calls, sent_bytes) in messages.items():
        calls = calls * repeats // per_tape
        operators += calls
        traffic[name] = calls, sent_bytes * repeats // per_tape

    begins = [lap.begin for lap in tape.laps] + [tape.end]
    level = most = begins[0]
    for index in indices:
        lap = tape.laps[index]
        rises = (high - low for high, low in zip(lap.most, lap.begin, strict=True))
        highs = (now + rise for now, rise in zip(level, rises, strict=True))
        most = tuple(map(max, most, highs))
        changes = (end - begin for end, begin in zip(begins[index + 1], lap.begin, strict=True))
        level = tuple(now + change for now, change in zip(level, changes, strict=True))
    return Totals(operators, traffic, most)


@dataclass(frozen=True)
class TapedStage:
    """A dry run of one pipeline rank.

    Attributes:
        stage: the pipeline rank.
        ranks: the number of ranks of the job on each pipeline rank.
        tape: what it has done.
        groups: for each axis that communicates, the ranks of each of its groups.
    """

    stage: int
    ranks: int
    tape: Tape
    groups: dict[str, list[tuple[int, ...]]]

    def report(self, stage: int, actions: Sequence[Action]) -> StageReport | None:
        """Return the report of pipeline rank ``stage``, which runs ``actions``.

        None if the tape does not hold all that it runs.
        """
        totals = replay(self.tape, actions)
        if totals is None:
            return None
        comm: dict[str, dict[str, Operation]] = {}
        for (axis, name), (calls, sent_bytes) in sorted(totals.traffic.items()):
            across_nodes = self._is_across_nodes(axis, stage)
            operation = Operation(calls, sent_bytes, across_nodes=across_nodes)
            comm.setdefault(axis, {})[name] = operation
        memory = Memory(*totals.most)
        return StageReport(
            stage=stage, ranks=self.ranks, memory=memory, comm=comm, operators=totals.operators
        )

    def _is_across_nodes(self, axis: str, stage: int) -> bool:
        """Return whether an axis connects nodes, on a pipeline rank with equal groups."""
        shift = 0 if axis == "world" else (stage - self.stage) * self.ranks
        return any(
            len({(rank + shift) // _GPUS_PER_NODE for rank in ranks}) > 1
            for ranks in self.groups[axis]
        )


def _messages(lap: Lap) -> Traffic:
    """Return the messages of the pipeline; each of them is one operator."""
    return {name: usage for name, usage in lap.traffic.items() if name[0] == _PIPELINE}


def _add(traffic: Traffic, more: Traffic) -> None:
    for name, (calls, sent_bytes) in more.items():
        before = traffic.get(name, (0, 0))
        traffic[name] = before[0] + calls, before[1] + sent_bytes
