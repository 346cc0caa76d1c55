"""What the workers of ``verify`` run: the plain one-process training, and the composed one held against it."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.data import Batch
from composer3d.dist import pool_world
from composer3d.mesh import Mesh
from composer3d.models import Llama
from composer3d.optim import build_optimizer
from composer3d.parallel import init
from composer3d.parallel.plans import llama_plan
from composer3d.recipe.schema import PrecisionTable, Recipe
from composer3d.shape import IGNORE_INDEX
from composer3d.train import build_stages, compute_gradients, evaluate_batch, update


def random_batch(recipe: Recipe, step: int) -> Batch:
    """The global batch of a step: random tokens, and labels of which a different number counts in every row."""
    rows, length = recipe.data.global_batch, recipe.data.seq_len
    generator = torch.Generator().manual_seed(7919 * (step + 1))
    tokens_BT = torch.randint(recipe.model.vocab, (rows, length), generator=generator)
    labels_BT = torch.randint(recipe.model.vocab, (rows, length), generator=generator)
    ignored = torch.randint(length // 2, (rows, 1), generator=generator)
    labels_BT = labels_BT.masked_fill(torch.arange(length) < ignored, IGNORE_INDEX)
    return Batch(tokens_BT=tokens_BT, labels_BT=labels_BT, positions_BT=torch.arange(length).repeat(rows, 1))


def run_reference(recipe: Recipe, dtype: str, steps: int, path: str) -> float:
    """Train on one process with nothing of ``parallel`` but the initial weights, and write what it computed to
    ``path``.

    Returns:
        In float32 the largest relative difference, after the first gradients, to the same training with the batch cut
        into
        single samples: what rounding alone does. 0 in float64.
    """
    torch.set_num_threads(1)
    whole = _train_plainly(recipe, dtype, steps, rows=recipe.data.global_batch)
    torch.save(whole, path)
    if dtype == "float64":
        return 0.0
    single = _train_plainly(recipe, dtype, steps, rows=1)
    spread = [abs(a - b) / abs(b) for kind in ("loss", "norm") for a, b in zip(single[kind], whole[kind], strict=True)]
    for step in range(steps):
        for kind in ("gradient", "weight"):
            norm = total_norm(whole[kind][step])
            spread += [relative(single[kind][step][name], b, norm) for name, b in whole[kind][step].items()]
    return max(spread)


def _train_plainly(recipe: Recipe, dtype: str, steps: int, *, rows: int) -> dict[str, Any]:
    """Plain PyTorch: forward and backward over ``rows`` samples at a time, clip, AdamW."""
    model = Llama(recipe.model, dtype=getattr(torch, dtype), device="cpu")
    init.initialise(model, llama_plan(recipe.model), recipe.run.seed)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    table = recipe.optim
    groups = [{"params": decay, "weight_decay": table.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=table.lr, betas=table.betas, eps=table.eps, foreach=False)
    out: dict[str, Any] = {"loss": [], "norm": [], "gradient": [], "weight": []}
    for step in range(steps):
        batch = random_batch(recipe, step)
        valid = (batch.labels_BT != IGNORE_INDEX).sum()
        optimizer.zero_grad()
        total = 0.0
        parts = zip(*(t.split(rows) for t in (batch.tokens_BT, batch.labels_BT, batch.positions_BT)), strict=True)
        for tokens, labels, positions in parts:
            loss = model(tokens, labels, positions) / valid
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = total_norm(gradients)
        if 0 < table.clip < norm:
            for p in model.parameters():
                p.grad = p.grad * (table.clip / norm) if p.grad is not None else None
        optimizer.step()
        out["loss"].append(total)
        out["norm"].append(norm)
        out["gradient"].append(gradients)
        out["weight"].append({name: p.detach().clone() for name, p in model.named_parameters()})
    batch = random_batch(recipe, steps)
    with torch.no_grad():
        valid = (batch.labels_BT != IGNORE_INDEX).sum()
        out["loss"].append((model(batch.tokens_BT, batch.labels_BT, batch.positions_BT) / valid).item())
    return out


def run_composed(
    recipe: Recipe,
    dtype: Literal["float32", "float64"],
    steps: int,
    reference: str,
    fault: Any = None,
    compute: Literal["float32"] | None = None,
) -> dict[str, Any]:
    """Train composed, as one rank, and compare with the reference after each step; the last loss is a validation's.

    Args:
        fault: called before anything is built; a test plants a fault with it.
        compute: narrower dtype of a mixed-precision recipe's forward and backward; absent: ``dtype``.

    Returns:
        ``identity``; relative errors ``loss`` and ``norm`` by step; ``tensors``: rows (step, kind, name, error, scale);
        ``wanted``: the names of the reference's parameters.
    """
    torch.set_num_threads(1)
    # Comparing whole tensors gathers them over several axes in turn, which DTensor calls slow; training never does.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if fault is not None:
        fault()
    # Mixed precision adds a layer, which is proven as well, in wide dtypes.
    precision = PrecisionTable(params=dtype, compute=recipe.precision.compute and (compute or dtype))
    recipe = replace(recipe, precision=precision)
    wanted = torch.load(reference, mmap=True, weights_only=True)
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        out: dict[str, Any] = {"identity": mesh.identity, "loss": [], "norm": [], "tensors": []}
        out["wanted"] = list(wanted["weight"][0])
        for step in range(steps):
            loss, norm = compute_gradients(stages, _mine(random_batch(recipe, step), mesh))
            out["loss"].append(_scalar_error(loss, wanted["loss"][step]))
            out["norm"].append(_scalar_error(norm, wanted["norm"][step]))
            gradients = {name: p.grad for name, p in stages.named_parameters()}
            out["tensors"] += _compare(step, "gradient", gradients, wanted["gradient"][step])
            update(stages, optimizer, norm=norm, max_norm=recipe.optim.clip, lr=recipe.optim.lr)
            weights = {name: p.detach() for name, p in stages.named_parameters()}
            out["tensors"] += _compare(step, "weight", weights, wanted["weight"][step])
        share, valid = evaluate_batch(stages, _mine(random_batch(recipe, steps), mesh))
        total, tokens = mesh.sum_over_world(share, valid)
        out["loss"].append(_scalar_error(total / tokens, wanted["loss"][steps]))
        return out


def _mine(batch: Batch, mesh: Mesh) -> Batch:
    """This rank's rows of a global batch."""
    rows = len(batch.tokens_BT) // mesh.batch_ranks
    part = slice(mesh.batch_rank * rows, (mesh.batch_rank + 1) * rows)
    return Batch(batch.tokens_BT[part], batch.labels_BT[part], batch.positions_BT[part])


