"""``composer3d verify``: prove that a layout computes what one process computes.

The recipe's model and mesh are shrunk to what a laptop runs, with every predicate that matters kept. The composed job
and a plain one-process loop then train on the same global batches, and loss, gradient norm, every gradient and every
weight are compared after each step, shard by shard, on the rank that holds it; so is the loss of a validation.

Steps 1, 3, 5 take their batches from a small corpus in memory, as training does: through its loader, with the recipe's
packing, learning rates and validation. Steps 2, 4, 6 take random batches, with labels that no corpus has. The recipe's
own data is never opened. This side of it starts no torch: workers do (``verify_worker``).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer3d.recipe.resolve import load
from composer3d.recipe.schema import AXES, Recipe
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.spec.errors import UserError
from composer3d.verify.judge import Known, Verdict, judge
from composer3d.verify.shrink import shrink


def verify_layout(
    pool: Pool,
    folder: Path,
    recipe: str,
    sets: Sequence[str],
    *,
    dtype: str,
    steps: int,
    **task: Any,
) -> Verdict:
    """Prove one layout, or say why it is refused. References are kept in ``folder`` for the layouts that follow.

    ``task`` is passed on to ``verify_worker.run_composed``; tests plant faults with it.
    """
    try:
        smalls = shrink(load(recipe, list(sets), check_files=False).recipe)
    except UserError as error:
        why = " | ".join(error.lines)
        return Verdict(
            passed=False, world_size=0, layout=" ".join(sets), dtype=dtype, refused=True, error=why
        )
    verdicts = [
        _prove(pool, folder, small, dtype=dtype, steps=steps, task=task) for small in smalls
    ]
    return max(verdicts, key=lambda v: (not v.passed, v.max_grad_rel_err or 0.0))


def _prove(
    pool: Pool, folder: Path, small: Recipe, *, dtype: str, steps: int, task: Mapping[str, Any]
) -> Verdict:
    verdict = Verdict(
        passed=False, world_size=small.world_size, layout=describe(small), dtype=dtype
    )
    try:
        path, known = _reference(pool, folder, small, dtype=dtype, steps=steps)
        arguments = {"recipe": small, "dtype": dtype, "steps": steps, "reference": path, **task}
        ranks = pool.run(
            "composer3d.verify.worker:run_composed",
            arguments,
            world_size=small.world_size,
            limit_s=240.0,
        )
    except WorkerError as error:
        user = error.user_error
        verdict.refused = user is not None
        verdict.error = " | ".join(user.lines) if user else f"the composed run failed: {error}"
        return verdict
    return judge(verdict, ranks, small, known)


def describe(small: Recipe) -> str:
    """A layout in words: what is not the default."""
    mesh, memory, each = small.mesh, small.memory, small.parallel.stages_per_rank
    words = [f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1] or [
        "one process"
    ]
    if mesh.pp > 1:
        words += [small.parallel.schedule, *([f"{each} a rank"] if each > 1 else [])]
    more = {
        f"{small.parallel.cp_method} {small.parallel.cp_balance}": mesh.cp > 1,
        f"checkpoint {memory.activation_checkpoint}": memory.activation_checkpoint != "none",
        f"loss in {memory.loss_chunks} chunks": memory.loss_chunks > 1,
        "offload": memory.cpu_offload,
        "compile": small.compile.enabled,
        "mixed": small.precision.compute is not None,
        f"packing {small.data.packing}": small.data.packing != "none",
        "tied": small.model.tied,
    }
    words += [word for word, said in more.items() if said]
    words += [
        f"zero {small.parallel.zero}, {small.micro_batches} micro-batches of {small.data.micro_batch}"
    ]
    return " ".join(words)


def _reference(
    pool: Pool, folder: Path, small: Recipe, *, dtype: str, steps: int
) -> tuple[str, Known]:
    """The file with the one-process run, made once for all layouts that share it, and what is known of it."""
    key = hash((small.model, small.data, small.optim, small.run.seed, dtype, steps))
    path = folder / f"reference-{key:x}.pt"
    facts = path.with_suffix(".json")
    if not facts.exists():  # written last
        arguments = {"recipe": small, "dtype": dtype, "steps": steps, "path": str(path)}
        known = pool.run(
            "composer3d.verify.worker:run_reference", arguments, world_size=1, limit_s=240.0
        )[0]
        facts.write_text(json.dumps(known))
    return str(path), Known(**json.loads(facts.read_text()))
