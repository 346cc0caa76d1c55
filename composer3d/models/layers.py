"""The layers of a Llama-style decoder, as one device runs them.

Shapes are in the names: B batch, T sequence, C model width, H query heads, K key-value heads, D head width.
"""

import math
from collections.abc import Callable

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


def rope_table(shape: ModelShape, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of ``dtype``, each (B, T, 1, D), as ``rotate`` takes them: the first half of sin is negated.

    Rotary position embedding (Su et al. 2021, arXiv 2104.09864), its long wavelengths stretched as in Llama 3.1: a pair
    of numbers turns by theta^(-2i/D) a position. Where it turns fewer than ``rope_low_freq`` times in ``rope_context``,
    which the model had before, it turns ``rope_factor`` times slower; from ``rope_high_freq`` turns on as before;
    between them by a mean of both. Hugging Face calls it ``rope_type`` "llama3".

    Angles are computed in float32 or wider: bfloat16 cannot tell positions above 256 apart.
    """
    half, wide = shape.head_width // 2, torch.promote_types(dtype, torch.float32)
    speed_D = shape.rope_theta ** (-torch.arange(half, device=positions_BT.device, dtype=wide) / half)
    if shape.rope_factor != 1:
        low, turns_D = shape.rope_low_freq, speed_D * (shape.rope_context / (2 * math.pi))
        kept_D = ((turns_D - low) / (shape.rope_high_freq - low)).clamp(0, 1)
        speed_D = speed_D * (kept_D + (1 - kept_D) / shape.rope_factor)
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
        self._tables: dict[tuple[ModelShape, torch.dtype], tuple[Tensor, Tensor]] = {}

    def table(self, shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``rope_table`` of these positions, computed for the first block that asks.

        No gradient flows through it, so a block that is checkpointed saves alike when it runs again and finds it here.
        """
        if (shape, dtype) not in self._tables:
            self._tables[shape, dtype] = rope_table(shape, self.positions_BT, dtype)
        return self._tables[shape, dtype]


def bias_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What hides from scores of ``dtype``, added to them, the keys that are not ``seen``: 0 or minus infinity."""
    return torch.where(seen, torch.zeros((), dtype=dtype, device=seen.device), -torch.inf)


def rotate(x_BTHD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]), the half-split form of Hugging Face, by a ``rope_table``."""
    cos_BT1D, sin_BT1D = table
    return torch.addcmul(x_BTHD * cos_BT1D, x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1), sin_BT1D)


Attend = Callable[..., Tensor]


def attend_sdpa(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, seq: Seq, window: int) -> Tensor:
    """Causal attention of whole sequences on one device; the default of the ``attend`` seam.

    Returns (B, H, T, D). H is a multiple of K; head h reads key-value head h // (H / K). A query sees the key at its
    own place in the row and those at ``window`` - 1 places before it, 0: at all before it, where they are of its own
    document.
    """
    length, documents_BT = q_BHTD.shape[2], seq.documents_BT
    if documents_BT is None and not 0 < window < length:
        return sdpa(q_BHTD, k_BKTD, v_BKTD)
    seen = torch.ones(length, length, dtype=torch.bool, device=q_BHTD.device).tril()
    if window:
        seen = seen.triu(1 - window)
    if documents_BT is not None:
        seen = seen & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :]).to(seen.device)
    return sdpa(q_BHTD, k_BKTD, v_BKTD, bias_of(seen, q_BHTD.dtype), is_causal=False)


def sdpa(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None = None, *, is_causal: bool = True
) -> Tensor:
    """torch's attention of grouped heads, with a kernel that does not build all scores where there is one."""
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    flash = mask is None and q_BHTD.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and q_BHTD.is_cuda and not flash:
        # On CUDA only flash takes grouped heads, and flash takes no mask and only half precision: others would build
        # all scores.
        k_BKSD, v_BKSD = (x.repeat_interleave(groups, dim=1) for x in (k_BKSD, v_BKSD))
        groups = 1
    return F.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, is_causal=is_causal, enable_gqa=groups > 1
    )


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    As the shape says: biases of its input projections (Qwen 2), RMSNorm of each head's query and key (Qwen 3,
    arXiv 2505.09388), a sliding window (Mistral 7B, arXiv 2310.06825). The names of parameters are those of a Llama.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, bias = shape.head_width, shape.qkv_bias
        self.shape = shape  # one object for all blocks: a compiled block tells the keys of what they share by identity
        self.wq = nn.Linear(shape.dim, shape.n_heads * width, bias=bias)
        self.wk = nn.Linear(shape.dim, shape.n_kv_heads * width, bias=bias)
        self.wv = nn.Linear(shape.dim, shape.n_kv_heads * width, bias=bias)
        self.wo = nn.Linear(shape.n_heads * width, shape.dim, bias=False)
        self.q_norm = nn.RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.attend: Attend = attend_sdpa

    def prepare(self, seq: Seq, dtype: torch.dtype) -> None:
        """Have ``seq`` hold what ``forward`` will ask of it, for a compiled block: it reads what blocks share alone."""
        seq.table(self.shape, dtype)

    def forward(self, x_BTC: Tensor, *, seq: Seq) -> Tensor:
        # Heads are counted from what the projections return: under tensor parallelism that is this rank's share.
        q, k, v = (w(x_BTC).unflatten(-1, (-1, self.shape.head_width)) for w in (self.wq, self.wk, self.wv))
        table = seq.table(self.shape, q.dtype)
        q, k = rotate(self.q_norm(q), table), rotate(self.k_norm(k), table)
        out_BHTD = self.attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seq=seq, window=self.shape.window
        )
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
