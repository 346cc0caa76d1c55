"""Training starts from files of Mixtral and MoEs of Qwen: each rank reads its own experts alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
from composer3d.models.contract import SequenceInfo
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.shape import MoeShape
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tests.convert.sample_checkpoints import MIXTRAL, QWEN_2, QWEN_3, make_hf, weights
from tests.convert.test_export import run_recipe
from tests.convert.test_start import Loaded, load_and_compare

# The data of a recipe is bytes.
SHAPES = {
    "mixtral": replace(MIXTRAL, vocab=259),
    "qwen 2": replace(QWEN_2, vocab=260),
    "qwen 3": replace(QWEN_3, vocab=260),
}


def write_model(folder: Path, shape: MoeShape, *, is_packed: bool) -> None:
    """Write a Hugging Face folder and a recipe that starts from it."""
    make_hf(folder / "hf", shape, packed=range(shape.n_layers) if is_packed else ())
    (folder / "x.toml").write_text(
        f'[model]\narchitecture = "moe"\nhf = "{folder / "hf"}"\n'
        "[data]\nmicro_batch = 2\nglobal_batch = 16\nseq_len = 24\n"
    )


def load_on_rank(folder: str, model: str, sets: list[str]) -> Loaded:
    recipe = load(f"{folder}/x.toml", sets, check_files=False).recipe
    return load_and_compare(f"{folder}/hf", recipe, weights(SHAPES[model]))


# Ranks, model, whether a layer has its experts in two tensors, and the layout.
LAYOUTS: dict[str, tuple[int, str, bool, list[str]]] = {
    "ep, and experts sharded": (4, "mixtral", False, ["mesh.ep=2", "mesh.dp_shard=4"]),
    "experts sharded alone, packed": (2, "mixtral", True, ["mesh.dp_shard=2"]),
    "ep of tp and data": (4, "qwen 3", False, ["mesh.ep=2", "mesh.dp_shard=2", "mesh.tp=2"]),
    "pp, packed": (4, "qwen 3", True, ["mesh.ep=2", "mesh.dp_shard=2", "mesh.pp=2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_its_experts_and_no_more(pool: Pool, tmp_path: Path, layout: str) -> None:
    world, model, is_packed, sets = LAYOUTS[layout]
    shape = SHAPES[model]
    write_model(tmp_path, shape, is_packed=is_packed)
    task = {"folder": str(tmp_path), "model": model, "sets": sets}
    results = pool.run(load_on_rank, task, world_size=world)
    assert [result.wrong for result in results] == [[]] * world
    assert all(result.bytes_read == result.bytes_held > 0 for result in results)
    size = sum(tensor.nbytes for tensor in weights(shape).values())
    assert max(result.bytes_read for result in results) < 0.8 * size


def test_a_recipe_takes_the_shape_and_sets_the_balance(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["qwen 3"], is_packed=False)
    model: Any = load(f"{tmp_path}/x.toml", ["model.balance_loss=0.01"]).recipe.model
    assert (model.experts, model.experts_per_token, model.expert_ffn) == (6, 3, 16)
    assert (model.moe_layers, model.renormalise, model.balance_loss) == (2, False, 0.01)
    assert load(f"{tmp_path}/x.toml").recipe.model.balance_loss == 0


def test_a_trained_model_generates_in_transformers(pool: Pool, tmp_path: Path) -> None:
    """Start from files that transformers made, train on ep 2, convert back."""
    from tests.models.moe.transformers_models import load_folder, make_folder

    hf = make_folder(tmp_path / "hf", "qwen 3", vocab_size=256)
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 40)
    (tmp_path / "x.toml").write_text(
        f'[run]\nname = "x"\nsteps = 5\ndevice = "cpu"\n'
        f'[model]\narchitecture = "moe"\nhf = "{hf}"\nbalance_loss = 0.01\n'
        "[mesh]\nep = 2\ndp_shard = 2\n"
        f'[data]\nsource = "text"\npath = "{tmp_path}/text.txt"\nseq_len = 24\nglobal_batch = 2\n'
        "[optim]\nlr = 0.01\n[metrics]\ntensorboard = false\nevery = 1\n"
    )
    task = {"path": str(tmp_path / "x.toml"), "out": str(tmp_path)}
    pool.run(run_recipe, task, world_size=2)
    lines = (tmp_path / "x/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.5

    report = convert(tmp_path / "x", tmp_path / "out", "hf", logits=True)
    assert report["logits"]["bitwise"]
    assert "left out: model.balance_loss = 0.01 (config.json cannot hold it)" in report["notes"]
    assert "tokenizer.json" in report["carried"]

    theirs, before = load_folder(tmp_path / "out"), load_folder(hf)
    changed = [
        not torch.equal(one, other)
        for one, other in zip(theirs.parameters(), before.parameters(), strict=True)
    ]
    assert all(changed)
    prompt_BT = torch.tensor([list(b"def f(")])
    whole_BT = theirs.generate(prompt_BT, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert whole_BT.shape == (1, 15)

    source = open_source(tmp_path / "x")
    ours = MoeLlama(source.shape, device="cpu")
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(source.read(f"model.{name}"))
        seq = SequenceInfo(torch.arange(14)[None])
        logits = ours.logits(whole_BT[:, :-1], seq)
        expected = theirs(whole_BT[:, :-1]).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    # The next token of every generated position is the one that our logits favour.
    assert torch.equal(logits[:, 5:].argmax(-1), whole_BT[:, 6:])
