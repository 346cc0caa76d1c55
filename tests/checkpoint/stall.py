"""Measure how long training stands still for a save: ``python tests/checkpoint/stall.py FOLDER``.

This is not a test. Two ranks save 200 MB of float32 parameters and moments, at once and in the
background, three times each. Meanwhile a matrix product keeps the machine busy, as training would.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from composer3d.checkpoint import Store
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from tests.checkpoint.store_jobs import make_job, make_manifest


def measure(folder: Path) -> list[tuple[float, float, float]]:
    """Save in three rounds, and time each.

    Returns:
        For each round, in seconds: the save at once, the stall of the save in the background, and
        the whole duration of the latter.
    """
    rounds = []
    with pool_world(timeout_s=600):
        stages, optimizer = make_job(seed=0, shape=(4096, 4096))
        at_once = Store(folder / "a", keep=1)
        behind = Store(folder / "b", keep=1, background=True)
        behind.warm_up(stages, optimizer)
        matrix = torch.randn(256, 256)
        for step in (1, 2, 3):
            stalls = []
            for store in (at_once, behind):
                dist.barrier()
                began = time.perf_counter()
                store.save(make_manifest(step), stages, optimizer)
                stalls.append(time.perf_counter() - began)
                while store._pending_save is not None and not store._pending_save.done():
                    matrix @ matrix
                store.wait()
            rounds.append((stalls[0], stalls[1], time.perf_counter() - began))
    return rounds


if __name__ == "__main__":
    with Pool() as pool:
        rounds = pool.run(measure, {"folder": Path(sys.argv[1])}, world_size=2, limit_s=300)[0]
    for at_once_s, stall_s, behind_s in rounds:
        print(
            f"at once {at_once_s:.3f} s, background: stall {stall_s:.3f} s of {behind_s:.3f} s",
            f"({stall_s / at_once_s:.0%})",
        )
