"""The rules, called with values alone, as the planner calls them."""

from dataclasses import fields, replace

import pytest

from composer3d.models.registry import OURS
from composer3d.recipe.resolve import load
from composer3d.recipe.rules import RANGES, RULES, settle, violations
from composer3d.recipe.schema import AXES, MeshTable, Recipe, model_table
from composer3d.recipe.values import FIELDS, entries_of, mention
from tools.prove.paths import ROOT


@pytest.fixture
def recipe() -> Recipe:
    return load(ROOT / "recipes" / "debug-8-dp-tp-pp.toml").recipe


def changed(recipe: Recipe, **values: object) -> Recipe:
    """Replace values: ``mesh__tp=3`` replaces that of mesh.tp."""
    for key, value in values.items():
        table, name = key.split("__")
        recipe = replace(recipe, **{table: replace(getattr(recipe, table), **{name: value})})
    return recipe


def keys_broken(recipe: Recipe) -> list[str]:
    return [violation.key for violation in violations(recipe)]


def test_axes_are_the_keys_of_the_mesh_in_order() -> None:
    # ep groups the same ranks in another way: it is no axis.
    assert tuple(entry.name for entry in fields(MeshTable)) == (*AXES, "ep")


# The keys of all architectures of composer3d.
ALL_FIELDS = {
    **FIELDS,
    **{
        key: each for name in OURS for key, each in entries_of({"model": model_table(name)}).items()
    },
}


def test_rules_name_keys_of_the_schema() -> None:
    assert set(RANGES) <= set(FIELDS)
    assert {key for keys, _ in RULES for key in keys} <= set(ALL_FIELDS)


def test_a_violation_mentions_each_key_that_it_blames(recipe: Recipe) -> None:
    wrong = changed(recipe, mesh__tp=3)
    found = violations(wrong)
    assert [(violation.key, violation.others[0]) for violation in found] == [
        ("mesh.tp", "model.n_heads"),
        ("mesh.tp", "model.n_kv_heads"),
        ("mesh.tp", "model.ffn"),
        ("data.seq_len", "mesh.tp"),
    ]
    for violation in found:
        assert mention(wrong, violation.key) in violation.message(wrong)
        assert mention(wrong, violation.others[0]) in violation.message(wrong)


def test_a_refused_value_is_not_divided_by(recipe: Recipe) -> None:
    zeros = {
        key.replace(".", "__"): 0
        for key, entry in FIELDS.items()
        if entry.type is int or key.startswith("model.n")
    }
    broken = keys_broken(changed(recipe, **zeros))
    assert len(broken) == len(set(broken)) > 10
    assert "mesh.tp" in broken


def test_an_open_axis_leaves_its_rules_out(recipe: Recipe) -> None:
    assert keys_broken(changed(recipe, mesh__dp_shard=-1, data__global_batch=7)) == []
    assert keys_broken(changed(recipe, mesh__dp_shard=-2)) == ["mesh.dp_shard"]


@pytest.mark.parametrize(
    "good",
    [
        {"parallel__schedule": "GPipe", "data__global_batch": 2},
        {"mesh__pp": 1, "data__global_batch": 2},
        {"mesh__pp": 3, "data__global_batch": 6},
        {"parallel__sequence_parallel": False, "data__seq_len": 33},
        {"mesh__tp": 1, "data__seq_len": 33},
        # More than the key-value heads.
        {"mesh__tp": 4},
        {"model__window": 15, "mesh__cp": 2},
        {"model__vocab": 257},
        {"model__vocab": 257, "mesh__dp_shard": 64, "data__global_batch": 256},
        {
            "model__vocab": 257,
            "mesh__dp_shard": 1,
            "mesh__cp": 3,
            "parallel__zero": 0,
            "data__seq_len": 240,
        },
        {"parallel__zero": 0, "mesh__dp_shard": 1, "mesh__dp_replicate": 2},
        {"reliability__digest_every": 1, "mesh__dp_shard": 2},
        {"reliability__straggler_factor": 1.1, "reliability__straggler_window": 3},
        {"reliability__on_bad_step": "skip", "reliability__max_bad_steps": 7},
        {"reliability__on_bad_step": "rollback", "checkpoint__every_minutes": 0.0},
        {"reliability__on_bad_step": "rollback", "checkpoint__every": 0},
        {"reliability__spike_sigma": 2.0, "reliability__spike_window": 64},
        {"optim__warmup": 20},
        {"optim__min_lr": 1e-3},
        {"optim__betas": (0.0, 0.999)},
        {"optim__clip": 0.0, "optim__weight_decay": 0.0},
        {"data__source": "text", "data__path": "t"},
        {
            "data__source": "text",
            "data__path": "t",
            "validation__every": 5,
            "validation__path": "v",
        },
    ],
    ids=str,
)
def test_a_value_that_is_just_legal_is_accepted(recipe: Recipe, good: dict[str, object]) -> None:
    assert violations(changed(recipe, **good)) == []


