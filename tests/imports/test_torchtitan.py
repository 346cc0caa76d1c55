"""torchtitan's TOML of 0.1 and 0.2, and the JSON that it writes of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer3d.facts.errors import RecipeError
from tests.imports.configurations import TORCHTITAN, assert_has, imported


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
    text = TORCHTITAN.replace("seq_len", "max_context_length = 4096\nseq_len")
    assert list(imported(tmp_path, "x.toml", text).made.open) == ["training.seq_len"]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("degree = 8", "degree = -1", "mesh.dp_shard = 8"),
        ("degree = 8", "degree = 1", "parallel.zero = 0"),
        ("global_batch_size = 64", "global_batch_size = -1", "data.global_batch = 32"),
        ('mode = "selective"', 'mode = "none"', 'memory.activation_checkpoint = "none"'),
        ('option = "op"', 'option = "3"', 'memory.activation_checkpoint = "every 3 blocks"'),
        ('flavor = "8B"', 'flavor = "debugmodel"', "model.ffn = 768"),
        ("[compile]\nenable", "[compile]\ncomponents", "compile.enabled = false"),
        ("decay_ratio = 0.1", 'decay_type = "cosine"', 'optim.schedule = "cosine"'),
        (
            "tensor_parallel",
            "fsdp_reshard_after_forward = 'never'\ntensor_parallel",
            "parallel.zero = 2",
        ),
        ("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2", "data.micro_batch = 1"),
        ("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2", "parallel.zero = 1"),
        (
            "tensor_parallel_degree = 2",
            "context_parallel_degree = 2",
            'parallel.cp_method = "allgather"',
        ),
        (
            "[compile]",
            "[checkpoint]\nkeep_latest_k = 0\nasync_mode = 'async'\n[compile]",
            "checkpoint.async_save = true",
        ),
        ("[compile]", "[validation]\nenable = true\nfreq = 50\n[compile]", "validation.every = 50"),
        ("warmup_steps = 200", "warmup_steps = 50", "optim.warmup = 50"),
        ("warmup_steps = 200", "min_lr_factor = 0.1", "optim.min_lr = 2.9999999999999997e-05"),
    ],
)
def test_a_change(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert old in TORCHTITAN
    gpus = 32 if new == "degree = -1" else None
    recipe = imported(tmp_path, "x.toml", TORCHTITAN.replace(old, new), gpus=gpus).resolved.recipe
    assert_has(recipe, line)


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
    assert (recipe.precision.matmul, recipe.compile.enabled) == ("float8", True)
    assert not [line for line in made.made.lost if "expert" in line]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "x.toml",
            "[model]\nname = 'flux'\nflavor = 'dev'\n",
            "no model of ours; give the nearest with --model",
        ),
        ("x.toml", "[training]\nlocal_batch_size = 1\nseq_len = 8\n", "no model.flavor: no model"),
        ("x.toml", "[mesh]\ntp = 2\n", "is a recipe of composer3d already"),
        ("x.toml", "[other]\nx = 1\n", "has no words of"),
        ("x.toml", "[model", "not TOML"),
        (
            "x.py",
            "def llama3_8b():\n    return Trainer.Config()\n",
            "is a program, which import does",
        ),
        (
            "x.toml",
            "[model]\nname = 'llama3'\nflavor = '8B'\n",
            "on how many GPUs it runs; give --gpus N$",
        ),
    ],
)
def test_a_refusal(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        imported(tmp_path, name, text)


def resolved(**changes: Any) -> str:
    """A JSON as torchtitan writes it in 2026 with --debug.save_config_file, in part."""
    layer = {
        "attention": {"n_heads": 32, "n_kv_heads": 8, "rope": {"theta": 500000.0}},
        "feed_forward": {"w1": {"in_features": 4096, "out_features": 14336}},
    }
    options = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    group = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": options}
    tree: dict[str, Any] = {
        "model_spec": {
            "name": "llama3",
            "flavor": "8B",
            "model": {"dim": 4096, "vocab_size": 128256, "layers": [layer] * 32},
        },
        "hf_assets_path": "./assets",
        "optimizer": {"param_groups": [group], "implementation": "fused"},
        "lr_scheduler": {"warmup_steps": 200, "total_steps": None, "decay_type": "cosine"},
        "training": {
            "num_tokens_per_microbatch_per_dp_rank": 16384,
            "num_tokens_per_train_step": -1,
            "max_context_length": 8192,
            "steps": 1000,
            "max_norm": 1.0,
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": 8,
            "tensor_parallel_degree": 4,
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "Interleaved1F1B",
            "num_pp_microbatches": 4,
            "context_parallel_degree": 1,
            "context_parallel_load_balancer": "headtail",
            "spmd_backend": "spmd_types",
        },
        "activation_checkpoint": {"preserve_rng_state": True, "determinism_check": "default"},
        "compile": {"enable": True, "components": ["model"]},
        "comm": {"trace_buf_size": 20000},
        "debug": {"seed": 7},
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        tree[table] = {**tree[table], name: value} if name else value
    return json.dumps(tree)


def test_the_json_of_a_run(tmp_path: Path) -> None:
    made = imported(tmp_path, "x.json", resolved())
    recipe = made.resolved.recipe
    assert (made.made.program, made.made.open) == ("torchtitan", {})
    assert (recipe.model.preset, recipe.model.rope_factor) == ("llama3-8b", 8.0)
    assert (recipe.mesh.pp, recipe.mesh.dp_shard, recipe.mesh.tp) == (2, 8, 4)
    assert (recipe.data.seq_len, recipe.data.micro_batch, recipe.data.global_batch) == (8192, 2, 64)
    assert (recipe.parallel.schedule, recipe.memory.activation_checkpoint) == (
        "Interleaved1F1B",
        "full",
    )
    assert (recipe.optim.lr, recipe.optim.betas, recipe.run.seed) == (3e-4, (0.9, 0.95), 7)


def test_a_group_of_muon(tmp_path: Path) -> None:
    adamw = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    muon = {"lr": 2e-2, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1, "ns_steps": 6}
    muon |= {"ns_coefficients": [3.0, -4.0, 2.0], "adjust_lr_fn": "match_rms_adamw", "eps": 1e-7}
    matrices = {"pattern": "w[123]", "optimizer_name": "DistMuon", "optimizer_kwargs": muon}
    rest = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": adamw}

    def imported_with(*groups: dict[str, Any]) -> Any:
        changes = {"optimizer": {"param_groups": groups, "implementation": "foreach"}}
        return imported(tmp_path, "x.json", resolved(**changes))

    made = imported_with(matrices, rest)
    assert list(made.made.open) == ["optimizer.muon.pattern"]
    optim = made.resolved.recipe.optim
    assert (optim.name, optim.lr, optim.matrix_lr, optim.momentum) == ("muon", 1e-3, 2e-2, 0.9)
    assert (optim.nesterov, optim.newton_schulz_steps) == (False, 6)
    assert (optim.newton_schulz, optim.lr_scale) == ((3.0, -4.0, 2.0), "match_rms_adamw")
    muon |= {"weight_decay": 0.0, "adjust_lr_fn": None}
    made = imported_with(matrices, rest)
    assert made.resolved.recipe.optim.lr_scale == "original"
    assert "optimizer.muon.weight_decay" in made.made.open
    assert "optimizer.param_groups" in imported_with(matrices, matrices, rest).made.open


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"parallelism__new_parallel_degree": 2}, ["parallelism.new_parallel_degree"]),
        ({"training__num_tokens_per_microbatch_per_dp_rank": 9000}, None),
        ({"optimizer__param_groups": [{"pattern": "a"}, {"pattern": ".*"}]}, None),
        ({"optimizer": {"name": "Adam", "lr": 1e-4}}, ["optimizer.name"]),
        ({"lr_scheduler__decay_type": "sqrt"}, ["lr_scheduler.decay_type"]),
        ({"activation_checkpoint__memory_budget": 0.5}, ["activation_checkpoint.memory_budget"]),
        (
            {"model_spec__model": {"dim": 4096, "vocab_size": 128256, "layers": [{}] * 16}},
            ["model_spec.model.layers"],
        ),
        ({"model_spec__model": {"dim": 2048, "layers": []}}, None),
        (
            {"parallelism__module_fqns_per_model_part": [["a"], ["b"]]},
            ["parallelism.module_fqns_per_model_part"],
        ),
    ],
)
def test_a_json_that_is_not_understood_is_open(
    changes: dict[str, Any], keys: list[str] | None, tmp_path: Path
) -> None:
    found = list(imported(tmp_path, "x.json", resolved(**changes)).made.open)
    assert found == keys if keys is not None else found


@pytest.mark.parametrize(
    ("checkpointing", "value"),
    [(None, "none"), ({"debug": False, "force_recompute_mm_shapes_by_fqns": []}, "selective")],
)
def test_checkpointing_of_a_json(checkpointing: Any, value: str, tmp_path: Path) -> None:
    text = resolved(activation_checkpoint=checkpointing)
    recipe = imported(tmp_path, "x.json", text).resolved.recipe
    assert recipe.memory.activation_checkpoint == value


def test_a_file_of_2024(tmp_path: Path) -> None:
    text = (
        "[model]\nname = 'llama3'\nflavor = '8B'\nnorm_type = 'rmsnorm'\n[training]\n"
        "batch_size = 1\nseq_len = 8192\nwarmup_steps = 200\ncompile = false\n"
        "data_parallel_degree = 4\ntensor_parallel_degree = 2\nfp8_linear = ''\n"
        "[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_microbatches = 1\n"
    )
    made = imported(tmp_path, "x.toml", text, ["data.global_batch=8"])
    mesh = made.resolved.recipe.mesh
    assert (mesh.pp, mesh.dp_shard, mesh.tp, made.made.open) == (2, 4, 2, {})
    debug = imported(tmp_path, "x.toml", text.replace("8B", "debugmodel"), ["data.global_batch=8"])
    assert list(debug.made.open) == ["model.flavor"]
