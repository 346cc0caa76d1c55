"""A proof of a small model represents which parameters of the full one train."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from composer3d.facts.errors import PlanError
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import OptimGroup, OptimTable
from composer3d.verify.frozen import groups_in_small, train_in_small
from composer3d.verify.shrink import shrink
from tools.prove.paths import MOE_RECIPE, RECIPE

FULL = load(str(RECIPE), ["model.n_layers=12"]).recipe.model
SMALL = replace(FULL, n_layers=3)


def blocks(names: tuple[str, ...]) -> set[int]:
    return {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}


@pytest.mark.parametrize(
    ("train", "stages", "expected"),
    [
        (["blocks.*"], [range(3)], {0, 1, 2}),
        (["blocks.8.*", "blocks.9.*", "blocks.1[01].*"], [range(3)], {2}),
        # The first run of blocks holds both kinds.
        (["blocks.0.*", "blocks.4.*", "blocks.8.*"], [range(3)], {1, 2}),
        (["blocks.0.*", "blocks.4.*", "blocks.8.*"], [range(2), range(2, 3)], {1, 2}),
        # A stage of one block trains something.
        (["blocks.0.*", "blocks.4.*", "blocks.8.*"], [[0], [1], [2]], {0, 1, 2}),
        (["blocks.5.attn.*"], [range(3)], {1}),
        (["blocks.5.attn.*"], [range(2), range(2, 3)], {1, 2}),
        (["first.*", "blocks.5.attn.*", "last.*"], [[0], [1], [2]], {1}),
        # The block beside the embedding may be frozen.
        (["first.*", "blocks.[2-9].*", "blocks.1?.*"], [[0], [1], [2]], {1, 2}),
    ],
)
def test_blocks_stand_for_runs_of_blocks(
    train: list[str], stages: list[Sequence[int]], expected: set[int]
) -> None:
    assert blocks(train_in_small(train, FULL, SMALL, stages)) == expected


def test_the_ends_and_the_parts_of_a_block_stay() -> None:
    names = train_in_small(["first.*", "blocks.5.attn.wq.*"], FULL, SMALL, [[0], [1, 2]])
    assert names == ("first.embed.weight", "blocks.1.attn.wq.weight")


def test_a_proof_trains_what_the_recipe_trains() -> None:
    full = load(str(RECIPE), ['optim.train=["blocks.1.ffn.*","last.norm.*"]', "mesh.tp=2"]).recipe
    (small,) = shrink(full)
    assert small.model.n_layers == 2
    assert small.optim.train == (
        "blocks.0.ffn.w1.weight",
        "blocks.0.ffn.w2.weight",
        "blocks.0.ffn.w3.weight",
        "last.norm.weight",
    )


def test_a_glob_of_the_full_model_without_a_match_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'blocks\.12' matches no parameter"):
        train_in_small(["blocks.12"], FULL, SMALL, [range(3)])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # A block that is in a group represents its run; both groups match, and the first counts.
        (
            (("blocks.5.attn.wq.*",), ("blocks.*.attn.wq.*",)),
            ({"blocks.1.attn.wq.weight"}, {f"blocks.{i}.attn.wq.weight" for i in range(3)}),
        ),
        # Two groups of one run, of which a block can be in one: the other gets a parameter.
        (
            (("blocks.4.attn.wq.*",), ("blocks.5.attn.wk.*",), ("first.*",)),
            ({"blocks.1.attn.wq.weight"}, {"blocks.2.attn.wk.weight"}, {"first.embed.weight"}),
        ),
    ],
)
def test_groups_stand_for_groups(
    groups: tuple[tuple[str, ...], ...], expected: tuple[set[str], ...]
) -> None:
    table = OptimTable(groups=tuple(OptimGroup(train=globs) for globs in groups))
    found = groups_in_small(table, FULL, SMALL)
    assert found is not None
    assert tuple(set(group.train) for group in found) == expected


def test_a_group_that_does_not_train_is_left_out() -> None:
    groups = (OptimGroup(train=("first.*",)), OptimGroup(train=("blocks.0.*",), lr_factor=2.0))
    table = OptimTable(train=("first.embed.weight",), groups=groups)
    assert groups_in_small(table, FULL, SMALL) == (replace(groups[0], train=table.train),)
    assert groups_in_small(replace(table, groups=groups[1:]), FULL, SMALL) is None


def test_the_bias_of_a_router_is_in_no_group() -> None:
    sets = ["model.router_bias=true", 'optim.groups=[{train=["*"], lr_factor=0.5}]']
    (small,) = shrink(load(str(MOE_RECIPE), sets).recipe)
    assert small.optim.groups is not None
    assert not [name for name in small.optim.groups[0].train if "bias" in name]
