"""Checks of code that ``verify`` runs on both of its sides, or not at all.

They check models, generation, initial weights, resuming, rollbacks and conversion. Each runs in a
worker of one process, with or without a planted fault, and returns its findings: a line for each
thing that is wrong. The right results are computed here and in ``tests/reference``, by code that
shares nothing with the package.

``corruption`` and ``stragglers`` run in several workers (``RANKS``). Their fault is one of a
machine, and their findings are what the training itself reports.
"""

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer3d.convert.convert import convert
from composer3d.data import Corpus
from composer3d.data.order import ORDERS, Order
from composer3d.facts.errors import CheckpointError
from composer3d.generate.generator import Generator
from composer3d.generate.sampling import Sampler, Sampling
from composer3d.models.contract import IGNORE_INDEX
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.models.registry import resolve
from composer3d.parallel import init
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.process_group import pool_world
from composer3d.training import build as train_build
from composer3d.training.build import Run, build
from composer3d.training.loop import train
from composer3d.verify import data as verify_data
from composer3d.verify.data import corpus_batch, reference_learning_rate
from tests.reference import latent
from tests.reference import prediction as predicted_by_hand
from tests.reference.initial import initial_weight
from tests.reference.llama import (
    BOUND,
    SHAPES,
    Row,
    architecture_of,
    compare,
    plain_row,
    random_model,
)
from tools.prove.proof import logged_rows, watched_run

Plant = Callable[[], None] | None


def model(plant: Plant) -> list[str]:
    """Compare models of every option with those of ``tests/reference/llama.py``."""
    if plant is not None:
        plant()
    return [
        line
        for name in SHAPES
        for is_packed in (False, True)
        for line in compare(name, is_packed=is_packed)
    ]


def latents(plant: Plant) -> list[str]:
    """Compare latent attention and its cache with ``tests/reference/latent.py``."""
    if plant is not None:
        plant()
    return latent.compare()


def prediction(plant: Plant) -> list[str]:
    """Compare multi-token prediction with ``tests/reference/prediction.py``."""
    if plant is not None:
        plant()
    return predicted_by_hand.compare()


# Of two lengths, so that a batch has both.
_PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
_NEW_TOKENS = 8


def generation(plant: Plant) -> list[str]:
    """Draw tokens from models of every option, and compare them with those of the plain models.

    They are drawn with a temperature of 1: a factor of all logits changes no likeliest token.
    """
    if plant is not None:
        plant()
    findings = []
    sampling = Sampling(temperature=1.0, seed=5)
    for name, shape in SHAPES.items():
        ours = random_model(shape)
        weights = {key: value.detach().clone() for key, value in ours.named_parameters()}
        plan = resolve(architecture_of(shape).plan)(shape)
        generator = Generator(ours, plan, device=torch.device("cpu"))
        found = generator.generate(_PROMPTS, max_tokens=_NEW_TOKENS, sampling=sampling)
        for prompt, completion in zip(_PROMPTS, found, strict=True):
            sampler, tokens = Sampler(sampling, prompt), list(prompt)
            while len(tokens) < len(prompt) + _NEW_TOKENS:
                places = range(len(tokens))
                row = Row(tokens, tokens, places, [0] * len(tokens))
                tokens.append(sampler.choose(plain_row(shape, weights, row).logits[-1]))
            expected = tokens[len(prompt) :]
            if completion.tokens != expected:
                findings.append(
                    f"tokens of the {name} model after {prompt} are {completion.tokens}, and the "
                    f"plain model's are {expected}"
                )
    return findings


def weights(plant: Plant) -> list[str]:
    """Compare initial weights with those of ``tests/reference/initial.py``."""
    if plant is not None:
        plant()
    findings = []
    shape = SHAPES["plain"]
    for seed in (0, 7):
        ours = Llama(shape, dtype=torch.float64, device="cpu")
        init.initialise(ours, sharding_plan(shape), seed)
        for name, parameter in ours.named_parameters():
            count = min(50, parameter.numel())
            actual = parameter.detach().flatten()[:count]
            expected = torch.tensor(
                [initial_weight(shape, seed, name, index) for index in range(count)]
            )
            if not torch.allclose(actual, expected.double(), rtol=1e-6, atol=1e-9):
                findings.append(f"initial weights of {name} with seed {seed} break their rule")
    return findings


