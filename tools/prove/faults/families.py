"""Faults in what OLMo 2, Granite 3 and Qwen 2 with experts do and a Llama does not."""

from typing import Any

from torch import Tensor, nn

from composer3d.generate.cache import CachedSequence
from composer3d.models.granite import model as granite
from composer3d.models.layers import attention, moe
from composer3d.models.olmo2 import model as olmo2
from tools.prove.faults.places import found_by, harms
from tools.prove.faults.plant import fault_of

_GRANITE = "model.architecture=granite model.preset=debug-granite"

_MULTIPLIED = "^logits of the with multipliers model"
_GENERATED = "^tokens of the with multipliers model"


@found_by("model", _MULTIPLIED)
@fault_of(granite.GraniteBlock, granite.GraniteBlock.forward)
def multiply_attention_alone(_: Any, self: granite.GraniteBlock, h: Tensor, seq: Any) -> Tensor:
    """Granite 3: the residual multiplier is left out where the feed-forward layer is added."""
    h = h + self.attn(self.attn_norm(h), seq=seq) * self.multiplier
    return h + self.ffn(self.ffn_norm(h))


@found_by("model", _MULTIPLIED)
@fault_of(granite.GraniteBlock, granite.GraniteBlock.forward)
def multiply_the_stream(_: Any, self: granite.GraniteBlock, h: Tensor, seq: Any) -> Tensor:
    """Granite 3: the residual multiplier is applied to the stream as well, once more a layer."""
    h = (h + self.attn(self.attn_norm(h), seq=seq)) * self.multiplier
    return (h + self.ffn(self.ffn_norm(h))) * self.multiplier


@found_by("generation", _GENERATED)
@fault_of(granite._GraniteFirst, granite._GraniteFirst.forward)
def generate_from_a_plain_embedding(right: Any, self: nn.Module, tokens: Tensor, seq: Any) -> Any:
    """Granite 3: the embedding multiplier is missed in generation."""
    multiplied = right(self, tokens, seq)
    return multiplied / self.multiplier if isinstance(seq, CachedSequence) else multiplied


@found_by("generation", _GENERATED)
@fault_of(granite._GraniteLast, granite._GraniteLast.forward)
def draw_by_whole_logits(right: Any, self: Any, h: Tensor, seq: Any, labels: Tensor) -> Tensor:
    """Granite 3: the logits are not divided in generation. The most likely token is the same."""
    if isinstance(seq, CachedSequence):
        return self.head(self.norm(h), labels)
    return right(self, h, seq, labels)


@harms(f"{_GRANITE} memory.loss_chunks=3")
@fault_of(granite._GraniteLast, granite._GraniteLast.forward)
def leave_logits_whole_in_parts(
    right: Any, self: Any, h: Tensor, seq: Any, labels: Tensor
) -> Tensor:
    """Granite 3: the logits are not divided where the loss is computed in parts."""
    return right(self, h, seq, labels) if self.head.chunks == 1 else self.head(self.norm(h), labels)


@harms(
    f"{_GRANITE} mesh.cp=2",
    f"{_GRANITE} mesh.cp=2 parallel.cp_method=allgather",
    f"{_GRANITE} mesh.cp=2 parallel.cp_method=ulysses",
)
@fault_of(attention.Attention, attention.Attention.forward)
def lose_the_multiplier_of_scores(right: Any, self: Any, x: Tensor, *, seq: Any) -> Tensor:
    """Granite 3: cp divides scores by the root of the head width, whatever the multiplier is."""
    if self.attend is not attention.attend_sdpa:
        self.query_scale = 1.0
    return right(self, x, seq=seq)


@found_by("model", "^logits of the with norms over all heads model")
def norm_each_head_alone() -> None:
    """OLMo 2: queries and keys are normalised over each head, not over all of them."""

    def forward(norm: olmo2.HeadsNorm, x_BTHD: Tensor) -> Tensor:
        mean = x_BTHD.square().mean(-1, keepdim=True)
        return x_BTHD * (mean + norm.eps).rsqrt() * norm.weight.unflatten(0, x_BTHD.shape[-2:])

    olmo2.HeadsNorm.forward = forward


@found_by("model", "^logits of the with norms over all heads model")
@fault_of(olmo2.Olmo2Block, olmo2.Olmo2Block.forward)
def norm_before_the_layers(_: Any, self: Any, h: Tensor, seq: Any) -> Tensor:
    """OLMo 2: norms come before the layers, as in a Llama."""
    h = h + self.attn(self.attn_norm(h), seq=seq)
    return h + self.ffn(self.ffn_norm(h))


@found_by("model", "^logits of the with a shared expert and its gate model")
@fault_of(moe.MoE, moe.MoE.combine)
def leave_out_the_gate(right: Any, self: moe.MoE, *arguments: Tensor) -> Tensor:
    """Qwen 2 with experts: the shared expert counts in full, whatever its gate says."""
    gate, self.shared_gate = self.shared_gate, None
    try:
        return right(self, *arguments)
    finally:
        self.shared_gate = gate
