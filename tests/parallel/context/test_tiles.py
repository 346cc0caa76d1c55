"""Which scores a rank computes: all that are seen, as many on each rank, behind no large mask."""

from itertools import product

import pytest
import torch

from composer3d.data import Batch
from composer3d.parallel.context import ownership, tiles
from composer3d.recipe.resolve import load
from composer3d.training import loop
from tests.parallel.context.attention import documents_of
from tools.prove.paths import RECIPE as RECIPE_PATH


def test_zigzag_shares_the_work_and_what_is_hidden_is_none() -> None:
    """Scores that are computed, of all that are seen: of each rank, and of all ranks together."""
    for size, window in product((2, 3, 4, 8), (0, 40)):
        n, device = 48, torch.device("cpu")
        places = torch.arange(n * size)
        distance = places[:, None] - places
        seen = ((distance >= 0) & (distance < (window or n * size))).sum().item()
        for balanced in (True, False):
            work = []
            for rank, source in product(range(size), range(size)):
                mine, theirs = (
                    ownership.owned_ranges(each, size, n, balanced=balanced)
                    for each in (rank, source)
                )
                found = tiles.tiles(mine, theirs, None, window, device)
                work.append(sum(map(scores, found)))
            of_rank = torch.tensor(work).view(size, size).sum(1)
            assert of_rank.sum().item() == seen
            if balanced and not window:
                assert of_rank.max() <= 1.01 * of_rank.double().mean()


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", [0, 40])
def test_balance_that_is_logged_is_that_of_the_scores(balance: str, window: int) -> None:
    sets = [
        "mesh.cp=4",
        "data.seq_len=256",
        "data.packing=documents",
        f"parallel.cp_balance={balance}",
    ]
    recipe = load(
        RECIPE_PATH,
        [*sets, f"model.window={window}"],
        check_files=False,
    ).recipe
    documents = documents_of(256, 0.02)
    batch = Batch(documents, documents, documents, documents)
    starts, device = tiles.starts_of(documents), torch.device("cpu")
    parts = [ownership.owned_ranges(rank, 4, 64, balanced=balance == "zigzag") for rank in range(4)]
    work = [
        sum(
            scores(tile)
            for theirs in parts
            for tile in tiles.tiles(mine, theirs, starts, window, device)
        )
        for mine in parts
    ]
    assert loop.cp_imbalance(recipe, batch) == {
        "cp_balance": pytest.approx(max(work) * 4 / sum(work))
    }
    assert max(work) * 4 / sum(work) > 1.01


def scores(tile: tiles.Tile) -> int:
    queries, keys = (part.stop - part.start for part in (tile.queries, tile.keys))
    if tile.mask is not None:
        return int(tile.mask.sum().item())
    return queries * (queries + 1) // 2 if tile.causal else queries * keys


def test_no_mask_is_larger_than_a_band() -> None:
    window, n = 300, 2048
    documents = ((), (5, 700, 701, 1500))
    owned = ownership.owned_ranges(0, 1, n, balanced=False)
    for starts in (None, documents):
        found = tiles.tiles(owned, owned, starts, window, torch.device("cpu"))
        masks = [tile.mask for tile in found if tile.mask is not None]
        assert masks
        assert max(mask.numel() for mask in masks) <= tiles.BAND**2
