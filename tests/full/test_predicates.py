"""Predicates: what a small recipe decides otherwise than the full one is named, and completed."""

from dataclasses import replace
from pathlib import Path
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


@pytest.mark.parametrize(
    ("path", "layout"),
    [
        (MOE_RECIPE, "model.preset=mixtral-8x7b mesh.dp_shard=64 mesh.ep=8 data.global_batch=128"),
        (MOE_RECIPE, "mesh.dp_shard=8 mesh.tp=4 mesh.ep=2 model.n_kv_heads=4 data.global_batch=16"),
        (RECIPE, "mesh.pp=4 model.n_layers=16 parallel.stages=[3,5,5,3] mesh.dp_shard=8 "
         "data.global_batch=64"),
        (RECIPE, "model.architecture=deepseek model.preset=debug-deepseek model.n_heads=4 "
         "model.n_kv_heads=4 model.mtp_layers=1 model.n_layers=4 parallel.fsdp_blocks=8"),
        # The units of a proof have two blocks: its middle stages would have one unit each.
        (RECIPE, "mesh.pp=4 model.n_layers=8 parallel.stages=[1,3,3,1] parallel.fsdp_blocks=2 "
         "data.global_batch=64"),
        (RECIPE, "mesh.pp=16 parallel.schedule=DualPipeV model.n_layers=32 mesh.dp_shard=2 "
         "data.global_batch=128"),
        # A stage is one unit, of several kinds of blocks.
        *((RECIPE, f"mesh.pp={pp} model.architecture=gemma3 model.preset=gemma3-1b model.n_heads=4 "
           "model.n_kv_heads=1 data.seq_len=8192 data.global_batch=64 parallel.fsdp_blocks=32")
          for pp in (1, 2, 4)),
        (RECIPE, "mesh.pp=2 model.n_layers=8 optim.train=['blocks.[1357].*']"),
        *((RECIPE, f"mesh.pp={pp} model.architecture=olmo2 model.preset=olmo3-7b model.n_heads=32 "
           "model.n_kv_heads=32 data.seq_len=8192 data.global_batch=64") for pp in (2, 4, 8)),
        (RECIPE, "mesh.pp=2 model.architecture=gemma3 model.preset=gemma3-1b model.n_heads=4 "
         "model.n_kv_heads=1 data.seq_len=8192 data.global_batch=64"),
        (RECIPE, "mesh.pp=4 model.preset=llama3-8b model.n_heads=32 model.n_kv_heads=8 "
         "data.seq_len=8192 data.global_batch=64 model.window=1024 model.full_every=3"),
        (RECIPE, "mesh.pp=2 model.preset=llama3-8b model.n_heads=32 model.n_kv_heads=8 "
         "data.seq_len=8192 data.global_batch=64 model.window=1024 model.full_every=4 "
         "parallel.stages=[16,16]"),
        (RECIPE, "mesh.pp=4 model.n_layers=16 parallel.stages=[1,1,13,1] "
         "optim.train=['first.*','blocks.1.*','blocks.2.*','last.*']"),
        (RECIPE, "mesh.pp=8 mesh.dp_shard=4 model.n_layers=32 data.global_batch=128 "
         "optim.train=['first.*','blocks.[4-9].*','blocks.??.*','last.*']"),
    ],
)  # fmt: skip
def test_the_proofs_of_a_rare_layout_keep_every_predicate(path: Any, layout: str) -> None:
    full = _load(path, layout)
    small = shrink(full)
    assert differences(full, [*small, *completed(full, small)]) == []


def test_axes_that_a_schedule_from_a_file_leaves_no_ranks_for_have_a_proof(tmp_path: Path) -> None:
    rows = [[f"{rank}{kind}{batch}" for kind in "FB" for batch in (0, 1)] for rank in range(6)]
    file = tmp_path / "six.csv"
    file.write_text(
        "".join(
            ",".join([*[""] * rank, *row[:2], *[""] * (2 * (5 - rank)), *row[2:]]) + "\n"
            for rank, row in enumerate(rows)
        )
    )
    layout = "mesh.pp=6 mesh.dp_shard=2 mesh.tp=2 model.n_layers=6 data.global_batch=8"
    full = _load(RECIPE, f"{layout} parallel.schedule=csv parallel.schedule_csv={file}")
    (more,) = completed(full, shrink(full))
    assert (more.mesh.pp, more.mesh.dp_shard, more.mesh.tp) == (1, 2, 2)
    assert differences(full, [*shrink(full), more]) == []