def _compare(
    step: int, kind: str, tensors: Mapping[str, Tensor | None], wanted: dict[str, Tensor]
) -> list[tuple[int, str, str, float, float | None]]:
    """Relative error of each whole tensor as this rank sees it, and the factor to the reference where it is one."""
    norm = total_norm(wanted)
    rows: list[tuple[int, str, str, float, float | None]] = []
    for name, tensor in tensors.items():
        if tensor is None or name not in wanted:
            rows.append((step, kind, name, math.inf, None))
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        b = wanted[name]
        error = relative(whole, b, norm)
        scale = (torch.sum(whole * b) / torch.sum(b * b)).item()
        fits = relative(whole, b * scale, norm) < 1e-4 if math.isfinite(scale) else False
        rows.append((step, kind, name, error, scale if fits else None))
    return rows


def relative(a: Tensor, b: Tensor, norm_of_all: float) -> float:
    """||a - b|| / max(||b||, 1e-12 of the norm of all tensors)."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    return (torch.linalg.vector_norm(a - b) / max(torch.linalg.vector_norm(b).item(), 1e-12 * norm_of_all)).item()


def total_norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(torch.linalg.vector_norm(t.to(torch.float64)).item() ** 2 for t in tensors.values()))


def _scalar_error(a: float, b: float) -> float:
    return abs(a - b) / abs(b)
