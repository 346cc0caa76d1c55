"""Which tokens of a sequence each context parallel rank holds, and cutting tensors that way.

A sequence of T tokens lies over ``size`` ranks, T / size on each. In balanced order it is cut into
2 size chunks, and rank r holds chunks r and 2 size - 1 - r: an early and a late one, so that causal
attention costs every rank the same. This is the zigzag order of ring-flash-attention, after
Brandon et al. 2023 (Striped Attention, arXiv 2311.09431). In contiguous order, rank r holds chunk
r of ``size``.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class OwnedRange(NamedTuple):
    """Consecutive tokens of one rank: tokens ``position`` to ``position + length`` of the sequence.

    ``place`` is the index of the first one in the rank's own shard.
    """

    place: int
    position: int
    length: int


def owned_ranges(rank: int, size: int, tokens: int, *, balanced: bool) -> tuple[OwnedRange, ...]:
    """The tokens that ``rank`` of ``size`` holds, in order; each rank holds ``tokens`` of them."""
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
        x: a whole sequence along ``dim``.
        fill: where ``dim`` does not divide, ``x`` is padded at its end with this value. Causal
            queries of the sequence do not see the padding; others do, unless it is a document of
            its own.

    Raises:
        ValueError: ``dim`` does not divide, and there is no ``fill``.
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
        x: this rank's part.
        length: tokens of the sequence without its padding.

    Returns:
        The whole sequence, without a gradient.

    Collectives: one all-gather; this rank sends (size - 1) times the bytes of ``x``.

    Raises:
        ValueError: ``x`` cannot be a part in balanced order.
    """
    if balanced and group.size() > 1 and x.shape[dim] % 2:
        raise ValueError(
            f"{x.shape[dim]} tokens a rank are not two chunks, as shard_sequence cuts them; "
            "use balanced=False for contiguous order"
        )
    whole = join_parts(gather_parts(x.detach(), group), dim, balanced)
    return whole.narrow(dim, 0, length or x.shape[dim] * group.size())


def parts_of_all_ranks(x: Tensor, dim: int, size: int, balanced: bool) -> Tensor:
    """Stack the parts that all ranks hold of the whole ``x``: (size, ...)."""
    return torch.stack([_part_of(x, dim, rank, size, balanced) for rank in range(size)])


def join_parts(parts: Tensor, dim: int, balanced: bool) -> Tensor:
    """Put the whole together from the parts (size, ...): the inverse of ``parts_of_all_ranks``."""
    if not balanced:
        return torch.cat(list(parts), dim)
    early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*early, *reversed(late)), dim)


def gather_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' ``x``: (size, ...). Collective: one all-gather."""
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts


def _part_of(x: Tensor, dim: int, rank: int, size: int, balanced: bool) -> Tensor:
    owned = owned_ranges(rank, size, x.shape[dim] // size, balanced=balanced)
    return torch.cat([x.narrow(dim, tokens.position, tokens.length) for tokens in owned], dim)
