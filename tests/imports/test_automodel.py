"""NeMo Automodel's YAML."""

import re
from pathlib import Path

import pytest

from composer3d.facts.errors import RecipeError
from tests.imports.configurations import imported

AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2, max_steps: 500, ckpt_every_steps: 100}
dist_env: {backend: nccl}
rng: {seed: 42}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
distributed: {strategy: fsdp2, dp_size: none, tp_size: 2, cp_size: 1, sequence_parallel: true}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5, betas: [0.9, 0.999], weight_decay: 0.01}
lr_scheduler: {lr_decay_style: cosine, lr_warmup_steps: 50, min_lr: 1.0e-6}
dataset: {seq_length: 1024}
"""


def test_a_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="give the nearest preset with --model"):
        imported(tmp_path, "x.yaml", AUTOMODEL, gpus=16)
    made = imported(tmp_path, "x.yaml", AUTOMODEL, gpus=16, model="llama3.1-8b")
    recipe = made.resolved.recipe
    assert (made.made.program, made.made.open) == ("NeMo Automodel", {})
    assert (recipe.mesh.tp, recipe.mesh.dp_shard, recipe.parallel.zero) == (2, 8, 3)
    assert (recipe.data.global_batch, recipe.data.micro_batch, recipe.data.seq_len) == (64, 2, 1024)
    assert (recipe.optim.lr, recipe.optim.schedule, recipe.run.steps) == (1e-5, "cosine", 500)


@pytest.mark.parametrize(
    ("optimizer", "lr", "weight_decay"),
    [
        ("{_target_: torch.optim.AdamW}", 1e-3, 0.01),
        ("{_target_: torch.optim.Adam, lr: 1.0e-5}", 1e-5, 0.0),
        ("{_target_: transformer_engine.pytorch.optimizers.FusedAdam}", 1e-3, 0.0),
        ("{_target_: flashoptim.FlashAdamW, weight_decay: 0.2}", 1e-3, 0.2),
    ],
)
def test_what_is_absent_has_their_defaults(
    optimizer: str, lr: float, weight_decay: float, tmp_path: Path
) -> None:
    text = re.sub("optimizer: .*", f"optimizer: {optimizer}", AUTOMODEL)
    text = re.sub("lr_scheduler: .*", "lr_scheduler: {lr_decay_steps: null}", text)
    made = imported(tmp_path, "x.yaml", text, gpus=16, model="llama3.1-8b")
    optim = made.resolved.recipe.optim
    assert (optim.lr, optim.betas, optim.eps) == (lr, (0.9, 0.999), 1e-8)
    assert (optim.weight_decay, optim.schedule, optim.warmup) == (weight_decay, "cosine", 50)
    assert (optim.min_lr, made.made.open) == (pytest.approx(0.01 * lr), {})
    assert any(line.startswith("optim.betas = [0.9, 0.999]: ") for line in made.made.assumed)


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("optim.AdamW", "optim.Adam", ["optimizer._target_"]),
        ("optim.AdamW", "optim.Muon", ["optimizer._target_"]),
        ("tp_size: 2", "xp_size: 2", ["distributed.xp_size"]),
        ("fsdp2", "megatron_fsdp", ["distributed.strategy"]),
        ("style: cosine", "style: WSD", ["lr_scheduler.lr_decay_style"]),
        ("rng:", "peft: {dim: 16}\nrng:", ["peft.dim"]),
        # The defaults of an optimizer are those of a class that is known.
        ("torch.optim.AdamW, lr: 1.0e-5, betas: [0.9, 0.999]", "my.AdamW", ["optimizer.defaults"]),
        ("_target_: torch.optim.AdamW, lr: 1.0e-5, ", "", ["optimizer.defaults"]),
        (", weight_decay: 0.01", "", []),
    ],
)
def test_what_decides_and_is_not_expressed_is_open(
    old: str, new: str, keys: list[str], tmp_path: Path
) -> None:
    text = AUTOMODEL.replace(old, new)
    made = imported(tmp_path, "x.yaml", text, gpus=16, model="llama3.1-8b").made
    assert list(made.open) == keys
