"""Trainings of models with experts: their metrics, and a resume on another ep."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.checkpoint.manifest import Manifest
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.training import loop
from composer3d.training.build import Run
from tests.training.jobs import RECIPE, build_and_train, built_run, losses, write_corpus
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
    pool.run(build_and_train, {"folder": str(folder), "sets": sets}, world_size=8)

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


class Trained(NamedTuple):
    """States of a run, by digests, and the biases of its routers.

    Attributes:
        loaded: before the first step.
        saved: at each save, by step.
        biases: at each save, by step.
    """

    loaded: dict[str, str]
    saved: dict[int, dict[str, str]]
    biases: dict[int, dict[str, list[float]]]


def train_to_step_4(folder: str, sets: list[str]) -> Trained:
    """A task: build the run in ``folder``, train it and save every second step."""
    with built_run(folder, sets) as run:
        trained = Trained(state_of(run), {}, {})
        save = run.saver.store.save

        def save_and_describe(manifest: Manifest, *arguments: Any) -> None:
            trained.saved[manifest.step] = state_of(run)
            trained.biases[manifest.step] = biases_of(run)
            save(manifest, *arguments)

        run.saver.store.save = save_and_describe  # type: ignore[method-assign]
        loop.train(run)
        return trained


def run_on_4_ranks(pool: Pool, folder: Path, out_dir: str, *sets: str) -> Trained:
    settings = [
        f"run.out_dir={out_dir}",
        "run.steps=4",
        "data.micro_batch=4",
        "optim.warmup=1",
        "checkpoint.every=2",
        *sets,
    ]
    arguments = {"folder": str(folder), "sets": settings}
    first, *others = pool.run(train_to_step_4, arguments, world_size=4)
    assert all(other == first for other in others)
    return first


class Saved(NamedTuple):
    """A folder with the checkpoints of a run on ep 2, and the run."""

    folder: Path
    run: Trained


@pytest.fixture(scope="module")
def saved_on_ep_2(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("experts")
    write_corpus(folder)
    text = RECIPE.format(mesh=MESH).replace('preset = "debug-tiny"', MODEL)
    (folder / "recipe.toml").write_text(text)
    return Saved(folder, run_on_4_ranks(pool, folder, "saved"))


def test_biases_of_routers_move_and_are_a_part_of_the_state(saved_on_ep_2: Saved) -> None:
    run = saved_on_ep_2.run
    assert set(run.saved) == {2, 4}
    assert len(run.biases[2]) == 3  # of four blocks, the first one is dense
    for biases in run.biases[2].values():
        assert torch.tensor(biases).abs().max().item() == pytest.approx(2e-3)
    assert set(run.biases[2]) <= set(run.saved[2])
    assert sum(name.endswith("experts.w2 exp_avg_sq") for name in run.saved[2]) == 3
    assert all(run.saved[2][name] != run.saved[4][name] for name in run.biases[2])


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_checkpoint_of_experts_is_resumed_bitwise_on_every_ep(
    pool: Pool, saved_on_ep_2: Saved, ep: int
) -> None:
    folder, source = saved_on_ep_2
    checkpoint = "checkpoint.resume=saved/small/checkpoints/step-00000002"
    resumed = run_on_4_ranks(pool, folder, f"ep{ep}", f"mesh.ep={ep}", checkpoint)
    assert resumed.loaded == source.saved[2]
    expected = losses(folder, "saved")
    assert losses(folder, f"ep{ep}") == pytest.approx(
        {step: expected[step] for step in (3, 4)}, rel=1e-5
    )
    if ep == 2:
        assert resumed.saved[4] == source.saved[4]
        assert losses(folder, "ep2")[4] == expected[4]


def test_a_run_may_change_the_coefficients_of_the_balance_but_not_the_routing(
    pool: Pool, saved_on_ep_2: Saved
) -> None:
    folder, source = saved_on_ep_2
    checkpoint = "checkpoint.resume=saved/small/checkpoints/step-00000002"
    sets = ["model.balance_loss=0.5", "model.bias_rate=0.003", checkpoint]
    resumed = run_on_4_ranks(pool, folder, "balance", *sets)
    assert resumed.loaded == source.saved[2]
    assert resumed.saved[4] != source.saved[4]
    moves = {
        abs(now - then)
        for name, biases in resumed.biases[4].items()
        for now, then in zip(biases, source.biases[2][name], strict=True)
    }
    assert max(moves) == pytest.approx(0.006)

    with pytest.raises(WorkerError, match=r"was made with model\.experts_per_token = 2"):
        run_on_4_ranks(pool, folder, "routing", "model.experts_per_token=3", checkpoint)
