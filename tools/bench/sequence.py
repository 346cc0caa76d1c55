"""``bench.py cp``: attention of one sequence over ranks against attention on one process: time, memory, bytes sent."""

import argparse
import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.models.contract import SequenceInfo
from composer3d.parallel.context.api import METHODS, attend_over, ring_attention
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages

HEADS, KV_HEADS, WIDTH = 8, 8, 32  # Ulysses cuts key-value heads too, here over up to 8 ranks
MIB = 2**20
ALONE = "one process"  # on every rank the whole sequence


def cp(args: argparse.Namespace) -> int:
    """Print a row for each length, number of ranks and method: medians of the repeats, in which all take turns.

    As many whole sequences as there are cores, one on each, say what that many cores are worth.
    """
    rows = []
    kinds = [
        (ranks, method) for ranks in args.ranks for method in (METHODS if ranks > 1 else (ALONE,))
    ]
    kinds.insert(1, (os.cpu_count() or 1, ALONE))
    print(
        "| tokens | ranks | method | forward + backward s | of one process's | peak MiB a rank | MiB sent a rank |"
    )
    print("|---|---|---|---|---|---|---|")
    with Pool() as pool:
        for tokens in args.tokens:
            runs: dict[tuple[int, str], list[dict[str, float]]] = {kind: [] for kind in kinds}
            for (ranks, method), taken in list(runs.items()) * args.repeats:
                task = {"method": method, "tokens": tokens, "documents": args.documents}
                results = pool.run("bench.sequence:measure", task, world_size=ranks, limit_s=1800.0)
                taken.append({key: max(result[key] for result in results) for key in results[0]})
            for (ranks, method), taken in runs.items():
                row: dict[str, Any] = {"tokens": tokens, "ranks": ranks, "method": method}
                row |= {key: statistics.median(run[key] for run in taken) for key in taken[0]}
                pairs = zip(taken, runs[kinds[0]], strict=True)
                row["time_ratio"] = statistics.median(
                    run["seconds"] / one["seconds"] for run, one in pairs
                )
                rows.append(row)
                print(
                    f"| {tokens} | {ranks} | {method} | {row['seconds']:.3f} | {row['time_ratio']:.2f} | "
                    f"{row['peak_bytes'] / MIB:.1f} | {row['sent_bytes'] / MIB:.1f} |",
                    flush=True,
                )
        memory: dict[int, float] = {}
        for ranks in args.ranks if args.step_tokens else ():
            task = {"tokens": args.step_tokens, "ranks": ranks}
            memory[ranks] = max(
                pool.run("bench.sequence:step_memory", task, world_size=ranks, limit_s=1800.0)
            )
            share = memory[ranks] * ranks / memory[args.ranks[0]]
            each = f"{memory[ranks] / MIB:.0f} MiB on each of {ranks}"
            print(
                f"a step of {args.step_tokens} tokens: {each}, {share:.2f} of one process's in all"
            )
    if args.json:
        print(
            json.dumps(
                {
                    "step_bytes": memory,
                    "heads": HEADS,
                    "kv_heads": KV_HEADS,
                    "width": WIDTH,
                    "cores": os.cpu_count(),
                    "rows": rows,
                }
            )
        )
    return 0


def step_memory(tokens: int, ranks: int) -> float:
    """On one rank: by how many bytes forward and backward of ``bench.toml``'s model grow it, of one long sequence."""
    torch.set_num_threads(1)
    give_back_memory()
    sets = [
        f"data.seq_len={tokens}",
        f"mesh.cp={ranks}",
        "data.global_batch=1",
        "data.micro_batch=1",
        "memory.loss_chunks=16",
    ]
    recipe = load(Path(__file__).parent / "bench.toml", sets, check_files=False).recipe
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        whole = torch.randint(
            recipe.model.vocab, (1, tokens), generator=torch.Generator().manual_seed(1)
        )
        mine = [stages.own_tokens(x) for x in (whole, whole, torch.arange(tokens)[None])]
        for _ in range(2):  # the first warms up
            gc.collect()
            with peak_memory() as grown:
                stages.forward_backward(*mine, tokens)
            for parameter in stages.parameters():
                parameter.grad = None
        return grown[0]


def give_back_memory() -> None:
    """Have what is freed leave the process at once: glibc else keeps it, and the resident memory with it."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD


def measure(method: str, tokens: int, documents: int) -> dict[str, float]:
    """On one rank: seconds of forward and backward, peak bytes beyond the inputs, bytes sent in both."""
    torch.set_num_threads(1)
    give_back_memory()
    with pool_world():
        group = dist.group.WORLD
        assert group is not None
        shape = (1, tokens // (1 if method == ALONE else group.size()), 2 * KV_HEADS + HEADS, WIDTH)
        q, k, v = torch.randn(shape).split((HEADS, KV_HEADS, KV_HEADS), 2)
        leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        grad = torch.randn_like(leaves[0])
        ids = torch.arange(tokens)[None] // documents if documents else None

        def attend() -> Tensor:
            if method == ALONE:
                return attend_over(None)(
                    *leaves, seq=SequenceInfo(torch.arange(tokens)[None], ids), window=0
                )
            return ring_attention(*leaves, group=group, method=method, document_ids=ids)

        for _ in range(2):  # the first warms up
            for leaf in leaves:
                leaf.grad = None
            gc.collect()
            with counting() as sent, peak_memory() as grown:
                dist.barrier()
                begin = time.perf_counter()
                out = attend()
                out.backward(grad)
                del out
                dist.barrier()
                seconds = time.perf_counter() - begin
        return {"seconds": seconds, "peak_bytes": grown[0], "sent_bytes": sent[0]}


@contextmanager
def counting() -> Iterator[list[int]]:
    """The bytes that this rank sends."""
    sent = [0]
    real: dict[str, Any] = {}

    def counted(name: str, part: Callable[[Tensor, int], int]) -> Callable[..., Any]:
        def run(out: Tensor, x: Tensor, *, group: dist.ProcessGroup) -> Any:
            sent[0] += part(x, group.size())
            return real[name](out, x, group=group)

        return run

    def batch(ops: list[dist.P2POp]) -> Any:
        sent[0] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real["batch_isend_irecv"](ops)

    wrapped: dict[str, Callable[..., Any]] = {
        "all_gather_single": counted("all_gather_single", lambda x, size: (size - 1) * x.nbytes),
        "reduce_scatter_single": counted(
            "reduce_scatter_single", lambda x, size: (size - 1) * x.nbytes // size
        ),
        "all_to_all_single": counted(
            "all_to_all_single", lambda x, size: (size - 1) * x.nbytes // size
        ),
        "batch_isend_irecv": batch,
    }
    for name, wrapper in wrapped.items():
        real[name] = getattr(dist, name)
        setattr(dist, name, wrapper)
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """By how many bytes the resident memory of this process grew at most; set when the context ends. Linux."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, grown = _status("VmRSS"), [0]
    yield grown
    grown[0] = _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", metavar="N,...", type=numbers, default=[4096, 8192, 16384, 32768]
    )
    parser.add_argument(
        "--ranks", metavar="N,...", type=numbers, default=[1, 2, 4, 8], help="the first should be 1"
    )
    parser.add_argument(
        "--step-tokens",
        metavar="N",
        type=int,
        default=8192,
        help="of the memory of a whole step; 0: none",
    )
    parser.add_argument(
        "--documents", metavar="N", type=int, default=0, help="pack documents of N tokens; 0: none"
    )
