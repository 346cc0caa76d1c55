"""Recipes that are made of tables in Python."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from composer3d.facts.errors import ModelError, RecipeError
from composer3d.models import registry
from composer3d.recipe.draft import parse_document
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import (
    DataSource,
    DataTable,
    MeshTable,
    MetricsTable,
    OptimGroup,
    OptimTable,
    ParallelTable,
    Recipe,
    RunTable,
)
from composer3d.recipe.tables import as_document, load_recipe, make_recipe, own_model, preset
from tools.prove.paths import ROOT

TINY = preset("debug-tiny")


def recipe_of(text: str) -> Recipe:
    return load(parse_document(text, "x.toml"), check_files=False).recipe


def test_tables_make_the_recipe_that_a_file_with_their_values_makes() -> None:
    groups = (
        OptimGroup(train=("first.*", "last.head.*"), lr_factor=0.5),
        OptimGroup(train=("*norm*",)),
    )
    made = make_recipe(
        preset("debug-tiny", n_layers=2),
        MeshTable(tp=2, dp_shard=2),
        ParallelTable(zero=1),
        DataTable(
            source="tokens",
            sources=(DataSource(path="a", weight=1.0), DataSource(path="b", weight=2.0)),
        ),
        OptimTable(groups=groups, betas=(0.8, 0.9)),
        check_files=False,
    )
    assert made == recipe_of(
        """
        [model]
        preset = "debug-tiny"
        n_layers = 2
        [mesh]
        tp = 2
        dp_shard = 2
        [parallel]
        zero = 1
        [data]
        source = "tokens"
        sources = [{ path = "a", weight = 1.0 }, { path = "b", weight = 2.0 }]
        [optim]
        groups = [{ train = ["first.*", "last.head.*"], lr_factor = 0.5 }, { train = ["*norm*"] }]
        betas = [0.8, 0.9]
        """
    )


@pytest.mark.parametrize("architecture", registry.OURS)
def test_every_preset_is_a_model(architecture: str) -> None:
    for name, shape in registry.architecture(architecture).presets.items():
        recipe = make_recipe(preset(name), DataTable(source="tokens", path="x"), check_files=False)
        assert recipe.model.architecture == architecture
        assert recipe.model.preset == name
        assert {key: getattr(recipe.model, key) for key in vars(shape)} == vars(shape)


def test_its_document_gives_the_same_recipe_again() -> None:
    for model in (TINY, preset("debug-moe-shared")):
        made = make_recipe(model, MeshTable(dp_shard=2), RunTable(name='a "name"'))
        assert recipe_of(as_document(made)) == made


def test_overrides_and_the_world_complete_it() -> None:
    recipe = make_recipe(TINY, MeshTable(tp=2), sets=["mesh.cp=2"], world_size=8)
    assert recipe.mesh == MeshTable(tp=2, cp=2, dp_shard=2)
    assert make_recipe(TINY, MeshTable(tp=2)).mesh.dp_shard == 1
    with pytest.raises(RecipeError, match="= 2 processes, but the world has 3; start 2 processes"):
        make_recipe(TINY, MeshTable(tp=2, dp_shard=1), world_size=3)


def test_what_a_recipe_may_not_have_is_refused_with_a_line_for_each() -> None:
    with pytest.raises(RecipeError) as found:
        make_recipe(TINY, MeshTable(cp=4), DataTable(seq_len=30), OptimTable(lr=-1.0))
    assert [line.partition(" ")[0] for line in found.value.lines] == ["optim.lr", "data.seq_len"]
    assert found.value.lines[1] == (
        "data.seq_len = 30 must be a multiple of 8: mesh.cp = 4 cuts it into 8 chunks; use 24 or 32"
    )


def test_a_value_that_is_its_default_counts_as_not_given() -> None:
    with pytest.raises(RecipeError, match=r"parallel\.sequence_parallel = true \(default\)"):
        make_recipe(TINY, MeshTable(tp=4), DataTable(seq_len=30), ParallelTable(zero=1))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: preset("mamba"), ModelError, r"there is no preset 'mamba'; the presets are debug"),
        (lambda: preset("llama3-7b"), ModelError, r"'llama3-7b'; did you mean 'llama3-.*b'\?"),
        (lambda: preset("debug-tiny", layers=1), TypeError, "layers"),
        (lambda: own_model("x", dim=1), ModelError, r'there is no architecture "x"'),
        (lambda: own_model("no_such.module:A"), ModelError, "cannot be imported: ModuleNotFound"),
        (lambda: own_model("__main__:TINY"), ModelError, r'name its file, such as "tiny:TINY"'),
        (lambda: make_recipe(TINY, MeshTable(), MeshTable()), ValueError, "two tables of the kind"),
        (
            lambda: make_recipe(TINY, MetricsTable()),
            TypeError,
            "a MetricsTable is none of the tables",
        ),
        (lambda: make_recipe(TINY, MeshTable(tp="2")), RecipeError, r"'mesh\.tp' must be int"),
        (lambda: make_recipe(replace(TINY, n_heads=3)), RecipeError, r"model\.n_heads = 3"),
        (lambda: make_recipe(TINY, sets=["mesh.t=2"]), RecipeError, r"unknown key 'mesh\.t'"),
        (
            lambda: make_recipe(TINY, DataTable(source="text", path="/no/such/file")),
            RecipeError,
            r"^data\.path = \"/no/such/file\"",
        ),
    ],
)
def test_what_is_wrong_is_said(
    make: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_model_of_ones_own_is_imported_from_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/own_model.md").read_text(), re.DOTALL | re.M
    )
    (tmp_path / "gpt_of_a_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn": 64, "vocab": 256}
    model = own_model("gpt_of_a_test:ARCHITECTURE", **sizes, max_positions=300)
    recipe = make_recipe(model, MeshTable(tp=2))
    assert vars(recipe.model) == vars(model)
    assert recipe.model.architecture == "gpt_of_a_test:ARCHITECTURE"
    with pytest.raises(RecipeError, match=r"model\.max_positions = 0 must be from 1"):
        make_recipe(replace(model, max_positions=0))
    del sys.modules["gpt_of_a_test"]


def test_a_file_is_read_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[model]\npreset = "debug-tiny"\n')
    assert load_recipe(path, ["mesh.tp=2"]) == make_recipe(TINY, MeshTable(tp=2))
    with pytest.raises(RecipeError, match=r"x\.toml: mesh"):
        load_recipe(path, ["mesh.tp=2"], world_size=3)
