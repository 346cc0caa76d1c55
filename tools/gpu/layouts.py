"""Proves layouts whose ranks share the card (``one_card``)."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tools.prove.paths import ROOT

_LIMIT_S = 150.0
# Layouts at a time. Each has one to four processes, and cores of its own: the reference of each
# would start a thread on every core.
_AT_A_TIME = 8
_FIRST_PORT = 21_000


class Layout(NamedTuple):
    """A layout to prove.

    Attributes:
        ranks: its number of ranks.
        sets: overrides of the recipe of ``tools.prove``, separated by blanks.
        recipe: the recipe's name there.
        dtype: the dtype in which it computes.
    """

    ranks: int
    sets: str
    recipe: str = "verify"
    dtype: str = "float64"


_MOE = "verify-moe"


def sets_of(architecture: str, preset: str) -> tuple[str, str]:
    """Return the overrides that name a model."""
    return f"model.architecture={architecture}", f"model.preset={preset}"


def _model(architecture: str, preset: str) -> str:
    """Return the overrides of a model whose sequences are documents."""
    return " ".join((*sets_of(architecture, preset), "data.packing=documents"))


_DEEPSEEK = f"{_model('deepseek', 'debug-deepseek')} model.n_kv_heads=8 model.mtp_layers=1"
LAYOUTS = (
    Layout(1, ""),
    Layout(1, "", dtype="float32"),
    Layout(1, "memory.cpu_offload=true"),
    Layout(1, "compile.enabled=true", dtype="float32"),
    Layout(1, "precision.compute=bfloat16 precision.matmul=float8"),
    Layout(1, "optim.name=muon"),
    Layout(1, "", _MOE),
    Layout(1, "model.router_bias=true model.router=sigmoid", _MOE, "float32"),
    Layout(2, "mesh.dp_shard=2 memory.activation_checkpoint=selective"),
    Layout(2, "mesh.dp_shard=2 memory.cpu_offload=true precision.reduce=bfloat16"),
    Layout(2, "mesh.cp=2 data.packing=documents"),
    Layout(2, "mesh.cp=2 parallel.cp_method=ulysses data.packing=documents model.window=100"),
    Layout(2, "mesh.cp=2 parallel.cp_method=allgather data.packing=documents", dtype="float32"),
    Layout(2, "mesh.pp=2 model.tied=true parallel.schedule=ZBVZeroBubble"),
    Layout(2, "mesh.dp_shard=2 mesh.ep=2", _MOE),
    Layout(2, "mesh.dp_shard=2 mesh.ep=2 memory.activation_checkpoint=full", _MOE, "float32"),
    Layout(2, "mesh.tp=2 mesh.ep=2 optim.name=muon", _MOE),
    Layout(3, "mesh.dp_shard=3 data.global_batch=12 optim.name=muon"),
    Layout(4, "mesh.dp_shard=2 mesh.tp=2"),
    Layout(4, "mesh.dp_shard=2 mesh.tp=2", dtype="float32"),
    Layout(4, "mesh.pp=2 mesh.cp=2 parallel.schedule=Interleaved1F1B"),
    Layout(4, "mesh.dp_replicate=2 mesh.dp_shard=2 parallel.zero=2 memory.loss_chunks=3"),
    Layout(4, "mesh.pp=2 mesh.dp_shard=2 mesh.ep=2 parallel.schedule=DualPipeV", _MOE),
    Layout(2, f"{_DEEPSEEK} mesh.cp=2", _MOE),
    Layout(2, f"{_model('gpt_oss', 'debug-gpt-oss')} mesh.dp_shard=2 mesh.ep=2", _MOE),
    Layout(2, f"{_model('gemma3', 'debug-gemma3')} mesh.tp=2"),
    Layout(2, f"{_model('olmo2', 'debug-olmo3')} mesh.cp=2 parallel.cp_method=allgather"),
    Layout(2, f"{_model('granite', 'debug-granite')} mesh.pp=2"),
)
_REHEARSED = (LAYOUTS[0], LAYOUTS[14])


def prove(rehearse: bool) -> dict[str, Any]:
    """Values of layouts whose ranks share the card. A line is printed as each is proven."""
    chosen = _REHEARSED if rehearse else LAYOUTS
    device = "cpu" if rehearse else "cuda"
    cores = sorted(os.sched_getaffinity(0))
    shares = iter([cores[first::_AT_A_TIME] or cores for first in range(_AT_A_TIME)])
    lock = threading.Lock()

    def take_cores() -> None:
        with lock:
            os.sched_setaffinity(0, next(shares))  # of this thread and of all that it starts

    def prove_one(number: int) -> dict[str, Any]:
        answer = _prove(chosen[number], device, _FIRST_PORT + number)
        print(f"{_name(chosen[number])}: {json.dumps(answer)[:300]}", flush=True)
        return answer

    with ThreadPoolExecutor(_AT_A_TIME, initializer=take_cores) as pool:
        answers = list(pool.map(prove_one, range(len(chosen))))
    rows = {_name(one): answer for one, answer in zip(chosen, answers, strict=True)}
    exact = sum("failed" not in answer for answer in answers)
    return {"exact": f"{exact} of {len(rows)}", "rows": rows}


def _name(layout: Layout) -> str:
    words = [layout.sets or "one rank", layout.dtype]
    return ", ".join(["experts", *words] if layout.recipe == _MOE else words)


def _prove(layout: Layout, device: str, port: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.gpu.one_card", "verify", "--here", "--json"]
    command += [f"tools/prove/{layout.recipe}.toml", "--dtype", layout.dtype]
    sets = [f"run.device={device}", *layout.sets.split()]
    command += [argument for one in sets for argument in ("--set", one)]
    shared = {
        "WORLD_SIZE": str(layout.ranks),
        "LOCAL_WORLD_SIZE": str(layout.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(layout.ranks)
    ]
    with ThreadPoolExecutor(layout.ranks) as pool:
        printed = list(pool.map(_output_of, ranks))
    out, _ = printed[0]
    try:
        verdict = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": "\n".join(error[-700:] for _, error in printed)[-1500:]}
    errors = {key: value for key, value in verdict.items() if key.endswith("_err") and value}
    return errors if verdict["passed"] else {"failed": json.dumps(verdict)[:800]}


def _output_of(rank: "subprocess.Popen[str]") -> tuple[str, str]:
    try:
        return rank.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        rank.kill()
        out, error = rank.communicate()
        return out, f"not done after {_LIMIT_S:.0f} s\n{error}"
