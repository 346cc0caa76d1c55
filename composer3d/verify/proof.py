"""``composer3d verify``: prove that a layout computes what one process computes.

``shrink`` reduces the recipe's model and mesh to a size that a laptop can run. It keeps the
properties that decide how the layout is computed. The composed job and a plain one-process loop
then train on the same global batches (``worker``). In each step, the loss, the gradient norm, every
gradient and every weight are compared. Tensors are compared shard by shard, on the rank that holds
the shard. One validation loss is compared too. ``judge`` combines the errors of all ranks.

Steps 1, 3 and 5 take their batches from a small corpus in memory. They use the loader of training,
with the recipe's packing. Steps 2, 4 and 6 take random batches, with labels that no corpus gives.
The recipe's own data is never opened.

All this is proven in float64, where rounding hides nothing. A job computes in float32 or narrower
dtypes, for which some kernels are others. So an exact proof is followed by one in float32, of one
small recipe (``float32``).

This module imports no torch; the worker processes do.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from composer3d.facts.errors import RecipeError, UserError
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import AXES, Recipe
from composer3d.recipe.values import FIELDS, entries_of_recipe, value_of
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.verify import float32
from composer3d.verify.cuts import cuts_of_tensors
from composer3d.verify.judge import ReferenceStats, Verdict, has_little_noise, judge
from composer3d.verify.limits import run_limit_s
from composer3d.verify.shrink import lost_kinds, shrink

# Scores of a router are at most 1, and have a few roundings of 6e-8 in float32, 1e-16 in float64.
_NEAR_TIE = {"float32": 1e-6, "float64": 1e-13}
# Two exact layouts differ by about 1e-15 of the largest number, and by 1e-14 in later steps.
_NEAR_ROUNDING = 1e-13
_SEEDS = 8
# The tables whose keys a layout is described by, in this order.
_NAMED_TABLES = ("parallel", "memory", "compile", "precision", "data", "model", "optim")


def verify_layout(
    pool: Pool,
    folder: Path,
    recipe: str,
    sets: Sequence[str],
    *,
    dtype: str | None = None,
    steps: int,
    may_import: bool = False,
    **worker_arguments: Any,
) -> Verdict:
    """Prove one layout, or report why it is refused.

    Args:
        pool: starts the processes of the reference and of the composed job.
        folder: the folder for the files of the references, which later layouts can share.
        recipe: the path of a recipe.
        sets: overrides of the recipe, each ``table.key=value``.
        dtype: "float64" or "float32", the dtype of the composed job. None: float64, and then, if
            all is exact, one small recipe in float32.
        steps: the number of training steps.
        may_import: as in ``recipe.resolve.load``.
        worker_arguments: further arguments of ``worker.run_composed``, with which tests plant
            faults.

    Returns:
        The verdict on the layout: the worst one, if several small recipes stand for it. Errors of
        the recipe and of the ranks are part of the verdict, and are not raised.
    """
    try:
        full = load(recipe, list(sets), check_files=False, may_import=may_import).recipe
        small_recipes = shrink(full)
    except UserError as error:
        return Verdict(
            passed=False,
            world_size=0,
            layout=" ".join(sets),
            dtype=dtype or "float64",
            refused=True,
            error=" | ".join(error.lines),
        )
    return _prove_all(pool, folder, full, small_recipes, dtype, steps, worker_arguments)


def prove_recipes(
    pool: Pool,
    folder: Path,
    full: Recipe,
    small_recipes: Sequence[Recipe],
    *,
    dtype: str | None = None,
    steps: int,
) -> Verdict:
    """Prove small recipes that stand for ``full``, as ``verify_recipe`` proves those of ``shrink``.

    Returns the worst verdict. Errors of the ranks are in it.
    """
    return _prove_all(pool, folder, full, small_recipes, dtype, steps, {})


def verify_recipe(
    pool: Pool, folder: Path, full: Recipe, *, dtype: str | None = None, steps: int
) -> Verdict:
    """Prove the layout of a recipe, as ``verify_layout``. Errors of the ranks are in the verdict.

    Raises:
        UserError: the recipe cannot be made small.
    """
    return prove_recipes(pool, folder, full, shrink(full), dtype=dtype, steps=steps)


def _prove_all(
    pool: Pool,
    folder: Path,
    full: Recipe,
    small_recipes: Sequence[Recipe],
    dtype: str | None,
    steps: int,
    worker_arguments: Mapping[str, Any],
) -> Verdict:
    """Prove the small recipes that stand for ``full``, and return the worst verdict."""
    verdicts = [
        _prove(pool, folder, small, dtype or "float64", steps, worker_arguments)[0]
        for small in small_recipes
    ]
    for verdict in verdicts:
        verdict.layout += "".join(f", {words}" for words in _left_out(full, small_recipes))
    worst = max(verdicts, key=badness)
    if worst.passed and len(verdicts) > 1:
        worst = _in_one(verdicts, worst)
    if dtype is not None or not worst.passed or not float32.is_used_by(full):
        return worst
    small = float32.small_recipe(full, small_recipes)
    return _also_in_float32(pool, folder, worst, small, steps, worker_arguments)


def _in_one(verdicts: Sequence[Verdict], worst: Verdict) -> Verdict:
    """Return ``worst`` with the largest error of each kind among several small models."""
    more = len(verdicts) - 1
    return replace(
        worst,
        layout=f"{worst.layout}, and {more} further small model{'s' if more > 1 else ''}",
        loss_rel_err=max(verdict.loss_rel_err or 0.0 for verdict in verdicts),
        grad_norm_rel_err=max(verdict.grad_norm_rel_err or 0.0 for verdict in verdicts),
        max_grad_rel_err=max(verdict.max_grad_rel_err or 0.0 for verdict in verdicts),
        max_weight_rel_err=max(verdict.max_weight_rel_err or 0.0 for verdict in verdicts),
    )


def _also_in_float32(
    pool: Pool,
    folder: Path,
    exact: Verdict,
    small: Recipe,
    steps: int,
    worker_arguments: Mapping[str, Any],
) -> Verdict:
    """Prove a small recipe in float32, after ``exact`` has been found in float64.

    Returns:
        ``exact`` with its ``float32``, or the verdict in float32 if that is wrong or has no answer
        in time. Where rounding in float32 leaves no answer, the one in float64 stands.
    """
    steps = min(steps, float32.STEPS)
    verdict, stats = _prove(pool, folder, small, "float32", steps, worker_arguments)
    if verdict.passed:
        exact.float32 = "exact"
    elif verdict.undecided or (stats is not None and _may_swap_experts(stats, "float32")):
        exact.float32 = "undecided"
    else:
        verdict.error = f"in float32, while all is exact in float64: {verdict.error}"
        return verdict
    return exact


def badness(verdict: Verdict) -> tuple[bool, bool, bool, float]:
    """Return a key that orders verdicts from the best to the worst.

    A failure is worse than a run without an answer, and that is worse than a refusal. A failure
    without an error of the gradients is the worst: a gradient was not finite, or the job ended
    before them.
    """
    error = verdict.max_grad_rel_err
    is_wrong = not (verdict.timed_out or verdict.undecided)
    return not verdict.passed, not verdict.refused, is_wrong, math.inf if error is None else error


def _prove(
    pool: Pool,
    folder: Path,
    small: Recipe,
    dtype: str,
    steps: int,
    worker_arguments: Mapping[str, Any],
) -> tuple[Verdict, ReferenceStats | None]:
    """Run the reference and the composed job of a small recipe, and judge the differences.

    Returns:
        The verdict, and the statistics of the reference. These are None if a run had no result that
        could be judged.
    """
    verdict = Verdict(
        passed=False, world_size=small.world_size, layout=describe(small), dtype=dtype
    )
    try:
        require_provable(small, dtype)
    except RecipeError as error:
        verdict.refused = True
        verdict.error = str(error)
        return verdict, None
    try:
        make = partial(_make_reference, pool, folder, dtype, steps)
        small, reference, stats = choose_seed(small, dtype, make)
        arguments = {
            "recipe": small,
            "dtype": dtype,
            "steps": steps,
            "reference": reference,
            **worker_arguments,
        }
        ranks = pool.run(
            "composer3d.verify.worker:run_composed",
            arguments,
            world_size=small.world_size,
            limit_s=run_limit_s(small),
        )
    except WorkerError as error:
        user_error = error.user_error
        if error.timed_out:
            verdict.timed_out = True
            verdict.error = (
                f"not proven, as the time was over: {error}; use a faster machine, or look for a "
                "rank that waits for ever"
            )
        elif user_error is None:
            verdict.error = f"the composed run failed: {error}"
        else:
            verdict.refused = True
            verdict.error = " | ".join(user_error.lines)
        return verdict, None
    return judge(verdict, ranks, small, stats), stats


def require_provable(small: Recipe, dtype: str) -> None:
    """Raise RecipeError if a proof in ``dtype`` would not tell a wrong layout from an exact one."""
    if small.precision.matmul == "float8" and dtype == "float32":
        raise RecipeError(
            'precision.matmul = "float8" is proven in float64 alone: in float32, rounding to '
            "float8 tells no wrong layout from an exact one; use --dtype float64"
        )


def describe(small: Recipe) -> str:
    """Describe a layout in one line.

    The line has the axes above 1, the settings that are not the default, the ZeRO stage and the
    micro-batches.
    """
    mesh, parallel = small.mesh, small.parallel
    words = [f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1]
    if not words:
        words.append("one process")
    if mesh.ep > 1:
        words.append(f"ep {mesh.ep}")

    if mesh.pp > 1:
        words.append(parallel.schedule)
        if parallel.stages_per_rank > 1:
            words.append(f"{parallel.stages_per_rank} stages a rank")
    if mesh.cp > 1:
        words.append(f"{parallel.cp_method} {parallel.cp_balance}")
    words += _named_values(small)
    if small.model.tied:  # a user's own architecture may tie them by default
        words.append("tied")

    words.append(f"zero {parallel.zero},")
    words.append(f"{small.micro_batches} micro-batches of {small.data.micro_batch}")
    return " ".join(words)


def _named_values(small: Recipe) -> Iterator[str]:
    """Yield the words of each value that is not the default, as the row of its key has them."""
    entries = entries_of_recipe(small)
    for table in _NAMED_TABLES:
        for key, entry in entries.items():
            words = entry.metadata["words"] if key.startswith(f"{table}.") else ""
            if words and value_of(small, key) != entry.default:
                yield words.format(value_of(small, key))


def _left_out(full: Recipe, small_recipes: Sequence[Recipe]) -> Iterator[str]:
    """Yield what the small recipes leave out, and why.

    These are keys, as their rows say it, kinds of blocks, and how FSDP shards the rows of a tensor.
    """
    for key, entry in FIELDS.items():
        reason = entry.metadata["in_proof"].without
        if reason and value_of(full, key) != entry.default:
            yield f"without {entry.name}, {reason}"
    for blocks in lost_kinds(full, small_recipes):
        yield f"without the {blocks}, which the small models lack"
    shown = {cut for small in small_recipes for cut in cuts_of_tensors(small).values()}
    for cut in sorted({*cuts_of_tensors(full).values()} - shown):
        yield f"without rows of which {cut} over FSDP, which no small mesh has"


def choose_seed(
    small: Recipe, dtype: str, make: Callable[[Recipe], tuple[str, ReferenceStats]]
) -> tuple[Recipe, str, ReferenceStats]:
    """Run the one-process training with initial weights that leave no choice to rounding.

    If the scores of two experts differ by less than ``dtype`` resolves, rounding alone may choose
    the other one, and all gradients differ. If a number lies halfway between two float8 numbers, as
    far as float64 resolves, rounding alone chooses one of them. If rounding moves the gradients by
    much, a wrong gradient could hide. That is no error of a layout, but nothing could tell it from
    one. So the proof takes the next seed of the initial weights.

    Args:
        small: a small recipe.
        dtype: the dtype of the composed job.
        make: runs the training of a recipe, and returns its file and its statistics.

    Returns:
        The recipe with that seed, and what ``make`` returns.
    """
    for seed in range(small.run.seed, small.run.seed + _SEEDS):
        seeded = replace(small, run=replace(small.run, seed=seed))
        reference, stats = make(seeded)
        rounding = stats.closest_rounding
        is_clear = not _may_swap_experts(stats, dtype) and has_little_noise(stats, dtype)
        if is_clear and (rounding is None or rounding > _NEAR_ROUNDING):
            break
    return seeded, reference, stats


def _may_swap_experts(stats: ReferenceStats, dtype: str) -> bool:
    """Return whether the scores of two experts differ by less than ``dtype`` resolves."""
    return stats.closest_scores is not None and not stats.closest_scores > _NEAR_TIE[dtype]


def _make_reference(
    pool: Pool, folder: Path, dtype: str, steps: int, small: Recipe
) -> tuple[str, ReferenceStats]:
    """Run the one-process training, once for all layouts that share it.

    Returns:
        The path of the file that ``worker.run_reference`` wrote, and the statistics.
    """
    scales = small.mesh.tp if small.precision.matmul == "float8" else None
    key = hash((small.model, small.data, small.optim, small.run.seed, scales, dtype, steps))
    path = folder / f"reference-{key:x}.pt"
    # The statistics are written last: if they exist, the reference is complete.
    stats_path = path.with_suffix(".json")
    if not stats_path.exists():
        arguments = {"recipe": small, "dtype": dtype, "steps": steps, "path": str(path)}
        (stats,) = pool.run(
            "composer3d.verify.worker:run_reference",
            arguments,
            world_size=1,
            limit_s=run_limit_s(small),
        )
        stats_path.write_text(json.dumps(stats))
    return str(path), ReferenceStats(**json.loads(stats_path.read_text()))
