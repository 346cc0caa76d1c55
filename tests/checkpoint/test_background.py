"""A save in the background writes the state of the moment it was called, as a save at once does."""

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.checkpoint import Store
from composer3d.checkpoint.folders import DiskFolder
from composer3d.checkpoint.manifest import read, write
from composer3d.facts import events
from composer3d.facts.errors import CheckpointError, DataError, UserError
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import MeshTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training import build, loop, run_folder
from composer3d.training.step_values import StepValues
from tests.checkpoint.store_jobs import contents, make_job, make_manifest, names

RECIPE = """\
run = { name = "small", seed = 3, device = "cpu" }
model = { preset = "debug-tiny", n_layers = 2 }
data = { source = "text", path = "corpus.txt", seq_len = 16, global_batch = 4, micro_batch = 1 }
optim = { lr = 1e-2, decay = 20 }
checkpoint = { every = 2, keep = 3, async_save = true }
metrics = { every = 1, tensorboard = false }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_bytes(bytes((i * i + i // 7) % 251 + 1 for i in range(5_000)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def save_at_once_and_behind(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes], bool, bool]:
    """Save one state at once and in the background, which writes only after the state has changed.

    Returns:
        Both checkpoints, whether the background save was still under way after the change, and
        whether a later save waited for the one before.
    """
    with pool_world():
        stages, optimizer = make_job(seed=0, shape=(50, 40))
        Store(folder / "at-once", keep=1).save(make_manifest(1), stages, optimizer)
        behind = Store(folder / "behind", keep=3, background=True)
        changed, begin = threading.Event(), behind._begin

        def begin_late(name: str) -> None:
            changed.wait(60)
            begin(name)

        behind._begin = begin_late  # type: ignore[method-assign]
        behind.save(make_manifest(1), stages, optimizer)
        optimizer.step()
        under_way = not (folder / "behind" / "step-00000001").exists()
        dist.barrier()
        changed.set()
        behind.wait()
        # A save waits for the one before, and writes from the same memory.
        changed.clear()
        behind.save(make_manifest(2), stages, optimizer)
        threading.Timer(0.3, changed.set).start()
        behind.save(make_manifest(3), stages, optimizer)
        waited = (folder / "behind" / "step-00000002").exists()
        behind.wait()
        dist.barrier()
        assert contents(folder / "behind/step-00000002") == contents(
            folder / "behind/step-00000003"
        )
        assert contents(folder / "behind/step-00000002") != contents(
            folder / "at-once/step-00000001"
        )
        return (
            contents(folder / "at-once/step-00000001"),
            contents(folder / "behind/step-00000001"),
            under_way,
            waited,
        )


def test_later_changes_of_the_state_are_not_written(pool: Pool, tmp_path: Path) -> None:
    for at_once, behind, under_way, waited in pool.run(
        save_at_once_and_behind, {"folder": tmp_path}, world_size=2
    ):
        assert under_way
        assert sorted(at_once) == ["__0_0.distcp", "__1_0.distcp"]
        assert at_once == behind
        assert waited


def fail_behind(folder: Path) -> tuple[bool, int, tuple[str, ...], list[str]]:
    """Rank 1 fails in the background.

    Returns:
        Whether this rank saw the failure at once, the round in which it did, the lines of
        the error, and the names that are left.
    """
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=2), device)
        stages, optimizer = make_job(seed=0)
        behind = Store(folder, keep=2, background=True)
        behind.save(make_manifest(1), stages, optimizer)
        behind.wait()
        if dist.get_rank() == 1:
            fail_in_the_background()
        behind.save(make_manifest(2), stages, optimizer)
        first = behind.failed
        rounds = 0
        while not mesh.sum_over_world(behind.failed)[0]:
            time.sleep(0.02 * dist.get_rank())
            rounds += 1
        try:
            behind.wait()
        except CheckpointError as error:
            dist.barrier()  # rank 0 removes the incomplete checkpoint
            return first, rounds, error.lines, names(folder)
        raise AssertionError("nothing was raised")


def fail_in_the_background() -> None:
    """Make the saves of this process fail a while after they have begun."""

    def fail(self: DiskFolder, name: str, writer: object) -> None:
        time.sleep(0.2)
        raise OSError(5, "Input/output error", name)

    DiskFolder.hand_over = fail  # type: ignore[assignment, method-assign]


def test_error_is_raised_at_the_same_step_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    one, two = pool.run(fail_behind, {"folder": tmp_path}, world_size=2)
    assert one == two
    at_once, _, lines, left = one
    assert not at_once
    assert lines == (
        f"{tmp_path}/step-00000002 could not be saved: rank 1: writing: [Errno 5] "
        "Input/output error: 'step-00000002'",
        f"the newest checkpoint is {tmp_path}/step-00000001: the same command goes on from it",
    )
    assert left == ["step-00000001"]


def train_in(
    folder: Path, sets: list[str], *, fails: bool = False
) -> tuple[int, tuple[str, ...], list[float]]:
    """Train the recipe of ``folder``.

    Returns:
        The steps done at the start, or at the end if the run failed; the lines of the error; and a
        random number drawn in each step.
    """
    os.chdir(folder)
    drawn: list[float] = []
    with pool_world() as device:
        resolved = load("recipe.toml", sets, world_size=dist.get_world_size())
        run = build.build(resolved.recipe, device, resolved.to_toml())
        begun, update = run.step, loop.update

        def step(*args: Any, **keywords: Any) -> StepValues:
            time.sleep(0.05)
            drawn.append(torch.rand(()).item())
            return update(*args, **keywords)

        loop.update = step
        if fails and dist.get_rank() == 1:
            fail_in_the_background()
        try:
            loop.train(run)
        except UserError as error:
            return run.step, error.lines, drawn
        return begun, (), drawn


def lines_of(folder: Path, out_dir: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / out_dir / "small/metrics.jsonl").read_text().splitlines()
    ]


def steps_saved(folder: Path, out_dir: str = "runs") -> list[int]:
    """Return the steps of the checkpoints that the events of a run tell."""
    found = [event for event in events.read(folder / out_dir / "small") if event is not None]
    return [event.step for event in found if event.kind == "save"]


def test_run_that_cannot_save_ends_soon_on_every_rank(pool: Pool, folder: Path) -> None:
    arguments = {"folder": folder, "sets": ["run.steps=100"], "fails": True}
    one, two = pool.run(train_in, arguments, world_size=2)
    assert one[:2] == two[:2]
    assert 3 <= one[0] <= 20
    assert "runs/small/checkpoints/step-00000002 could not be saved: rank 1: writing" in one[1][0]
    assert one[1][1] == (
        "there is no checkpoint in runs/small/checkpoints: the same command starts anew"
    )
    assert steps_saved(folder) == []


def fail_while_it_saves(folder: Path, save_fails: bool) -> tuple[tuple[str, ...], list[str]]:
    """Train until a validation fails, while the save before it goes on.

    Returns:
        The lines of the error, and the checkpoints that are there when the training has ended.
    """
    os.chdir(folder)
    with pool_world() as device:
        resolved = load("recipe.toml", [], world_size=dist.get_world_size())
        run = build.build(resolved.recipe, device, resolved.to_toml())
        store = run.saver.store
        write = store._write

        def write_slowly(*arguments: Any) -> None:
            time.sleep(2.0)
            write(*arguments)

        def validate(*_: Any) -> bool:
            raise DataError("no token is learned")

        store._write = write_slowly  # type: ignore[method-assign]
        run.validation.is_due = lambda step: step == 2  # type: ignore[method-assign]
        loop._validate = validate
        if save_fails and dist.get_rank() == 1:
            fail_in_the_background()
        with pytest.raises(UserError) as caught:
            loop.train(run)
        return caught.value.lines, names(folder / "runs/small/checkpoints")


@pytest.mark.parametrize(("save_fails", "left"), [(False, ["step-00000002"]), (True, [])])
def test_an_error_after_a_save_in_the_background_lets_it_end(
    pool: Pool, folder: Path, save_fails: bool, left: list[str]
) -> None:
    arguments = {"folder": folder, "save_fails": save_fails}
    answers = pool.run(fail_while_it_saves, arguments, world_size=2)
    assert answers == [(("no token is learned",), left)] * 2
    assert [f"step-{step:08d}" for step in steps_saved(folder)] == left


def finish_a_save_that_hangs(folder: Path) -> float:
    """Return for how long an error waits for it."""
    goes_on = threading.Event()
    with pool_world():
        store = Store(folder, keep=1, background=True)
        store._write = lambda *_: goes_on.wait(60)  # type: ignore[assignment, method-assign]
        store.save(make_manifest(1), *make_job(seed=0, shape=(50, 40)))
        begin_s = time.monotonic()
        store.finish(0.3)
        seconds = time.monotonic() - begin_s
        goes_on.set()
    return seconds


def test_the_wait_for_a_save_after_an_error_has_a_limit(pool: Pool, tmp_path: Path) -> None:
    (seconds,) = pool.run(finish_a_save_that_hangs, {"folder": tmp_path}, world_size=1)
    assert 0.2 < seconds < 30


def test_run_is_the_same_and_logs_its_stalls(pool: Pool, folder: Path) -> None:
    """Losses, random numbers and checkpoints, also of a run resumed on more ranks."""
    at_once = ["run.steps=6", "run.out_dir=a", "checkpoint.async_save=false"]
    ((_, _, drawn),) = pool.run(train_in, {"folder": folder, "sets": at_once}, world_size=1)
    parts = []
    for steps, ranks in ((3, 1), (6, 2)):
        sets = [f"run.steps={steps}", "run.out_dir=b"]
        parts += pool.run(train_in, {"folder": folder, "sets": sets}, world_size=ranks)[0][2]
    assert parts == drawn
    assert len(set(drawn)) == 6
    losses = [[row["loss"] for row in lines_of(folder, name) if "loss" in row] for name in "ab"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[1][:3] == losses[0][:3]
    assert sum(row.get("checkpoint_s", 0) for row in lines_of(folder, "b")) > 0
    assert (steps_saved(folder, "a"), steps_saved(folder, "b")) == ([2, 4, 6], [2, 3, 4, 6])
    assert names(folder / "b/small/checkpoints") == [
        "step-00000003",
        "step-00000004",
        "step-00000006",
    ]
    written = read(folder / "b/small/checkpoints/step-00000006")
    assert (written.step, written.world_size, written.layout["dp_shard"]) == (6, 2, 2)
    assert written.data is not None
    assert written.data["next_step"] == 6
    assert 'name = "small"' in written.recipe


def test_damaged_newest_is_skipped_and_written_again(pool: Pool, folder: Path) -> None:
    arguments = {"folder": folder, "sets": ["run.steps=4"]}
    pool.run(train_in, arguments, world_size=1)
    path = folder / "runs/small/checkpoints/step-00000004"
    before, log_before = contents(path), lines_of(folder, "runs")
    (path / "__0_0.distcp").write_bytes(b"torn")
    ((begun, _, _),) = pool.run(train_in, arguments, world_size=1)
    assert begun == 2
    assert contents(path) == before
    assert [row["loss"] for row in lines_of(folder, "runs") if "loss" in row] == [
        row["loss"] for row in log_before if "loss" in row
    ]


def claim(folder: Path) -> tuple[str, int]:
    """Claim a folder for two jobs of this process.

    Returns:
        The error of the second job while the first has the folder, and the id of this process.
    """
    with pool_world():
        first = run_folder.claim_folder(folder)
        try:
            run_folder.claim_folder(folder)
            message = "nothing"
        except UserError as error:
            (message,) = error.lines
        if first is not None:
            first.close()
        dist.barrier()
        run_folder.claim_folder(folder)
        return message, os.getpid()


def test_second_job_is_refused_and_told_of_the_first(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(claim, {"folder": tmp_path}, world_size=2)
    for message, _ in answers:
        assert message.startswith(
            f"rank 0: {tmp_path} is in use by process {answers[0][1]} "
            f"on {os.uname().nodename} (job "
        )
        assert message.endswith("; wait for its end, or give this run another run.name")


def start_from(folder: Path, sets: list[str], hf: str) -> tuple[int, list[str]]:
    """Train a run whose first weights come from a folder.

    Returns:
        The steps done, and the folders from which weights were read.
    """
    os.chdir(folder)
    read_folders: list[str] = []
    build.load_hf = lambda place, stages: read_folders.append(str(place))
    with pool_world() as device:
        recipe = load("recipe.toml", sets, world_size=1).recipe
        recipe = replace(recipe, model=replace(recipe.model, hf=hf))
        run = build.build(recipe, device, "")
        loop.train(run)
        return run.step, read_folders


def test_folder_of_weights_is_read_without_a_checkpoint(pool: Pool, folder: Path) -> None:
    arguments = {"folder": folder, "sets": ["run.steps=2"], "hf": "weights"}
    assert pool.run(start_from, arguments, world_size=1) == [(2, ["weights"])]
    # Its own checkpoint comes first, and does not depend on where the folder is.
    assert pool.run(start_from, {**arguments, "hf": "moved"}, world_size=1) == [(2, [])]
    path = folder / "runs/small/checkpoints/step-00000002"
    write(path, replace(read(path), step=0, data=None, lr=None))
    sets = ["run.steps=2", "run.name=other", f"checkpoint.resume={path}"]
    assert pool.run(start_from, {**arguments, "sets": sets}, world_size=1) == [(2, [])]
    assert [row["step"] for row in lines_of(folder, "runs") if "loss" in row] == [1, 2]
    other = (folder / "runs/other/metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, other) if "loss" in row] == [1, 2]


def warm_up_and_save(folder: Path) -> tuple[int, int, bool]:
    """Count the buffers on the host before the first save.

    Returns:
        Their number in a store that saves at once, and in one that saves in the background; and
        whether the save has used the latter.
    """
    with pool_world():
        stages, optimizer = make_job(seed=0, shape=(50, 40))
        at_once, behind = Store(folder, keep=1), Store(folder, keep=1, background=True)
        for each in (at_once, behind):
            each.warm_up(stages, optimizer)
        before = {name: buffer.data_ptr() for name, buffer in behind._host_copies.items()}
        behind.save(make_manifest(1), stages, optimizer)
        behind.wait()
        after = {name: buffer.data_ptr() for name, buffer in behind._host_copies.items()}
        return len(at_once._host_copies), len(before), before == after


def test_memory_is_allocated_before_the_first_save(pool: Pool, tmp_path: Path) -> None:
    for unused, buffers, kept in pool.run(warm_up_and_save, {"folder": tmp_path}, world_size=2):
        assert (unused, kept) == (0, True)
        assert buffers > 3
