"""What a GPU would wait for: the time in which the host launches a step.

The arithmetic is negligible (dim 32, 32 layers, micro-batches of one row of 32 tokens) and so is
the communication: one process is the first rank of a fake world, in which collectives return at
once. What is left of a step is Python, torch's dispatch and the kernels' own overhead. It is
measured as time of the processor, which does not count the time that other processes take.
"""

import os
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import fake_world
from composer3d.training.build import build_stages
from composer3d.training.optimizers import build_optimizer
from composer3d.training.optimizers.adamw import AdamW
from composer3d.training.step import compute_gradients, update
from composer3d.verify.worker import local_batch, random_batch
from tools.bench import plain
from tools.bench.jobs import CPU_RECIPE, ONE_THREAD, SHAPE, JobError

SETS = (
    "model.dim=32",
    "model.n_layers=32",
    "model.n_heads=2",
    "model.n_kv_heads=2",
    "model.ffn=64",
    "data.seq_len=32",
    # With eight rows, kernels would take more than half of the step of one process.
    "data.micro_batch=1",
)
LAYOUTS = {
    "one": ("data.global_batch=1",),
    "fsdp2": ("data.global_batch=2", "mesh.dp_shard=2"),
    # No comma: names are listed with commas.
    "fsdp2 with 4 blocks a unit": (
        "data.global_batch=2",
        "mesh.dp_shard=2",
        "parallel.fsdp_blocks=4",
    ),
    "tp2": ("data.global_batch=1", "mesh.tp=2"),
    # torchtitan cuts layers so. By default, composer3d's first stage would have 18 of them here,
    # because the other one has the head.
    "pp2": ("data.global_batch=4", "mesh.pp=2", "parallel.stages=[16, 16]"),
    "dp2xtp2": ("data.global_batch=2", "mesh.dp_shard=2", "mesh.tp=2"),
}


# The same layouts as torchtitan's arguments; its local batch is that of a data-parallel rank.
TITAN_LAYOUTS = {
    "one": "--training.local-batch-size 1",
    "fsdp2": "--training.local-batch-size 1",
    # torchtitan has a unit for each block, and so has the hand-written loop.
    "fsdp2 with 4 blocks a unit": "--training.local-batch-size 1",
    "tp2": "--training.local-batch-size 1 --parallelism.tensor-parallel-degree 2",
    "pp2": "--training.local-batch-size 4 --parallelism.pipeline-parallel-degree 2 "
    "--parallelism.pipeline-parallel-microbatch-size 1",
    "dp2xtp2": "--training.local-batch-size 1 --parallelism.tensor-parallel-degree 2",
}
# Its metrics are not logged: composer3d's are not either.
_TITAN_ARGUMENTS = (
    "--module peerbench --config bench --comm.mode fake_backend --metrics.log-freq 1000000 "
    "--dump-folder ./out_bench --training.seq-len 32"
)
_TITAN_SHAPE = {"DIM": 32, "LAYERS": 32, "HEADS": 2, "KV": 2, "FFN": 64}
_TITAN_LIMIT_S = 600.0


class Row(NamedTuple):
    """Processor milliseconds of a step on each side: a figure for each turn.

    Attributes:
        name: the layout.
        plain_ms: of the hand-written loop: on one process, or with torch's FSDP2 if only data is
            sharded.
        titan_ms: of torchtitan; empty if it was not asked for.
        ours_ms: of composer3d.
    """

    name: str
    plain_ms: list[float]
    titan_ms: list[float]
    ours_ms: list[float]


def rows(
    recipe: str, *, names: list[str], steps: int, repeats: int, titan: Path | None = None
) -> list[Row]:
    """Measure each layout beside the hand-written loop and torchtitan, in turns.

    Args:
        recipe: the recipe whose model and step are made small.
        names: keys of ``LAYOUTS``.
        steps: the steps of a turn; the first third is not timed.
        repeats: the turns.
        titan: a folder with ``titan_cpu.py`` and ``venv/``; None leaves torchtitan out.
    """
    found = []
    with Pool() as pool:
        for name in names:
            arguments = {"recipe": recipe, "sets": [*SETS, *LAYOUTS[name]], "steps": steps}
            row = Row(name, [], [], [])
            for _ in range(repeats):
                row.plain_ms.extend(pool.run(plain_step_ms, arguments, world_size=1))
                if titan is not None:
                    row.titan_ms.append(titan_step_ms(titan, name, steps))
                row.ours_ms.extend(pool.run(own_step_ms, arguments, world_size=1))
            found.append(row)
    return found


