"""torchtitan's TOML of 0.1 and 0.2."""

from pathlib import Path

import pytest

from composer3d.spec.errors import RecipeError
from tests.imports.configurations import TORCHTITAN, imported


def test_a_file(tmp_path: Path) -> None:
    made = imported(tmp_path, "llama3_8b.toml", TORCHTITAN)
    recipe = made.resolved.recipe
    assert (recipe.model.preset, recipe.model.rope_factor) == ("llama3-8b", 8.0)
    assert (recipe.mesh.dp_replicate, recipe.mesh.dp_shard, recipe.mesh.tp) == (2, 8, 2)
    assert (recipe.parallel.zero, recipe.precision.matmul) == (3, "float8")
    assert (recipe.data.global_batch, recipe.data.micro_batch) == (64, 2)
    assert (recipe.optim.schedule, recipe.optim.decay_steps) == ("wsd", 100)
    assert recipe.memory.activation_checkpoint == "selective"
    assert recipe.compile.enabled
    assert made.made.contradictions == []


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("degree = 8", "degree = -1", "mesh.dp_shard", 8),
        ("degree = 8", "degree = 1", "parallel.zero", 0),
        ("global_batch_size = 64", "global_batch_size = -1", "data.global_batch", 32),
        ('mode = "selective"', 'mode = "none"', "memory.activation_checkpoint", "none"),
        ('option = "op"', 'option = "3"', "memory.activation_checkpoint", "every 3 blocks"),
        ('flavor = "8B"', 'flavor = "debugmodel"', "model.ffn", 768),
        ("[compile]\nenable", "[compile]\ncomponents", "compile.enabled", False),
        ("decay_ratio = 0.1", 'decay_type = "cosine"', "optim.schedule", "cosine"),
        (
            "tensor_parallel",
            "fsdp_reshard_after_forward = 'never'\ntensor_parallel",
            "parallel.zero",
            2,
        ),
        ("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2", "data.micro_batch", 1),
        ("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2", "parallel.zero", 1),
        (
            "tensor_parallel_degree = 2",
            "context_parallel_degree = 2",
            "parallel.cp_method",
            "allgather",
        ),
        (
            "[compile]",
            "[checkpoint]\nkeep_latest_k = 0\nasync_mode = 'async'\n[compile]",
            "checkpoint.async_save",
            True,
        ),
        ("[compile]", "[validation]\nenable = true\nfreq = 50\n[compile]", "validation.every", 50),
        ("warmup_steps = 200", "min_lr_factor = 0.1", "optim.min_lr", 0.1 * 3e-4),
    ],
)
def test_a_change(tmp_path: Path, old: str, new: str, key: str, value: object) -> None:
    assert old in TORCHTITAN
    gpus = 32 if new == "degree = -1" else None
    recipe = imported(tmp_path, "x.toml", TORCHTITAN.replace(old, new), gpus=gpus).resolved.recipe
    table, name = key.split(".")
    assert getattr(getattr(recipe, table), name) == value


def test_a_validation_of_the_whole_data(tmp_path: Path) -> None:
    off = "[validation]\nenable = false\nfreq = 500\nsteps = -1\n"
    recipe = imported(tmp_path, "off.toml", TORCHTITAN + off).resolved.recipe
    assert recipe.validation.every == 0
    made = imported(tmp_path, "on.toml", TORCHTITAN + "[validation]\nenable = true\nsteps = -1\n")
    assert made.resolved.recipe.validation.every == 10  # the default of torchtitan
    assert "validation.steps = 10: theirs reads the whole data" in made.made.assumed


def test_converters_of_0_1_are_one_text(tmp_path: Path) -> None:
    text = TORCHTITAN.replace('["float8"]', '"float8"')
    assert imported(tmp_path, "x.toml", text).resolved.recipe.precision.matmul == "float8"


def test_a_file_of_0_1(tmp_path: Path) -> None:
    text = "[model]\nflavor = '405B'\n[training]\ncompile = true\n[lr_scheduler]\nlr_min = 0.1\n"
    made = imported(tmp_path, "x.toml", text, gpus=8)
    recipe = made.resolved.recipe
    assert (recipe.model.preset, recipe.model.rope_factor) == ("llama3-405b", 1.0)
    assert recipe.compile.enabled
    assert recipe.optim.min_lr == pytest.approx(8e-5)
    # The defaults of torchtitan.
    assert (recipe.run.steps, recipe.data.seq_len, recipe.data.micro_batch) == (10_000, 2048, 8)
    assert recipe.memory.activation_checkpoint == "every 2 blocks"


@pytest.mark.parametrize(
    ("old", "is_kept"), [("", False), ('converters = ["float8"]', True), ("enable = true", False)]
)
def test_async_tp_needs_its_company(old: str, is_kept: bool, tmp_path: Path) -> None:
    asking = "[parallelism]\nenable_async_tensor_parallel = true"
    text = TORCHTITAN.replace("[parallelism]", asking).replace(old, "")
    made = imported(tmp_path, "x.toml", text)
    assert made.resolved.recipe.parallel.async_tp is is_kept
    assert any("enable_async" in line for line in made.made.lost) is not is_kept


def test_experts(tmp_path: Path) -> None:
    text = "[model]\nname = 'qwen3'\nflavor = '30B-A3B'\nconverters = ['float8']\n[compile]\n"
    text += "enable = true\n[parallelism]\nexpert_parallel_degree = 8\n"
    made = imported(tmp_path, "x.toml", text, gpus=16)
    recipe = made.resolved.recipe
    assert (recipe.model.architecture, recipe.mesh.ep) == ("moe", 8)
    assert (recipe.precision.matmul, recipe.compile.enabled) == ("compute", False)
    assert len([line for line in made.made.lost if "experts" in line]) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.toml", "[model]\nname = 'flux'\n", "no model of ours; give the nearest with --model"),
        ("x.toml", "[mesh]\ntp = 2\n", "is a recipe of composer3d already"),
        ("x.toml", "[other]\nx = 1\n", "has no words of"),
        ("x.toml", "[model", "not TOML"),
        (
            "x.py",
            "def llama3_8b():\n    return Trainer.Config()\n",
            "is a program, which import does",
        ),
        ("x.toml", "[model]\nflavor = '8B'\n", "on how many GPUs it runs; give --gpus N$"),
    ],
)
def test_a_refusal(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        imported(tmp_path, name, text)
