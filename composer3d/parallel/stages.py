"""The stages of a composed model on one rank, and the forward and backward of a step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.models.contract import Decoder, Parts, SequenceInfo
from composer3d.parallel.context.ownership import shard_sequence
from composer3d.parallel.data import fsdp
from composer3d.parallel.executor import Executor
from composer3d.parallel.expert.balance import Balance, RouterLoad
from composer3d.parallel.host_tensor import HostTensor
from composer3d.parallel.pipeline.ties import Ties, local_shard
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh


class Stage(Parts):
    """Consecutive layers of a model, under the names they have in the whole model.

    ``stage(tokens_BT or h_BTC, positions_BT=..., documents=..., labels_BT=..., ahead_B2KT=...)``
    returns ``h_BTC``, or on the last stage what ``Decoder.last`` returns. The arguments are this
    rank's part of each sequence, but for ``documents``, a ``HostTensor`` (B, whole sequence):
    attention asks, on the CPU, for the documents of other ranks' keys.

    Attributes:
        number: of this stage, counted from 0 over the whole pipeline.
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
        is_first: bool,
        is_last: bool,
        number: int = 0,
        step_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.number = number
        self.step_tokens = step_tokens
        names = list(model.blocks)
        self.first = model.first if is_first else None
        self.blocks = nn.ModuleDict({names[i]: model.blocks[names[i]] for i in blocks})
        self.last = model.last if is_last else None
        self.mtp_layers = model.mtp_layers if is_last else 0
        self.tied_copies: dict[str, str] = {}
        self.partial_gradients: frozenset[str] = frozenset()

    def forward(
        self,
        h: Tensor,
        *,
        positions_BT: Tensor,
        documents: HostTensor | None = None,
        labels_BT: Tensor | None = None,
        ahead_B2KT: Tensor | None = None,
    ) -> Tensor:
        documents_BT = None if documents is None else documents.tensor
        seq = SequenceInfo(positions_BT, documents_BT, self.step_tokens)
        h = self.hidden(h, seq)
        return h if self.last is None else self.losses(h, seq, labels_BT, ahead_B2KT)


@dataclass(eq=False)
class Stages:
    """This rank's stages of a composed model.

    Attributes:
        modules: the stages, first to last. Their parameters keep their global names.
        mesh: the mesh of the job.
        executor: runs their micro-batches: ``Pipeline`` if pp is above 1, else ``OneStage``.
        _ties: the exchange of tied parameters; None if no two stages share one.
        balance: what the routers see; None if the model has none.
    """

    modules: Sequence[Stage]
    mesh: Mesh
    executor: Executor
    _parallel: ParallelTable
    _ties: Ties | None
    balance: Balance | None
    has_run: bool = False

    @cached_property
    def _parameters_by_module(self) -> list[list[tuple[str, nn.Parameter]]]:
        """All parameters of each stage, by name. They are looked for once.

        A search takes the host as long as a small kernel runs. The objects stay the same: FSDP
        swaps gathered parameters in and its own back.
        """
        return [list(module.named_parameters()) for module in self.modules]

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
        """Cut out this rank's part of tokens or the like, without a collective: (..., T / cp)."""
        group = self.mesh.cp_group
        if group is None:
            return whole_BT
        return shard_sequence(whole_BT, -1, group, balanced=self._parallel.is_balanced)

    def forward_backward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        valid_tokens: Tensor | int,
        documents_BT: Tensor | None = None,
        ahead_B2KT: Tensor | None = None,
    ) -> Tensor:
        """Compute the gradients of a step into ``.grad``, reduced over the whole job.

        The loss is the sum of the losses of all tokens of the job, divided by ``valid_tokens``;
        with multi-token prediction, the sum of 1 + K such quotients.

        Args:
            tokens_BT, labels_BT, positions_BT: int64 (micro_batches x micro_batch, T / cp): this
                rank's rows of the step, and its part of each (``own_tokens``).
            valid_tokens: the number of valid labels in the whole step, over all ranks: a scalar, or
                (1 + K). A tensor on the mesh's device may still be on its way there: the host does
                not read it.
            documents_BT: int64 (micro_batches x micro_batch, T) on the CPU: the documents of the
                same rows, whole on every cp rank.
            ahead_B2KT: as for ``Decoder.forward``, cut like ``labels_BT``.

        Returns:
            This rank's shares of the quotients, in float64 and of the shape of ``valid_tokens``;
            ``Mesh.sum_over_world`` gives them.

        Collectives: those of the techniques composed, and with experts one all-reduce of what the
        routers have seen. Afterwards no gradient is partial.
        """
        if isinstance(valid_tokens, int):
            valid_tokens = torch.full((), valid_tokens, device=self.mesh.device)
        self.begin(training=True)
        for _, parameter in chain.from_iterable(self._parameters_by_module):
            parameter.grad = None
        if self.balance is not None:
            self.balance.reset()
        keywords = self.keywords(labels_BT, positions_BT, documents_BT, ahead_B2KT)
        total = self.executor.forward_backward(tokens_BT, keywords, valid_tokens)
        self.finish_gradients()
        if self.balance is not None:
            self.balance.collect()
        return total if self.counts_loss else torch.zeros_like(total)

    @property
    def router_loads(self) -> Mapping[str, RouterLoad]:
        """What the routers of the whole model have seen in the last ``forward_backward``, by name.

        The same on all ranks. On a GPU, the host waits for it.
        """
        return {} if self.balance is None else self.balance.loads()

    def move_router_biases(self, is_good: Tensor) -> None:
        """Move the biases of routers by their loads, once a step, if ``is_good``.

        ``is_good`` is a bool scalar on the mesh's device. No collective, and no wait.
        """
        if self.balance is not None:
            self.balance.move_biases(is_good)

    def finish_gradients(self) -> None:
        """Sum the gradients that are parts of a sum over tp, and those of tied parameters.

        Collectives: one all-reduce over tp, if any is partial; messages of tied ones over pp.
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
        if self._ties is not None:
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

        The arguments are those of ``forward_backward``, the collectives those of its forward.

        Returns:
            A float64 scalar. ``Mesh.sum_over_world`` gives the sum of the losses of all tokens, not
            divided by their number.
        """
        self.begin(training=False)
        keywords = self.keywords(labels_BT, positions_BT, documents_BT)
        total = self.executor.forward(tokens_BT, keywords)
        for module in self.modules:
            fsdp.reshard(module)
        return total if self.counts_loss else torch.zeros_like(total)

    def begin(self, *, training: bool) -> None:
        """Prepare a forward. Collective over pp, if parameters are tied over stages."""
        self.has_run = True
        for module in self.modules:
            if module.training != training:  # ``train`` visits all modules
                module.train(training)
        if self._ties is not None:
            # The optimizer or a loaded checkpoint may have changed the owners of tied copies.
            self._ties.refresh()

    def keywords(
        self,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None,
        ahead_B2KT: Tensor | None = None,
    ) -> dict[str, Tensor | HostTensor]:
        """Collect the keyword arguments that this rank's stages are called with.

        Tensors are (rows, ..., T / cp), but ``documents_BT`` is whole. The last stage reads labels.
        """
        keywords: dict[str, Tensor | HostTensor] = {"positions_BT": positions_BT}
        if documents_BT is not None:
            keywords["documents"] = HostTensor(documents_BT)
        if self.modules[-1].last is not None:
            keywords["labels_BT"] = labels_BT
            if ahead_B2KT is not None:
                keywords["ahead_B2KT"] = ahead_B2KT
        return keywords
