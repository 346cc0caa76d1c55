"""Multi-token prediction of DeepSeek-V3 (arXiv 2412.19437, section 2.2), and of GLM-4.5.

After the main model, depth k = 1 ... K predicts the token k + 1 positions further on. It reads the
hidden state of the depth before and the embedding of the token k positions further on. Embedding
and head are those of the main model.

What the published weights need, where the report leaves it open:

- The hidden state that enters depth 1 is that after the main model's last norm, and the one that
  leaves a depth is that after its own norm, which the head and the next depth read: so does the
  ``modeling_deepseek.py`` that is published with DeepSeek-R1-0528-MXFP4-MTP, and so do vLLM (pull
  request 47448) and Megatron-LM.
- The projection reads the embedding first, and then the hidden state (``eh_proj``; vLLM's
  ``deepseek_mtp.py`` and SGLang's ``deepseek_nextn.py``). Equation 21 of the report names them the
  other way round.
- In the files, depth k is layer n_layers + k - 1: ``enorm``, ``hnorm`` and ``eh_proj`` are our
  ``embed_norm``, ``hidden_norm`` and ``project``, and ``shared_head.norm`` is ``last.mtp_norm``.

Shapes: B batch, T sequence, C model width, K depths.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composer3d.models.contract import SequenceInfo
from composer3d.models.deepseek.block import LatentExpertsBlock
from composer3d.models.deepseek.shape import PredictingShape
from composer3d.models.llama.model import Last, RotaryDecoder
from composer3d.models.moe.model import ExpertsBlock


class PredictionBlock(ExpertsBlock):
    """One depth: ``block(h_BTC, seq, next_BTC) -> h_BTC``, a projection and a block with experts.

    ``h_BTC`` is the hidden state of the depth before, and ``next_BTC`` the embedding of the tokens
    that it predicts. A subclass has a block with experts as its second base.

    Args:
        shape: the shape of the whole model.
        others: the other arguments of that block.
    """

    compiled = ("merge", *ExpertsBlock.compiled)

    def __init__(self, shape: PredictingShape, *others: Any) -> None:
        super().__init__(shape, *others)
        self.embed_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.project = nn.Linear(2 * shape.dim, shape.dim, bias=False)

    def merge(self, h_BTC: Tensor, next_BTC: Tensor) -> Tensor:
        """Return the input of the block, (B, T, C)."""
        both = self.embed_norm(next_BTC), self.hidden_norm(h_BTC)
        return self.project(torch.cat(both, dim=-1))

    def forward(  # type: ignore[override]
        self, h_BTC: Tensor, seq: SequenceInfo, next_BTC: Tensor
    ) -> Tensor:
        return super().forward(self.merge(h_BTC, next_BTC), seq)


class LatentPredictionBlock(PredictionBlock, LatentExpertsBlock):
    """A depth with latent attention."""


class PredictingLast(Last):
    """Final norm, head and losses, with those of multi-token prediction (``Decoder``).

    ``embed`` is the embedding of the main model, which the model ties to this name.
    """

    def __init__(self, shape: PredictingShape) -> None:
        super().__init__(shape)
        if shape.mtp_layers:
            self.coefficient = shape.mtp_loss / shape.mtp_layers
            self.embed = nn.Embedding(shape.vocab, shape.dim)
            self.mtp_norm = nn.ModuleList(
                nn.RMSNorm(shape.dim, eps=shape.norm_eps) for _ in range(shape.mtp_layers)
            )

    def forward(
        self,
        h_BTC: Tensor,
        seq: SequenceInfo,
        labels_BT: Tensor,
        ahead_B2KT: Tensor | None = None,
        blocks: Sequence[nn.Module] = (),
    ) -> Tensor:
        h_BTC = self.norm(h_BTC)
        loss = self.head(h_BTC, labels_BT)
        if ahead_B2KT is None:
            return loss
        losses = [loss]
        for depth, (block, norm) in enumerate(zip(blocks, self.mtp_norm, strict=True)):
            tokens_BT, labels_BT = ahead_B2KT[:, :, depth].unbind(1)
            h_BTC = norm(block(h_BTC, seq, self.embed(tokens_BT)))
            losses.append(self.coefficient * self.head(h_BTC, labels_BT))
        return torch.stack(losses)


class PredictingDecoder(RotaryDecoder):
    """A whole model of a ``PredictingShape``. ``RotaryDecoder`` documents its arguments."""

    last_class = PredictingLast

    def __init__(
        self, shape: PredictingShape, *, dtype: torch.dtype = torch.float32, device: str = "meta"
    ) -> None:
        super().__init__(shape, dtype=dtype, device=device)
        self.mtp_layers = shape.mtp_layers
        if shape.mtp_layers:
            self.last.embed.weight = self.first.embed.weight
