"""The store: which checkpoints it keeps, which one it uses, and its errors."""

import errno
import logging
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from composer3d.checkpoint import Store, folders, manifest, store
from composer3d.checkpoint.folders import DiskFolder
from composer3d.checkpoint.manifest import Manifest, file_entry, read
from composer3d.checkpoint.store import gather_state
from composer3d.facts.errors import CheckpointError, TrainingError, UserError
from composer3d.facts.files import open_plain
from composer3d.reliability.lock import Claim
from composer3d.runtime import log
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import pool_world
from tests.checkpoint.assemble import Call
from tests.checkpoint.store_jobs import (
    SHAPE,
    contents,
    full_state,
    make_job,
    make_manifest,
    names,
)

State = dict[str, list[float]]


def save(folder: Path, steps: list[int], keep: int = 9) -> State:
    """Save one state after each of ``steps``. Returns that state."""
    with pool_world():
        stages, optimizer = make_job(seed=0)
        store = Store(folder, keep=keep)
        for step in steps:
            store.save(make_manifest(step), stages, optimizer)
        return full_state(stages, optimizer)


def save_in_turn(folder: Path, turns: list[tuple[list[int], int]]) -> list[list[str]]:
    """Save the steps of each turn in a store that keeps so many; return the names after each."""
    found = []
    with pool_world():
        stages, optimizer = make_job(seed=0)
        for steps, keep in turns:
            store = Store(folder, keep=keep)
            for step in steps:
                store.save(make_manifest(step), stages, optimizer)
            found.append(names(folder))
    return found


def load(path: Path, shape: tuple[int, int] = SHAPE) -> State:
    """Load into a job with other values. Returns its state afterwards."""
    with pool_world():
        stages, optimizer = make_job(seed=1, shape=shape)
        before = full_state(stages, optimizer)
        store = Store(path.parent, keep=1)
        store.check(path)
        store.load(path, stages, optimizer)
        assert before["weight"] != full_state(stages, optimizer)["weight"]
        return full_state(stages, optimizer)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, for ``place_copies``."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save, {"folder": folder, "steps": [1]}, world_size=2)
    return folder / "step-00000001"


def place_copies(saved: Path, folder: Path, *steps: int) -> Path:
    """Copy a checkpoint to the steps of a run. Returns the last one."""
    for step in steps:
        path = folder / f"step-{step:08d}"
        shutil.copytree(saved, path)
    return path


def refused(
    pool: Pool, function: Callable[..., Any], world_size: int, **arguments: Any
) -> list[tuple[str, ...]]:
    """Run a task that a CheckpointError must end on all ranks. Returns the lines of each rank."""
    with pytest.raises(WorkerError) as caught:
        pool.run(function, arguments, world_size=world_size)
    failures = caught.value.failures
    assert set(failures) == set(range(world_size)), caught.value
    lines = [error.lines for error in failures.values() if isinstance(error, CheckpointError)]
    assert len(lines) == world_size, caught.value
    return lines


def test_the_newest_checkpoints_are_kept(pool: Pool, tmp_path: Path) -> None:
    turns = [([2, 9, 10, 100], 2), ([101, 102], 6)]
    ((two, four),) = pool.run(save_in_turn, {"folder": tmp_path, "turns": turns}, world_size=1)
    assert two == ["step-00000010", "step-00000100"]
    assert four == [*two, "step-00000101", "step-00000102"]


def test_neither_the_last_save_nor_a_newer_one_is_removed(pool: Pool, tmp_path: Path) -> None:
    """A run that did not see newer checkpoints when it started must not remove them."""
    (tmp_path / "step-00000001-mine").mkdir()
    turns = [([5, 7, 15, 20], 4), ([10], 2), ([1], 1)]
    (found,) = pool.run(save_in_turn, {"folder": tmp_path, "turns": turns}, world_size=1)
    left = ["step-00000001-mine", *(f"step-{step:08d}" for step in (7, 10, 15, 20))]
    assert found[1:] == [left, ["step-00000001", *left]]


def look_into_an_unreadable_folder(folder: Path) -> str:
    """Return the error of a start whose file system fails when it lists the checkpoints."""

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    with pool_world(), pytest.MonkeyPatch.context() as patch:
        looking = Store(folder, keep=1)
        for function in ("listdir", "scandir"):
            patch.setattr(os, function, fail)
        assert looking.newest() is None
        with pytest.raises(UserError) as caught:
            looking.newest_whole()
    return str(caught.value)


