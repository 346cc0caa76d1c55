"""Which ranks are named as slow, from simulated times; and the ranks that have the same work."""

import random
from statistics import median

import pytest

from composer3d.recipe.schema import MeshTable, ParallelTable, ReliabilityTable
from composer3d.reliability.stragglers import StragglerJudge, peer_groups, time_of_window

TABLE = ReliabilityTable()


class _Run:
    """A simulated run: windows of own times with noise, judged with the default settings."""

    def __init__(self, n_ranks: int, *, seed: int, step_s: float = 0.1) -> None:
        self.random = random.Random(seed)
        self.step_s = step_s
        self.steps = 0
        self.factors = [1.0] * n_ranks
        self.named: list[tuple[int, int, float]] = []  # step, rank, factor
        self.recovered: list[tuple[int, int]] = []
        self.judge = StragglerJudge([list(range(n_ranks))], TABLE.straggler_factor)
        self._own_s: list[list[float]] = [[] for _ in range(n_ranks)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            for own_s, factor in zip(self._own_s, self.factors, strict=True):
                # Every eighth step of a rank is disturbed by something that takes up to 4 steps.
                hiccup = 4 * self.random.random() if self.random.random() < 1 / 8 else 0.0
                noise = self.random.uniform(-0.1, 0.1)
                own_s.append(self.step_s * (factor * (1 + noise) + hiccup))
            if self.steps % TABLE.straggler_window == 0:
                times_s = [time_of_window(own_s) for own_s in self._own_s]
                found, recovered = self.judge.judge(times_s)
                self.named += [(self.steps, slow.rank, slow.factor) for slow in found]
                self.recovered += [(self.steps, rank) for rank in recovered]
                self._own_s = [[] for _ in self._own_s]


@pytest.mark.parametrize("n_ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_ranks_are_not_named_in_200_steps(n_ranks: int, seed: int) -> None:
    run = _Run(n_ranks, seed=seed)
    run.run(200)
    assert run.named == []


@pytest.mark.parametrize("n_ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("begin", range(50, 56))
def test_a_rank_that_turns_slow_is_named_within_20_steps_and_once(n_ranks: int, begin: int) -> None:
    run = _Run(n_ranks, seed=begin)
    run.run(begin)
    run.factors[1] = 1.5
    run.run(100)
    ((step, rank, factor),) = run.named
    # A report comes at most one step after the end of a window.
    assert step + 1 - begin <= 20
    assert rank == 1
    assert factor == pytest.approx(1.5, rel=0.15)
    assert run.recovered == []

    run.factors[1] = 1.0
    run.run(20)
    ((step, rank),) = run.recovered
    assert rank == 1
    run.factors[1] = 1.5
    run.run(20)
    assert [rank for _, rank, _ in run.named] == [1, 1]


def test_one_slow_window_names_nobody() -> None:
    judge = StragglerJudge([[0, 1, 2]], 1.3)
    for _ in range(3):
        assert judge.judge([0.2, 0.1, 0.1]) == ([], [])
        assert judge.judge([0.1, 0.1, 0.1]) == ([], [])


def test_the_slowest_is_one_of_the_ranks_that_are_named_and_still_slow() -> None:
    judge = StragglerJudge([[0, 1, 2, 3]], 1.3)
    both = {3: 0.3, 0: 0.4}
    slowest = []
    for slow in ({3: 0.2}, {3: 0.2}, both, {0: 0.4}, both, {3: 0.2}, {}, {}):
        judge.judge([slow.get(rank, 0.1) for rank in range(4)])
        found = judge.slowest
        slowest.append(None if found is None else (found.rank, round(found.factor, 3)))
    # Two windows must agree that a rank is slow, or slow no longer.
    assert slowest == [None, (3, 2), (3, 3), (0, 4), (0, 4), (0, 4), (3, 2), None]


def test_a_rank_that_is_disturbed_in_most_of_its_steps_is_not_slow() -> None:
    disturbed_s = [0.1, 0.3, 0.1, 0.3, 0.3, 0.3, 0.1, 0.3]
    assert time_of_window(disturbed_s) == 0.1
    assert time_of_window([0.3] * 8) == 0.3


def test_a_loss_below_two_milliseconds_is_none() -> None:
    judge = StragglerJudge([[0, 1]], 1.3)
    for _ in range(3):
        assert judge.judge([0.0029, 0.0010]) == ([], [])


def test_ranks_are_compared_within_their_group() -> None:
    judge = StragglerJudge([[0, 1], [2, 3], [4]], 1.3)
    # The second stage has twice the work of the first.
    judge.judge([0.1, 0.1, 0.2, 0.3, 0.9])
    ((slow,), recovered) = judge.judge([0.1, 0.1, 0.2, 0.3, 0.9])
    assert (slow.rank, slow.own_s, slow.peers_s) == (3, 0.3, 0.2)
    assert recovered == []


@pytest.mark.parametrize("size", range(2, 8))
def test_the_peers_time_is_the_median_of_the_others(size: int) -> None:
    numbers = random.Random(size)
    own_s = [numbers.uniform(1, 9) for _ in range(size)]
    judge = StragglerJudge([list(range(size))], 1e-9)
    slow = {found.rank: found for found in judge._slow(own_s)}
    for rank in range(size):
        others_s = median(own_s[:rank] + own_s[rank + 1 :])
        if own_s[rank] > others_s:
            assert slow[rank].peers_s == pytest.approx(others_s)
        else:
            assert rank not in slow


@pytest.mark.parametrize(
    ("sizes", "parallel", "has_documents", "expected"),
    [
        ({"dp_shard": 4}, {}, True, [[0, 1, 2, 3]]),
        ({"pp": 2, "tp": 2}, {}, False, [[0, 1], [2, 3]]),
        ({"cp": 2, "dp_shard": 2}, {}, False, [[0, 1, 2, 3]]),
        ({"cp": 2, "dp_shard": 2}, {}, True, [[0, 2], [1, 3]]),
        ({"cp": 2, "dp_shard": 2}, {"cp_method": "ulysses"}, True, [[0, 1, 2, 3]]),
        ({"cp": 2, "dp_shard": 2}, {"cp_balance": "contiguous"}, False, [[0, 2], [1, 3]]),
        ({"dp_shard": 4, "ep": 2}, {}, False, [[0, 2], [1, 3]]),
    ],
)
def test_peers_have_the_same_work(
    sizes: dict[str, int],
    parallel: dict[str, str],
    has_documents: bool,
    expected: list[list[int]],
) -> None:
    mesh = MeshTable(**{"dp_shard": 1, **sizes})
    table = ParallelTable(**parallel)  # type: ignore[arg-type]
    assert peer_groups(mesh, table, has_documents=has_documents) == expected
