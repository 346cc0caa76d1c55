"""A bit that flips on one replica is named; a healthy run is bitwise one without the check."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from composer3d.parallel import Stages
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training import loop
from composer3d.training.build import Run, build
from tests.training.jobs import RECIPE

SETS = ["run.steps=7", "optim.warmup=1", "optim.decay=7", "checkpoint.every=0"]
EVERY = "reliability.digest_every=3"


def train_and_flip(
    folder: str, sets: list[str], rank: int | None, after: int, name: str, kind: str
) -> dict[str, Any]:
    """A task: train; on ``rank``, flip a bit of ``name`` after step ``after``.

    Args:
        kind: "parameter", "exp_avg", or "forward": then the forward pass itself is off by one bit.

    Returns:
        The reports of this rank, its loss after each step, and its shards at the end.
    """
    os.chdir(folder)
    reports, losses = [], []
    with pool_world() as device:
        resolved = load("recipe.toml", sets, world_size=int(os.environ["WORLD_SIZE"]))
        run = build(resolved.recipe, device, resolved.to_toml())
        has_fault = int(os.environ["RANK"]) == rank
        step = run.metrics.step

        def end_step(number: int, **values: Any) -> None:
            losses.append((values["loss"], values["grad_norm"]))
            step(number, **values)
            if has_fault and number == after:
                plant(run, name, kind)

        run.metrics.step = end_step  # type: ignore[method-assign]
        run.metrics.report = (  # type: ignore[method-assign]
            lambda step, lines, values: reports.append((step, lines, values))
        )
        loop.train(run)
        shards = {name: local(tensor).clone() for name, tensor in run.stages.named_parameters()}
    return {"reports": reports, "losses": losses, "shards": shards}


def plant(run: Run, name: str, kind: str) -> None:
    if kind == "forward":
        evaluate = Stages.evaluate

        def lie(*arguments: Any) -> torch.Tensor:
            loss = evaluate(*arguments)
            loss.view(torch.int64).bitwise_xor_(1)
            return loss

        run.stages.evaluate = lie.__get__(run.stages)  # type: ignore[method-assign]
        return
    parameter = dict(run.stages.named_parameters())[name]
    tensor = parameter if kind == "parameter" else run.optimizer.state[parameter][kind]
    bits = local(tensor).view(torch.int32).flatten()
    bits[len(bits) // 2] ^= 1  # the least bit of a float32


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_all(pool: Pool, folder: Path, mesh: str, *sets: str, **fault: Any) -> list[dict[str, Any]]:
    """Train on a mesh such as "dp_replicate=3 tp=2"; return the results of all ranks."""
    axes = dict(axis.split("=") for axis in mesh.split())
    (folder / "recipe.toml").write_text(
        RECIPE.format(mesh="\n".join(f"{axis} = {size}" for axis, size in axes.items()))
    )
    world_size = 1
    for axis, size in axes.items():
        world_size *= int(size) if axis != "ep" else 1
    arguments = {"rank": None, "after": 0, "name": "", "kind": "parameter", **fault}
    return pool.run(
        train_and_flip,
        {"folder": str(folder), "sets": [*SETS, *sets], **arguments},
        world_size=world_size,
    )


@pytest.mark.parametrize(
    ("mesh", "sets", "rank", "name", "kind", "suspects", "what"),
    [
        ("dp_replicate=3", [], 1, "blocks.0.attn.wq.weight", "parameter", [1], "parameters"),
        ("dp_replicate=3", [], 0, "blocks.0.attn.wq.weight", "exp_avg", [0], "optimizer state"),
        ("dp_replicate=2", [], 1, "blocks.0.attn.wq.weight", "parameter", [0, 1], "parameters"),
        ("dp_replicate=2 tp=2", [], 3, "last.norm.weight", "parameter", [3], "parameters"),
        (
            "dp_replicate=2 cp=2",
            ["parallel.zero=0"],
            2,
            "last.norm.weight",
            "parameter",
            [2],
            "parameters",
        ),
        ("dp_shard=3", [], 2, "", "forward", [2], "loss"),
        ("dp_replicate=3 pp=2", [], 4, "", "forward", [1, 4], "loss"),
    ],
    ids=["three", "moment", "two", "norm of tp", "zero 0", "forward", "forward of a pipeline"],
)
def test_a_flipped_bit_is_named(
    pool: Pool,
    folder: Path,
    mesh: str,
    sets: list[str],
    rank: int,
    name: str,
    kind: str,
    suspects: list[int],
    what: str,
) -> None:
    if "dp_shard=3" in mesh or "replicate=3" in mesh:
        sets = [*sets, "data.global_batch=6"]
    results = run_all(pool, folder, mesh, EVERY, *sets, rank=rank, after=4, name=name, kind=kind)
    assert all(not other["reports"] for other in results[1:])
    # The check after step 3 was right. The fault comes after step 4.
    (step, lines, values), *_ = results[0]["reports"]
    assert step == 6
    (line,) = [line for line in lines if line.startswith(f"corruption: another {what}")]
    assert [int(number) for number in re.findall(r"rank (\d+) \(", line)] == suspects
    assert "all agreed after step 3" in line
    if len(suspects) == 1:
        assert values == {"corrupt_rank": suspects[0]}


@pytest.mark.parametrize(
    ("mesh", "sets"),
    [
        ("dp_replicate=2 tp=2", []),
        ("dp_replicate=2 dp_shard=2", ["data.packing=documents"]),
        ("pp=2 dp_replicate=2 tp=2", []),
        ("pp=2 dp_replicate=2", ["parallel.schedule=ZBVZeroBubble"]),
        ("dp_replicate=2 cp=2", ["precision.compute=bfloat16"]),
        ("dp_replicate=2 dp_shard=2 ep=2", ["model.architecture=moe", "model.preset=debug-moe"]),
        ("tp=2 dp_shard=2", ["parallel.sequence_parallel=false", "parallel.zero=1"]),
    ],
)
def test_healthy_ranks_agree_and_train_the_same_bits(
    pool: Pool, folder: Path, mesh: str, sets: list[str]
) -> None:
    off = run_all(pool, folder, mesh, *sets, "run.out_dir=off")
    on = run_all(pool, folder, mesh, *sets, "run.out_dir=on", EVERY)
    for one, other in zip(off, on, strict=True):
        assert not other["reports"]
        assert one["losses"] == other["losses"]
        assert len(one["losses"]) == 7
        assert one["shards"].keys() == other["shards"].keys()
        for name, tensor in one["shards"].items():
            assert torch.equal(tensor.view(torch.uint8), other["shards"][name].view(torch.uint8))
