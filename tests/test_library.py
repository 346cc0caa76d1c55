"""The programs that print how composer3d is used as a library, and the page that lists its names.

They run as printed, as one process and as four, with the same numbers, and type checkers accept
them.
"""

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import composer3d
from composer3d.runtime.launch import Pool
from tests.test_readme import LIBRARY, README, blocks
from tools.prove.paths import ROOT

(OWN_LOOP,) = blocks(README, "python")
(TINY,) = (block for block in blocks(LIBRARY, "python") if "class Tiny" in block)
(CHECK,) = (block for block in blocks(LIBRARY, "python") if "test_my_layout" in block)
_STEP = re.compile(r"^step (\d+): loss (\d+\.\d{4}), norm (\d+\.\d{4})$", re.MULTILINE)


def run_as_rank(script: str, arguments: list[str], port: int) -> str:
    """Run a script as one rank of a world, as ``python`` would; return what it prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def run(pool: Pool, script: Path, ranks: int, *arguments: str) -> list[tuple[float, ...]]:
    """Run a script on several ranks; return its lines: the step, the loss and the norm."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    task = {"script": str(script), "arguments": list(arguments), "port": port}
    printed = pool.run(run_as_rank, task, world_size=ranks)
    assert printed[1:] == [""] * (ranks - 1)  # rank 0 alone prints
    lines = [tuple(map(float, found)) for found in _STEP.findall(printed[0])]
    assert len(lines) == len(printed[0].splitlines())
    return lines


def assert_same(lines: list[tuple[float, ...]], others: list[tuple[float, ...]]) -> None:
    """Require the same numbers, but for one in the last digit that is printed."""
    assert len(lines) == len(others)
    for line, other in zip(lines, others, strict=True):
        assert line == pytest.approx(other, abs=1.01e-4)


def test_the_loop_of_the_readme_has_the_same_numbers_and_resumes_on_any_layout(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "own.py"
    program.write_text(OWN_LOOP)
    lines = {}
    for ranks in (1, 4):
        (tmp_path / str(ranks)).mkdir()
        monkeypatch.chdir(tmp_path / str(ranks))
        lines[ranks] = run(pool, program, ranks)
    assert [step for step, _, _ in lines[1]] == [1, 2, 3, 4]
    assert lines[1][0][1] == pytest.approx(5.545, rel=0.05)  # of a model that has learned nothing
    assert lines[1][-1][1] < lines[1][0][1] - 0.3
    assert_same(lines[4], lines[1])

    # One process goes on with what four have left, as with its own.
    after = {}
    for ranks in (1, 4):
        monkeypatch.chdir(tmp_path / str(ranks))
        after[ranks] = run(pool, program, 1)
    assert [step for step, _, _ in after[1]] == [5, 6, 7, 8]
    assert_same(after[4], after[1])


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program of the page, in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path


def test_the_model_of_the_page_trains_alike_on_every_axis(pool: Pool, tiny: Path) -> None:
    alone = run(pool, tiny, 1, "train")
    assert len(alone) == 3
    assert alone[-1][1] < alone[0][1]
    for axes in (["dp_shard", "tp"], ["pp", "cp"]):
        sets = [f"mesh.{axis}=2" for axis in axes]
        assert_same(run(pool, tiny, 4, "train", *sets), alone)


def test_the_program_of_the_page_is_as_short_as_it_says() -> None:
    code = [line for line in TINY.splitlines() if line.strip() and line.strip()[0] != "#"]
    assert len(code) <= 60
    assert max(map(len, TINY.splitlines())) <= 100


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python`` in a folder, outside of which it finds this checkout alone."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_model_of_the_page_is_proven_from_python(tiny: Path) -> None:
    done = python("tiny.py", "verify", "mesh.tp=2", "mesh.pp=2", folder=tiny.parent)
    assert (done.returncode, done.stderr) == (0, "")
    printed = [re.sub(r"\d+e-\d+", "E", text) for text in (done.stdout, LIBRARY.read_text())]
    assert printed[0].startswith("exact   pp 2 tp 2 1F1B ")
    assert printed[0] in printed[1]


def test_processes_of_a_proof_do_not_run_the_script_again(tmp_path: Path) -> None:
    (tmp_path / "prove.py").write_text(
        "import composer3d\n"
        "print('once')\n"
        f"verdict = composer3d.verify({str(ROOT / 'recipes/debug-2-dp.toml')!r}, steps=1)\n"
        "print(verdict.passed, verdict.world_size)\n"
    )
    done = python("prove.py", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\nTrue 2\n", "")


def test_a_program_that_proves_itself_without_a_guard_is_told_so(tiny: Path) -> None:
    """Its processes import the architecture, and so would each start a proof."""
    guard = 'if __name__ == "__main__":'
    assert guard in TINY
    tiny.write_text(TINY.replace(guard, "if True:"))
    done = python("tiny.py", "verify", "mesh.tp=2", folder=tiny.parent)
    assert done.stdout.startswith("WRONG ")
    assert 'put the call below `if __name__ == "__main__":`' in done.stderr


def test_the_check_of_the_page_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(CHECK, names)
    check = names["test_my_layout"]
    assert callable(check)
    check()


def test_programs_of_a_user_are_typed(tmp_path: Path) -> None:
    """As for a user: mypy reports what is wrong in the files that it is given, and no other."""
    pytest.importorskip("mypy")
    programs = {"own.py": OWN_LOOP, "tiny.py": TINY, "check.py": CHECK}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "wrong.py").write_text(
        "from composer3d import MeshTable, verify\n"
        "MeshTable(tp='2')\n"
        "verify('x.toml').exact\n"
        "from composer3d import no_such_name\n"
    )
    # What it has found of torch and of this package is kept: to find it takes 10 s.
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'programs'}"
    command = ["-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", cache]
    done = python(*command, *programs, "wrong.py", folder=tmp_path)
    wrong = [line.partition(":")[0] for line in done.stdout.splitlines() if ": error: " in line]
    assert wrong == ["wrong.py"] * 3, done.stdout
    for code in ("arg-type", "attr-defined"):
        assert f"[{code}]" in done.stdout


def test_the_page_lists_all_public_names_and_no_others() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", LIBRARY.read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(listed) == len(set(listed)) > 40
    assert set(listed) == set(composer3d.__all__) - {"__version__"}
