"""What a GPU would wait for: the time in which the host launches a step.

The arithmetic is negligible (dim 32, 32 layers, 32 tokens) and so is the communication: one process
is the first rank of a fake world, in which collectives return at once. What is left of the time of
a step is Python, torch's dispatch and the kernels' own overhead.
"""

import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import fake_world
from composer3d.training.build import build_stages
from composer3d.training.optim import build_optimizer
from composer3d.training.step import compute_gradients, update
from composer3d.verify.worker import local_batch, random_batch
from tools.bench import plain
from tools.bench.jobs import SHAPE

SETS = (
    "model.dim=32",
    "model.n_layers=32",
    "model.n_heads=2",
    "model.n_kv_heads=2",
    "model.ffn=64",
    "data.seq_len=32",
    "data.global_batch=8",
)
LAYOUTS = {
    "one": ("data.micro_batch=8",),
    "fsdp2": ("mesh.dp_shard=2", "data.micro_batch=4"),
    "tp2": ("mesh.tp=2", "data.micro_batch=8"),
    "pp2": ("mesh.pp=2", "data.micro_batch=2"),
    "dp2xtp2": ("mesh.dp_shard=2", "mesh.tp=2", "data.micro_batch=4"),
}


class Row(NamedTuple):
    """Milliseconds of a step, over turns of both sides: their medians, and the range of ratios."""

    name: str
    plain_ms: float
    ours_ms: float
    least_ratio: float
    most_ratio: float


def rows(recipe: str, *, names: list[str], steps: int, repeats: int) -> list[Row]:
    """Measure each layout beside the hand-written loop on one process, in turns."""
    found = []
    with Pool() as pool:
        for name in names:
            arguments = {"recipe": recipe, "sets": [*SETS, *LAYOUTS[name]], "steps": steps}
            turns = []
            for _ in range(repeats):
                (plain_ms,) = pool.run(plain_step_ms, arguments, world_size=1)
                (ours_ms,) = pool.run(own_step_ms, arguments, world_size=1)
                turns.append((plain_ms, ours_ms))
            ratios = [ours_ms / plain_ms for plain_ms, ours_ms in turns]
            plain_ms, ours_ms = (statistics.median(side) for side in zip(*turns, strict=True))
            found.append(Row(name, plain_ms, ours_ms, min(ratios), max(ratios)))
    return found


def own_step_ms(recipe: str, sets: list[str], steps: int) -> float:
    """Measure the first rank of a layout. The step is one that trains: data is not measured."""
    torch.set_num_threads(1)
    chosen = load(recipe, sets, check_files=False).recipe
    with fake_world(0, chosen.world_size):
        # Stages vote for static shapes before the first step: the others have voted for them.
        recv: Any = dist.recv
        dist.recv = lambda vote, **_: vote.fill_(1)  # type: ignore[assignment]
        mesh = Mesh.build(chosen.mesh, torch.device("cpu"))
        stages = build_stages(chosen, mesh)
        optimizer = build_optimizer(stages.named_parameters(), chosen.optim)
        batch = local_batch(random_batch(chosen, 0), stages)
        seconds = []
        for _ in range(steps):
            begin_s = time.perf_counter()
            sums = compute_gradients(stages, batch)
            update(stages, optimizer, sums, max_norm=1.0, lr=1e-4)
            seconds.append(time.perf_counter() - begin_s)
        dist.recv = recv
    return 1000 * statistics.median(seconds[steps // 3 :])


def plain_step_ms(recipe: str, sets: list[str], steps: int) -> float:
    """Measure the hand-written loop, with all layers and rows on one process."""
    torch.set_num_threads(1)
    chosen = load(recipe, sets, check_files=False).recipe
    shape = {name: getattr(chosen.model, name) for name in SHAPE}
    rows = chosen.data.global_batch
    model = plain.Llama(seq_len=chosen.data.seq_len, compute=torch.float32, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(chosen.model.vocab, (rows, chosen.data.seq_len + 1))
    seconds = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        loss.item(), norm.item()
        seconds.append(time.perf_counter() - begin_s)
    return 1000 * statistics.median(seconds[steps // 3 :])