@pytest.mark.parametrize(
    "good",
    [
        {"mesh__ep": 2},
        {"mesh__ep": 4},
        # The shards of an expert need not be even if nothing is sharded, or if ep takes all ranks.
        {"parallel__zero": 0, "mesh__dp_shard": 1, "mesh__dp_replicate": 2, "model__expert_ffn": 49}
        | {"mesh__tp": 1},
        {"mesh__ep": 4, "model__expert_ffn": 49},
        {"mesh__tp": 1, "parallel__sequence_parallel": False},
        {"model__experts_per_token": 8},
        {"model__experts_per_token": 4, "model__expert_groups": 4, "model__groups_per_token": 2},
        {"model__dense_layers": 3},
        {"model__moe_every": 4},
        {"model__shared_ffn": 30},
        {"mesh__dp_shard": -1, "mesh__ep": 8},
        # In float8, a width that no block has does not matter.
        {"precision__matmul": "float8", "precision__compute": "bfloat16", "model__ffn": 100}
        | {"model__expert_ffn": 96},
    ],
    ids=str,
)
def test_a_layout_of_experts_that_is_just_legal_is_accepted(good: dict[str, object]) -> None:
    recipe = load(ROOT / "recipes" / "quickstart-moe.toml", ["mesh.ep=1"]).recipe
    assert violations(changed(recipe, **good)) == []


@pytest.mark.parametrize(
    "model",
    [
        "preset=smollm3-3b n_layers=3",
        "architecture=olmo2 preset=debug-olmo3 n_layers=3",
        "architecture=gemma3 preset=debug-gemma3 window=0 full_every=0",
        "architecture=deepseek preset=deepseek-v2 expert_groups=1 groups_per_token=1",
        "n_layers=4 nope_every=4 window=8 full_every=4",  # the fourth block is there
    ],
)
def test_a_preset_may_have_a_key_that_does_nothing(model: str) -> None:
    sets = [f"model.{each}" for each in model.split()]
    load(ROOT / "recipes" / "debug-1-single.toml", sets, check_files=False)


def test_the_suggested_values_of_ep_are_legal() -> None:
    recipe = load(ROOT / "recipes" / "quickstart-moe.toml").recipe
    wrong = changed(recipe, mesh__ep=3)
    for violation in violations(wrong):
        legal = violation.message(wrong).partition("; use ")[2]
        assert legal == "1, 2 or 4"
    assert all(violations(changed(recipe, mesh__ep=ep)) == [] for ep in (1, 2, 4))
    # While dp_shard is open, only the experts limit ep.
    (violation,) = violations(changed(recipe, mesh__ep=3, mesh__dp_shard=-1))
    assert violation.template.endswith("; use 1, 2, 4 or 8")


def test_the_suggested_values_of_tp_are_legal(recipe: Recipe) -> None:
    wrong = changed(recipe, mesh__tp=8)
    message = violations(wrong)[0].message(wrong)
    legal = [int(word.strip(",")) for word in message.split("use ")[1].split() if word != "or"]
    assert legal == [1, 2, 4]
    assert all(violations(changed(recipe, mesh__tp=tp)) == [] for tp in legal)


def test_only_the_given_keys_give_way(recipe: Recipe) -> None:
    wrong = changed(
        recipe,
        **{"mesh__tp": 1, "mesh__dp_shard": 1, "precision__reduce": "bfloat16"},
        **{"parallel__async_tp": True, "reliability__digest_every": 3},
    )
    assert settle(wrong, ()) == wrong
    settled = settle(wrong, ("precision.reduce", "parallel.async_tp"))
    assert settled == changed(wrong, precision__reduce=None, parallel__async_tp=False)
    assert keys_broken(settled) == ["reliability.digest_every"]
