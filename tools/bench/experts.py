"""The parts of a step with experts: routing, permutation of rows, all-to-all, and experts."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers import moe
from composer3d.models.moe.model import moe_of
from composer3d.models.moe.shape import PRESETS
from composer3d.parallel.expert import dispatch
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from tools.bench.tables import print_head, print_row

RECIPE = Path(__file__).parent / "moe.toml"
STEPS = 4  # of a measurement; the first one warms up
PARTS = ("routing", "permutation", "all-to-all", "experts", "rest")


def shares(pool: Pool, sets: list[str], ranks: int) -> dict[str, float]:
    """Measure what share of forward and backward each of ``PARTS`` takes: medians over steps.

    A part is what its functions take in forward, and its own backward functions in backward. The
    backward of routing, and that of experts, belong to the rest.
    """
    results = pool.run(measure, {"sets": sets}, world_size=ranks, limit_s=900.0)
    return {part: statistics.mean(result[part] for result in results) for part in PARTS}


def measure(sets: list[str]) -> dict[str, float]:
    """Measure the shares of this rank."""
    torch.set_num_threads(1)
    recipe = load(RECIPE, sets, check_files=False).recipe
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        rows = recipe.data.global_batch // mesh.batch_ranks
        generator = torch.Generator().manual_seed(mesh.batch_rank)
        tokens_BT = torch.randint(recipe.model.vocab, (rows, 512), generator=generator)
        positions_BT = torch.arange(512).expand_as(tokens_BT)
        seconds: dict[str, float] = {}
        # The operators are wrapped before ``compose`` takes them.
        with _timed_parts(seconds):
            stages = build_stages(recipe, mesh)
            steps = []
            for _ in range(STEPS):
                seconds.update(dict.fromkeys(PARTS, 0.0))
                began_s = time.perf_counter()
                stages.forward_backward(
                    tokens_BT, tokens_BT, positions_BT, torch.tensor(tokens_BT.numel())
                )
                whole_s = time.perf_counter() - began_s
                seconds["rest"] = whole_s - sum(seconds.values())
                steps.append({part: seconds[part] / whole_s for part in PARTS})
    return {part: statistics.median(step[part] for step in steps[1:]) for part in PARTS}


@contextmanager
def _timed_parts(seconds: dict[str, float]) -> Iterator[None]:
    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            began_s = time.perf_counter()
            result = function(*arguments, **keywords)
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began_s
            return result

        return run

    permute = moe._PermuteRows
    targets: list[tuple[Any, str, str, Any]] = [
        (moe.Router, "forward", "routing", timed("routing", moe.Router.forward)),
        (permute, "forward", "permutation", staticmethod(timed("permutation", permute.forward))),
        (permute, "backward", "permutation", staticmethod(timed("permutation", permute.backward))),
        (dispatch.dist, "all_to_all_single", "all-to-all", None),
        (moe, "expert_ffn", "experts", timed("experts", moe.expert_ffn)),
    ]
    with ExitStack() as stack:
        for owner, name, part, wrapper in targets:
            new = timed(part, getattr(owner, name)) if wrapper is None else wrapper
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


class _OperatorCount(TorchDispatchMode):
    """Counts the operators that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators() -> dict[str, int]:
    """Count the operators of one layer of experts on one process, forward and backward."""
    layer = moe_of(PRESETS["debug-bench-moe"])
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x_BTC = torch.randn(2, 512, 256, requires_grad=True)
    seq = SequenceInfo(torch.arange(512).repeat(2, 1))

    def count(function: Callable[[], Tensor]) -> tuple[int, Tensor]:
        with _OperatorCount() as operator_count:
            result = function()
        return operator_count.counts.total(), result

    layer(x_BTC, seq)  # warms up what all layers of a micro-batch share
    forward, out = count(lambda: layer(x_BTC, seq))
    backward, _ = count(lambda: out.backward(torch.ones_like(out)) or out)
    return {"forward": forward, "backward": backward}


def report_parts() -> None:
    """Measure and print the shares with ep 1 and 2, and the operators of a layer."""
    rows: dict[str, dict[str, float]] = {}
    with Pool() as pool:
        rows["one process"] = shares(pool, ["data.micro_batch=8"], 1)
        for ep in (1, 2):
            sets = ["mesh.dp_shard=2", f"mesh.ep={ep}", "data.micro_batch=4"]
            rows[f"dp_shard 2, ep {ep}"] = shares(pool, sets, 2)
    print_head("forward and backward", *PARTS)
    for name, row in rows.items():
        print_row(name, *(f"{row[part]:.1%}" for part in PARTS))
    counts = operators()
    print(f"operators of a layer: {counts['forward']} forward, {counts['backward']} backward")
