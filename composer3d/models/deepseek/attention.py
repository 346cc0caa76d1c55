"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

Keys and values of all heads are projected up from one narrow latent of each token. A key also has
a rotated part, which all heads share. So a cache needs the latent and this part alone, ranks of
tensor parallelism gather latents in place of the stream, and those of context parallelism may send
them in place of keys and values.

Shapes are in the names: B batch, T sequence, C model width, H heads, D width of a query and a key,
V width of a value, R width of the latent and the rotated part together. S is the number of keys
where it differs from T.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models.contract import SequenceInfo
from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.layers.attention import Attend, attend_sdpa
from composer3d.models.layers.latents import AttendLatents
from composer3d.models.layers.rope import Rope, Table, rotate, shared_rope_table

# The published models have this epsilon here, whatever ``rms_norm_eps`` of their config.json is.
_LATENT_NORM_EPS = 1e-6

# remember(latents_BTR, *, seq) -> latents_BSR: the latents of all tokens so far.
Remember = Callable[..., Tensor]


class LatentAttention(nn.Module):
    """Multi-head latent attention: ``attention(x_BTC, seq=seq)`` returns (B, T, C).

    The projections down to latents and their norms run, under sequence parallelism, on this rank's
    part of the sequence. ``queries`` and ``keys`` gather what these return.

    Args:
        shape: the sizes of the model.
        rope: the rotary positions of the ``rope_dim`` last numbers of queries and keys.

    Attributes:
        attend: the seam of context parallelism. Values are padded with zeros to the width of keys,
            because kernels and messages have one width; the output is cut.
        attend_latents: the seam of context parallelism that sends latents (``send_latents``). None:
            ``attend`` gets keys and values.
        remember: the seam of generation: what keeps latents; None: the call has all tokens.
    """

    def __init__(self, shape: DeepseekShape, rope: Rope) -> None:
        super().__init__()
        self.rope, self.shape = rope, shape
        dim, query_rank = shape.dim, shape.query_rank
        self.wq_a: nn.Module = nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        if query_rank:
            self.wq_a = nn.Linear(dim, query_rank, bias=False)
            self.q_norm = nn.RMSNorm(query_rank, eps=_LATENT_NORM_EPS)
        self.queries = _Queries(shape)
        self.wkv_a = nn.Linear(dim, shape.kv_rank + shape.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(shape.kv_rank, eps=_LATENT_NORM_EPS)
        self.keys = _KeysAndValues(shape)
        self.wo = nn.Linear(shape.n_heads * shape.value_dim, dim, bias=False)
        self.attend: Attend = attend_sdpa
        self.attend_latents: AttendLatents | None = None
        self.remember: Remember | None = None

    def send_latents(self, attend: AttendLatents) -> None:
        """See ``AttendsToLatents``."""
        self.attend_latents = attend
        self.keys.wkv_b = _Weight(self.keys.wkv_b)

    def forward(self, x_BTC: Tensor, *, seq: SequenceInfo) -> Tensor:
        shape = self.shape
        table = shared_rope_table(self.rope, seq, x_BTC.dtype)
        q_BTHD = self.queries(self.q_norm(self.wq_a(x_BTC)), table)
        if shape.query_scale != 1:
            q_BTHD = q_BTHD * shape.query_scale
        latent, rotated = self.wkv_a(x_BTC).split((shape.kv_rank, shape.rope_dim), -1)
        latents_BTR = torch.cat((self.kv_norm(latent), rotated), -1)
        if self.attend_latents is None:
            k_BSHD, v_BSHV = self.keys(latents_BTR, table, self.remember, seq)
            v_BSHD = F.pad(v_BSHV, (0, shape.head_width - shape.value_dim))
            out_BHTD = self.attend(
                q_BTHD.transpose(1, 2),
                k_BSHD.transpose(1, 2),
                v_BSHD.transpose(1, 2),
                seq=seq,
                window=0,
            )
        else:
            latents_BTR, weight = self.keys(latents_BTR, table, self.remember, seq)
            out_BHTD = self.attend_latents(q_BTHD.transpose(1, 2), latents_BTR, weight, seq=seq)
        return self.wo(out_BHTD[..., : shape.value_dim].transpose(1, 2).flatten(2))


class _Queries(nn.Module):
    """Project queries up from their latent, or from the stream, and rotate their last part."""

    def __init__(self, shape: DeepseekShape) -> None:
        super().__init__()
        self.widths = (shape.plain_dim, shape.rope_dim)
        self.wq = nn.Linear(
            shape.query_rank or shape.dim, shape.n_heads * shape.head_width, bias=False
        )

    def forward(self, latent_BTR: Tensor, table: Table) -> Tensor:
        q_BTHD = self.wq(latent_BTR).unflatten(-1, (-1, sum(self.widths)))
        plain, rotated = q_BTHD.split(self.widths, -1)
        return torch.cat((plain, rotate(_halves(rotated), table)), -1)


class _KeysAndValues(nn.Module):
    """Project keys and values up from their latent, and give all heads the rotated part.

    Where ``wkv_b`` is a ``_Weight``, return latents with their rotated parts, and the weight.
    """

    def __init__(self, shape: DeepseekShape) -> None:
        super().__init__()
        self.latent_widths = (shape.kv_rank, shape.rope_dim)
        self.widths = (shape.plain_dim, shape.value_dim)
        self.wkv_b = nn.Linear(shape.kv_rank, shape.n_heads * sum(self.widths), bias=False)

    def forward(
        self, latents_BTR: Tensor, table: Table, remember: Remember | None, seq: SequenceInfo
    ) -> tuple[Tensor, Tensor]:
        latent_BTR, rotated_BTR = latents_BTR.split(self.latent_widths, -1)
        rotated_BTR = rotate(_halves(rotated_BTR[:, :, None]), table)[:, :, 0]
        if isinstance(self.wkv_b, _Weight):
            return torch.cat((latent_BTR, rotated_BTR), -1), self.wkv_b(latent_BTR)
        if remember is not None:
            latents_BSR = remember(torch.cat((latent_BTR, rotated_BTR), -1), seq=seq)
            latent_BTR, rotated_BTR = latents_BSR.split(self.latent_widths, -1)
        both = self.wkv_b(latent_BTR).unflatten(-1, (-1, sum(self.widths)))
        plain, v_BSHV = both.split(self.widths, -1)
        of_all_heads = rotated_BTR[:, :, None].expand(-1, -1, plain.shape[2], -1)
        return torch.cat((plain, of_all_heads), -1), v_BSHV


class _Weight(nn.Linear):
    """A linear layer that returns its weight: under tensor parallelism, this rank's rows."""

    def __init__(self, linear: nn.Linear) -> None:
        # This parameter is replaced by that of ``linear``.
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.weight


def _halves(x_BTHD: Tensor) -> Tensor:
    """Put the first numbers of all pairs before the second ones, as ``rotate`` pairs them.

    DeepSeek's pairs are neighbours. Queries and keys keep the new order: their products are the
    same in any.
    """
    return x_BTHD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
