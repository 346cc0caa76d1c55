"""The commands of ``python -m tools.bench``: the runs that they compare, and the report.

Compared runs take turns (A, B, A, B, ...), each in fresh processes with one thread, so that other
load of the machine affects both. A figure is the median over the repeats, with its range. A ratio
is that of the medians, with the range of the ratios of neighbouring runs.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from composer3d.facts import hardware
from composer3d.facts.errors import UserError
from composer3d.planner.predict import model_flops_per_token
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tools.bench import (
    experts,
    generation,
    layers,
    operators,
    optimizers,
    quickstarts,
    sequence,
    shards,
    states,
    stores,
    tokenizing,
    watching,
)
from tools.bench import host as launches
from tools.bench.jobs import (
    CPU_RECIPE,
    ONE_THREAD,
    Job,
    JobError,
    Result,
    TitanJob,
    composer3d_job,
    measure,
    plain_job,
)
from tools.bench.tables import print_head, print_row, ratio_with_range

HERE = Path(__file__).parent
MOE_RECIPE = HERE / "moe.toml"
GPU_RECIPE = HERE / "gpu.toml"

# Adds options to the parser of a command.
Options = Callable[[argparse.ArgumentParser], None]

# One side of a comparison: makes the jobs of one run, with their files in an empty folder.
Side = Callable[[Path], Sequence[Job]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout, written for both sides.

    Attributes:
        sets: overrides of bench.toml.
        peer: arguments of the peer's bench.sh: processes, batch, batch ranks, and flags.
        attention: of the peer; its context parallelism needs a mask.
    """

    sets: tuple[str, ...]
    peer: str
    attention: str = "causal"


