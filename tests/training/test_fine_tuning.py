"""Fine-tuning with masks equals a plain loop of transformers; a step may have no label at all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from composer3d import cli
from composer3d.convert.start import load_hf
from composer3d.data.order import sample_order
from composer3d.facts.errors import DataError
from composer3d.models.contract import IGNORE_INDEX
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.batches import make_loader, open_data
from composer3d.training.build import build_stages
from composer3d.training.optimizers import build_optimizer
from composer3d.training.step import compute_gradients, update
from composer3d.training.validation import make_held_out_loader, validate
from tests.data.sample_chats import TEXT, write_lines, write_tokenizer

STEPS, SEQ_LEN, ROWS, LR, DECAY = 20, 48, 4, 3e-3, 0.1
WORDS = TEXT.split()

RECIPE = """\
[run]
steps = 20
device = "cpu"
[model]
hf = "{folder}/model"
[data]
source = "tokens"
path = "{folder}/data"
seq_len = 48
global_batch = 4
micro_batch = 1
[optim]
lr = 3e-3
schedule = "constant"
warmup = 0
weight_decay = 0.1
clip = 0.0
"""


def make_examples() -> list[dict[str, str]]:
    """Make examples whose prompts are sometimes longer than a row, which then has no label."""
    generator = np.random.default_rng(2)
    examples = []
    for number in range(30):
        words = [str(word) for word in generator.choice(WORDS, 60 if number % 5 == 0 else 6)]
        answer = [str(word) for word in generator.choice(WORDS, 5)]
        examples.append({"prompt": " ".join(words), "answer": " " + " ".join(answer)})
    return examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of transformers, its tokenizer, JSONL, token files and a recipe."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("tune")
    vocab = write_tokenizer(root / "tok").get_vocab_size()
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab + vocab % 2,
        max_position_embeddings=64,
    )
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(root / "model")
    write_lines(root / "x.jsonl", make_examples())
    command = ["prepare", str(root / "x.jsonl"), "-o", str(root / "data"), "--kind", "answers"]
    assert cli.main([*command, "--tokenizer", str(root / "tok")]) == 0
    (root / "recipe.toml").write_text(RECIPE.format(folder=root))
    return root


def tune(folder: str, sets: list[str]) -> list[float]:
    """Train on one rank, and return the losses."""
    recipe = load(f"{folder}/recipe.toml", sets, check_files=False).recipe
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        corpus, _ = open_data(recipe)
        loader = make_loader(recipe, mesh, corpus, seed=recipe.data.seed)
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        load_hf(str(recipe.model.hf), stages)
        losses = []
        for _ in range(recipe.run.steps):
            sums = compute_gradients(stages, next(loader))
            losses.append(update(stages, optimizer, sums, max_norm=0.0, lr=LR).loss)
        return losses


def encode(folder: Path) -> tuple[Tensor, Tensor]:
    """Return all tokens and their labels, made with transformers' tokenizer from the JSONL."""
    transformers = pytest.importorskip("transformers")
    coder = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "tok")
    end = coder.eos_token_id
    tokens, labels = [], []
    for line in (folder / "x.jsonl").read_text().splitlines():
        example = json.loads(line)
        prompt = coder(example["prompt"]).input_ids
        answer = [*coder(example["answer"], add_special_tokens=False).input_ids, end]
        tokens += prompt + answer
        labels += [IGNORE_INDEX] * len(prompt) + answer
    return torch.tensor(tokens), torch.tensor(labels)


def tune_plainly(folder: Path) -> tuple[list[float], int]:
    """Train the model of transformers with torch's AdamW, one row after the other.

    Returns:
        The losses, and how many rows had no label at all.
    """
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    defaults = load(folder / "recipe.toml", [], check_files=False).recipe.optim
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=defaults.betas,
        eps=defaults.eps,
    )
    tokens, labels = encode(folder)
    n_samples = (len(tokens) - 1) // SEQ_LEN
    losses, n_empty = [], 0
    for step in range(STEPS):
        samples = sample_order(n_samples, 0, step * ROWS, ROWS, "feistel")
        places = [slice(s * SEQ_LEN, (s + 1) * SEQ_LEN + 1) for s in samples.tolist()]
        rows = torch.stack([tokens[place] for place in places])
        labels_of_rows = torch.stack([labels[place] for place in places])
        n_empty += int((labels_of_rows[:, 1:] == IGNORE_INDEX).all(1).sum())
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=labels_of_rows).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, n_empty


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[float], int]:
    return tune_plainly(folder)


