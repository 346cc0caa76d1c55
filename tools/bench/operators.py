"""The command ``counts``: what a rank launches, copies, waits for and sends in a step.

It runs steps on CUDA tensors without data, so it needs no GPU, and nothing is timed. The numbers
are the same on every machine.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from composer3d.facts.errors import UserError
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tools.bench.tables import print_head, print_row
from tools.fake_cuda import device
from tools.fake_cuda.counts import (
    Job,
    Phase,
    Seen,
    launched_by_more_blocks,
    run_one_of,
    with_more_blocks,
)

HERE = Path(__file__).parent
MIB = 2**20

# Of every layout. A layer launches as many operators whatever its sizes are.
SETS = ("model.n_layers=4",)

_BF16 = "precision.compute=bfloat16"
_FSDP = ("mesh.dp_shard=2", "data.micro_batch=4", _BF16)
_CP = ("mesh.cp=2", "data.micro_batch=8", _BF16)
_DOCUMENTS = "data.packing=documents"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": ("data.micro_batch=8",),
    "one, bf16": ("data.micro_batch=8", _BF16),
    "fsdp2": _FSDP,
    "fsdp2, documents": (*_FSDP, _DOCUMENTS),
    "fsdp2, window": (*_FSDP, "model.window=128"),
    "fsdp2, selective": (*_FSDP, "memory.activation_checkpoint=selective"),
    "fsdp2, full": (*_FSDP, "memory.activation_checkpoint=full"),
    "fsdp2, offload": (*_FSDP, "memory.cpu_offload=true"),
    "hsdp2x2": ("mesh.dp_replicate=2", "mesh.dp_shard=2", "data.micro_batch=2", _BF16),
    "dp2xtp2": ("mesh.dp_shard=2", "mesh.tp=2", "data.micro_batch=4", _BF16),
    "pp2": ("mesh.pp=2", "data.micro_batch=2"),
    "pp2 ZBV": ("mesh.pp=2", "data.micro_batch=2", "parallel.schedule=ZBVZeroBubble"),
    "cp2 ring": _CP,
    "cp2 ring, documents": (*_CP, _DOCUMENTS),
    "cp2 allgather": (*_CP, "parallel.cp_method=allgather"),
    "cp2 ulysses": (*_CP, "parallel.cp_method=ulysses"),
    "experts, ep1": ("mesh.dp_shard=2", "data.micro_batch=4", _BF16),
    "experts, ep2": ("mesh.dp_shard=2", "mesh.ep=2", "data.micro_batch=4", _BF16),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``counts``. Layouts are separated by ";", as their names have commas."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--only", metavar="NAME;...", type=_names, default=list(LAYOUTS))


def counts(args: argparse.Namespace) -> int:
    """Print a row for each layout: what its first rank does."""
    if device.compiler() is None:
        raise UserError("bench counts: it compiles a few lines of C++; install a C++ compiler")
    rows: dict[str, dict[str, Any]] = {}
    print(f"torch {torch.__version__}")
    print_head(
        *("layout", "operators a layer, forward", "backward", "copies to the device"),
        *("to the host", "waits of the host", "collectives of a step"),
    )
    with tempfile.TemporaryDirectory() as folder, Pool() as pool:
        library = device.build(Path(folder))
        for name in args.only:
            row = rows[name] = measure(pool, library, name)
            operators = (f"{row[phase]:.4g}" for phase in ("forward", "backward"))
            others = (row[key] for key in ("to_device", "to_host", "waits"))
            print_row(name, *operators, *others, describe(row["traffic"]))
    if args.json:
        print(json.dumps({"torch": torch.__version__, "rows": rows}))
    return 0


def measure(pool: Pool, library: Path, name: str) -> dict[str, Any]:
    """Run the first rank of a layout, and of a deeper model. Operators are those of a micro-batch.

    Args:
        library: from ``device.build``.
        name: of ``LAYOUTS``.
    """
    base = HERE / ("moe.toml" if name.startswith("experts") else "bench.toml")
    recipe = load(base, [*SETS, *LAYOUTS[name]], check_files=False).recipe
    deeper, blocks = with_more_blocks(recipe)
    arguments = {"jobs": [Job(recipe), Job(deeper)], "library": library}
    seen: list[Seen] = pool.run(run_one_of, arguments, world_size=2)
    launched = launched_by_more_blocks(*seen)
    step, traffic = seen[0].step, seen[0].traffic
    times = blocks * recipe.micro_batches
    return {
        "forward": launched[Phase.FORWARD].total() / times,
        "backward": launched[Phase.BACKWARD].total() / times,
        "to_device": sum(n for copy, n in step.copies.items() if copy.target == "cuda"),
        "to_host": sum(n for copy, n in step.copies.items() if copy.source == "cuda"),
        "waits": step.waits,
        "traffic": {
            axis: {name: [usage.count, usage.sent_bytes] for name, usage in operations.items()}
            for axis, operations in traffic.items()
        },
    }


def describe(traffic: dict[str, dict[str, list[int]]]) -> str:
    """Return the collectives of each axis, with the bytes that the rank sends."""
    return "; ".join(
        f"{axis}: "
        + ", ".join(
            f"{count} {name} ({sent_bytes / MIB:.2f} MiB)"
            for name, (count, sent_bytes) in operations.items()
        )
        for axis, operations in traffic.items()
    )


def _names(text: str) -> list[str]:
    names = text.split(";")
    wrong = [name for name in names if name not in LAYOUTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"{'; '.join(wrong)}: use {'; '.join(LAYOUTS)}")
    return names
