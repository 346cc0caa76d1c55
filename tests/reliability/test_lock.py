"""The claim on a run's folder: one job at a time, whatever is removed or placed in the folder."""

import os
from pathlib import Path

import pytest

from composer3d.facts.errors import TrainingError, UserError
from composer3d.reliability import lock as claim
from composer3d.reliability.lock import Claim, read_note


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "small"


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        Claim(folder)
    (line,) = caught.value.lines
    return line


def test_the_second_job_is_told_who_has_the_folder(folder: Path) -> None:
    first = Claim(folder)
    assert refused(folder).startswith(f"{folder} is in use by process {os.getpid()} on ")
    assert read_note(folder).startswith(f"process {os.getpid()} on ")
    first.close()
    first.close()
    Claim(folder).close()


def test_the_claim_survives_the_removal_of_its_file(folder: Path) -> None:
    first = Claim(folder)
    (folder / claim.FILE).unlink()
    assert (
        refused(folder)
        == f"{folder} is in use by another job; wait for its end, or give this run another run.name"
    )
    (folder / claim.FILE).write_text("x" * 10**6)
    assert "is in use by another job" in refused(folder)
    first.require_held()
    first.close()


def test_control_characters_of_a_note_are_not_printed(folder: Path) -> None:
    first = Claim(folder)
    (folder / claim.FILE).write_text("\x1b]0;title\x07 \x1b[2J")
    assert f"{folder} is in use by another job; wait" in refused(folder)
    first.close()


def test_a_parent_that_became_a_file_is_noticed(folder: Path) -> None:
    first = Claim(folder)
    folder.parent.rename(folder.parent.with_name("moved"))
    folder.parent.touch()
    assert not first.is_held()
    with pytest.raises(TrainingError, match="was removed or replaced while this job ran"):
        first.require_held()
    first.close()


def test_an_older_job_that_locks_only_the_file_keeps_it(folder: Path) -> None:
    import fcntl

    folder.mkdir(parents=True)
    with open(folder / claim.FILE, "w+") as file:
        file.write("process 1 on old")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"{folder} is in use by process 1 on old" in refused(folder)
    Claim(folder).close()


def test_a_folder_that_is_made_again_belongs_to_its_new_job(folder: Path) -> None:
    first = Claim(folder)
    folder.rename(folder.with_name("moved"))
    with pytest.raises(
        TrainingError, match="was removed or replaced while this job ran: nothing more is written"
    ):
        first.require_held()
    second = Claim(folder)
    with pytest.raises(TrainingError, match="was removed or replaced"):
        first.require_held()
    second.require_held()
    assert "is in use" in refused(folder)
    first.close()
    second.close()


@pytest.mark.parametrize("placed", ["link", "dangling", "fifo", "folder"])
def test_what_stands_at_the_place_of_the_lock_is_not_written_through(
    folder: Path, placed: str
) -> None:
    folder.mkdir(parents=True)
    victim, lock = folder.parent / "victim", folder / claim.FILE
    victim.write_text("precious")
    if placed == "fifo":
        os.mkfifo(lock)
    elif placed == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(victim if placed == "link" else folder.parent / "made")
    with pytest.raises(OSError, match=r"plain file|symbolic link|directory"):
        Claim(folder)
    assert victim.read_text() == "precious"
    assert not (folder.parent / "made").exists()
    lock.rmdir() if placed == "folder" else lock.unlink()
    Claim(folder).close()  # and nothing of the failed one stays locked


def test_a_file_system_without_locks_is_warned_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(claim.fcntl, "flock", flock)
    claim.log.setup("", main=True)
    Claim(folder).close()
    assert (
        "is on a file system without locks: make sure that no second job uses it"
        in capsys.readouterr().err
    )
