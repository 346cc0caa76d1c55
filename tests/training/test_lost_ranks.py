"""The report of a job that lost a rank: what each rank did, and who is missing."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer3d.recipe.resolve import load
from composer3d.runtime import peers
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import open_store, pool_world
from composer3d.training import loop
from composer3d.training.build import build
from tests.long import some_of
from tests.training.jobs import RECIPE

STEP = 3
INTERLEAVED = 'pp = 2\n[parallel]\nschedule = "Interleaved1F1B"'


def train_until_a_rank_is_lost(folder: str, event: str) -> None:
    """A task: train; in step 3 the last rank hangs or stops in the forward of a block."""
    os.chdir(folder)
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    # Less than the time that the pool gives ranks that lost another.
    peers.GRACE_S = 2.0

    def write_report(text: str) -> str:
        Path("report.txt").write_text(text)
        return "report.txt"

    watch = peers.PeerWatch(
        open_store(),
        rank=rank,
        size=size,
        describe=lambda peer: f"rank {peer} (x)",
        advice=lambda: "try again",
        write_report=write_report,
    )
    with watch, pool_world(timeout_s=6.0) as device:
        resolved = load("recipe.toml", ["run.steps=5"], world_size=size)
        run = build(resolved.recipe, device, resolved.to_toml())
        module = run.stages.modules[-1]
        block: Any = next(iter(module.blocks.values()))
        forward: Callable[..., Any] = block.forward

        def forward_or_not(*arguments: Any, **keywords: Any) -> Any:
            if run.step + 1 == STEP and rank == size - 1:
                if event == "stops":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(100)
            return forward(*arguments, **keywords)

        block.forward = forward_or_not
        loop.train(run)


# What each rank waits for, by rank: the last one is lost. In one step, its peers wait for it.
@some_of(
    1,
    ("mesh", "event", "waits"),
    [
        (
            "dp_shard = 2\ncp = 2\ntp = 2",
            "hangs",
            {
                3: ["over dp", "step 3, micro-batch 0"],
                5: ["over cp", "step 3, micro-batch 0"],
                6: ["over tp", "step 3, micro-batch 0"],
            },
        ),
        ("pp = 2", "stops", {0: ["over pp", "step 3, forward of micro-batch "]}),
        (INTERLEAVED, "hangs", {0: ["over pp", "step 3, action "]}),
    ],
    ids=["dp, cp, tp", "pp", "pp, interleaved"],
)
def test_the_report_says_what_each_rank_did(
    pool: Pool, folder: Path, mesh: str, event: str, waits: dict[int, list[str]]
) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
    arguments = {"folder": str(folder), "event": event}
    lost = 7 if "tp" in mesh else 1
    with pytest.raises(WorkerError) as caught:
        pool.run(train_until_a_rank_is_lost, arguments, world_size=lost + 1, limit_s=90.0)
    (line,) = next(iter(caught.value.failures.values())).lines
    report = (folder / "report.txt").read_text()
    finding, advice, _, errors, first, *others = report.splitlines()
    assert line == f"{finding}; what each rank did is in report.txt; try again"
    assert (advice, errors) == ("try again", "Errors, by the clocks of the machines:")
    assert "  rank " in first
    ranks = others[others.index("") + 1 :]
    for rank, words in waits.items():
        (found,) = [line for line in ranks if line.startswith(f"rank {rank} (x) on ")]
        assert all(word in found for word in ["its collective failed: ", *words]), found
    assert any("composer3d/training/loop.py:" in line for line in ranks)
    if event == "stops":
        assert finding == f"rank {lost} (x) does not answer: it has died, or is stopped"
        assert ranks[-1] == f"rank {lost} (x) does not answer"
    else:
        # The frame of the test's own function hangs; the innermost line of the package called it.
        assert finding.startswith(f"a collective failed: rank {lost} (x) at ")
        (own,) = [line for line in ranks if line.startswith(f"rank {lost} (x) on ")]
        assert " runs " in own
        assert "(step 3, " in own
        assert any("in forward_or_not" in line for line in ranks)
