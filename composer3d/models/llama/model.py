"""The Llama decoder: Touvron et al. 2023 (arXiv 2302.13971), the Llama 3 herd (arXiv 2407.21783).

Each parameter has one global name, which does not depend on the layout: ``first.embed.weight``,
``blocks.7.attn.wq.weight``, ``last.head.weight``. A tied embedding and head are one parameter with
the name of the embedding. ``ModelShape`` names the models that are this code with another shape.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from composer3d.models.contract import Decoder, DecoderBlock, SequenceInfo
from composer3d.models.layers.attention import Attention
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.layers.head import Head
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.rope import rope_of
from composer3d.models.llama.shape import ModelShape, RotaryShape
from composer3d.models.shape import DecoderShape


class First(nn.Module):
    """``first(tokens_BT, seq) -> h_BTC``: the embedding, for any ``DecoderShape``."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim)

    def forward(self, tokens_BT: Tensor, seq: SequenceInfo) -> Tensor:
        return self.embed(tokens_BT)


class Block(DecoderBlock):
    """One pre-norm decoder block: ``block(h_BTC, seq) -> h_BTC``.

    Args:
        shape: the shape of the whole model.
        rope: its rotary positions.
        layer: the number of the block in it, from 0.
    """

    def __init__(self, shape: ModelShape, rope: Rope, layer: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attn = Attention(
            dim=shape.dim,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            rope=rope,
            head_width=shape.head_width,
            bias=shape.qkv_bias,
            qk_norm=shape.qk_norm,
            norm_eps=shape.norm_eps,
            window=shape.window_of(layer),
            is_rotary=shape.is_rotary(layer),
        )
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape.dim, shape.ffn)

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        self.attn.prepare(seq, dtype)

    def forward(self, h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        h_BTC = h_BTC + self.attn(self.attn_norm(h_BTC), seq=seq)
        return h_BTC + self.ffn(self.ffn_norm(h_BTC))


class Last(nn.Module):
    """``last(h_BTC, seq, labels_BT) -> loss``: final norm, head, and the summed cross-entropy.

    For any ``DecoderShape``, as ``First``.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.head = Head(shape.vocab, shape.dim)

    def logits(self, h_BTC: Tensor) -> Tensor:
        """Compute the logits (B, T, vocabulary) on one process."""
        return self.head.logits(self.norm(h_BTC))

    def forward(self, h_BTC: Tensor, seq: SequenceInfo, labels_BT: Tensor) -> Tensor:
        return self.head(self.norm(h_BTC), labels_BT)


class RotaryDecoder(Decoder, ABC):
    """A whole model of a ``RotaryShape``: Llama's ``First`` and ``Last`` around blocks.

    A subclass makes the blocks. The parameters are uninitialised. ``Decoder`` documents the calls.

    Args:
        shape: the sizes of the whole model.
        dtype: the dtype of all parameters.
        device: the device on which parameters are allocated; "meta" allocates nothing.
    """

    first_class: type[First] = First
    last_class: type[Last] = Last

    def __init__(
        self, shape: RotaryShape, *, dtype: torch.dtype = torch.float32, device: str = "meta"
    ) -> None:
        super().__init__()
        self.shape = shape
        rope = rope_of(shape)
        with torch.device(device):
            self.first = self.first_class(shape)
            self.blocks = nn.ModuleDict(
                {str(layer): self.make_block(layer, rope) for layer in range(shape.all_layers)}
            )
            self.last = self.last_class(shape)
        if shape.tied:
            self.last.head.weight = self.first.embed.weight
        self.to(dtype)

    @abstractmethod
    def make_block(self, layer: int, rope: Rope) -> DecoderBlock:
        """Build a block by its number."""


class Llama(RotaryDecoder):
    """A Llama of one ``ModelShape``. ``RotaryDecoder`` documents its arguments."""

    shape: ModelShape

    def make_block(self, layer: int, rope: Rope) -> Block:
        """Build a block by its number. A model with other blocks overrides this."""
        return Block(self.shape, rope, layer)
