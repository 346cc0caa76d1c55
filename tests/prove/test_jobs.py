"""Killed jobs resume: a slice of the jobs proof, ranks that hang, and torchrun on two nodes."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tools.prove.kills import jobs as kill_jobs
from tools.prove.kills.jobs import Case, Job, Killer, losses


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    return Killer(tmp_path_factory.mktemp("kill-jobs"))


def test_the_cases_are_of_every_kind() -> None:
    chosen = kill_jobs.cases(40)
    assert Counter((case.launcher, case.victim) for case in chosen).most_common()[-1][1] >= 6
    assert {case.world for case in chosen} == {2, 3}
    # More than half of all possible steps.
    assert len({case.step for case in chosen}) > (kill_jobs.STEPS - 11) // 2
    assert chosen == kill_jobs.cases(40)


@pytest.mark.parametrize(
    "case",
    [
        Case("train", "rank", 2, 1, 13),
        Case("torchrun", "rank", 2, 0, 17),
        Case("train", "launcher", 2, 0, 9),
        Case("train", "all", 2, 0, 22),
    ],
    ids=str,
)
def test_a_job_that_is_killed_goes_on(killer: Killer, case: Case) -> None:
    assert killer.run(case) == []


def test_a_job_that_loses_ranks_starts_them_again(killer: Killer) -> None:
    expected = killer.uninterrupted_losses(2)
    folder = killer.folder / uuid.uuid4().hex
    # A recipe that asks to begin anew does so only once.
    sets = ("reliability.restarts=2", "checkpoint.resume=none")
    job = Job(folder, 2, "train", *sets)
    try:
        for step, rank in ((3, 0), (13, 1)):
            job.wait_for_step(step)
            job.kill("rank", rank)
        status = job.wait()
        output = job.output()
        assert status == 0, output
        again = [line for line in output.splitlines() if line.startswith("starting all ranks")]
        assert again == [f"starting all ranks again, {n} of at most 2 times" for n in (1, 2)]
        assert "Traceback" not in output
        assert losses(folder) == expected
        assert job.left_over() == []
    finally:
        job.end()


def test_a_rank_that_hangs_is_named(killer: Killer) -> None:
    job = Job(
        killer.folder / uuid.uuid4().hex, 2, "train", "run.timeout_minutes=0.15", "run.steps=100000"
    )
    try:
        job.wait_for_step(6)
        os.kill(job.pid_of(1), signal.SIGSTOP)
        status = job.wait(60.0)
        lines = [line for line in job.output().splitlines() if "rank 1 (" in line]
        assert status == 1
        assert len(lines) == 1, job.output()
        assert lines[0].startswith(
            "rank 1 (pp0 dp1 cp0 tp0) does not answer: it has died, or is stopped; the newest"
        )
        assert lines[0].endswith("/run/checkpoints/step-00000005: the same command goes on from it")
        assert "Traceback" not in job.output()
        assert job.left_over() == []
    finally:
        job.end()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[list[tuple[str, str, str]]]:
    """Two nodes: (network namespace, interface, address) of each. Skips if they cannot be made."""
    mark = uuid.uuid4().hex[:6]
    found = [(f"c3d-{mark}-{n}", f"v{mark}{n}", f"10.77.0.{n + 1}") for n in (0, 1)]
    with ExitStack() as stack:
        try:
            for name, _, _ in found:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            (first, a, _), (second, b, _) = found
            ip("link", "add", a, "netns", first, "type", "veth", "peer", "name", b, "netns", second)
            for name, device, address in found:
                ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"two network namespaces cannot be made here: {error}")
        yield found


class Node(Job):
    """One node's agent of a job under torchrun."""

    def __init__(
        self, folder: Path, recipe: Path, number: int, nodes: list[tuple[str, str, str]]
    ) -> None:
        self._node, self._recipe, self._nodes = number, recipe, nodes
        super().__init__(folder, 2, "torchrun")

    def command(self) -> list[str]:
        name, device, address = self._nodes[self._node]
        options = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "3",
            "--local-addr",
            address,
        ]
        meet = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{self._nodes[0][2]}:29400",
            "--rdzv-id",
            "job",
        ]
        host = ["--rdzv-conf", f"is_host={1 - self._node}"]
        prefix = [
            "ip",
            "netns",
            "exec",
            name,
            "env",
            f"GLOO_SOCKET_IFNAME={device}",
            sys.executable,
        ]
        torchrun = [*prefix, "-m", "torch.distributed.run", *options, *meet, *host]
        return [*torchrun, "-m", "composer3d", "train", str(self._recipe)]


def test_a_killed_rank_costs_one_restart_on_two_nodes(
    killer: Killer, nodes: list[tuple[str, str, str]]
) -> None:
    folder = killer.folder / uuid.uuid4().hex
    expected = killer.uninterrupted_losses(2)
    jobs = [Node(folder, killer.folder / "recipe-2.toml", number, nodes) for number in (0, 1)]
    try:
        jobs[0].wait_for_step(12)
        for job in jobs:
            # The rank may be on either node.
            with suppress(RuntimeError):
                os.kill(job.pid_of(1), signal.SIGKILL)
        assert [job.wait() for job in jobs] == [0, 0], [job.output() for job in jobs]
        output = "".join(job.output() for job in jobs)
        assert output.count("resumed from") == 1
        assert output.count("Traceback") == 0
        assert kill_jobs.losses(folder) == expected
        assert [job.left_over() for job in jobs] == [[], []]
    finally:
        for job in jobs:
            job.end()


def test_a_second_job_is_refused_though_the_lock_is_removed(killer: Killer) -> None:
    folder = killer.folder / uuid.uuid4().hex
    first = Job(folder, 2, "train", "run.steps=100000")
    try:
        first.wait_for_step(1)
        (folder / "run" / "lock").unlink()
        second = Job(folder, 2, "train", "run.steps=100000")
        assert second.wait() == 2
        assert "is in use by another job" in second.output()
        (folder / "run").rename(folder / "moved")
        begin = time.monotonic()
        third = Job(folder, 2, "train", "run.steps=20")
        assert third.wait() == 0, third.output()
        assert first.wait(30.0) == 1
        assert "was removed or replaced while this job ran" in first.output()
        assert time.monotonic() - begin < 60
        assert max(kill_jobs.losses(folder)) == 20
    finally:
        first.end()
