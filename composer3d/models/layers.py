"""The layers of a Llama-style decoder, as one device runs them.

Shapes are in the names: B batch, T sequence, C model width, H query heads, K key-value heads, D head width.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.shape import ModelShape


class Decoder(nn.Module):
    """The contract of a model: three parts of one shape, each single-device code.

    ``first(tokens_BT, seq) -> h_BTC``; each of ``blocks``, in order, ``block(h_BTC, seq) -> h_BTC``;
    ``last(h_BTC, seq, labels_BT) -> loss``, a scalar of float32 or wider: the sum over the labels that count.
    A name of a parameter is the same whatever the layout, since a stage keeps these three.
    """

    first: nn.Module
    blocks: nn.ModuleDict
    last: nn.Module


class Rope(NamedTuple):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), its long wavelengths stretched as in Llama 3.1.

    A pair of numbers turns by theta^(-2i/D) a position. Where it turns fewer than ``low_freq`` times in the ``context``
    that the model had before, it turns ``factor`` times slower; from ``high_freq`` turns on as before; between them by
    a mean of both. Hugging Face calls it ``rope_type`` "llama3".
    """

    width: int  # D
    theta: float
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    context: int = 8192

    def table(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) of ``dtype``, each (B, T, 1, D), as ``rotate`` takes them: the first half of sin is negated.

        Angles are computed in float32 or wider: bfloat16 cannot tell positions above 256 apart.
        """
        half, wide = self.width // 2, torch.promote_types(dtype, torch.float32)
        speed_D = self.theta ** (-torch.arange(half, device=positions_BT.device, dtype=wide) / half)
        if self.factor != 1:
            turns_D = speed_D * (self.context / (2 * math.pi))
            kept_D = ((turns_D - self.low_freq) / (self.high_freq - self.low_freq)).clamp(0, 1)
            speed_D = speed_D * (kept_D + (1 - kept_D) / self.factor)
        angle_BT1D = positions_BT.to(wide)[:, :, None, None] * speed_D
        cos, sin = angle_BT1D.cos().to(dtype), angle_BT1D.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class Seq:
    """What every block must know of the sequence, and what blocks share that follows from it alone.

    ``positions_BT``: integers (B, T), cut and moved like tokens. ``documents_BT``: to which document of its row each
    token belongs, integers of whole rows; tokens of other documents are hidden. None: each row is one document. Made
    anew for each micro-batch.
    """

    def __init__(self, positions_BT: Tensor, documents_BT: Tensor | None = None) -> None:
        self.positions_BT = positions_BT
        self.documents_BT = documents_BT
        self._tables: dict[tuple[Rope, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._biases: dict[tuple[int, torch.dtype], Tensor] = {}

    def table(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``rope.table`` of these positions, computed for the first block that asks.

        No gradient flows through it, so a block that is checkpointed saves alike when it runs again and finds it here.
        """
        if (rope, dtype) not in self._tables:
            self._tables[rope, dtype] = rope.table(self.positions_BT, dtype)
        return self._tables[rope, dtype]

    def bias(self, window: int, dtype: torch.dtype) -> Tensor:
        """``bias_of`` the keys that a query sees of its document: (B, 1, T, T), as many numbers as one head has scores.

        Of ``dtype``, and not booleans: SDPA would make this of those in each block anew, and keep it for backward.
        """
        if (window, dtype) not in self._biases:
            assert self.documents_BT is not None
            seen_B1TT = (self.documents_BT[:, None, :, None] == self.documents_BT[:, None, None, :]).tril()
            if window:
                seen_B1TT = seen_B1TT.triu(1 - window)
            self._biases[window, dtype] = bias_of(seen_B1TT, dtype)
        return self._biases[window, dtype]


def bias_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What hides from scores of ``dtype``, added to them, the keys that are not ``seen``: 0 or minus infinity."""
    return torch.where(seen, torch.zeros((), dtype=dtype, device=seen.device), -torch.inf)


def rotate(x_BTHD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]), the half-split form of Hugging Face, by a ``Rope.table``."""
    cos_BT1D, sin_BT1D = table
    return torch.addcmul(x_BTHD * cos_BT1D, x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1), sin_BT1D)


Attend = Callable[..., Tensor]


