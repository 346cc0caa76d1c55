"""What the workers of ``verify`` run: the plain one-process training, and the composed one held against it.

Both train on the first batch of a small corpus, then on a random batch, and so on by turns (``verify_data``). The
composed side takes the corpus through the functions that training calls, for batches, gradients, learning rate, update
and validation, so that what it proves is what runs. The plain side follows the documented rules with code of its own.
Random batches hold what no corpus gives: a micro-batch without a label, other numbers of labels in each row.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.data import Batch, Corpus
from composer3d.models.contract import IGNORE_INDEX
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.parallel import Stages, grad_norm, init
from composer3d.recipe.schema import PrecisionTable, Recipe
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training import batches
from composer3d.training import step as train_step
from composer3d.training.build import build_stages
from composer3d.training.optim import build_optimizer, learning_rate
from composer3d.verify import rounding as verify_rounding
from composer3d.verify.data import (
    corpus_batch,
    is_random,
    make_corpus,
    most_of,
    random_batch,
    rate,
    shorten,
)
from composer3d.verify.judge import Piece


def run_reference(recipe: Recipe, dtype: str, steps: int, path: str) -> dict[str, Any]:
    """Train on one process with nothing of ``parallel`` but the initial weights; write what it computed to ``path``.

    Returns the fields of ``verify_judge.Known``. It computes in float64; with ``dtype`` float32 on weights that float32
    can hold, and it measures what rounding alone does to the gradients (``verify_rounding``).
    """
    torch.set_num_threads(1)
    recipe = shorten(recipe, steps)
    whole = _train_plainly(recipe, dtype, steps)
    noise, clips = whole.pop("noise"), whole.pop("clips")
    torch.save(whole, path)
    kinds = ("gradient", "weight")
    norms = {
        kind: [{name: _norm(t) for name, t in step.items()} for step in whole[kind]]
        for kind in kinds
    }
    shapes = {name: list(tensor.shape) for name, tensor in whole["weight"][0].items()}
    return {"noise": noise, "norms": norms, "shapes": shapes, "clips": clips}


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def _relative(a: float, b: float) -> float:
    """The error of ``a``, relative to ``b``; absolute where ``b`` is 0, as of a batch without a label."""
    return abs(a - b) / (abs(b) or 1.0)


def _train_plainly(recipe: Recipe, dtype: str, steps: int) -> dict[str, Any]:
    """Plain PyTorch in float64: forward and backward, clip, AdamW; validation before the last step."""
    model = Llama(recipe.model, dtype=torch.float64, device="cpu")
    init.initialise(model, sharding_plan(recipe.model), recipe.run.seed)
    table, groups = recipe.optim, []
    for is_matrix, decay in ((True, table.weight_decay), (False, 0.0)):
        groups.append(
            {
                "params": [p for p in model.parameters() if (p.ndim > 1) == is_matrix],
                "weight_decay": decay,
            }
        )
    optimizer = torch.optim.AdamW(
        groups, lr=table.lr, betas=table.betas, eps=table.eps, foreach=False
    )
    text, held_out = make_corpus(recipe, "train"), make_corpus(recipe, "validation")
    kinds = ("norm", "clipped", "clips", "gradient", "weight", "noise")
    out: dict[str, Any] = {"loss": [0.0] * (steps + 1), **{kind: [] for kind in kinds}}
    if dtype == "float32":
        verify_rounding.narrow(model)
        out["initial"] = _weights(model)
    for step in range(steps):
        if step == steps - 1:
            out["loss"][steps] = _validate_plainly(model, recipe, held_out)
        batch = corpus_batch(recipe, text, seed=recipe.data.seed, step=step)
        if is_random(step):
            batch = random_batch(recipe, step)
        out["loss"][step], gradients = _plain_gradients(model, batch)
        if dtype == "float32":
            out["noise"].append(
                verify_rounding.noise(model, gradients, partial(_gradients_only, batch))
            )
        norm, most = math.hypot(*map(_norm, gradients.values())), most_of(recipe, step)
        for p in model.parameters():
            if p.grad is not None and 0 < most < norm:
                p.grad *= most / norm
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step)
        optimizer.step()
        if dtype == "float32":
            verify_rounding.narrow(model)
        out["norm"].append(norm)
        out["clipped"].append(min(norm, most) if most > 0 else norm)
        out["clips"].append(0 < most < norm)
        out["gradient"].append(gradients)
        out["weight"].append(_weights(model))
    return out


@torch.no_grad()
def _validate_plainly(model: Llama, recipe: Recipe, held_out: Corpus) -> float:
    """The sum of all losses of ``validation.steps`` batches over the number of all labels that count."""
    steps = range(recipe.validation.steps)
    batches = [corpus_batch(recipe, held_out, seed=0, step=step) for step in steps]
    labels = torch.cat([batch.labels_BT for batch in batches])
    return sum(model(*batch).item() for batch in batches) / max(
        1, int((labels != IGNORE_INDEX).sum())
    )


def _wrong_rates(recipe: Recipe, steps: int) -> str | None:
    """Where training's learning rate is not the one of the recipe's text: in the shortened recipe, or in the full one.

    A few steps show little of a schedule. The rates are numbers alone, so all that matter are compared: every step of
    the short run and some beyond it, and of the full one 64 steps and those around each place where its rule changes.
    """
    short = shorten(recipe, steps)
    for each in (short, recipe):
        table, total = each.optim, each.run.steps
        end = total if table.decay is None else table.decay
        falls = end - (table.decay_steps or max(1, end // 10))
        places = (0, table.warmup, falls, end, total)
        sample = {(end + 2) * part // 63 for part in range(64)}
        sample |= {place + near for place in places for near in range(-3, 4)} | {
            2 * end,
            10 * total,
        }
        for step in sorted(number for number in sample if number >= 0):
            given, wanted = learning_rate(step, table, total), rate(each, step)
            if not abs(given - wanted) <= 1e-12 * table.lr:
                run = "the proof's run" if each is short else "the whole run"
                return f"learning rate of step {step + 1} of {run} of {total} is {given:.6g}, not {wanted:.6g}"
    return None


def _weights(model: Llama) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _plain_gradients(model: Llama, batch: Batch, rows: int = 0) -> tuple[float, dict[str, Tensor]]:
    """The loss of a global batch and the gradients, computed over ``rows`` samples at a time; 0: all at once."""
    model.zero_grad()
    total, rows = 0.0, rows or len(batch.tokens_BT)
    for first in range(0, len(batch.tokens_BT), rows):
        loss = _loss(model, _rows(batch, first, rows), batch)
        loss.backward()
        total += loss.item()
    return total, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def _gradients_only(batch: Batch, model: Llama, rows: int) -> dict[str, Tensor]:
    return _plain_gradients(model, batch, rows)[1]


def _loss(model: Llama, part: Batch, whole: Batch) -> Tensor:
    """Of a part of a batch, by the labels that count in the whole; by 1 where none does."""
    return model(*part) / (whole.labels_BT != IGNORE_INDEX).sum().clamp(min=1)


Wide = Literal["float32", "float64"]
Explain = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def run_composed(
    recipe: Recipe,
    dtype: Wide,
    steps: int,
    reference: str,
    fault: Any = None,
    compute: Wide | None = None,
) -> dict[str, Any]:
    """Train composed, as one rank, and compare with the reference after each step.

    ``fault``, with which a test plants one, is called before anything is built. ``compute`` is a narrower dtype of a
    mixed-precision recipe's forward and backward; absent: ``dtype``.

    Returns ``identity`` and ``at`` of the rank; relative errors ``loss``, ``norm`` and ``clipped`` (the norm after
    clipping) by step, a further loss being that of a validation before the last step; ``pieces``: of each gradient and
    weight that it holds, after each step; ``rates``: what is wrong with the learning rate in other steps, or None.
    """
    torch.set_num_threads(1)
    if fault is not None:
        fault()
    # Mixed precision adds a layer, which is proven as well, in wide dtypes.
    precision = PrecisionTable(
        params=dtype, compute=recipe.precision.compute and (compute or dtype)
    )
    wrong_rates = _wrong_rates(recipe, steps)
    recipe = replace(shorten(recipe, steps), precision=precision)
    wanted = torch.load(reference, mmap=True, weights_only=True)
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        loader = batches.make_loader(
            recipe, mesh, make_corpus(recipe, "train"), seed=recipe.data.seed
        )
        held_out = make_corpus(recipe, "validation")
        losses = [math.nan] * (steps + 1)
        out: dict[str, Any] = {
            "identity": mesh.identity,
            "at": mesh.coords,
            "loss": losses,
            "norm": [],
            "clipped": [],
        }
        out |= {"pieces": [], "rates": wrong_rates}

        def compare(step: int, kind: str, tensors: dict[str, Tensor | None]) -> None:
            whole = wanted[kind][step]
            out["pieces"] += [
                _measure(step, kind, name, t, whole.get(name)) for name, t in tensors.items()
            ]

        replay = (
            verify_rounding.Replay(recipe.optim, wanted["norm"], wanted["clipped"])
            if dtype == "float32"
            else None
        )

        for step in range(steps):
            if (
                step == steps - 1
            ):  # between two steps, so that it is seen if validation disturbs the one that follows
                losses[steps] = _relative(
                    train_step.validate(recipe, stages, held_out), wanted["loss"][steps]
                )
            batch = next(loader)
            if is_random(step):
                batch = _mine(random_batch(recipe, step), stages)
            loss, norm = train_step.compute_gradients(stages, batch)
            losses[step] = _relative(loss, wanted["loss"][step])
            out["norm"].append(_relative(norm, wanted["norm"][step]))
            compare(step, "gradient", {name: p.grad for name, p in stages.named_parameters()})
            if replay is not None:
                replay.watch(step, {name: p.grad for name, p in stages.named_parameters()})
            lr = learning_rate(step, recipe.optim, recipe.run.steps)
            train_step.update(stages, optimizer, norm=norm, max_norm=most_of(recipe, step), lr=lr)
            # Adam hides a factor of the gradients, all but for its epsilon: it is seen here.
            (square,) = mesh.sum_over_world(grad_norm.local_grad_norm_sq(stages.parameters(), mesh))
            out["clipped"].append(_relative(math.sqrt(square), wanted["clipped"][step]))
            if replay is None:
                compare(step, "weight", {name: p.detach() for name, p in stages.named_parameters()})
                continue
            begun = wanted["weight"][step - 1] if step else wanted["initial"]
            for name, parameter in stages.named_parameters():
                explain = partial(
                    replay.explain, name, lr=rate(recipe, step), decayed=parameter.ndim > 1
                )
                out["pieces"].append(
                    _measure(step, "weight", name, parameter.detach(), begun.get(name), explain)
                )
                _put(parameter, wanted["weight"][step].get(name))
        return out


def _mine(batch: Batch, stages: Stages) -> Batch:
    """This rank's rows of a global batch, and of them its tokens."""
    rows = len(batch.tokens_BT) // stages.mesh.batch_ranks
    mine = _rows(batch, stages.mesh.batch_rank * rows, rows)
    return Batch._make([*map(stages.own_tokens, mine[:3]), mine.documents_BT])


