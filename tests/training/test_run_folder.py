"""The folder of a run: the claim on it, and the recipes that are kept in it."""

import os
import re
import time
from pathlib import Path

import pytest

from composer3d.facts.errors import MeshError
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import pool_world
from composer3d.training import run_folder
from composer3d.training.run_folder import claim_folder, write_recipe


def test_a_recipe_with_the_same_values_is_not_kept_twice(tmp_path: Path) -> None:
    first, moved = '[run]\nname = "a" # x.toml:1\n', '[run]\nname = "a" # y.toml:7\n'
    other, third = '[run]\nname = "b"\n', '[run]\nname = "c"\n'
    write_recipe(tmp_path, first, steps_done=0)
    write_recipe(tmp_path, other, steps_done=0)  # no step of the first is left
    write_recipe(tmp_path, first, steps_done=0)
    write_recipe(tmp_path, moved, steps_done=5)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]
    write_recipe(tmp_path, other, steps_done=5)
    write_recipe(tmp_path, third, steps_done=5)  # the step of `other` has been lost
    assert (tmp_path / "recipe-00000005.toml").read_text() == moved
    assert (tmp_path / "recipe.toml").read_text() == third
    (tmp_path / "recipe.toml").write_bytes(b"\xff no recipe")
    write_recipe(tmp_path, third, steps_done=6)
    assert (tmp_path / "recipe-00000006.toml").read_bytes() == b"\xff no recipe"


def test_a_recipe_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    for name in ("recipe.toml", "recipe-00000005.toml"):
        (tmp_path / name).symlink_to("theirs")
    write_recipe(tmp_path, "[run]\n", steps_done=5)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "recipe.toml").is_symlink()


def test_the_log_has_the_console_lines_of_rank_0_with_their_times(trained: Path) -> None:
    lines = (trained / "runs/small/log.txt").read_text().splitlines()
    times, texts = zip(*(line.split(" ", 1) for line in lines), strict=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time) for time in times)
    assert sorted(times) == list(times)
    first, second, data, third, *steps, last = texts
    assert first.startswith("composer3d ")
    assert first.endswith(", 1 ranks on cpu")
    assert data.startswith("data: corpus.txt (train) has ")
    assert second == "no checkpoint in runs/small/checkpoints: starting from the beginning"
    phases = (
        "processes, meeting of ranks, checks of ranks and groups, data, model, checkpoint, other"
    )
    assert re.sub(r" \d+\.\d", "", third) == f"started in s: {phases}"
    assert [text.split()[1] for text in steps] == [f"{step}/5" for step in range(1, 6)]
    assert last.startswith("saved runs/small/checkpoints/step-00000005 in ")


def claim_where_a_node_sees_the_folder_late(folder: Path, sees_it_after_s: float) -> str:
    """Claim a folder. Rank 1 finds nothing in it for some seconds, as on a node with NFS.

    Returns:
        The note that this rank has read at last.
    """
    run_folder._ROUNDS, run_folder._ROUND_S = 20, 0.1
    read, begin_s = run_folder.read_note, time.monotonic()
    notes = []

    def read_late(path: Path) -> str:
        if os.environ["RANK"] == "1" and time.monotonic() < begin_s + sees_it_after_s:
            raise FileNotFoundError(2, "No such file or directory")
        notes.append(read(path))
        return notes[-1]

    run_folder.read_note = read_late
    with pool_world():
        begin_s = time.monotonic()
        claim_folder(folder)
    return notes[-1]


def test_a_folder_that_a_node_sees_late_is_the_same_one(pool: Pool, tmp_path: Path) -> None:
    arguments = {"folder": tmp_path / "new", "sees_it_after_s": 0.5}
    one, other = pool.run(claim_where_a_node_sees_the_folder_late, arguments, world_size=2)
    assert one == other
    assert one.startswith("process ")


def test_a_folder_that_a_node_does_not_see_is_refused(pool: Pool, tmp_path: Path) -> None:
    arguments = {"folder": tmp_path / "new", "sees_it_after_s": 100.0}
    with pytest.raises(WorkerError) as caught:
        pool.run(claim_where_a_node_sees_the_folder_late, arguments, world_size=2)
    error = caught.value.user_error
    assert isinstance(error, MeshError)
    assert error.lines[0] == (
        f"the folder {tmp_path}/new (run.out_dir) must be the same on every rank; give all nodes "
        "the same files"
    )
    assert error.lines[2] == "ranks 1 see 'no note of the job (No such file or directory)'"
