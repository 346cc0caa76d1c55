"""Check messages: each is sent once, received once, in one order and with one size.

No torch here.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import TYPE_CHECKING

from composer3d.full import expected, places
from composer3d.recipe.schema import Recipe

if TYPE_CHECKING:  # witnesses import torch
    from composer3d.full.witness import CollectiveCall, Witness

    # By pipeline rank, and by the pipeline ranks that send and receive.
    Messages = Mapping[int, dict[tuple[int, int], list[CollectiveCall]]]


def wrong_messages(small: Recipe, first: "Mapping[int, Witness]") -> Iterator[str]:
    """Compare what pipeline ranks send with what the schedule needs and what others receive.

    ``first`` has one rank of each pipeline rank that ran.
    """
    sent, received = (
        {pp_rank: _messages_of(small, witness, which) for pp_rank, witness in first.items()}
        for which in ("send", "recv")
    )
    scheduled = [*expected.messages(small)]
    for which, found in (("sent", sent), ("received", received)):
        own = [(m.sender if which == "sent" else m.receiver) in first for m in scheduled]
        wanted = Counter(compress(scheduled, own))
        counted = Counter(
            expected.ScheduledMessage(*ends, what.stage, what.micro_batch, what.kind)
            for by_ends in found.values()
            for ends, calls in by_ends.items()
            for call in calls
            if (what := call.content) is not None
        )
        for message in sorted({*counted, *wanted}):
            if counted[message] != wanted[message]:
                words = (
                    f"{message.kind} of stage {message.stage}, micro-batch {message.micro_batch}"
                )
                yield (
                    f"{words}: {which} {counted[message]} times from pipeline rank "
                    f"{message.sender} to {message.receiver}, and should be {wanted[message]} times"
                )
    yield from _unmet(small, sent, received)


def _unmet(small: Recipe, sent: "Messages", received: "Messages") -> Iterator[str]:
    elements, ties = expected.elements_of_message(small), expected.tied_messages(small)
    pairs = {ends for by_ends in (*sent.values(), *received.values()) for ends in by_ends}
    for sender, receiver in sorted(pairs | set(ties)):
        if sender not in sent or receiver not in sent:
            continue  # one of them did not run
        out = sent.get(sender, {}).get((sender, receiver), [])
        into = received.get(receiver, {}).get((sender, receiver), [])
        ends = f"from pipeline rank {sender} to {receiver}"
        alike = [(call.content, call.dtype, call.elements) for call in out]
        if alike != [(call.content, call.dtype, call.elements) for call in into]:
            yield f"messages {ends} are not received as they are sent"
        others = sum(call.content is None for call in out)
        if others != ties[sender, receiver]:
            wanted = ties[sender, receiver]
            yield f"{others} messages {ends} are of no micro-batch, and should be {wanted}"
        for call in out:
            if call.content is not None and call.elements != elements:
                yield f"a message {ends} has {call.elements:,} elements, not {elements:,}"
                break


def unmet_in_ring(small: Recipe, witness: "Witness") -> Iterator[str]:
    """Compare what a rank sends within its stage with what it receives there.

    All ranks of a ring do the same. So what a rank sends n places ahead, it must also receive from
    n places behind.
    """
    stage_ranks = small.world_size // small.mesh.pp
    halves: dict[tuple[int, ...], dict[str, Counter[tuple[int, str, int]]]] = {}
    for call in witness.calls:
        ranks = witness.groups[call.group]
        if call.operation in ("send", "recv") and len({r // stage_ranks for r in ranks}) == 1:
            half = halves.setdefault(ranks, {"send": Counter(), "recv": Counter()})
            half[call.operation][call.steps, call.dtype, call.elements] += 1
    for ranks, half in halves.items():
        if half["send"] != half["recv"]:
            group = places.name_of(small.mesh, witness.rank, ranks)
            yield (
                f"rank {witness.rank} does not receive over {group} what ranks that do as it does "
                "would send to it"
            )


def _messages_of(
    small: Recipe, witness: "Witness", which: str
) -> "dict[tuple[int, int], list[CollectiveCall]]":
    """Return the messages between pipeline ranks that a rank sends or receives, by both ends."""
    found: dict[tuple[int, int], list[CollectiveCall]] = {}
    stage_ranks = small.world_size // small.mesh.pp
    for call in witness.calls:
        ranks = witness.groups[call.group]
        if call.operation != which or len({rank // stage_ranks for rank in ranks}) == 1:
            continue
        place = ranks.index(witness.rank)
        other = ranks[(place + (call.steps if which == "send" else -call.steps)) % len(ranks)]
        ends = (witness.rank // stage_ranks, other // stage_ranks)
        found.setdefault(ends if which == "send" else ends[::-1], []).append(call)
    return found
