"""Llama, its mixtures of experts, OLMo 2 and 3, Granite 3, Gemma 3 and GLM-4.5, as in their papers.

``verify`` runs the model of composer3d on both of its sides. This one shares no code with it: it
computes one sequence at a time, in mixtures of experts one token, and rotates complex numbers.
``compare`` judges the model's logits, and all gradients, those of the routers' losses included.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.models.contract import IGNORE_INDEX, Decoder, SequenceInfo
from composer3d.models.gemma3.shape import Gemma3Shape
from composer3d.models.glm.shape import GlmShape
from composer3d.models.granite.shape import GraniteShape
from composer3d.models.llama.shape import ModelShape, RotaryShape
from composer3d.models.moe.shape import MoeShape
from composer3d.models.olmo2.shape import Olmo2Shape
from composer3d.models.registry import OURS, Architecture, architecture
from composer3d.models.shape import DecoderShape
from tests.reference.attention import attend, visible_keys
from tests.reference.rotation import rotations, turn_halves

BOUND = 1e-9

# Widths, epsilon and base are such that each of them matters at 12 tokens.
_LLAMA = ModelShape(
    dim=24, n_layers=2, n_heads=4, n_kv_heads=2, ffn=40, vocab=31, rope_theta=1e2, norm_eps=1e-3
)
_MOE = MoeShape(
    *(24, 2, 4, 2, 40, 31, 1e2, 1e-3),
    experts=6,
    experts_per_token=2,
    expert_ffn=20,
    balance_loss=0.5,
    z_loss=0.05,
)
_SIGMOID = replace(_MOE, router="sigmoid", router_scale=2.5)
_GLM = GlmShape(**vars(replace(_SIGMOID, router_bias=True, shared_ffn=12, dense_layers=1)))

# Every option of a shape has another value than its default in at least one of these.
SHAPES: Mapping[str, RotaryShape] = {
    "plain": replace(_LLAMA, rope_theta=5e5),
    # Of the wavelengths, some are kept, some are stretched and some are between.
    "stretched": replace(_LLAMA, rope_factor=8.0, rope_context=64, head_dim=16),
    "stretched, other bounds": replace(
        _LLAMA, rope_factor=2.0, rope_context=200, rope_low_freq=2.0, rope_high_freq=30.0
    ),
    "linear": replace(_LLAMA, rope_scaling="linear", rope_factor=3.0, head_dim=8),
    "dynamic": replace(_LLAMA, rope_scaling="dynamic", rope_factor=3.0, rope_context=400),
    "yarn": replace(
        _LLAMA, rope_scaling="yarn", rope_factor=8.0, rope_context=512, head_dim=16, qk_norm=True
    ),
    "yarn, other bounds": replace(
        _LLAMA,
        rope_scaling="yarn",
        rope_factor=2.0,
        rope_context=300,
        rope_beta_fast=20.0,
        rope_beta_slow=3.0,
        rope_truncate=False,
        rope_attention_factor=2.0,
        head_dim=20,
    ),
    "with norms": replace(_LLAMA, n_kv_heads=1, head_dim=12, qk_norm=True),
    "with biases and a window": replace(_LLAMA, n_kv_heads=4, qkv_bias=True, window=5),
    "tied": replace(_LLAMA, tied=True, qk_norm=True, qkv_bias=True, window=3, rope_factor=2.0),
    "with windows in two of three blocks": replace(_LLAMA, n_layers=4, window=3, full_every=3),
    "with positions in every second block": replace(
        _LLAMA, n_layers=3, window=4, full_every=3, nope_every=2
    ),
    "without positions": replace(_LLAMA, nope_every=1, qk_norm=True),
    "with experts": _MOE,
    "with experts that are not renormalised": replace(_MOE, renormalise=False, router_scale=1.5),
    "with sigmoid experts": _SIGMOID,
    "with groups": replace(
        _SIGMOID, router_bias=True, expert_groups=3, groups_per_token=2, renormalise=False
    ),
    "with groups of one good expert": replace(
        _MOE, expert_groups=2, groups_per_token=1, group_best="one", renormalise=False
    ),
    "with a shared expert": replace(_MOE, shared_ffn=12, dense_layers=1, expert_ffn=None),
    "with a shared expert and its gate": replace(_MOE, shared_ffn=12, shared_gate=True),
    "with experts in some layers": replace(_MOE, n_layers=3, moe_every=2, experts_per_token=6),
    "with experts and windows in every second block": replace(
        _MOE, n_layers=4, dense_layers=1, window=3, full_every=2, nope_every=3
    ),
    "with one expert a token": replace(_SIGMOID, experts_per_token=1, qk_norm=True, tied=True),
    "with norms over all heads": Olmo2Shape(24, 2, 4, 2, 40, 31, 1e2, 1e-3),
    "with norms over all heads and windows": Olmo2Shape(
        *(24, 3, 4, 2, 40, 31, 1e2, 1e-3),
        window=3,
        full_every=2,
        rope_factor=8.0,
        rope_context=64,
    ),
    "with norms over all heads, windows and yarn": Olmo2Shape(
        *(24, 3, 4, 2, 40, 31, 1e2, 1e-3),
        window=3,
        full_every=3,
        rope_scaling="yarn",
        rope_factor=8.0,
        rope_context=512,
        head_dim=16,
        rope_attention_factor=1.5,
    ),
    "with heads of which a part is rotated": replace(
        _GLM, head_dim=16, rope_share=0.25, qk_norm=True, qkv_bias=True
    ),
    "with heads of which a part is rotated and stretched": replace(
        _GLM,
        head_dim=12,
        rope_scaling="yarn",
        rope_factor=8.0,
        rope_context=512,
        window=4,
        nope_every=3,
        n_layers=3,
    ),
    "with multipliers": GraniteShape(
        *(24, 2, 4, 2, 40, 31, 1e2, 1e-3),
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=2.5,
    ),
    "with the usual scale of scores": GraniteShape(24, 2, 4, 2, 40, 31, tied=True),
    "with norms around the layers": Gemma3Shape(
        *(24, 3, 4, 2, 40, 31, 1e2, 1e-3),
        window=4,
        full_every=2,
        rope_local_theta=10.0,
        query_pre_attn_scalar=9,
    ),
    "with norms around the layers, stretched": Gemma3Shape(
        *(24, 3, 4, 1, 40, 31, 1e2, 1e-3),
        head_dim=8,
        tied=True,
        window=3,
        full_every=3,
        rope_local_theta=10.0,
        rope_scaling="linear",
        rope_factor=3.0,
    ),
}


class Row(NamedTuple):
    """One sequence.

    Attributes:
        tokens, labels, positions, documents: numbers for each token.
    """

    tokens: Sequence[int]
    labels: Sequence[int]
    positions: Sequence[int]
    documents: Sequence[int]


def rows_of(shape: RotaryShape, *, is_packed: bool) -> list[Row]:
    """Two sequences of 12 random tokens; some labels are ignored.

    Positions have gaps, and are numbers that bfloat16 cannot count. Documents have any lengths.
    """
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(2):
        tokens, labels = torch.randint(shape.vocab, (2, 12), generator=generator).tolist()
        for place in (number, 5, 7):
            labels[place] = IGNORE_INDEX
        positions = [300 + 3 * place + number for place in range(12)]
        ends = (4, 5, 10) if number == 0 else (7,)
        documents = [sum(end <= place for end in ends) for place in range(12)]
        rows.append(Row(tokens, labels, positions, documents if is_packed else [0] * 12))
    return rows


def compare(name: str, *, is_packed: bool = False) -> list[str]:
    """Compare the model of a shape with the plain one; return a line for each difference.

    Args:
        name: of ``SHAPES``.
        is_packed: whether sequences hold several documents.
    """
    shape = SHAPES[name]
    ours = random_model(shape)
    rows = rows_of(shape, is_packed=is_packed)
    tokens_BT, labels_BT, positions_BT, documents_BT = (
        torch.tensor([row[field] for row in rows]) for field in range(4)
    )
    weights = {key: value.detach().clone() for key, value in ours.named_parameters()}
    trained = {key: weights[key] for key, value in ours.named_parameters() if value.requires_grad}
    for weight in trained.values():
        weight.requires_grad_()

    valid = int((labels_BT != IGNORE_INDEX).sum())
    seq = SequenceInfo(positions_BT, documents_BT if is_packed else None)
    logits_BTV = ours.logits(tokens_BT, seq)
    loss = ours(tokens_BT, labels_BT, positions_BT, seq.documents_BT)
    (loss / valid).backward()

    results = [plain_row(shape, weights, row) for row in rows]
    expected_loss = sum(_cross_entropy(r.logits, row) for r, row in zip(results, rows, strict=True))
    of_routers = sum(result.router_losses for result in results) / tokens_BT.numel()
    (expected_loss / valid + of_routers).backward()

    expected_logits = torch.stack([result.logits for result in results])
    pairs = [("logits", logits_BTV, expected_logits), ("loss", loss, expected_loss)]
    for key, weight in trained.items():
        pairs.append((f"gradient of {key}", ours.get_parameter(key).grad, weight.grad))
    return [
        f"{what} of the {name} model are off by {error:.1e}"
        for what, actual, expected in pairs
        if not (error := _error(actual, expected)) <= BOUND
    ]


def _error(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def architecture_of(shape: DecoderShape) -> Architecture:
    """Return the one of our architectures whose shapes have this class."""
    return next(ours for ours in map(architecture, OURS) if ours.shape is type(shape))


def random_model(shape: RotaryShape) -> Decoder:
    """A model in float64 whose weights, norms and biases too, are far from their initial values."""
    model: Decoder = architecture_of(shape).build(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


class RowResult(NamedTuple):
    """What the plain model computes of a sequence.

    Attributes:
        logits: (T, V).
        router_losses: the losses of all routers, summed over tokens.
    """

    logits: Tensor
    router_losses: Tensor


def plain_row(shape: RotaryShape, weights: Mapping[str, Tensor], row: Row) -> RowResult:
    """Compute one sequence."""
    turns = rotations(shape, row.positions)
    is_gemma = isinstance(shape, Gemma3Shape)
    theta = shape.rope_local_theta if is_gemma else shape.rope_theta
    of_windows = replace(shape, rope_theta=theta, rope_factor=1.0, rope_attention_factor=None)
    turns_of_windows = rotations(of_windows, row.positions)
    has_multipliers = isinstance(shape, GraniteShape)
    factor = shape.residual_multiplier if has_multipliers else 1.0
    h = weights["first.embed.weight"][list(row.tokens)]
    h = h * (shape.embedding_multiplier if has_multipliers else 1.0)
    h = h * (math.sqrt(shape.dim) if is_gemma else 1.0)
    losses = torch.zeros((), dtype=h.dtype)
    for number in range(shape.n_layers):
        start = f"blocks.{number}."
        of_block = {
            name.removeprefix(start): weight
            for name, weight in weights.items()
            if name.startswith(start)
        }
        w_attn, w_ffn = of_block["attn_norm.weight"], of_block["ffn_norm.weight"]
        attend_to = partial(_attention, shape, of_block, row, number, turns)
        has_window = shape.window > 0 and not _is_every(shape, "full_every", number)
        if has_window and isinstance(shape, Olmo2Shape | Gemma3Shape):
            attend_to = partial(_attention, shape, of_block, row, number, turns_of_windows)
        if isinstance(shape, Olmo2Shape):  # norms come after the layers
            h = h + _norm(shape, attend_to(h), w_attn)
            h = h + _norm(shape, _dense(shape, of_block, h), w_ffn)
            continue
        if is_gemma:  # norms come before and after the layers
            attended = attend_to(_norm(shape, h, w_attn))
            h = h + _norm(shape, attended, of_block["attn_post_norm.weight"])
            computed = _dense(shape, of_block, _norm(shape, h, w_ffn))
            h = h + _norm(shape, computed, of_block["ffn_post_norm.weight"])
            continue
        h = h + factor * attend_to(_norm(shape, h, w_attn))
        x = _norm(shape, h, w_ffn)
        if isinstance(shape, MoeShape) and shape.has_experts(number):
            out, loss = _mixture(shape, of_block, x, row)
            h, losses = h + out, losses + loss
        else:
            h = h + factor * _dense(shape, of_block, x)
    head = weights["first.embed.weight" if shape.tied else "last.head.weight"]
    logits = _norm(shape, h, weights["last.norm.weight"]) @ head.T
    return RowResult(logits / (shape.logits_scaling if has_multipliers else 1.0), losses)


def _dense(shape: RotaryShape, of_block: Mapping[str, Tensor], x: Tensor) -> Tensor:
    w1, w2, w3 = (of_block[f"ffn.w{n}.weight"] for n in (1, 2, 3))
    if isinstance(shape, Gemma3Shape):
        return (_gelu(x @ w1.T) * (x @ w3.T)) @ w2.T
    return _feed_forward(x, w1, w2, w3)


def _gelu(x: Tensor) -> Tensor:
    """The approximation of Hendrycks and Gimpel 2016 (arXiv 1606.08415)."""
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _cross_entropy(logits: Tensor, row: Row) -> Tensor:
    return sum(
        (
            logits[place].exp().sum().log() - logits[place][label]
            for place, label in enumerate(row.labels)
            if label != IGNORE_INDEX
        ),
        start=torch.zeros((), dtype=logits.dtype),
    )


def _norm(shape: RotaryShape, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(shape, Gemma3Shape):
        weight = 1 + weight
    return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * weight


def _feed_forward(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = x @ w1.T
    return (gate / (1 + torch.exp(-gate)) * (x @ w3.T)) @ w2.T


def _attention(
    shape: RotaryShape,
    weights: Mapping[str, Tensor],
    row: Row,
    number: int,
    turns: Tensor,
    x: Tensor,
) -> Tensor:
    n_tokens = len(row.tokens)

    def project(letter: str, heads: int) -> Tensor:
        out = x @ weights[f"attn.w{letter}.weight"].T
        if isinstance(shape, ModelShape) and shape.qkv_bias:
            out = out + weights[f"attn.w{letter}.bias"]
        if isinstance(shape, Olmo2Shape) and letter != "v":  # of all heads together
            out = _norm(shape, out, weights[f"attn.{letter}_norm.weight"])
        return out.view(n_tokens, heads, shape.head_width)

    q, k, v = (
        project("q", shape.n_heads),
        project("k", shape.n_kv_heads),
        project("v", shape.n_kv_heads),
    )
    if shape.qk_norm:
        q = _norm(shape, q, weights["attn.q_norm.weight"])
        k = _norm(shape, k, weights["attn.k_norm.weight"])
    if not _is_every(shape, "nope_every", number):
        q, k = turn_halves(q, turns), turn_halves(k, turns)
    if isinstance(shape, GraniteShape) and shape.attention_multiplier is not None:
        q = q * (shape.attention_multiplier * math.sqrt(shape.head_width))  # ``attend`` divides
    if isinstance(shape, Gemma3Shape) and shape.query_pre_attn_scalar is not None:
        q = q * math.sqrt(shape.head_width / shape.query_pre_attn_scalar)
    window = 0 if _is_every(shape, "full_every", number) else shape.window
    documents = torch.tensor([row.documents])
    visible = visible_keys(n_tokens, documents_BT=documents, window=window)
    out = attend(*(x.transpose(0, 1)[None] for x in (q, k, v)), visible)[0]
    return out.transpose(0, 1).flatten(1) @ weights["attn.wo.weight"].T


def _is_every(shape: RotaryShape, field: str, number: int) -> bool:
    """Whether a pattern of the shape names a block. It counts them from 1, and 0 names none."""
    every = getattr(shape, field, 0)
    return bool(every) and (number + 1) % every == 0


def _mixture(
    shape: MoeShape, weights: Mapping[str, Tensor], x: Tensor, row: Row
) -> tuple[Tensor, Tensor]:
    """Compute the mixture of experts of all tokens, and the router's losses summed over them."""
    outs, all_shares, all_chosen = [], [], []
    z = torch.zeros((), dtype=x.dtype)
    for token in x:
        logits = weights["moe.router.weight"] @ token
        scores = logits.softmax(-1) if shape.router == "softmax" else 1 / (1 + torch.exp(-logits))
        chosen = _choose(shape, weights, scores.tolist())
        divisor = sum(scores[e] for e in chosen) if shape.renormalise else 1.0
        out = torch.zeros_like(token)
        for e in chosen:
            w1, w2, w3 = (weights[f"moe.experts.w{n}"][e] for n in (1, 2, 3))
            out = out + shape.router_scale * scores[e] / divisor * _feed_forward(token, w1, w2, w3)
        if shape.shared_ffn:
            w1, w2, w3 = (weights[f"moe.shared.w{n}.weight"] for n in (1, 2, 3))
            weight = torch.ones((), dtype=x.dtype)
            if shape.shared_gate:
                weight = 1 / (1 + torch.exp(-(weights["moe.shared_gate.weight"][0] @ token)))
            out = out + weight * _feed_forward(token, w1, w2, w3)
        outs.append(out)
        all_chosen.append(chosen)
        all_shares.append(scores / scores.sum())
        z = z + logits.exp().sum().log() ** 2

    # The sum of f x P over the experts of each document, as often as the document has tokens.
    balance = torch.zeros((), dtype=x.dtype)
    for document in set(row.documents):
        places = [place for place, other in enumerate(row.documents) if other == document]
        for e in range(shape.experts):
            n_rows = sum(e in all_chosen[place] for place in places)
            part = n_rows / (shape.experts_per_token * len(places))
            share = sum(all_shares[place][e] for place in places) / len(places)
            balance = balance + len(places) * shape.experts * part * share
    return torch.stack(outs), shape.balance_loss * balance + shape.z_loss * z


def _choose(shape: MoeShape, weights: Mapping[str, Tensor], scores: Sequence[float]) -> list[int]:
    """Choose the experts of a token by their scores and biases, the best group first."""
    bias = weights["moe.router.bias"].tolist() if shape.router_bias else [0.0] * shape.experts
    biased = [score + b for score, b in zip(scores, bias, strict=True)]
    size = shape.experts // shape.expert_groups
    groups = [range(first, first + size) for first in range(0, shape.experts, size)]
    best = {"one": 1, "two": 2}[shape.group_best]
    groups.sort(key=lambda group: -sum(sorted(biased[e] for e in group)[-best:]))
    allowed = [e for group in groups[: shape.groups_per_token] for e in group]
    return sorted(allowed, key=lambda e: -biased[e])[: shape.experts_per_token]