def test_a_run_does_not_start_anew_beside_checkpoints_that_it_cannot_list(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "step-00000005").mkdir()
    errors = pool.run(look_into_an_unreadable_folder, {"folder": tmp_path}, world_size=2)
    line = f"checkpoint: [Errno {errno.EACCES}] Permission denied: '{tmp_path}'"
    assert errors == [line] * 2


def find_and_save(folder: Path, step: int, keep: int) -> tuple[str, list[str]]:
    """Return the name of the checkpoint that is found, and the names after the next save."""
    with pool_world():
        store = Store(folder, keep=keep)
        found = store.newest_whole()
        store.save(make_manifest(step), *make_job(seed=0))
        return found[0].name if found else "none", names(folder)


def test_damaged_checkpoints_do_not_count_and_are_replaced(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    place_copies(saved, tmp_path, 5, 10, 20)
    for damaged in ("step-00000010", "step-00000020"):
        (tmp_path / damaged / "__0_0.distcp").write_bytes(b"torn")
    # The one just saved and the newest whole one are kept. Newer damaged ones are left to the user.
    arguments = {"folder": tmp_path, "step": 7, "keep": 2}
    ((found, left),) = pool.run(find_and_save, arguments, world_size=1)
    assert found == "step-00000005"
    assert left == ["step-00000005", "step-00000007", "step-00000010", "step-00000020"]
    # A damaged one has not the place of a whole one among those that are kept.
    arguments = {"folder": tmp_path, "step": 20, "keep": 2}
    ((found, left),) = pool.run(find_and_save, arguments, world_size=1)
    assert (found, left) == ("step-00000007", [f"step-{step:08d}" for step in (7, 10, 20)])
    (tmp_path / "step-00000020" / "__0_0.distcp").write_bytes(b"torn")
    ((found, left),) = pool.run(find_and_save, arguments | {"keep": 1}, world_size=1)
    assert (found, left) == ("step-00000007", ["step-00000020"])
    assert pool.run(load, {"path": tmp_path / "step-00000020"}, world_size=1)


def load_with_progress(path: Path) -> tuple[State, list[tuple[str, int, int]]]:
    """Return the loaded state, and of each work that is reported what, its size, what was done."""
    works = []

    @contextmanager
    def recorded(what: str, total: int, unit: str) -> Iterator[Any]:
        done: list[int] = []
        yield SimpleNamespace(advance=done.append)
        works.append((what, total, sum(done)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "Progress", recorded)
        return load(path), works


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (2, 1), (1, 2), (5, 2)])
def test_state_is_loaded_bit_for_bit(pool: Pool, tmp_path: Path, saving: int, loading: int) -> None:
    """Rank 0 says how far the check and the load are. Of 5 ranks, each has saved one row."""
    states = pool.run(save, {"folder": tmp_path, "steps": [7]}, world_size=saving)
    path = tmp_path / "step-00000007"
    (first, works), *others = pool.run(load_with_progress, {"path": path}, world_size=loading)
    assert first == states[0]
    assert others == [(first, [])] * (loading - 1)
    assert [what for what, _, _ in works] == ["check of the checkpoint", "load"]
    assert all(total == done > 0 for _, total, done in works)
    written = read(path)
    files = [".metadata", *(f"__{rank}_0.distcp" for rank in range(saving))]
    assert names(path) == [*files, "manifest.json"]
    assert written.files == {name: file_entry(path / name) for name in files}
    matrices = ("model.weight", "optim.weight.exp_avg", "optim.weight.exp_avg_sq")
    expected = dict.fromkeys(matrices, (SHAPE, "float32"))
    assert written.tensors == expected | {"optim.weight.step": ((), "float32")}
    facts = (written.step, written.world_size, written.data, written.lr)
    assert facts == (7, saving, {"at": 7}, 0.1)


def test_leftovers_of_a_crash_are_removed(pool: Pool, tmp_path: Path) -> None:
    for leftover in ("step-00000004.tmp", "step-00000004", "step-00000003.old.tmp"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "junk").write_text("from before")
    (tmp_path / "step-00000003-hf.tmp").mkdir()  # convert may be writing it
    pool.run(save, {"folder": tmp_path, "steps": [4, 5], "keep": 2}, world_size=2)
    assert names(tmp_path) == ["step-00000003-hf.tmp", "step-00000004", "step-00000005"]
    assert "junk" not in names(tmp_path / "step-00000004")


