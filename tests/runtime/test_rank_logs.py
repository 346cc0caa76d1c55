"""What each rank prints is kept in a file of its own (``run.rank_logs``)."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.facts.errors import RankLogError
from composer3d.runtime import rank_logs
from tests.long import some_of
from tests.runtime.test_environment import free_port
from tests.training.jobs import RECIPE, write_corpus
from tools.prove.paths import ROOT

HEADER = r"--- [0-9-]+T[0-9:]+Z rank {} of {}, process \d+ on \S+ ---"

DIE = """
import sys
from pathlib import Path
from composer3d.runtime import launch, starter
launch._PRELOAD = "json"  # not torch, which takes seconds
task = "tests.runtime.light_tasks:print_and_die"
result = launch.run_ranks(task, {"folder": Path(sys.argv[1])}, processes=2)
print(result.status, result.died)
"""


def read(folder: Path, rank: int) -> str:
    return rank_logs.path_of(folder, rank).read_text()


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_file_has_what_c_and_children_print_and_the_last_words_of_a_killed_rank(
    tmp_path: Path,
) -> None:
    done = run("-c", DIE, str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        text = read(tmp_path, rank)
        assert re.match(HEADER.format(rank, 2), text)
        for words in ("from C\n", "from a child\n", "light_tasks.py", "in print_and_die"):
            assert text.count(words) >= 1, (rank, words)
    # ``print`` has a buffer, which is lost with its process.
    assert "from Python" in read(tmp_path, 0)
    assert read(tmp_path, 1).endswith("last words")
    assert read(tmp_path, 0).endswith("ValueError: of rank 0\n")
    # The console has it all as well, and each error once.
    assert done.stdout.count("from C\n") == done.stdout.count("from a child\n") == 2
    # A process of its own copies what the killed rank's child printed, maybe after this line.
    assert f"1 {{1: {int(signal.SIGKILL)}}}" in done.stdout.splitlines()
    assert "last words" in done.stderr
    assert done.stderr.count("ValueError: of rank 0") == 1


@some_of(1, "launcher", ["composer3d", "torchrun"])
def test_the_ranks_of_a_training_append_to_their_files(launcher: str, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = RECIPE.format(mesh="dp_shard = 2").replace("steps = 20", "steps = 4")
    (tmp_path / "recipe.toml").write_text(recipe)
    start: tuple[str, ...] = ("-m", "composer3d")
    if launcher == "torchrun":
        address = f"localhost:{free_port()}"
        start = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
        start += ("--rdzv-endpoint", address, "-m", "composer3d")
    command = (*start, "train", "recipe.toml", "--set", "run.rank_logs=true")
    first = run(*command, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    again = run(*command, "--set", "run.steps=6", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    folder = tmp_path / "runs" / "small"
    for rank in (0, 1):
        assert len(re.findall(HEADER.format(rank, 2), read(folder, rank))) == 2
    assert "step 4/4" in first.stderr
    assert "step 4/4" in read(folder, 0)
    assert "step 6/6" in read(folder, 0)
    assert "step 4/4" not in read(folder, 1)


def test_output_and_errors_go_where_they_went(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with rank_logs.kept(tmp_path):
        os.write(1, b"out\n")
        os.write(2, b"err\n")
    os.write(1, b"later\n")
    assert capfd.readouterr() == ("out\nlater\n", "err\n")
    header, *lines = read(tmp_path, 0).splitlines()
    assert re.fullmatch(HEADER.format(0, 1), header)
    assert sorted(lines) == ["err", "out"]


def test_a_file_has_a_limit_and_keeps_the_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_logs, "MOST_BYTES", 200_000)
    with rank_logs.kept(tmp_path):
        for number in range(100):
            os.write(1, f"{number:>9999}\n".encode())
    path = rank_logs.path_of(tmp_path, 0)
    former = path.with_name(f"{path.name}.1")
    assert path.stat().st_size <= 200_000
    assert 100_000 < former.stat().st_size <= 200_000
    numbers = [int(word) for word in (former.read_text() + path.read_text()).split()]
    assert numbers == list(range(numbers[0], 100))


def test_a_child_that_stays_does_not_keep_a_dead_rank_waiting(tmp_path: Path) -> None:
    with rank_logs.kept(tmp_path):
        child = subprocess.Popen(["sleep", "100"])
        begin_s = time.monotonic()
    try:
        assert time.monotonic() - begin_s < 20
    finally:
        child.kill()
        child.wait()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path, precious = rank_logs.path_of(tmp_path, 0), tmp_path / "precious"
    precious.write_text("mine")
    path.parent.mkdir()
    path.symlink_to(precious)
    with pytest.raises(RankLogError) as refused, rank_logs.kept(tmp_path):
        pass
    (line,) = refused.value.lines
    assert line.startswith(f"run.rank_logs: {path}: is a symbolic link")
    assert precious.read_text() == "mine"


def test_a_rank_that_cannot_keep_its_output_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(mesh="dp_shard = 2"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / rank_logs.FOLDER).write_text("a file")
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "recipe.toml", "--set", "run.rank_logs=true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 1: run.rank_logs: runs/small/logs/rank-1.log: ")
