"""The zero-bubble schedules of one stage a rank, which published runs have and ours does not."""

from composer3d.facts.schedules import Action, Cell


def zero_bubble_actions(pp: int, micro_batches: int, in_flight: int) -> list[list[Cell]]:
    """Return a zero-bubble schedule of one stage a rank, with the memory of 1F1B or twice as much.

    Qi et al. 2023 (arXiv 2401.10241): backward in two halves; no rank holds more micro-batches at
    once than the first one does: pp of them (ZB-H1, ZB-1p), or 2 pp - 1 (ZB-H2, ZB-2p). In the
    first, rank r puts weight gradients off by r micro-batches. In the second, a rank prefers
    gradients of inputs, which others wait for; then a forward, if its memory allows it and the
    later ranks need it; then gradients of weights. There, all actions take one tick.
    """
    if in_flight == 1:
        return [_zero_bubble_h1(rank, pp, micro_batches) for rank in range(pp)]
    holds = in_flight * pp - (in_flight - 1)
    ahead = [in_flight * (pp - rank) - (in_flight - 1) for rank in range(pp)]
    ranks: list[list[Cell]] = [[] for _ in range(pp)]
    forwards, inputs, weights = [0] * pp, [0] * pp, [0] * pp
    never = 1 << 60
    forward_end = [[never] * micro_batches for _ in range(pp)]
    input_end = [[never] * micro_batches for _ in range(pp)]
    tick = 0
    while min(weights) < micro_batches:
        for rank in range(pp):
            nth = inputs[rank]
            ready = nth < forwards[rank] and forward_end[rank][nth] <= tick
            if ready and (rank == pp - 1 or input_end[rank + 1][nth] <= tick):
                ranks[rank].append((Action(rank, "I", nth),))
                input_end[rank][nth] = tick + 1
                inputs[rank] += 1
                continue
            nth = forwards[rank]
            ready = nth < micro_batches and nth - weights[rank] < holds
            ready = ready and nth - inputs[rank] < ahead[rank]
            if ready and (rank == 0 or forward_end[rank - 1][nth] <= tick):
                ranks[rank].append((Action(rank, "F", nth),))
                forward_end[rank][nth] = tick + 1
                forwards[rank] += 1
            elif weights[rank] < inputs[rank]:
                ranks[rank].append((Action(rank, "W", weights[rank]),))
                weights[rank] += 1
        tick += 1
    return ranks


def _zero_bubble_h1(rank: int, pp: int, micro_batches: int) -> list[Cell]:
    """Run as 1F1B; the weight half of a backward follows ``rank`` backwards later."""
    warmup = min(pp - 1 - rank, micro_batches)
    order: list[Cell] = [(Action(rank, "F", nth),) for nth in range(warmup)]
    for nth in range(micro_batches):
        if warmup + nth < micro_batches:
            order.append((Action(rank, "F", warmup + nth),))
        order.append((Action(rank, "I", nth),))
        if nth >= rank:
            order.append((Action(rank, "W", nth - rank),))
    first_late = max(0, micro_batches - rank)
    return order + [(Action(rank, "W", nth),) for nth in range(first_late, micro_batches)]
