"""The enumerator proposes what the rules accept, and nothing else."""

from dataclasses import replace

from composer3d.planner.layouts import Choices, layouts
from composer3d.planner.search import Device, search
from composer3d.recipe.rules import violations
from tests.planner.setups import device, recipe_of


def test_every_layout_is_legal_and_new() -> None:
    recipe = recipe_of("llama3-70b-64-fsdp-tp")
    found = list(layouts(recipe, 64, 8))
    assert len(found) > 100
    assert len({repr(variant) for variant in found}) == len(found)
    for variant in found[::7]:
        assert not violations(variant)
        assert variant.world_size == 64
        assert variant.data.global_batch == recipe.data.global_batch
        assert variant.mesh.tp <= 8
    # The recipe's own layout is among them.
    assert any(variant.mesh == recipe.mesh for variant in found)


def test_experts_are_spread_over_divisors_of_their_number() -> None:
    """Their compiled blocks are not checkpointed selectively: no layout may be refused later."""
    recipe = recipe_of("mixtral-8x7b-64-4d")
    assert recipe.compile.enabled
    found = list(layouts(recipe, 64, 8))
    assert {variant.mesh.ep for variant in found} == {1, 2, 4, 8}
    assert {variant.memory.activation_checkpoint for variant in found} == {"none", "full"}
    assert not any(violations(variant) for variant in found[::7])


def test_long_sequences_may_be_cut_and_short_ones_are_not() -> None:
    recipe = recipe_of("llama3-8b-8-fsdp")
    short = {variant.mesh.cp for variant in layouts(recipe, 8, 8)}
    assert short == {1}
    data = replace(recipe.data, seq_len=65_536, global_batch=8)
    long = {variant.mesh.cp for variant in layouts(replace(recipe, data=data), 8, 8)}
    assert max(long) > 1


def test_a_device_with_more_memory_fits_more_layouts() -> None:
    recipe = recipe_of("llama3-8b-8-fsdp")
    found = {}
    for name in ("A100-40GB", "A100-80GB", "H200"):
        choices = Choices(micro_batches=(1,), zeros=(3,))
        found[name] = search(recipe, 8, Device(hardware=device(name)), 1, choices).fitting
    assert found["A100-40GB"] < found["A100-80GB"] < found["H200"]
