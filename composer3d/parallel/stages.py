"""What ``compose`` returns: this rank's part of the model, and the forward and backward of a step through it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from composer3d.mesh import Mesh
from composer3d.models import Decoder, Seq
from composer3d.parallel import cp, fsdp, pp, tp
from composer3d.recipe.schema import ParallelTable


class Stage(nn.Module):
    """Consecutive layers of a model, under the names they have in the whole model.

    ``stage(tokens_BT or h_BTC, positions_BT=..., labels_BT=...)`` returns ``h_BTC``, or on the last stage the summed
    loss.
    """

    def __init__(self, model: Decoder, blocks: range, *, first: bool, last: bool) -> None:
        super().__init__()
        names = list(model.blocks)
        self.first: nn.Module | None = model.first if first else None
        self.blocks = nn.ModuleDict({names[i]: model.blocks[names[i]] for i in blocks})
        self.last: nn.Module | None = model.last if last else None

    def forward(self, h: Tensor, *, positions_BT: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        seq = Seq(positions_BT)
        if self.first is not None:
            h = self.first(h, seq)
            h = h.to_local() if isinstance(h, DTensor) else h
        for block in self.blocks.values():
            h = block(h, seq)
        if self.last is None:
            return h
        loss = self.last(h, seq, labels_BT)
        return loss.to_local().clone() if isinstance(loss, DTensor) else loss


class Stages:
    """This rank's stages of a composed model and how a step runs through them.

    Attributes:
        modules: the stages, first to last; their parameters keep their global names.
        mesh: where they are.
    """

    def __init__(
        self,
        modules: Sequence[Stage],
        mesh: Mesh,
        parallel: ParallelTable,
        *,
        micro_batch: int,
        micro_batches: int,
        stream: Tensor,
    ) -> None:
        self.modules = tuple(modules)
        self.mesh = mesh
        self._parallel = parallel
        self._micro_batch = micro_batch
        self._micro_batches = micro_batches
        self._stream = stream
        self._valid_tokens = 1.0
        self._schedule = None
        if mesh.table.pp > 1:
            self._schedule = pp.build_schedule(
                modules,
                mesh,
                name=parallel.schedule,
                micro_batches=micro_batches,
                stream=stream,
                loss_fn=lambda loss, _: loss / self._valid_tokens,
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self.modules:
            yield from module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss enters the job's: of the ranks that compute it alike, one does."""
        return self.mesh.at["pp"] == self.mesh.table.pp - 1 and self.mesh.at["tp"] == 0

    def own_tokens(self, whole_BT: Tensor) -> Tensor:
        """This rank's part of tokens, labels or positions of whole sequences: (B, T) to (B, T / cp)."""
        group = self.mesh.cp_group
        return whole_BT if group is None else cp.shard_sequence(whole_BT, 1, group)

    def forward_backward(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, valid_tokens: float
    ) -> Tensor:
        """Leave in ``.grad`` the gradient of (sum of the job's token losses) / ``valid_tokens``, reduced over the job.

        Args:
            tokens_BT, labels_BT, positions_BT: int64 (micro_batches x micro_batch, T / cp), this rank's rows of the
                step and its part of them (``own_tokens``).
            valid_tokens: labels that count, in the whole step over all ranks.

        Returns:
            This rank's share of that loss, a float64 scalar: ``Mesh.sum_over_world`` makes the loss of it.

        Collectives: those of the techniques composed; afterwards no gradient is partial.
        """
        self._mode(training=True)
        for parameter in self.parameters():
            parameter.grad = None
        self._valid_tokens = valid_tokens
        with tp.loss_context(self.mesh.tp, self._parallel):
            if self._schedule is None:
                total = self._accumulate(tokens_BT, labels_BT, positions_BT)
            else:
                total = self._pipeline(tokens_BT, labels_BT, positions_BT)
        self.finish_gradients()
        return total if self.counts_loss else torch.zeros_like(total)

    def _accumulate(self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor) -> Tensor:
        (module,) = self.modules
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for index, (tokens, keywords) in enumerate(self._split(tokens_BT, labels_BT, positions_BT)):
            fsdp.begin_micro_batch(module, self._parallel, last=index == self._micro_batches - 1)
            loss = module(tokens, **keywords) / self._valid_tokens
            loss.backward()
            total += loss.detach()
        return total

    def _pipeline(self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor) -> Tensor:
        assert self._schedule is not None
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {"positions_BT": positions_BT}
        if self.modules[-1].last is not None:
            # The loss is made inside the stage; the runtime wants a target of its own before it asks loss_fn.
            arguments |= {"labels_BT": labels_BT, "target": labels_BT, "losses": losses}
        inputs = () if self.modules[0].first is None else (tokens_BT,)
        self._schedule.step(*inputs, **arguments, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return total + sum(loss.detach().to(torch.float64) for loss in losses)

    def finish_gradients(self) -> None:
        """Reduce what no technique has: without FSDP, gradients of replicated tp parameters are still partial sums."""
        for parameter in self.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
                parameter.grad = grad.redistribute(placements=whole)

    @torch.no_grad()
    def evaluate(self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """This rank's share of the summed loss of these rows: as ``forward_backward``, undivided, no gradients."""
        self._mode(training=False)
        micro_batches = list(self._split(tokens_BT, labels_BT, positions_BT))
        with tp.loss_context(self.mesh.tp, self._parallel):
            if self._schedule is not None:
                total = pp.forward_only(self.modules, self.mesh, self._stream, micro_batches)
            else:
                total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
                for tokens, keywords in micro_batches:
                    total += self.modules[0](tokens, **keywords)
        for module in self.modules:
            fsdp.reshard(module)
        return total if self.counts_loss else torch.zeros_like(total)

    def _mode(self, *, training: bool) -> None:
        for module in self.modules:
            module.train(training)

    def _split(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        rows = (part.split(self._micro_batch) for part in (tokens_BT, labels_BT, positions_BT))
        for tokens, labels, positions in zip(*rows, strict=True):
            keywords = {"positions_BT": positions}
            if self.modules[-1].last is not None:
                keywords["labels_BT"] = labels
            yield tokens, keywords