def _rows(batch: Batch, first: int, count: int) -> Batch:
    return Batch._make(None if part is None else part[first : first + count] for part in batch)


def _put(parameter: Tensor, whole: Tensor | None) -> None:
    """Give this rank's part of a parameter the values of the reference."""
    local, offset = init.local_part(parameter)
    box = None if whole is None else whole[_box(local, offset)]
    if box is not None and box.shape == local.shape:  # else the piece says what is wrong
        local.copy_(box)


def _box(local: Tensor, offset: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True)
    )


def _measure(
    step: int,
    kind: str,
    name: str,
    tensor: Tensor | None,
    whole: Tensor | None,
    explain: Explain = lambda a, b: (a, b),
) -> Piece:
    """This rank's part of a tensor against the same box of the reference, as ``explain`` makes them. No collective."""

    def fails(problem: str) -> Piece:
        return Piece(step, kind, name, (), (0,), math.inf, 0.0, 0.0, problem)

    if tensor is None or whole is None:
        return fails("is missing" if tensor is None else "is not in the reference")
    if isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    ):
        return fails("is a partial sum, which nothing has reduced,")
    local, offset = init.local_part(tensor)
    box = whole[_box(local, offset)]
    if box.shape != local.shape:
        return fails(f"holds {list(local.shape)} at {list(offset)} of {list(whole.shape)}")
    a, b = explain(local.to("cpu", torch.float64), box.to(torch.float64))
    diff, square, dot = ((x * y).sum().item() for x, y in ((a - b, a - b), (b, b), (a, b)))
    return Piece(step, kind, name, offset, tuple(local.shape), diff, square, dot)
