"""Tied parameters of the first and the last stage: an owner, and a copy without a state."""

from typing import NamedTuple

import pytest

from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from composer3d.training.optimizers import build_optimizer
from composer3d.training.step import compute_gradients, update
from composer3d.verify.data import random_batch
from composer3d.verify.worker import local_batch
from tools.prove.paths import RECIPE

EMBEDDING = "first.embed.weight"


class RankState(NamedTuple):
    """The state of a rank after training.

    Attributes:
        names: of its parameters, without copies of tied ones.
        embedding_state: names of the optimizer's tensors for the embedding.
        embedding: the values of the embedding, if the rank owns it.
        copies: the values of its tied copies, by the name of the owner.
    """

    names: list[str]
    embedding_state: list[str]
    embedding: list[list[float]] | None
    copies: dict[str, list[list[float]]]


def train_tied(schedule: str, *, frozen: bool = False, steps: int = 2) -> RankState:
    """Train on two stages, and validate, which gives the copies the latest values.

    If ``frozen``, the tied parameter is not trained.
    """
    overrides = ["mesh.pp=2", f"parallel.schedule={schedule}", "model.tied=true"]
    recipe = load(RECIPE, [*overrides, "data.seq_len=16"], check_files=False).recipe
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        if frozen:
            for module in stages.modules:
                for name, parameter in module.named_parameters():
                    if name in (EMBEDDING, *module.tied_copies):
                        parameter.requires_grad_(False)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        for step in range(steps):
            sums = compute_gradients(stages, local_batch(random_batch(recipe, step), stages))
            # Only the owner's gradient takes memory while the optimizer steps.
            for module in stages.modules:
                assert all(module.get_parameter(copy).grad is None for copy in module.tied_copies)
            update(stages, optimizer, sums, max_norm=1.0, lr=1e-2)
        batch = local_batch(random_batch(recipe, 0), stages)
        stages.evaluate(batch.tokens_BT, batch.labels_BT, batch.positions_BT)

        parameters = dict(stages.named_parameters())
        state = optimizer_state(optimizer, stages.named_parameters())
        return RankState(
            names=sorted(parameters),
            embedding_state=sorted(name for name in state if "embed" in name),
            embedding=parameters[EMBEDDING].tolist() if EMBEDDING in parameters else None,
            copies={
                owner: module.get_parameter(copy).tolist()
                for module in stages.modules
                for copy, owner in module.tied_copies.items()
            },
        )


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_tied_copy_has_no_state_of_its_own(pool: Pool, schedule: str) -> None:
    """It has the values of its owner; name and optimizer state are the owner's alone."""
    first, last = pool.run(train_tied, {"schedule": schedule}, world_size=2)
    # The first rank of a V has both ends of the model.
    rank_with_copy = first if schedule == "ZBVZeroBubble" else last
    assert list(rank_with_copy.copies) == [EMBEDDING]
    assert rank_with_copy.copies[EMBEDDING] == first.embedding
    assert first.embedding_state == [
        f"optim.{EMBEDDING}.{key}" for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert EMBEDDING not in last.names
    assert last.embedding_state == []
    assert not any("head" in name for state in (first, last) for name in state.names)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_frozen_tied_parameter_is_not_trained(pool: Pool, schedule: str) -> None:
    """It has no gradient to exchange; one stage would wait for it, and the other would fail."""
    untrained = pool.run(train_tied, {"schedule": schedule, "steps": 0}, world_size=2)
    trained = pool.run(train_tied, {"schedule": schedule, "frozen": True}, world_size=2)
    assert trained[0].embedding == untrained[0].embedding
    rank_with_copy = trained[0] if schedule == "ZBVZeroBubble" else trained[1]
    assert rank_with_copy.copies == {EMBEDDING: trained[0].embedding}
    assert trained[0].embedding_state == []