def test_links_and_pipes_are_not_checkpoints(pool: Pool, tmp_path: Path, saved: Path) -> None:
    """They are ignored even under the name of one: a link could lead to anybody's checkpoint."""
    place_copies(saved, tmp_path / "other", 30)
    place_copies(saved, tmp_path / "run", 5)
    (tmp_path / "run/step-00000030").symlink_to(tmp_path / "other/step-00000030")
    (tmp_path / "run/step-00000007.tmp").symlink_to(tmp_path / "other/step-00000030")
    (tmp_path / "run/step-00000040").touch()
    os.mkfifo(tmp_path / "run/step-00000050")
    found = pool.run(newest, {"folders": [tmp_path / "run"]}, world_size=1)
    assert found == [[["step-00000005"] * 2]]
    # A save replaces whatever has its name. The target of a link is left as it is.
    before = names(tmp_path / "other/step-00000030")
    pool.run(save, {"folder": tmp_path / "run", "steps": [7, 30, 40]}, world_size=1)
    assert names(tmp_path / "run") == [f"step-{step:08d}" for step in (5, 7, 30, 40, 50)]
    assert not (tmp_path / "run/step-00000030").is_symlink()
    assert names(tmp_path / "other/step-00000030") == before


def newest(folders: list[Path]) -> list[list[str | None]]:
    """Return for each folder the newest checkpoint that is whole, and the one for messages."""
    answers = []
    with pool_world():
        for folder in folders:
            store = Store(folder, keep=1)
            found, path = store.newest_whole(), store.newest()
            answers.append([found and found[0].name, path and path.name])
    return answers


def warnings_of_two_searches(folder: Path) -> list[str]:
    """Search twice for the newest checkpoint. Returns the warnings of this rank."""
    message: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: message.append(record.getMessage())  # type: ignore[method-assign]
    log.get().addHandler(handler)
    try:
        with pool_world():
            looking = Store(folder, keep=1)
            for _ in range(2):
                looking.newest_whole()
    finally:
        log.get().removeHandler(handler)
    return message


