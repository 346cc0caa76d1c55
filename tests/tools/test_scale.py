"""``tools/scale.py``: what it computes from what it has counted."""

from pathlib import Path

import pytest

from composer3d.recipe.resolve import load
from tools import scale


def test_a_short_dim_has_fewer_shards_than_ranks() -> None:
    # Shards have ceil(length / ranks) elements, as torch cuts them, and the last ones none.
    assert [scale._shards(length, 4) for length in (1, 3, 4, 5, 6, 8, 9)] == [1, 3, 4, 3, 3, 4, 3]


def test_parts_of_a_checkpoint() -> None:
    recipe = load(scale.FOLDER / "llama3-8b-8-fsdp.toml", check_files=False).recipe
    names = ["first.embed.weight", "last.norm.weight", "last.head.weight"]
    layer = [f"attn.{name}.weight" for name in ("wq", "wk", "wv", "wo")]
    layer += [f"ffn.{name}.weight" for name in ("w1", "w2", "w3")]
    layer += ["attn_norm.weight", "ffn_norm.weight"]
    names += [f"blocks.*.{name}" for name in layer]
    cuts: scale.Cuts = {}
    for name in names:
        for state in ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq"):
            cuts[state.format(name)] = [(0, 8)]
        cuts[f"optim.{name}.step"] = []
    tensors = 32 * len(layer) + 3
    assert scale.count_parts(recipe, cuts) == tensors * (3 * 8 + 1)
    cuts["model.blocks.*.attn.wq.weight"] = [(0, 8), (0, 2)]  # one dim, cut twice
    assert scale.count_parts(recipe, cuts) == tensors * (3 * 8 + 1) + 32 * 8


def test_peers_of_a_rank_grow_with_the_logarithm() -> None:
    # Those at distances of powers of two, and rank 0, which is at such a distance of rank 1.
    assert [scale.connected_peers(size, 3) for size in (8, 64, 128, 16384)] == [7, 63, 14, 28]
    assert [scale.connected_peers(16384, rank) for rank in (0, 1)] == [16383, 27]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").is_file(), reason="Linux has it")
def test_small_worlds_connect_as_the_table_assumes() -> None:
    assert scale.check_small_worlds() == []


@pytest.mark.parametrize("size", scale.RECIPES)
def test_each_number_of_ranks_has_a_recipe(size: int) -> None:
    recipe = load(scale.FOLDER / f"{scale.RECIPES[size]}.toml", check_files=False).recipe
    assert recipe.world_size == size
