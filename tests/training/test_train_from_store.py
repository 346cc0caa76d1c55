"""A training on token files in an object store has the losses of one on a disk."""

import os
from pathlib import Path

from composer3d import cli
from composer3d.runtime.launch import Pool
from tests.data.remote_folders import upload
from tests.training.jobs import DATA, RECIPE, losses, train
from tools.object_store import new_folder

VALIDATION = """
[validation]
every = 4
steps = 2
path = "tokens"
"""


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def test_two_ranks_train_from_a_store_as_from_a_disk(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(40):
        text = "".join(f"{number * k} is {number} times {k}. " for k in range(10 + number))
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    prepare = ["prepare", str(tmp_path / "text"), "-o", str(tmp_path / "tokens")]
    assert cli.main([*prepare, "--tokenizer", "bytes", "--shard-tokens", "3000"]) == 0
    assert len(list((tmp_path / "tokens").glob("tokens-*.bin"))) > 5
    remote = upload(tmp_path / "tokens", new_folder())
    recipe = RECIPE.format(mesh=DATA).replace('"text"', '"tokens"').replace("corpus.txt", "tokens")
    (tmp_path / "recipe.toml").write_text(recipe + VALIDATION)
    usual = ["run.steps=8", "checkpoint.every=4", "optim.decay=8"]
    assert train(pool, tmp_path, *usual).returncode == 0
    expected = losses(tmp_path, "runs")
    assert len(expected) == 8

    urls = [f"data.path={remote}", f"validation.path={remote}"]
    for name, more in (
        ("store", []),
        ("copies", [f"data.cache_dir={tmp_path}/disk"]),
        ("few copies", [f"data.cache_dir={tmp_path}/few", "data.cache_gib=0.00001"]),
    ):
        sets = [*usual, *urls, f"run.out_dir={name}", *more]
        done = train(pool, tmp_path, *sets, **variables())
        assert done.returncode == 0, done.stderr
        assert losses(tmp_path, name) == expected
    copies = list((tmp_path / "disk").rglob("tokens-*.bin"))
    assert {path.name for path in copies} <= {path.name for path in (tmp_path / "tokens").iterdir()}
    assert 0 < len(list((tmp_path / "few").rglob("tokens-*.bin"))) < len(copies)

    # A run that began on a disk goes on from the store.
    (tmp_path / "runs" / "small" / "checkpoints").rename(tmp_path / "saved")
    first, *_ = sorted(path.name for path in (tmp_path / "saved").iterdir())
    begun = ["run.out_dir=resumed", f"checkpoint.resume=saved/{first}"]
    done = train(pool, tmp_path, *usual, *urls, *begun, **variables())
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "resumed") == {step: expected[step] for step in range(5, 9)}
