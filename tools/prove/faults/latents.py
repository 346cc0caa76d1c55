"""Faults of latent attention: its gradients over tp, its rotated keys, its cache and its scores."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from composer3d.models.contract import SequenceInfo
from composer3d.models.deepseek import attention
from composer3d.models.deepseek.attention import LatentAttention
from composer3d.models.layers.attention import attend_sdpa
from composer3d.parallel.context import messages
from composer3d.parallel.tensor import styles
from composer3d.parallel.tensor.collectives import sum_gradients
from tools.prove.faults.places import OFF, Place, found_by, harms
from tools.prove.faults.plant import fault_by, fault_of

_LATENTS = "model.architecture=deepseek model.preset=debug-deepseek model.n_kv_heads=8"
_ATTENTION = "^latent attention is off"


def _harms(*layouts: str, message: str = OFF) -> Place:
    """Plant the decorated fault in layouts of a model with latents."""
    return harms(*(f"{_LATENTS} {layout}" for layout in layouts), message=message)


@_harms("mesh.tp=2", message=r"attn\.(wq_a|wkv_a|q_norm|kv_norm|queries|keys)|attn_norm|embed")
@fault_of(styles, styles._style)
def sum_gradients_of_latents_twice(right: Any, style: Any, *arguments: Any) -> Any:
    """tp: the gradient of a latent is summed over the ranks where it is gathered, and again."""
    local = right(style, *arguments)
    if style == "whole":
        local.post_collective = sum_gradients
    return local


@_harms("mesh.tp=2 mesh.ep=2", message=r"attn\.(wq_a|wkv_a)\.weight")
@fault_of(styles, styles._style)
def drop_reduction_of_down_projections(right: Any, style: Any, *arguments: Any) -> Any:
    """tp: a rank keeps the gradients of down-projections that its own tokens give."""
    local = right(style, *arguments)
    if style == "whole":
        local.sums_gradients = False
    return local


@_harms("mesh.cp=2")
@fault_of(messages.LatentMessages, messages.LatentMessages.key_values)
def rotate_received_keys_like_own_ones(
    right: Any, sent: messages.LatentMessages, message: Tensor
) -> Tensor:
    """cp: keys of received latents have the rotated parts of this rank's own tokens."""
    rotated = sent.latents[..., sent.widths[0] :]
    return right(sent, torch.cat((message[..., : sent.widths[0]], rotated), -1))


@_harms(
    "mesh.cp=2",
    "mesh.cp=2 mesh.tp=2 data.packing=documents parallel.cp_balance=contiguous",
    message=r"keys\.wkv_b",
)
@fault_of(messages.LatentMessages, messages.LatentMessages.message_gradient)
def forget_the_weight_of_received_latents(
    right: Any, sent: messages.LatentMessages, message: Tensor, dkv: Tensor
) -> Tensor:
    """cp: the projection of latents has no gradient from latents of other ranks."""
    before = sent.dweight
    gradient = right(sent, message, dkv)
    if message.data_ptr() != sent.latents.data_ptr():
        sent.dweight = before if before.numel() else torch.zeros_like(sent.dweight)
    return gradient


@_harms("mesh.cp=2 parallel.cp_method=allgather", message=r"attn\.wkv_a|norm|embed")
@fault_of(messages.LatentMessages, messages.LatentMessages.message_gradient)
def give_the_gradient_of_one_head_to_the_rotated_part(
    right: Any, sent: messages.LatentMessages, message: Tensor, dkv: Tensor
) -> Tensor:
    """cp: the rotated part of a sent latent has the gradient of the first head alone."""
    gradient = right(sent, message, dkv)
    gradient[..., sent.widths[0] :] = dkv[0, :, 0, :, sent.plain :]
    return gradient


def _change_rotated_keys(change: Any) -> None:
    """Call ``change`` with the keys (B, S, H, D) and the width of their rotated part."""
    right = attention._KeysAndValues.forward

    def forward(module: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        keys, values = right(module, *arguments)
        return change(keys, module.latent_widths[1]), values

    attention._KeysAndValues.forward = forward  # type: ignore[method-assign]


@found_by("latents", _ATTENTION)
@fault_by(_change_rotated_keys)
def give_the_rotated_key_to_one_head(keys: Tensor, width: int) -> Tensor:
    """Latent attention: the first head alone has the rotated part of the key."""
    mask = torch.ones_like(keys)
    mask[:, :, 1:, -width:] = 0
    return keys * mask


@found_by("latents", _ATTENTION)
@fault_of(attention, attention.rotate)
def leave_one_rotated_key_as_it_is(right: Any, x: Tensor, table: Any) -> Tensor:
    """Latent attention: the part of the key that all heads share is not rotated."""
    return x if x.shape[2] == 1 else right(x, table)


@found_by("latents", _ATTENTION)
@fault_of(attention, attention._halves)
def pair_halves_where_files_have_neighbours(_: Any, x: Tensor) -> Tensor:
    """Latent attention: rotated pairs are halves, as in files of Llama."""
    return x


@found_by("latents", _ATTENTION)
@fault_of(attention, attend_sdpa)
def divide_scores_by_another_width(
    right: Any, q: Tensor, k: Tensor, v: Tensor, *, seq: SequenceInfo, window: int
) -> Tensor:
    """Latent attention: scores are divided by the root of another width than that of keys."""
    value_width = v.shape[-1] - 4  # any other width
    return right(q * (q.shape[-1] / value_width) ** 0.5, k, v, seq=seq, window=window)


@found_by("latents", "^greedy tokens of the cache of latents")
@fault_of(LatentAttention, LatentAttention.forward)
def forget_the_norm_of_remembered_latents(
    right: Any, module: LatentAttention, x: Tensor, *, seq: SequenceInfo
) -> Tensor:
    """Generation: the latents that a cache keeps are not normalised."""
    if module.remember is not None:
        module.kv_norm.forward = lambda latent: latent  # type: ignore[method-assign]
    return right(module, x, seq=seq)


@found_by("latents", _ATTENTION)
@fault_of(F, F.pad)
def pad_values_on_the_wrong_side(right: Any, x: Tensor, padding: Any, *others: Any) -> Tensor:
    """Latent attention: the padding of values comes before them, so that the cut takes it."""
    before, after = padding
    return right(x, (after, before), *others)