# Both sides have the same micro-batches, schedule and resharding. The peer reshards only without
# pp, hence zero = 1 for the layout with both dp and pp.
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
    """Run one command.

    Returns:
        0; 1 if a run failed; 2 if the user's input is wrong or the machine cannot run it.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.command(args)
    except UserError as error:
        print(*error.lines, sep="\n", file=sys.stderr)
        return error.status
    except JobError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:  # for example, there is no such interpreter or folder of a peer
        print(f"bench {args.command.__name__}: {error}", file=sys.stderr)
        return 2
    return status


def train(args: argparse.Namespace) -> int:
    """Measure one run of a recipe."""
    # These replace the recipe's steps, and a warmup that may be longer than the run. The user's own
    # overrides come last and win.
    sets = [f"run.steps={args.steps}", "optim.warmup=0", *args.set]
    result = measure(lambda folder: [composer3d_job(args.python, args.recipe, sets, folder)])
    figures = asdict(result)
    del figures["peak_gpu_gib"]
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<24}{value:10.3f}")
    return 0


def one(args: argparse.Namespace) -> int:
    """Compare one process with the hand-written loop."""
    sets = LAYOUTS["one"].sets
    sides = {"plain": plain(args, CPU_RECIPE, sets), "composer3d": ours(args, CPU_RECIPE, sets)}
    return report(args, [compare("one", sides, args.repeats)])


def layouts(args: argparse.Namespace) -> int:
    """Compare each layout with the ideal for two cores."""
    two_halves = ideal(args, CPU_RECIPE)

    def sides(layout: Layout) -> dict[str, Side]:
        return {"ideal": two_halves, "composer3d": ours(args, CPU_RECIPE, layout.sets)}

    names = [name for name in LAYOUTS if name != "one"]
    return report(args, compare_layouts(args, names, sides))


def trees(args: argparse.Namespace) -> int:
    """Compare each layout with the composer3d of another checkout."""

    def sides(layout: Layout) -> dict[str, Side]:
        side = ours(args, CPU_RECIPE, layout.sets)
        return {
            "other": _in_folder(side, args.other),
            "this": _in_folder(side, HERE.parents[1]),
        }

    return report(args, compare_layouts(args, LAYOUTS, sides))


def watches(args: argparse.Namespace) -> int:
    """Compare each layout that watches its ranks and its steps with the same without."""
    found = []
    with Pool() as pool:
        for name in args.only or LAYOUTS:
            sets = (*LAYOUTS[name].sets, *args.set)
            found.append(watching.measure(pool, str(CPU_RECIPE), name, sets, args.steps))
    if args.json:
        rows = [{**row._asdict(), "ratio": row.ratio} for row in found]
        print(json.dumps({"torch": _version(sys.executable, "torch"), "rows": rows}))
        return 0
    print_head("layout", "unwatched, ms", "watched, ms", "ratio")
    for row in found:
        medians = [statistics.median(side) for side in (row.unwatched_ms, row.watched_ms)]
        print_row(row.name, *(f"{ms:.1f}" for ms in medians), f"{row.ratio:.4f}")
    return 0


def _in_folder(side: Side, folder: Path) -> Side:
    """A side whose jobs run in ``folder``: ``python -m composer3d`` takes the composer3d there."""

    def make_jobs(output: Path) -> Sequence[Job]:
        jobs = side(output)
        for job in jobs:
            job.cwd = folder
        return jobs

    return make_jobs


def moe(args: argparse.Namespace) -> int:
    """Compare a model with experts on one process with its dense twin, and on two with the ideal.

    The ideal is that of ``ideal``.
    """
    sets = LAYOUTS["one"].sets
    dense_and_moe = {"dense": ours(args, CPU_RECIPE, sets), "moe": ours(args, MOE_RECIPE, sets)}
    rows = [compare("one", dense_and_moe, args.repeats)]
    two_halves = ideal(args, MOE_RECIPE)
    for ep in (1, 2):
        layout = ("mesh.dp_shard=2", f"mesh.ep={ep}", "data.micro_batch=4")
        sides = {"ideal": two_halves, "composer3d": ours(args, MOE_RECIPE, layout)}
        rows.append(compare(f"dp_shard 2, ep {ep}", sides, args.repeats))
    status = report(args, rows)
    experts.report_parts()
    return status


def muon(args: argparse.Namespace) -> int:
    """Compare each layout with Muon with the same layout with AdamW."""

    def sides(layout: Layout) -> dict[str, Side]:
        return {
            "adamw": ours(args, CPU_RECIPE, layout.sets),
            "muon": ours(args, CPU_RECIPE, (*layout.sets, "optim.name=muon")),
        }

    return report(args, compare_layouts(args, ("one", "fsdp2", "dp2xtp2"), sides))


def steps(args: argparse.Namespace) -> int:
    """Measure the validation loss of Muon in three quarters of AdamW's steps."""
    optimizers.report(args.python)
    return 0


def learning(args: argparse.Namespace) -> int:
    """Measure how evenly experts are used, and their validation loss beside a dense model's."""
    quickstarts.report_balance(args.python)
    quickstarts.report_losses(args.python)
    return 0


def peers(args: argparse.Namespace) -> int:
    """Compare each layout with torchtitan."""

    def sides(layout: Layout) -> dict[str, Side]:
        return {
            "torchtitan": titan(args, layout),
            "composer3d": ours(args, CPU_RECIPE, layout.sets),
        }

    rows = compare_layouts(args, LAYOUTS, sides)
    titan_version = _version(str(args.titan / "venv/bin/python"), "torchtitan")
    return report(args, rows, torchtitan=titan_version)


def host(args: argparse.Namespace) -> int:
    """Compare the time in which the host launches a step with the hand-written loop's.

    With ``--titan``, also with torchtitan's.
    """
    found = launches.rows(
        str(CPU_RECIPE),
        names=args.only or list(launches.LAYOUTS),
        steps=args.steps,
        repeats=args.repeats,
        titan=args.titan,
    )
    if args.json:
        rows = [row._asdict() for row in found]
        print(json.dumps({"torch": _version(sys.executable, "torch"), "rows": rows}))
        return 0
    peers = ("plain",) if args.titan is None else ("plain", "torchtitan")
    sides = (*peers, "composer3d")
    print_head("layout", *(f"{side}, ms" for side in sides), *(f"of {peer}" for peer in peers))
    for row in found:
        turns = {"plain": row.plain_ms, "torchtitan": row.titan_ms, "composer3d": row.ours_ms}
        medians = [f"{statistics.median(turns[side]):.1f}" for side in sides]
        ratios = [ratio_with_range(row.ours_ms, turns[peer]) for peer in peers]
        print_row(row.name, *medians, *ratios)
    return 0


