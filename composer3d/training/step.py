"""One optimizer step (gradients, clipping and the update), and validation."""

import math

import torch
from torch import Tensor

from composer3d.data import Batch, BatchesAhead, Corpus
from composer3d.data.order import Order
from composer3d.parallel import Stages, grad_norm
from composer3d.recipe.schema import Recipe
from composer3d.training.batches import make_loader, move_to_device
from composer3d.training.optim import set_lr


def compute_gradients(stages: Stages, batch: Batch) -> tuple[float, float]:
    """Compute the gradients of one step and leave them in ``.grad``.

    Returns:
        The job's loss (the mean over all valid tokens) and the norm of all gradients.

    Collectives: those of ``Stages.forward_backward``, and two all-reduces of scalars over all
    ranks.
    """
    mesh = stages.mesh
    tokens_BT, labels_BT, positions_BT, documents_BT, local_valid = move_to_device(stages, batch)
    (valid_tokens,) = mesh.sum_over_world(local_valid)
    local_loss = stages.forward_backward(
        tokens_BT, labels_BT, positions_BT, max(valid_tokens, 1.0), documents_BT
    )
    loss, norm_sq = mesh.sum_over_world(
        local_loss, grad_norm.local_grad_norm_sq(stages.parameters(), mesh)
    )
    # ``norm_sq`` is NaN if a gradient is.
    norm = math.sqrt(norm_sq) if norm_sq >= 0 else math.nan
    return loss, norm


def update(
    stages: Stages, optimizer: torch.optim.Optimizer, *, norm: float, max_norm: float, lr: float
) -> None:
    """Clip the gradients to ``max_norm``, and update the weights.

    ``norm`` is the norm of all gradients, the same on all ranks. ``lr`` is the learning rate.
    """
    grad_norm.scale_gradients(stages.parameters(), norm=norm, max_norm=max_norm)
    set_lr(optimizer, lr)
    optimizer.step()
    stages.move_router_biases()


def validate(
    recipe: Recipe, stages: Stages, held_out: Corpus, *, order: Order = "feistel"
) -> float:
    """Compute the mean loss over the valid tokens of ``validation.steps`` global batches.

    The batches are drawn from the whole held-out text. They are the same in every validation of
    every run with the same ``order``, that of the training's loader, whatever ``data.seed`` is.

    Returns:
        Nats per valid token, the same on all ranks.

    Collectives: those of ``Stages.evaluate`` for each batch, and one all-reduce over all ranks.
    """
    loader = make_loader(recipe, stages.mesh, held_out, seed=0, order=order)
    batches = BatchesAhead(loader, stages.mesh.device)
    losses, valid_tokens = [], []
    for _ in range(recipe.validation.steps):
        local_loss, local_valid = evaluate_batch(stages, next(batches))
        losses.append(local_loss)
        valid_tokens.append(local_valid)
    batches.close()
    loss, tokens = stages.mesh.sum_over_world(sum(losses), sum(valid_tokens))
    return loss / max(tokens, 1.0)


def evaluate_batch(stages: Stages, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute this rank's shares of a batch's summed loss and of its number of valid tokens.

    Collectives: those of ``Stages.evaluate``. ``Mesh.sum_over_world`` adds up the shares.
    """
    tokens_BT, labels_BT, positions_BT, documents_BT, local_valid = move_to_device(stages, batch)
    return stages.evaluate(tokens_BT, labels_BT, positions_BT, documents_BT), local_valid