def titan_step_ms(folder: Path, name: str, steps: int) -> float:
    """Measure torchtitan's first rank of a layout, by ``titan_host.py`` in its environment.

    Raises:
        JobError: it printed no figure.
    """
    recipe = load(str(CPU_RECIPE), [*SETS, *LAYOUTS[name]], check_files=False).recipe
    world = {"RANK": 0, "LOCAL_RANK": 0, "LOG_RANK": 0}
    world |= {"WORLD_SIZE": recipe.world_size, "NGPU": recipe.world_size, "MASTER_PORT": 29500}
    variables = {key: str(value) for key, value in (world | _TITAN_SHAPE).items()}
    variables |= {"MASTER_ADDR": "localhost", "ATTN": "causal", "PYTHONPATH": str(folder.resolve())}
    shapes = (steps, recipe.data.micro_batch, recipe.data.seq_len, recipe.model.dim)
    command = ["venv/bin/python", str(Path(__file__).with_name("titan_host.py"))]
    command += [str(number) for number in shapes]
    command += f"{_TITAN_ARGUMENTS} {TITAN_LAYOUTS[name]} activation-checkpoint:none".split()
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | ONE_THREAD | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TITAN_LIMIT_S,
        check=False,
    )
    figure = re.search(r"HOST_STEP_MS ([\d.]+)", result.stdout)
    if figure is None:
        raise JobError(f"titan_host.py printed no figure: {result.stdout[-300:]}")
    return float(figure[1])


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
            begin_s = time.process_time()
            sums = compute_gradients(stages, batch)
            update(stages, optimizer, sums, max_norm=1.0, lr=1e-4)
            seconds.append(time.process_time() - begin_s)
        dist.recv = recv
    return 1000 * statistics.median(seconds[steps // 3 :])


def plain_step_ms(recipe: str, sets: list[str], steps: int) -> float:
    """Measure the hand-written loop: alone, or with torch's FSDP2 where only data is sharded.

    Other layouts have no hand-written loop of a few lines. They are compared with one process, on
    all rows.
    """
    torch.set_num_threads(1)
    chosen = load(recipe, sets, check_files=False).recipe
    shape = {name: getattr(chosen.model, name) for name in SHAPE}
    rows, shards = chosen.data.global_batch, 1
    if chosen.world_size == chosen.mesh.dp_shard:
        rows, shards = rows // chosen.world_size, chosen.world_size
    with fake_world(0, shards):
        model = plain.Llama(seq_len=chosen.data.seq_len, compute=torch.float32, **shape)
        if shards > 1:
            mesh = init_device_mesh("cpu", (shards,))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        # torch's own AdamW and norm would dispatch a DTensor for each parameter.
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(chosen.model.vocab, (rows, chosen.data.seq_len + 1))
        seconds = []
        for _ in range(steps):
            begin_s = time.process_time()
            optimizer.zero_grad(set_to_none=True)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            _clip(model, dist.group.WORLD if shards > 1 else None)
            optimizer.step()
            loss.item()
            seconds.append(time.process_time() - begin_s)
    return 1000 * statistics.median(seconds[steps // 3 :])


@torch.no_grad()
def _clip(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Clip the gradients to a norm of 1 over all shards, and wait for the norm."""
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    if group is not None:
        grads = [grad.to_local() for grad in grads]
    norm_sq = torch.stack(torch._foreach_norm(grads)).square().sum()
    if group is not None:
        dist.all_reduce(norm_sq, group=group)
    torch._foreach_div_(grads, norm_sq.sqrt().clamp(min=1.0))
    norm_sq.item()
