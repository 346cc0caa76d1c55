"""Valid files that hostile cases copy: text, tokens, a recipe, a checkpoint and its exports."""

import json
from pathlib import Path

from composer3d.runtime.launch import Pool
from tools.prove.hostile.case import run
from tools.prove.proof import overrides

RECIPE = """\
[run]
name = "victim"
steps = 4
device = "cpu"

[model]
preset = "debug-tiny"
dim = 32
n_layers = 2
ffn = 48

[mesh]
dp_shard = 1

[data]
source = "tokens"
path = "tokens"
seq_len = 16
global_batch = 2

[optim]
decay = 4

[metrics]
every = 1
tensorboard = false
"""
# The sizes come from the folder of Hugging Face that it starts from.
RECIPE_WITHOUT_SIZES = "\n".join(
    line
    for line in RECIPE.splitlines()
    if not line.startswith(("preset", "dim", "n_layers", "ffn"))
)
# A Qwen 3 with experts in its second layer.
EXPERTS = (
    'run.name="experts"',
    'model.architecture="moe"',
    'model.preset="debug-moe"',
    "model.qk_norm=true",
    "model.expert_ffn=24",
    "model.dense_layers=1",
)
STEPS = 2
CHECKPOINT = f"runs/victim/checkpoints/step-{STEPS:08d}"


def make_base(folder: Path, pool: Pool) -> None:
    """Fill ``folder`` by the commands that a user would run, all of which must succeed."""
    folder.mkdir()
    (folder / "corpus.txt").write_text("What a stranger sends is read with care. " * 40)
    (folder / "recipe.toml").write_text(RECIPE)
    commands = [
        ["prepare", "corpus.txt", "-o", "tokens", "--tokenizer", "bytes"],
        ["train", "recipe.toml", *overrides(f"run.steps={STEPS}")],
        ["convert", CHECKPOINT, "hf", "--to", "hf"],
        ["convert", CHECKPOINT, "meta", "--to", "meta"],
        ["convert", CHECKPOINT, "one.pt", "--to", "torch"],
        ["train", "recipe.toml", *overrides(f"run.steps={STEPS}", *EXPERTS)],
        ["convert", CHECKPOINT.replace("victim", "experts"), "hf-moe", "--to", "hf"],
    ]
    for command in commands:
        outcome = run(command, folder, pool)
        assert outcome.status == 0, (command, outcome)
    assert json.loads((folder / CHECKPOINT / "manifest.json").read_text())["step"] == STEPS
