"""The stages of a composed model on one rank, and the forward and backward of a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from composer3d.models.contract import Decoder, SequenceInfo, hidden
from composer3d.parallel import local_gradients
from composer3d.parallel.context.ownership import shard_sequence
from composer3d.parallel.data import fsdp
from composer3d.parallel.expert.balance import Balance, RouterLoad
from composer3d.parallel.pipeline.runtime import Pipeline
from composer3d.parallel.pipeline.ties import Ties, local_shard
from composer3d.parallel.pipeline.trace import Recording
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import cut_by_pipelines


class HostTensor:
    """A tensor (B, T) in host memory, as an input of a module that FSDP shards.

    FSDP moves tensors among a module's inputs to the GPU, and looks for them in lists, tuples and
    dicts, but not in this object. torch's pipelines do look into it (``cut_by_pipelines``): they
    cut the tensor into micro-batches as they cut others.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, rows: slice) -> "HostTensor":
        return HostTensor(self.tensor[rows])


cut_by_pipelines(HostTensor, "tensor")


class Stage(nn.Module):
    """Consecutive layers of a model, under the names they have in the whole model.

    ``stage(tokens_BT or h_BTC, positions_BT=..., documents=..., labels_BT=...)`` returns ``h_BTC``,
    or the summed loss on the last stage. ``documents`` (B, T) covers whole sequences, because
    attention reads it on the CPU; the other arguments are this rank's part of them.

    Attributes:
        tied_copies: maps the name of each parameter that is a copy of another stage's parameter to
            the name of that owner.
        partial_gradients: names of the parameters whose gradients, after backward, are parts of a
            sum over tp.
    """

    def __init__(
        self,
        model: Decoder,
        blocks: range,
        *,
        first: bool,
        last: bool,
        step_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self._step_tokens = step_tokens
        names = list(model.blocks)
        self.first: nn.Module | None = model.first if first else None
        self.blocks = nn.ModuleDict({names[i]: model.blocks[names[i]] for i in blocks})
        self.last: nn.Module | None = model.last if last else None
        self.tied_copies: dict[str, str] = {}
        self.partial_gradients: frozenset[str] = frozenset()

    def forward(
        self,
        h: Tensor,
        *,
        positions_BT: Tensor,
        documents: HostTensor | None = None,
        labels_BT: Tensor | None = None,
    ) -> Tensor:
        documents_BT = None if documents is None else documents.tensor
        seq = SequenceInfo(positions_BT, documents_BT, self._step_tokens)
        h = hidden(self.first, self.blocks, h, seq)
        return h if self.last is None else self.last(h, seq, labels_BT)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The size of a rank's step.

    Attributes:
        micro_batch: samples in a micro-batch.
        micro_batches: micro-batches in a step.
        seq_len: tokens in a whole sample, before it is cut over cp.
    """

    micro_batch: int
    micro_batches: int
    seq_len: int


@dataclass(eq=False)
class Stages:
    """This rank's stages of a composed model.

    Attributes:
        modules: the stages, first to last. Their parameters keep their global names.
        mesh: the mesh of the job.
    """

    modules: Sequence[Stage]
    mesh: Mesh
    _parallel: ParallelTable
    _step: StepShape
    _pipeline: Pipeline | None
    _ties: Ties
    _balance: Balance
    _has_run: bool = False

    @cached_property
    def _parameters_by_module(self) -> list[list[tuple[str, nn.Parameter]]]:
        """All parameters of each stage, by name. To look for them takes as long as a small kernel.

        Their objects stay the same: FSDP swaps gathered parameters in and its own back.
        """
        return [list(module.named_parameters()) for module in self.modules]

    @cached_property
    def _units(self) -> list[list[FSDPModule]]:
        """What FSDP wraps in each stage, the stage itself first; empty without FSDP."""
        return [fsdp.units(module) for module in self.modules]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over this rank's parameters by global name, without copies of tied ones.

        The owner of a copy is updated, counted in the norm and saved in its place.
        """
        for module, parameters in zip(self.modules, self._parameters_by_module, strict=True):
            for name, parameter in parameters:
                if name not in module.tied_copies:
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of ``named_parameters``."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def counts_loss(self) -> bool:
        """Whether this rank adds its loss to the job's.

        All tp ranks have the same loss, so only the first one adds it.
        """
        return self.modules[-1].last is not None and self.mesh.coords["tp"] == 0

    def own_tokens(self, whole_BT: Tensor) -> Tensor:
        """Cut this rank's part out of tokens, labels or positions: (B, T) to (B, T / cp).

        No collective.
        """
        group = self.mesh.cp_group
        if group is None:
            return whole_BT
        balanced = self._parallel.cp_balance == "zigzag"
        return shard_sequence(whole_BT, 1, group, balanced=balanced)

    def forward_backward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        valid_tokens: Tensor | int,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Compute the gradients of a step into ``.grad``, reduced over the whole job.

        The loss is the sum of the losses of all tokens of the job, divided by ``valid_tokens``.

        Args:
            tokens_BT, labels_BT, positions_BT: int64 (micro_batches x micro_batch, T / cp): this
                rank's rows of the step, and its part of each (``own_tokens``).
            valid_tokens: the number of valid labels in the whole step, over all ranks. A scalar on
                the mesh's device may still be on its way there: the host does not read it.
            documents_BT: int64 (micro_batches x micro_batch, T) on the CPU: the documents of the
                same rows, whole on every cp rank.

        Returns:
            This rank's share of the loss, a float64 scalar; ``Mesh.sum_over_world`` gives the loss.

        Collectives: those of the techniques composed, and with experts one all-reduce of what the
        routers have seen. Afterwards no gradient is partial.
        """
        if isinstance(valid_tokens, int):
            valid_tokens = torch.full((), valid_tokens, device=self.mesh.device)
        self._begin(training=True)
        for _, parameter in chain.from_iterable(self._parameters_by_module):
            parameter.grad = None
        self._balance.reset()
        keywords = self._keywords(labels_BT, positions_BT, documents_BT)
        if self._pipeline is not None:
            total = self._pipeline.step(tokens_BT, keywords, valid_tokens)
        else:
            (module,) = self.modules
            total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
            for index, (tokens, inputs) in enumerate(self._micro_batches(tokens_BT, keywords)):
                is_last = index == self._step.micro_batches - 1
                fsdp.begin_micro_batch(self._units[0], self._parallel, last=is_last)
                summed = module(tokens, **inputs)
                loss = summed / valid_tokens.to(summed.dtype)
                loss.backward()
                total += loss.detach()
        self.finish_gradients()
        self._balance.collect()
        return total if self.counts_loss else torch.zeros_like(total)

    def record(self) -> AbstractContextManager[Recording]:
        """Return a context that records the actions of the one ``forward_backward`` inside of it.

        There must be a pipeline. Collective over this rank's pipeline: see ``Pipeline.record``.
        """
        assert self._pipeline is not None
        return self._pipeline.record()

    def around_actions(
        self, context: Callable[[str], AbstractContextManager[object]]
    ) -> AbstractContextManager[None]:
        """Return a context in which ``context`` is entered around each action of the pipeline.

        There must be a pipeline. See ``torch_private.around_pipeline_work``.
        """
        assert self._pipeline is not None
        return self._pipeline.around_actions(context)

    @property
    def router_loads(self) -> Mapping[str, RouterLoad]:
        """What the routers of the whole model have seen in the last ``forward_backward``, by name.

        The same on all ranks. On a GPU, the host waits for it.
        """
        return self._balance.loads()

    def move_router_biases(self, is_good: Tensor) -> None:
        """Move the biases of routers by their loads, once a step, if ``is_good``.

        ``is_good`` is a bool scalar on the mesh's device. No collective, and no wait.
        """
        self._balance.move_biases(is_good)

    def finish_gradients(self) -> None:
        """Sum the gradients that are parts of a sum over tp, and those of tied parameters.

        Collective over tp, one all-reduce for all of them, and over pp.
        """
        partial = [
            local_shard(parameter.grad)
            for module, parameters in zip(self.modules, self._parameters_by_module, strict=True)
            for name, parameter in parameters
            if name in module.partial_gradients and parameter.grad is not None
        ]
        if partial:
            assert self.mesh.tp is not None
            # With ``memory.cpu_offload`` gradients are in host memory.
            packed = torch.cat([grad.flatten() for grad in partial]).to(self.mesh.device)
            dist.all_reduce(packed, group=self.mesh.tp.get_group())
            sums = packed.split([grad.numel() for grad in partial])
            for grad, whole in zip(partial, sums, strict=True):
                grad.copy_(whole.view_as(grad))
        self._ties.add_gradients()

    @torch.no_grad()
    def evaluate(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Compute this rank's share of the summed loss, without gradients.

        The arguments are those of ``forward_backward``. The collectives are those of the composed
        techniques in forward.

        Returns:
            A float64 scalar. ``Mesh.sum_over_world`` gives the sum of the losses of all tokens, not
            divided by their number.
        """
        self._begin(training=False)
        keywords = self._keywords(labels_BT, positions_BT, documents_BT)
        micro_batches = list(self._micro_batches(tokens_BT, keywords))
        if self._pipeline is not None:
            total = self._pipeline.forward_only(micro_batches)
        else:
            (module,) = self.modules
            total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
            for tokens, inputs in micro_batches:
                total += module(tokens, **inputs)
        for module in self.modules:
            fsdp.reshard(module)
        return total if self.counts_loss else torch.zeros_like(total)

    def take_local_gradients(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        *,
        see: local_gradients.SeeGradient,
    ) -> Tensor:
        """Give the gradients of one micro-batch on this rank to ``see``, before any is reduced.

        A gradient is dropped as soon as ``see`` returns. Afterwards ``.grad``, what routers have
        seen, and all that the next step reads are as before. There must be FSDP.

        Args:
            tokens_BT, labels_BT, positions_BT, documents_BT: as for ``forward_backward``, of one
                micro-batch. The loss is divided by its tokens.
            see: see ``local_gradients.taken``. It is called on the device's stream, in backward.

        Returns:
            This rank's share of the divided loss, a float64 scalar.

        Collectives: those of the techniques composed for one micro-batch, without any sum of
        gradients over data-parallel ranks.
        """
        if not self._has_run:
            # FSDP makes the whole parameters in its first forward.
            self.evaluate(tokens_BT, labels_BT, positions_BT, documents_BT)
        self._begin(training=True)
        keywords = self._keywords(labels_BT, positions_BT, documents_BT)
        divisor = labels_BT.numel() * self.mesh.sizes.cp
        if self._pipeline is not None:
            stages = self._pipeline.modules
        else:
            stages = dict(enumerate(self.modules))
        has_pipeline = self._pipeline is not None
        taken = local_gradients.taken(stages, see, keeps_gathered=has_pipeline)
        with self._balance.undisturbed(), taken:
            if self._pipeline is not None:
                total = self._pipeline.one_micro_batch(tokens_BT, keywords, divisor)
            else:
                (module,) = self.modules
                loss = module(tokens_BT, **keywords) / divisor
                loss.backward()
                total = loss.detach().to(torch.float64)
        return total if self.counts_loss else torch.zeros_like(total)

    def _begin(self, *, training: bool) -> None:
        self._has_run = True
        for module in self.modules:
            if module.training != training:  # ``train`` visits all modules
                module.train(training)
        # The optimizer or a loaded checkpoint may have changed the owners of tied copies.
        self._ties.refresh()

    def _keywords(
        self, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None
    ) -> dict[str, Tensor | HostTensor]:
        """Collect the keyword arguments that this rank's stages are called with."""
        keywords: dict[str, Tensor | HostTensor] = {"positions_BT": positions_BT}
        if documents_BT is not None:
            keywords["documents"] = HostTensor(documents_BT)
        if self.modules[-1].last is not None:
            keywords["labels_BT"] = labels_BT
        return keywords

    def _micro_batches(
        self, tokens_BT: Tensor, keywords: Mapping[str, Tensor | HostTensor]
    ) -> Iterator[tuple[Tensor, dict[str, Tensor | HostTensor]]]:
        """Cut the rows of a step into micro-batches."""
        n_rows = self._step.micro_batch
        for begin in range(0, tokens_BT.shape[0], n_rows):
            rows = slice(begin, begin + n_rows)
            yield tokens_BT[rows], {name: value[rows] for name, value in keywords.items()}