def gpu(args: argparse.Namespace) -> int:
    """Compare one GPU with the hand-written loop, in each precision."""
    probe = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    result = subprocess.run([args.python, "-c", probe], capture_output=True, text=True, check=True)
    gpu_name = result.stdout.strip()
    if not gpu_name:
        raise UserError(
            "bench gpu: torch sees no CUDA GPU on this machine; 'one' and 'layouts' run on CPU"
        )
    device = hardware.find(gpu_name)
    rows = []
    for precision, precision_sets in PRECISIONS.items():
        recipe = load(GPU_RECIPE, _with_common_sets(args, precision_sets)).recipe
        sides = {
            "plain": plain(args, GPU_RECIPE, precision_sets),
            "composer3d": ours(args, GPU_RECIPE, precision_sets),
        }
        row = compare(precision, sides, args.repeats)
        flops_per_token = model_flops_per_token(recipe)
        peak_flops = hardware.peak_flops(device, precision) if device else None
        for figures in row.get("sides", {}).values():
            flops = figures["tokens_per_s"]["median"] * flops_per_token
            figures["mfu"] = flops / peak_flops if peak_flops else None
        rows.append(row)
    return report(args, rows, gpu=gpu_name)


def _with_common_sets(args: argparse.Namespace, sets: Sequence[str]) -> tuple[str, ...]:
    return (*sets, f"run.steps={args.steps}", *args.set)


def ours(args: argparse.Namespace, recipe: Path, sets: Sequence[str]) -> Side:
    """``composer3d train`` on a recipe."""
    sets = _with_common_sets(args, sets)
    return lambda folder: [_on_one_thread(composer3d_job(args.python, recipe, sets, folder))]


def plain(args: argparse.Namespace, recipe: Path, sets: Sequence[str]) -> Side:
    """The hand-written loop with the sizes of a recipe."""
    sets = _with_common_sets(args, sets)
    return lambda folder: [_on_one_thread(plain_job(args.python, recipe, sets, folder))]


def ideal(args: argparse.Namespace, recipe: Path) -> Side:
    """The ideal for two cores: two processes at the same time, each on half of the batch."""
    half_batch = ours(args, recipe, ("data.global_batch=4", "data.micro_batch=4"))
    return lambda folder: [*half_batch(folder / "first"), *half_batch(folder / "second")]


def titan(args: argparse.Namespace, layout: Layout) -> Side:
    """torchtitan on a layout, through its ``bench.sh``."""
    env = {
        "PY": "venv/bin/python",
        "STEPS": str(args.steps),
        "WARM": "3",
        "TMO": "1700",
        "ATTN": layout.attention,
    }
    command = ["bash", "bench.sh", *layout.peer.split()]

    def make_jobs(folder: Path) -> list[Job]:
        job = TitanJob(command=command, cwd=args.titan, output=folder / "output", env=dict(env))
        return [_on_one_thread(job)]

    return make_jobs


def _on_one_thread(job: Job) -> Job:
    job.env |= ONE_THREAD
    return job


def compare_layouts(
    args: argparse.Namespace, names: Iterable[str], sides: Callable[[Layout], Mapping[str, Side]]
) -> list[dict[str, Any]]:
    """Run two sides of each layout that the user names, or of ``names``; return their rows."""
    return [compare(name, sides(LAYOUTS[name]), args.repeats) for name in args.only or names]


