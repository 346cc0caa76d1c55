"""A lack of memory is known by any of its errors, and told in one line."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d.facts.errors import NoMemoryError, UserError
from composer3d.runtime import launch
from composer3d.runtime.launch import run_ranks
from composer3d.runtime.shortage import lacks_memory, no_memory

TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 42949672960 bytes. Error code 12 (Cannot allocate memory)"
)


def caused_by(error: Exception) -> Exception:
    outer = ValueError("something else")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError(TORCH), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (ImportError("libtorch.so: failed to map segment from shared object"), True),
        (caused_by(MemoryError()), True),
        (RuntimeError("Connection closed by peer"), False),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
        (UserError("memory.cpu_offload is wrong"), False),
        (ImportError("no module named memory"), False),
    ],
    ids=repr,
)
def test_errors_of_memory(error: Exception, expected: bool) -> None:
    assert lacks_memory(error) == expected


def test_the_line_has_what_was_asked_for_and_what_to_do() -> None:
    (line,) = no_memory("rank 3", RuntimeError(TORCH)).lines
    assert line.startswith("rank 3: there is not enough memory (err == 0. DefaultCPUAllocator: ")
    assert "42949672960 bytes" in line
    assert "lower data.micro_batch" in line


def test_a_process_that_cannot_be_forked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch._Worker, "_read_status", lambda _: -errno.ENOMEM)
    with pytest.raises(NoMemoryError) as caught:
        launch._Worker(3, None, None).wait_for_start()  # type: ignore[arg-type]
    assert caught.value.status == 1
    assert caught.value.lines[0].startswith("the process of rank 3 could not be started: there is")


def ask_for_too_much(errors: Path) -> int:
    # The server that forks the ranks may have an earlier test's standard error.
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    from composer3d.commands.job import run_rank
    from composer3d.recipe.resolve import Resolved, load

    def function(resolved: object, rank: int) -> int:
        if rank == 1:
            import torch

            torch.empty(1 << 60, dtype=torch.uint8)
        return 0

    def resolve(world_size: int) -> Resolved:
        return load("recipes/debug-2-cp.toml", world_size=world_size)

    return run_rank(function, resolve)


def test_a_rank_without_memory_says_so_in_one_line(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    result = run_ranks(ask_for_too_much, {"errors": errors}, processes=2)
    assert (result.status, result.lacked_memory, result.raised) == (1, [1], False)
    assert result.is_lost
    (line,) = errors.read_text().splitlines()
    assert line.startswith("rank 1 (pp0 dp0 cp1 tp0): there is not enough memory (")


def test_a_command_without_memory_has_no_traceback(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from composer3d import cli\n"
        "from composer3d.commands import check\n"
        "def run(_): bytearray(1 << 60)\n"
        "check.run = run\n"
        "sys.exit(cli.main(['check', 'quickstart']))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("composer3d check: there is not enough memory (MemoryError); ")
    assert len(done.stderr.splitlines()) == 1
