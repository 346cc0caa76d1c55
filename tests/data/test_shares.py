"""A rank's loader serves the tokens that its stages own, with both packings and orders of cp."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from composer3d.data import Batch
from composer3d.parallel import Stages
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.mesh import coordinates
from composer3d.training.batches import make_loader
from composer3d.verify.data import corpus_batch, make_corpus
from tools.prove.paths import RECIPE as RECIPE_PATH

RECIPE = RECIPE_PATH
SEED, STEPS = 5, 4  # the corpus of a proof has less than two steps


def recipe_of(cp: int, balance: str, packing: str, dp_shard: int = 1) -> Recipe:
    sets = [f"mesh.cp={cp}", f"mesh.dp_shard={dp_shard}", f"parallel.cp_balance={balance}"]
    sets += ["data.seq_len=48", "data.global_batch=4", "data.micro_batch=1"]
    return load(RECIPE, [*sets, f"data.packing={packing}"]).recipe


def mesh_of(recipe: Recipe, rank: int) -> Any:
    """Stand in for a mesh, without a process group, for a loader and ``own_tokens``."""
    coords, cp = coordinates(rank, recipe.mesh), recipe.mesh.cp
    group = SimpleNamespace(size=lambda: cp, rank=lambda: coords["cp"])
    return SimpleNamespace(
        coords=coords,
        batch_rank=coords["dp_replicate"] * recipe.mesh.dp_shard + coords["dp_shard"],
        batch_ranks=recipe.mesh.batch_ranks,
        cp_group=group if cp > 1 else None,
    )


def own_tokens(recipe: Recipe, mesh: Any, whole_BT: Tensor) -> Tensor:
    stages = SimpleNamespace(mesh=mesh, _parallel=recipe.parallel)
    return Stages.own_tokens(cast(Stages, stages), whole_BT)


def documented_tokens(recipe: Recipe, at: int, whole_BT: Tensor) -> Tensor:
    """Return the tokens of cp rank ``at``, as the documentation says.

    Zigzag: of 2 cp chunks, rank r owns r and 2 cp - 1 - r. Contiguous: of cp chunks, it owns the
    r-th.
    """
    cp = recipe.mesh.cp
    if cp == 1 or recipe.parallel.cp_balance == "contiguous":
        return whole_BT.chunk(cp, 1)[at]
    chunks = whole_BT.chunk(2 * cp, 1)
    return torch.cat((chunks[at], chunks[2 * cp - 1 - at]), 1)


def problems(recipe: Recipe) -> list[str]:
    """Return a line for each tensor of a rank's batch that is not its part of the global batch."""
    corpus = make_corpus(recipe, "train")
    lines = []
    for rank in range(recipe.world_size):
        mesh = mesh_of(recipe, rank)
        loader = make_loader(recipe, mesh, corpus, seed=SEED)
        for step in range(STEPS):
            whole = corpus_batch(recipe, corpus, seed=SEED, step=step)
            count = recipe.data.global_batch // mesh.batch_ranks
            rows = slice(mesh.batch_rank * count, (mesh.batch_rank + 1) * count)
            mine = next(loader)
            for name in Batch._fields[:3]:
                part = getattr(whole, name)[rows]
                for rule in (
                    own_tokens(recipe, mesh, part),
                    documented_tokens(recipe, mesh.coords["cp"], part),
                ):
                    if not torch.equal(getattr(mine, name), rule):
                        lines.append(f"{name} of rank {rank} in step {step}")
            # Every rank of cp has the documents of whole rows.
            documents = None if whole.documents_BT is None else whole.documents_BT[rows]
            if (mine.documents_BT is None) != (documents is None) or not (
                documents is None or torch.equal(cast(Tensor, mine.documents_BT), documents)
            ):
                lines.append(f"documents_BT of rank {rank} in step {step}")
    return lines


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize(
    ("cp", "balance", "dp_shard"),
    [(1, "zigzag", 1), (3, "zigzag", 1), (8, "contiguous", 1), (2, "zigzag", 4)],
)
def test_a_loader_serves_the_tokens_that_its_stages_own(
    cp: int, balance: str, dp_shard: int, packing: str
) -> None:
    assert problems(recipe_of(cp, balance, packing, dp_shard)) == []