def test_another_tensor_shows_a_cut_that_no_small_vocabulary_has() -> None:
    full = load(
        ROOT / "recipes" / "llama3-8b-8-fsdp.toml",
        ["mesh.dp_shard=512", "data.global_batch=512"],
        check_files=False,
    ).recipe
    small = shrink(full)
    lost = differences(full, small)
    assert {one.name for one in lost} == {
        "shards of first.embed.weight",
        "shards of last.head.weight",
    }
    assert all(one.left_out for one in lost)
    (found,) = [one for one in differences(full, small[:1]) if "embed" in one.name]
    assert (found.full, found.left_out) == ("some have none", "")


@pytest.mark.parametrize("matmul", ["compute", "float8"])
def test_a_pipeline_of_two_does_not_stand_for_one_with_middle_ranks(matmul: str) -> None:
    path = ROOT / "recipes" / "llama3-405b-16384-4d.toml"
    full = load(path, [f"precision.matmul={matmul}"], check_files=False).recipe
    lost = {one.name for one in differences(full, shrink(full))}
    assert lost == {
        "pipeline ranks between others",
        "micro-batches against pipeline ranks",
        "the last F of a stage after F",
        "the middle B of a stage after B",
    }
    (more,) = completed(full, shrink(full))
    assert (more.mesh.pp, more.micro_batches) == (3, 3)


@pytest.mark.parametrize(
    ("path", "full", "small", "name"),
    [
        (RECIPE, "mesh.tp=4 model.n_kv_heads=2", "mesh.tp=2 model.n_kv_heads=2", "key-value heads"),
        (RECIPE, "mesh.tp=2 model.vocab=257", "mesh.tp=2 model.vocab=256", "vocabulary over tp"),
        (RECIPE, "mesh.dp_shard=3 data.global_batch=12", "mesh.dp_shard=2", "shards of blocks"),
        (RECIPE, "data.seq_len=255", "data.seq_len=256", "tokens of a sequence"),
        *((RECIPE, f"mesh.cp=3 data.seq_len=252 parallel.cp_method={method} model.n_heads=6 "
           "model.n_kv_heads=3 model.head_dim=16", f"mesh.cp=2 parallel.cp_method={method}",
           "ranks that share a sequence") for method in ("ring", "allgather", "ulysses")),
        (RECIPE, "mesh.cp=4 model.window=60", "mesh.cp=2 model.window=60", "window"),
        (RECIPE, "mesh.pp=2 model.n_layers=3", "mesh.pp=2 model.n_layers=2", "blocks over stages"),
        # The head counts as blocks, so that the stages of 4 blocks are not equal.
        (RECIPE, "mesh.pp=2 model.n_layers=4 model.vocab=4096",
         "mesh.pp=2 model.n_layers=2 parallel.stages=[1,1]", "blocks over stages"),
        (RECIPE, "data.global_batch=2", "data.global_batch=4", "micro-batches"),
        (
            RECIPE,
            "mesh.pp=2 parallel.schedule=DualPipeV data.global_batch=24",
            "mesh.pp=2 parallel.schedule=DualPipeV data.global_batch=8",
            "micro-batches against the fewest",
        ),
        (
            RECIPE,
            "mesh.cp=2 parallel.cp_method=ulysses model.n_kv_heads=4",
            "mesh.cp=2 parallel.cp_method=ulysses model.n_kv_heads=2",
            "key-value heads of a rank of Ulysses",
        ),
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
        # A proof has lower limits than the job, and must still go beyond them.
        (RECIPE, "optim.name=muon mesh.dp_shard=2 model.dim=8192 model.ffn=32768",
         "optim.name=muon mesh.dp_shard=2 model.n_layers=1 optim.matrices=['*.wo.weight']",
         "rounds of matrices"),
        (RECIPE, "mesh.cp=2 data.seq_len=1024 model.window=257",
         "mesh.cp=2 data.seq_len=64 model.window=2", "window against a band"),
        # No unit is as large as the key allows.
        (RECIPE, "mesh.pp=4 model.n_layers=4 parallel.fsdp_blocks=4",
         "mesh.pp=2 model.n_layers=4 parallel.fsdp_blocks=2", "units of"),
        (RECIPE, "model.n_layers=6 model.window=16 model.full_every=3 parallel.fsdp_blocks=3",
         "model.n_layers=3 model.window=16 model.full_every=3 parallel.fsdp_blocks=2",
         "kinds of blocks of a unit"),
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
