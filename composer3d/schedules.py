"""Which stage of a pipeline holds which layers. Pure numbers: the planner and the drawings read it without torch."""

from collections.abc import Sequence
from math import inf

from composer3d.errors import PlanError


def balanced_cut(first: float, blocks: Sequence[float], last: float, stages: int) -> list[range]:
    """Cut consecutive blocks into ``stages`` ranges so that the slowest stage is as fast as can be.

    Args:
        first, blocks, last: the cost of what precedes the blocks (the embedding), of each block, and of what follows
            them
            (norm and head), in one unit. ``first`` is paid by the first stage and ``last`` by the last one.
        stages: number of stages, each of which gets at least one block.

    Among the cuts with the smallest maximum it takes the one with the smallest sum of squares, so that the others are
    even.

    Raises:
        PlanError: there are fewer blocks than stages.
    """
    count = len(blocks)
    if count < stages:
        raise PlanError(f"{count} layers cannot be cut into {stages} pipeline stages; use mesh.pp of at most {count}")
    prefix = [0.0]
    for cost in blocks:
        prefix.append(prefix[-1] + cost)

    def cost_of(stage: int, begin: int, end: int) -> float:
        cost = prefix[end] - prefix[begin]
        return cost + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    def search(most: float) -> tuple[float, float, tuple[int, ...]]:
        """(largest stage, sum of squares, cuts) of the best cut, by squares where ``most`` bounds the stages."""
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
        for stage in range(stages):
            following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            for end in range(stage + 1, count - (stages - stage - 1) + 1):
                options = [
                    (max(worst, cost), squares + cost * cost, (*cuts, end))
                    for begin, (worst, squares, cuts) in best.items()
                    if begin < end and (cost := cost_of(stage, begin, end)) <= most
                ]
                if options:
                    following[end] = min(options, key=lambda o: o[0] if most == inf else o[1])
            best = following
        return best[count]

    ends = search(search(inf)[0])[2]
    return [range(begin, end) for begin, end in zip((0, *ends[:-1]), ends, strict=True)]