RECIPE = """\
[run]
name = "check"
device = "cpu"
[model]
preset = "debug-tiny"
n_layers = 2
[precision]
params = "float64"
[data]
source = "jsonl"
path = "train.jsonl"
seq_len = 16
global_batch = 6
micro_batch = 2
packing = "documents"
seed = 3
[optim]
lr = 1e-3
warmup = 2
decay = 7
min_lr = 1e-4
clip = 0.5
[validation]
every = 2
steps = 2
path = "validation.jsonl"
[metrics]
every = 1
tensorboard = false
"""
SAVED, STEPS = 3, 6


def training(plant: Plant) -> list[str]:
    """Train 3 steps, end, resume and train 3 more; compare all of it with plain PyTorch.

    Once with the order of samples of new runs, and once with that of runs which began with an older
    version: training and validation keep it.
    """
    torch.set_num_threads(1)
    if plant is not None:
        plant()
    findings = []
    with pool_world() as device:
        for order in ORDERS:
            findings += train_and_compare(device, order)
    return findings


def train_and_compare(device: torch.device, order: str) -> list[str]:
    """Train, end, resume and compare: see ``training``."""
    with tempfile.TemporaryDirectory(prefix="composer3d-check-") as name:
        folder = Path(name)
        train_corpus = write_text(folder / "train.jsonl", "train")
        held_out = write_text(folder / "validation.jsonl", "validation")
        for steps in (SAVED, STEPS):
            # The second run takes the order from the checkpoint of the first one.
            make = train_build.make_loader
            if steps == SAVED:
                make = partial(make, order=cast(Order, order))
            with patch.object(train_build, "make_loader", make):
                run, recipe = build_run(device, folder, [f"run.steps={steps}"])
            train(run)
        rows = logged_rows(folder / "check")
        weights = {name: p.detach().clone() for name, p in run.stages.named_parameters()}

    with plain_order(order):
        expected_metrics, expected_weights = train_plainly(recipe, train_corpus, held_out)
    findings = []
    for key, expected in expected_metrics.items():
        actual = {row["step"]: row[key] for row in rows if key in row}
        if actual.keys() != expected.keys():
            findings.append(f"{key} is there for steps {sorted(actual)}, not {sorted(expected)}")
            continue
        wrong_steps = [
            step
            for step, value in expected.items()
            if not abs(actual[step] - value) <= BOUND * abs(value)
        ]
        if wrong_steps:
            step = wrong_steps[0]
            findings.append(f"{key} of step {step} is {actual[step]}, not {expected[step]}")
    for name, tensor in expected_weights.items():
        error = ((weights[name] - tensor).norm() / tensor.norm()).item()
        if not error <= BOUND:
            findings.append(f"{name} is off by {error:.1e} in the end")
    return findings


def build_run(device: torch.device, folder: Path, sets: list[str]) -> tuple[Run, Recipe]:
    """Build a run of ``RECIPE`` on the texts of ``folder``, or resume it."""
    (folder / "recipe.toml").write_text(RECIPE)
    paths = [
        f"data.path={folder}/train.jsonl",
        f"validation.path={folder}/validation.jsonl",
        f"run.out_dir={folder}",
    ]
    resolved = load(folder / "recipe.toml", [*paths, *sets])
    return build(resolved.recipe, device, resolved.to_toml()), resolved.recipe


@contextmanager
def plain_order(order: str) -> Iterator[None]:
    """Let ``corpus_batch`` take the samples in another order within the context."""

    def shuffled_sample(place: int, samples: int, seed: int, epoch: int) -> int:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
        return int(generator.permutation(samples)[place])

    newest = verify_data.sample_at
    if order == "shuffle":
        verify_data.sample_at = shuffled_sample
    yield
    verify_data.sample_at = newest


BAD_STEP = 5


def rollback(plant: Plant) -> list[str]:
    """Go back to a checkpoint after a bad step; compare what the run remembers with its metrics.

    The bad step has a gradient that is not a number. The newest checkpoint is one step older than
    the last good step. Each step must have random numbers of its own, also after the rollback.
    """
    torch.set_num_threads(1)
    if plant is not None:
        plant()
    sets = [
        f"run.steps={BAD_STEP + 2}",
        f"checkpoint.every={BAD_STEP - 2}",
        "reliability.on_bad_step=rollback",
        "reliability.spike_sigma=100",
        "reliability.spike_window=8",
    ]
    with pool_world() as device, tempfile.TemporaryDirectory(prefix="composer3d-check-") as name:
        folder = Path(name)
        for split in ("train", "validation"):
            write_text(folder / f"{split}.jsonl", split)
        run, _ = build_run(device, folder, sets)
        finish, seeds = run.stages.finish_gradients, []

        def finish_badly() -> None:
            finish()
            seeds.append(torch.initial_seed())
            if run.step + 1 == BAD_STEP:
                for parameter in run.stages.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(math.nan)

        run.stages.finish_gradients = finish_badly  # type: ignore[method-assign]
        train(run)
        rows = {row["step"]: row for row in logged_rows(folder / "check") if "loss" in row}
        remembered = run.recovery.history.state_dict()
    kept = [step for step in rows if not BAD_STEP - 2 < step <= BAD_STEP]
    expected = {
        "losses": [rows[step]["loss"] for step in kept],
        "norms": [rows[step]["grad_norm"] for step in kept],
    }
    findings = []
    if remembered != expected:
        findings.append(f"the run remembers {remembered}, not {expected}")
    if len(set(seeds)) != BAD_STEP + 2:
        findings.append(f"the steps have the random seeds {seeds}")
    return findings


