"""The command ``cp``: attention of one sequence over several ranks, compared with one process.

It measures time, memory and the bytes sent, and the memory of a whole training step.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.models.contract import SequenceInfo
from composer3d.parallel.context.api import METHODS, make_attend, ring_attention
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from tools.bench.tables import print_head, print_row

# Ulysses cuts key-value heads too, here over up to 8 ranks.
HEADS, KV_HEADS, WIDTH = 8, 8, 32
MIB = 2**20
ALONE = "one process"  # the method in which every rank attends to a whole sequence by itself


class Kind(NamedTuple):
    """One kind of run: how many ranks attend, and how."""

    ranks: int
    method: str


# The figures of one run, or their medians: seconds, peak_bytes and sent_bytes.
Figures = dict[str, float]


def cp(args: argparse.Namespace) -> int:
    """Print a row for each length, number of ranks and method: the medians of the repeats.

    All kinds of runs take turns. One kind runs a whole sequence on each core at the same time: it
    shows what that many cores are worth.
    """
    kinds = []
    for ranks in args.ranks:
        kinds += [Kind(ranks, method) for method in (METHODS if ranks > 1 else (ALONE,))]
    kinds.insert(1, Kind(os.cpu_count() or 1, ALONE))

    rows: list[dict[str, Any]] = []
    print_head(
        *("tokens", "ranks", "method", "forward + backward s", "of one process's"),
        *("peak MiB a rank", "MiB sent a rank"),
    )
    with Pool() as pool:
        for tokens in args.tokens:
            runs: dict[Kind, list[Figures]] = {kind: [] for kind in kinds}
            for _ in range(args.repeats):
                for kind in runs:
                    runs[kind].append(_run(pool, kind, tokens, args.documents))
            for kind, figures in runs.items():
                row = _row(kind, tokens, figures, base=runs[kinds[0]])
                rows.append(row)
                _print_row(row)
        step_bytes = _step_memory_of_ranks(pool, args.ranks, args.step_tokens)
    if args.json:
        answer = {
            "step_bytes": step_bytes,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "width": WIDTH,
            "cores": os.cpu_count(),
            "rows": rows,
        }
        print(json.dumps(answer))
    return 0


def _run(pool: Pool, kind: Kind, tokens: int, documents: int) -> Figures:
    """Run once; return the largest figures of any rank."""
    arguments = {"method": kind.method, "tokens": tokens, "documents": documents}
    results = pool.run(measure, arguments, world_size=kind.ranks, limit_s=1800.0)
    return {key: max(result[key] for result in results) for key in results[0]}


def _row(
    kind: Kind, tokens: int, runs: Sequence[Figures], base: Sequence[Figures]
) -> dict[str, Any]:
    """The medians of a kind's runs. ``base`` are the runs of the first kind, in the same turns."""
    row: dict[str, Any] = {"tokens": tokens, "ranks": kind.ranks, "method": kind.method}
    for key in runs[0]:
        row[key] = statistics.median(run[key] for run in runs)
    row["time_ratio"] = statistics.median(
        run["seconds"] / base_run["seconds"] for run, base_run in zip(runs, base, strict=True)
    )
    return row


def _print_row(row: dict[str, Any]) -> None:
    print_row(
        row["tokens"],
        row["ranks"],
        row["method"],
        f"{row['seconds']:.3f}",
        f"{row['time_ratio']:.2f}",
        f"{row['peak_bytes'] / MIB:.1f}",
        f"{row['sent_bytes'] / MIB:.1f}",
    )


def _step_memory_of_ranks(
    pool: Pool, all_ranks: Sequence[int], step_tokens: int
) -> dict[int, float]:
    """Measure and print the memory of a whole step, by number of ranks; 0 tokens measure none."""
    step_bytes: dict[int, float] = {}
    if step_tokens == 0:
        return step_bytes
    for ranks in all_ranks:
        arguments = {"tokens": step_tokens, "ranks": ranks}
        results = pool.run(step_memory, arguments, world_size=ranks, limit_s=1800.0)
        step_bytes[ranks] = max(results)
        share = step_bytes[ranks] * ranks / step_bytes[all_ranks[0]]
        print(
            f"a step of {step_tokens} tokens: {step_bytes[ranks] / MIB:.0f} MiB on each of "
            f"{ranks}, {share:.2f} of one process's in all"
        )
    return step_bytes


