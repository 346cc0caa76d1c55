"""From text to a trained model, as a user does it: prepare twice, then train on four ranks."""

import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.data import open_corpus
from composer3d.spec.errors import DataError

RECIPE = """\
[run]
name = "tokens"
steps = 8
device = "cpu"

[model]
preset = "debug-tiny"
vocab = 512   # the tokenizer has 400

[mesh]
dp_shard = 2
tp = 2

[data]
source = "tokens"
path = "train"
seq_len = 32
global_batch = 8
micro_batch = 4

[optim]
lr = 1e-2
schedule = "wsd"
warmup = 2
decay_steps = 4

[validation]
every = 4
steps = 2
path = "held-out"

[metrics]
every = 1
tensorboard = false
"""


def test_prepared_text_is_trained_on_and_damage_is_refused(tmp_path: Path, bpe: Path) -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    (tmp_path / "text").mkdir()
    for name in ("argparse.py", "ast.py", "base64.py"):
        (tmp_path / "text" / name).write_bytes((stdlib / name).read_bytes())
    lines = [
        json.dumps({"body": (stdlib / name).read_text()}) + "\n"
        for name in ("bisect.py", "calendar.py")
    ]
    (tmp_path / "held-out.jsonl").write_text("".join(lines))
    common = ["--tokenizer", str(bpe)]
    assert (
        cli.main(["prepare", str(tmp_path / "text"), "-o", str(tmp_path / "train"), *common]) == 0
    )
    held_out = [
        "prepare",
        str(tmp_path / "held-out.jsonl"),
        "-o",
        str(tmp_path / "held-out"),
        "--field",
        "body",
    ]
    assert cli.main([*held_out, *common]) == 0
    (tmp_path / "recipe.toml").write_text(RECIPE)

    command = [sys.executable, "-m", "composer3d", "train", "recipe.toml"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs" / "tokens" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert list(losses) == list(range(1, 9))
    assert all(map(math.isfinite, losses.values()))
    assert losses[1] > math.log(400)  # so the model predicts tokens, not bytes
    assert losses[8] < losses[1] - 0.5
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert len(validation) == 2
    assert max(validation) < losses[1] - 0.5

    content = bytearray((tmp_path / "train" / "tokens.bin").read_bytes())
    content[len(content) // 2] ^= 64
    (tmp_path / "train" / "tokens.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"train/tokens\.bin is damaged between bytes 0 and "):
        open_corpus("tokens", tmp_path / "train", split="train")
