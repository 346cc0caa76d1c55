"""Stages and groups, compared with ``compose`` and the mesh."""

from collections import defaultdict
from math import prod
from pathlib import Path

import pytest
import torch

from composer3d.models.registry import architecture
from composer3d.parallel.pipeline.runtime import place_stages
from composer3d.parallel.pipeline.stage_cut import cut_into_stages
from composer3d.planner.links import Group, group_of, groups_of, nic_share_in_group
from composer3d.planner.predict import of_recipe, predict
from composer3d.planner.schedule import recipe_actions
from composer3d.planner.stages import stage_layers, stages_by_rank
from composer3d.planner.traffic import Axis
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import AXES, MeshTable
from composer3d.recipe.stages import n_stages_of
from composer3d.runtime.ranks import coordinates
from tests.planner.setups import device, recipe_of, setup_on
from tools.prove.paths import ROOT

RECIPES = ROOT / "recipes"


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("quickstart", []),
        ("quickstart", ["model.n_layers=11", "mesh.pp=4", "mesh.dp_shard=1", "model.tied=true"]),
        ("quickstart", ["parallel.schedule=ZBVZeroBubble", "model.n_layers=7"]),
        (
            "quickstart",
            ["parallel.schedule=Interleaved1F1B", "parallel.virtual_stages=3", "model.n_layers=8"],
        ),
        ("quickstart-moe", ["model.preset=debug-moe-shared"]),
        # The last stage has the embedding twice: as the head, and for multi-token prediction.
        (
            "quickstart-moe",
            [
                "model.architecture=deepseek",
                "model.preset=debug-deepseek",
                "model.tied=true",
                "model.mtp_layers=1",
                "model.vocab=4096",
                "model.n_layers=8",
            ],
        ),
        ("llama3-405b-1024-3d", []),
        ("llama-175b-1024-3d", []),
        ("debug-2-dp", []),
    ],
)
def test_stages_are_cut_as_compose_cuts_them(name: str, sets: list[str]) -> None:
    recipe = load(RECIPES / f"{name}.toml", sets).recipe
    model = architecture(recipe.model.architecture).build(
        recipe.model, dtype=torch.float32, device="meta"
    )
    placement = place_stages(recipe.mesh.pp, recipe.parallel, recipe.micro_batches)
    assert stages_by_rank(recipe) == placement.stages
    layers = stage_layers(recipe)
    assert len(layers) == n_stages_of(recipe)
    for rank, held in enumerate(placement.stages):
        for stage, cut in zip(
            held, cut_into_stages(model, placement.stages, rank, recipe.parallel), strict=True
        ):
            assert [*cut.blocks] == [str(block) for block in layers[stage].blocks]
            assert (cut.first is not None) == layers[stage].has_first
            assert (cut.last is not None) == layers[stage].has_last


MESH = MeshTable(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=4)


def test_groups_are_the_ranks_that_differ_on_one_axis() -> None:
    world = range(MESH.world_size)
    joined: dict[Axis, tuple[str, ...]] = {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        "fsdp": ("dp_shard", "cp"),
        "replicas": ("dp_replicate", "dp_shard", "cp"),
        "cp": ("cp",),
        "tp": ("tp",),
        "sequence": ("cp", "tp"),
        "world": AXES,
    }
    for axis, names in joined.items():
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in world:
            at = coordinates(rank, MESH)
            groups[tuple(at[name] for name in AXES if name not in names)].append(rank)
        assert group_of(axis, MESH).ranks in groups.values(), axis
        if axis not in ("pp", "world"):
            assert group_of(axis, MESH, 1).ranks in groups.values(), axis
            assert group_of(axis, MESH, 1).first == MESH.world_size // 2
        if axis != "pp":
            stages = (0,) if axis == "world" else (0, 1)
            found = [group.ranks for stage in stages for group in groups_of(axis, MESH, stage)]
            assert sorted(found) == sorted(groups.values()), axis

    # The sparse view holds the same ranks as (pp, dp_replicate, efsdp, ep).
    assert group_of("ep", MESH).ranks == [0, 1, 2, 3]
    assert group_of("efsdp", MESH).ranks == [0, 4, 8, 12]
    assert group_of("expert_replicas", MESH).ranks == list(range(0, 32, 4))
    assert prod(group_of(axis, MESH).size for axis in ("ep", "efsdp")) == 16
    efsdp = [group.ranks for group in groups_of("efsdp", MESH, 1)]
    assert efsdp[:2] == [[32, 36, 40, 44], [33, 37, 41, 45]]
    assert sorted(rank for ranks in efsdp for rank in ranks) == list(range(32, 64))


def test_bytes_leave_a_node_if_the_next_rank_is_on_another() -> None:
    ring = Group(first=0, stride=1, size=16)
    assert nic_share_in_group("all_gather", ring, 8) == 2 / 16
    assert nic_share_in_group("all_gather", ring, 16) == 0
    assert nic_share_in_group("all_gather", Group(0, 8, 16), 8) == 1
    # Half of the other ranks of an all-to-all, and one more, are on the other node.
    assert nic_share_in_group("all_to_all", ring, 8) == pytest.approx(8 / 15)
    assert nic_share_in_group("all_gather", Group(0, 4, 1), 8) == 0


def test_a_schedule_from_a_file_is_predicted_with_the_stages_of_its_ranks(tmp_path: Path) -> None:
    """A file with the actions of a V-shaped schedule is that schedule."""
    sets = ["model.n_layers=8", "model.tied=true"]
    recipe = recipe_of("quickstart", "parallel.schedule=ZBVZeroBubble", *sets)
    rows = recipe_actions(recipe.mesh.pp, recipe.parallel, recipe.micro_batches)
    file = tmp_path / "v.csv"
    file.write_text("\n".join(",".join(";".join(map(str, cell)) for cell in row) for row in rows))
    keys = ("parallel.schedule=csv", f"parallel.schedule_csv={file}", "parallel.virtual_stages=2")
    from_file = predict(setup_on("H100", "quickstart", *keys, *sets))
    assert from_file == predict(of_recipe(recipe, device("H100")))