def step_memory(tokens: int, ranks: int) -> float:
    """Measure by how many bytes forward and backward of one long sequence grow this rank.

    The model is that of ``bench.toml``.
    """
    torch.set_num_threads(1)
    return_freed_memory()
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
        generator = torch.Generator().manual_seed(1)
        whole_BT = torch.randint(recipe.model.vocab, (1, tokens), generator=generator)
        tokens_BT = stages.own_tokens(whole_BT)
        positions_BT = stages.own_tokens(torch.arange(tokens)[None])
        for _ in range(2):  # the first run warms up
            gc.collect()
            with peak_memory() as growth:
                stages.forward_backward(tokens_BT, tokens_BT, positions_BT, torch.tensor(tokens))
            for parameter in stages.parameters():
                parameter.grad = None
        return growth.bytes


def return_freed_memory() -> None:
    """Make glibc return freed memory to the system at once, or the resident set would not fall."""
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**16)


def measure(method: str, tokens: int, documents: int) -> Figures:
    """Measure attention on this rank.

    Returns:
        Seconds of forward and backward, the peak bytes beyond the inputs, and the bytes sent.
    """
    torch.set_num_threads(1)
    return_freed_memory()
    with pool_world():
        group = dist.group.WORLD
        assert group is not None
        own_tokens = tokens if method == ALONE else tokens // group.size()
        qkv = torch.randn(1, own_tokens, 2 * KV_HEADS + HEADS, WIDTH)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 2)
        leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        grad = torch.randn_like(leaves[0])
        documents = torch.arange(tokens)[None] // documents if documents else None

        def attend() -> Tensor:
            if method == ALONE:
                seq = SequenceInfo(torch.arange(tokens)[None], documents)
                return make_attend(None)(*leaves, seq=seq, window=0)
            return ring_attention(*leaves, group=group, method=method, documents=documents)

        for _ in range(2):  # the first run warms up
            for leaf in leaves:
                leaf.grad = None
            gc.collect()
            with count_sent_bytes() as sent, peak_memory() as growth:
                dist.barrier()
                began_s = time.perf_counter()
                out = attend()
                out.backward(grad)
                del out
                dist.barrier()
                seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "peak_bytes": growth.bytes, "sent_bytes": sent.bytes}


class ByteCount:
    """A number of bytes that a context manager fills in."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def count_sent_bytes() -> Iterator[ByteCount]:
    """Count the bytes that this rank sends inside the context."""
    sent = ByteCount()
    originals: dict[str, Any] = {}

    def wrap(name: str, sent_bytes: Callable[[Tensor, int], int]) -> Callable[..., Any]:
        def run(out: Tensor, x: Tensor, *, group: dist.ProcessGroup) -> Any:
            sent.bytes += sent_bytes(x, group.size())
            return originals[name](out, x, group=group)

        return run

    def to_all_others(x: Tensor, size: int) -> int:
        return (size - 1) * x.nbytes

    def a_part_to_each_other(x: Tensor, size: int) -> int:
        return (size - 1) * x.nbytes // size

    def send_batch(ops: list[dist.P2POp]) -> Any:
        sent.bytes += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return originals["batch_isend_irecv"](ops)

    wrappers: dict[str, Callable[..., Any]] = {
        "all_gather_single": wrap("all_gather_single", to_all_others),
        "reduce_scatter_single": wrap("reduce_scatter_single", a_part_to_each_other),
        "all_to_all_single": wrap("all_to_all_single", a_part_to_each_other),
        "batch_isend_irecv": send_batch,
    }
    for name, wrapper in wrappers.items():
        originals[name] = getattr(dist, name)
        setattr(dist, name, wrapper)
    try:
        yield sent
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


@contextmanager
def peak_memory() -> Iterator[ByteCount]:
    """Measure by how much the resident set of this process grew at most. Linux only.

    The number is there when the context ends.
    """
    # This value resets VmHWM, the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before, growth = _memory_status("VmRSS"), ByteCount()
    yield growth
    growth.bytes = _memory_status("VmHWM") - before


def _memory_status(key: str) -> int:
    """One of the memory figures of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {key}")


def parse_numbers(text: str) -> list[int]:
    """Parse numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``cp``."""
    parser.add_argument(
        "--tokens",
        metavar="N,...",
        type=parse_numbers,
        default=[4096, 8192, 16384, 32768],
        help="lengths of the sequence",
    )
    parser.add_argument(
        "--ranks",
        metavar="N,...",
        type=parse_numbers,
        default=[1, 2, 4, 8],
        help="numbers of ranks; the first should be 1",
    )
    parser.add_argument(
        "--step-tokens",
        metavar="N",
        type=int,
        default=8192,
        help="measure the memory of a whole step of N tokens; 0: do not",
    )
    parser.add_argument(
        "--documents", metavar="N", type=int, default=0, help="pack documents of N tokens; 0: none"
    )
