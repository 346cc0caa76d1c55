"""A profiled run computes the same bits, and its trace names axes and stages."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from composer3d.runtime.launch import Pool
from composer3d.training.observers.profiling import FOLDER
from tests.training.jobs import RECIPE, SINGLE, build_and_train, losses, train

SETS = ["run.steps=4", "optim.warmup=1", "optim.decay=4", "checkpoint.every=0"]
PROFILE = ["metrics.profile_steps=[2, 3]", "metrics.profile_ranks=[0, 3]"]


def names_of(path: Path) -> set[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if "name" in event}


def test_a_profile_changes_no_bit_and_names_axes_and_stages(folder: Path, pool: Pool) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh="pp = 2\ntp = 2"))
    for out_dir, more in (("off", []), ("on", PROFILE)):
        sets = [*SETS, f"run.out_dir={out_dir}", *more]
        pool.run(build_and_train, {"folder": str(folder), "sets": sets}, world_size=4)
    assert losses(folder, "off") == losses(folder, "on")
    assert len(losses(folder, "on")) == 4
    assert not (folder / "off" / "small" / FOLDER).exists()

    found = sorted((folder / "on" / "small" / FOLDER).iterdir())
    assert [path.name for path in found] == [
        "rank0-steps2-3.json.gz",
        "rank3-steps2-3.json.gz",
    ]
    first, last = map(names_of, found)
    for names in (first, last):
        assert {"step 2", "step 3", "pp: wait for messages"} <= names
        assert {"step 1", "step 4"}.isdisjoint(names)
        tp = {name.split(": ")[1] for name in names if name.startswith("tp: ")}
        assert any("gather" in name for name in tp)
        assert any("reduce" in name for name in tp)
        assert any(name.startswith("world: allreduce") for name in names)
    assert {"pp: stage 0 forward, micro-batch 0", "pp: stage 0 backward, micro-batch 3"} <= first
    assert "pp: stage 1 forward, micro-batch 0" in last
    assert "pp: stage 1 forward, micro-batch 0" not in first


def test_a_rank_without_a_group_is_profiled(folder: Path, pool: Pool) -> None:
    """Documents and windows run in the operator of the ring, on one rank as well."""
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    sets = ["data.packing=documents", "model.window=8"]
    result = train(pool, folder, *SETS, *sets, "metrics.profile_steps=[2, 3]")
    assert result.returncode == 0, result.stderr
    (trace,) = (folder / "runs/small" / FOLDER).iterdir()
    assert {"step 2", "step 3"} <= names_of(trace)


@pytest.mark.gpu
def test_a_gpu_writes_a_snapshot_of_its_memory(folder: Path, pool: Pool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    result = train(pool, folder, *SETS, "run.device=cuda", "metrics.profile_steps=[2, 3]")
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (folder / "runs/small" / FOLDER).iterdir()}
    assert names == {"rank0-steps2-3.json.gz", "rank0-steps2-3.memory.pickle"}
