"""DeepSpeed's JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer3d.facts.errors import RecipeError
from tests.imports.configurations import DEEPSPEED, assert_has, imported


def changed(**entries: Any) -> str:
    return json.dumps(json.loads(DEEPSPEED) | entries)


def test_a_file(tmp_path: Path) -> None:
    made = imported(tmp_path, "ds.json", DEEPSPEED, gpus=4, model="llama3-8b")
    recipe = made.resolved.recipe
    assert (recipe.model.preset, recipe.world_size) == ("llama3-8b", 4)
    assert (recipe.parallel.zero, recipe.mesh.dp_shard) == (1, 4)
    assert (recipe.data.global_batch, recipe.data.micro_batch) == (1024, 8)
    assert (recipe.precision.compute, recipe.optim.clip) == ("bfloat16", 0.5)
    assert (recipe.optim.lr, recipe.optim.betas) == (1e-4, (0.9, 0.95))
    assert (recipe.optim.schedule, recipe.optim.warmup, recipe.run.steps) == ("linear", 100, 5000)
    assert made.made.contradictions == [
        "train_batch_size = 1024, but train_micro_batch_size_per_gpu = 8 x "
        "gradient_accumulation_steps = 4 x 4 data-parallel ranks = 128: the recipe keeps 1024, as "
        "32 micro-batches of 8 on each rank"
    ]
    assert [line for line in made.made.assumed if "Trainer" in line]


def test_the_batch_tells_the_ranks(tmp_path: Path) -> None:
    made = imported(tmp_path, "ds.json", DEEPSPEED, model="llama3-8b")
    assert made.resolved.recipe.world_size == 32
    assert made.made.contradictions == []


def test_it_has_no_model(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"does not give the sizes of a model .*give --model"):
        imported(tmp_path, "ds.json", DEEPSPEED, gpus=4)
    with pytest.raises(RecipeError, match="--model llama9: is unknown; the presets are"):
        imported(tmp_path, "ds.json", DEEPSPEED, gpus=4, model="llama9")
    sets = ["model.preset=llama3-8b"]
    assert imported(tmp_path, "ds.json", DEEPSPEED, sets, gpus=4).resolved.recipe.model.dim == 4096


@pytest.mark.parametrize(
    ("entries", "line"),
    [
        ({"zero_optimization": {"stage": 3}}, "parallel.zero = 3"),
        ({"zero_optimization": {}}, "parallel.zero = 0"),
        ({"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}}, "parallel.zero = 1"),
        ({"tensor_parallel": {"autotp_size": 2}}, "mesh.tp = 2"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "memory.cpu_offload = true",
        ),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            'memory.activation_checkpoint = "full"',
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, 'optim.schedule = "constant"'),
        (
            {
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {"total_num_steps": 9, "cos_min_ratio": 0.5},
                }
            },
            "optim.min_lr = 5e-05",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}}, "optim.lr = 0.5"),
        ({"communication_data_type": "bfp16"}, 'precision.reduce = "bfloat16"'),
        ({"sequence_parallel_size": 2}, 'parallel.cp_method = "ulysses"'),
        ({"optimizer": {"type": "Adam", "params": {}}}, "optim.weight_decay = 0.0"),
        # DeepSpeed's AdamW is its own FusedAdam, whose default is 0.
        ({"optimizer": {"type": "AdamW", "params": {}}}, "optim.weight_decay = 0.0"),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
            "optim.weight_decay = 0.01",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {}}, "scheduler": {"type": "WarmupLR"}},
            "optim.lr = 0.001",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "optim.warmup = 1000"),
        ({"fp16": {"enabled": False}}, 'precision.compute = "bfloat16"'),
        (
            {"bf16": {}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            'precision.compute = "bfloat16"',
        ),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_grain_size": 64}}}, "mesh.tp = 2"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, "mesh.ep = 4"),
        ({"expert_parallel": {"enabled": False, "autoep_size": 4}}, "mesh.ep = 1"),
    ],
)
def test_a_key(tmp_path: Path, entries: Any, line: str) -> None:
    model = "debug-moe" if "expert_parallel" in entries else "llama3-8b"
    made = imported(tmp_path, "x.json", changed(**entries), gpus=4, model=model)
    assert made.made.open == {}
    assert_has(made.resolved.recipe, line)


def test_a_scheduler_tells_its_defaults(tmp_path: Path) -> None:
    text = changed(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}})
    made = imported(tmp_path, "ds.json", text, gpus=32, model="llama3-8b").made
    assert "optim.warmup = 1000: the default of WarmupDecayLR" in made.assumed
    assert any("without warmup_max_lr has 0.001" in line for line in made.contradictions)
    assert any("WarmupDecayLR without warmup_type a logarithm" in line for line in made.lost)
    params = {"total_num_steps": 5000, "warmup_num_steps": "auto", "warmup_max_lr": "auto"}
    text = changed(scheduler={"type": "WarmupCosineLR", "params": params})
    made = imported(tmp_path, "ds.json", text, gpus=32, model="llama3-8b").made
    assert "optim.warmup" not in made.values
    assert made.value("optim.min_lr") == pytest.approx(1e-8)


def test_float16_is_refused(tmp_path: Path) -> None:
    text = changed(bf16={"enabled": False}, fp16={"enabled": True})
    with pytest.raises(RecipeError, match=r"fp16.enabled = true: composer3d has no float16"):
        imported(tmp_path, "x.json", text, gpus=4, model="llama3-8b")
    sets = ["precision.compute=bfloat16"]
    made = imported(tmp_path, "x.json", text, sets, gpus=4, model="llama3-8b")
    assert made.resolved.recipe.precision.compute == "bfloat16"


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    text = DEEPSPEED.replace('"gradient_clipping"', '"train_batch_size": 512, "gradient_clipping"')
    made = imported(tmp_path, "x.json", text, gpus=4, model="llama3-8b")
    assert "train_batch_size = 1024" in made.made.contradictions[0]
    assert made.resolved.recipe.data.global_batch == 512
    assert list(made.made.open) == ["train_batch_size"]


@pytest.mark.parametrize(
    ("entries", "keys"),
    [
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-4}}}, ["optimizer.type"]),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False}}},
            ["optimizer.params.adam_w_mode"],
        ),
        ({"scheduler": {"type": "OneCycle"}}, ["scheduler.type"]),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            ["zero_optimization.zero_hpz_partition_size"],
        ),
        ({"zero_optimization": {"stage": 3, "new_thing": 8}}, ["zero_optimization.new_thing"]),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 8}}, []),
        ({"tensor_parallel": {"autotp_size": 4, "tp_size": 2}}, ["tensor_parallel.autotp_size"]),
        ({"curriculum_learning": {"enabled": True}}, ["curriculum_learning.enabled"]),
        ({"some_parallel_size": 4}, ["some_parallel_size"]),
        ({"wall_clock_breakdown": True, "aio": {"block_size": 1}}, []),
    ],
)
def test_what_decides_and_is_not_expressed_is_open(
    entries: Any, keys: list[str], tmp_path: Path
) -> None:
    made = imported(tmp_path, "x.json", changed(**entries), gpus=32, model="llama3-8b")
    assert list(made.made.open) == keys


def test_a_batch_that_contradicts_itself_is_open_without_gpus(tmp_path: Path) -> None:
    text = changed(data_parallel_size=4)
    made = imported(tmp_path, "x.json", text, model="llama3-8b").made
    assert list(made.open) == ["gradient_accumulation_steps"]
    assert imported(tmp_path, "x.json", text, gpus=4, model="llama3-8b").made.open == {}
