"""Cuts a model into pipeline stages of about equal predicted time. No torch here.

By default, stages have about equal parameters. But the head and a block of equal size take
different times, each depth of multi-token prediction adds a pass of the head, blocks with experts
hold more parameters than a token uses, and windows save time but no parameters. Cuts here balance
the predicted time of forward and backward instead. The embedding lookup takes no time.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import inf

from composer3d.planner.setup import Setup
from composer3d.planner.time import part_times

# ``parallel.stages``: the number of blocks of each stage, in order, without depths of multi-token
# prediction, which are on the last stage.
Cut = tuple[int, ...]

_ROUNDING = 1 + 1e-9  # sums within this factor are equal


class Cutter:
    """Finds cuts of a model into the stages of a setup, whatever the setup's own cut."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._times = part_times(setup)
        self._layers = setup.sizes.layers - setup.sizes.mtp_layers
        layout = setup.layout
        stages = range(layout.stages)
        self._rank_of = [layout.rank_of(stage) for stage in stages]

    def seconds(self, cut: Cut) -> list[float]:
        """Return the seconds of each stage for the forward and backward of one micro-batch."""
        spans = pairwise(accumulate(cut, initial=0))
        return [self._stage_s(stage, begin, end) for stage, (begin, end) in enumerate(spans)]

    def cuts(self) -> list[Cut]:
        """Return the cut that balances stages, and the one that balances ranks if it differs."""
        stages = self.of_fastest_stages()
        if self._setup.layout.stages_per_rank == 1:
            return [stages]
        return list(dict.fromkeys((stages, self.of_faster_ranks(stages))))

    def of_fastest_stages(self) -> Cut:
        """Return the cut whose slowest stage is fastest.

        Among equal ones, it has the least sum of squared stage times, so its stages differ least.
        Both minima are exact, by dynamic programming over the ends of stages.
        """
        slowest_s, _ = self._least(inf, max)
        _, cut = self._least(slowest_s * _ROUNDING, lambda sum_s2, stage_s: sum_s2 + stage_s**2)
        return cut

    def of_faster_ranks(self, cut: Cut) -> Cut:
        """Return a cut with blocks moved from the slowest rank to the fastest one while that helps.

        A rank has several stages. If blocks do not divide evenly, the sums over ranks differ more
        than the times of single stages.
        """
        best, least = cut, self._load(cut)
        while True:
            ranks_s = self._ranks_s(best)
            slowest, fastest = (ranks_s.index(edge(ranks_s)) for edge in (max, min))
            moved = min(self._moves(best, slowest, fastest), key=self._load, default=best)
            load = self._load(moved)
            is_as_slow = load[0] * _ROUNDING >= least[0]
            if is_as_slow and (load[0] > least[0] * _ROUNDING or load[1] * _ROUNDING >= least[1]):
                return best
            best, least = moved, load

    def most_gain(self, cut: Cut) -> float:
        """Return the most that another cut can speed up the slowest stage, as a ratio.

        It holds where all stages checkpoint their blocks alike.
        """
        seconds = self.seconds(cut)
        last_s = self._stage_s(len(cut) - 1, self._layers - 1, self._layers)
        return max(seconds) / max(last_s, sum(seconds) / len(seconds))

    def _moves(self, cut: Cut, giver: int, taker: int) -> Iterator[Cut]:
        """Yield the cuts that move one block from a stage of ``giver`` to a stage of ``taker``."""
        stages = [[s for s, rank in enumerate(self._rank_of) if rank == r] for r in (giver, taker)]
        for fewer, more in product(*stages):
            if cut[fewer] > 1 and fewer != more:
                sizes = list(cut)
                sizes[fewer] -= 1
                sizes[more] += 1
                yield tuple(sizes)

    def _ranks_s(self, cut: Cut) -> list[float]:
        found = [0.0] * self._setup.layout.pp
        for rank, stage_s in zip(self._rank_of, self.seconds(cut), strict=True):
            found[rank] += stage_s
        return found

    def _load(self, cut: Cut) -> tuple[float, float]:
        """Return the seconds of the slowest rank, and the sum of squares over ranks."""
        ranks_s = self._ranks_s(cut)
        return max(ranks_s), sum(rank_s**2 for rank_s in ranks_s)

    def _least(self, limit_s: float, add: Callable[[float, float], float]) -> tuple[float, Cut]:
        """Return the least value of any cut, and that cut.

        Args:
            limit_s: the most seconds that a stage may take.
            add: returns the value of some stages from the value of all but the last and the seconds
                of the last. It must not decrease in either.
        """
        count, layers = len(self._rank_of), self._layers
        # By the block at which the stages so far end: their least value, and where the last begins.
        values = {0: 0.0}
        begins: list[dict[int, int]] = []
        for stage in range(count):
            left = count - 1 - stage
            ends = range(stage + 1, layers - left + 1) if left else (layers,)
            found: dict[int, float] = {}
            found_begins: dict[int, int] = {}
            for end in ends:
                for begin in range(end - 1, stage - 1, -1):
                    stage_s = self._stage_s(stage, begin, end)
                    if stage_s > limit_s or add(0.0, stage_s) >= found.get(end, inf):
                        break  # stages that begin earlier take longer
                    value = add(values[begin], stage_s) if begin in values else inf
                    if value < found.get(end, inf):
                        found[end], found_begins[end] = value, begin
            values = found
            begins.append(found_begins)
        ends_of = [layers]
        for found_begins in reversed(begins):
            ends_of.append(found_begins[ends_of[-1]])
        cut = tuple(end - begin for begin, end in pairwise(reversed(ends_of)))
        return values[layers], cut

    def _stage_s(self, stage: int, begin: int, end: int) -> float:
        """Return the seconds of a stage that holds these blocks of the main model."""
        blocks_s = self._span_s[stage][begin][end - begin]
        return blocks_s + (self._end_s(stage, end - begin) if end == self._layers else 0.0)

    def _end_s(self, stage: int, place: int) -> float:
        """Return the seconds of what follows the ``place`` blocks of the last stage."""
        later = range(self._layers, self._setup.sizes.layers)
        blocks_s = (self._block_s(block, place + nth, stage) for nth, block in enumerate(later))
        return self._times.losses + sum(blocks_s)

    @cached_property
    def _span_s(self) -> list[list[list[float]]]:
        """By stage and its first block: the seconds of 0, 1, 2 and so on blocks of the stage."""
        stages = range(len(self._rank_of))
        is_checkpointed = [self._setup.recomputed.has(0, stage) for stage in stages]
        # Stages differ in no more than this.
        spans = {
            is_in: self._spans_of(is_checkpointed.index(is_in)) for is_in in set(is_checkpointed)
        }
        return [spans[is_in] for is_in in is_checkpointed]

    def _spans_of(self, stage: int) -> list[list[float]]:
        every, layers = self._setup.recomputed.every, range(self._layers)
        first, others = (
            [self._block_s(block, place, stage) for block in layers] for place in (0, 1)
        )
        found = []
        for begin in layers:
            seconds = others[begin:] if every > 1 else first[begin:]
            seconds[::every] = first[begin::every]
            found.append(list(accumulate(seconds, initial=0.0)))
        return found

    def _block_s(self, block: int, place: int, stage: int) -> float:
        return self._times.blocks[self._setup.kind_of(block, place, stage)]
