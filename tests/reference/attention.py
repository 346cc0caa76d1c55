"""Plain attention: the softmax of all scores behind a mask."""

import math

import torch
from torch import Tensor


def visible_keys(
    tokens: int, *, documents_BT: Tensor | None = None, window: int = 0, is_causal: bool = True
) -> Tensor:
    """Whether a query sees a key, (1 or B, T, T): queries are rows.

    A query sees keys of its own document; if causal, none after itself; and of these, only the last
    ``window`` if that is not 0.
    """
    visible = torch.ones(1, tokens, tokens, dtype=torch.bool)
    if is_causal:
        visible = visible.tril()
    if window:
        visible = visible.triu(1 - window)
    if documents_BT is not None:
        visible = visible & (documents_BT[:, :, None] == documents_BT[:, None])
    return visible


def attend(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    visible: Tensor,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of all heads, (B, H, T, D).

    Args:
        visible: that of ``visible_keys``.
        sinks_H: a score of each head that each softmax has, and that no value follows.
    """
    repeat = q_BHTD.shape[1] // k_BKTD.shape[1]
    k_BHTD, v_BHTD = (x.repeat_interleave(repeat, dim=1) for x in (k_BKTD, v_BKTD))
    scores = q_BHTD @ k_BHTD.mT / math.sqrt(q_BHTD.shape[-1])
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    if sinks_H is None:
        return scores.softmax(-1) @ v_BHTD
    sinks_BHT1 = sinks_H[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sinks_BHT1), dim=-1).softmax(-1)[..., :-1]
    return weights @ v_BHTD
