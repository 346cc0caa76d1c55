"""Runs that meet a bad step: they stop, skip its batch, or go back to a checkpoint."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.facts.errors import TrainingError
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.reliability.bad_steps import FILE, Limits
from composer3d.runtime.launch import Pool
from composer3d.training import loop
from composer3d.training.build import Run
from composer3d.training.step import compute_gradients, update
from tests.training.jobs import DATA, RECIPE, SINGLE, built_run

LAYOUTS = {"single": (SINGLE, 1), "dp": (DATA, 2), "pp, dp": ("pp = 2\ndp_shard = 2", 4)}
SETS = ("run.steps=9", "metrics.every=1", "checkpoint.every=4")
SKIP = (*SETS, "reliability.on_bad_step=skip")
ROLLBACK = (*SETS, "reliability.on_bad_step=rollback")


class Death(Exception):
    """The end of a process, as by SIGKILL: nothing more is saved."""


def state_of(run: Run) -> str:
    """A digest of this rank's parameters and of the optimizer's state."""
    named = list(run.stages.named_parameters())
    tensors = dict(named) | optimizer_state(run.optimizer, iter(named))
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(local_shard(tensors[name]).detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_with_bad_gradients(
    folder: str,
    sets: list[str],
    factors: dict[str, float],
    dies_after: int | None = None,
    reappears: str | None = None,
) -> dict[str, Any]:
    """A task: train the recipe in ``folder``.

    Args:
        factors: by step, what the last rank multiplies its gradients with; NaN is possible.
        dies_after: the step after which all ranks end without a save.
        reappears: a checkpoint of the run that is hidden while it starts, as by a failing disk.

    Returns:
        ``state``: the digest of this rank's state. ``error``: the line of a TrainingError.
    """
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    with built_run(folder, sets) as run:
        if reappears is not None and rank == 0:
            Path(f"{reappears}-hidden").rename(run.saver.store.folder / reappears)
        finish = run.stages.finish_gradients

        def finish_with_factor() -> None:
            finish()
            if run.step == dies_after:
                raise Death
            factor = factors.get(str(run.step + 1))
            if factor is not None and rank == size - 1:
                gradients = [p.grad for p in run.stages.parameters() if p.grad is not None]
                for gradient in gradients:
                    local_shard(gradient).mul_(factor)

        run.stages.finish_gradients = finish_with_factor  # type: ignore[method-assign]
        error = ""
        try:
            loop.train(run)
        except TrainingError as caught:
            (error,) = caught.lines
        except Death:
            run.saver.release_folder()
        return {"state": state_of(run), "error": error, "step": run.step}


def start(
    pool: Pool, folder: Path, layout: str, out_dir: str, sets: tuple[str, ...], **task: Any
) -> list[dict[str, Any]]:
    mesh, world_size = LAYOUTS[layout]
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
    factors = {str(step): factor for step, factor in task.pop("factors", {}).items()}
    arguments = {"folder": str(folder), "sets": [*sets, f"run.out_dir={out_dir}"], **task}
    return pool.run(
        train_with_bad_gradients, {**arguments, "factors": factors}, world_size=world_size
    )


def states(results: list[dict[str, Any]]) -> list[str]:
    assert [result["error"] for result in results] == [""] * len(results)
    return [result["state"] for result in results]


def ledger(folder: Path, out_dir: str) -> list[tuple[int, str, int]]:
    lines = (folder / out_dir / "small" / FILE).read_text().splitlines()
    entries = map(json.loads, lines)
    return [(entry["step"], entry["action"], entry["first"]) for entry in entries]


def metrics(folder: Path, out_dir: str, key: str) -> dict[int, Any]:
    lines = (folder / out_dir / "small" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row[key] for row in map(json.loads, lines) if key in row}


def test_a_rollback_has_the_bits_of_a_run_that_skipped_the_same_batches(
    pool: Pool, folder: Path
) -> None:
    layout, nan = "pp, dp", float("nan")
    skipped = start(pool, folder, layout, "skip", SKIP, factors={5: nan, 6: nan})
    gone_back = start(pool, folder, layout, "back", ROLLBACK, factors={6: nan})
    good = start(pool, folder, layout, "good", SKIP)
    assert states(skipped) == states(gone_back)
    assert states(skipped) != states(good)
    assert ledger(folder, "skip") == [(5, "skip", 5), (6, "skip", 6)]
    assert ledger(folder, "back") == [(6, "rollback", 5)]
    assert metrics(folder, "skip", "left_out_steps") == {5: 1, 6: 2}
    assert metrics(folder, "back", "left_out_steps") == {6: 2}
    norms = metrics(folder, "skip", "grad_norm")
    assert [step for step, norm in norms.items() if norm is None] == [5, 6]
    assert not (folder / "good" / "small" / FILE).exists()


@pytest.mark.parametrize(
    ("sets", "bad_step", "n_left_out"), [(SKIP, 6, 1), (ROLLBACK, 7, 3)], ids=["skip", "back"]
)
def test_a_run_killed_after_a_bad_step_comes_to_the_same_bits_and_counts(
    pool: Pool, folder: Path, sets: tuple[str, ...], bad_step: int, n_left_out: int
) -> None:
    factors = {bad_step: float("nan")}
    whole = start(pool, folder, "dp", "whole", sets, factors=factors)
    start(pool, folder, "dp", "killed", sets, factors=factors, dies_after=7)
    # What made the step bad does not come back.
    resumed = start(pool, folder, "dp", "killed", (*sets, "metrics.profile_steps=[5, 6]"))
    assert states(resumed) == states(whole)
    assert ledger(folder, "killed") == ledger(folder, "whole")
    for name in ("whole", "killed"):
        assert metrics(folder, name, "left_out_steps") == {bad_step: n_left_out}
    later = {step: loss for step, loss in metrics(folder, "whole", "loss").items() if step > 7}
    assert later.items() <= metrics(folder, "killed", "loss").items()
    assert sorted(later) == [8, 9]
    # The last step to profile is left out: the profile ends before the save of step 8.
    saved = folder / "killed/small/checkpoints/step-00000008/manifest.json"
    traces = [*(folder / "killed/small/profile").iterdir()]
    assert [trace.name for trace in traces] == ["rank0-steps5-6.json.gz"] * (bad_step == 6)
    assert all(trace.stat().st_mtime < saved.stat().st_mtime for trace in traces)


def test_a_bad_last_step_is_left_out_and_saved_by_a_run_that_was_killed(
    pool: Pool, folder: Path
) -> None:
    factors = {9: float("nan")}
    start(pool, folder, "single", "runs", ROLLBACK, factors=factors)
    newest = folder / "runs/small/checkpoints/step-00000009"
    saved = (newest / "manifest.json").read_bytes()
    (newest / "manifest.json").unlink()  # as if the run had been killed while it saved
    start(pool, folder, "single", "runs", ROLLBACK)
    assert json.loads((newest / "manifest.json").read_bytes())["step"] == 9
    files = [json.loads(text)["files"] for text in (saved, (newest / "manifest.json").read_bytes())]
    for of_save in files:
        del of_save[".metadata"]  # it holds the time of the save
    assert files[0] == files[1]


def test_bad_steps_in_a_row_end_the_run(pool: Pool, folder: Path) -> None:
    sets = (*SKIP, "reliability.max_bad_steps=2")
    factors = {step: float("inf") for step in (3, 5, 6)}
    results = start(pool, folder, "dp", "runs", sets, factors=factors)
    assert [result["step"] for result in results] == [5, 5]
    for result in results:
        assert result["error"].startswith("step 6: loss 5.")
        assert "it is bad step 2 in a row (reliability.max_bad_steps); " in result["error"]
        assert "the newest checkpoint is runs/small/checkpoints/step-00000004; " in result["error"]
    assert ledger(folder, "runs") == [(3, "skip", 3), (5, "skip", 5)]
    assert [*metrics(folder, "runs", "loss")] == [1, 2, 3, 4, 5, 6]


def test_a_run_goes_back_a_limited_number_of_times_and_only_to_a_checkpoint(
    pool: Pool, folder: Path
) -> None:
    sets = (*ROLLBACK, "reliability.max_rollbacks=1")
    nan = float("nan")
    (result,) = start(pool, folder, "single", "runs", sets, factors={6: nan, 7: nan})
    assert result["error"].startswith("step 7: loss ")
    assert "the run has gone back 1 of 1 times (reliability.max_rollbacks); " in result["error"]
    (result,) = start(pool, folder, "single", "early", sets, factors={2: nan})
    assert "but there is no checkpoint to go back to; lower optim.lr or" in result["error"]
    assert not (folder / "early" / "small" / FILE).exists()


def test_a_run_goes_back_to_no_checkpoint_of_a_later_step(pool: Pool, folder: Path) -> None:
    start(pool, folder, "single", "runs", SETS)
    saved, later = folder / "runs/small/checkpoints", "step-00000009"
    (saved / later).rename(folder / f"{later}-hidden")
    assert (saved / "step-00000008").is_dir()
    sets = (*ROLLBACK, "run.steps=12", "checkpoint.every=20")
    # It reappears after the start from step 8, and the next step would be step 9.
    gone_back = start(
        pool, folder, "single", "runs", sets, factors={9: float("nan")}, reappears=later
    )
    assert ledger(folder, "runs") == [(9, "rollback", 9)]
    start(pool, folder, "single", "other", SETS)
    shutil.rmtree(folder / "other/small/checkpoints" / later)
    expected = start(pool, folder, "single", "other", sets, factors={9: float("nan")})
    assert states(gone_back) == states(expected)


def test_a_spike_is_found_by_the_same_limits_after_a_resume(pool: Pool, folder: Path) -> None:
    sets = (*SKIP, "reliability.spike_sigma=6", "reliability.spike_window=8")
    factors = {8: 1e4}
    whole = start(pool, folder, "dp", "whole", sets, factors=factors)
    start(pool, folder, "dp", "killed", sets, factors=factors, dies_after=6)
    resumed = start(pool, folder, "dp", "killed", sets, factors=factors)
    assert states(resumed) == states(whole)
    texts = [(folder / name / "small" / FILE).read_text() for name in ("whole", "killed")]
    assert texts[0] == texts[1]
    (line,) = map(json.loads, texts[0].splitlines())
    assert line["step"] == 8
    assert line["reason"].startswith("the gradient norm ")


def update_at_the_limit(folder: str) -> list[tuple[str | None, bool]]:
    """A task: for limits at and just below the values of a step, the problem and what changed."""
    results = []
    with built_run(folder, []) as run:
        batch = next(run.loader)
        sums = compute_gradients(run.stages, batch)
        loss, norm = sums.loss.item(), sums.norm.item()
        below = torch.nextafter(torch.tensor([loss, norm], dtype=torch.float64), torch.zeros(()))
        for limits in (
            Limits(below[0].item(), norm),
            Limits(loss, below[1].item()),
            Limits(loss, norm),
        ):
            before = state_of(run)
            values = update(run.stages, run.optimizer, sums, max_norm=0.0, lr=1e-3, limits=limits)
            problem = limits.problem(values.loss, values.norm)
            results.append((problem, state_of(run) != before))
        run.loader.close()
        run.saver.release_folder()
    return results


def test_device_and_host_agree_at_the_limit(pool: Pool, folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    for results in pool.run(update_at_the_limit, {"folder": str(folder)}, world_size=2):
        (loss_problem, *_), (norm_problem, *_), _ = results
        assert loss_problem is not None
        assert loss_problem.startswith("the loss ")
        assert norm_problem is not None
        assert norm_problem.startswith("the gradient norm ")
        assert [changed for _, changed in results] == [False, False, True]
        assert results[2][0] is None
