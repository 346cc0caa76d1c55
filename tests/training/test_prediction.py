"""Trainings with multi-token prediction: metrics, layouts, a resume, and what reads the run."""

import json
from pathlib import Path

import pytest
import torch

from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
from composer3d.generate.generator import Generator
from composer3d.generate.load import load_model, open_checkpoint
from composer3d.models.contract import SequenceInfo
from composer3d.runtime.launch import Pool
from tests.training.jobs import RECIPE, train

MODEL = (
    'architecture = "deepseek"\npreset = "debug-deepseek"\nmtp_layers = 2\nmtp_loss = 0.5\n'
    "experts_per_token = 3\n"
)
VALIDATION = '\n[validation]\nevery = 3\nsteps = 2\npath = "corpus.txt"\n'
SETS = [
    "run.steps=6",
    "checkpoint.every=3",
    "optim.lr=1e-2",
    "optim.warmup=1",
    "data.packing=documents",
    "precision.params=float64",  # or a token whose experts are nearly tied goes to another one
]
PP = ["mesh.pp=2", "mesh.cp=2", "mesh.dp_shard=1"]


def write_recipe(folder: Path) -> None:
    recipe = RECIPE.format(mesh="dp_shard = 1").replace('preset = "debug-tiny"\n', MODEL)
    (folder / "recipe.toml").write_text(recipe + VALIDATION)


def rows_of(folder: Path, out_dir: str, key: str) -> dict[int, dict[str, float]]:
    lines = (folder / out_dir / "small" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines) if key in row}


def test_a_run_learns_to_predict_further(pool: Pool, folder: Path) -> None:
    """On a pipeline with cp, as on one process. Its checkpoint is one of the main model."""
    write_recipe(folder)
    assert train(pool, folder, *SETS, "run.out_dir=one").returncode == 0
    assert train(pool, folder, *SETS, *PP, "run.out_dir=four").returncode == 0
    one, four = rows_of(folder, "one", "loss"), rows_of(folder, "four", "loss")
    for step, row in one.items():
        assert row["mtp_loss"] == pytest.approx((row["mtp_loss/1"] + row["mtp_loss/2"]) / 2)
        for key in ("loss", "mtp_loss", "mtp_loss/1", "mtp_loss/2", "grad_norm"):
            assert row[key] == pytest.approx(four[step][key], rel=1e-9), (step, key)
    assert one[6]["mtp_loss"] < one[1]["mtp_loss"] - 0.1
    assert one[1]["mtp_loss"] > 4  # nats: without the coefficient, and a mean

    # The depths take no part in the validation.
    validated = [rows_of(folder, name, "validation_loss")[6] for name in ("one", "four")]
    losses = [row["validation_loss"] for row in validated]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0] < one[6]["loss"] + 1

    # Another coefficient may follow, but not another number of depths.
    more = [*SETS, "run.steps=7", "run.out_dir=one"]
    assert train(pool, folder, *more, "model.mtp_loss=0.1").returncode == 0
    assert 7 in rows_of(folder, "one", "mtp_loss")
    ended = train(pool, folder, *more, "run.steps=8", "model.mtp_layers=1")
    assert ended.returncode == 2
    assert "model.mtp_layers" in ended.stderr

    # Files of Hugging Face hold the depths, and generation leaves them out.
    report = convert(folder / "one" / "small", folder / "hf", "hf", logits=True)
    assert report["logits"]["bitwise"]
    assert open_source(folder / "hf").shape.mtp_layers == 2
    whole = open_source(folder / "one" / "small")
    checkpoint = open_checkpoint(folder / "one" / "small")
    model = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    assert whole.shape.mtp_layers == 2
    assert not any("mtp" in name or "project" in name for name, _ in model.named_parameters())
    tokens = list(b"def f(")
    seq = SequenceInfo(torch.arange(len(tokens))[None])
    with torch.no_grad():
        expected = int(model.logits(torch.tensor([tokens]), seq)[0, -1].argmax())
    generator = Generator(model, checkpoint.plan, device=torch.device("cpu"))
    (completion,) = generator.generate([tokens], max_tokens=1)
    assert completion.tokens == [expected]


def test_a_training_starts_from_layers_in_the_files_or_without_them(
    pool: Pool, folder: Path
) -> None:
    write_recipe(folder)
    assert train(pool, folder, *SETS, "run.steps=3", "run.out_dir=first").returncode == 0
    convert(folder / "first" / "small", folder / "hf", "hf")
    model = f'architecture = "deepseek"\nhf = "{folder}/hf"\n'
    (folder / "recipe.toml").write_text(
        RECIPE.format(mesh="pp = 2\ndp_shard = 2").replace('preset = "debug-tiny"\n', model)
    )
    sets = [*SETS, "run.steps=1", "optim.lr=1e-4"]
    assert train(pool, folder, *sets, "run.out_dir=main").returncode == 0
    (row,) = rows_of(folder, "main", "loss").values()
    assert "mtp_loss" not in row
    further = [*sets, "run.out_dir=further"]
    assert train(pool, folder, *further, "model.mtp_layers=2").returncode == 0
    (other,) = rows_of(folder, "further", "loss").values()
    assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert other["mtp_loss"] < rows_of(folder, "first", "loss")[1]["mtp_loss"] - 0.1
    ended = train(pool, folder, *sets, "run.out_dir=less", "model.mtp_layers=1")
    assert ended.returncode == 2
    assert "mtp_layers" in ended.stderr or "blocks.5" in ended.stderr
