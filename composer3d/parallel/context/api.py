"""Context parallelism: attention of a sequence that is cut over several ranks, in three ways.

- ring: keys and values travel round a ring of ranks. The next ones are sent while a block is
  computed. Liu et al. 2023 (Ring Attention, arXiv 2310.01889).
- allgather: every rank gathers all keys and values first. Llama 3 (arXiv 2407.21783, section
  3.3.2).
- ulysses: an all-to-all gives each rank the whole sequence for some of the heads; a second one
  gives it back its part of the output. Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509).

``ownership`` decides which tokens a rank holds, and ``tiles`` which scores it computes. On a GPU,
``packed`` does so for documents and windows.

Shapes: T is the length of the whole sequence, and n = T / cp that of a rank's part. Queries are
(B, H, n, D), keys and values (B, K, n, D). Queries and keys are already rotated by the positions of
their tokens. Keys and values are not repeated for grouped queries.
"""

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.facts.errors import PlanError
from composer3d.models.contract import SequenceInfo, ShardingPlan
from composer3d.models.layers.attention import Attend, sdpa
from composer3d.parallel.context.ownership import join_parts, parts_of_all_ranks
from composer3d.parallel.context.ring import attend_in_rounds
from composer3d.parallel.context.tiles import NO_WINDOW, NOT_CAUSAL
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.torch_private import group_by_name

Method = Literal["ring", "allgather", "ulysses"]
METHODS: tuple[str, ...] = get_args(Method)


def apply(
    stage: nn.Module,
    plan: ShardingPlan,
    group: dist.ProcessGroup | None,
    parallel: ParallelTable,
) -> None:
    """Replace ``attend`` of every module in ``stage`` that attends, by attention over ``group``.

    ``group`` is None if one rank holds whole sequences. Even then ``attend`` is replaced: the new
    one builds no mask of a whole sequence for packed documents and windows.

    Raises:
        PlanError: there is a group, and the plan names no module that attends.
    """
    if plan.attend is None and group is not None:
        raise PlanError(
            "the plan names no module that attends, which context parallelism needs; "
            "use mesh.cp = 1"
        )
    attend = make_attend(group, parallel.cp_method, balanced=parallel.is_balanced)
    for name, module in stage.named_modules():
        if plan.attends(name):
            module.attend = attend


