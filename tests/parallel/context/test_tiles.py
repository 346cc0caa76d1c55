"""Tiles: they cover the visible scores, spread them evenly over ranks, and need small masks."""

from itertools import product

import pytest
import torch

from composer3d.data import Batch
from composer3d.parallel.context import ownership, tiles
from composer3d.recipe.resolve import load
from composer3d.runtime.torch_private import fake_mode_of, fake_tensors, has_data
from composer3d.training.observers.metrics import cp_balance
from tests.parallel.context.attention import random_documents
from tools.prove.paths import RECIPE


def n_scores(tile: tiles.Tile) -> int:
    """The number of scores of a tile that a query sees."""
    if tile.mask is not None:
        return int(tile.mask.sum().item())
    queries = tile.queries.stop - tile.queries.start
    keys = tile.keys.stop - tile.keys.start
    return queries * (queries + 1) // 2 if tile.causal else queries * keys


def test_masks_of_a_dry_run_do_not_reach_a_real_one() -> None:
    """Tiles are kept between calls, and a mask without data would be merged in silence."""
    owned = ownership.owned_ranges(0, 1, 48, balanced=False)
    device = torch.device("cpu")
    with fake_tensors():
        mode = fake_mode_of(torch.empty(1))
        fake = tiles.tiles(owned, owned, None, 9, device, False, mode)
    real = tiles.tiles(owned, owned, None, 9, device)
    assert [tile.mask is None for tile in fake] == [tile.mask is None for tile in real]
    for ours, theirs in zip(real, fake, strict=True):
        if ours.mask is not None and theirs.mask is not None:
            assert has_data(ours.mask)
            assert not has_data(theirs.mask)


def test_ranks_compute_all_visible_scores_and_zigzag_spreads_them_evenly() -> None:
    for size, window in product((2, 3, 4, 8), (0, 40)):
        n, device = 48, torch.device("cpu")
        positions = torch.arange(n * size)
        distance = positions[:, None] - positions
        visible = ((distance >= 0) & (distance < (window or n * size))).sum().item()
        for balanced in (True, False):
            owned = [
                ownership.owned_ranges(rank, size, n, balanced=balanced) for rank in range(size)
            ]
            scores = [
                sum(map(n_scores, tiles.tiles(queries, keys, None, window, device)))
                for queries, keys in product(owned, owned)
            ]
            scores_by_rank = torch.tensor(scores).view(size, size).sum(1)
            assert scores_by_rank.sum().item() == visible
            if balanced and not window:
                assert scores_by_rank.max() <= 1.01 * scores_by_rank.double().mean()


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    ("window", "full_every", "windows"),
    [(0, 0, [0] * 4), (40, 0, [40] * 4), (40, 3, [40, 40, 0, 40])],
)
def test_logged_imbalance_is_that_of_the_scores(
    balance: str, window: int, full_every: int, windows: list[int]
) -> None:
    overrides = [
        "model.n_layers=4",
        "mesh.cp=4",
        "data.seq_len=256",
        "data.packing=documents",
        "data.micro_batch=1",
        f"parallel.cp_balance={balance}",
        f"model.window={window}",
        f"model.full_every={full_every}",
    ]
    recipe = load(RECIPE, overrides, check_files=False).recipe
    rows = [random_documents(256, 0.02)[:1], random_documents(256, 0.05)[:1]]
    documents, device = torch.cat(rows), torch.device("cpu")
    owned = [ownership.owned_ranges(rank, 4, 64, balanced=balance == "zigzag") for rank in range(4)]
    busiest = everything = 0
    for row, of_block in product(rows, windows):
        starts = tiles.starts_of(row)
        scores_by_rank = [
            sum(
                n_scores(tile)
                for keys in owned
                for tile in tiles.tiles(queries, keys, starts, of_block, device)
            )
            for queries in owned
        ]
        busiest += max(scores_by_rank)
        everything += sum(scores_by_rank)
    imbalance = busiest * 4 / everything
    batch = Batch(documents, documents, documents, documents)
    assert cp_balance(recipe, batch) == {"cp_balance": pytest.approx(imbalance)}
    assert imbalance > 1.01


def test_imbalance_of_a_step_is_that_of_its_micro_batches() -> None:
    """One document of 8 tokens, and documents of 4, 1, 1, 1 and 1, cut in halves."""
    rows = [[0] * 8, [0, 0, 0, 0, 1, 2, 3, 4]]
    overrides = ["mesh.cp=2", "data.packing=documents", "parallel.cp_balance=contiguous"]
    overrides += ["data.seq_len=8", "data.global_batch=2"]
    documents = torch.tensor(rows)
    batch = Batch(documents, documents, documents, documents)
    # The ranks have 10 and 26 scores of the first row, and 10 and 4 of the second one.
    for micro_batch, busiest in ((1, 26 + 10), (2, 26 + 4)):
        sets = [*overrides, f"data.micro_batch={micro_batch}"]
        recipe = load(RECIPE, sets, check_files=False).recipe
        assert cp_balance(recipe, batch) == {"cp_balance": pytest.approx(busiest * 2 / 50)}


def test_no_mask_is_larger_than_a_band() -> None:
    window, n = 300, 2048
    documents = ((), (5, 700, 701, 1500))
    owned = ownership.owned_ranges(0, 1, n, balanced=False)
    for starts in (None, documents):
        all_tiles = tiles.tiles(owned, owned, starts, window, torch.device("cpu"))
        masks = [tile.mask for tile in all_tiles if tile.mask is not None]
        assert masks
        assert max(mask.numel() for mask in masks) <= tiles.BAND**2