LAYOUTS: dict[str, list[str]] = {
    "one rank": [],
    "dp 2": ["mesh.dp_shard=2"],
    "tp 2": ["mesh.tp=2", "data.micro_batch=2"],
    "cp 2": ["mesh.cp=2"],
    "pp 2": ["mesh.pp=2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_losses_are_those_of_transformers(
    pool: Pool, folder: Path, plain: tuple[list[float], int], layout: str
) -> None:
    """Micro-batches and ranks without any label are among them."""
    expected, n_empty = plain
    assert n_empty > 3
    assert expected[-1] < expected[0] - 1
    world = 1 if layout == "one rank" else 2
    results = pool.run(tune, {"folder": str(folder), "sets": LAYOUTS[layout]}, world_size=world)
    for losses in results:
        assert len(losses) == STEPS
        assert max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True)) < 1e-4


def step_without_labels(folder: str, sets: list[str]) -> dict[str, Any]:
    """Take a step whose batch has no label; return its values and whether weights moved."""
    recipe = load(f"{folder}/recipe.toml", sets, check_files=False).recipe
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        corpus, _ = open_data(recipe)
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        batch = make_loader(recipe, mesh, corpus, seed=0)[0]
        batch.labels_BT.fill_(IGNORE_INDEX)
        before = [local_shard(p).detach().clone() for p in stages.parameters()]
        sums = compute_gradients(stages, batch)
        gradients = [local_shard(p.grad) for p in stages.parameters() if p.grad is not None]
        is_zero = len(gradients) == len(before) and not any(g.any() for g in gradients)
        values = update(stages, optimizer, sums, max_norm=1.0, lr=LR)
        after = [local_shard(p).detach() for p in stages.parameters()]
        pairs = list(zip(before, after, strict=True))
        return {
            "loss": values.loss,
            "norm": values.norm,
            "is_zero": is_zero,
            "is_same": all(torch.equal(*pair) for pair in pairs),
        }


@pytest.mark.parametrize("layout", ["one rank", "dp 2", "tp 2"])
def test_a_step_without_labels_changes_nothing(pool: Pool, folder: Path, layout: str) -> None:
    sets = [*LAYOUTS[layout], "optim.weight_decay=0.0"]
    world = 1 if layout == "one rank" else 2
    arguments = {"folder": str(folder), "sets": sets}
    for result in pool.run(step_without_labels, arguments, world_size=world):
        assert result == {"loss": 0.0, "norm": 0.0, "is_zero": True, "is_same": True}


def validate_without_labels(folder: str) -> str:
    """Validate on text of which nothing is learned; return the error."""
    sets = ["validation.every=1", "validation.steps=2", f"validation.path={folder}/data"]
    recipe = load(f"{folder}/recipe.toml", sets, check_files=False).recipe
    with pool_world() as device:
        stages = build_stages(recipe, Mesh.build(recipe.mesh, device))
        _, corpus = open_data(recipe)
        assert corpus is not None
        held_out = replace(corpus, mask=np.zeros(len(corpus.tokens), dtype=np.uint8))
        with pytest.raises(DataError) as caught:
            validate(recipe, stages, make_held_out_loader(recipe, stages.mesh, held_out))
        return str(caught.value)


def test_a_validation_in_which_nothing_is_learned_is_refused(pool: Pool, folder: Path) -> None:
    """Its loss would be 0, as if the model were perfect."""
    (error,) = pool.run(validate_without_labels, {"folder": str(folder)}, world_size=1)
    assert "validation.steps = 2: no token of these batches of" in error
    assert "data (validation) is learned; use more steps, or other text" in error