def compare(name: str, sides: Mapping[str, Side], repeats: int) -> dict[str, Any]:
    """Run two sides in turns.

    Returns:
        A row of the report: the figures of each side, and the tokens/s of the second side as a
        ratio of the first side's. If a run failed, only the error.
    """
    results: dict[str, list[Result]] = {side: [] for side in sides}
    try:
        for repeat in range(1, repeats + 1):
            for side, make_jobs in sides.items():
                result = measure(make_jobs)
                results[side].append(result)
                print(
                    f"{name} {side} {repeat}/{repeats}: {result.tokens_per_s:.0f}", file=sys.stderr
                )
    except (JobError, UserError) as error:
        return {"name": name, "error": str(error)}

    base, other = (
        [result.tokens_per_s for result in side_results] for side_results in results.values()
    )
    ratio = spread([b / a for a, b in zip(base, other, strict=True)])
    ratio["median"] = statistics.median(other) / statistics.median(base)
    figures = {side: _figures(side_results) for side, side_results in results.items()}
    return {"name": name, "ratio": ratio, "sides": figures}


def _figures(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """The median and range of each figure that the results have."""
    figures = {}
    for field in fields(Result):
        values = [getattr(result, field.name) for result in results]
        if values[0] is not None:
            figures[field.name] = spread(values)
    return figures


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(args: argparse.Namespace, rows: list[dict[str, Any]], **versions: str) -> int:
    """Print the machine and the rows; return 1 if a run failed or was refused, else 0."""
    about = {
        "date": datetime.date.today().isoformat(),
        **machine(),
        "torch": _version(args.python, "torch"),
        **versions,
        "repeats": args.repeats,
        "steps": args.steps,
    }
    if args.json:
        print(json.dumps(about | {"rows": rows}))
    else:
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        columns = "run; side; tokens/s (range); step s; launch to step 1, s; peak GiB; MFU"
        print_head(*columns.split("; "), "ratio (range)")
        for row in rows:
            _print_sides(row)
    return 1 if any("error" in row for row in rows) else 0


def _print_sides(row: dict[str, Any]) -> None:
    """Print a line for each side of a row, the last one with the ratio."""
    if "error" in row:
        print_row(row["name"], f"failed: {row['error'].splitlines()[0]}")
        return
    ratio = ""
    for side, figures in row["sides"].items():
        speed = figures["tokens_per_s"]
        memory = figures.get("peak_gpu_gib", figures["peak_rss_gib"])
        print_row(
            row["name"],
            side,
            f"{speed['median']:.0f} ({speed['min']:.0f}..{speed['max']:.0f})",
            f"{figures['step_s']['median']:.3f}",
            f"{figures['launch_to_first_step_s']['median']:.1f}",
            f"{memory['median']:.2f}",
            f"{figures['mfu']:.1%}" if figures.get("mfu") else "",
            ratio,
        )
        ratio = "{median:.3f} ({min:.3f}..{max:.3f})".format(**row["ratio"])


def machine() -> dict[str, Any]:
    """The processor, the number of its cores, and the memory."""
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
        prog="python -m tools.bench",
        description="Measure composer3d, and compare it with other programs.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add_plain_command(
        command: Callable[[argparse.Namespace], int], description: str, *options: Options
    ) -> argparse.ArgumentParser:
        new = commands.add_parser(command.__name__, help=description, description=description)
        new.set_defaults(command=command)
        new.add_argument(
            "--python",
            metavar="PATH",
            default=sys.executable,
            help="interpreter that runs composer3d",
        )
        for add_option in options:
            add_option(new)
        return new

    def add_command(
        command: Callable[[argparse.Namespace], int], description: str, *options: Options
    ) -> argparse.ArgumentParser:
        new = add_plain_command(command, description, add_json, *options)
        new.add_argument(
            "--set", metavar="TABLE.KEY=VALUE", action="append", default=[], help="override a value"
        )
        new.add_argument(
            "--steps",
            metavar="N",
            type=_count,
            default=12,
            help="steps of a run; the first 3 are not timed",
        )
        return new

    def add_json(command_parser: argparse.ArgumentParser) -> None:
        command_parser.add_argument(
            "--json", action="store_true", help="print one JSON object as the last line"
        )

    def add_repeats(command_parser: argparse.ArgumentParser) -> None:
        command_parser.add_argument(
            "--repeats", metavar="N", type=_count, default=5, help="runs of each side"
        )

    def add_only(
        command_parser: argparse.ArgumentParser, names: Iterable[str] = tuple(LAYOUTS)
    ) -> None:
        command_parser.add_argument(
            "--only",
            metavar="NAME,...",
            type=partial(_names, layouts=names),
            help=f"layouts, of {', '.join(names)}",
        )

    train_parser = add_command(train, "measure a recipe")
    train_parser.add_argument("recipe", metavar="RECIPE", type=Path)
    add_command(one, "one process against the hand-written loop of plain.py", add_repeats)
    add_command(
        layouts,
        "each layout against two single processes that share the batch",
        add_repeats,
        add_only,
    )
    trees_parser = add_command(
        trees, "each layout against the composer3d of another checkout", add_repeats, add_only
    )
    trees_parser.add_argument(
        "--other", metavar="DIR", type=Path, required=True, help="root of the other checkout"
    )
    add_command(
        watches, "each layout that watches its ranks and steps against the same without", add_only
    )
    add_command(moe, "a model with experts against its dense twin, and ep 2", add_repeats)
    add_command(muon, "each layout with Muon against the same with AdamW", add_repeats, add_only)

    add_plain_command(steps, "the loss of Muon in three quarters of the steps, against AdamW's")
    states_parser = commands.add_parser(
        "states", help="torchao's AdamW with small states: does a cut of the matrix change it?"
    )
    states_parser.set_defaults(command=states.states)
    add_plain_command(learning, "the load of experts, and their loss beside a dense model's")

    peers_parser = add_command(peers, "each layout against torchtitan", add_repeats, add_only)
    peers_parser.add_argument(
        "--titan", metavar="DIR", type=Path, required=True, help="folder with bench.sh and venv/"
    )
    host_parser = add_command(
        host,
        "the time in which the host launches a step, on a fake world",
        add_repeats,
        partial(add_only, names=launches.LAYOUTS),
    )
    host_parser.add_argument(
        "--titan",
        metavar="DIR",
        type=Path,
        help="folder with titan_cpu.py and venv/: torchtitan too",
    )

    layers_parser = commands.add_parser(
        "layers", help="what the host launches for one layer, eagerly and compiled"
    )
    layers_parser.set_defaults(command=layers.layers)
    counts_parser = commands.add_parser(
        "counts", help="what a rank launches, copies, waits for and sends in a step"
    )
    counts_parser.set_defaults(command=operators.counts)
    operators.add_arguments(counts_parser)
    add_command(
        sequence.cp,
        "attention of one sequence over ranks against one process",
        add_repeats,
        sequence.add_arguments,
    )
    add_plain_command(
        generation.generate,
        "tokens/s of generation against transformers",
        generation.add_arguments,
    )
    prepare_parser = add_plain_command(
        tokenizing.prepare,
        "the rate of prepare against the tokenizers library's own batch rate",
        add_repeats,
        add_json,
    )
    prepare_parser.add_argument(
        "--copies", metavar="N", type=_count, default=2, help="copies of the text; default: 2"
    )
    start_parser = add_plain_command(
        shards.start,
        "the start of a training on many shards against the start on one",
        add_repeats,
        add_json,
    )
    start_parser.add_argument(
        "--shards", metavar="N", type=_count, default=1000, help="shards; default: 1,000"
    )
    store_parser = add_plain_command(
        stores.store,
        "token files in an object store against the same on a disk: the start, and the steps",
        add_repeats,
        add_json,
    )
    store_parser.add_argument(
        "--shards", metavar="N", type=_count, default=1000, help="shards; default: 1,000"
    )
    store_parser.add_argument(
        "--steps", metavar="N", type=_count, default=25, help="steps of each side; default: 25"
    )
    store_parser.add_argument(
        "--url", metavar="URL", help="a folder of your own; default: a local server, for tests"
    )
    add_command(gpu, "bfloat16 and float32 on one GPU against the hand-written loop", add_repeats)
    return parser


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _names(text: str, layouts: Iterable[str]) -> list[str]:
    names = text.split(",")
    wrong = [name for name in names if name not in layouts]
    if wrong:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: use {', '.join(layouts)}")
    return names
