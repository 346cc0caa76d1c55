"""From text to a trained model, as a user does it: prepare twice, then train on four ranks."""

import json
import math
import os
import sysconfig
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.data import Corpus, open_corpus
from composer3d.facts.errors import DataError
from composer3d.runtime.launch import Pool
from composer3d.training import loop
from composer3d.training.build import Run
from composer3d.training.ending import Tell
from tests.training.jobs import DATA, TrainEnd, train, train_as_rank
from tests.training.jobs import RECIPE as SMALL

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


def test_prepared_text_is_trained_on_and_damage_is_refused(
    pool: Pool, tmp_path: Path, bpe: Path
) -> None:
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

    done = train(pool, tmp_path)
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


def train_and_lose_the_data(folder: str) -> TrainEnd:
    """A task: train as a rank; rank 1 finds no shard any more once training has begun."""
    train_all = loop.train

    def train_without_data(run: Run, tell: Tell) -> int:
        corpus = run.loader.loader.corpus
        if os.environ["RANK"] == "1" and isinstance(corpus, Corpus) and corpus.manifest is not None:
            object.__setattr__(corpus.manifest, "folder", Path("gone"))
        return train_all(run, tell)

    loop.train = train_without_data
    return train_as_rank(folder, (), {})


def test_a_rank_that_alone_cannot_read_its_data_says_so(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_bytes(bytes(range(97, 123)) * 40)
    prepare = ["prepare", str(tmp_path / "text"), "-o", str(tmp_path / "shards")]
    assert cli.main([*prepare, "--tokenizer", "bytes", "--shard-tokens", "1000"]) == 0
    recipe = SMALL.format(mesh=DATA).replace('"text"', '"tokens"').replace("corpus.txt", "shards")
    (tmp_path / "recipe.toml").write_text(recipe)
    ranks = pool.run(train_and_lose_the_data, {"folder": str(tmp_path)}, world_size=2)
    assert ranks[1].returncode == 2
    assert "gone/" not in ranks[0].stderr
    (line,) = [line for line in ranks[1].stderr.splitlines() if "gone/" in line]
    assert line.startswith("rank 1: gone/tokens-0000")
    assert line.endswith("make the folder again with composer3d prepare")
