"""The errors of the ranks of a job: each is printed once, whatever rank 0 still has to do."""

import os
import time
from pathlib import Path

from composer3d.commands.job import run_rank, tell
from composer3d.facts.errors import TrainingError
from composer3d.recipe.resolve import Resolved, load
from composer3d.runtime.launch import run_ranks
from composer3d.runtime.process_group import pool_world


def fail_on_all_ranks(errors: Path, told_early: bool) -> int:
    # The server that forks the ranks may have an earlier test's standard error.
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)

    def function(resolved: Resolved, rank: int) -> int:
        error = TrainingError("a loss is not finite")
        with pool_world():
            if told_early:
                tell(error, rank)
            if rank == 0:
                # It closes what the others do not have.
                time.sleep(6.0)
            raise error

    def resolve(world_size: int) -> Resolved:
        return load("recipes/debug-2-cp.toml", world_size=world_size)

    return run_rank(function, resolve)


def test_rank_0_has_time_to_close_what_it_has_before_it_prints_an_error(tmp_path: Path) -> None:
    for told_early in (False, True):
        errors = tmp_path / str(told_early)
        arguments = {"errors": errors, "told_early": told_early}
        result = run_ranks(fail_on_all_ranks, arguments, processes=2)
        assert (result.status, result.stuck, result.reason) == (1, [], ())
        assert not result.is_lost
        assert errors.read_text() == "a loss is not finite\n"
