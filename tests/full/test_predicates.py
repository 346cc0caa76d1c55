"""Predicates: what a small recipe decides otherwise than the full one is named, and completed."""

from dataclasses import replace
from typing import Any

import pytest

from composer3d.full.predicates import completed, differences
from composer3d.recipe.draft import split_overrides
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.verify.shrink import shrink
from tools.prove.matrix.cover import read, sets
from tools.prove.paths import MOE_RECIPE, RECIPE, ROOT


def _load(path: object, layout: str) -> Recipe:
    return load(str(path), split_overrides(layout), check_files=False).recipe


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_the_proofs_of_verify_full_keep_every_predicate_of_every_recipe(path: Any) -> None:
    full = load(path, [], check_files=False).recipe
    small = shrink(full)
    assert differences(full, [*small, *completed(full, small)]) == []


def test_a_proof_on_the_whole_mesh_keeps_every_predicate_of_a_layout() -> None:
    for row in read().rows[::20]:
        full = load(RECIPE, sets(row), check_files=False).recipe
        assert differences(full, shrink(full)) == [], sets(row)


def test_a_pipeline_of_two_does_not_stand_for_one_with_middle_ranks() -> None:
    full = load(ROOT / "recipes" / "llama3-405b-16384-4d.toml", [], check_files=False).recipe
    lost = {one.name for one in differences(full, shrink(full))}
    assert lost == {"pipeline ranks between others", "micro-batches against pipeline ranks"}
    (more,) = completed(full, shrink(full))
    assert (more.mesh.pp, more.micro_batches) == (3, 3)


@pytest.mark.parametrize(
    ("path", "full", "small", "name"),
    [
        (RECIPE, "mesh.tp=4 model.n_kv_heads=2", "mesh.tp=2 model.n_kv_heads=2", "key-value heads"),
        (RECIPE, "mesh.tp=2 model.vocab=257", "mesh.tp=2 model.vocab=256", "vocabulary over tp"),
        (RECIPE, "mesh.dp_shard=3 data.global_batch=12", "mesh.dp_shard=2", "shards of the res"),
        (RECIPE, "data.seq_len=255", "data.seq_len=256", "tokens of a sequence"),
        (RECIPE, "mesh.cp=3 data.seq_len=252", "mesh.cp=2", "ranks of a ring"),
        (RECIPE, "mesh.cp=4 model.window=60", "mesh.cp=2 model.window=60", "window"),
        (RECIPE, "mesh.pp=2 model.n_layers=3", "mesh.pp=2 model.n_layers=2", "blocks over stages"),
        (RECIPE, "data.global_batch=2", "data.global_batch=4", "micro-batches"),
        (RECIPE, "parallel.zero=1 mesh.dp_shard=2", "parallel.zero=3 mesh.dp_shard=2", "the value"),
        (
            RECIPE,
            "model.n_layers=4 parallel.fsdp_blocks=2",
            "model.n_layers=2 parallel.fsdp_blocks=2",
            "units of",
        ),
        (
            RECIPE,
            "mesh.pp=4 memory.activation_checkpoint=full in the first 2 stages",
            "mesh.pp=2 memory.activation_checkpoint=full",
            "checkpointed blocks",
        ),
        (RECIPE, "memory.activation_checkpoint=full", "", "checkpointed blocks"),
        (MOE_RECIPE, "mesh.dp_shard=8 mesh.ep=8 data.global_batch=16", "mesh.dp_shard=2 mesh.ep=2",
         "experts of a rank"),
        (MOE_RECIPE, "mesh.dp_shard=4 mesh.ep=2", "mesh.dp_shard=2 mesh.ep=2", "experts over"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_predicate_that_differs_is_named(path: Any, full: str, small: str, name: str) -> None:
    found = differences(_load(path, full), [_load(path, small)])
    assert any(one.name.startswith(name) for one in found), found


def test_a_key_that_a_proof_must_keep_is_compared() -> None:
    full = _load(RECIPE, "mesh.dp_shard=2")
    other = replace(full, optim=replace(full.optim, name="muon"))
    assert "optim.name" in {one.keys for one in differences(full, [other])}
