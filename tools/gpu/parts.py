"""The parts: what each measures, and how. Each returns figures that are JSON.

A part runs on the GPU, or for a rehearsal on the CPU with tiny sizes. Times are medians over
repeats; a repeat is timed by events of the device, so that the host's own time does not count.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.gpu import layouts, old_torch, traces
from tools.prove.paths import ROOT

HERE = Path(__file__).parent


class Part(NamedTuple):
    """A part.

    Attributes:
        what: what it shows.
        seconds: how long it is expected to take on an H100.
        run: measures; its argument is whether it is a rehearsal.
    """

    what: str
    seconds: float
    run: Callable[[bool], dict[str, Any]]


def _device(rehearse: bool) -> torch.device:
    if not rehearse and not torch.cuda.is_available():
        raise SystemExit("tools.gpu: torch sees no CUDA GPU here; --rehearse runs on the CPU")
    return torch.device("cpu" if rehearse else "cuda")


def _time_of(function: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the median seconds of a call. The first three calls do not count."""
    times = []
    for number in range(3 + repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
        if number >= 3:
            times.append(seconds)
    return statistics.median(times)


def _python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process of its own, in which torch has the names that it lacks."""
    begin = "import sys; from tools.gpu import old_torch; old_torch.add_missing_names(); "
    command = [sys.executable, "-c", begin + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# --- machine ---


def _machine(rehearse: bool) -> dict[str, Any]:
    """The card, its software, and the rates of products and of memory."""
    device = _device(rehearse)
    figures: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    figures["cpu"] = os.cpu_count()
    if not rehearse:
        fields = "name,driver_version,memory.total,power.limit,clocks.max.sm"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        shown = dict(zip(fields.split(","), answer.strip().split(", "), strict=False))
        figures |= {name.replace(".", "_"): value for name, value in shown.items()}
        figures["cuda"], figures["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    size = 256 if rehearse else 8192
    rates: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        rates[str(dtype)] = 2 * size**3 / _time_of(partial(torch.matmul, a, b), device)
    if not rehearse and torch.cuda.get_device_capability() >= (8, 9):
        rates["float8_e4m3fn, a scale for each row"] = (
            2 * size**3 / _time_of(_float8_product(size, device), device)
        )
    figures["products_tflops"] = {name: rate / 1e12 for name, rate in rates.items()}
    x = torch.empty(2**20 if rehearse else 2**30, dtype=torch.uint8, device=device)
    figures["memory_gb_s"] = 2 * x.numel() / _time_of(lambda: x.clone(), device) / 1e9
    return figures


def _float8_product(size: int, device: torch.device) -> Callable[[], Tensor]:
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones(size, 1, device=device)
    return lambda: torch._scaled_mm(
        a, a.t(), scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


# --- tests ---


def _tests(rehearse: bool) -> dict[str, Any]:
    """The tests that need a GPU."""
    _device(rehearse)
    tests = ("tests/parallel/context", "tests/models/layers", "tests/test_gpu.py")
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider")
    done = _python("import pytest; sys.exit(pytest.main(sys.argv[1:]))", *options, *tests)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"summary": lines[-1] if lines else done.stderr[-500:], "failed": failed[:40]}


# --- attention ---


def _attention(rehearse: bool) -> dict[str, Any]:
    """Time, rate and error of each kernel of attention, with the heads of Llama 3 8B."""
    old_torch.add_missing_names()
    from composer3d.models.layers.attention import sdpa
    from composer3d.parallel.context.kernels import attend_block
    from composer3d.parallel.context.ring import attend_over_ring

    device = _device(rehearse)
    heads, kv_heads, width = (4, 2, 16) if rehearse else (32, 8, 128)
    dtype = torch.float32 if rehearse else torch.bfloat16
    tokens = 64 if rehearse else 8192
    window = tokens // 8
    documents = (torch.arange(tokens) // (tokens // 16))[None]

    def over_ring(q: Tensor, k: Tensor, v: Tensor, documents: Any, window: int) -> Tensor:
        out: Tensor = attend_over_ring(q, k, v, documents, window, "ring", False, "")[0]
        return out

    cases: dict[str, tuple[Callable[..., Tensor], float]] = {
        # With the share of all pairs of a query and a key that it computes.
        "whole sequence": (lambda q, k, v: sdpa(q, k, v), 0.5),
        "block, causal": (lambda q, k, v: attend_block(q, k, v, causal=True)[0], 0.5),
        "block, all keys": (lambda q, k, v: attend_block(q, k, v, causal=False)[0], 1.0),
        "16 documents": (lambda q, k, v: over_ring(q, k, v, documents, 0), 0.5 / 16),
        "window of an eighth": (lambda q, k, v: over_ring(q, k, v, None, window), 0.125),
    }
    rows: dict[str, Any] = {}
    for name, (attend, share) in cases.items():
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, n, tokens, width, device=device, dtype=dtype, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )
        row: dict[str, Any] = {}
        try:
            out = attend(q, k, v)
            flops = 4 * heads * tokens**2 * width * share
            with torch.no_grad():
                forward_s = _time_of(partial(attend, q, k, v), device)
            row["forward_ms"], row["forward_tflops"] = forward_s * 1e3, flops / forward_s / 1e12
            row["kernels"] = _kernels(partial(attend, q, k, v), device)
            row["error"] = _error(out, name, q, k, v, documents, window)
            if out.requires_grad:
                grad = torch.randn_like(out)

                def step(a: Any = attend, x: Any = (q, k, v), grad: Tensor = grad) -> None:
                    a(*x).backward(grad)

                row["step_ms"] = _time_of(step, device) * 1e3
        except (RuntimeError, NotImplementedError) as error:
            row["failed"] = str(error)[:500]
        rows[name] = row
    return {"tokens": tokens, "heads": [heads, kv_heads, width], "rows": rows}


def _kernels(call: Callable[[], object], device: torch.device) -> list[str]:
    """Return the names of the kernels that took most of the time of a call."""
    if device.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda one: -one.device_time_total)
    return [event.key[:120] for event in events[:3]]


def _error(
    out: Tensor, name: str, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int
) -> float:
    """Return the largest difference from float32 scores, of the first head alone."""
    tokens = q.shape[2]
    place = torch.arange(tokens, device=q.device)
    sees = place[:, None] >= place
    if name == "block, all keys":
        sees = torch.ones_like(sees)
    elif name == "16 documents":
        row = documents[0].to(q.device)
        sees &= row[:, None] == row
    elif name.startswith("window"):
        sees &= place[:, None] - place < window
    with torch.no_grad():
        scores = q[0, 0].float() @ k[0, 0].float().mT * q.shape[-1] ** -0.5
        expected = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v[0, 0].float()
        return (out[0, 0].float() - expected).abs().max().item()


# --- grouped products ---


def _grouped(rehearse: bool) -> dict[str, Any]:
    """The product of experts with even, uneven and empty groups beside a loop over them."""
    device = _device(rehearse)
    experts, dim, ffn, rows = (4, 32, 64, 64) if rehearse else (64, 2048, 1408, 32768)
    weight = torch.randn(experts, ffn, dim, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, dim, device=device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    uneven = torch.rand(experts).cumsum(0)
    uneven = (uneven / uneven[-1] * rows).to(torch.int32)
    half_empty = (torch.arange(1, experts + 1) // 2 * 2 * rows // experts).to(torch.int32)
    half_empty[-1] = rows
    even = (torch.arange(1, experts + 1) * rows // experts).to(torch.int32)
    found: dict[str, Any] = {}
    for name, ends in {"even": even, "uneven": uneven, "half are empty": half_empty}.items():
        offsets = ends.to(device)
        sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int32)).tolist()

        def loop(sizes: Sequence[int] = sizes) -> Tensor:
            parts = zip(x.split(list(sizes)), weight, strict=True)
            return torch.cat([part @ matrix.mT for part, matrix in parts])

        def grouped(offsets: Tensor = offsets) -> Tensor:
            out: Tensor = F.grouped_mm(x, weight.mT, offs=offsets)
            return out

        seconds, of_loop = _time_of(grouped, device), _time_of(loop, device)
        found[name] = {
            "tflops": 2 * rows * dim * ffn / seconds / 1e12,
            "of_loop": seconds / of_loop,
            "error": (grouped().float() - loop().float()).abs().max().item(),
        }
    return found


# --- training ---


def _train(recipe: Path, folder: Path, *sets: str) -> list[dict[str, Any]]:
    """Train in this process, as one rank under torchrun, and return the lines of its metrics."""
    old_torch.add_missing_names()
    from composer3d.cli import main

    arguments = [f"--set={one}" for one in (f"run.out_dir={folder}", *sets)]
    status = main(["train", str(recipe), *arguments])
    if status:
        raise SystemExit(f"composer3d train ended with {status}: {recipe} {sets}")
    (metrics,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@contextmanager
def _as_one_rank() -> Iterator[None]:
    """Give the variables that torchrun gives a single process."""
    port = str(20_000 + os.getpid() % 20_000)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(variables, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    yield


def _call(name: str, *arguments: str) -> Any:
    """Call a function of this module in a process of its own, and return what it prints as JSON."""
    code = (
        "import json; from tools.gpu import parts; "
        "print(json.dumps(getattr(parts, sys.argv[1])(*sys.argv[2:])))"
    )
    done = _python(code, name, *arguments)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stdout[-500:] + done.stderr[-1500:]).strip()}
    return json.loads(lines[-1])


def _save_nothing() -> None:
    """Let runs of this process end without a checkpoint: one of 2 billion parameters takes long."""
    old_torch.add_missing_names()
    from composer3d.training.saving import Saver

    Saver.save = lambda *_: None  # type: ignore[method-assign]


# One step of a measured training is profiled, and those after the second of these are measured.
_PROFILED_STEP, _LAST_COLD_STEP = 4, 5


def measured_steps(name: str, recipe: str, *sets: str) -> dict[str, Any]:
    """Train some steps; return the speed and memory beside what ``plan`` says, and the kernels.

    The trace of the profiled step is kept if ``TOOLS_GPU_TRACES`` names a folder.
    """
    _save_nothing()
    profiled = f"metrics.profile_steps=[{_PROFILED_STEP},{_PROFILED_STEP}]"
    with tempfile.TemporaryDirectory() as folder, _as_one_rank():
        rows = _train(Path(recipe), Path(folder), *sets, profiled, "metrics.every=1")
        (trace,) = Path(folder).glob("*/profile/*.json.gz")
        if kept := os.environ.get("TOOLS_GPU_TRACES"):
            Path(kept).mkdir(parents=True, exist_ok=True)
            Path(kept, f"{name}.json.gz").write_bytes(trace.read_bytes())
        kernels = traces.read(trace)
    warm = [row for row in rows if "step_s" in row and row["step"] > _LAST_COLD_STEP]
    figures = {
        "step_s": statistics.median(row["step_s"] for row in warm),
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in warm),
        "mfu": warm[-1]["mfu"],
        "memory_gib": warm[-1]["memory_gib"],
        "loss": warm[-1]["loss"],
    }
    return figures | _planned(recipe, sets) | {"kernels": kernels}


def _planned(recipe: str, sets: Sequence[str]) -> dict[str, Any]:
    from composer3d.facts import hardware
    from composer3d.planner.predict import of_recipe, predict
    from composer3d.recipe.resolve import load

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    device = hardware.find(name)
    if device is None or device.links is None:
        return {}
    prediction = predict(of_recipe(load(recipe, list(sets), check_files=False).recipe, device))
    return {
        "planned_step_s": prediction.time.step_s,
        "planned_gib": prediction.peak_gib,
    }


_TINY = (
    "model.dim=64",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "model.vocab=512",
    "data.seq_len=64",
    "run.device=cpu",
)
_TINY_DENSE = (*_TINY, "model.ffn=128")
_TINY_MOE = (*_TINY, "model.expert_ffn=64", "model.experts=4", "model.experts_per_token=2")

_DENSE_CASES: dict[str, tuple[str, ...]] = {
    "eager": (),
    "compiled": ("compile.enabled=true",),
    "compiled, loss in 8 parts": ("compile.enabled=true", "memory.loss_chunks=8"),
    "compiled, float8": ("compile.enabled=true", "precision.matmul=float8"),
    "compiled, selective": ("compile.enabled=true", "memory.activation_checkpoint=selective"),
    "compiled, muon": ("compile.enabled=true", "optim.name=muon"),
}


def _dense(rehearse: bool) -> dict[str, Any]:
    """Steps of a few layers with the width of Llama 3 8B."""
    _device(rehearse)
    tiny = _TINY_DENSE if rehearse else ()
    # float8 needs a GPU, or emulates; compiling on a CPU takes longer than all the rest.
    cases = _DENSE_CASES if not rehearse else {"eager": (), "compiled": ("memory.loss_chunks=8",)}
    return {
        name: _call("measured_steps", name, str(HERE / "dense.toml"), *tiny, *sets)
        for name, sets in cases.items()
    }


def _experts(rehearse: bool) -> dict[str, Any]:
    """Steps of a model with experts."""
    _device(rehearse)
    tiny = _TINY_MOE if rehearse else ()
    recipe = str(HERE / "experts.toml")
    return {"one rank": _call("measured_steps", "experts", recipe, *tiny)}


def _waits(rehearse: bool) -> dict[str, Any]:
    """How often the host waits for the GPU in a step."""
    _device(rehearse)
    figures: dict[str, Any] = {}
    recipe = str(HERE / "experts.toml")
    for name, other in {"experts": recipe, "dense": str(HERE / "dense.toml")}.items():
        sizes = (_TINY_DENSE if name == "dense" else _TINY_MOE) if rehearse else ()
        few, many = (_call("count_waits", other, f"run.steps={n}", *sizes) for n in (3, 7))
        if "failed" in few or "failed" in many:
            figures[name] = few | many
            continue
        places = {place: (many[place] - few.get(place, 0)) / 4 for place in many}
        waits = {place: count for place, count in places.items() if count}
        figures[name] = {"a step": sum(waits.values()), "by place": waits}
    return figures


def count_waits(recipe: str, *sets: str) -> dict[str, int]:
    """Train, and return how often the host waited at each place.

    ``torch.cuda.set_sync_debug_mode`` warns of each wait.
    """
    _save_nothing()
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        with _as_one_rank():
            _train(Path(recipe), Path(folder), *sets)
    places = [
        f"{one.filename.rpartition('composer3d/')[2]}:{one.lineno}"
        for one in caught
        if "synchroniz" in str(one.message)
    ]
    return {place: places.count(place) for place in sorted(set(places))}


# A checkpoint of 0.4 billion parameters.
_SMALL = ("model.n_layers=4", "model.vocab=32000")


def _run(rehearse: bool) -> dict[str, Any]:
    """A run with the width of Llama 3.2 1B that is stopped and resumed has a whole one's losses."""
    _device(rehearse)
    sizes = ("run.steps=6", *_TINY_DENSE) if rehearse else ("run.steps=60", *_SMALL)
    losses = {
        name: _call("losses_of", *arguments, *sizes)
        for name, arguments in {"whole": ("0",), "resumed": ("3" if rehearse else "30",)}.items()
    }
    first = losses["whole"]
    return {
        "steps": len(first) if isinstance(first, list) else 0,
        "bitwise": losses["whole"] == losses["resumed"],
        "first_loss": first[0] if isinstance(first, list) else first,
        "last_loss": first[-1] if isinstance(first, list) else losses["resumed"],
    }


def losses_of(stop: str, *sets: str) -> list[float]:
    """Train, with a stop after so many steps unless that is 0; return the loss of each step."""
    recipe = ROOT / "tools" / "bench" / "gpu.toml"
    common = (*sets, "run.deterministic=true", "optim.warmup=2", "metrics.every=1")
    with tempfile.TemporaryDirectory() as folder, _as_one_rank():
        if int(stop):
            steps = next(one for one in sets if one.startswith("run.steps="))
            decay = f"optim.decay={steps.partition('=')[2]}"
            _train(recipe, Path(folder), *common, decay, f"run.steps={stop}")
            rows = _train(recipe, Path(folder), *common, decay)
        else:
            rows = _train(recipe, Path(folder), *common)
    return [row["loss"] for row in rows if "loss" in row]


def _host(rehearse: bool) -> dict[str, Any]:
    """The time in which the host of this machine launches a step."""
    code = "from tools.bench.__main__ import main; sys.exit(main())"
    done = _python(code, "host", "--only", "one", "--repeats", "1")
    rows = re.findall(r"^\| (?:one|fsdp).*$", done.stdout, re.MULTILINE)
    return {"rows": rows} if rows else {"failed": (done.stdout + done.stderr)[-800:]}


PARTS: dict[str, Part] = {
    "machine": Part("the card, its software and its rates", 25, _machine),
    "attention": Part("kernels of attention: time, rate and error", 40, _attention),
    "grouped": Part("grouped products of experts, with empty groups", 20, _grouped),
    "dense": Part("steps with the width of an 8B model, beside plan", 200, _dense),
    "experts": Part("steps with experts", 40, _experts),
    "waits": Part("how often the host waits for the GPU in a step", 60, _waits),
    "layouts": Part("values of layouts whose ranks share the card", 120, layouts.prove),
    "tests": Part("the tests that need a GPU", 120, _tests),
    "run": Part("a stopped and resumed run, bitwise", 60, _run),
    "host": Part("the time in which the host launches a step", 60, _host),
}
