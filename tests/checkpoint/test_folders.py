"""Checkpoints in an object store: saved, chosen and loaded as those on a disk."""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer3d.checkpoint import Store, manifest
from composer3d.checkpoint.steps import published
from composer3d.facts.errors import CheckpointError, TrainingError
from composer3d.facts.remote import Place, RemotePath
from composer3d.facts.step_folders import list_steps
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import pool_world
from tests.checkpoint.store_jobs import full_state, make_job, make_manifest
from tools.object_store import new_folder, variables


class Workers:
    """The pool, whose processes learn of the server in each task."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def run(self, job: Callable[..., Any], arguments: dict[str, Any], *, world_size: int) -> Any:
        task = {"variables": variables(), "job": job, "arguments": arguments}
        return self._pool.run(know_the_server, task, world_size=world_size)


def know_the_server(
    variables: dict[str, str], job: Callable[..., Any], arguments: dict[str, Any]
) -> Any:
    os.environ |= variables
    return job(**arguments)


ASSETS = {"config.json": b"{}", "additional_chat_templates/rag.jinja": b"x"}


@pytest.fixture(scope="module")
def workers(pool: Pool) -> Workers:
    return Workers(pool)


@pytest.fixture
def folder() -> RemotePath:
    return new_folder()


def save(folder: Place, steps: list[int], *, keep: int = 9, background: bool = False) -> Any:
    with pool_world():
        stages, optimizer = make_job(seed=0)
        store = Store(folder, keep=keep, background=background)
        store.assets = ASSETS
        for step in steps:
            store.save(make_manifest(step), stages, optimizer)
        store.wait()
        return full_state(stages, optimizer)


def load_newest(folder: Place) -> tuple[int, Any]:
    """The step of the newest whole checkpoint, and the state that it gives a job."""
    with pool_world():
        stages, optimizer = make_job(seed=1)
        store = Store(folder, keep=1)
        found = store.newest_whole()
        if found is None:
            return 0, None
        store.load(found[0], stages, optimizer)
        return found[1].step, full_state(stages, optimizer)


@pytest.mark.parametrize("background", [False, True])
def test_it_is_saved_as_on_a_disk_and_loaded_on_other_layouts(
    workers: Workers, folder: RemotePath, tmp_path: Path, background: bool
) -> None:
    saved = workers.run(
        save, {"folder": folder, "steps": [1], "background": background}, world_size=2
    )
    workers.run(save, {"folder": tmp_path, "steps": [1]}, world_size=2)
    remote, local = (
        manifest.read(folder / "step-00000001"),
        manifest.read(tmp_path / "step-00000001"),
    )
    # The metadata name the folder and a random number.
    assert remote.files.pop(".metadata") != local.files.pop(".metadata")
    files = {re.sub("^[0-9a-f]{12}__", "__", name): file for name, file in remote.files.items()}
    assert replace(remote, files=files) == local
    assert set((folder / "step-00000001").files()) == {*remote.files, ".metadata", "manifest.json"}
    for ranks in (1, 2, 3):
        assert workers.run(load_newest, {"folder": folder}, world_size=ranks) == ranks * [
            (1, saved[0])
        ]


def test_old_ones_are_removed_and_other_names_are_not(workers: Workers, folder: RemotePath) -> None:
    (folder / "step-1" / "notes").write(b"of the user")
    workers.run(save, {"folder": folder, "steps": [1, 2, 3], "keep": 2}, world_size=2)
    assert folder.folders() == ["step-00000002", "step-00000003", "step-1"]
    assert published(folder) == list_steps(folder)


def test_what_a_killed_save_has_left_is_no_checkpoint(workers: Workers, folder: RemotePath) -> None:
    saved = workers.run(save, {"folder": folder, "steps": [1, 2]}, world_size=2)
    (folder / "step-00000002" / "manifest.json").remove()
    assert workers.run(load_newest, {"folder": folder}, world_size=2) == 2 * [(1, saved[0])]
    workers.run(save, {"folder": folder, "steps": [2]}, world_size=2)
    assert workers.run(load_newest, {"folder": folder}, world_size=2) == 2 * [(2, saved[0])]


def test_a_run_whose_first_save_was_killed_begins_anew(
    workers: Workers, folder: RemotePath
) -> None:
    (folder / "step-00000001" / "0123456789ab__0_0.distcp").write(b"torn")
    assert workers.run(load_newest, {"folder": folder}, world_size=2) == 2 * [(0, None)]


@pytest.fixture(scope="module")
def saved(workers: Workers) -> tuple[RemotePath, Any]:
    """A folder with steps 1 and 2, and the state that they hold. Leave it as it was."""
    folder = new_folder()
    states = workers.run(save, {"folder": folder, "steps": [1, 2]}, world_size=2)
    return folder, states[0]


@pytest.mark.parametrize("damage", ["flipped", "short", "missing", "manifest"])
def test_a_damaged_one_is_skipped(
    workers: Workers, saved: tuple[RemotePath, Any], damage: str
) -> None:
    folder, state = saved
    newest = folder / "step-00000002"
    of_rank_1 = next(name for name in newest.files() if name.endswith("__1_0.distcp"))
    path = newest / ("manifest.json" if damage == "manifest" else of_rank_1)
    before = path.read(1 << 20)
    content = bytearray(before)
    content[len(content) // 2] ^= 1
    if damage == "missing":
        path.remove()
    else:
        path.write(bytes(content[:-1] if damage == "short" else content))
    assert workers.run(load_newest, {"folder": folder}, world_size=2) == 2 * [(1, state)]
    path.write(before)


def test_a_file_that_a_rank_of_a_lost_job_sends_late_does_no_harm(
    workers: Workers, saved: tuple[RemotePath, Any]
) -> None:
    folder, state = saved
    late = folder / "step-00000002" / "0123456789ab__1_0.distcp"
    late.write(b"of an earlier try")
    assert workers.run(load_newest, {"folder": folder}, world_size=2) == 2 * [(2, state)]
    late.remove()


def load_without_a_connection(folder: RemotePath) -> None:
    """Look for a checkpoint on ranks of which the last one loses its connection."""
    import torch.distributed as dist

    with pool_world():
        store, right = Store(folder, keep=1), RemotePath.size
        if dist.get_rank() == dist.get_world_size() - 1:
            RemotePath.size = lost  # type: ignore[method-assign]
        try:
            store.newest_whole()
        finally:
            RemotePath.size = right  # type: ignore[method-assign]


def lost(self: RemotePath) -> int:
    raise OSError(errno.EIO, "EndpointConnectionError: Could not connect", str(self))


def test_a_lost_connection_is_no_damage(workers: Workers, saved: tuple[RemotePath, Any]) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(load_without_a_connection, {"folder": saved[0]}, world_size=2)
    for error in caught.value.failures.values():
        assert not isinstance(error, CheckpointError)
        assert "rank 1: checkpoint: [Errno 5] EndpointConnectionError" in str(error)


def test_if_all_are_damaged_the_error_names_them(
    workers: Workers, saved: tuple[RemotePath, Any]
) -> None:
    folder, state = saved
    paths = [path / ".metadata" for path in list_steps(folder)]
    before = [path.read(1 << 20) for path in paths]
    for path in paths:
        path.write(b"nothing")
    with pytest.raises(WorkerError) as caught:
        workers.run(load_newest, {"folder": folder}, world_size=2)
    for error in caught.value.failures.values():
        assert isinstance(error, CheckpointError)
        assert "is whole (damaged: step-00000001, step-00000002)" in str(error)
    for path, content in zip(paths, before, strict=True):
        path.write(content)
    assert workers.run(load_newest, {"folder": folder}, world_size=2) == 2 * [(2, state)]


def save_while_another_job_begins(folder: RemotePath) -> None:
    with pool_world():
        stages, optimizer = make_job(seed=0)
        for step in (1, 2):  # two objects of one process are one job
            store = Store(folder, keep=9)
            store.save(make_manifest(step), stages, optimizer)
        (folder / "writer").write(b"process 1 on another node (job 2)")
        store.save(make_manifest(3), stages, optimizer)


def test_an_older_job_stops_before_it_writes(workers: Workers, folder: RemotePath) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(save_while_another_job_begins, {"folder": folder}, world_size=2)
    for error in caught.value.failures.values():
        assert isinstance(error, TrainingError)
        assert (
            f"{folder} is written by another job now, process 1 on another node (job 2): "
            in str(error)
        )
    assert folder.folders() == ["step-00000001", "step-00000002"]


def fail_after_another_job_has_begun(folder: RemotePath) -> None:
    """Begin a save that fails after another job has written a checkpoint of its step."""
    with pool_world():
        stages, optimizer = make_job(seed=0)
        store = Store(folder, keep=9)
        store.save(make_manifest(1), stages, optimizer)
        begin = store._begin

        def lose(name: str) -> None:
            begin(name)
            (folder / "writer").write(b"process 1 on another node (job 2)")
            (folder / name / "manifest.json").write(b"of the other job")
            raise OSError(errno.EIO, "it is gone", "s3://it")

        store._begin = lose  # type: ignore[method-assign]
        store.save(make_manifest(2), stages, optimizer)


def test_a_save_that_fails_leaves_what_another_job_has_written(
    workers: Workers, folder: RemotePath
) -> None:
    with pytest.raises(WorkerError):
        workers.run(fail_after_another_job_has_begun, {"folder": folder}, world_size=2)
    assert (folder / "step-00000002" / "manifest.json").read(99) == b"of the other job"


def claim(folder: RemotePath) -> None:
    with pool_world():
        Store(folder, keep=9).claim()


def test_a_bucket_that_is_missing_is_found_before_the_first_save(workers: Workers) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(claim, {"folder": RemotePath("s3://nobody/a")}, world_size=2)
    for error in caught.value.failures.values():
        assert "The specified bucket does not exist: 's3://nobody/a/writer'" in str(error)


def save_twice(folder: RemotePath, change: bool) -> list[Any]:
    """Save a step again, and notice on rank 0 after each request whether one of it is whole.

    Return whether it always was, which files came and went, and how the folder is left.
    """
    import torch
    import torch.distributed as dist

    place = folder / "step-00000001"

    def is_whole() -> bool:
        saved = manifest.read(place)
        return manifest.find_damage(place, saved) == []

    with pool_world(), pytest.MonkeyPatch.context() as patch:
        stages, optimizer = make_job(seed=0)
        store = Store(folder, keep=1)
        store.assets = ASSETS
        store.save(make_manifest(1), stages, optimizer)
        before = place.files()
        if change:
            with torch.no_grad():
                for _, parameter in stages.named_parameters():
                    parameter.add_(1.0)
        moments: list[tuple[str, bool]] = []
        for name in ("write", "remove", "remove_tree"):
            right = getattr(RemotePath, name)

            def watched(
                path: RemotePath, *arguments: Any, right: Any = right, name: str = name
            ) -> Any:
                result = right(path, *arguments)
                moments.append((f"{name} {path.name}", is_whole()))
                return result

            if dist.get_rank() == 0:
                patch.setattr(RemotePath, name, watched)
        store.save(make_manifest(1), stages, optimizer)
        return [moments, place.files() == before, is_whole(), full_state(stages, optimizer)]


@pytest.mark.parametrize("change", [False, True])
def test_a_step_that_is_saved_twice_is_there_all_the_time(
    workers: Workers, folder: RemotePath, change: bool
) -> None:
    """A loop may save its last step every so many steps, and at its end."""
    (moments, is_same, is_whole, state), _ = workers.run(
        save_twice, {"folder": folder, "change": change}, world_size=2
    )
    torn = [what for what, was_whole in moments if not was_whole]
    # Another state has one request between its metadata and its manifest.
    assert torn == (["write .metadata"] if change else [])
    assert moments
    assert is_whole
    assert is_same is not change
    assert set((folder / "step-00000001").files()) == {
        *manifest.read(folder / "step-00000001").files,
        "manifest.json",
    }
    assert workers.run(load_newest, {"folder": folder}, world_size=2) == 2 * [(1, state)]


def save_over_damage(folder: RemotePath, damage: str) -> bool:
    """Damage a checkpoint, and save its step again; return whether it is whole then."""
    import torch.distributed as dist

    place = folder / "step-00000001"
    with pool_world():
        stages, optimizer = make_job(seed=0)
        store = Store(folder, keep=1)
        store.save(make_manifest(1), stages, optimizer)
        if dist.get_rank() == 0:
            saved = place.files()
            largest = max(saved, key=lambda name: saved[name])
            content = (place / largest).read(saved[largest])
            (place / largest).write(content[:-1] if damage == "cut" else content[::-1])
        if damage == "turned":
            with pytest.raises(CheckpointError, match="damaged: step-00000001"):
                store.newest_whole()
        store.save(make_manifest(1), stages, optimizer)
        return manifest.find_damage(place, manifest.read(place)) == []


@pytest.mark.parametrize("damage", ["cut", "turned"])
def test_a_damaged_checkpoint_is_replaced(
    workers: Workers, folder: RemotePath, damage: str
) -> None:
    """One file was cut off, which its size shows, or turned round, which the job has noticed."""
    arguments = {"folder": folder, "damage": damage}
    assert workers.run(save_over_damage, arguments, world_size=2) == [True, True]


def fail_to_save_again(folder: RemotePath, what: str) -> None:
    """Save a step a second time; the store fails when it gets a file, or is asked for one."""
    from composer3d.facts.remote import Upload

    with pool_world(), pytest.MonkeyPatch.context() as patch:
        stages, optimizer = make_job(seed=0)
        store = Store(folder, keep=1)
        store.save(make_manifest(1), stages, optimizer)

        def fail(self: object, *content: object) -> int:
            raise OSError(5, "it is gone", "s3://it")

        if what == "write":
            patch.setattr(Upload, "write", fail)
        else:
            patch.setattr(RemotePath, "exists", fail)
        with pytest.raises(CheckpointError, match="could not be saved"):
            store.save(make_manifest(1), stages, optimizer)


@pytest.mark.parametrize("what", ["write", "exists"])
def test_a_second_save_of_a_step_that_fails_leaves_the_first(
    workers: Workers, folder: RemotePath, what: str
) -> None:
    workers.run(fail_to_save_again, {"folder": folder, "what": what}, world_size=2)
    found = workers.run(load_newest, {"folder": folder}, world_size=2)
    assert [step for step, _ in found] == [1, 1]


def fail_to_upload(folder: RemotePath) -> tuple[str, ...]:
    """Save on ranks of which the last one loses its connection; return the lines of the error."""
    import torch.distributed as dist

    from composer3d.facts.remote import Upload

    with pool_world():
        stages, optimizer = make_job(seed=0)
        store = Store(folder, keep=9)
        store.save(make_manifest(1), stages, optimizer)

        def fail(self: Upload, content: object) -> int:
            raise OSError(5, "it is gone", "s3://it")

        if dist.get_rank() == dist.get_world_size() - 1:
            Upload.write = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(CheckpointError) as caught:
            store.save(make_manifest(2), stages, optimizer)
        return caught.value.lines


def test_a_save_that_fails_leaves_nothing(workers: Workers, folder: RemotePath) -> None:
    lines = workers.run(fail_to_upload, {"folder": folder}, world_size=2)
    assert lines[0] == lines[1]
    assert lines[0][0].startswith(f"{folder}/step-00000002 could not be saved: rank 1: ")
    assert "it is gone" in lines[0][0]
    assert lines[0][1].startswith(f"the newest checkpoint is {folder}/step-00000001: ")
    assert folder.folders() == ["step-00000001"]
