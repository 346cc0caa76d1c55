"""The start of a training on a folder of 1,000 shards, beside the start on a folder of one.

Each shard has 100 million tokens, as ``composer3d prepare`` makes it. All but the last token are
zeros, which take no space on the disk: the files are sparse. So reading them costs less than from a
disk, but the checks cost as much. Both sides run in turn, in fresh processes, on one rank.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from composer3d.data.tokens import open_tokens, write_manifest
from composer3d.facts.token_manifest import CHUNK_BYTES, digest_of, shard_files
from tools.bench.jobs import CPU_RECIPE, ONE_THREAD, Job, composer3d_job, run_together
from tools.bench.tables import with_range

SHARD_TOKENS = 100_000_000
_ITEM_BYTES = 2
_END = 1  # the token that ends a document


def start(args: argparse.Namespace) -> int:
    """Compare both, and print a row for each side. Returns 0."""
    sides = {"1 shard": 1, f"{args.shards:,} shards": args.shards}
    launches: dict[str, list[float]] = {side: [] for side in sides}
    opens: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="composer3d-bench-") as name:
        root = Path(name)
        for side, count in sides.items():
            make_shards(root / side, count)
        for repeat in range(args.repeats):
            for side in sides:
                launches[side].append(launch_s(args.python, root / side, root / f"{side}{repeat}"))
                begin_s = time.monotonic()
                open_tokens(root / side, name=side)
                opens[side].append(time.monotonic() - begin_s)
                print(f"{side} {repeat + 1}/{args.repeats}: {launches[side][-1]:.2f} s")
    for side in sides:
        launch, data = (with_range(seconds[side], unit=" s") for seconds in (launches, opens))
        print(f"| {side} | launch to step 1 {launch}, data {data}")
    few, many = (statistics.median(values) for values in launches.values())
    print(f"difference {many - few:.2f} s")
    if args.json:
        print(json.dumps({"launch_to_first_step_s": launches, "open_s": opens}))
    return 0


def make_shards(folder: Path, count: int, *, shard_tokens: int = SHARD_TOKENS) -> None:
    """Make token files of ``count`` shards, each one long document in a sparse file."""
    folder.mkdir()
    size = shard_tokens * _ITEM_BYTES
    starts = np.array([0, shard_tokens], dtype="<i8").tobytes()
    end = np.array([_END], dtype="<u2").tobytes()
    last_bytes = (size - 1) % CHUNK_BYTES + 1
    whole = digest_of(bytes(CHUNK_BYTES)) if size > CHUNK_BYTES else ""
    digests = [whole] * (-(-size // CHUNK_BYTES) - 1)
    digests.append(digest_of(bytes(last_bytes - len(end)) + end))
    entries: dict[str, Any] = {}
    for number in range(count):
        tokens_name, documents_name = shard_files(number if count > 1 else None)
        with open(folder / tokens_name, "wb") as file:
            file.truncate(size)
            file.seek(size - len(end))
            file.write(end)
        (folder / documents_name).write_bytes(starts)
        entries[tokens_name] = {"bytes": size, "digests": digests}
        entries[documents_name] = {"bytes": len(starts), "digests": [digest_of(starts)]}
    facts: dict[str, Any] = {
        "dtype": "uint16",
        "vocab": 2,
        "tokens": count * shard_tokens,
        "documents": count,
        "end_of_document": _END,
        "tokenizer": {"name": "bench", "digest": None},
    }
    if count > 1:
        facts["shards"] = [{"tokens": shard_tokens, "documents": 1}] * count
    write_manifest(folder, facts, entries)


def launch_s(python: str, data: Path | str, folder: Path) -> float:
    """Return the seconds from the launch of a training to its first step."""
    sets = ["data.source=tokens", f"data.path={data}", "run.steps=1", "optim.warmup=0"]
    sets += ["model.preset=debug-tiny", "data.seq_len=64", "data.global_batch=8"]
    sets += ["data.micro_batch=8"]
    job: Job = composer3d_job(python, CPU_RECIPE, sets, folder)
    job.env = dict(ONE_THREAD)
    run_together([job])
    return job.first_step_s
