"""Multi-token prediction once more, as section 2.2 of arXiv 2412.19437 describes it.

``verify`` runs the model of composer3d on both of its sides. This one shares no code with it but
the attention of ``tests/reference/latent.py``: it computes each document by itself, without the
positions that a depth has no token for, and each token's experts one by one.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from composer3d.data.loader import Batch, number_documents, tokens_ahead
from composer3d.models.contract import IGNORE_INDEX
from composer3d.models.deepseek.shape import PRESETS, DeepseekShape
from tests.reference.latent import attention_by_hand, random_model

BOUND = 1e-10
_DEPTHS = 2
_SHAPE = replace(PRESETS["debug-deepseek"], mtp_layers=_DEPTHS, mtp_loss=0.7)
# Of documents: the shortest has no token for the second depth, and one row is a single document.
_LENGTHS = ((5, 2, 7), (14,), (1, 3, 10))

_Weights = Mapping[str, Tensor]


def _of(weights: _Weights, module: str) -> dict[str, Tensor]:
    begin = f"{module}."
    return {
        name.removeprefix(begin): value for name, value in weights.items() if name.startswith(begin)
    }


def _norm(shape: DeepseekShape, weight: Tensor, x_TC: Tensor) -> Tensor:
    return x_TC / (x_TC.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * weight


def _ffn(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return w2 @ (F.silu(w1 @ x) * (w3 @ x))


def _experts(shape: DeepseekShape, weights: _Weights, x_C: Tensor) -> Tensor:
    """Compute one token: equations 12 to 16, with the groups of section 2.1.2."""
    scores = (weights["router.weight"] @ x_C).sigmoid()
    biased = (scores + weights["router.bias"]).detach()
    groups = biased.view(shape.expert_groups, -1)
    best = groups.sort(descending=True).values[:, :2].sum(1).argsort(descending=True)
    is_open = torch.zeros(shape.expert_groups, dtype=torch.bool)
    is_open[best[: shape.groups_per_token]] = True
    allowed = groups.masked_fill(~is_open[:, None], -torch.inf).flatten()
    chosen = allowed.argsort(descending=True)[: shape.experts_per_token].tolist()
    total = sum(scores[expert] for expert in chosen)
    out_C = _ffn(x_C, *(weights[f"shared.{name}.weight"] for name in ("w1", "w2", "w3")))
    for expert in chosen:
        own = (weights[f"experts.{name}"][expert] for name in ("w1", "w2", "w3"))
        out_C = out_C + scores[expert] / total * shape.router_scale * _ffn(x_C, *own)
    return out_C


def _block(shape: DeepseekShape, weights: _Weights, h_TC: Tensor) -> Tensor:
    """Compute a block for one document."""
    x_TC = _norm(shape, weights["attn_norm.weight"], h_TC)
    h_TC = h_TC + attention_by_hand(shape, _of(weights, "attn"), x_TC, shape.rope_theta)
    x_TC = _norm(shape, weights["ffn_norm.weight"], h_TC)
    if "ffn.w1.weight" in weights:
        matrices = [weights[f"ffn.{name}.weight"] for name in ("w1", "w2", "w3")]
        return h_TC + torch.stack([_ffn(x_C, *matrices) for x_C in x_TC])
    return h_TC + torch.stack([_experts(shape, _of(weights, "moe"), x_C) for x_C in x_TC])


def losses_by_hand(
    shape: DeepseekShape, weights: _Weights, tokens_T: Tensor, labels_T: Tensor
) -> list[Tensor]:
    """Return the summed losses of one document: of the next token, and of each depth.

    ``labels_T[i]`` is token i + 1, or ``IGNORE_INDEX`` if it is not learned.
    """
    embed, head = weights["first.embed.weight"], weights["last.head.weight"]

    def loss(x_TC: Tensor, labels: Tensor) -> Tensor:
        if not len(labels):
            return embed.new_zeros(())
        return F.cross_entropy(x_TC @ head.T, labels, reduction="sum", ignore_index=IGNORE_INDEX)

    h_TC = embed[tokens_T]
    for layer in range(shape.n_layers):
        h_TC = _block(shape, _of(weights, f"blocks.{layer}"), h_TC)
    x_TC = _norm(shape, weights["last.norm.weight"], h_TC)
    losses = [loss(x_TC, labels_T)]
    for depth in range(1, shape.mtp_layers + 1):
        places = len(tokens_T) - depth
        if places <= 0:
            losses.append(embed.new_zeros(()))
            continue
        own = _of(weights, f"blocks.{shape.n_layers + depth - 1}")
        hidden = _norm(shape, own["hidden_norm.weight"], x_TC[:places])
        further = _norm(shape, own["embed_norm.weight"], embed[tokens_T[depth:]])
        h_TC = torch.cat((further, hidden), 1) @ own["project.weight"].T
        h_TC = _block(shape, own, h_TC)
        x_TC = _norm(shape, weights[f"last.mtp_norm.{depth - 1}.weight"], h_TC)
        losses.append(loss(x_TC, labels_T[depth:]))
    return losses


def _batch(vocab: int) -> Batch:
    """Make rows of documents, in which some tokens are not learned."""
    generator = torch.Generator().manual_seed(2)
    rows, length = len(_LENGTHS), sum(_LENGTHS[0])
    tokens_BT = torch.randint(vocab, (rows, length + 1), generator=generator)
    ends_BT = torch.zeros(rows, length, dtype=torch.bool)
    for row, lengths in enumerate(_LENGTHS):
        ends_BT[row, torch.tensor(lengths).cumsum(0) - 1] = True
    labels_BT = tokens_BT[:, 1:].masked_fill(ends_BT, IGNORE_INDEX)
    is_unlearned_BT = torch.rand(rows, length, generator=generator) < 0.2
    labels_BT = labels_BT.masked_fill(is_unlearned_BT, IGNORE_INDEX)
    documents_BT, positions_BT = number_documents(ends_BT)
    return Batch(tokens_BT[:, :-1], labels_BT, positions_BT, documents_BT)


def compare() -> list[str]:
    """Compare losses and gradients with those computed by hand; return a line for each error."""
    model = random_model(_SHAPE, std=0.15)
    batch = _batch(_SHAPE.vocab)
    ahead_B2KT = tokens_ahead(batch, _DEPTHS)
    found = model(*batch[:4], ahead_B2KT)
    # Any weights of the losses will do, as long as they differ.
    divisors = torch.tensor([3.0, 5.0, 7.0], dtype=torch.float64)
    (found / divisors).sum().backward()

    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    sums = [torch.zeros((), dtype=torch.float64) for _ in divisors]
    for row, lengths in enumerate(_LENGTHS):
        begin = 0
        for length in lengths:
            places = slice(begin, begin + length)
            begin += length
            of_document = losses_by_hand(
                _SHAPE, weights, batch.tokens_BT[row, places], batch.labels_BT[row, places]
            )
            sums = [total + loss for total, loss in zip(sums, of_document, strict=True)]
    coefficients = [1.0] + [_SHAPE.mtp_loss / _DEPTHS] * _DEPTHS
    expected = torch.stack([c * total for c, total in zip(coefficients, sums, strict=True)])
    (expected / divisors).sum().backward()

    lines = []
    for number, (one, other) in enumerate(zip(found.tolist(), expected.tolist(), strict=True)):
        if not abs(one - other) <= BOUND * abs(other):
            lines.append(f"the loss of depth {number} of multi-token prediction is off")
    for name, parameter in model.named_parameters():
        other_grad = weights[name].grad
        if parameter.grad is None or other_grad is None:
            if parameter.requires_grad:
                lines.append(f"{name} has no gradient")
            continue
        error = ((parameter.grad - other_grad).norm() / other_grad.norm()).item()
        if not error <= BOUND:
            lines.append(f"gradient of {name} with multi-token prediction is off by {error:.1e}")
    return lines
