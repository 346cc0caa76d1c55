"""Valid files that hostile cases copy: text, tokens, a recipe, a checkpoint and its exports."""

import json
from pathlib import Path

from composer3d.runtime.launch import Pool
from tools.prove.hostile.case import run

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

[metrics]
every = 1
tensorboard = false
"""
STEPS = 2
CHECKPOINT = f"runs/victim/checkpoints/step-{STEPS:08d}"


def make_base(folder: Path, pool: Pool) -> None:
    """Fill ``folder`` by the commands that a user would run, all of which must succeed."""
    folder.mkdir()
    (folder / "corpus.txt").write_text("What a stranger sends is read with care. " * 40)
    (folder / "recipe.toml").write_text(RECIPE)
    commands = [
        ["prepare", "corpus.txt", "-o", "tokens", "--tokenizer", "bytes"],
        ["train", "recipe.toml", "--set", f"run.steps={STEPS}"],
        ["convert", CHECKPOINT, "hf", "--to", "hf"],
        ["convert", CHECKPOINT, "meta", "--to", "meta"],
        ["convert", CHECKPOINT, "one.pt", "--to", "torch"],
    ]
    for command in commands:
        outcome = run(command, folder, pool)
        assert outcome.status == 0, (command, outcome)
    assert json.loads((folder / CHECKPOINT / "manifest.json").read_text())["step"] == STEPS
