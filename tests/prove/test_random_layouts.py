"""A slice of the random proof: no random layout is called wrong, and planted faults are found."""

import random
from dataclasses import fields
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from composer3d.recipe.schema import TABLES, model_table
from composer3d.runtime.launch import Pool
from tools.prove import random_layouts
from tools.prove.faults.exchanges import lose_the_hop_of_keys
from tools.prove.matrix import cover as matrix
from tools.prove.paths import RECIPE, ROOT

# Keys that change nothing of what a proof runs: where a run reads and writes, what it watches, and
# what it does on GPUs.
UNREAD_TABLES = ("checkpoint", "metrics", "validation", "reliability")
UNREAD = {
    *(f"run.{key}" for key in ("name", "device", "out_dir", "timeout_minutes", "deterministic")),
    "run.oversubscribe",
    "run.rank_logs",
    "run.sync",
    *(f"data.{key}" for key in ("source", "path", "sources", "field", "cache_dir", "cache_gib")),
    "data.other_tokenizer",
    "model.hf",
    "optim.newton_schulz_dtype",  # as precision.params
    "precision.params",  # a proof has the dtype of its own
    "parallel.async_tp",
    "parallel.attention_kernel",
}
MOE = ["model.architecture=moe", "model.preset=debug-moe"]
# The matrix fixes these: the other keys vary around them.
FIXED = {"model.n_heads"}


SMALL = 4  # layouts of each dtype


@cache
def small(dtype: str) -> list[list[str]]:
    """The first layouts of one or two processes. To draw them takes a second."""
    drawn = random_layouts.layouts(50, dtype=dtype)
    few = (sets for sets in drawn if random_layouts.recipe_of(sets).world_size <= 2)
    return list(islice(few, SMALL))


@pytest.mark.parametrize("number", range(SMALL))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_random_layout_is_exact(
    pool: Pool, references: Path, dtype: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # recipes name schedule files relative to it
    verdict, effect = random_layouts.prove(pool, references, small(dtype)[number], dtype)
    assert verdict.passed, verdict
    assert effect < (random_layouts.EFFECT if dtype == "float64" else 1e-3)


def test_layouts_are_the_same_for_a_seed() -> None:
    few, more = list(random_layouts.layouts(3)), list(random_layouts.layouts(5))
    assert few == more[:3]
    assert list(random_layouts.layouts(3, seed=1)) != few
    assert all(random_layouts.is_legal(sets) for sets in more)


def test_the_generator_draws_every_key_that_a_proof_reads() -> None:
    generator = random.Random(0)
    rows = [matrix.complete((), generator) for _ in range(1000)]
    drawn = {"run.seed", *random_layouts.SETTINGS}
    drawn |= {key for row in rows if row is not None for key in matrix.overrides(row)}
    keys = {
        f"{name}.{entry.name}"
        for name, table in TABLES.items()
        for entry in fields(model_table("moe") if name == "model" else table)
        if name not in UNREAD_TABLES
    }
    assert keys - drawn == UNREAD | FIXED


def test_each_value_of_a_setting_is_legal_in_some_layout() -> None:
    """A value that no layout can have would prove nothing."""
    layouts = [
        ["mesh.dp_shard=2", "optim.schedule=wsd", "precision.compute=bfloat16"],
        ["run.steps=1000001"],
        ["model.qkv_bias=true"],
        ["model.window=5"],
        ["optim.name=muon"],
        ["model.rope_factor=8.0"],
        ["model.rope_factor=8.0", "model.rope_scaling=yarn"],
        [*MOE, "model.renormalise=false"],
        [*MOE, "model.shared_ffn=40"],
        [*MOE, "model.expert_groups=2"],
        [*MOE, "model.router=sigmoid", "model.router_bias=true"],
        *(
            ["mesh.pp=2", "parallel.schedule=Interleaved1F1B", f"model.n_layers={n}"]
            for n in (5, 6)
        ),
        *(["mesh.pp=2", f"model.n_layers={n}"] for n in (3, 4)),
    ]
    for key, values in random_layouts.SETTINGS.items():
        for value in filter(None, values):
            legal = [random_layouts.is_legal([*sets, f"{key}={value}"]) for sets in layouts]
            assert any(legal), f"{key}={value}"


def test_a_fault_is_found_or_has_no_effect(
    pool: Pool, references: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In windows of one token, no key travels far enough to be lost."""
    monkeypatch.chdir(ROOT)
    for sets, is_found in (([], True), (["model.window=1"], False)):
        layout = ["mesh.cp=2", *sets]
        verdict, effect = random_layouts.prove(
            pool, references, layout, "float64", RECIPE, lose_the_hop_of_keys
        )
        assert verdict.passed != is_found
        assert (effect > random_layouts.EFFECT) == is_found
