"""Faults in what OLMo 2, Granite 3, Gemma 3, GLM-4.5 and Qwen 2 with experts do besides a Llama."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.generate.cache import CachedSequence
from composer3d.models.gemma3 import model as gemma3
from composer3d.models.granite import model as granite
from composer3d.models.layers import attention, moe
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.llama import model as llama
from composer3d.models.olmo2 import model as olmo2
from tools.prove.faults.places import found_by, harms
from tools.prove.faults.plant import fault_of

_GRANITE = "model.architecture=granite model.preset=debug-granite"
_GEMMA = "model.architecture=gemma3 model.preset=debug-gemma3"

_MULTIPLIED = "^logits of the with multipliers model"
_GENERATED = "^tokens of the with multipliers model"
_AROUND = "^logits of the with norms around the layers model"
_PARTLY = "of the with heads of which a part is rotated model"


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
    f"{_GEMMA} mesh.cp=2",
)
@fault_of(attention.Attention, attention.Attention.forward)
def lose_the_multiplier_of_scores(right: Any, self: Any, x: Tensor, *, seq: Any) -> Tensor:
    """Granite 3, Gemma 3: cp divides scores by the root of the head width, and by nothing else."""
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


@found_by("model", _AROUND)
@fault_of(gemma3._Gemma3Attention, gemma3._Gemma3Attention.__init__)
def leave_one_out_of_the_query_norm(right: Any, self: Any, *arguments: Any) -> None:
    """Gemma 3: the factor of the norm of queries is its weight, without 1."""
    right(self, *arguments)
    self.q_norm = nn.RMSNorm(self.q_norm.normalized_shape, eps=self.q_norm.eps)


@found_by("model", _AROUND)
@fault_of(gemma3._Gemma3Attention, gemma3._Gemma3Attention.__init__)
def add_one_twice_to_the_query_norm(right: Any, self: Any, *arguments: Any) -> None:
    """Gemma 3: the factor of the norm of queries is 2 + weight."""
    right(self, *arguments)
    norm = self.q_norm
    norm.register_forward_hook(lambda _, inputs, out: out + _plain_norm(norm, *inputs))


@harms(f"{_GEMMA} mesh.tp=2", f"{_GEMMA} mesh.tp=2 parallel.sequence_parallel=false")
@fault_of(gemma3.OffsetNorm, gemma3.OffsetNorm.forward)
def add_one_twice_under_tp(right: Any, self: gemma3.OffsetNorm, x: Tensor) -> Tensor:
    """Gemma 3: tp adds 1 to the factors of norms, which the norms do as well."""
    is_cut = not isinstance(self.weight, nn.Parameter)
    return right(self, x) + _plain_norm(self, x) if is_cut else right(self, x)


def _plain_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.normalized_shape, None, norm.eps)


@found_by("generation", "^tokens of the with norms around the layers model")
@fault_of(gemma3._Gemma3First, gemma3._Gemma3First.forward)
def generate_from_a_small_embedding(right: Any, self: Any, tokens: Tensor, seq: Any) -> Tensor:
    """Gemma 3: the factor of the embedding is missed in generation."""
    scaled = right(self, tokens, seq)
    return scaled / self.factor if isinstance(seq, CachedSequence) else scaled


@found_by("model", _AROUND)
@fault_of(gemma3.GeluFeedForward, gemma3.GeluFeedForward.forward)
def gate_by_silu(_: Any, self: gemma3.GeluFeedForward, x: Tensor) -> Tensor:
    """Gemma 3: the gate of the feed-forward layer is that of a Llama."""
    return FeedForward.forward(self, x)


@found_by("model", _AROUND)
@fault_of(gemma3.Gemma3Block, gemma3.Gemma3Block.forward)
def leave_out_norms_after_layers(_: Any, self: Any, h: Tensor, seq: Any) -> Tensor:
    """Gemma 3: the norms after the layers are left out."""
    h = h + self.attn(self.attn_norm(h), seq=seq)
    return h + self.ffn(self.ffn_norm(h))


@found_by("model", f"^logits {_PARTLY}")
@fault_of(llama, llama.rope_of)
def rotate_whole_heads(right: Any, shape: Any) -> Any:
    """GLM-4.5: all numbers of a head are rotated."""
    return replace(right(shape), head_dim=shape.head_width)


@found_by("model", f"^logits {_PARTLY}")
@fault_of(attention, attention.rotate)
def rotate_the_last_part(right: Any, x: Tensor, table: Any) -> Tensor:
    """GLM-4.5: the last numbers of a head are rotated, as in DeepSeek-V3, and not the first."""
    width = table[0].shape[-1]
    if width == x.shape[-1]:
        return right(x, table)
    return torch.cat((x[..., :-width], right(x[..., -width:], table)), -1)


@found_by("generation", f"^tokens {_PARTLY}")
@fault_of(attention.Attention, attention.Attention.forward)
def remember_the_rotated_part_alone(right: Any, self: Any, x: Tensor, *, seq: Any) -> Tensor:
    """GLM-4.5: the cache has zeros in the part of keys that is not rotated."""
    if not isinstance(seq, CachedSequence):
        return right(self, x, seq=seq)
    attend, width = self.attend, self.rope.head_dim

    def attend_to_a_part(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attend(q, F.pad(k[..., :width], (0, k.shape[-1] - width)), v, **options)

    self.attend = attend_to_a_part
    try:
        return right(self, x, seq=seq)
    finally:
        self.attend = attend
