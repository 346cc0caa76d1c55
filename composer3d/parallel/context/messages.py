"""What ranks send each other, so that each has the keys and values of all tokens.

They send these ("key-values") themselves, or latents, of which each rank makes them. Shapes and
"wide" are those of ``ring``.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Messages(Protocol):
    """The messages of one call of attention, and their gradients.

    Attributes:
        dim: the dim of a message along which its tokens lie.
    """

    dim: int

    def own(self) -> Tensor:
        """Return this rank's message, contiguous."""

    def key_values(self, message: Any) -> Any:
        """Return the key-values of a message, stacked and contiguous."""

    def message_gradient(self, message: Any, dkv: Tensor) -> Tensor:
        """Return the wide gradient of ``message``, from the wide gradient of its key-values."""

    def input_gradients(self, dmessage: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the two tensors of ``messages_of``.

        ``dmessage`` is the wide gradient of this rank's own message, summed over all ranks.
        """

    def empty_gradients(self) -> tuple[Tensor, Tensor]:
        """Return tensors with the sizes and strides of ``input_gradients``, with any values."""


def messages_of(q: Tensor, k: Tensor, v: Tensor) -> Messages:
    """Return the messages of keys and values, or of latents and a weight in their place."""
    return LatentMessages(q, k, v) if k.dim() == 3 else KeysAndValues(k, v)


class KeysAndValues(Messages):
    """A message is the keys and the values of a rank, stacked in one tensor."""

    dim = 3

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def own(self) -> Tensor:
        return torch.stack((self.k, self.v))

    def key_values(self, message: Any) -> Any:
        return message

    def message_gradient(self, message: Any, dkv: Tensor) -> Tensor:
        return dkv

    def input_gradients(self, dmessage: Tensor) -> tuple[Tensor, Tensor]:
        # Copies even if they are in order: outputs of an operator must not share memory.
        return (
            copied_in_memory_BTHD(dmessage[0], self.k.dtype),
            copied_in_memory_BTHD(dmessage[1], self.v.dtype),
        )

    def empty_gradients(self) -> tuple[Tensor, Tensor]:
        return self.input_gradients(self.own())


class LatentMessages(Messages):
    """A message is the latents of a rank, each followed by the rotated part of its key.

    The receiver projects a latent up, for each of its heads, to the rest of the key and to the
    value. All heads share the rotated part.

    Args:
        q: this rank's queries.
        latents: this rank's, (B, n, R).
        weight: the projection, (H (D - rotated + V), latent): for each head, the rows of the key
            and then those of the value, whose width V is at most D.

    Attributes:
        dweight: the wide gradient of ``weight``: the sum over what ``message_gradient`` has seen.
    """

    dim = 1

    def __init__(self, q: Tensor, latents: Tensor, weight: Tensor) -> None:
        self.latents, self.weight = latents, weight
        self.heads, self.width = q.shape[1], q.shape[3]
        self.widths = (weight.shape[1], latents.shape[2] - weight.shape[1])
        self.plain = self.width - self.widths[1]
        self.value = weight.shape[0] // self.heads - self.plain
        self.dweight = torch.empty(0)

    def own(self) -> Tensor:
        return self.latents.contiguous()

    def key_values(self, message: Any) -> Any:
        latent_BSL, rotated_BSR = message.split(self.widths, -1)
        up_BHSU = F.linear(latent_BSL, self.weight).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = message.new_empty((2, *up_BHSU.shape[:3], self.width))
        kv[0, ..., : self.plain] = up_BHSU[..., : self.plain]
        kv[0, ..., self.plain :] = rotated_BSR[:, None]
        kv[1, ..., : self.value] = up_BHSU[..., self.plain :]
        kv[1, ..., self.value :] = 0
        return kv

    def message_gradient(self, message: Any, dkv: Tensor) -> Tensor:
        latent_BSL, _ = message.split(self.widths, -1)
        dk_BSHD, dv_BSHD = dkv.transpose(2, 3)
        drotated_BSR = dk_BSHD[..., self.plain :].sum(2)
        dup_BSHU = message.new_empty((*dk_BSHD.shape[:3], self.plain + self.value))
        dup_BSHU[..., : self.plain] = dk_BSHD[..., : self.plain]
        dup_BSHU[..., self.plain :] = dv_BSHD[..., : self.value]
        dup_BSU = dup_BSHU.flatten(2)

        # Products are in the dtype of the latents, and sums over rounds and ranks are wide.
        dweight = (dup_BSU.flatten(0, 1).T @ latent_BSL.flatten(0, 1)).to(dkv.dtype)
        self.dweight = dweight if self.dweight.numel() == 0 else self.dweight + dweight
        return torch.cat(((dup_BSU @ self.weight).to(dkv.dtype), drotated_BSR), -1)

    def input_gradients(self, dmessage: Tensor) -> tuple[Tensor, Tensor]:
        return dmessage.to(self.latents.dtype), self.dweight.to(self.weight.dtype)

    def empty_gradients(self) -> tuple[Tensor, Tensor]:
        as_computed = torch.contiguous_format
        return (
            torch.empty_like(self.latents, memory_format=as_computed),
            torch.empty_like(self.weight, memory_format=as_computed),
        )


def copied_in_memory_BTHD(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy ``x`` (B, H, T, D) into memory in the order B, T, H, D; its shape stays as it is.

    So the projection that reads it needs no further copy.
    """
    x_BTHD = x.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format)
    return x_BTHD.transpose(1, 2)


def in_memory_BTHD(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``copied_in_memory_BTHD``, but return ``x`` itself if it has that order and dtype."""
    x_BTHD = x.transpose(1, 2)
    if x.dtype == dtype and x_BTHD.is_contiguous():
        return x
    return copied_in_memory_BTHD(x, dtype)
