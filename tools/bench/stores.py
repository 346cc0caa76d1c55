"""Token files in an object store beside the same files on a disk: the start, and the steps.

The store is a local server of S3 that the tests use, or a folder of your own. The server is a
program for tests: it takes about 10 ms of a core for each request.

The steps of three runs on one rank are done in turns: on the disk; on the store, with copies of all
shards on a disk of the node; and on the store without copies. So what disturbs the machine disturbs
all of them. The time of the processor, of all threads of the rank, does not count the time that
other programs take.
"""

import argparse
import json
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from composer3d.data import open_corpus
from composer3d.data.staging import NodeCache
from composer3d.facts.remote import RemotePath
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build
from composer3d.training.loop import do_step
from tools.bench.jobs import CPU_RECIPE
from tools.bench.shards import launch_s, make_shards
from tools.bench.tables import print_head, print_row, with_range
from tools.object_store import new_folder

SHARD_TOKENS = 100_000
SEQ_LEN = 128  # short steps, so that what reading costs shows
WARM_UP = 3  # steps that are not timed
_LIMIT_S = 1200.0
_STAGE_S = 600.0


class StepTimes(NamedTuple):
    """Milliseconds of steps, in their order: on the clock, and of the processor."""

    clock: list[float]
    processor: list[float]


def store(args: argparse.Namespace) -> int:
    """Compare both places, and print a row for each side. Returns 0."""
    with tempfile.TemporaryDirectory(prefix="composer3d-bench-") as name:
        root = Path(name)
        disk = root / "disk"
        make_shards(disk, args.shards, shard_tokens=SHARD_TOKENS)
        place = new_folder() if args.url is None else RemotePath(args.url)
        remote = place / f"composer3d-{uuid.uuid4().hex}"  # it is removed at the end
        try:
            begin_s = time.monotonic()
            for path in disk.iterdir():
                (remote / path.name).write(path.read_bytes())
            print(
                f"{args.shards:,} shards copied to {remote} in {time.monotonic() - begin_s:.1f} s"
            )
            launches, opens = _starts(args, root, {"disk": str(disk), "store": str(remote)})
            cache = NodeCache(root / "copies", 1 << 40, makes_copies=True)
            open_corpus("tokens", str(remote), split="train", cache=cache)
            begin_s = time.monotonic()
            cache.start()
            if not cache.wait(_STAGE_S):
                raise OSError(f"copies take longer than {_STAGE_S:.0f} s")
            print(f"copied to the node in {time.monotonic() - begin_s:.1f} s")
            steps = _steps(args.steps, root, str(disk), str(remote))
        finally:
            remote.remove_tree()
    print_head("start", "launch to step 1", "opening of the data")
    for side, seconds in launches.items():
        print_row(side, with_range(seconds, unit=" s"), with_range(opens[side], unit=" s"))
    print_head("steps", "time, ms", "beside the disk", "processor, ms", "beside the disk")
    for side, times in steps.items():
        cells = []
        for name in StepTimes._fields:
            own, of_disk = getattr(times, name), getattr(steps["disk"], name)
            ratio = statistics.median(one / other for one, other in zip(own, of_disk, strict=True))
            cells += [f"{statistics.median(own):.1f}", f"{ratio:.4f}"]
        print_row(side, *cells)
    if args.json:
        step_ms = {side: times._asdict() for side, times in steps.items()}
        report = {"launch_to_first_step_s": launches, "open_s": opens, "step_ms": step_ms}
        print(json.dumps(report))
    return 0


def _starts(
    args: argparse.Namespace, root: Path, sides: dict[str, str]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of starts, in turn, and of the opening of the data in this process."""
    launches: dict[str, list[float]] = {side: [] for side in sides}
    opens: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(args.repeats):
        for side, folder in sides.items():
            launches[side].append(launch_s(args.python, folder, root / f"{side}{repeat}"))
            begin_s = time.monotonic()
            open_corpus("tokens", folder, split="train")
            opens[side].append(time.monotonic() - begin_s)
            print(f"{side} {repeat + 1}/{args.repeats}: {launches[side][-1]:.2f} s")
    return launches, opens


def _steps(steps: int, root: Path, disk: str, remote: str) -> dict[str, StepTimes]:
    """Return the times of the steps of each side, done in turns on one rank."""
    sides = {
        "disk": [f"data.path={disk}"],
        "store, with copies": [f"data.path={remote}", f"data.cache_dir={root}/copies"],
        "store": [f"data.path={remote}"],
    }
    with Pool() as pool:
        arguments = {"sides": sides, "steps": steps, "folder": str(root)}
        (times,) = pool.run(step_in_turns, arguments, world_size=1, limit_s=_LIMIT_S)
    return dict(zip(sides, times, strict=True))


def step_in_turns(sides: dict[str, Sequence[str]], steps: int, folder: str) -> list[StepTimes]:
    """A task: step all runs in turns, and return the times of each one's steps."""
    torch.set_num_threads(1)
    times = [StepTimes([], []) for _ in sides]
    with pool_world() as device:
        runs = []
        for side, own in sides.items():
            sets = ["data.source=tokens", f"run.out_dir={folder}/{side}", f"run.steps={steps}"]
            sets += ["checkpoint.every=0", "optim.warmup=0", f"data.seq_len={SEQ_LEN}", *own]
            resolved = load(str(CPU_RECIPE), sets, may_import=True)
            runs.append(build(resolved.recipe, device, resolved.to_toml()))
        for step in range(steps):
            # Each one is the first in every third turn.
            for turn in range(len(runs)):
                number = (step + turn) % len(runs)
                with runs[number].observers.training():
                    begin_s, begin_processor_s = time.perf_counter(), time.process_time()
                    do_step(runs[number])
                    times[number].processor.append(1000 * (time.process_time() - begin_processor_s))
                    times[number].clock.append(1000 * (time.perf_counter() - begin_s))
        for run in runs:
            run.loader.close()
            run.observers.close()
    return [StepTimes(each.clock[WARM_UP:], each.processor[WARM_UP:]) for each in times]
