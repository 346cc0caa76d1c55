"""The contract of a model: what every parallelism asks of it, and nothing about any architecture.

A model is a ``Decoder``: single-device code in three parts. Blocks get a ``SequenceInfo`` beside
the residual stream. A ``ShardingPlan`` tells every parallelism, once and as data, how the model
may be cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from composer3d.spec.errors import PlanError

IGNORE_INDEX = -100  # the label of a token that has no part in the loss; torch's own default


class SequenceInfo:
    """The positions and documents of one micro-batch, and values that all blocks share.

    Attributes:
        positions_BT: integers (B, T): the position of each token in its document. It is cut over
            context parallelism and moved to the device as the tokens are.
        documents_BT: integers (B, T) of whole rows, on the CPU: the number of each token's document
            in its row. Attention stays inside a document. None: each row is one document.
        shared: values that a block computes from the positions alone, for the blocks after it (the
            tables of rotary positions, for example). No gradient may flow through them: a block
            that is checkpointed runs again, and then finds them here.
        step_tokens: the number of tokens in the whole optimizer step, over all ranks and
            micro-batches. A layer that adds a mean over tokens to the loss divides by it. Default:
            the tokens of ``positions_BT``.
    """

    def __init__(
        self,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        step_tokens: int | None = None,
    ) -> None:
        self.positions_BT = positions_BT
        self.documents_BT = documents_BT
        self.step_tokens = positions_BT.numel() if step_tokens is None else step_tokens
        self.shared: dict[Any, Any] = {}


def hidden(
    first: nn.Module | None, blocks: nn.ModuleDict, tokens_BT_or_h_BTC: Tensor, seq: SequenceInfo
) -> Tensor:
    """Run ``first``, where there is one, and ``blocks``; returns h_BTC.

    This is the forward pass of a whole model and of a pipeline stage.
    """
    h = tokens_BT_or_h_BTC
    if first is not None:
        h = first(h, seq)
    for block in blocks.values():
        h = block(h, seq)
    return h


class DecoderBlock(nn.Module):
    """A block: ``block(h_BTC, seq) -> h_BTC``. Any module will do; this class adds ``prepare``."""

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        """Fill ``seq.shared``. It runs before each call of a compiled block, outside of its graph.

        All blocks run one compiled graph, which may read ``seq.shared`` and must not fill it: the
        graph of the first block would differ from those after it. ``dtype`` is that of the
        residual stream.
        """


class Decoder(nn.Module):
    """A model as the parallelisms see it. A subclass sets three attributes:

    - ``first(tokens_BT, seq) -> h_BTC``: the embedding of the tokens;
    - ``blocks``: in order, each ``block(h_BTC, seq) -> h_BTC`` (see ``DecoderBlock``);
    - ``last(h_BTC, seq, labels_BT) -> loss``: a scalar in float32 or wider, the sum of the losses
      of all tokens whose label is not ``IGNORE_INDEX``. It is a sum, not a mean: only the whole job
      knows the number of valid tokens by which it must be divided.

    A pipeline stage keeps these three names, so a parameter has one global name on every layout. A
    module that attends across tokens calls its attribute ``attend`` (see ``layers.attention``),
    which context parallelism replaces.
    """

    first: nn.Module
    blocks: nn.ModuleDict
    last: nn.Module

    def hidden(self, tokens_BT: Tensor, seq: SequenceInfo) -> Tensor:
        """Run everything before ``last`` on one process; returns h_BTC."""
        return hidden(self.first, self.blocks, tokens_BT, seq)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        step_tokens: int | None = None,
    ) -> Tensor:
        """Run the whole model on one process; returns the summed loss.

        ``step_tokens``: see ``SequenceInfo``; give it where a step has several calls.
        """
        seq = SequenceInfo(positions_BT, documents_BT, step_tokens)
        return self.last(self.hidden(tokens_BT, seq), seq, labels_BT)

    def logits(self, tokens_BT: Tensor, seq: SequenceInfo) -> Tensor:
        """Run the whole model on one process; returns (B, T, vocabulary).

        Raises PlanError where ``last`` has no method ``logits(h_BTC)``.
        """
        logits_of = getattr(self.last, "logits", None)
        if logits_of is None:
            raise PlanError(
                f"{type(self.last).__name__} has no method `logits(h_BTC)`; give it one"
            )
        return logits_of(self.hidden(tokens_BT, seq))


# How tensor parallelism cuts a module; ``parallel.tensor.styles`` gives the placements of each:
#   embedding  rows of the vocabulary; tokens of other ranks' rows give 0 before the sum
#   norm       not cut; sees this rank's part of the sequence under sequence parallelism
#   router     not cut; chooses experts for this rank's part of the sequence
#   head_norm  not cut; sees this rank's heads only
#   gather     a module without parameters of its own around columns: gathers their input once
#   column     output features cut; must lie below a module of style "gather"
#   kv_column  as column, by key-value heads, which may be fewer than ranks
#   row        input features cut; the outputs of all ranks are summed, so it can have no bias
#   head       rows of the vocabulary cut. It is called with (h_BTC, labels_BT) and returns the
#              summed loss; it has ``weight``, the seam ``cross_entropy(logits_NV, labels_N)`` and,
#              to be computed in parts, ``chunks``, as ``models.layers.head.Head`` has
Style = Literal[
    "embedding", "norm", "router", "head_norm", "gather", "column", "kv_column", "row", "head"
]


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initial values that are all the same."""

    value: float


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """What a model tells every parallelism. Where several globs match a name, the first one counts.

    Attributes:
        tensor: glob over module names -> style. Every parameter must lie in a module named here.
        init: glob over parameter names -> initial values. Every parameter must be named here.
        kv_heads: key-value heads that the modules of style "kv_column" project to.
        attend: glob over the modules that attend across tokens: those with the seam ``attend``.
        experts: glob over the modules that hold experts: those with the seam ``exchange`` (see
            ``layers.moe``). The first dim of each of their parameters is the expert. Tensor
            parallelism does not cut them.
        save: globs over operators, such as "aten.mm.default", whose outputs selective activation
            checkpointing keeps.
    """

    tensor: Mapping[str, Style]
    init: Mapping[str, Normal | Constant]
    kv_heads: int | None = None
    attend: str | None = None
    experts: str | None = None
    save: tuple[str, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Check that the tables fit the whole model, before it is cut.

        Raises:
            PlanError: naming every glob that matches nothing and every parameter no glob covers.
        """
        modules = [name for name, _ in model.named_modules()]
        parameters = [name for name, _ in model.named_parameters()]
        lines = [
            f"the plan's {table} glob {glob!r} matches no {noun} of {type(model).__name__}"
            for table, globs, names, noun in (
                ("tensor", self.tensor, modules, "module"),
                ("init", self.init, parameters, "parameter"),
                ("attend", (self.attend,) if self.attend else (), modules, "module"),
                ("experts", (self.experts,) if self.experts else (), modules, "module"),
            )
            for glob in globs
            if not any(fnmatchcase(name, glob) for name in names)
        ]

        for name in parameters:
            module_name = name.rpartition(".")[0]
            is_cut = self.style_of(module_name) not in (None, "gather")
            if not is_cut and not self.holds_experts(module_name):
                lines.append(f"no glob of the plan's tensor table covers parameter {name!r}")
            if self.init_of(name) is None:
                lines.append(f"no glob of the plan's init table covers parameter {name!r}")

        for name in modules:
            ancestors = name.split(".")
            styles_above = {
                self.style_of(".".join(ancestors[:count])) for count in range(len(ancestors))
            }
            if self.style_of(name) in ("column", "kv_column") and "gather" not in styles_above:
                lines.append(
                    f"the plan cuts {name!r} into columns, so a module above it needs style "
                    '"gather"'
                )

        for name, module in model.named_modules():
            if self.style_of(name) == "row":
                lines += [
                    f'{name!r} has style "row" and a parameter {parameter!r} that is no matrix: '
                    "every tp rank would add it; leave it out, or add it after the module"
                    for parameter, value in module.named_parameters(recurse=False)
                    if value.ndim != 2
                ]

        if "kv_column" in self.tensor.values() and self.kv_heads is None:
            lines.append('the plan has modules of style "kv_column", so it must give kv_heads')

        for name, module in model.named_modules():
            if self.attends(name) and not hasattr(module, "attend"):
                lines.append(f"the plan's attend glob matches {name!r}, which has no seam `attend`")
            if not self.attends(name) and hasattr(module, "attend"):
                lines.append(
                    f"{name!r} has the seam `attend`; the plan's attend glob must match it"
                )
            if self.holds_experts(name) != hasattr(module, "exchange"):
                lines.append(
                    f"{name!r}: the plan's experts glob must match the modules with the seam "
                    "`exchange`, and no others"
                )
        if lines:
            raise PlanError(lines)

    def style_of(self, module: str) -> Style | None:
        """The style of the module of this name, or None where no glob matches."""
        return next(
            (style for glob, style in self.tensor.items() if fnmatchcase(module, glob)), None
        )

    def attends(self, module: str) -> bool:
        """Whether the module of this name attends across tokens."""
        return self.attend is not None and fnmatchcase(module, self.attend)

    def holds_experts(self, module: str) -> bool:
        """Whether the module of this name holds experts."""
        return self.experts is not None and fnmatchcase(module, self.experts)

    def init_of(self, parameter: str) -> Normal | Constant | None:
        """The initial values of the parameter of this name, or None where no glob matches."""
        return next(
            (values for glob, values in self.init.items() if fnmatchcase(parameter, glob)), None
        )
