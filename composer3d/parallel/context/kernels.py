"""Attention of a block of queries with a block of keys, forward and backward.

Forward returns the output and the logsumexp of each row of scores. With the logsumexp, the outputs
of several blocks of keys can be merged. The backward of a block needs only its own inputs, and the
output and logsumexp of the whole rows (Dao et al. 2022, FlashAttention, arXiv 2205.14135).

Shapes: queries, ``out`` and their gradients (B, H, T, D); keys and values (B, K, S, D); ``lse``
(B, H, T); ``mask`` (B, 1, T, S) or (1, 1, T, S), true where a query sees a key. H is a multiple of
K, and query head h reads key-value head h // (H / K). A causal block is square. With a mask,
``causal`` is ignored: the mask must hide later keys as well. ``lse`` is in ``wide(dtype)``, the
rest in the dtype of the queries. No collectives.

``segment_kernel`` computes many blocks of all rows in one call of a variable-length kernel.
"""

from enum import Enum

import torch
from torch import Tensor

from composer3d.facts.hardware import HOPPER_MAJOR
from composer3d.models.layers.attention import bias_of

_aten = torch.ops.aten


class Kernel(Enum):
    """A kernel that computes a block. The value is a name to print."""

    CPU_FLASH = "CPU flash"
    CUDA_FLASH = "CUDA flash"
    # Of the NVIDIA library. On a Hopper GPU it takes half the time of CUDA_FLASH (docs/gpu.md).
    CUDNN = "cuDNN"
    # It builds all scores of a block.
    REFERENCE = "plain scores"


# The kernel of a CPU. A proof takes another one, to run what a GPU runs (``verify.worker``).
KERNEL_OF_CPU = Kernel.CPU_FLASH

# For blocks of fewer queries, cuDNN's kernel was not measured.
_LEAST_QUERIES_OF_CUDNN = 128


def kernel_of(q: Tensor) -> Kernel:
    """Return the kernel for blocks without a mask, by the device, dtype and last two dims of ``q``.

    On a GPU, blocks with a mask always use ``Kernel.REFERENCE``.
    """
    if not q.is_cuda:
        return KERNEL_OF_CPU
    tokens, width = q.shape[-2:]
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    capability = torch.cuda.get_device_capability(q.device) if is_half else (0, 0)
    if capability < (8, 0) or width % 8 or width > 256:
        return Kernel.REFERENCE
    fits_cudnn = (
        capability[0] == HOPPER_MAJOR and width <= 128 and tokens >= _LEAST_QUERIES_OF_CUDNN
    )
    # ``implementation`` turns cuDNN's kernel off. Its backward gives other bits in each call.
    is_allowed = torch.backends.cuda.cudnn_sdp_enabled()
    if fits_cudnn and is_allowed and not torch.are_deterministic_algorithms_enabled():
        return Kernel.CUDNN
    return Kernel.CUDA_FLASH


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)`` of this block alone.

    A query that sees no key gets 0 and minus infinity. The last dim of q, k and v must be
    contiguous.
    """
    kernel = kernel_of(q)
    if kernel is Kernel.CPU_FLASH:
        bias = None if mask is None else bias_of(mask, q.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal and mask is None, attn_mask=bias
        )
        if mask is not None:
            # For a query that sees no key, the kernel returns an lse of 0. Merging would take it
            # for a key with a score of 0.
            lse = lse.masked_fill(~mask.any(-1), -torch.inf)
        return out, lse
    if kernel is Kernel.CUDNN and mask is None:
        out, lse_BHT1, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal
        )
        return out, lse_BHT1.squeeze(-1)
    if kernel is Kernel.CUDA_FLASH and mask is None:
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return attend_reference(q, k, v, causal=causal, mask=mask)


def attend_block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this block's contribution to the gradients of q, k and v.

    Args:
        grad: the gradient of ``out``.
        out, lse: output and logsumexp of the whole rows, merged over all blocks.

    Returns:
        The contributions to dq, dk and dv, of the shapes of q, k and v.
    """
    kernel = kernel_of(q)
    if kernel is Kernel.CPU_FLASH:
        bias = None if mask is None else bias_of(mask, q.dtype)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=bias
        )
    # Rows are not packed, so there are no cumulative lengths. Without dropout, the state of the
    # random generator is not read, so another tensor is passed in its place.
    if kernel is Kernel.CUDNN and mask is None:
        lse_BHT1, state = lse[..., None].contiguous(), torch.zeros_like(lse[0, 0, 0])
        lengths = (None, None, q.shape[2], k.shape[2])
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse_BHT1, state, state, None, *lengths, 0.0, causal
        )
    if kernel is Kernel.CUDA_FLASH and mask is None:
        lse = lse.contiguous()
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, lse, lse
        )
    return attend_reference_backward(grad, q, k, v, out, lse, causal=causal, mask=mask)


