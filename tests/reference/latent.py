"""Multi-head latent attention once more, as its paper writes it, and generation without a cache.

``verify`` runs the layer of composer3d on both of its sides. This one shares no code with it: it
computes one head at a time, and rotates complex numbers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composer3d.generate.generator import Generator
from composer3d.models.contract import SequenceInfo
from composer3d.models.deepseek.model import Deepseek
from composer3d.models.deepseek.plan import sharding_plan
from composer3d.models.deepseek.shape import PRESETS, DeepseekShape

BOUND = 1e-12
SHAPE = PRESETS["debug-deepseek"]
_EPSILON = 1e-6  # of the norms of latents
_TOKENS = 9


def random_model(shape: DeepseekShape, std: float = 0.3) -> Deepseek:
    """Build a model in float64 with weights that are the same in every call."""
    model = Deepseek(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std, generator=generator)
    return model


def attention_by_hand(
    shape: DeepseekShape, weights: Mapping[str, Tensor], x_TC: Tensor, theta: float
) -> Tensor:
    """Compute equations 9 to 19 of arXiv 2405.04434, with equation 37 for the latent of queries."""
    tokens = len(x_TC)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + _EPSILON).sqrt() * weights[name]

    def turn(x_TR: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x_TR.unflatten(-1, (-1, 2)).contiguous())
        half = shape.rope_dim // 2
        speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(tokens)[:, None] * speeds
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(1)

    of_queries = x_TC
    if shape.query_rank:
        of_queries = norm(x_TC @ weights["wq_a.weight"].T, "q_norm.weight")
    down = x_TC @ weights["wkv_a.weight"].T
    of_keys = norm(down[:, : shape.kv_rank], "kv_norm.weight")
    rotated_key = turn(down[:, shape.kv_rank :])

    heads = []
    to_queries = weights["queries.wq.weight"].chunk(shape.n_heads)
    to_keys = weights["keys.wkv_b.weight"].chunk(shape.n_heads)
    plain = shape.plain_dim
    for to_query, to_key_and_value in zip(to_queries, to_keys, strict=True):
        query, key_and_value = of_queries @ to_query.T, of_keys @ to_key_and_value.T
        scores = query[:, :plain] @ key_and_value[:, :plain].T
        scores = (scores + turn(query[:, plain:]) @ rotated_key.T) / shape.head_width**0.5
        is_later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        heads.append(shares @ key_and_value[:, plain:])
    return torch.cat(heads, 1) @ weights["wo.weight"].T


@torch.no_grad()
def compare_attention(shape: DeepseekShape) -> list[str]:
    """Compare the attention of a block with ``attention_by_hand``; return a line if they differ."""
    attention: Any = random_model(shape).blocks["0"].attn
    generator = torch.Generator().manual_seed(1)
    x_BTC = torch.randn(2, _TOKENS, shape.dim, generator=generator, dtype=torch.float64)
    out_BTC = attention(x_BTC, seq=SequenceInfo(torch.arange(_TOKENS).expand(2, _TOKENS)))
    weights = dict(attention.named_parameters())
    expected_BTC = torch.stack(
        [attention_by_hand(shape, weights, x_TC, shape.rope_theta) for x_TC in x_BTC]
    )
    error = ((out_BTC - expected_BTC).norm() / expected_BTC.norm()).item()
    return [f"latent attention is off by {error:.1e}"] if not error < BOUND else []


def compare_generation(shape: DeepseekShape) -> list[str]:
    """Compare greedy tokens of a cache with those of whole sequences; return a line at most."""
    prompts, new = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]], 12
    model = random_model(shape)
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(new):
                seq = SequenceInfo(torch.arange(len(tokens))[None])
                tokens.append(int(model.logits(torch.tensor([tokens]), seq)[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    generator = Generator(model, sharding_plan(shape), device=torch.device("cpu"))
    found = generator.generate(prompts, max_tokens=new, prefill_tokens=5)
    is_same = [completion.tokens for completion in found] == expected
    return [] if is_same else ["greedy tokens of the cache of latents differ"]


def compare() -> list[str]:
    """Compare attention and generation, with a latent of queries and without one."""
    direct = DeepseekShape(**{**vars(SHAPE), "query_rank": 0, "value_dim": SHAPE.head_width})
    return [
        line
        for shape in (SHAPE, direct)
        for line in (*compare_attention(shape), *compare_generation(shape))
    ]
