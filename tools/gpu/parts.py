"""The parts: what each measures, and how. Each returns figures that are JSON.

A part runs on the GPU, or for a rehearsal on the CPU with tiny sizes. ``kernels`` and ``layouts``
have some of them.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tools.gpu import kernels, layouts, traces
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


def _python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process of its own."""
    command = [sys.executable, "-c", f"import sys; {code}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# --- tests ---


def _tests(rehearse: bool) -> dict[str, Any]:
    """The tests that need a GPU."""
    kernels.device_of(rehearse)
    tests = ("tests/parallel/context", "tests/models/layers", "tests/training/observers")
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", "8")
    # Libraries of another machine may warn.
    options = (*options, "-W", "default", "tests/test_gpu.py")
    done = _python("import pytest; sys.exit(pytest.main(sys.argv[1:]))", *options, *tests)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"summary": lines[-1] if lines else done.stderr[-500:], "failed": failed[:40]}


# --- training ---


def _train(recipe: Path, folder: Path, *sets: str) -> list[dict[str, Any]]:
    """Train in this process, as one rank under torchrun, and return the lines of its metrics."""
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
    from composer3d.training.saving import Saver

    Saver.save = lambda *_: None  # type: ignore[method-assign]


# One step of a measured training is profiled, and those after the second of these are measured.
_PROFILED_STEP, _LAST_COLD_STEP = 4, 5


def measured_steps(name: str, recipe: str, *sets: str) -> dict[str, Any]:
    """Train some steps; return the speed, the memory, and what the kernels are for.

    The trace of the profiled step is kept as ``name`` if ``TOOLS_GPU_TRACES`` names a folder.
    """
    _save_nothing()
    to_profile = f"metrics.profile_steps=[{_PROFILED_STEP},{_PROFILED_STEP}]"
    with tempfile.TemporaryDirectory() as folder, _as_one_rank():
        rows = _train(Path(recipe), Path(folder), *sets, to_profile, "metrics.every=1")
        (trace,) = Path(folder).glob("*/profile/*.json.gz")
        if kept := os.environ.get("TOOLS_GPU_TRACES"):
            Path(kept).mkdir(parents=True, exist_ok=True)
            Path(kept, f"{name}.json.gz").write_bytes(trace.read_bytes())
        profiled = traces.read(trace)
    warm = [row for row in rows if "step_s" in row and row["step"] > _LAST_COLD_STEP]
    figures = {
        "step_s": statistics.median(row["step_s"] for row in warm),
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in warm),
        "mfu": warm[-1]["mfu"],
        "memory_gib": warm[-1]["memory_gib"],
        "losses": [round(row["loss"], 4) for row in rows if "loss" in row],
    }
    return figures | {"profiled": profiled}


def planned(part: str, case: str, device_name: str) -> dict[str, float]:
    """Return what ``plan`` says of a case of a part on a device; nothing if it has no plan.

    Args:
        part: a key of ``PARTS``.
        case: a row of its figures.
        device_name: as CUDA gives it.
    """
    from composer3d.facts import hardware
    from composer3d.planner.predict import of_recipe, predict
    from composer3d.recipe.resolve import load

    device, sets = hardware.find(device_name), _CASES.get(part, {}).get(case)
    if device is None or sets is None:
        return {}
    recipe = load(str(HERE / f"{part}.toml"), list(sets), check_files=False).recipe
    prediction = predict(of_recipe(recipe, device))
    return {"planned_step_s": prediction.time.step_s, "planned_gib": prediction.peak_gib}


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


