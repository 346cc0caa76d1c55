"""Killed jobs resume: a slice of the jobs proof, ranks that hang, and torchrun on two nodes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from composer3d.planner.goodput import Costs, goodput
from tests.long import some_of
from tools.prove.kills import jobs
from tools.prove.kills.goodput import Result, gaps, summary
from tools.prove.kills.jobs import STEPS, Job, Killer, Launcher
from tools.prove.kills.storm import Storm, check, kills
from tools.prove.kills.storm import prove as prove_storm
from tools.prove.kills.trouble import KINDS, SkippedError, Trouble, throw, troubles
from tools.prove.kills.trouble import kills as job_kills
from tools.prove.paths import ROOT
from tools.two_hosts import Host


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    return Killer(tmp_path_factory.mktemp("kill-jobs"))


@pytest.fixture
def start(killer: Killer) -> Iterator[Callable[..., Job]]:
    """Starts a job of two ranks, in a new folder if none is given; the test's end ends it."""
    started: list[Job] = []

    def start_job(*sets: str, launcher: Launcher = "train", **options: Any) -> Job:
        folder = options.pop("folder", killer.folder / uuid.uuid4().hex)
        started.append(Job(folder, 2, launcher, *sets, **options))
        return started[-1]

    yield start_job
    for job in started:
        job.end()


@some_of(
    2,
    "trouble",
    [
        Trouble("kill of launcher", 2, 0, 9),
        Trouble("full disk at a save", 2, 0, 9, 0.4),
        Trouble("full disk for a moment", 2, 0, 9),
        Trouble("60 Ctrl-C", 2, 0, 0, 0.5),
        Trouble("no memory", 2, 1, 9),
    ],
    ids=str,
)
def test_a_job_in_trouble_ends_or_goes_on(killer: Killer, trouble: Trouble) -> None:
    try:
        assert throw(killer, trouble) == []
    except SkippedError as error:
        pytest.skip(str(error))


def test_the_kills_are_of_every_kind() -> None:
    planned = job_kills(40)
    assert Counter((kill.launcher, kill.kind) for kill in planned).most_common()[-1][1] >= 6
    assert {kill.world for kill in planned} == {2, 3}
    # More than half of all possible steps.
    assert len({kill.step for kill in planned}) > (STEPS - 11) // 2
    assert planned == job_kills(40)


def test_the_troubles_are_of_every_kind() -> None:
    planned = troubles(66)
    assert min(Counter(trouble.kind for trouble in planned).values()) == 6
    assert {trouble.kind for trouble in planned} == set(KINDS)
    assert planned == troubles(66)


def test_a_job_that_loses_ranks_starts_them_again(
    killer: Killer, start: Callable[..., Job]
) -> None:
    # A recipe that asks to begin anew does so only once.
    job = start("reliability.restarts=2", "checkpoint.resume=none")
    for step, rank in ((3, 0), (13, 1)):
        job.wait_for_step(step)
        job.kill("rank", rank)
    status = job.wait()
    output = job.output()
    assert status == 0, output
    again = [line for line in output.splitlines() if line.startswith("starting all ranks")]
    assert again == [f"starting all ranks again, {n} of at most 2 times" for n in (1, 2)]
    assert "Traceback" not in output
    assert job.losses() == killer.uninterrupted_losses(2)
    reports = re.findall(r"; what each rank did is in (\S+/lost-ranks-\w+\.txt); ", output)
    for report, ended in zip(reports, ("rank 0 (pp0 dp0", "rank 1 (pp0 dp1"), strict=True):
        text = Path(report).read_text()
        assert re.search(rf"^{re.escape(ended)} cp0 tp0\) has ended$", text, re.M)
        assert ": its collective failed: " in text
    assert job.left_over() == []


def test_a_rank_that_hangs_is_named(start: Callable[..., Job]) -> None:
    job = start("run.timeout_minutes=0.15", "run.steps=100000")
    job.wait_for_step(6)
    os.kill(job.pid_of(1), signal.SIGSTOP)
    status = job.wait(60.0)
    lines = [line for line in job.output().splitlines() if "rank 1 (" in line]
    assert status == 1
    assert len(lines) == 1, job.output()
    finding = "rank 1 (pp0 dp1 cp0 tp0) does not answer: it has died, or is stopped"
    begin = f"{finding}; what each rank did is in "
    assert lines[0].startswith(begin)
    report, _, advice = lines[0].removeprefix(begin).partition("; ")
    assert advice.startswith("the newest checkpoint is ")
    assert Path(report).parent.name == "run"
    text = Path(report).read_text()
    assert text.startswith(f"{finding}\n{advice}\n")
    assert "rank 0 (pp0 dp0 cp0 tp0) on " in text
    assert lines[0].endswith("/run/checkpoints/step-00000005: the same command goes on from it")
    assert "Traceback" not in job.output()
    assert job.left_over() == []


def test_ranks_that_import_torch_die_with_their_agent(start: Callable[..., Job]) -> None:
    job = start("run.steps=100000", launcher="torchrun")

    def import_torch() -> bool:
        ranks = set(job.processes()) - {job.process.pid}
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in ranks]
        return len(maps) >= 2 and all("libtorch" in text for text in maps)

    job.wait_until(import_torch, "import of torch")
    job.kill("launcher", 0)
    job.wait()
    assert job.left_over() == []


