"""The commands of ``tools/bench.py``: which runs are compared, in which order, and how the figures are shown.

Compared runs take turns (A, B, A, B, ...), each in fresh processes with one thread, so that whatever else happens on
the machine meets both. A figure is the median over the repeats and their range; a ratio is that of the medians, its
range that of the ratios of neighbours.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from composer3d.models.llama import counts
from composer3d.recipe.resolve import load
from composer3d.spec import hardware
from composer3d.spec.errors import UserError
from tools.bench import sequence
from tools.bench.jobs import Job, JobError, Result, TitanJob, composer3d_job, measure, plain_job

HERE = Path(__file__).parent
CPU, GPU = HERE / "bench.toml", HERE / "gpu.toml"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Side = Callable[[Path], Sequence[Job]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The same layout twice: as overrides of bench.toml, and as arguments of the peer's bench.sh."""

    sets: tuple[str, ...]
    peer: str
    attention: str = "causal"  # of the peer: its context parallelism needs a mask


# Micro-batches, schedule and what FSDP keeps gathered are alike on both sides: the peer reshards only without pp.
_PP = "--parallelism.pipeline-parallel-degree 2 --parallelism.pipeline-parallel-microbatch-size"
_TP = "--parallelism.tensor-parallel-degree 2"
LAYOUTS = {
    "one": Layout(sets=("data.micro_batch=8",), peer="1 8 1"),
    "fsdp2": Layout(sets=("mesh.dp_shard=2", "data.micro_batch=4"), peer="2 8 2"),
    "tp2": Layout(sets=("mesh.tp=2", "data.micro_batch=8"), peer=f"2 8 1 {_TP}"),
    "pp2": Layout(sets=("mesh.pp=2", "data.micro_batch=2"), peer=f"2 8 1 {_PP} 2"),
    "cp2": Layout(
        sets=("mesh.cp=2", "data.micro_batch=8"),
        peer="2 8 1 --parallelism.context-parallel-degree 2",
        attention="mask",
    ),
    "dp2xtp2": Layout(
        sets=("mesh.dp_shard=2", "mesh.tp=2", "data.micro_batch=4"), peer=f"4 8 2 {_TP}"
    ),
    "dp2xtp2xpp2": Layout(
        sets=("mesh.dp_shard=2", "mesh.tp=2", "mesh.pp=2", "parallel.zero=1", "data.micro_batch=1"),
        peer=f"8 8 2 {_TP} {_PP} 1",
    ),
}
PRECISIONS = {
    "bfloat16": ("precision.compute=bfloat16", "data.micro_batch=4"),
    "float32": ("data.micro_batch=2",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 done, 1 a run failed, 2 the user's input is wrong or the machine cannot do it."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.command(args)
    except UserError as error:
        print(*error.lines, sep="\n", file=sys.stderr)
        return error.status
    except JobError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:  # no such interpreter, no such folder of a peer
        print(f"bench.py {args.command.__name__}: {error}", file=sys.stderr)
        return 2
    return status


def train(args: argparse.Namespace) -> int:
    # The steps of a recipe, and a warmup that may be longer than a bench, give way; what the user sets stays.
    sets = [f"run.steps={args.steps}", "optim.warmup=0", *args.set]
    result = measure(lambda folder: [composer3d_job(args.python, args.recipe, sets, folder)])
    answer = asdict(result)
    del answer["peak_gpu_gib"]
    print(
        json.dumps(answer)
        if args.json
        else "\n".join(f"{key:<24}{value:10.3f}" for key, value in answer.items())
    )
    return 0


def one(args: argparse.Namespace) -> int:
    sets = (*LAYOUTS["one"].sets, *_common(args))
    row = compare(
        "one", {"plain": plain(args, CPU, sets), "composer3d": ours(args, CPU, sets)}, args.repeats
    )
    return report(args, [row])


def layouts(args: argparse.Namespace) -> int:
    half = ("data.global_batch=4", "data.micro_batch=4", *_common(args))

    def ideal(folder: Path) -> list[Job]:
        """Two cores' worth: two runs of one process each, on half of the batch, at the same time."""
        return [job for name in ("first", "second") for job in ours(args, CPU, half)(folder / name)]

    rows = [
        compare(
            name,
            {"ideal": ideal, "composer3d": ours(args, CPU, (*LAYOUTS[name].sets, *_common(args)))},
            args.repeats,
        )
        for name in args.only or [name for name in LAYOUTS if name != "one"]
    ]
    return report(args, rows)


def peers(args: argparse.Namespace) -> int:
    def titan(layout: Layout, folder: Path) -> list[Job]:
        env = {
            "PY": "venv/bin/python",
            "STEPS": str(args.steps),
            "WARM": "3",
            "TMO": "1700",
            "ATTN": layout.attention,
        }
        command = ["bash", "bench.sh", *layout.peer.split()]
        return [
            TitanJob(
                command=command, cwd=args.titan, output=folder / "output", env=env | ONE_THREAD
            )
        ]

    rows = []
    for name in args.only or LAYOUTS:
        layout = LAYOUTS[name]
        sides: dict[str, Side] = {
            "torchtitan": partial(titan, layout),
            "composer3d": ours(args, CPU, (*layout.sets, *_common(args))),
        }
        rows.append(compare(name, sides, args.repeats))
    return report(
        args, rows, torchtitan=_version(str(args.titan / "venv/bin/python"), "torchtitan")
    )


def gpu(args: argparse.Namespace) -> int:
    probe = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    name = subprocess.run(
        [args.python, "-c", probe], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not name:
        raise UserError(
            "bench.py gpu: torch sees no CUDA GPU on this machine; 'one' and 'layouts' run on CPU"
        )
    rows = []
    device = hardware.find(name)
    for precision, choice in PRECISIONS.items():
        sets = (*choice, *_common(args))
        recipe = load(GPU, sets).recipe
        row = compare(
            precision,
            {"plain": plain(args, GPU, sets), "composer3d": ours(args, GPU, sets)},
            args.repeats,
        )
        peak = hardware.peak_flops(device, precision) if device else None
        for side in row.get("sides", {}).values():
            flops = side["tokens_per_s"]["median"] * counts.flops_per_token(
                recipe.model, recipe.data.seq_len
            )
            side["mfu"] = flops / peak if peak else None
        rows.append(row)
    return report(args, rows, gpu=name)


def _common(args: argparse.Namespace) -> tuple[str, ...]:
    return (f"run.steps={args.steps}", *args.set)


def ours(args: argparse.Namespace, recipe: Path, sets: Sequence[str]) -> Side:
    return lambda folder: [_one_thread(composer3d_job(args.python, recipe, sets, folder))]


def plain(args: argparse.Namespace, recipe: Path, sets: Sequence[str]) -> Side:
    return lambda folder: [_one_thread(plain_job(args.python, recipe, sets, folder))]


def _one_thread(job: Job) -> Job:
    job.env |= ONE_THREAD
    return job


def compare(name: str, sides: Mapping[str, Side], repeats: int) -> dict[str, Any]:
    """Run the two ``sides`` in turns: a row of the report, with the second's tokens/s as a ratio of the first's."""
    results: dict[str, list[Result]] = {side: [] for side in sides}
    try:
        for repeat in range(repeats):
            for side, make in sides.items():
                results[side].append(measure(make))
                print(
                    f"{name} {side} {repeat + 1}/{repeats}: {results[side][-1].tokens_per_s:.0f}",
                    file=sys.stderr,
                )
    except (JobError, UserError) as error:
        return {"name": name, "error": str(error)}
    base, other = ([result.tokens_per_s for result in each] for each in results.values())
    ratio = spread([b / a for a, b in zip(base, other, strict=True)])
    ratio["median"] = statistics.median(other) / statistics.median(base)
    figures = {
        side: {
            entry.name: spread([getattr(result, entry.name) for result in each])
            for entry in fields(Result)
            if getattr(each[0], entry.name) is not None
        }
        for side, each in results.items()
    }
    return {"name": name, "ratio": ratio, "sides": figures}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(args: argparse.Namespace, rows: list[dict[str, Any]], **more: str) -> int:
    """Print the machine and the rows; 1 where a run failed or was refused."""
    about = {
        "date": datetime.date.today().isoformat(),
        **machine(),
        "torch": _version(args.python, "torch"),
        **more,
    }
    about |= {"repeats": args.repeats, "steps": args.steps}
    if args.json:
        print(json.dumps(about | {"rows": rows}))
    else:
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        print(
            "| run | side | tokens/s (range) | step s | launch to step 1, s | peak GiB | MFU | ratio (range) |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for row in rows:
            print("\n".join(_lines(row)))
    return 1 if any("error" in row for row in rows) else 0


def _lines(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [f"| {row['name']} | failed: {row['error'].splitlines()[0]} |"]
    lines: list[str] = []
    for side, figures in row["sides"].items():
        speed, memory = (
            figures["tokens_per_s"],
            figures.get("peak_gpu_gib", figures["peak_rss_gib"]),
        )
        ratio = "{median:.3f} ({min:.3f}..{max:.3f})".format(**row["ratio"]) if lines else ""
        cells = (
            row["name"],
            side,
            f"{speed['median']:.0f} ({speed['min']:.0f}..{speed['max']:.0f})",
            f"{figures['step_s']['median']:.3f}",
            f"{figures['launch_to_first_step_s']['median']:.1f}",
            f"{memory['median']:.2f}",
            f"{figures['mfu']:.1%}" if figures.get("mfu") else "",
            ratio,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        match = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        model = match[1] if match else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory)}


def _version(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.py", description="Measures composer3d against what it should reach."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(command: Callable[[argparse.Namespace], int], does: str) -> argparse.ArgumentParser:
        new = commands.add_parser(command.__name__, help=does, description=does)
        new.set_defaults(command=command)
        new.add_argument(
            "--json", action="store_true", help="print one JSON object as the last line"
        )
        new.add_argument(
            "--set", metavar="TABLE.KEY=VALUE", action="append", default=[], help="override a value"
        )
        new.add_argument(
            "--steps",
            metavar="N",
            type=_count,
            default=12,
            help="steps of a run, the first 3 untimed",
        )
        new.add_argument(
            "--python",
            metavar="PATH",
            default=sys.executable,
            help="interpreter that runs composer3d",
        )
        if command is not train:
            new.add_argument(
                "--repeats", metavar="N", type=_count, default=5, help="runs of each side"
            )
        return new

    add(train, "measure a recipe").add_argument("recipe", metavar="RECIPE", type=Path)
    add(one, "one process against the hand-written loop of plain.py")
    names: dict[str, Any] = {
        "metavar": "NAME,...",
        "type": _names,
        "help": f"of {', '.join(LAYOUTS)}",
    }
    add(layouts, "each layout against two single processes that share the batch").add_argument(
        "--only", **names
    )
    peer = add(peers, "each layout against torchtitan")
    peer.add_argument("--only", **names)
    peer.add_argument(
        "--titan", metavar="DIR", type=Path, required=True, help="folder with bench.sh and venv/"
    )
    sequence.arguments(add(sequence.cp, "attention of one sequence over ranks against one process"))
    add(gpu, "bfloat16 and float32 on one GPU against the hand-written loop")
    return parser


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _names(text: str) -> list[str]:
    names = text.split(",")
    wrong = [name for name in names if name not in LAYOUTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: use {', '.join(LAYOUTS)}")
    return names
