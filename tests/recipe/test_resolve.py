"""Resolution of a recipe: inheritance, overrides, defaults, presets, and origins of values."""

import json
import math
import os
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import tomli

from composer3d.facts.errors import RecipeError
from composer3d.models.llama.shape import PRESETS
from composer3d.recipe.changes import changes
from composer3d.recipe.resolve import Resolved, load
from composer3d.recipe.rules import violations
from composer3d.recipe.schema import TABLES, Model
from tests.recipe.wrong import shape, token_files
from tools.prove.paths import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
WORLDS = {
    "debug-1-single": 1,
    "debug-2-dp": 2,
    "debug-4-dp-tp": 4,
    "debug-8-dp-tp-pp": 8,
    "quickstart": 8,
    "quickstart-moe": 8,
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def one(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, newline="")
        return name

    return one


def layered(write) -> str:
    write(
        "low.toml",
        '[model]\npreset = "debug-tiny"\nffn = 192\n'
        "[run]\nsteps = 5\nseed = 3\n[optim]\nbetas = [0.8, 0.9]\n",
    )
    write("sub/mid.toml", 'base = "../low.toml"\n[run]\nsteps = 6\nname = "mid"\n')
    return write("x.toml", 'base = "sub/mid.toml"\nmesh = { tp = 2 }\n[run]\nname = "x"\n')


def test_the_nearest_file_wins_and_an_override_beats_it(write) -> None:
    resolved = load(layered(write), ["run.seed=7", "optim.lr=1", "run.seed=8"])
    recipe, origins = resolved.recipe, resolved.origins
    assert (recipe.run.name, recipe.run.steps, recipe.run.seed, recipe.mesh.tp) == ("x", 6, 8, 2)
    assert origins["run.name"] == "x.toml:4"
    assert origins["run.steps"] == "sub/mid.toml:3"
    assert origins["run.seed"] == "--set run.seed=8"
    assert origins["mesh.tp"] == "x.toml:2"
    assert origins["optim.betas"] == "sub/../low.toml:8"
    assert origins["optim.eps"] == "default"
    assert recipe.optim.betas == (0.8, 0.9)
    assert isinstance(recipe.optim.lr, float)


def test_a_preset_gives_what_the_recipe_does_not(write) -> None:
    resolved = load(layered(write))
    assert resolved.recipe.model == Model(
        **asdict(replace(PRESETS["debug-tiny"], ffn=192)), preset="debug-tiny"
    )
    assert resolved.origins["model.ffn"] == "sub/../low.toml:3"
    assert (
        resolved.origins["model.dim"] == resolved.origins["model.rope_theta"] == "preset debug-tiny"
    )
    assert resolved.origins["model.norm_eps"] == resolved.origins["model.window"] == "default"
    assert resolved.place("model.dim") == "sub/../low.toml:2"
    assert resolved.origins["model.preset"] == "sub/../low.toml:2"


def test_a_preset_replaces_no_shape_that_is_written_out(write) -> None:
    preset = "model.preset=debug-small"
    kept = write("kept.toml", load(write("x.toml", '[model]\npreset = "debug-tiny"\n')).to_toml())
    with pytest.raises(RecipeError, match=r"model\.dim = 64 \(kept\.toml:\d+\) instead of 128"):
        load(kept, [preset, preset])
    with pytest.raises(RecipeError) as refused:
        load(kept, [preset, "model.dim=32"])
    assert "model.ffn = 160" in refused.value.lines[0]
    assert "model.dim" not in refused.value.lines[0]
    # What the preset gives is set too, or is what the recipe has.
    small = PRESETS["debug-small"]
    sets = [f"model.{name}={size}" for name, size in asdict(small).items() if size is not None]
    sets = [text for text in sets if not text.endswith(("True", "False"))]
    assert load(kept, [preset, *sets]).recipe.model == Model(**asdict(small), preset="debug-small")
    assert load(kept, ["model.preset=debug-tiny", "model.dim=32"]).recipe.model.dim == 32
    # The usual width of a head may be written out, or not.
    usual = write("usual.toml", shape(head_dim=16))
    assert load(usual, ["model.preset=debug-tiny"]).recipe.model.head_dim == 16
    # Some sizes beside a preset are changes of any preset.
    changed = write("y.toml", '[model]\npreset = "debug-tiny"\nn_heads = 8\n')
    assert load(changed, [preset]).recipe.model.n_heads == 8


def test_a_shape_without_preset_takes_defaults_for_other_fields(write) -> None:
    path = write(
        "x.toml",
        "[model]\ndim = 64\nn_layers = 2\nn_heads = 2\nn_kv_heads = 1\nffn = 96\nvocab = 300\n",
    )
    resolved = load(path)
    expected = Model(dim=64, n_layers=2, n_heads=2, n_kv_heads=1, ffn=96, vocab=300)
    assert resolved.recipe.model == expected
    assert resolved.origins["model.rope_theta"] == "default"


def test_a_folder_of_hugging_face_gives_what_the_recipe_does_not(write, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    config = {
        "model_type": "mistral",
        "vocab_size": 300,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
    } | sizes
    write("m/config.json", json.dumps(config))
    path = write("x.toml", '[run]\nsteps = 5\n[model]\nhf = "m"\nwindow = 16\nnorm_eps = 1e-5\n')
    resolved = load(path, ["model.n_layers=1"])
    sizes = {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn": 96, "vocab": 300}
    assert resolved.recipe.model == Model(**sizes, rope_theta=1e6, norm_eps=1e-5, window=16, hf="m")
    origins = {key.removeprefix("model."): origin for key, origin in resolved.origins.items()}
    assert origins["dim"] == origins["rope_theta"] == "config.json of m"
    assert (origins["window"], origins["norm_eps"], origins["hf"]) == (
        "x.toml:5",
        "x.toml:6",
        "x.toml:4",
    )
    assert (origins["n_layers"], origins["tied"]) == ("--set model.n_layers=1", "default")
    assert resolved.place("model.dim") == "x.toml:4"
    assert round_trip(resolved, tmp_path / "again.toml").recipe == resolved.recipe
    (tmp_path / "m/config.json").unlink()
    # A resolved recipe has the shape itself: only the first weights need the folder.
    (tmp_path / "m").rmdir()
    checkpoints = tmp_path / "runs" / resolved.recipe.run.name / "checkpoints"
    for folder in (tmp_path, checkpoints):  # Also that of a run that has not saved yet.
        folder.mkdir(parents=True, exist_ok=True)
        with pytest.raises(RecipeError, match=r'model\.hf = "m" is not a folder'):
            round_trip(resolved, tmp_path / "again.toml")
    (checkpoints / "step-00000005").mkdir()
    assert round_trip(resolved, tmp_path / "again.toml").recipe == resolved.recipe


def test_the_place_of_a_key_that_is_not_written_is_its_table_or_the_file(write) -> None:
    resolved = load(layered(write))
    assert resolved.place("mesh.pp") == "x.toml:2"
    assert resolved.place("run.device") == "x.toml:3"
    assert resolved.place("data.seq_len") == "x.toml"


def test_origins_cover_the_whole_recipe(write) -> None:
    resolved = load(layered(write))
    assert list(resolved.origins) == [
        f"{table}.{entry.name}"
        for table in TABLES
        for entry in fields(getattr(resolved.recipe, table))
    ]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("run.name=a b", "name", "a b"),
        ('run.name="a b"', "name", "a b"),
        ("run.name='\"a\"'", "name", '"a"'),
        ("run.name=4", "name", "4"),
        ("run.name=true", "name", "true"),
        ("run.name=a=b", "name", "a=b"),
        ('run.name="', "name", '"'),
        (" run.name = a", "name", "a"),
        ("run.steps=1_000", "steps", 1000),
        ("run.steps = 0x10", "steps", 16),
        ("run.device=cpu", "device", "cpu"),
        ('run.device="cpu"', "device", "cpu"),
    ],
)
def test_overrides_are_text_for_str_and_toml_for_other_types(
    write, text: str, key: str, value: object
) -> None:
    resolved = load(layered(write), [text])
    assert getattr(resolved.recipe.run, key) == value
    assert resolved.origins[f"run.{key}"] == f"--set {text}"


def test_dp_shard_takes_all_remaining_processes(write) -> None:
    path = layered(write)
    assert load(path).recipe.mesh.dp_shard == 1
    resolved = load(path, world_size=8)
    assert resolved.recipe.mesh.dp_shard == 4
    assert resolved.recipe.world_size == 8
    assert resolved.origins["mesh.dp_shard"] == "default, to fill 8 processes"
    assert load(path, ["mesh.dp_shard=-1", "mesh.pp=2"], world_size=8).recipe.mesh.dp_shard == 2


def test_dp_shard_is_large_enough_for_ep(write) -> None:
    text = '[model]\narchitecture = "moe"\npreset = "debug-moe"\n[mesh]\nep = 4\ntp = 2\n'
    path = write("x.toml", text)
    resolved = load(path)
    assert resolved.recipe.mesh.dp_shard == 2
    assert resolved.origins["mesh.dp_shard"] == "default, the least for ep 4"
    assert load(path, world_size=8).recipe.mesh.dp_shard == 4
    assert load(path, ["mesh.cp=2", "data.seq_len=64"], world_size=8).recipe.mesh.dp_shard == 2
    with pytest.raises(RecipeError) as error:
        load(path, world_size=6)
    assert error.value.lines == (
        "x.toml:4: mesh pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2 = 4 processes (the least "
        "dp_shard for ep 4), but the world has 6; start 4 or 8 processes, or change an axis of "
        "[mesh]",
    )


def test_a_byte_order_mark_and_carriage_returns_are_read(write) -> None:
    path = write("x.toml", '\ufeff[model]\r\npreset = "debug-tiny"\r\n[run]\r\nsteps = 9\r\n')
    assert load(path).origins["run.steps"] == "x.toml:4"


def test_a_checkpoint_may_be_named_by_its_folder(write, tmp_path: Path) -> None:
    path = layered(write)
    assert load(path, [f"checkpoint.resume={tmp_path}"]).recipe.checkpoint.resume == str(tmp_path)


def round_trip(resolved: Resolved, path: Path, world_size: int | None = None) -> Resolved:
    path.write_text(resolved.to_toml())
    return load(path, world_size=world_size)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads_and_comes_back_equal(path: Path, tmp_path: Path) -> None:
    resolved = load(path)
    assert violations(resolved.recipe) == []
    assert changes(resolved.to_toml(), resolved.recipe) == []
    assert round_trip(resolved, tmp_path / "again.toml").recipe == resolved.recipe
    world = WORLDS.get(path.stem) or next(
        int(part) for part in path.stem.split("-") if part.isdigit()
    )
    assert load(path, world_size=world).recipe.world_size == world
    assert resolved.recipe.run.name == path.stem
    assert len(path.read_text().splitlines()) <= 40


def test_hard_values_come_back_equal(write, tmp_path: Path) -> None:
    sets = [
        "run.name='\" # é 𝛼",
        "run.out_dir='\"# é 𝛼",
        "data.source=jsonl",
        "data.path=x.toml",
        "data.field='\"\\ \t\n# é \x7f 𝛼",
        "optim.lr=1e-300",
        "optim.eps=5e-324",
        "optim.clip=1e-22",
        "optim.min_lr=0",
        "run.seed=9223372036854775807",
        "parallel.loss_parallel=false",
        "optim.decay=50",
    ]
    resolved = load(layered(write), [text.replace("\\", "") for text in sets])
    assert resolved.recipe.optim.eps == math.ulp(0.0)
    again = round_trip(resolved, tmp_path / "again.toml")
    assert again.recipe == resolved.recipe
    assert all(
        "again.toml:" in origin for key, origin in again.origins.items() if tomli_has(tmp_path, key)
    )


def tomli_has(folder: Path, key: str) -> bool:
    table, name = key.split(".")
    return name in tomli.loads((folder / "again.toml").read_text())[table]


def test_sources_come_back_equal(write, tmp_path: Path) -> None:
    tables = "".join(
        f'[[data.sources]]\npath = "{name}"\nweight = {weight}\n'
        for name, weight in (("x.toml", 2), ("x.toml ", 0.1))
    )
    (tmp_path / "x.toml ").write_text("x" * 1000)
    path = write("s.toml", f'[model]\npreset = "debug-tiny"\n[data]\nsource = "text"\n{tables}')
    (tmp_path / "x.toml").write_text("x" * 1000)
    resolved = load(path, check_files=False)
    assert resolved.recipe.data.paths == ("x.toml", "x.toml ")
    assert [source.weight for source in resolved.recipe.data.sources or ()] == [2.0, 0.1]
    assert resolved.origins["data.sources"] == f"{path}:5"
    again = tmp_path / "again.toml"
    again.write_text(resolved.to_toml())
    assert load(again, check_files=False).recipe == resolved.recipe
    override = load(path, ['data.sources=[{path="y", weight=3}]'], check_files=False)
    assert override.recipe.data.paths == ("y",)


def test_to_toml_says_where_each_value_came_from(write) -> None:
    written = load(layered(write), ["run.seed=7"]).to_toml().splitlines()
    trimmed = [" ".join(line.split()) for line in written]
    assert "seed = 7 # --set run.seed=7" in trimmed
    assert "steps = 6 # sub/mid.toml:3" in trimmed
    assert "dim = 64 # preset debug-tiny" in trimmed
    assert "# path is absent # default" in trimmed


def test_a_part_of_a_blend_may_not_be_another_one(write) -> None:
    write("a", "some words")
    write("b", "some words")
    os.link("a", "hard")
    os.symlink("a", "soft")
    for name, content in (token_files("t") | token_files("u")).items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    os.symlink("t", "v")

    def blend(source: str, *paths: str) -> None:
        parts = "".join(f'[[data.sources]]\npath = "{path}"\nweight = 1\n' for path in paths)
        data = f'[data]\nsource = "{source}"\nseq_len = 8\n'
        load(write("x.toml", f'[model]\npreset = "debug-tiny"\n{data}{parts}'))

    for name in ("a", "hard", "soft", "../" + Path.cwd().name + "/a"):
        with pytest.raises(RecipeError, match=r'has the same text as path = "a", so that'):
            blend("text", "b", "a", name)
    blend("text", "a", "b")  # no text is read for this
    with pytest.raises(RecipeError, match=r'path = "v" has the same text as path = "t", so that'):
        blend("tokens", "t", "u", "v")
    blend("tokens", "t", "u")  # an older composer3d has made them, without a digest of contents
