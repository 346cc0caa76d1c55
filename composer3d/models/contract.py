"""The contract between models and parallelisms, which is the same for all architectures.

A model is a ``Decoder``: single-device code in three parts. Its blocks take the residual stream and
a ``SequenceInfo``. A ``ShardingPlan`` is a table that tells every parallelism how the model may be
cut. A seam is an attribute of a module that holds a function, which a parallelism may replace.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from composer3d.facts.errors import PlanError
from composer3d.models.table import Constant, Normal, Style

# The label of a token that is left out of the loss: the default of ``F.cross_entropy``.
IGNORE_INDEX = -100


class SequenceInfo:
    """The positions and documents of one micro-batch, and values that all blocks share.

    Attributes:
        positions_BT: integers (B, T): the position of each token in its document. Like the tokens,
            they are cut by context parallelism, and are on the device of the model.
        documents_BT: integers (B, T), best on the CPU: the number of each token's document in its
            row. A document is a run of equal numbers, and its number must not come back later in
            the row. Context parallelism does not cut them. Attention stays inside a document. None:
            each row is one document.
        shared: values that the first block to run computes from the positions alone, for all
            blocks, such as the tables of rotary positions. No gradient may flow through them: a
            block that is checkpointed runs again in backward, and then finds them here.
        kept: what one layer keeps for its own second run. It has an entry for each layer that has
            run: torch would compile a graph that reads it again for each number of entries.
        step_tokens: the number of tokens in the whole optimizer step, over all ranks and
            micro-batches. A layer that adds a mean over tokens to the loss divides by it. Default:
            the number of tokens in ``positions_BT``.
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
        self.kept: dict[Any, Any] = {}