def make_attend(
    group: dist.ProcessGroup | None, method: Method = "ring", *, balanced: bool = True
) -> Attend:
    """Return a function for the seam ``attend``. See ``ring_attention`` for the arguments."""

    def attend(
        q_BHnD: Tensor,
        k_BKnD: Tensor,
        v_BKnD: Tensor,
        *,
        seq: SequenceInfo,
        window: int,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        return ring_attention(
            q_BHnD,
            k_BKnD,
            v_BKnD,
            sinks_H=sinks_H,
            group=group,
            documents=seq.documents_BT,
            window=window,
            method=method,
            balanced=balanced,
        )

    return attend


def ring_attention(
    q_BHnD: Tensor,
    k_BKnD: Tensor,
    v_BKnD: Tensor,
    *,
    group: dist.ProcessGroup | None,
    causal: bool = True,
    documents: Tensor | None = None,
    window: int = 0,
    sinks_H: Tensor | None = None,
    method: Method = "ring",
    balanced: bool = True,
) -> Tensor:
    """Compute attention over a sequence that is cut over ``group``, by any of the three methods.

    Args:
        q_BHnD, k_BKnD, v_BKnD: this rank's parts, as ``shard_sequence(whole, 2, group)`` cuts
            them, of one dtype. H is a multiple of K; query head h reads key-value head
            h // (H / K).
        group: the ranks that hold parts of the same sequences; None: this rank holds whole ones.
        causal: whether a query sees only the keys up to its own position, or all keys.
        documents: integers (B, T) of the whole sequence, the same on all ranks. They are read on
            the CPU. A document is a run of equal numbers, and a query sees only the keys of its own
            document.
        window: a causal query sees the last ``window`` keys up to its own; 0: all of them.
        sinks_H: a score of each query head that takes part in the softmax of each query, and to
            which no value belongs. It enters once, after all keys. Its gradient is this rank's part
            of a sum over ``group``. None: none.
        method: "ring", "allgather" or "ulysses". The result is the same, apart from rounding.
        balanced: whether parts are in balanced (zigzag) order.

    Returns:
        This rank's part of the output, (B, H, n, D).

    Collectives, and the bytes that a rank sends. Q is the size of its queries, KV that of its keys
    and values, and dKV that of their gradients in float32 (float64 for float64).

    - ring: sends to the next rank, while it computes. Forward (cp - 1) KV; backward
      (cp - 1) (KV + dKV).
    - allgather: forward has one all-gather; backward has one all-gather and one reduce-scatter.
      The bytes are those of ring.
    - ulysses: forward and backward each have two all-to-alls, together (cp - 1) / cp (2 Q + KV).

    Ring and allgather run as the operator ``composer3d::ring_attention``, whose outputs selective
    activation checkpointing can save. For backward, q, k, v, the output and its logsumexp (B, H, n)
    are kept.

    Raises:
        ValueError: shapes do not fit together; ``method`` or ``window`` is not allowed; the ranks
            do not divide the heads (ulysses); or a rank has an odd number of tokens (balanced
            order).
    """
    size = 1 if group is None else group.size()
    _check(q_BHnD, k_BKnD, v_BKnD, documents, size, method, balanced)
    if sinks_H is not None and sinks_H.shape != q_BHnD.shape[1:2]:
        raise ValueError(
            f"sinks_H is {tuple(sinks_H.shape)}; it must have a number for each of the "
            f"{q_BHnD.shape[1]} query heads"
        )
    if window < 0 or (window and not causal):
        raise ValueError(
            f"window = {window} with causal = {causal}: it must be 0, or with causal = True the "
            "number of keys that a query sees"
        )
    q, k, v = q_BHnD, k_BKnD, v_BKnD
    if q.stride(-1) != 1:
        # Kernels need the last dim of queries to be contiguous.
        q = q.contiguous()
    if window >= q.shape[2] * size:
        window = NO_WINDOW  # it is as long as the sequence
    if size == 1 and documents is None and window == 0 and sinks_H is None:
        # torch chooses the kernel: on a GPU it may be cuDNN's.
        return sdpa(q, k, v, is_causal=causal)
    if group is not None and size > 1 and method == "ulysses":
        return _ulysses(q, k, v, sinks_H, group, causal, documents, window, balanced)
    group_name = group.group_name if group is not None and size > 1 else ""
    # From here on, ``window`` also says whether attention is causal (``tiles``).
    window = window if causal else NOT_CAUSAL
    return attend_in_rounds(q, k, v, sinks_H, documents, window, method, balanced, group_name)[0]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    size: int,
    method: str,
    balanced: bool,
) -> None:
    """Raise ValueError if a kernel would read beyond a tensor, or ignore a part of it."""
    (rows, heads, tokens, _), kv_heads = q.shape, k.shape[1]
    if k.shape != v.shape or k.shape != (rows, kv_heads, *q.shape[2:]) or heads % kv_heads:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k and v are {shapes}; they must be (B, H, n, D), (B, K, n, D) and (B, K, n, D), "
            "and H a multiple of K"
        )
    if method not in METHODS:
        raise ValueError(f'method = "{method}" must be one of {", ".join(METHODS)}')
    check_tokens(rows, tokens, documents, size, balanced)
    if method == "ulysses" and (heads % size or kv_heads % size):
        raise ValueError(
            f"ulysses cuts heads over {size} ranks, which must divide the {heads} query heads and "
            f"the {kv_heads} key-value heads"
        )


def check_tokens(
    rows: int, tokens: int, documents: Tensor | None, size: int, balanced: bool
) -> None:
    """Raise ValueError if a rank cannot hold ``tokens``, or ``documents`` have another shape."""
    if balanced and size > 1 and tokens % 2:
        raise ValueError(
            f"each rank holds {tokens} tokens; balanced order needs an even number: cut the "
            "sequence with shard_sequence, or use balanced=False"
        )
    if documents is not None and documents.shape != (rows, tokens * size):
        raise ValueError(
            f"documents are {tuple(documents.shape)}; they must be {(rows, tokens * size)}"
        )


def _ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    group: dist.ProcessGroup,
    causal: bool,
    documents: Tensor | None,
    window: int,
    balanced: bool,
) -> Tensor:
    """Gather the whole sequence for some of the heads, attend, and scatter the output back."""
    size = group.size()
    # (size, B, h, n, D) of queries, with h = H / size, and of keys and values, with g = K / size.
    by_rank = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in (q, k, v)]
    # One message for all three. What comes from a rank has its tokens: (B, h + 2 g, n, D).
    received = _exchange(torch.cat(by_rank, 2), group.group_name)
    whole = join_parts(received, 2, balanced)  # (B, h + 2 g, T, D)
    q, k, v = whole.split([x.shape[1] // size for x in (q, k, v)], 1)
    own_sinks_H = None if sinks_H is None else sinks_H.chunk(size)[group.rank()]
    out = ring_attention(
        *(q, k, v),
        group=None,
        causal=causal,
        documents=documents,
        window=window,
        sinks_H=own_sinks_H,
    )
    parts = parts_of_all_ranks(out, 2, size, balanced)  # (size, B, h, n, D)
    return _exchange(parts, group.group_name).movedim(0, 1).flatten(1, 2)


@torch.library.custom_op("composer3d::all_to_all", mutates_args=())
def _exchange(x: Tensor, group_name: str) -> Tensor:
    """Exchange parts, all-to-all: ``x[r]`` goes to rank r, and ``out[r]`` comes from rank r."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group_by_name(group_name))
    return out


@_exchange.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _exchange(grad, ctx.group_name), None


_exchange.register_autograd(_exchange_back, setup_context=_save_group)