def test_a_link_causes_one_warning(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    place = tmp_path / "run/step-00000030"
    place.symlink_to(tmp_path / "other")
    (tmp_path / "run/step-30").symlink_to(tmp_path / "other")  # not the name of a checkpoint
    message = f"{place} is a link, which is not followed: replace it by the folder"
    found = pool.run(warnings_of_two_searches, {"folder": tmp_path / "run"}, world_size=2)
    assert found == [[message], []]


def test_a_folder_that_is_being_written_is_no_checkpoint(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    place_copies(saved, tmp_path, 5)
    # As after a crash just before the rename.
    shutil.copytree(saved, tmp_path / "step-00000030.tmp")
    folders = [tmp_path / "absent", tmp_path]
    assert pool.run(newest, {"folders": folders}, world_size=1) == [
        [[None, None], ["step-00000005"] * 2]
    ]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


# By how it damages a checkpoint, and how the line that reports it goes on after the folder.
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "/__0_0.distcp has another digest": lambda at: flip(at / "__0_0.distcp", 4099),
    "/__1_0.distcp has another digest": lambda at: flip(at / "__1_0.distcp", -1),
    "/.metadata has ": lambda at: os.truncate(at / ".metadata", 100),
    "/__1_0.distcp cannot be read (No such file": lambda at: (at / "__1_0.distcp").unlink(),
    "/manifest.json ": lambda at: flip(at / "manifest.json", 5),
    " is not a checkpoint": lambda at: (at / "manifest.json").unlink(),
}


def find_damage(folder: Path, saved: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Damage step 2, a copy of ``saved``, in many ways.

    Returns:
        For each way, the checkpoint that is found, and the lines of the error about step 2.
    """
    answers = {}
    with pool_world():
        for kind, spoil in DAMAGE.items():
            if dist.get_rank() == 0:
                shutil.rmtree(folder / "step-00000002", ignore_errors=True)
                spoil(place_copies(saved, folder, 2))
            dist.barrier()
            looking = Store(folder, keep=2)
            found = looking.newest_whole()
            with pytest.raises(CheckpointError) as caught:
                looking.check(folder / "step-00000002")
            answers[kind] = found[0].name if found else "none", caught.value.lines
    return answers


def test_damage_to_any_file_is_reported_and_the_older_one_used(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    place_copies(saved, tmp_path, 1)
    arguments = {"folder": tmp_path, "saved": saved}
    first, second = pool.run(find_damage, arguments, world_size=2)
    assert first == second  # one verdict, although each rank reads other files
    for kind, (found, lines) in first.items():
        assert found == "step-00000001", kind
        assert len(lines) == 1, kind
        assert lines[0].startswith(f"{tmp_path}/step-00000002{kind}"), kind
    assert first.keys() == DAMAGE.keys()


def test_files_that_the_manifest_does_not_list_are_no_damage(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    """A run would train the steps of a whole checkpoint again, and remove it, for a .DS_Store."""
    place_copies(saved, tmp_path, 1)
    path = place_copies(saved, tmp_path, 2)
    added = [path / name for name in (".DS_Store", "__1_0.distcp.swp", "__2_0.distcp")]
    for file in added:
        shutil.copyfile(saved / "__1_0.distcp", file)
    flip(path / "__2_0.distcp", 4099)
    lines = [f"{file} is not in the manifest: it is not read" for file in added]
    found = pool.run(warnings_of_two_searches, {"folder": tmp_path}, world_size=2)
    assert found == [lines, []]
    assert pool.run(newest, {"folders": [tmp_path]}, world_size=1) == [[["step-00000002"] * 2]]
    (state,) = pool.run(load, {"path": path}, world_size=1)
    assert [state] == pool.run(load, {"path": saved}, world_size=1)


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_nothing_that_the_manifest_does_not_list_is_loaded(
    pool: Pool, tmp_path: Path, saved: Path, name: str
) -> None:
    """Nothing has compared it with a digest."""
    path = place_copies(saved, tmp_path, 1)
    files = {key: entry for key, entry in read(path).files.items() if key != name}
    manifest.write(path, replace(read(path), files=files))
    problem = "the manifest does not list it"
    if name != ".metadata":
        problem = f"it names '{name}', which the manifest does not list"
    for lines in refused(pool, load, 2, path=path):
        assert lines == (f"{path}/.metadata cannot be read: {problem}",)


def search(folder: Path) -> None:
    with pool_world():
        Store(folder, keep=1).newest_whole()


def search_without_a_right(folder: Path) -> list[tuple[str, ...]]:
    """Return the lines of two searches while the last rank may not read a file of its share."""
    lines = []
    with pool_world(), pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:

            def refuse(path: Any, **keywords: Any) -> Any:
                if Path(path).name == "__0_0.distcp":
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
                return open_plain(path, **keywords)

            patch.setattr(manifest, "open_plain", refuse)
        looking = Store(folder, keep=1)
        for before in (None, 3):
            with pytest.raises(UserError) as caught:
                looking.newest_whole(before=before)
            assert not isinstance(caught.value, CheckpointError)
            lines.append(caught.value.lines)
        assert looking.newest() == folder / "step-00000002"  # it is not taken for a damaged one
    return lines


def test_a_file_that_one_rank_may_not_read_is_no_damage(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    place_copies(saved, tmp_path, 1, 2)
    path = tmp_path / "step-00000002/__0_0.distcp"
    line = f"rank 1: checkpoint: [Errno {errno.EACCES}] Permission denied: '{path}'"
    found = pool.run(search_without_a_right, {"folder": tmp_path}, world_size=2)
    assert found == [[(line,)] * 2] * 2


def test_if_all_are_damaged_no_run_starts_anew(pool: Pool, tmp_path: Path, saved: Path) -> None:
    place_copies(saved, tmp_path, 1, 2)
    for path in tmp_path.iterdir():
        (path / ".metadata").unlink()
    assert refused(pool, search, 2, folder=tmp_path) == 2 * [
        (
            f"no checkpoint in {tmp_path} is whole (damaged: step-00000001, step-00000002); "
            "restore one, or remove them to start anew",
        )
    ]


def test_code_in_a_checkpoint_with_right_digests_is_refused(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    """It stands in the place of the tensors: ``test_metadata.py`` has code in the metadata."""
    path, marker = place_copies(saved, tmp_path, 1), tmp_path / "marker"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    with open(path / "__0_0.distcp", "wb") as file:
        for entry in metadata.storage_data.values():
            entry.relative_path, entry.offset = "__0_0.distcp", file.tell()
            torch.save(Call(os.system, f"touch {marker}"), file)
            entry.length = file.tell() - entry.offset
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    files = {name: file_entry(path / name) for name in read(path).files}
    manifest.write(path, replace(read(path), files=files))
    for lines in refused(pool, load, 2, path=path):
        assert all("posix.system" in line and "refused" in line for line in lines)
    assert not marker.exists()


def test_checkpoint_of_another_model_is_refused_on_every_rank(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    path = place_copies(saved, tmp_path, 1)
    lines = refused(pool, load, 2, path=path, shape=(6, 3))
    assert lines == 2 * [
        (
            *(
                f"{path} holds {name!r} as float32 (5, 3), but the model needs float32 (6, 3)"
                for name in ("model.weight", "optim.weight.exp_avg", "optim.weight.exp_avg_sq")
            ),
            f"{path}: 3 differences; it is of another model: point checkpoint.resume elsewhere",
        )
    ]


def seed_weights(folder: Path) -> tuple[State, State, State]:
    """Load a checkpoint of weights alone into another job.

    Returns:
        The state that the weights were taken from, and the state of the job before and after.
    """
    with pool_world():
        stages, optimizer = make_job(seed=0)
        weights = {
            n: t for n, t in gather_state(stages, optimizer).items() if n.startswith("model.")
        }
        path = folder / "step-00000000"
        dcp.save(weights, storage_writer=dcp.FileSystemWriter(path))
        files = {name: file_entry(path / name) for name in names(path)}
        dist.barrier()
        manifest.write(path, replace(make_manifest(0), files=files, data=None, lr=None))
        other, fresh = make_job(seed=1)
        before = full_state(other, fresh)
        store = Store(folder, keep=1)
        store.check(path)
        store.load(path, other, fresh)
        return full_state(stages, optimizer), before, full_state(other, fresh)


def test_weights_alone_leave_the_optimizer_as_it_is(pool: Pool, tmp_path: Path) -> None:
    ((weights, before, after),) = pool.run(seed_weights, {"folder": tmp_path}, world_size=1)
    assert after == {**before, "weight": weights["weight"]}
    assert before["weight"] != weights["weight"]


# Saves that fail. All ranks raise the same error, and the last checkpoint stays as it was.


def save_and_fail(folder: Path, step: int, shape: tuple[int, int] = SHAPE, spoil: str = "") -> None:
    """Save, while the function ``spoil`` fails on the last rank."""
    with pool_world():
        if spoil and dist.get_rank() == dist.get_world_size() - 1:

            def fail(path: Any, *args: Any) -> Any:
                if spoil == "rename" and not path.is_dir():  # torch renames its .metadata
                    return path.replace(*args)
                raise OSError(5, "Input/output error", spoil)

            owners = {"rename": Path, "write": manifest, "hand_over": DiskFolder, "sync": folders}
            setattr(owners[spoil], spoil, fail)
        Store(folder, keep=2).save(make_manifest(step), *make_job(seed=0, shape=shape))


@pytest.mark.parametrize(
    ("spoil", "ranks"), [("hand_over", 2), ("sync", 2), ("write", 1), ("rename", 1)]
)
def test_save_that_fails_on_one_rank_fails_on_all(
    pool: Pool, tmp_path: Path, saved: Path, spoil: str, ranks: int
) -> None:
    place_copies(saved, tmp_path, 1)
    message = refused(pool, save_and_fail, ranks, folder=tmp_path, step=2, spoil=spoil)
    prefix = "rank 1: " if ranks == 2 else ""
    assert message == ranks * [
        (
            f"{tmp_path}/step-00000002 could not be saved: {prefix}writing: "
            f"[Errno 5] Input/output error: '{spoil}'",
            f"the newest checkpoint is {tmp_path}/step-00000001: the same command goes on from it",
        )
    ]
    assert names(tmp_path) == ["step-00000001"]
    assert contents(tmp_path / "step-00000001") == contents(saved)


def save_what_cannot_be_read(folder: Path) -> None:
    with pool_world():
        manifest = replace(make_manifest(1), data={"epoch": float("nan")})
        Store(folder, keep=2, background=True).save(manifest, *make_job(seed=0))


def test_what_could_not_be_read_again_is_refused_before_it_is_written(
    pool: Pool, tmp_path: Path
) -> None:
    for (line,) in refused(pool, save_what_cannot_be_read, 2, folder=tmp_path / "run"):
        assert line.startswith("a checkpoint cannot keep 'epoch' = NaN of the batches' state: ")
    assert list(tmp_path.iterdir()) == []


def save_a_step(folder: Path, step: int) -> None:
    with pool_world():
        Store(folder, keep=2).save(make_manifest(step), *make_job(seed=0))


def test_a_step_whose_folder_would_not_be_found_is_refused_before_it_is_written(
    pool: Pool, tmp_path: Path
) -> None:
    """A loop of one's own may count tokens. A manifest of such a step may come from elsewhere."""
    arguments = {"folder": tmp_path / "run"}
    assert refused(pool, save_a_step, 2, **arguments, step=10**8) == 2 * [
        (
            "step 100,000,000 cannot be saved: the last step whose checkpoint has a name is "
            "99,999,999; count steps of the optimizer, not tokens or samples",
        )
    ]
    assert list(tmp_path.iterdir()) == []
    pool.run(save_a_step, {**arguments, "step": 10**8 - 1}, world_size=1)
    assert pool.run(newest, {"folders": [tmp_path / "run"]}, world_size=1) == [
        [["step-99999999"] * 2]
    ]
    manifest.write(tmp_path, Manifest(step=10**8, model={}))
    assert read(tmp_path).step == 10**8


def save_while_the_folder_is_replaced(folder: Path) -> None:
    """Save, while the run's folder is moved away, and another job saves the same step there."""
    with pool_world():
        own = Store(folder, keep=2)
        if dist.get_rank() == 0:
            own.guard = Claim(folder.parent).require_held

        def replace_folder(self: DiskFolder, name: str, writer: object) -> None:
            staging = folder / f"{name}.tmp"
            if dist.get_rank() == 0:
                folder.parent.rename(folder.parent.with_name("moved"))
                staging.mkdir(parents=True)
                (staging / "of another job").touch()
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(staging))

        DiskFolder.hand_over = replace_folder  # type: ignore[assignment, method-assign]
        own.save(make_manifest(2), *make_job(seed=0))


def test_a_save_in_a_folder_that_is_replaced_says_so_and_removes_nothing(
    pool: Pool, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with pytest.raises(WorkerError) as caught:
        pool.run(save_while_the_folder_is_replaced, {"folder": folder}, world_size=2)
    errors = caught.value.failures
    assert {rank: type(error) for rank, error in errors.items()} == {
        0: TrainingError,
        1: TrainingError,
    }
    assert "was removed or replaced while this job ran" in str(errors[1])
    assert names(folder / "step-00000002.tmp") == ["of another job"]


def leave_between_renames(saved: Path, folder: Path, step: int) -> Path:
    """Leave what a process has left that was killed while it replaced a checkpoint.

    The old one has been moved aside. The new one, which is torn, has no name yet. Returns the path
    of the checkpoint.
    """
    path = place_copies(saved, folder, step)
    path.rename(path.with_suffix(".old.tmp"))
    path.with_suffix(".tmp").mkdir()
    (path.with_suffix(".tmp") / "manifest.json").write_text("torn")
    return path


def test_a_checkpoint_that_a_killed_save_has_moved_aside_is_found(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    place_copies(saved, tmp_path, 1)
    path = leave_between_renames(saved, tmp_path, 2)
    # What a save has put in place of a checkpoint may still be removed, and so may any other.
    place_copies(saved, tmp_path, 3)
    shutil.copytree(saved, tmp_path / "step-00000003.old.tmp")
    (tmp_path / "step-00000003.old.tmp/.metadata").unlink()
    (tmp_path / "step-00000004.old.tmp").mkdir()
    (tmp_path / "step-00000005.old.tmp").symlink_to(saved)
    # Only the run itself may do that: the save may be running.
    found = pool.run(newest_of_another_run, {"folder": tmp_path}, world_size=2)
    assert found == ["step-00000003"] * 2
    assert not path.exists()
    assert pool.run(newest, {"folders": [tmp_path]}, world_size=2) == [[["step-00000003"] * 2]] * 2
    assert contents(path) == contents(saved)
    shutil.rmtree(tmp_path / "step-00000003")
    shutil.rmtree(tmp_path / "step-00000003.old.tmp")
    assert pool.run(newest, {"folders": [tmp_path]}, world_size=2) == [[["step-00000002"] * 2]] * 2


def newest_of_another_run(folder: Path) -> str:
    with pool_world():
        found = Store(folder / "own", keep=1).newest_whole(folder)
        return found[0].name if found else "none"


def test_a_save_restores_what_a_killed_one_has_moved_aside(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    """A loop of one's own need not look for checkpoints before it saves."""
    path = leave_between_renames(saved, tmp_path, 2)
    pool.run(save, {"folder": tmp_path, "steps": [3]}, world_size=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert contents(path) == contents(saved)


def search_in_a_folder_that_may_not_be_changed(folder: Path) -> str:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "x")

    with pool_world(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(UserError) as caught:
            Store(folder, keep=1).newest_whole()
        assert not isinstance(caught.value, CheckpointError)
    return str(caught.value)


def test_a_run_does_not_go_on_without_a_checkpoint_that_it_cannot_restore(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    place_copies(saved, tmp_path, 1)
    leave_between_renames(saved, tmp_path, 2)
    arguments = {"folder": tmp_path}
    errors = pool.run(search_in_a_folder_that_may_not_be_changed, arguments, world_size=2)
    assert errors == ["checkpoint: [Errno 30] Read-only file system: 'x'"] * 2


def fail_to_replace(folder: Path) -> None:
    """Save step 2 while the new checkpoint cannot get its name."""
    with pool_world(), pytest.MonkeyPatch.context() as patch:
        rename = Path.rename

        def refuse_new(path: Path, target: Path) -> Path:
            if path.name == "step-00000002.tmp":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return rename(path, target)

        patch.setattr(Path, "rename", refuse_new)
        Store(folder, keep=2).save(make_manifest(2), *make_job(seed=0))


def test_a_checkpoint_stays_if_the_new_one_cannot_replace_it(
    pool: Pool, tmp_path: Path, saved: Path
) -> None:
    path = place_copies(saved, tmp_path, 2)
    for lines in refused(pool, fail_to_replace, 2, folder=tmp_path):
        assert "Input/output error" in lines[0]
        assert lines[-1] == f"the newest checkpoint is {path}: the same command goes on from it"
    assert names(tmp_path) == ["step-00000002"]
    assert contents(path) == contents(saved)


def test_file_where_a_folder_should_be(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for lines in refused(pool, save_and_fail, 2, folder=tmp_path / "file", step=2):
        assert "rank 0: writing: [Errno 20] Not a directory: " in lines[0]
        assert lines[1] == f"{tmp_path / 'file'} cannot be read: Not a directory"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    can_mount = (
        shutil.which("mount") and not subprocess.run(command, capture_output=True).returncode
    )
    if not can_mount:
        pytest.skip("a file system can only be mounted by root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_full_disk_keeps_the_last_checkpoint(pool: Pool, disk: Path, saved: Path) -> None:
    folder = disk / "run" / "checkpoints"
    place_copies(saved, folder, 1)
    (disk / "filler").write_bytes(bytes(700_000))
    failed = f"{folder}/step-00000002 could not be saved: rank "
    newest_left = f"the newest checkpoint is {folder}/step-00000001: the same command goes on"
    shape = (160, 300)  # 576 kB with its moments
    for lines in refused(pool, save_and_fail, 2, folder=folder, step=2, shape=shape):
        assert lines[0].startswith(failed)
        assert "No space left on device" in lines[0]
        assert lines[-1] == f"{newest_left} from it"
    assert names(folder) == ["step-00000001"]
    assert contents(folder / "step-00000001") == contents(saved)
    # Once there is room again, the next save is whole.
    (disk / "filler").unlink()
    pool.run(save, {"folder": folder, "steps": [3], "keep": 1}, world_size=2)
    assert names(folder) == ["step-00000003"]


def test_read_only_folder_keeps_the_last_checkpoint(pool: Pool, disk: Path, saved: Path) -> None:
    place_copies(saved, disk / "run", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for lines in refused(pool, save_and_fail, 2, folder=disk / "run", step=2):
        assert "rank 0: writing: [Errno 30] Read-only file system" in lines[0]
        assert "the newest checkpoint is" in lines[1]
        assert "step-00000001" in lines[1]
    assert contents(disk / "run/step-00000001") == contents(saved)
