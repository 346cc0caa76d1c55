"""Context parallelism of latent attention: ranks send latents in place of keys and values.

In multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434), keys and values of all heads
follow from one narrow latent of each token. Where latents are fewer numbers
(``DecoderShape.sends_latents``), ring and all-gather send them, and each rank projects those of all
tokens up to its heads.
"""

import torch.distributed as dist
from torch import Tensor, nn

from composer3d.models.contract import SequenceInfo, ShardingPlan
from composer3d.models.layers.latents import AttendLatents, AttendsToLatents
from composer3d.parallel.context.api import Method, check_tokens
from composer3d.parallel.context.ring import attend_in_rounds
from composer3d.parallel.context.tiles import NO_WINDOW
from composer3d.recipe.schema import ParallelTable


def apply(
    stage: nn.Module,
    plan: ShardingPlan,
    group: dist.ProcessGroup | None,
    parallel: ParallelTable,
    *,
    tp: int,
    is_float8: bool,
) -> None:
    """Let each module of ``stage`` that attends send its latents over ``group``, if it should.

    Args:
        stage: this rank's part of the model, before linear layers are replaced or cut.
        plan: the plan of the model.
        group: the ranks of cp; None: one rank holds whole sequences, and sends nothing.
        parallel: the recipe's ``[parallel]``.
        tp: the number of ranks that will share the heads.
        is_float8: whether blocks will multiply in float8.
    """
    if group is None:
        return
    method = parallel.cp_method
    attend = make_attend_latents(group, method, balanced=parallel.is_balanced)
    for name, module in stage.named_modules():
        if not (plan.attends(name) and isinstance(module, AttendsToLatents)):
            continue
        if module.shape.sends_latents(tp=tp, cp_method=method, is_float8=is_float8):
            module.send_latents(attend)


def make_attend_latents(
    group: dist.ProcessGroup, method: Method, *, balanced: bool
) -> AttendLatents:
    """Return a function for ``send_latents``. See ``latent_ring_attention`` for the arguments.

    The function takes q (B, H, n, D), latents (B, n, R) and the weight (U, L), and returns
    (B, H, n, D).
    """

    def attend(
        q_BHnD: Tensor, latents_BnR: Tensor, weight_UL: Tensor, *, seq: SequenceInfo
    ) -> Tensor:
        return latent_ring_attention(
            q_BHnD,
            latents_BnR,
            weight_UL,
            group=group,
            documents=seq.documents_BT,
            method=method,
            balanced=balanced,
        )

    return attend


def latent_ring_attention(
    q_BHnD: Tensor,
    latents_BnR: Tensor,
    weight_UL: Tensor,
    *,
    group: dist.ProcessGroup,
    documents: Tensor | None = None,
    method: Method = "ring",
    balanced: bool = True,
) -> Tensor:
    """Compute causal attention over a sequence that is cut over ``group``, and send latents.

    Args:
        q_BHnD: this rank's queries, cut as in ``api.ring_attention``, for a group of at least two.
        latents_BnR: for each token of this rank, its latent, of width L, and then the rotated part
            of its key, which all heads share.
        weight_UL: the projection of a latent. Its rows are, for each of the H heads, the first
            D - (R - L) numbers of the key, and the value, of at most D numbers.
        group, documents, balanced: as in ``api.ring_attention``.
        method: "ring" or "allgather".

    Returns:
        This rank's part of the output, (B, H, n, D), with zeros after the width of a value. The
        gradient of ``weight_UL`` is this rank's part of a sum over ``group``.

    Collectives, and the bytes that a rank sends: those of ``api.ring_attention``, with latents in
    place of keys and values.

    It is the operator ``composer3d::ring_attention``. For backward, q, the latents of this rank,
    the weight, the output and its logsumexp are kept, and neither keys nor values. Each pass
    projects the latents of all ranks up.

    Raises:
        ValueError: shapes do not fit together, ``method`` is not allowed, or a rank has an odd
            number of tokens (balanced order).
    """
    (rows, heads, tokens, width), latent_width = q_BHnD.shape, weight_UL.shape[1]
    plain = width - (latents_BnR.shape[-1] - latent_width)
    value = weight_UL.shape[0] // heads - plain
    fits = latents_BnR.shape[:-1] == (rows, tokens) and weight_UL.shape[0] % heads == 0
    if not (fits and 0 <= plain <= width and 0 <= value <= width):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_BHnD, latents_BnR, weight_UL))
        raise ValueError(
            f"q, latents and weight are {shapes}; they must be (B, H, n, D), (B, n, R) and "
            "(H (D - R + L + V), L), with R - L at most D and V at most D"
        )
    if method not in ("ring", "allgather"):
        raise ValueError(f'method = "{method}" must be "ring" or "allgather"')
    check_tokens(rows, tokens, documents, group.size(), balanced)
    q = q_BHnD if q_BHnD.stride(-1) == 1 else q_BHnD.contiguous()
    options = (documents, NO_WINDOW, method, balanced, group.group_name)
    return attend_in_rounds(q, latents_BnR, weight_UL, None, *options)[0]
