"""The layers of a Llama-style decoder, as one device runs them.

Shapes are in the names: B batch, T sequence, C model width, H query heads, K key-value heads, D head width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Decoder(nn.Module):
    """The contract of a model: three parts of one shape, each single-device code.

    ``first(tokens_BT, seq) -> h_BTC``; each of ``blocks``, in order, ``block(h_BTC, seq) -> h_BTC``;
    ``last(h_BTC, seq, labels_BT) -> loss``, a scalar of float32 or wider: the sum over the labels that count.
    A name of a parameter is the same whatever the layout, since a stage keeps these three.
    """

    first: nn.Module
    blocks: nn.ModuleDict
    last: nn.Module


class Seq(NamedTuple):
    """What every block must know of the sequence: integer tensors (B, T), cut and moved like tokens."""

    positions_BT: Tensor  # noqa: N815


Attend = Callable[..., Tensor]


def attend_sdpa(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, seq: Seq) -> Tensor:
    """Causal attention of whole sequences on one device; the default of the ``attend`` seam.

    Returns (B, H, T, D). H is a multiple of K; head h reads key-value head h // (H / K).
    """
    groups = q_BHTD.shape[1] // k_BKTD.shape[1]
    if groups > 1 and q_BHTD.is_cuda and q_BHTD.dtype not in (torch.bfloat16, torch.float16):
        # On CUDA only flash takes grouped heads, and flash only half precision: others would build T x T scores.
        k_BKTD, v_BKTD = (x.repeat_interleave(groups, dim=1) for x in (k_BKTD, v_BKTD))
        groups = 1
    return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=groups > 1)


def rotate(x_BTHD: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in the half-split form of Hugging Face.

    Angles are computed in float32 or wider, whatever the dtype of ``x_BTHD``: bfloat16 cannot tell positions above 256
    apart.
    """
    half = x_BTHD.shape[-1] // 2
    wide = torch.promote_types(x_BTHD.dtype, torch.float32)
    inverse_D = theta ** (-torch.arange(half, device=x_BTHD.device, dtype=wide) / half)
    angle_BT1D = positions_BT.to(wide)[:, :, None, None] * inverse_D
    cos, sin = angle_BT1D.cos().to(x_BTHD.dtype), angle_BT1D.sin().to(x_BTHD.dtype)
    low, high = x_BTHD.split(half, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions, no biases."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, rope_theta: float) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.rope_theta = rope_theta
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.attend: Attend = attend_sdpa

    def forward(self, x_BTC: Tensor, *, seq: Seq) -> Tensor:
        # Heads are counted from what the projections return: under tensor parallelism that is this rank's share.
        q, k, v = (w(x_BTC).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q = rotate(q, seq.positions_BT, self.rope_theta)
        k = rotate(k, seq.positions_BT, self.rope_theta)
        out_BHTD = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seq=seq)
        return self.wo(out_BHTD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202), no biases."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn, bias=False)  # gate
        self.w2 = nn.Linear(ffn, dim, bias=False)  # down
        self.w3 = nn.Linear(dim, ffn, bias=False)  # up

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTC)) * self.w3(x_BTC))


class Block(nn.Module):
    """One pre-norm decoder block: ``block(h_BTC, seq) -> h_BTC``."""

    def __init__(
        self, *, dim: int, n_heads: int, n_kv_heads: int, ffn: int, rope_theta: float, norm_eps: float
    ) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attn = Attention(dim, n_heads, n_kv_heads, rope_theta)
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.ffn = FeedForward(dim, ffn)

    def forward(self, h_BTC: Tensor, seq: Seq) -> Tensor:
        h_BTC = h_BTC + self.attn(self.attn_norm(h_BTC), seq=seq)
        return h_BTC + self.ffn(self.ffn_norm(h_BTC))