@pytest.mark.long
def test_a_killed_rank_costs_one_restart_on_two_nodes(
    killer: Killer, hosts: tuple[Host, Host], start: Callable[..., Job]
) -> None:
    folder = killer.folder / uuid.uuid4().hex
    train = ["-m", "composer3d", "train", str(killer.folder / "recipe-2.toml")]
    commands = [host.torchrun(1, train, "--max-restarts", "3") for host in hosts]
    of_nodes = [start(folder=folder, command=command) for command in commands]
    of_nodes[0].wait_for_step(12)
    for job in of_nodes:
        # The rank may be on either node.
        with suppress(RuntimeError):
            os.kill(job.pid_of(1), signal.SIGKILL)
    assert [job.wait() for job in of_nodes] == [0, 0], [job.output() for job in of_nodes]
    output = "".join(job.output() for job in of_nodes)
    assert output.count("resumed from") == 1
    # At the end, the node with torchrun's store may leave before the other node has read that
    # both are done. The agent of the other node then logs the lost store with a traceback.
    assert output.count("Traceback") == output.count("Error waiting on exit barrier")
    assert of_nodes[0].losses() == killer.uninterrupted_losses(2)
    assert [job.left_over() for job in of_nodes] == [[], []]


LAUNCH = ROOT / "tools" / "launch"
MEETING = "10.77.0.1:29400"
# Of a job that goes on without a lost node, and with it when it is back.
ELASTIC = (
    "mesh.dp_shard=-1",
    "optim.schedule=constant",
    "data.seq_len=256",
    "precision.params=float64",
    "precision.compute=float64",
)


def command_of_node(host: Host, recipe: Path) -> list[str]:
    """The command of one node's agent of an elastic job."""
    program = ("bash", str(LAUNCH / "node"), MEETING, "1:2", "1", str(recipe))
    environment = {
        "ADDRESS": host.address,
        "RENDEZVOUS": "is_host=0,last_call_timeout=2,keep_alive_interval=1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return host.command(program, environment)


@pytest.fixture
def rendezvous(hosts: tuple[Host, Host]) -> Iterator[None]:
    """The machine where nodes meet. It has the first one's address, and is not lost with it."""
    program = (sys.executable, str(LAUNCH / "rendezvous.py"), MEETING)
    with subprocess.Popen(hosts[0].command(program, {})) as process:
        yield
        process.terminate()
        assert process.wait(20.0) == 0


@pytest.mark.long
@pytest.mark.usefixtures("rendezvous")
def test_a_job_goes_on_without_a_lost_node_and_with_it_when_it_is_back(
    killer: Killer, hosts: tuple[Host, Host], start: Callable[..., Job]
) -> None:
    folder = killer.folder / uuid.uuid4().hex

    def start_node(host: Host) -> Job:
        command = command_of_node(host, killer.folder / "recipe-2.toml")
        return start(*ELASTIC, "run.steps=100000", folder=folder, command=command)

    def wait_for(job: Job, text: str) -> None:
        job.wait_until(lambda: text in job.output(), text)

    lost, left = map(start_node, hosts)
    left.wait_for_step(7)
    # The node of rank 0, whose process holds the store of the round.
    lost.kill("all", 0)
    wait_for(left, "mesh.dp_shard: 2 -> 1")
    back = start_node(hosts[0])
    wait_for(back, "mesh.dp_shard: 1 -> 2")
    back.wait_for_step(max(back.losses()) + 4)
    for job in (left, back):
        job.process.send_signal(signal.SIGTERM)
    statuses = [job.wait() for job in (left, back)]
    assert statuses == [1, 1], [job.output()[-3000:] for job in (left, back)]
    found = back.losses()
    assert f"stopped by signal 15 after step {len(found)};" in back.output()
    gone = "the job's store does not answer: rank 0 (pp0 dp0 cp0 tp0) has ended; the newest "
    assert left.output().count(gone) == 1, left.output()

    whole = start(*ELASTIC, f"run.steps={len(found)}")
    assert whole.wait() == 0, whole.output()
    expected = whole.losses()
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-12)
    assert [job.left_over() for job in (lost, left, back, whole)] == [[]] * 4


def test_a_training_survives_one_kill_after_another(tmp_path: Path) -> None:
    storm, problems = prove_storm(tmp_path, count=2, steps=60)
    assert problems == []
    assert sum(storm.hits.values()) == 2