class Parts(nn.Module):
    """The three parts of a model, which ``Decoder`` describes, or those that a stage holds.

    Attributes:
        mtp_layers: how many of the last ``blocks`` are run by ``last``, and not by ``hidden``.
    """

    first: Any
    blocks: nn.ModuleDict
    last: Any
    mtp_layers: int = 0

    def hidden(self, tokens_BT_or_h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        """Run ``first``, if it is there, and then the blocks before ``last``; return h_BTC."""
        h = tokens_BT_or_h_BTC
        if self.first is not None:
            h = self.first(h, seq)
        for block in list(self.blocks.values())[: len(self.blocks) - self.mtp_layers]:
            h = block(h, seq)
        return h

    def losses(
        self,
        h_BTC: Tensor,
        seq: SequenceInfo,
        labels_BT: Tensor | None,
        ahead_B2KT: Tensor | None,
    ) -> Tensor:
        """Run ``last``, with its blocks if there is ``ahead_B2KT``; return what it returns."""
        if ahead_B2KT is None:
            return self.last(h_BTC, seq, labels_BT)
        blocks = list(self.blocks.values())[len(self.blocks) - self.mtp_layers :]
        return self.last(h_BTC, seq, labels_BT, ahead_B2KT, blocks)


class DecoderBlock(nn.Module):
    """A block: ``block(h_BTC, seq) -> h_BTC``.

    Any module with this forward can be a block. It must draw no random numbers, as dropout does: a
    checkpointed block runs again in backward, and would draw others. This class adds ``prepare``.

    Attributes:
        compiled: the methods that ``compile.enabled`` makes graphs of. A block with experts names
            the one before them and the one after: shapes in between depend on the routing.
    """

    compiled: ClassVar[tuple[str, ...]] = ("forward",)

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        """Fill ``seq.shared`` for a residual stream in ``dtype``, before each call of a graph.

        All blocks share the graphs, which may read ``seq.shared`` but must not fill it. Otherwise
        the first block, which fills it, would need a graph of its own.
        """


class Decoder(Parts):
    """A whole model as the parallelisms see it. A subclass sets three attributes:

    - ``first(tokens_BT, seq) -> h_BTC``: the embedding of the tokens;
    - ``blocks``: in order, each ``block(h_BTC, seq) -> h_BTC`` (see ``DecoderBlock``);
    - ``last(h_BTC, seq, labels_BT) -> loss``: a scalar in float32 or wider, the sum of the losses
      of all tokens whose label is not ``IGNORE_INDEX``. It is a sum, not a mean: only the whole job
      knows the number of valid tokens by which it must be divided.

    With multi-token prediction, ``last`` runs the last K = ``mtp_layers`` blocks in training:
    ``last(h_BTC, seq, labels_BT, ahead_B2KT, blocks) -> losses``, a tensor (1 + K): the sum above,
    and that of each depth times its coefficient. ``last.embed`` is the embedding.

    A pipeline stage keeps these three names, so a parameter has one global name on every layout. A
    module that attends across tokens calls its attribute ``attend`` (see ``layers.attention``),
    which context parallelism replaces.
    """

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        ahead_B2KT: Tensor | None = None,
        step_tokens: int | None = None,
    ) -> Tensor:
        """Run the whole model on one process.

        Args:
            tokens_BT: int64 (B, T).
            labels_BT: int64 (B, T): the token to predict at each position, or ``IGNORE_INDEX``.
            ahead_B2KT: int64 (B, 2, K, T): for depth k = 1 ... K of multi-token prediction, the
                token k further on (0 if the document ends before it) and the label k further on
                (``IGNORE_INDEX`` then). None: no such losses.
            positions_BT, documents_BT, step_tokens: as in ``SequenceInfo``.

        Returns:
            What ``last`` returns: the summed loss, or the summed losses, in float32 or wider.
        """
        seq = SequenceInfo(positions_BT, documents_BT, step_tokens)
        return self.losses(self.hidden(tokens_BT, seq), seq, labels_BT, ahead_B2KT)

    def logits(self, tokens_BT: Tensor, seq: SequenceInfo) -> Tensor:
        """Run the whole model on one process; return the logits (B, T, vocabulary).

        Raises PlanError if ``last`` has no method ``logits(h_BTC)``.
        """
        logits_of = getattr(self.last, "logits", None)
        if logits_of is None:
            raise PlanError(
                f"{type(self.last).__name__} has no method `logits(h_BTC)`; give it one"
            )
        return logits_of(self.hidden(tokens_BT, seq))


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """A table that says how a model may be cut and how it is initialised.

    Globs are those of ``fnmatch``, whose ``*`` also matches dots. If several globs match a name,
    the first one counts. ``models.fit`` checks that they fit the model.

    Attributes:
        tensor: globs of module names, each with a style (``models.table``), as in ``{"*.attn":
            "gather", "*.wq": "column", "*.wo": "row"}``. The module of every parameter must have a
            style other than "gather", but for ``experts``, which need none.
        init: globs of parameter names, each with initial values. Every parameter must match one.
        kv_heads: the number of key-value heads that modules of style "kv_column" project to, and
            those of style "kv_column_norm" normalise. It is required if the plan has these styles.
        attend: a glob of the modules that attend across tokens. It must match exactly the modules
            with the seam ``attend``.
        experts: a glob of the modules that hold experts: those with the seam ``exchange`` (see
            ``layers.moe``). The first dim of each of their parameters is the expert. Tensor
            parallelism does not cut them.
        save: globs of operators, such as "aten.mm.default". Selective activation checkpointing
            keeps the outputs of these operators.
        unread: globs of modules whose outputs nothing in a block's backward reads, such as its last
            projection. Selective activation checkpointing does not keep what they return. They
            must be the last modules of a block: when backward runs it again, it stops before them.
            ``models.claims`` checks both.
        float8: globs of modules in ``blocks`` that may multiply in float8 (``precision.matmul``):
            ``torch.nn.Linear`` of style "column", "kv_column" or "row", or ``layers.moe.Experts``.
        first_only_looks_up: whether ``first`` only looks up rows of embeddings: its backward reads
            no parameter, so FSDP does not gather them for it. ``models.claims`` checks it.
    """

    tensor: Mapping[str, Style]
    init: Mapping[str, Normal | Constant]
    kv_heads: int | None = None
    attend: str | None = None
    experts: str | None = None
    save: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    float8: tuple[str, ...] = ()
    first_only_looks_up: bool = False

    def style_of(self, module: str) -> Style | None:
        """Return the style of the module with this name, or None if no glob matches."""
        return next(
            (style for glob, style in self.tensor.items() if fnmatchcase(module, glob)), None
        )

    def is_unread(self, module: str) -> bool:
        """Return whether nothing in backward reads the output of the module with this name."""
        return any(fnmatchcase(module, glob) for glob in self.unread)

    def multiplies_in_float8(self, module: str) -> bool:
        """Return whether the layer with this name may multiply in float8."""
        return any(fnmatchcase(module, glob) for glob in self.float8)

    def attends(self, module: str) -> bool:
        """Return whether the module with this name attends across tokens."""
        return self.attend is not None and fnmatchcase(module, self.attend)

    def holds_experts(self, module: str) -> bool:
        """Whether the module of this name holds experts."""
        return self.experts is not None and fnmatchcase(module, self.experts)

    def init_of(self, parameter: str) -> Normal | Constant | None:
        """Return the initial values of the parameter with this name, or None if no glob matches."""
        return next(
            (values for glob, values in self.init.items() if fnmatchcase(parameter, glob)), None
        )
