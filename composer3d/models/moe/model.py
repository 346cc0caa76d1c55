"""Llama with mixtures of experts: Mixtral (arXiv 2401.04088), Qwen 2 (arXiv 2407.10671), Qwen 3
(arXiv 2505.09388), and the router of DeepSeek-V3 (arXiv 2412.19437).

A block with experts has ``blocks.7.moe.router.weight``, ``blocks.7.moe.experts.w1`` (w2, w3; all
experts of the block in one tensor, the expert first) and, with a shared expert,
``blocks.7.moe.shared.w1.weight`` and perhaps its gate, ``blocks.7.moe.shared_gate.weight``. All
other names are those of ``models.llama``.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from composer3d.models.contract import DecoderBlock, SequenceInfo
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.layers.moe import Experts, MoE, Router, Routing
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.model import Block, Llama
from composer3d.models.moe.shape import ExpertsShape, MoeShape


def moe_of(shape: ExpertsShape) -> MoE:
    """The mixture of experts of one block."""
    router = Router(
        dim=shape.dim,
        experts=shape.experts,
        per_token=shape.experts_per_token,
        scores=shape.router,
        renormalise=shape.renormalise,
        scale=shape.router_scale,
        groups=shape.expert_groups,
        groups_per_token=shape.groups_per_token,
        group_best=shape.group_best,
        has_bias=shape.router_bias,
        bias_rate=shape.bias_rate,
        balance_loss=shape.balance_loss,
        z_loss=shape.z_loss,
    )
    experts = Experts(shape.experts, shape.dim, shape.expert_width)
    shared = FeedForward(shape.dim, shape.shared_ffn) if shape.shared_ffn else None
    gate = nn.Linear(shape.dim, 1, bias=False) if shape.shared_gate else None
    return MoE(router, experts, shared, gate)


class ExpertsBlock(DecoderBlock):
    """One pre-norm decoder block with experts: ``block(h_BTC, seq) -> h_BTC``.

    A subclass makes the layers ``attn_norm``, ``attn``, ``ffn_norm`` and ``moe``.
    """

    compiled: ClassVar[tuple[str, ...]] = ("before_experts", "after_experts")
    attn_norm: nn.RMSNorm
    attn: Any
    ffn_norm: nn.RMSNorm
    moe: MoE

    def forward(self, h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        h_BTC, x_BTC, routing = self.before_experts(h_BTC, seq)
        out_NKC = self.moe.compute(x_BTC, routing, seq)
        return self.after_experts(h_BTC, x_BTC, out_NKC, routing.weights_NK)

    def before_experts(self, h_BTC: Tensor, seq: SequenceInfo) -> tuple[Tensor, Tensor, Routing]:
        """Return the stream after attention, what experts compute of it, and where it goes."""
        h_BTC = h_BTC + self.attn(self.attn_norm(h_BTC), seq=seq)
        x_BTC = self.ffn_norm(h_BTC)
        return h_BTC, x_BTC, self.moe.router(x_BTC, seq)

    def after_experts(
        self, h_BTC: Tensor, x_BTC: Tensor, out_NKC: Tensor, weights_NK: Tensor
    ) -> Tensor:
        """Return the stream with the weighted outputs of experts, and that of the shared one."""
        return h_BTC + self.moe.combine(x_BTC, out_NKC, weights_NK)


class MoeBlock(ExpertsBlock, Block):
    """A block of a Llama, with experts in place of the feed-forward layer."""

    def __init__(self, shape: MoeShape, rope: Rope, layer: int) -> None:
        super().__init__(shape, rope, layer)
        del self.ffn
        self.moe = moe_of(shape)


class MoeLlama(Llama):
    """A Llama with experts, of one ``MoeShape``, with uninitialised parameters.

    ``RotaryDecoder`` documents its arguments.
    """

    shape: MoeShape

    def make_block(self, layer: int, rope: Rope) -> Block:
        """Build a block; ``MoeShape.has_experts`` says whether it has experts."""
        return (MoeBlock if self.shape.has_experts(layer) else Block)(self.shape, rope, layer)
