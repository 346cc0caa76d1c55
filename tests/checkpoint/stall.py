"""How long training stands still for a save: ``python tests/checkpoint/stall.py FOLDER``, not a test.

Two ranks, 200 MB of float32 parameters and moments; the same state saved at once and in the background, three times
each, while a matrix product goes on as training would.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from composer3d.checkpoint import Store
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from tests.checkpoint.store_jobs import about, job


def measure(folder: Path) -> list[tuple[float, float, float]]:
    """Seconds of each round: a save at once, the stall of one in the background, and that one's whole duration."""
    rows = []
    with pool_world(timeout_s=600):
        stages, optimizer = job(seed=0, shape=(4096, 4096))
        at_once, behind = Store(folder / "a", keep=1), Store(folder / "b", keep=1, background=True)
        behind.warm_up(stages, optimizer)
        work = torch.randn(256, 256)
        for step in (1, 2, 3):
            times = []
            for store in (at_once, behind):
                dist.barrier()
                began = time.perf_counter()
                store.save(about(step), stages, optimizer)
                times.append(time.perf_counter() - began)
                while store._flight is not None and not store._flight.done():
                    work @ work
                store.wait()
            rows.append((times[0], times[1], time.perf_counter() - began))
    return rows


if __name__ == "__main__":
    with Pool() as pool:
        for row in pool.run(measure, {"folder": Path(sys.argv[1])}, world_size=2, limit_s=300)[0]:
            print(
                "at once {:.3f} s, background: stall {:.3f} s of {:.3f} s".format(*row),
                f"({row[1] / row[0]:.0%})",
            )
