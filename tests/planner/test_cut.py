"""Stages are cut by predicted time: as well as any cut can be, and never slower than by default."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from pathlib import Path

import pytest

from composer3d.planner.cut import Cutter
from composer3d.planner.layouts import Choices, is_legal
from composer3d.planner.levers import Levers, Timed, main_cut
from composer3d.planner.predict import predict_speed
from composer3d.planner.search import Device, price, search, work_share
from composer3d.planner.time import pipeline_times
from composer3d.recipe.draft import split_overrides
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import variant
from tests.planner.setups import device, recipe_of
from tools.prove.paths import ROOT

H100 = Device(hardware=device("H100"))

# Dense and expert blocks, and multi-token prediction; windows; checkpointing of some blocks; a V.
SMALL = {
    "experts": (
        "deepseek-v3-1024",
        "model.n_layers=9 mesh.pp=4 mesh.dp_shard=-1 parallel.schedule=1F1B "
        "parallel.stages=[3,2,2,2] memory.activation_checkpoint=every 2 blocks",
    ),
    "windows": (
        "debug-2-dp",
        "model.architecture=gemma3 model.preset=debug-gemma3 model.n_layers=8 mesh.pp=3 "
        "model.vocab=65536 data.seq_len=512 data.global_batch=6 data.micro_batch=1",
    ),
    "every": (
        "llama3-405b-1024-3d",
        "model.n_layers=10 mesh.pp=4 mesh.dp_shard=-1 parallel.stages=[3,3,2,2] "
        "memory.activation_checkpoint=every 3 blocks",
    ),
    "first stages": (
        "llama3-405b-1024-3d",
        "model.n_layers=10 mesh.pp=4 mesh.dp_shard=-1 parallel.stages=[3,3,2,2] "
        "memory.activation_checkpoint=full in the first 2 stages",
    ),
    "tail": ("llama3-8b-8-fsdp", "model.n_layers=7 mesh.pp=4 mesh.dp_shard=2"),
}


def small(name: str) -> Recipe:
    recipe, sets = SMALL[name]
    return recipe_of(recipe, *split_overrides(sets))


@pytest.mark.parametrize("name", SMALL)
def test_no_cut_has_a_faster_slowest_stage(name: str) -> None:
    setup = H100.setup(small(name))
    cutter = Cutter(setup)
    layers = setup.sizes.layers - setup.sizes.mtp_layers
    every = [
        tuple(end - begin for begin, end in pairwise((0, *ends, layers)))
        for ends in combinations(range(1, layers), setup.layout.stages - 1)
    ]
    best = min(max(cutter.seconds(cut)) for cut in every)
    evenest = min(
        sum(stage_s**2 for stage_s in cutter.seconds(cut))
        for cut in every
        if max(cutter.seconds(cut)) <= best * (1 + 1e-9)
    )
    found = cutter.seconds(cutter.of_fastest_stages())
    assert max(found) == pytest.approx(best, rel=1e-9)
    assert sum(stage_s**2 for stage_s in found) == pytest.approx(evenest, rel=1e-6)
    own = main_cut(setup)
    assert max(cutter.seconds(own)) / cutter.most_gain(own) <= best * (1 + 1e-9)

    # What is weighed is what the schedule is simulated with, of any cut.
    for cut in (*every[:: len(every) // 5], cutter.of_fastest_stages()):
        blocks = (*cut[:-1], cut[-1] + setup.sizes.mtp_layers)
        other = replace(setup, layout=replace(setup.layout, stage_blocks=blocks))
        stages = pipeline_times(other).stages
        busy = [stage.forward_s + stage.backward_s for stage in stages]
        assert cutter.seconds(cut) == pytest.approx(busy, rel=1e-9)


def test_with_several_stages_a_rank_the_ranks_are_balanced() -> None:
    """Every second block is checkpointed, so that a seventh costs more than a fifth saves."""
    cutter = Cutter(H100.setup(recipe_of("qwen3-30b-a3b-16-ep-pp")))
    own = (6,) * 8
    of_stages = cutter.of_fastest_stages()
    cuts = cutter.cuts()

    def slowest_rank_s(cut: tuple[int, ...]) -> float:
        seconds = cutter.seconds(cut)
        return max(sum(seconds[rank::2]) for rank in (0, 1))

    assert of_stages in cuts
    assert all(sum(cut) == 48 and len(cut) == 8 for cut in cuts)
    best = min(cuts, key=slowest_rank_s)
    assert slowest_rank_s(best) < 0.98 * min(map(slowest_rank_s, (own, of_stages)))
    # Moving a block from any stage to any other makes no rank faster.
    for fewer, more in permutations(range(8), 2):
        cut = list(best)
        cut[fewer] -= 1
        cut[more] += 1
        assert slowest_rank_s(tuple(cut)) >= slowest_rank_s(best) * (1 - 1e-9)


PIPELINES = [
    path
    for path in sorted((ROOT / "recipes").glob("*.toml"))
    if load(path, check_files=False).recipe.mesh.pp > 1
]


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_no_recipe_with_a_pipeline_becomes_slower(path: Path) -> None:
    recipe = variant(load(path, check_files=False).recipe, {"parallel.stages": None})
    setup = H100.setup(recipe)
    own = Timed(recipe, setup, predict_speed(setup))
    (found,) = Levers(H100.setup, 1, Choices()).with_other_cuts([own])
    assert found.tokens_s >= own.tokens_s
    assert is_legal(found.recipe)
    assert price(found.recipe, H100).prediction.tokens_s == found.tokens_s
    # The dense blocks of DeepSeek-V3 take as long as those with experts, and have a 20th of their
    # parameters: by default, its first stage has six blocks.
    page = (ROOT / "docs" / "plan.md").read_text()
    row = f"| `{path.stem}` | {own.tokens_s / found.tokens_s - 1:+.1%} |"
    assert (row in page) == (found is not own)


def test_the_search_cuts_stages_where_that_is_faster_and_fits() -> None:
    recipe = recipe_of("deepseek-v3-1024")
    choices = Choices(
        schedules=("1F1B",),
        checkpoints=("full",),
        zeros=(1,),
        micro_batches=(1,),
        further_checkpoints=(),
    )
    found = search(recipe, 1024, H100, 3, choices)
    assert all(plan.prediction.fits for plan in found.plans)
    first = found.plans[0]
    assert first.recipe.parallel.stages is not None
    uncut = price(variant(first.recipe, {"parallel.stages": None}), H100)
    assert first.prediction.tokens_s > 1.05 * uncut.prediction.tokens_s

    # With less memory than the stages of that cut need, the others stay.
    setup = H100.setup(uncut.recipe)
    own = Timed(uncut.recipe, setup, predict_speed(setup))
    (cut,) = Levers(H100.setup, 1, choices).with_other_cuts([own])
    assert cut.recipe.parallel.stages == first.recipe.parallel.stages
    tight = H100.hardware._replace(memory_gib=first.prediction.peak_gib - 0.01)
    levers = Levers(Device(hardware=tight).setup, 1, choices)
    assert levers.with_other_cuts([own]) == [own]


def test_the_work_of_a_step_does_not_change_with_the_cut() -> None:
    """A layout can avoid that its slowest stage computes longer than the others."""
    recipe = recipe_of("llama3-8b-8-fsdp", "mesh.pp=4", "mesh.dp_shard=2", "parallel.zero=1")
    work = []
    for cut in ((8, 8, 8, 8), (11, 7, 7, 7)):
        prediction = price(variant(recipe, {"parallel.stages": cut}), H100).prediction
        work.append(work_share(prediction) * prediction.time.step_s)
    assert work[1] == pytest.approx(work[0])