def write_text(path: Path, split: str) -> Corpus:
    """Write documents of uneven lengths as JSONL; return their bytes, with a 0 after each."""
    generator = random.Random(f"{split} of a check")
    sizes = [generator.choice((1, 2, 5, 15, 16, 40)) for _ in range(12)]
    texts = ["".join(generator.choices("abcdefgh ", k=size)) for size in sizes]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokens = b"".join(text.encode() + b"\0" for text in texts)
    return Corpus(np.frombuffer(tokens, dtype=np.uint8), 0, "", len(texts), split)


def train_plainly(
    recipe: Recipe, train_corpus: Corpus, held_out: Corpus
) -> tuple[dict[str, dict[int, float]], dict[str, Tensor]]:
    """Train all steps with plain PyTorch, without a stop.

    Returns:
        The metrics that ``metrics.jsonl`` must hold, by name and step; and the weights in the end.
    """
    table = recipe.optim
    ours = Llama(recipe.model, dtype=torch.float64, device="cpu")
    init.initialise(ours, sharding_plan(recipe.model), recipe.run.seed)
    matrices = [p for p in ours.parameters() if p.ndim > 1]
    vectors = [p for p in ours.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": table.weight_decay}]
    groups.append({"params": vectors, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, betas=table.betas, eps=table.eps, foreach=False)
    metrics: dict[str, dict[int, float]] = {
        "loss": {},
        "grad_norm": {},
        "lr": {},
        "validation_loss": {},
    }
    for step in range(STEPS):
        batch = corpus_batch(recipe, train_corpus, seed=recipe.data.seed, step=step)
        loss = ours(*batch) / (batch.labels_BT != IGNORE_INDEX).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in ours.parameters()))
        for p in ours.parameters():
            p.grad *= min(1.0, table.clip / norm)
        lr = reference_learning_rate(recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        done = step + 1
        metrics["loss"][done] = loss.item()
        metrics["grad_norm"][done] = norm
        metrics["lr"][done] = lr
        if done % recipe.validation.every == 0 or done in (SAVED, STEPS):
            metrics["validation_loss"][done] = validate_plainly(ours, recipe, held_out)
    return metrics, {name: p.detach() for name, p in ours.named_parameters()}


@torch.no_grad()
def validate_plainly(ours: Llama, recipe: Recipe, held_out: Corpus) -> float:
    """The mean loss over the valid tokens of all batches."""
    steps = range(recipe.validation.steps)
    batches = [corpus_batch(recipe, held_out, seed=0, step=step) for step in steps]
    labels = sum(int((batch.labels_BT != IGNORE_INDEX).sum()) for batch in batches)
    return sum(ours(*batch).item() for batch in batches) / labels


REPLICAS = """\
[run]
name = "check"
device = "cpu"
steps = 30
[model]
preset = "debug-tiny"
[data]
source = "python"
seq_len = 64
[optim]
warmup = 2
decay = 30
[checkpoint]
every = 0
[metrics]
every = 100
tensorboard = false
"""


def corruption(plant: Plant) -> list[str]:
    """Train three replicas, which compare themselves after every fifth step."""
    sets = [
        "mesh.dp_replicate=3",
        "data.global_batch=6",
        "reliability.digest_every=5",
        "reliability.straggler_factor=0",
    ]
    return reports_of(plant, sets)


def stragglers(plant: Plant) -> list[str]:
    """Train on two ranks, which are watched as they are by default."""
    return reports_of(plant, ["mesh.dp_shard=2", "data.global_batch=16"])


def reports_of(plant: Plant, sets: list[str]) -> list[str]:
    """Train as one of several ranks; return what rank 0 reports about ranks, line by line."""
    if plant is not None:
        plant()
    with watched_run(REPLICAS, sets) as (run, lines):
        train(run)
    return lines


# Names of a model of two blocks, as Hugging Face and as Meta publish it.
HF_NAMES = {
    "first.embed.weight": "model.embed_tokens.weight",
    "last.norm.weight": "model.norm.weight",
    "last.head.weight": "lm_head.weight",
}
META_NAMES = {
    "first.embed.weight": "tok_embeddings.weight",
    "last.norm.weight": "norm.weight",
    "last.head.weight": "output.weight",
}
for _block in (0, 1):
    for _ours, _hf, _meta in (
        ("attn_norm", "input_layernorm", "attention_norm"),
        ("attn.wq", "self_attn.q_proj", "attention.wq"),
        ("attn.wk", "self_attn.k_proj", "attention.wk"),
        ("attn.wv", "self_attn.v_proj", "attention.wv"),
        ("attn.wo", "self_attn.o_proj", "attention.wo"),
        ("ffn_norm", "post_attention_layernorm", "ffn_norm"),
        ("ffn.w1", "mlp.gate_proj", "feed_forward.w1"),
        ("ffn.w2", "mlp.down_proj", "feed_forward.w2"),
        ("ffn.w3", "mlp.up_proj", "feed_forward.w3"),
    ):
        HF_NAMES[f"blocks.{_block}.{_ours}.weight"] = f"model.layers.{_block}.{_hf}.weight"
        META_NAMES[f"blocks.{_block}.{_ours}.weight"] = f"layers.{_block}.{_meta}.weight"


def conversion(plant: Plant) -> list[str]:
    """Convert weights to both other formats, and compare the files with names written here."""
    shape = SHAPES["plain"]
    weights = {
        name: parameter.detach().float()
        for name, parameter in random_model(shape).named_parameters()
    }
    with tempfile.TemporaryDirectory(prefix="composer3d-check-") as name:
        folder = Path(name)
        write_hf(folder / "source", shape, weights)
        if plant is not None:
            plant()
        try:
            convert(folder / "source", folder / "ours", "torch")
            convert(folder / "ours", folder / "hf", "hf")
            convert(folder / "ours", folder / "meta", "meta")
        except CheckpointError as error:
            return [f"convert refuses its own work: {line}" for line in error.lines]
        ours = torch.load(folder / "ours", weights_only=True)["model"]
        hf = load_file(folder / "hf" / "model.safetensors")
        meta = torch.load(folder / "meta" / "consolidated.00.pth", weights_only=True)
    expected_hf = {HF_NAMES[name]: tensor for name, tensor in weights.items()}
    expected_meta = {
        META_NAMES[name]: as_meta(shape, name, tensor) for name, tensor in weights.items()
    }
    return [
        *differences("torch", ours, weights),
        *differences("hf", hf, expected_hf),
        *differences("meta", meta, expected_meta),
    ]


def write_hf(folder: Path, shape: ModelShape, weights: dict[str, Tensor]) -> None:
    """Write a checkpoint as Hugging Face publishes it."""
    folder.mkdir()
    save_file(
        {HF_NAMES[key]: value for key, value in weights.items()}, folder / "model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "vocab_size": shape.vocab,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def as_meta(shape: ModelShape, name: str, whole: Tensor) -> Tensor:
    """Permute the rows of a query or key as Meta orders them.

    Pair i of a head is at i and i + D/2 in ours, and at 2i and 2i + 1 in Meta's.
    """
    if not name.endswith(("attn.wq.weight", "attn.wk.weight")):
        return whole
    width = shape.head_width
    rows = []
    for row in range(whole.shape[0]):
        head, place = divmod(row, width)
        pair, second = divmod(place, 2)
        rows.append(head * width + pair + second * (width // 2))
    return whole[rows]


def differences(form: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names that only one side has, and the tensors that are not bitwise equal."""
    findings = [
        f"{form}: {name} is there alone" for name in sorted(actual.keys() ^ expected.keys())
    ]
    for name in sorted(actual.keys() & expected.keys()):
        if not torch.equal(actual[name], expected[name]):
            findings.append(f"{form}: {name} is another")
    return findings


# The number of workers of a check; 1 for all others.
RANKS = {"corruption": 3, "stragglers": 2}

_ALL = (
    *(model, latents, prediction, generation, weights, training, rollback, conversion, corruption),
    stragglers,
)
CHECKS: dict[str, Callable[[Plant], list[str]]] = {check.__name__: check for check in _ALL}