def attend_sdpa(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, seq: Seq, window: int) -> Tensor:
    """Causal attention of whole sequences on one device; the default of the ``attend`` seam.

    Returns (B, H, T, D). H is a multiple of K; head h reads key-value head h // (H / K). A query sees the key at its
    own place in the row and those at ``window`` - 1 places before it, 0: at all before it, where they are of its own
    document.
    """
    length = q_BHTD.shape[2]
    if seq.documents_BT is not None:
        return _sdpa(q_BHTD, k_BKTD, v_BKTD, seq.bias(window, q_BHTD.dtype))
    if not 0 < window < length:
        return _sdpa(q_BHTD, k_BKTD, v_BKTD)
    # Chunks of a window each see themselves and the one before them, so that no T x T scores are made. The first has
    # none before it; the others are rows of one batch.
    first = _sdpa(*(x[:, :, :window] for x in (q_BHTD, k_BKTD, v_BKTD)))
    chunks, spare = -(-length // window), -length % window
    q, k, v = (F.pad(x, (0, 0, 0, spare)) if spare else x for x in (q_BHTD, k_BKTD, v_BKTD))
    q = q[:, :, window:].unflatten(2, (chunks - 1, window)).transpose(1, 2).flatten(0, 1)
    k, v = (x.unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
    seen = torch.ones(window, 2 * window, dtype=torch.bool, device=q.device).triu(1).tril(window)
    rest = _sdpa(q, k, v, seen).unflatten(0, (-1, chunks - 1)).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, rest[:, :, : length - window]), dim=2)


def _sdpa(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None = None) -> Tensor:
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    flash = mask is None and q_BHTD.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and q_BHTD.is_cuda and not flash:
        # On CUDA only flash takes grouped heads, and flash takes no mask and only half precision: others would build
        # all scores.
        k_BKSD, v_BKSD = (x.repeat_interleave(groups, dim=1) for x in (k_BKSD, v_BKSD))
        groups = 1
    return F.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1
    )


@cache
def _rope(shape: ModelShape) -> Rope:
    """One object for all blocks: a compiled block tells the keys of what they share by identity."""
    stretch = (shape.rope_factor, shape.rope_low_freq, shape.rope_high_freq, shape.rope_context)
    return Rope(shape.head_width, shape.rope_theta, *stretch)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    As the shape says: biases of its input projections (Qwen 2), RMSNorm of each head's query and key (Qwen 3,
    arXiv 2505.09388), a sliding window (Mistral 7B, arXiv 2310.06825). The names of parameters are those of a Llama.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, bias = shape.head_width, shape.qkv_bias
        self.rope = _rope(shape)
        self.window = shape.window
        self.wq = nn.Linear(shape.dim, shape.n_heads * width, bias=bias)
        self.wk = nn.Linear(shape.dim, shape.n_kv_heads * width, bias=bias)
        self.wv = nn.Linear(shape.dim, shape.n_kv_heads * width, bias=bias)
        self.wo = nn.Linear(shape.n_heads * width, shape.dim, bias=False)
        self.q_norm = nn.RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.attend: Attend = attend_sdpa

    def prepare(self, seq: Seq, dtype: torch.dtype) -> None:
        """Have ``seq`` hold what ``forward`` will ask of it, for a compiled block: it reads what blocks share alone."""
        seq.table(self.rope, dtype)
        if seq.documents_BT is not None and self.attend is attend_sdpa:
            seq.bias(self.window, dtype)

    def forward(self, x_BTC: Tensor, *, seq: Seq) -> Tensor:
        # Heads are counted from what the projections return: under tensor parallelism that is this rank's share.
        q, k, v = (w(x_BTC).unflatten(-1, (-1, self.rope.width)) for w in (self.wq, self.wk, self.wv))
        table = seq.table(self.rope, q.dtype)
        q, k = rotate(self.q_norm(q), table), rotate(self.k_norm(k), table)
        out_BHTD = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seq=seq, window=self.window)
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

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attn = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape.dim, shape.ffn)

    def forward(self, h_BTC: Tensor, seq: Seq) -> Tensor:
        h_BTC = h_BTC + self.attn(self.attn_norm(h_BTC), seq=seq)
        return h_BTC + self.ffn(self.ffn_norm(h_BTC))
