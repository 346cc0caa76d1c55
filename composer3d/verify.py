"""``composer3d verify``: prove that a layout computes what one process computes.

The recipe's model and mesh are shrunk to what a laptop runs, with every predicate that matters kept. The composed job
and a plain one-process loop then train on the same random global batches, and loss, gradient norm, every gradient and
every weight are compared on every rank after each step. This side of it starts no torch: workers do
(``verify_worker``).
"""

import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from composer3d.errors import UserError
from composer3d.launch import Pool, WorkerError
from composer3d.recipe.load import load
from composer3d.recipe.rules import violations
from composer3d.recipe.schema import AXES, MeshTable, Recipe

LIMIT = 16  # processes on one machine
_EXACT = {"float64": 1e-9, "float32": 1e-5}


@dataclass(kw_only=True)
class Verdict:
    """What ``verify --json`` prints of one layout. Errors are relative; None where a value was not finite or not
    computed.
    """

    passed: bool
    world_size: int
    layout: str
    dtype: str
    loss_rel_err: float | None = None
    grad_norm_rel_err: float | None = None
    max_grad_rel_err: float | None = None
    max_weight_rel_err: float | None = None
    worst_parameter: str | None = None
    refused: bool = False
    error: str | None = None


def main_verify(
    *,
    recipe: str,
    sets: Sequence[str],
    dtype: Literal["float32", "float64"],
    steps: int,
    layouts: str | None,
    as_json: bool,
) -> int:
    """The command. Returns 0 where every layout passed, 1 where one did not, 2 where the only one was refused."""
    begin = time.monotonic()
    lines = [""] if layouts is None else _layout_lines(layouts)
    verdicts = []
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-verify-") as folder:
        for line in lines:
            verdict = verify_layout(pool, Path(folder), recipe, [*sets, *line.split()], dtype=dtype, steps=steps)
            verdicts.append(verdict)
            _print_verdict(verdict, line)
    passed = all(verdict.passed for verdict in verdicts)
    if len(verdicts) > 1:
        good = sum(verdict.passed for verdict in verdicts)
        print(f"{good} of {len(verdicts)} layouts are exact, in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    if as_json:
        results = [asdict(verdict) for verdict in verdicts]
        print(json.dumps(results[0] if layouts is None else {"passed": passed, "results": results}))
    return 0 if passed else 2 if layouts is None and verdicts[0].refused else 1


def verify_layout(
    pool: Pool, folder: Path, recipe: str, sets: Sequence[str], *, dtype: str, steps: int, **task: Any
) -> Verdict:
    """Prove one layout, or say why it is refused. References are kept in ``folder`` for the layouts that follow.

    Args:
        task: what is passed on to ``verify_worker.run_composed``; tests plant faults with it.
    """
    try:
        full = load(recipe, list(sets), check_files=False).recipe
    except UserError as error:
        return Verdict(
            passed=False, world_size=0, layout=" ".join(sets), dtype=dtype, refused=True, error=" | ".join(error.lines)
        )
    verdicts = [_prove(pool, folder, small, dtype=dtype, steps=steps, task=task) for small in shrink(full)]
    return max(verdicts, key=lambda v: (not v.passed, v.max_grad_rel_err or 0.0))


def shrink(full: Recipe) -> list[Recipe]:
    """Small recipes that stand for ``full``: one where its mesh fits a laptop, else one for every triple of its axes.

    Kept: which axes are above 1 (whole, up to 16 processes), grouped-query or not, key-value heads equal to tp or more,
    heads narrower or wider than the stream's, tied, norms and biases, a window below the sequence, layers that stages
    divide or not, an uneven explicit cut, enough micro-batches for the schedule, accumulation, clipping (made active).
    """
    return [_shrink_to(full, mesh) for mesh in _meshes(full.mesh)]


def _meshes(mesh: MeshTable) -> list[MeshTable]:
    if mesh.world_size <= LIMIT:
        return [mesh]
    # Four stages where there are more than two: only then has a stage neighbours on both sides.
    cut = {axis: min(4 if axis == "pp" else 2, getattr(mesh, axis)) for axis in AXES}
    if math.prod(cut.values()) > LIMIT:
        cut["pp"] = min(2, cut["pp"])
    if math.prod(cut.values()) <= LIMIT:
        return [MeshTable(**cut)]
    wide = [axis for axis in AXES if cut[axis] > 1]
    return [MeshTable(**{axis: cut[axis] if axis in kept else 1 for axis in AXES}) for kept in combinations(wide, 3)]


def _shrink_to(full: Recipe, mesh: MeshTable) -> Recipe:
    model, tp, pp = full.model, mesh.tp, mesh.pp
    n_kv_heads = tp * (2 if model.n_kv_heads > full.mesh.tp else 1)
    n_heads = n_kv_heads * min(2, model.n_heads // model.n_kv_heads)
    stages = pp * full.parallel.stages_per_rank if pp > 1 else 1
    of_full = full.mesh.pp * full.parallel.stages_per_rank if full.mesh.pp > 1 else 1
    n_layers = stages * min(2, max(1, model.n_layers // of_full)) + (1 if model.n_layers % of_full else 0)
    parallel = full.parallel
    if parallel.stages is not None:
        given = parallel.stages if len(parallel.stages) == stages else (max(parallel.stages), *sorted(parallel.stages))
        given = given[:stages]
        parallel = replace(parallel, stages=tuple(1 + (layers > min(given)) for layers in given))
        n_layers = sum(parallel.stages or ())
    unit = mesh.cp * math.lcm(2, tp)
    seq_len = -(-max(16, 8 * mesh.cp, 2 * unit) // unit) * unit
    full_heads = model.head_width * model.n_heads
    shape = replace(
        model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        dim=8 * n_heads,
        ffn=tp * 12,
        vocab=-(-256 // tp) * tp,
        n_layers=n_layers,
        head_dim=None if full_heads == model.dim else 12 if full_heads > model.dim else 4,
        window=5 if 0 < model.window < full.data.seq_len else 0,
    )
    count = full.micro_batches
    micro_batches = count if count <= 8 else max(4, 2 * pp)
    if pp > 1 and count < full.mesh.pp:
        micro_batches = min(count, pp - 1)  # fewer than stages, as they are in full
    micro_batch = min(2, full.data.micro_batch)
    if pp > 1 and parallel.schedule == "1F1B":
        micro_batches = max(micro_batches, pp)
    elif pp > 1 and parallel.schedule == "Interleaved1F1B":
        micro_batches -= micro_batches % max(1, micro_batches // pp)
    data = replace(
        full.data,
        seq_len=seq_len,
        micro_batch=micro_batch,
        global_batch=micro_batch * micro_batches * mesh.batch_ranks,
    )
    optim = replace(full.optim, clip=0.1 if full.optim.clip > 0 else 0.0)
    small = replace(full, model=shape, mesh=mesh, parallel=parallel, data=data, optim=optim)
    assert not violations(small), violations(small)
    return small


def _prove(pool: Pool, folder: Path, small: Recipe, *, dtype: str, steps: int, task: Mapping[str, Any]) -> Verdict:
    mesh = small.mesh
    layout = " ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1) or "one process"
    if mesh.pp > 1:
        layout += f" {small.parallel.schedule}"
        layout += f" {small.parallel.stages_per_rank} a rank" if small.parallel.stages_per_rank > 1 else ""
    if small.memory.activation_checkpoint != "none":
        layout += f" checkpoint {small.memory.activation_checkpoint}"
    if small.precision.compute is not None:
        layout += " mixed"
    layout += f" zero {small.parallel.zero}, {small.micro_batches} micro-batches of {small.data.micro_batch}"
    verdict = Verdict(passed=False, world_size=small.world_size, layout=layout, dtype=dtype)
    try:
        path, spread = _reference(pool, folder, small, dtype=dtype, steps=steps)
        arguments = {"recipe": small, "dtype": dtype, "steps": steps, "reference": path, **task}
        ranks = pool.run("composer3d.verify_worker:run_composed", arguments, world_size=small.world_size, limit_s=240.0)
    except WorkerError as error:
        user = error.user_error
        verdict.refused = user is not None
        verdict.error = " | ".join(user.lines) if user else f"the composed run failed: {error}"
        return verdict
    return _judge(verdict, ranks, small, spread)


def _reference(pool: Pool, folder: Path, small: Recipe, *, dtype: str, steps: int) -> tuple[str, float]:
    """The file with the one-process run, made once for all layouts that share it, and float32's own spread."""
    key = repr((small.model, small.data.seq_len, small.data.global_batch, small.optim, small.run.seed, dtype, steps))
    path = folder / f"reference-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.pt"
    arguments = {"recipe": small, "dtype": dtype, "steps": steps, "path": str(path)}
    spread_path = path.with_suffix(".json")
    if not spread_path.exists():  # written last
        spread = pool.run("composer3d.verify_worker:run_reference", arguments, world_size=1, limit_s=240.0)[0]
        spread_path.write_text(json.dumps(spread))
    return str(path), json.loads(spread_path.read_text())


def _judge(verdict: Verdict, ranks: list[dict[str, Any]], small: Recipe, spread: float) -> Verdict:
    """Hold what every rank measured against the bounds; a value that is not finite fails."""
    tight = _EXACT[verdict.dtype]
    late = tight if verdict.dtype == "float64" else max(tight, 4 * spread)
    scalars = {"loss_rel_err": "loss", "grad_norm_rel_err": "norm"}
    passed = True
    for field, name in scalars.items():
        errors = [(step, error) for rank in ranks for step, error in enumerate(rank[name])]
        passed &= all(error <= (tight if step == 0 else late) for step, error in errors)
        setattr(verdict, field, _worst(error for _, error in errors))
    rows = [(index, *row) for index, rank in enumerate(ranks) for row in rank["tensors"]]
    for field, kind in {"max_grad_rel_err": "gradient", "max_weight_rel_err": "weight"}.items():
        setattr(verdict, field, _worst(error for _, _, what, _, error, _ in rows if what == kind))
    # A row is (rank, step, kind, name, error, scale): the first step's gradients have the tight bound.
    beyond = [row for row in rows if not row[4] <= (tight if row[1] == 0 and row[2] == "gradient" else late)]
    first = min((row[1] for row in beyond), default=0)
    blamed = [row for row in beyond if row[1] == first and row[2] == "gradient"] or beyond or rows
    rank, step, kind, name, error, scale = max(blamed, key=lambda row: row[4] if math.isfinite(row[4]) else math.inf)
    verdict.worst_parameter = name
    verdict.passed = passed and not beyond
    if missing := set(ranks[0]["wanted"]) - {row[3] for row in rows}:
        verdict.passed, verdict.worst_parameter = False, min(missing)
        verdict.error = f"no rank holds {', '.join(sorted(missing))}"
    elif not verdict.passed:
        where = ranks[rank]["identity"]
        verdict.error = f"{kind} of {name} at step {step + 1} is off by {error:.1e} on {where}"
        if not beyond:
            verdict.error = "loss or gradient norm is off, while every gradient and weight is right"
        verdict.error += _suspect(scale, small.mesh)
    return verdict


def _suspect(scale: float | None, mesh: MeshTable) -> str:
    """Name the axes whose size is the factor between a tensor and its reference, where there is such a factor."""
    if scale is None or abs(scale - 1) < 1e-3 or scale <= 0:
        return ""
    axes = [
        axis
        for axis in AXES
        if (size := getattr(mesh, axis)) > 1 and min(abs(scale - size), abs(scale - 1 / size)) < 1e-3
    ]
    return f"; it is {scale:.4g} times the reference" + (f", suspect {' or '.join(axes)}" if axes else "")


def _worst(errors: Any) -> float | None:
    worst = 0.0
    for error in errors:
        if not math.isfinite(error):
            return None
        worst = max(worst, error)
    return worst


def _layout_lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--layouts {path}: cannot be read ({error})") from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    if not any(lines):
        raise UserError(f"--layouts {path}: holds no layout; write one a line, such as: mesh.tp=2 mesh.pp=2")
    return [line for line in lines if line]


def _print_verdict(verdict: Verdict, line: str) -> None:
    word = "exact  " if verdict.passed else "refused" if verdict.refused else "WRONG  "
    numbers = "  ".join(
        f"{label} {value:.0e}" if value is not None else f"{label} -"
        for label, value in (
            ("loss", verdict.loss_rel_err),
            ("norm", verdict.grad_norm_rel_err),
            ("grad", verdict.max_grad_rel_err),
            ("weight", verdict.max_weight_rel_err),
        )
    )
    print(f"{word} {verdict.layout}" + ("" if verdict.refused else f"  ({verdict.dtype})  {numbers}"), file=sys.stderr)
    if verdict.error:
        print(f"        {verdict.error}", file=sys.stderr)
