"""What ``compose`` returns: this rank's part of the model, and the forward and backward of a step through it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from composer3d.mesh import Mesh
from composer3d.models import Decoder, Seq
from composer3d.parallel import cp, fsdp, pp
from composer3d.parallel.ties import Ties
from composer3d.recipe.schema import ParallelTable


class Stage(nn.Module):
    """Consecutive layers of a model, under the names they have in the whole model.

    ``stage(tokens_BT or h_BTC, positions_BT=..., documents_BT=..., labels_BT=...)`` returns ``h_BTC``, or on the last
    stage the summed loss. ``documents_BT`` are those of whole sequences, the others this rank's part of them.
    """

    def __init__(self, model: Decoder, blocks: range, *, first: bool, last: bool) -> None:
        super().__init__()
        names = list(model.blocks)
        self.first: nn.Module | None = model.first if first else None
        self.blocks = nn.ModuleDict({names[i]: model.blocks[names[i]] for i in blocks})
        self.last: nn.Module | None = model.last if last else None
        self.followers: dict[str, str] = {}  # names of copies of parameters that another stage owns (``ties.part``)

    def forward(
        self, h: Tensor, *, positions_BT: Tensor, documents_BT: Tensor | None = None, labels_BT: Tensor | None = None
    ) -> Tensor:
        # FSDP has moved them to the GPU, where each block would wait for what they say.
        seq = Seq(positions_BT, None if documents_BT is None else documents_BT.cpu())
        if self.first is not None:
            h = self.first(h, seq)
        for block in self.blocks.values():
            h = block(h, seq)
        return h if self.last is None else self.last(h, seq, labels_BT)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What one rank runs in a step: ``micro_batches`` of ``micro_batch`` samples of ``seq_len`` tokens."""

    micro_batch: int
    micro_batches: int
    seq_len: int


@dataclass(eq=False)
class Stages:
    """This rank's stages of a composed model and how a step runs through them."""

    modules: Sequence[Stage]  # first to last; their parameters keep their global names
    mesh: Mesh
    _parallel: ParallelTable
    _step: StepShape
    _pipeline: pp.Pipeline | None
    _ties: Ties

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank's optimizer steps, by global name: a follower is stepped, counted and saved as its owner."""
        for module in self.modules:
            yield from ((name, p) for name, p in module.named_parameters() if name not in module.followers)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss enters the job's: of the ranks that compute it alike, one does."""
        return self.modules[-1].last is not None and self.mesh.at["tp"] == 0

    def own_tokens(self, whole_BT: Tensor) -> Tensor:
        """This rank's part of tokens, labels or positions of whole sequences: (B, T) to (B, T / cp)."""
        group = self.mesh.cp_group
        if group is None:
            return whole_BT
        return cp.shard_sequence(whole_BT, 1, group, balanced=self._parallel.cp_balance == "zigzag")

    def forward_backward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        valid_tokens: float,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Leave in ``.grad`` the gradient of (sum of the job's token losses) / ``valid_tokens``, reduced over the job.

        Args:
            tokens_BT, labels_BT, positions_BT: int64 (micro_batches x micro_batch, T / cp), this rank's rows of the
                step and its part of them (``own_tokens``).
            valid_tokens: labels that count, in the whole step over all ranks.
            documents_BT: int64 (micro_batches x micro_batch, T), documents of the same rows, whole on every cp rank.

        Returns:
            This rank's share of that loss, a float64 scalar: ``Mesh.sum_over_world`` makes the loss of it.

        Collectives: those of the techniques composed; afterwards no gradient is partial.
        """
        self._begin(training=True)
        for module in self.modules:
            module.zero_grad()
        keywords = self._keywords(labels_BT, positions_BT, documents_BT)
        if self._pipeline is not None:
            total = self._pipeline.step(tokens_BT, keywords, valid_tokens)
        else:
            total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
            for index, (tokens, part) in enumerate(self._split(tokens_BT, keywords)):
                last = index == self._step.micro_batches - 1
                fsdp.begin_micro_batch(self.modules[0], self._parallel, last=last)
                loss = self.modules[0](tokens, **part) / valid_tokens
                loss.backward()
                total += loss.detach()
        self.finish_gradients()
        return total if self.counts_loss else torch.zeros_like(total)

    def finish_gradients(self) -> None:
        """Reduce what no technique has: without FSDP, gradients of replicated tp parameters are still partial sums.

        Then followers give theirs to their owners.
        """
        for parameter in chain.from_iterable(module.parameters() for module in self.modules):
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
                parameter.grad = grad.redistribute(placements=whole)
        self._ties.add_gradients()

    @torch.no_grad()
    def evaluate(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        """This rank's share of the summed loss of these rows: as ``forward_backward``, undivided, no gradients."""
        self._begin(training=False)
        micro_batches = list(self._split(tokens_BT, self._keywords(labels_BT, positions_BT, documents_BT)))
        if self._pipeline is not None:
            total = self._pipeline.forward_only(micro_batches)
        else:
            total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
            for tokens, part in micro_batches:
                total += self.modules[0](tokens, **part)
        for module in self.modules:
            fsdp.reshard(module)
        return total if self.counts_loss else torch.zeros_like(total)

    def _begin(self, *, training: bool) -> None:
        """Followers take what their owners have become since (by a step, by a checkpoint), before they are used."""
        for module in self.modules:
            module.train(training)
        self._ties.refresh()

    def _keywords(self, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None) -> dict[str, Tensor]:
        """What this rank's stages are called with, beside their input."""
        given = {"positions_BT": positions_BT, "documents_BT": documents_BT}
        if self.modules[-1].last is not None:
            given["labels_BT"] = labels_BT
        return {name: rows for name, rows in given.items() if rows is not None}

    def _split(self, tokens_BT: Tensor, keywords: dict[str, Tensor]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        every = (rows.split(self._step.micro_batch) for rows in (tokens_BT, *keywords.values()))
        for tokens, *parts in zip(*every, strict=True):
            yield tokens, dict(zip(keywords, parts, strict=True))