def add_sinks(out: Tensor, lse: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Add a score without a value to the softmax of each query.

    It must be added once, to the output and logsumexp of whole rows. The backward of a block is
    right with what this returns: the score's own weight times its value, 0, adds nothing.

    Args:
        out, lse: of whole rows. Each query must see a key.
        sinks_H: the score of each query head.

    Returns:
        The output, in the dtype of ``lse`` or of ``out`` if that is wider, and the logsumexp.
    """
    sinks_H1 = sinks_H.to(lse.dtype)[:, None]
    return out * torch.sigmoid(lse - sinks_H1)[..., None], torch.logaddexp(lse, sinks_H1)


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of ``sinks_H``, in its dtype.

    Args:
        grad: the gradient of ``out``.
        out, lse: what ``add_sinks`` has returned.
    """
    weight_BHT = (sinks_H.to(lse.dtype)[:, None] - lse).exp()
    row_dot_BHT = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(weight_BHT * row_dot_BHT).sum((0, 2)).to(sinks_H.dtype)


def least(dtype: torch.dtype) -> float:
    """Return the logsumexp with which merging begins: so small that it changes nothing.

    It is finite, because minus infinity minus itself is NaN. For a query that sees no key, a block
    may return this or minus infinity.
    """
    return torch.finfo(dtype).min


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``attend_block`` with all scores in memory, where no flash kernel can be used."""
    scores = _scores(q, k, causal, mask)
    lse = scores.logsumexp(-1, keepdim=True)
    finite_lse = lse.clamp(min=least(lse.dtype))  # -inf minus -inf would be NaN
    out = (scores - finite_lse).exp() @ _by_kv_head(v, v)
    return out.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2)


def attend_reference_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``attend_block_backward`` with all scores in memory."""
    grads, outs, queries = (_by_kv_head(x, k) for x in (grad, out, q))
    keys, values = _by_kv_head(k, k), _by_kv_head(v, v)
    row_lse = lse.unflatten(1, (k.shape[1], -1))[..., None]
    weights = (_scores(q, k, causal, mask) - row_lse).exp()
    row_dot = (grads * outs).sum(-1, keepdim=True)
    dscores = weights * (grads @ values.mT - row_dot) * q.shape[-1] ** -0.5
    dq = (dscores @ keys).flatten(1, 2)
    dk = (dscores.mT @ queries).sum(2)
    dv = (weights.mT @ grads).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _by_kv_head(x: Tensor, kv: Tensor) -> Tensor:
    """Group the heads of ``x`` by the key-value head that they read: (B, K, H / K, T, D), wide."""
    return x.to(wide(x.dtype)).unflatten(1, (kv.shape[1], -1))


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    scores = _by_kv_head(q, k) @ _by_kv_head(k, k).mT * q.shape[-1] ** -0.5
    if mask is None and causal:
        mask = torch.ones(1, 1, *scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask[:, :, None], -torch.inf)
