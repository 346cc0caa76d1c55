"""The recipes that are kept in a run's folder."""

import re
from pathlib import Path

from composer3d.training.run_folder import write_recipe


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
    phases = "meeting of ranks, checks of ranks and groups, data, model, checkpoint"
    assert re.sub(r" \d+\.\d", "", third) == f"started in s: {phases}"
    assert [text.split()[1] for text in steps] == [f"{step}/5" for step in range(1, 6)]
    assert last.startswith("saved runs/small/checkpoints/step-00000005 in ")
