"""Grouped-query attention, and the seam ``attend`` that context parallelism replaces.

Shapes are in the names: B batch, T sequence, C model width, H query heads, K key-value heads, D
head width. S is the number of keys where it differs from T.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.rope import Rope, rotate, shared_rope_table

# attend(q_BHTD, k_BKTD, v_BKTD, *, seq, window, sinks_H=None) -> out_BHTD
Attend = Callable[..., Tensor]


def attend_sdpa(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    seq: SequenceInfo,
    window: int,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute causal attention over whole sequences on one device.

    This is the default of the seam ``attend``. A query attends to the keys of its own document up
    to its own position. With ``window`` above 0, it attends only to the last ``window`` of these
    keys, its own included. With documents or a window below T, it builds a mask of T x T, and with
    sinks a bias of H x T x T.

    Args:
        q_BHTD, k_BKTD, v_BKTD: queries, keys and values. H is a multiple of K; query head h reads
            key-value head h // (H / K).
        seq: only its ``documents_BT`` are read.
        window: the sliding window in tokens; 0 means no window.
        sinks_H: a score of each query head that takes part in the softmax of each query, and to
            which no value belongs (Xiao et al. 2024, arXiv 2309.17453; gpt-oss). None: none.

    Returns:
        The output (B, H, T, D).
    """
    length, documents_BT = q_BHTD.shape[2], seq.documents_BT
    has_window = 0 < window < length
    if documents_BT is None and not has_window and sinks_H is None:
        return sdpa(q_BHTD, k_BKTD, v_BKTD)
    mask = torch.ones(length, length, dtype=torch.bool, device=q_BHTD.device).tril()
    if window:
        mask = mask.triu(1 - window)
    if documents_BT is not None:
        same_B1TT = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
        mask = mask & same_B1TT.to(mask.device)
    bias = bias_of(mask, q_BHTD.dtype)
    if sinks_H is not None:
        # One more key, of which every query sees the sink as its score. Its value is 0.
        k_BKTD, v_BKTD = F.pad(k_BKTD, (0, 0, 0, 1)), F.pad(v_BKTD, (0, 0, 0, 1))
        sinks_BHT1 = sinks_H.to(bias.dtype)[:, None, None].expand(*q_BHTD.shape[:3], 1)
        bias = torch.cat((bias.expand(*q_BHTD.shape[:3], length), sinks_BHT1), dim=-1)
    return sdpa(q_BHTD, k_BKTD, v_BKTD, bias, is_causal=False)


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias for the scores: 0 where ``mask`` is true, minus infinity elsewhere."""
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -torch.inf)


def sdpa(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    bias: Tensor | None = None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Call torch's ``scaled_dot_product_attention`` so that it does not build all scores.

    Args:
        q_BHTD, k_BKSD, v_BKSD: queries, keys and values, with heads as in ``attend_sdpa``.
        bias: added to the scores; it broadcasts to (B, H, T, S). It needs ``is_causal`` = False.
        is_causal: whether query i attends to keys 0 to i only.

    Returns:
        The output (B, H, T, D).
    """
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    flash = bias is None and q_BHTD.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and q_BHTD.is_cuda and not flash:
        # On CUDA only the flash kernel takes grouped heads, and it takes neither a bias nor
        # float32. Without this repetition of the heads, torch would build all scores.
        k_BKSD = k_BKSD.repeat_interleave(groups, dim=1)
        v_BKSD = v_BKSD.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSD, attn_mask=bias, is_causal=is_causal, enable_gqa=groups > 1
    )


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    ``attention(x_BTC, seq=seq)`` returns (B, T, C).

    Args:
        dim: the width C of the residual stream.
        n_heads, n_kv_heads: the numbers of query heads and of key-value heads.
        rope: the rotary positions, one object for all blocks.
        head_width: the head width D, of which the first numbers are rotated (GLM-4.5). None: all
            are, and ``rope`` gives it.
        bias: whether the query, key and value projections have biases (Qwen 2).
        qk_norm: RMSNorm of each head's query and key, before the rotation (arXiv 2505.09388).
        norm_eps: the epsilon of these norms.
        window: the sliding window in tokens (Mistral 7B, arXiv 2310.06825); 0 means no window.
        query_scale: factor of the queries after the rotation. ``attend`` divides scores by sqrt(D).
        is_rotary: whether queries and keys are rotated. Without that, only the mask of ``attend``
            tells positions apart (Kazemnejad et al. 2023, arXiv 2305.19466; SmolLM3).
    """

    def __init__(
        self,
        *,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        rope: Rope,
        head_width: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        window: int = 0,
        query_scale: float = 1.0,
        is_rotary: bool = True,
    ) -> None:
        super().__init__()
        self.rope = rope  # blocks with equal settings share one table of a micro-batch
        self.window = window
        self.query_scale = query_scale
        self.is_rotary = is_rotary
        self.width = width = head_width or rope.head_dim
        self.wq = nn.Linear(dim, n_heads * width, bias=bias)
        self.wk = nn.Linear(dim, n_kv_heads * width, bias=bias)
        self.wv = nn.Linear(dim, n_kv_heads * width, bias=bias)
        self.wo = nn.Linear(n_heads * width, dim, bias=False)
        # What gpt-oss has besides: it puts modules here.
        self.out_bias: nn.Module = nn.Identity()
        self.sinks: nn.Module | None = None
        self.q_norm = nn.RMSNorm(width, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, eps=norm_eps) if qk_norm else nn.Identity()
        self.attend: Attend = attend_sdpa

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        """Fill ``seq.shared`` with what ``forward`` reads there (``DecoderBlock.prepare``)."""
        if self.is_rotary:
            shared_rope_table(self.rope, seq, dtype)

    def forward(self, x_BTC: Tensor, *, seq: SequenceInfo) -> Tensor:
        # The projections decide the number of heads: under tensor parallelism, this rank's share.
        q = self.wq(x_BTC).unflatten(-1, (-1, self.width))
        k = self.wk(x_BTC).unflatten(-1, (-1, self.width))
        v = self.wv(x_BTC).unflatten(-1, (-1, self.width))
        dtype = q.dtype
        q, k = self.q_norm(q), self.k_norm(k)
        if self.is_rotary:
            table = shared_rope_table(self.rope, seq, dtype)
            q, k = rotate(q, table), rotate(k, table)
        if self.query_scale != 1:
            q = q * self.query_scale
        sinks = {} if self.sinks is None else {"sinks_H": self.sinks(x_BTC)}
        out_BHTD = self.attend(
            *(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
            seq=seq,
            window=self.window,
            **sinks,
        )
        return self.out_bias(self.wo(out_BHTD.transpose(1, 2).flatten(2)))
