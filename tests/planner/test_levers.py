"""Keys that no layout is enumerated with make fast layouts faster, and others fit."""

from dataclasses import replace
from itertools import product

import pytest

from composer3d.planner.layouts import Choices, is_legal
from composer3d.planner.levers import Levers, Timed
from composer3d.planner.memory import GIB, memory_of_ranks
from composer3d.planner.predict import fits, predict_speed
from composer3d.planner.search import Device, price, search
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import value_of, variant
from tests.planner.setups import device, recipe_of

H100 = Device(hardware=device("H100"))
NONE = Choices(
    micro_batches=(0,), further_checkpoints=(), loss_chunks=(), fsdp_blocks=(), cp_methods=()
)


def timed(recipe: Recipe, place: Device = H100) -> Timed:
    setup = place.setup(recipe)
    return Timed(recipe, setup, predict_speed(setup))


def improved(recipe: Recipe, choices: Choices, *, fits: bool = True) -> Timed | None:
    """The fastest that a layout alone becomes."""
    one = [timed(recipe)]
    levers = Levers(H100.setup, 1, choices)
    found = levers.improve(one) if fits else levers.improve([], one)
    return found[0] if found else None


# Each key alone makes a layout faster; the last two layouts do not fit as they are.
LEVERS = [
    (
        "qwen3-30b-a3b-16-ep-pp",
        "mesh.pp=1 mesh.dp_shard=16 mesh.ep=8 parallel.virtual_stages=1 parallel.schedule=1F1B "
        "data.micro_batch=4 memory.activation_checkpoint=full memory.loss_chunks=4",
        "data.micro_batch",
        8,
        True,
    ),
    ("llama3-405b-16384-4d", "", "parallel.cp_method", "ring", True),
    (
        "llama3.2-1b-8-fsdp",
        "mesh.dp_shard=512 data.global_batch=512 data.micro_batch=1",
        "parallel.fsdp_blocks",
        4,
        True,
    ),
    (
        "llama3-70b-64-fsdp-tp",
        "mesh.tp=2 mesh.dp_shard=32",
        "memory.activation_checkpoint",
        "every 2 blocks",
        True,
    ),
    ("llama3-8b-8-fsdp", "data.micro_batch=2", "memory.loss_chunks", 4, False),
    (
        "llama3-70b-64-fsdp-tp",
        "mesh.tp=2 mesh.dp_shard=32 memory.activation_checkpoint=none",
        "memory.activation_checkpoint",
        "every 2 blocks",
        False,
    ),
]
FIELDS = {
    "data.micro_batch": "micro_batches",
    "parallel.cp_method": "cp_methods",
    "parallel.fsdp_blocks": "fsdp_blocks",
    "memory.activation_checkpoint": "further_checkpoints",
    "memory.loss_chunks": "loss_chunks",
}


@pytest.mark.parametrize(("name", "sets", "key", "value", "own_fits"), LEVERS)
def test_a_key_makes_a_layout_faster_or_fit(
    name: str, sets: str, key: str, value: object, own_fits: bool
) -> None:
    recipe = recipe_of(name, *sets.split())
    assert price(recipe, H100).prediction.fits == own_fits
    mode = recipe.memory.activation_checkpoint
    base = replace(NONE, checkpoints=(mode,))
    choices = replace(base, **{FIELDS[key]: getattr(Choices(), FIELDS[key])})
    found = improved(recipe, choices, fits=own_fits)
    assert found is not None
    assert value_of(found.recipe, key) == value
    assert price(found.recipe, H100).prediction.fits
    without = improved(recipe, base, fits=own_fits)
    assert (without is None) != own_fits
    if without is not None:
        assert found.tokens_s > 1.005 * without.tokens_s


def test_no_combination_of_keys_that_fits_is_faster() -> None:
    """Of two keys at once, where memory is short: chunks of the loss let blocks repeat less."""
    recipe = recipe_of(
        "llama3-8b-8-fsdp", ["data.micro_batch=2", "memory.activation_checkpoint=full"][0]
    )
    modes, chunks = ("none", "selective", "full"), (1, 4, 16)
    choices = replace(NONE, checkpoints=modes, loss_chunks=chunks)
    found = improved(recipe, choices, fits=False)
    every = []
    for mode, count in product(modes, chunks):
        other = variant(recipe, {"memory.activation_checkpoint": mode, "memory.loss_chunks": count})
        one = timed(other)
        if is_legal(other) and fits(one.setup, memory_of_ranks(one.setup)):
            every.append(one)
    assert found is not None
    assert found.tokens_s == max(one.tokens_s for one in every)
    assert found.recipe.memory.activation_checkpoint != "full"


@pytest.mark.parametrize(
    ("name", "mode", "gain"),
    [("llama3-405b-1024-3d", "full", 1.02), ("qwen3-30b-a3b-16-ep-pp", "every 3 blocks", 1.05)],
)
def test_the_last_stages_repeat_nothing_if_memory_allows_it(
    name: str, mode: str, gain: float
) -> None:
    recipe = recipe_of(name)
    assert recipe.memory.activation_checkpoint == mode
    found = improved(recipe, replace(NONE, checkpoints=(mode,)), fits=True)
    assert found is not None
    checkpointing = found.recipe.memory.checkpointing
    assert str(checkpointing.in_first(None)) == mode
    assert 0 < checkpointing.blocks.stages < found.setup.layout.stages
    assert price(found.recipe, H100).prediction.fits
    levers = Levers(H100.setup, top=1, choices=NONE)
    (in_all,) = levers.with_other_cuts([timed(recipe)])
    assert found.tokens_s > gain * in_all.tokens_s


def test_layouts_that_almost_fit_do_with_further_keys() -> None:
    """On a device with just too little memory for all layouts that are enumerated."""
    recipe = recipe_of("llama3-8b-8-fsdp")
    choices = Choices(micro_batches=(2,), zeros=(3,), schedules=(), checkpoints=("selective",))
    without = replace(choices, further_checkpoints=(), loss_chunks=(), fsdp_blocks=())
    for memory_gib, more in ((79.0, True), (5.0, False)):
        place = Device(hardware=H100.hardware._replace(memory_gib=memory_gib))
        few, many = (search(recipe, 8, place, 5, one) for one in (without, choices))
        assert many.fitting == few.fitting
        assert (many.by_keys > few.by_keys) == more
        speeds = [one.plans[0].prediction.tokens_s for one in (few, many)]
        assert (speeds[1] > 1.005 * speeds[0]) == more
        assert all(plan.prediction.fits == more for plan in many.plans)
        assert (many.close is not None) == more


def test_each_rank_must_fit_and_those_after_one_that_does_not_are_not_read() -> None:
    recipe = recipe_of("llama3-8b-8-fsdp", "mesh.pp=4", "mesh.dp_shard=2")
    peaks = [rank.allocated_bytes for rank in price(recipe, H100).prediction.memory]
    assert peaks[0] > 1.05 * peaks[1]  # the first rank has most micro-batches in flight
    for limit, read in ((1.2 * peaks[0], 4), (0.98 * peaks[0], 1)):
        place = Device(hardware=H100.hardware._replace(memory_gib=limit / GIB + 1.5))
        setup = place.setup(recipe)
        ranks = memory_of_ranks(setup)
        assert fits(setup, ranks) == (read == 4)
        assert len(list(ranks)) == 4 - read
        backwards = list(memory_of_ranks(setup))[::-1]
        assert fits(setup, backwards) == (read == 4)
