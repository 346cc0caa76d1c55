"""Trainings of models with experts: their metrics, and a resume on another ep."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training import loop
from composer3d.training.build import Run, build
from tests.training.jobs import RECIPE, build_and_train, losses
from tools.prove.paths import ROOT

# Groups, a shared expert, a dense layer, and biases in place of a balance loss.
MODEL = 'architecture = "moe"\npreset = "debug-moe-shared"'
MESH = "dp_shard = 2\ntp = 2\nep = 2"


def test_metrics_of_experts_reach_the_files(pool: Pool, folder: Path) -> None:
    """The quickstart, cut short: 8 processes, of which 4 share the experts of a block."""
    quickstart = ROOT / "recipes" / "quickstart-moe.toml"
    (folder / "recipe.toml").write_text(f'base = "{quickstart}"\n')
    sets = [
        "run.steps=2",
        "run.device=cpu",
        "data.source=text",
        "data.path=corpus.txt",
        "data.seq_len=32",
        "data.global_batch=8",
        "data.micro_batch=2",
        "optim.warmup=0",
        "model.balance_loss=0.01",
        "validation.every=0",
        "metrics.every=1",
    ]
    arguments = {"folder": str(folder), "sets": sets, "minutes": None, "largest_file": None}
    pool.run(build_and_train, arguments, world_size=8)

    run_dir = folder / "runs" / "quickstart-moe"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    layers = [f"blocks.{layer}" for layer in range(4)]
    for line in steps:
        assert line["dropped_tokens"] == 0
        # The busiest of 8 experts, of which a token uses 2, gets at most 4 times the mean.
        loads = [line[f"expert_load/{layer}"] for layer in layers]
        assert all(1 < load < 4 for load in loads)
        assert line["expert_load"] == pytest.approx(sum(loads) / 4)
        entropies = [line[f"router_entropy/{layer}"] for layer in layers]
        assert all(0 < entropy <= math.log(8) for entropy in entropies)
        assert line["router_entropy"] == pytest.approx(sum(entropies) / 4)
        assert 4 * 0.01 * 0.9 < line["balance_loss"] < 4 * 0.01 * 4
        assert line["z_loss"] == 0

    events = EventAccumulator(str(run_dir))
    events.Reload()
    tags = {
        "experts/load",
        "experts/dropped_tokens",
        "experts/router_entropy",
        "experts/balance_loss",
        "experts/z_loss",
        *(f"{name}/{layer}" for name in ("expert_load", "router_entropy") for layer in layers),
    }
    assert tags <= set(events.Tags()["scalars"])
    shown = [event.value for event in events.Scalars("experts/load")]
    assert shown == pytest.approx([line["expert_load"] for line in steps])


def whole(tensor: Tensor) -> Tensor:
    """All elements of a tensor, sharded or not. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def digest(tensor: Tensor) -> str:
    """The SHA-256 of all elements of a tensor. Collective."""
    return hashlib.sha256(whole(tensor).contiguous().numpy().tobytes()).hexdigest()


def state_of(run: Run) -> dict[str, str]:
    """The digests of all parameters and moments."""
    state: dict[str, str] = {}
    for name, parameter in run.stages.named_parameters():
        state[name] = digest(parameter)
        for moment, value in run.optimizer.state.get(parameter, {}).items():
            state[f"{name} {moment}"] = digest(value)
    return state


def biases_of(run: Run) -> dict[str, list[float]]:
    return {
        name: whole(parameter).tolist()
        for name, parameter in run.stages.named_parameters()
        if name.endswith("router.bias")
    }


def train_from(folder: str, sets: list[str]) -> dict[str, Any]:
    """A task: build the run in ``folder`` and train it; return its state before and after."""
    os.chdir(folder)
    with pool_world() as device:
        resolved = load("recipe.toml", sets, world_size=int(os.environ["WORLD_SIZE"]))
        run = build(resolved.recipe, device, resolved.to_toml())
        before, biases_before = state_of(run), biases_of(run)
        loop.train(run)
        return {
            "before": before,
            "biases before": biases_before,
            "after": state_of(run),
            "biases after": biases_of(run),
        }


def test_a_checkpoint_of_experts_is_resumed_bitwise_on_every_ep(pool: Pool, folder: Path) -> None:
    """Saved on ep 2, loaded on ep 2, 1 and 4. The biases of routers are a part of it."""
    text = RECIPE.format(mesh=MESH).replace('preset = "debug-tiny"', MODEL)
    (folder / "recipe.toml").write_text(text)

    def run(out_dir: str, *sets: str) -> dict[str, Any]:
        settings = [f"run.out_dir={out_dir}", "data.micro_batch=4", "optim.warmup=1", *sets]
        arguments = {"folder": str(folder), "sets": settings}
        first, *others = pool.run(train_from, arguments, world_size=4)
        assert all(other == first for other in others)
        return first

    uninterrupted = run("whole", "run.steps=4")
    part = run("part", "run.steps=2")
    assert len(part["biases after"]) == 3  # of four blocks, the first one is dense
    for biases in part["biases after"].values():
        assert torch.tensor(biases).abs().max().item() == pytest.approx(2e-3)
    assert part["after"] != uninterrupted["after"]
    assert sum(name.endswith("experts.w2 exp_avg_sq") for name in part["after"]) == 3

    checkpoint = "checkpoint.resume=part/small/checkpoints/step-00000002"
    for ep in (2, 1, 4):
        resumed = run(f"ep{ep}", "run.steps=4", f"mesh.ep={ep}", checkpoint)
        assert resumed["before"] == part["after"]
        assert resumed["biases before"] == part["biases after"]
        expected = losses(folder, "whole")
        assert losses(folder, f"ep{ep}") == pytest.approx(
            {step: expected[step] for step in (3, 4)}, rel=1e-5
        )
        if ep == 2:
            assert resumed["after"] == uninterrupted["after"]
            assert losses(folder, "ep2")[4] == expected[4]
