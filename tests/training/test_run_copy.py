"""The files of a run in an object store, beside its checkpoints."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composer3d import cli
from composer3d.checkpoint import folders
from composer3d.facts.remote import RemotePath
from composer3d.runtime import run_files
from composer3d.runtime.launch import Pool
from composer3d.training.observers import run_copy
from composer3d.training.observers.run_copy import RunCopy
from tests.training.jobs import DATA, RECIPE, losses, train
from tools.object_store import new_folder, variables


@pytest.mark.long
def test_a_run_goes_on_from_disk_to_disk_with_all_its_files(
    pool: Pool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "corpus.txt").write_text("".join(f"{n} is {n * n}. " for n in range(9000)))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    store = new_folder()

    def run(disk: str, steps: int, *sets: str) -> dict[int, float]:
        sets = (f"run.out_dir={disk}", f"run.steps={steps}", "optim.decay=12", *sets)
        done = train(pool, tmp_path, *sets, **variables())
        assert done.returncode == 0, done.stderr
        return losses(tmp_path, disk)

    expected = run("whole", 12)
    assert len(expected) == 12
    synced = (f"checkpoint.folder={store}", "run.sync=true", "metrics.tensorboard=true")
    for disk, steps in [("a", 4), ("b", 8), ("a", 12)]:
        found = run(disk, steps, *synced)
        assert found == {step: expected[step] for step in range(1, steps + 1)}
    folder = tmp_path / "a" / "small"
    # The recipe has another run.steps; all else went on from what the disk had.
    (former,) = folder.glob("before-fetch-*")
    assert [path.name for path in former.rglob("*")] == ["recipe.toml"]

    place = store / "small"
    sent = {name: (folder / name).stat().st_size for name in run_files.of_disk(folder)}
    assert {"metrics.jsonl", "events.jsonl", "log.txt", "recipe.toml"} < sent.keys()
    assert {name.partition("/")[0] for name in sent} >= {"by_tokens"}
    in_store = {name: size for name, size in place.files().items() if "step-" not in name}
    assert in_store.pop("writer") > 0
    # After the copy was closed, a line or two went to the log.
    assert in_store.pop("log.txt") <= sent.pop("log.txt")
    assert in_store == sent
    assert (place / "metrics.jsonl").read(1 << 20) == (folder / "metrics.jsonl").read_bytes()
    curves = EventAccumulator(str(folder)).Reload()
    assert [point.step for point in curves.Scalars("loss/train")] == list(range(1, 13))

    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(place), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert "--calibrate" not in Path("report.html").read_text()  # the recipe in the copy goes
    assert told["report"] == "report.html"
    assert told["runs"][0]["step"] == 12
    assert cli.main(["report", f"{store}/other"]) == 2
    assert f"{store}/other is not the folder of a run" in capsys.readouterr().err


class Job:
    """A job on a disk, whose copy sends as fast as it can."""

    def __init__(self, disk: Path, place: RemotePath) -> None:
        disk.mkdir(exist_ok=True)
        self.disk, self.place = disk, place
        self.copy = RunCopy(disk, place)
        self.folder = folders.RemoteFolder(place)

    def begin(self, *, is_killed: bool = False) -> "Job":
        self.copy.fetch()
        self.copy.begin()
        if not is_killed:
            self.folder.claim()
            self.copy.start()
        return self

    def writes(self, text: str) -> "Job":
        with open(self.disk / "metrics.jsonl", "a") as file:
            file.write(text)
        return self

    @property
    def text(self) -> str:
        return (self.disk / "metrics.jsonl").read_text()

    @property
    def sent(self) -> str:
        return (self.place / "metrics.jsonl").read(1000).decode()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Job]:
    place = new_folder() / "small"
    monkeypatch.setattr(run_copy, "_PERIOD_S", 0.05)
    monkeypatch.setattr(run_copy, "_PAUSE_FOR_ROUND", 0.0)
    numbers = iter(range(100))

    def make(disk: str) -> Job:
        note = f"job {next(numbers)}".encode()
        monkeypatch.setattr(folders, "job_note", lambda: note)
        monkeypatch.setattr(run_copy, "job_note", lambda: note)
        return Job(tmp_path / disk, place)

    return make


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logging.getLogger("composer3d").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("composer3d").removeHandler(caplog.handler)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_lines_are_sent_while_the_job_runs(job: Callable[[str], Job]) -> None:
    one = job("a").writes("1\n").begin()
    wait_for(lambda: (one.place / "metrics.jsonl").exists())
    one.writes("2\n")
    wait_for(lambda: one.sent == "1\n2\n")
    one.writes("3\n").copy.close()
    assert one.sent == "1\n2\n3\n"


def test_a_killed_job_is_found_on_its_disk(job: Callable[[str], Job]) -> None:
    first = job("a").begin().writes("1\n")
    first.copy.close()
    job("a").begin(is_killed=True)
    first.writes("2\n")  # not sent
    third = job("a").begin()
    third.copy.close()
    assert third.text == third.sent == "1\n2\n"


def test_what_only_a_disk_has_is_kept_when_the_store_goes_on(
    job: Callable[[str], Job], told: pytest.LogCaptureFixture
) -> None:
    job("a").begin().writes("1\n").copy.close()
    job("a").writes("2a\n")
    job("b").begin().writes("2b\n").copy.close()
    third = job("a").begin()
    assert third.text == "1\n2b\n"
    assert (third.disk / "before-fetch-1" / "metrics.jsonl").read_text() == "1\n2a\n"
    assert "what differed is kept in" in told.text
    third.copy.close()


def test_a_disk_with_more_lines_keeps_them(job: Callable[[str], Job]) -> None:
    first = job("a").begin().writes("1\n")
    first.copy.close()
    first.writes("2\n")
    job("b").begin(is_killed=True).folder.claim()  # it has sent nothing
    third = job("a").begin()
    third.copy.close()
    assert third.text == third.sent == "1\n2\n"
    assert not list(third.disk.glob("before-fetch-*"))


def test_a_job_that_begins_between_is_no_former_one(job: Callable[[str], Job]) -> None:
    first = job("a")
    first.copy.fetch()
    note = (first.disk / "store-writers").exists()
    (first.place / "writer").write(b"a job on another disk")
    with pytest.raises(OSError, match="another job has begun to write there"):
        first.copy.begin()
    assert not note
    assert not (first.disk / "store-writers").exists()


def test_a_file_that_cannot_be_read_keeps_no_other_back(
    job: Callable[[str], Job], told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = run_files.send

    def fail_once(path: Path, target: RemotePath) -> run_files.Version | None:
        if path.name == "a":
            raise ValueError("odd") if "does not get" in told.text else OSError(13, "is not read")
        return send(path, target)

    monkeypatch.setattr(run_files, "send", fail_once)
    one = job("a").writes("1\n")
    (one.disk / "a").write_text("x")
    one.begin()
    wait_for(lambda: "does not get all files of the run" in told.text)
    assert one.sent == "1\n"
    one.writes("2\n").copy.close()
    assert "lacks the newest lines" in told.text


def test_an_older_job_stops_sending(
    job: Callable[[str], Job], told: pytest.LogCaptureFixture
) -> None:
    older = job("a").begin().writes("1\n")
    wait_for(lambda: (older.place / "metrics.jsonl").exists())
    (older.place / "writer").write(b"a job on another disk")
    wait_for(lambda: "is written by another job now" in told.text)
    older.writes("2\n").copy.close()
    assert older.sent == "1\n"


def test_a_store_that_fails_for_a_while_is_told_twice(
    job: Callable[[str], Job], told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job("a").writes("1\n").begin()
    wait_for(lambda: (one.place / "metrics.jsonl").exists())

    def fail(path: Path, target: RemotePath) -> None:
        raise OSError(5, "is not there", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(run_files, "send", fail)
        one.writes("2\n")
        wait_for(lambda: "does not get all files of the run" in told.text)
        time.sleep(0.3)
    wait_for(lambda: "has the files of the run again" in told.text)
    one.copy.close()
    assert one.sent == "1\n2\n"
    assert len({id(record) for record in told.records}) == 2


def test_names_of_others_in_the_store_are_not_read(job: Callable[[str], Job]) -> None:
    first = job("a").begin().writes("1\n")
    first.copy.close()
    foreign = ("lock", ".x", "store-writers", "corpus.jsonl", "by_tokens/.y", "by_tokens")
    for name in (*foreign, "checkpoints/z", "by_tokens/in"):
        (first.place / name).write(b"evil")
    other = job("b").begin()
    other.copy.close()
    assert (other.disk / "by_tokens" / "in").read_bytes() == b"evil"
    found = {path.relative_to(other.disk).as_posix() for path in other.disk.rglob("*")}
    assert found == {"by_tokens", "by_tokens/in", "metrics.jsonl", "store-writers"}


def test_a_link_on_the_disk_is_neither_sent_nor_written_through(
    job: Callable[[str], Job], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("key")
    first = job("a")
    (first.disk / "metrics.jsonl").symlink_to(tmp_path / "secret")
    first.begin().copy.close()
    assert not (first.place / "metrics.jsonl").exists()
    job("b").begin().writes("1\n").copy.close()
    third = job("a").begin()
    third.copy.close()
    assert third.text == "1\n"
    assert (tmp_path / "secret").read_text() == "key"


def test_a_fetch_that_is_cut_off_is_done_again(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job("a").begin().writes("1\n")
    (first.disk / "recipe.toml").write_text("steps = 3")
    first.copy.close()

    def fail(path: RemotePath, size: int) -> Iterator[bytes]:
        yield path.read_range(0, size // 2)
        raise OSError(5, "is not there", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "pieces", fail)
        with pytest.raises(OSError, match="is not there"):
            job("b").begin()
    other = job("b")
    assert list(other.disk.iterdir()) == []
    other.begin().copy.close()
    assert other.text == "1\n"
