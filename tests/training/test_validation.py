"""A run cuts its held-out text into samples once, and each validation reads what it needs."""

import os
from pathlib import Path
from typing import Any

import pytest

from composer3d.data import Batch, Loader
from composer3d.facts.errors import DataError
from composer3d.runtime import log
from composer3d.runtime.launch import Pool
from composer3d.training import validation
from tests.training.jobs import DATA, RECIPE, built_run

STEPS = 3
SETS = (
    *("validation.every=5", "validation.path=corpus.txt", f"validation.steps={STEPS}"),
    "data.packing=whole_documents",
)


def validate_twice(folder: str) -> tuple[list[float | None], list[int]]:
    """A task: validate twice; return the losses and the steps that were read.

    Before, the ranks make another validation, and it fails on one of them.
    """
    read: list[int] = []
    get = Loader.__getitem__

    def get_and_note(loader: Loader, step: int) -> Batch:
        read.append(step)
        return get(loader, step)

    def fail(*_: Any, **__: Any) -> Loader:
        raise DataError("a file of documents is damaged")

    with built_run(folder, SETS) as run, pytest.MonkeyPatch.context() as patch:
        loader = run.validation.loader
        assert loader is not None
        if os.environ["RANK"] == "1":
            patch.setattr(validation, "make_loader", fail)
        with pytest.raises(DataError, match="a file of documents is damaged"):
            validation.Validation(run.recipe, run.stages, loader.corpus, None, "feistel")
        patch.setattr(Loader, "_cut", fail)
        patch.setattr(Loader, "__getitem__", get_and_note)
        losses = [run.validation.run(lambda: False) for _ in range(2)]
        run.loader.close()
        run.saver.release_folder()
        return losses, read


def logged(folder: str, sets: tuple[str, ...]) -> list[str]:
    """A task: build a run; return what it logs about the text that it is validated on."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for level in ("info", "warning"):
            patch.setattr(log.get(), level, lines.append)
        with built_run(folder, sets) as run:
            run.loader.close()
            run.saver.release_folder()
    return [line for line in lines if line.startswith("data: ") and "(validation)" in line]


def test_a_validation_that_says_little_is_said(pool: Pool, folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    (folder / "held-out.txt").write_bytes(b"another text" * 300)
    for path, steps, expected in (
        ("held-out.txt", 1, []),
        ("held-out.txt", 40, ["data: held-out.txt (validation) has 112 samples; each"]),
        ("corpus.txt", 1, ["data: corpus.txt (validation) is trained on, so its loss says"]),
    ):
        sets = ("validation.every=5", f"validation.path={path}", f"validation.steps={steps}")
        task = {"folder": str(folder), "sets": (*sets, "run.name=" + path + str(steps))}
        lines, _ = pool.run(logged, task, world_size=2)
        assert len(lines) == len(expected), lines
        assert all(map(str.startswith, lines, expected)), lines


def test_each_validation_reads_the_same_batches_and_cuts_no_text(pool: Pool, folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    for losses, read in pool.run(validate_twice, {"folder": str(folder)}, world_size=2):
        assert read == [*range(STEPS)] * 2
        assert losses[0] == losses[1]
        assert losses[0] is not None
