"""Assign the tokens of a sequence to context parallel ranks, and cut tensors accordingly.

A sequence of T tokens is distributed over ``size`` ranks, T / size on each. In balanced order it is
cut into 2 * size chunks. Rank r holds an early and a late one, r and 2 * size - 1 - r, so that
causal attention costs every rank the same. This is the zigzag order of ring-flash-attention, after
Brandon et al. 2023 (Striped Attention, arXiv 2311.09431). In contiguous order the sequence is cut
into ``size`` chunks, and rank r holds chunk r.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class OwnedRange(NamedTuple):
    """Consecutive tokens of a sequence that one rank holds.

    Attributes:
        place: index of the first token in the rank's shard.
        position: index of the first token in the whole sequence.
        length: number of tokens.
    """

    place: int
    position: int
    length: int


def owned_ranges(rank: int, size: int, tokens: int, *, balanced: bool) -> tuple[OwnedRange, ...]:
    """Return the ranges that ``rank`` of ``size`` holds, in order.

    ``tokens`` is the number of tokens on each rank.
    """
    if size == 1 or not balanced:
        return (OwnedRange(place=0, position=rank * tokens, length=tokens),)
    half = tokens // 2
    early = OwnedRange(place=0, position=rank * half, length=half)
    late = OwnedRange(place=half, position=(2 * size - 1 - rank) * half, length=half)
    return early, late


def shard_sequence(
    x: Tensor,
    dim: int,
    group: dist.ProcessGroup,
    *,
    balanced: bool = True,
    fill: float | None = None,
) -> Tensor:
    """Cut this rank's tokens out of ``x``, which every rank holds whole. No collective.

    Args:
        x: (..., T, ...), with a whole sequence along ``dim``.
        dim: the dim of the sequence.
        group: the ranks to cut over.
        balanced: whether to cut in balanced (zigzag) or in contiguous order.
        fill: if the chunks do not divide the sequence, ``x`` is padded at its end with this value.
            Causal queries of the sequence do not see the padding. Other queries do, unless the
            padding is a document of its own.

    Returns:
        A copy of this rank's tokens, (..., T / size, ...), where T counts the padding.

    Raises:
        ValueError: the chunks do not divide the sequence, and there is no ``fill``.
    """
    chunks = group.size() * (2 if balanced and group.size() > 1 else 1)
    padding = -x.shape[dim] % chunks
    if padding:
        if fill is None:
            raise ValueError(
                f"{x.shape[dim]} tokens cannot be cut into {chunks} equal chunks; give a value for "
                "`fill` to pad them with"
            )
        one_token = torch.full_like(x.narrow(dim, 0, 1), fill)
        x = torch.cat((x, one_token.repeat_interleave(padding, dim)), dim)
    return _part_of(x, dim, group.rank(), group.size(), balanced)


def unshard_sequence(
    x: Tensor,
    dim: int,
    group: dist.ProcessGroup,
    *,
    balanced: bool = True,
    length: int | None = None,
) -> Tensor:
    """Put the whole sequence together from the ranks' parts: the inverse of ``shard_sequence``.

    Args:
        x: this rank's part, (..., T / size, ...), with its tokens along ``dim``.
        dim: the dim of the sequence.
        group: the ranks that hold the parts.
        balanced: whether the parts are in balanced (zigzag) or in contiguous order.
        length: tokens of the sequence without its padding; None: there is no padding.

    Returns:
        The whole sequence, (..., T, ...) or (..., length, ...), without a gradient.

    Collectives: one all-gather; this rank sends (size - 1) times the bytes of ``x``.

    Raises:
        ValueError: ``x`` requires a gradient, or has an odd number of tokens in balanced order.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x would lose its gradient: use x.detach(), or a loss of the parts")
    if balanced and group.size() > 1 and x.shape[dim] % 2:
        raise ValueError(
            f"{x.shape[dim]} tokens a rank are not two chunks, as shard_sequence cuts them; "
            "use balanced=False for contiguous order"
        )
    whole = join_parts(gather_parts(x.detach(), group), dim, balanced)
    return whole.narrow(dim, 0, length or x.shape[dim] * group.size())


def parts_of_all_ranks(x: Tensor, dim: int, size: int, balanced: bool) -> Tensor:
    """Cut the whole ``x`` into the parts of all ranks, and stack them: (size, ...).

    Forward and backward take as many operators for many ranks as for two.
    """
    dim %= x.dim()
    if balanced and size > 1:
        chunks = x.chunk(2 * size, dim)
        pairs = zip(chunks[:size], reversed(chunks[size:]), strict=True)
        x = torch.cat([chunk for pair in pairs for chunk in pair], dim)
    return x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()


def join_parts(parts: Tensor, dim: int, balanced: bool) -> Tensor:
    """Join the parts (size, ...) of all ranks: the inverse of ``parts_of_all_ranks``."""
    if not balanced or len(parts) == 1:
        return torch.cat(list(parts), dim)
    early, late = parts.chunk(2, dim if dim < 0 else dim + 1)
    return torch.cat((*early.unbind(), *reversed(late.unbind())), dim)


def gather_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather ``x`` of all ranks, stacked: (size, ...). Collective: one all-gather."""
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts


def _part_of(x: Tensor, dim: int, rank: int, size: int, balanced: bool) -> Tensor:
    owned = owned_ranges(rank, size, x.shape[dim] // size, balanced=balanced)
    return torch.cat([x.narrow(dim, tokens.position, tokens.length) for tokens in owned], dim)