# The overrides of each row, by part. The recipe is that of the part.
_CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "dense": {
        "eager": (),
        "compiled": ("compile.enabled=true",),
        "compiled, loss in 8 parts": ("compile.enabled=true", "memory.loss_chunks=8"),
        "compiled, float8": ("compile.enabled=true", "precision.matmul=float8"),
        "compiled, selective": ("compile.enabled=true", "memory.activation_checkpoint=selective"),
        "compiled, zero 2": ("compile.enabled=true", "parallel.zero=2"),
        "compiled, zero 1": ("compile.enabled=true", "parallel.zero=1"),
        "compiled, muon": ("compile.enabled=true", "optim.name=muon"),
    },
    "experts": {
        "eager": (),
        "compiled": ("compile.enabled=true",),
        "compiled, float8": ("compile.enabled=true", "precision.matmul=float8"),
        "recomputed": ("memory.activation_checkpoint=full",),
    },
    "models": {
        "DeepSeek-V2-Lite, 4 layers": (
            *layouts.sets_of("deepseek", "deepseek-v2-lite"),
            "model.n_layers=4",
        ),
        "Moonlight with a token ahead, 3 layers": (
            *layouts.sets_of("deepseek", "moonlight-16b-a3b"),
            "model.n_layers=3",
            "model.mtp_layers=1",
        ),
        "gpt-oss 20B, 2 layers": (*layouts.sets_of("gpt_oss", "gpt-oss-20b"), "model.n_layers=2"),
        "Gemma 3 1B": layouts.sets_of("gemma3", "gemma3-1b"),
        "OLMo 3 7B, 4 layers": (*layouts.sets_of("olmo2", "olmo3-7b"), "model.n_layers=4"),
        "Granite 3 2B, 8 layers": (*layouts.sets_of("granite", "granite3-2b"), "model.n_layers=8"),
        "Gemma 3 1B, compiled": (*layouts.sets_of("gemma3", "gemma3-1b"), "compile.enabled=true"),
        "gpt-oss 20B, 2 layers, compiled": (
            *layouts.sets_of("gpt_oss", "gpt-oss-20b"),
            "model.n_layers=2",
            "compile.enabled=true",
        ),
    },
}


def _dense(rehearse: bool) -> dict[str, Any]:
    """Steps of a few layers with the width of Llama 3 8B."""
    return _steps("dense", _TINY_DENSE if rehearse else (), rehearse)


def _experts(rehearse: bool) -> dict[str, Any]:
    """Steps of a model with experts."""
    return _steps("experts", _TINY_MOE if rehearse else (), rehearse)


def _models(rehearse: bool) -> dict[str, Any]:
    """Steps of models of other architectures."""
    tiny = (*layouts.sets_of("gemma3", "debug-gemma3"), "data.seq_len=64", "run.device=cpu")
    return _steps("models", tiny if rehearse else (), rehearse)


def _steps(part: str, sizes: Sequence[str], rehearse: bool) -> dict[str, Any]:
    kernels.device_of(rehearse)
    # float8 needs a GPU, or emulates; compiling on a CPU takes longer than all the rest.
    cases = {"eager": ()} if rehearse else _CASES[part]
    return {
        name: _call("measured_steps", f"{part}, {name}", str(HERE / f"{part}.toml"), *sizes, *sets)
        for name, sets in cases.items()
    }


# A checkpoint of 0.4 billion parameters.
_SMALL = ("model.n_layers=4", "model.vocab=32000")


def _run(rehearse: bool) -> dict[str, Any]:
    """A run with the width of Llama 3.2 1B that is stopped and resumed has a whole one's losses."""
    kernels.device_of(rehearse)
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
    done = _python(code, "host", "--only", "one", "--repeats", "1", "--json")
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-800:]}
    rows = {}
    for row in json.loads(done.stdout.splitlines()[-1])["rows"]:
        plain, ours = statistics.median(row["plain_ms"]), statistics.median(row["ours_ms"])
        rows[row["name"]] = {"plain_ms": plain, "composer3d_ms": ours, "of_plain": ours / plain}
    return {"rows": rows}


PARTS: dict[str, Part] = {
    "machine": Part("the card, its software and its rates", 25, kernels.machine),
    "attention": Part("kernels of attention: time, rate and error", 40, kernels.attention),
    "cudnn": Part("a block of the ring by cuDNN's kernel", 20, kernels.cudnn),
    "float8": Part("products in float8 beside the same in float64", 40, kernels.float8),
    "grouped": Part("grouped products of experts, with empty groups", 20, kernels.grouped),
    "dense": Part("steps with the width of an 8B model, beside plan", 200, _dense),
    "experts": Part("steps with experts", 120, _experts),
    "models": Part("steps of other architectures", 160, _models),
    "layouts": Part("values of layouts whose ranks share the card", 120, layouts.prove),
    "tests": Part("the tests that need a GPU", 120, _tests),
    "run": Part("a stopped and resumed run, bitwise", 60, _run),
    "host": Part("the time in which the host launches a step", 60, _host),
}