# A training without a model: it logs some steps, a little apart, and then does nothing for a while.
SLOW_STEPS = """
import sys, time
for step in range(1, 11):
    time.sleep(0.5)
    with open(sys.argv[1], "a") as file:
        print('{"step": %d, "loss": 1.0}' % step, file=file)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("rest_s", [0.0, 60.0])
def test_a_job_may_take_long_but_not_stand_still(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest_s: float
) -> None:
    monkeypatch.setattr(jobs, "LIMIT_S", 4.0)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    program = [sys.executable, "-I", "-S", "-c", SLOW_STEPS, str(metrics), str(rest_s)]
    job = start(folder=tmp_path, command=program)
    if rest_s:
        with pytest.raises(RuntimeError, match="no step after 10 within 4 s"):
            job.wait_while_it_trains()
    else:
        assert job.wait_while_it_trains() == 0


def test_the_storm_kills_every_victim_at_any_instant() -> None:
    planned = kills(100)
    assert min(Counter(kill.victim for kill in planned).values()) >= 10
    assert {kill.launcher for kill in planned} == {"train", "torchrun"}
    assert min(kill.after_s for kill in planned) < 0.5
    assert max(kill.after_s for kill in planned) > 7.0
    assert planned == kills(100)


def test_a_storm_with_another_loss_a_doubled_step_or_much_lost_work_is_wrong(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    rows = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 2, 3)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    expected = {1: 1.0, 2: 0.5, 3: 0.25}
    assert check(Storm(tmp_path, (), lost_steps=[3, 21]), expected) == [
        "1 of 3 losses differ, from step 3 on",
        "a step is logged twice, or steps are out of order",
        "a kill cost 21 steps, but a checkpoint was due every 20",
    ]


def test_times_between_kills_of_the_goodput_are_those_of_failures_at_random() -> None:
    found = gaps(200, 12.0)
    assert found == gaps(200, 12.0) != sorted(found)
    assert fmean(found) == pytest.approx(12.0, rel=0.01)
    # Those of an exponential distribution vary as much as their mean is.
    assert pstdev(found) == pytest.approx(12.0, rel=0.05)


@pytest.mark.parametrize(("measured", "verdict"), [(0.72, "+2.0 points, within"), (0.66, "NOT")])
def test_the_goodput_that_is_measured_is_compared(measured: float, verdict: str) -> None:
    costs = Costs(mttf_s=12.0, step_s=0.05, stop_s=0.1, notice_s=0.6, restart_s=1.5)
    predicted = goodput(costs, 40)._replace(trains=0.70)
    result = Result(costs, [0.05], predicted, measured, kills=24, seconds=300.0)
    assert verdict in summary(result)[-1]


def test_a_job_whose_folder_another_job_has_made_again_ends(start: Callable[..., Job]) -> None:
    first = start("run.steps=100000")
    first.wait_for_step(1)
    (first.folder / "run").rename(first.folder / "moved")
    begin = time.monotonic()
    second = start("run.steps=20", folder=first.folder)
    assert second.wait() == 0, second.output()
    assert first.wait(30.0) == 1
    assert "was removed or replaced while this job ran" in first.output()
    assert time.monotonic() - begin < 60
    assert max(second.losses()) == 20


def test_a_job_without_a_terminal_starts_its_ranks_again(
    killer: Killer, start: Callable[..., Job]
) -> None:
    """As under nohup, it ignores SIGHUP; one stream is closed, and nobody reads the other.

    ``tests/runtime/test_console.py`` has more kinds of streams.
    """
    shell = ("bash", "-c", 'trap "" HUP; exec "$@" >&- 2> >(:)', "bash")
    job = start("reliability.restarts=1", around=shell)
    job.wait_for_step(8)
    os.killpg(job.process.pid, signal.SIGHUP)
    job.kill("rank", 1)
    assert job.wait() == 0
    assert job.losses() == killer.uninterrupted_losses(2)
    log = (job.folder / "run" / "log.txt").read_text()
    assert re.search(r" rank 1 \(pp0 dp1 cp0 tp0\) was ended by signal 9 ", log)
    assert " starting all ranks again, 1 of at most 1 times\n" in log
    assert job.left_over() == []


@pytest.mark.parametrize("event", ["renamed", "replaced"])
def test_a_job_whose_folder_has_gone_does_not_begin_anew(
    start: Callable[..., Job], event: str
) -> None:
    job = start("reliability.restarts=2", "run.steps=100000", "checkpoint.every=100000")
    run = job.folder / "run"
    job.wait_for_step(3)
    run.rename(job.folder / "moved")
    if event == "replaced":
        shutil.copytree(job.folder / "moved", run)
    job.kill("rank", 1)
    assert job.wait(60.0) == 1
    problem = f"{run} was removed, renamed or replaced while this job ran: the ranks are not"
    assert job.output().count(problem) == 1, job.output()
    assert "starting all ranks again" not in job.output()
    assert "Traceback" not in job.output()
    assert run.exists() == (event == "replaced")
    assert job.left_over() == []


def test_a_job_whose_terminal_is_closed_saves_and_ends(start: Callable[..., Job]) -> None:
    job = start("run.steps=100000")
    job.wait_for_step(3)
    # A terminal sends it to the whole group, and a service manager to the first process.
    os.killpg(job.process.pid, signal.SIGHUP)
    job.process.send_signal(signal.SIGHUP)
    assert job.wait() == 128 + signal.SIGHUP, job.output()
    newest = job.folder / f"run/checkpoints/step-{max(job.losses()):08}"
    assert newest.is_dir()
    assert f"stopped by signal {signal.SIGHUP:d} after step" in job.output()
