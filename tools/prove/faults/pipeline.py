"""Faults between the stages of a pipeline, in deferred weight gradients, and in tied parameters."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from composer3d.parallel import stages
from composer3d.parallel.pipeline import runtime, ties, zero_bubble
from tools.prove.faults.places import VALIDATION, harms
from tools.prove.faults.plant import fault_by, fault_of, instead_of

_V = "mesh.pp=2 parallel.schedule=ZBVZeroBubble"
_TIED = "mesh.pp=2 model.tied=true"
_ALL_BUT_NORMS = r"all but blocks\.\*\.attn_norm"


@harms("mesh.pp=2", message="only on rank 0 with pp0")
@fault_of(_PipelineStageBase, _PipelineStageBase._retrieve_recv_grads)
def lose_a_gradient_between_stages(receive: Any, self: object, chunk: int) -> object:
    """The gradient of one micro-batch does not reach the previous stage."""
    grads = receive(self, chunk)
    return tuple(grad * 0 for grad in grads) if chunk == 1 else grads


@harms("mesh.pp=2", message="2 times the reference, suspect pp; only on rank 0 with pp0")
@fault_of(_PipelineStageBase, _PipelineStageBase._retrieve_recv_grads)
def double_the_gradients_between_stages(receive: Any, self: object, chunk: int) -> object:
    """The previous stage receives twice every gradient."""
    return tuple(grad * 2 for grad in receive(self, chunk))


@harms("mesh.pp=2")
def receive_the_activations_of_another_micro_batch() -> None:
    """A stage runs micro-batch 1 on the activations that it received for micro-batch 0."""
    first_activations: dict[int, list[Tensor]] = {}

    @instead_of(_PipelineStageBase, _PipelineStageBase._retrieve_recv_activations)
    def wrong(receive: Any, self: Any, chunk: int) -> tuple[Tensor, ...]:
        received = receive(self, chunk)
        if chunk == 0:
            first_activations[self.stage_index] = [
                tensor.detach().clone() for tensor in received if isinstance(tensor, Tensor)
            ]
        if chunk == 1:
            with torch.no_grad():
                # The first stage receives no tensor.
                for tensor, first in zip(
                    received, first_activations.get(self.stage_index, ()), strict=False
                ):
                    tensor.copy_(first)
        return received


@harms("mesh.pp=2")
@fault_of(runtime.Pipeline, runtime.Pipeline.forward_backward)
def take_the_labels_of_the_next_micro_batch(
    right: Any,
    self: runtime.Pipeline,
    tokens: Tensor,
    keywords: dict[str, Tensor],
    divisor: Tensor,
) -> Tensor:
    """The last stage compares each micro-batch with the labels of the next one."""
    if "labels_BT" in keywords:
        keywords["labels_BT"] = keywords["labels_BT"].roll(-self._stage_activation.shape[0], 0)
    return right(self, tokens, keywords, divisor)


@harms("mesh.pp=2 parallel.schedule=Interleaved1F1B model.n_layers=4")
@fault_of(stages.Stage, stages.Stage.__init__)
def swap_the_middle_stages(
    right: Any, self: stages.Stage, model: object, blocks: range, **options: object
) -> None:
    """Of four stages of one layer each, the second and the third are swapped."""
    start = {1: 2, 2: 1}.get(blocks.start, blocks.start)
    right(self, model, range(start, start + 1), **options)


@harms("mesh.pp=2", message=VALIDATION)
def evaluate_one_micro_batch_less() -> None:
    """Validation with pp leaves out its last micro-batch."""
    right = runtime.cut_into_micro_batches
    runtime.cut_into_micro_batches = lambda *arguments: [*right(*arguments)][:-1]


def _change_deferred_work(change: Callable[[int, zero_bubble.Work], zero_bubble.Work]) -> None:
    """Replace the deferred work of each micro-batch of a stage by ``change(number, work)``."""

    @instead_of(zero_bubble, zero_bubble.defer_weight_grads)
    def wrong(right: Any, *arguments: Any) -> Callable[[], zero_bubble.Work]:
        build_right, numbers = right(*arguments), itertools.count()

        def build() -> zero_bubble.Work:
            return change(next(numbers), build_right())

        return build


@harms(_V, message=_ALL_BUT_NORMS)
def lose_a_deferred_gradient() -> None:
    """Zero bubble: the weight gradients of the second micro-batch are never computed."""
    _change_deferred_work(lambda number, work: (lambda: None) if number == 1 else work)


@harms(_V, message=_ALL_BUT_NORMS)
@fault_by(_change_deferred_work)
def run_a_deferred_gradient_twice(number: int, work: zero_bubble.Work) -> zero_bubble.Work:
    """Zero bubble: the weight gradients of the second micro-batch are added twice."""

    def twice() -> None:
        work()
        work()

    return twice if number == 1 else work


@harms(_V, message=_ALL_BUT_NORMS)
def defer_with_the_input_of_another_micro_batch() -> None:
    """Zero bubble: all weight gradients use the input of the first micro-batch."""
    first_inputs: dict[int, Tensor] = {}

    @instead_of(zero_bubble._Call, zero_bubble._Call.defer)
    def wrong(right: Any, self: zero_bubble._Call, x: Tensor) -> None:
        right(self, first_inputs.setdefault(id(self.weight), x.detach()))


@harms(_TIED, message=r"1 of \d+ are off: first\.embed\.weight")
def lose_the_gradient_of_the_tied_copy() -> None:
    """Tied over stages: the head's gradient is not added to the embedding's."""
    ties.Ties.add_gradients = lambda self: None


@harms(_TIED, message="at step 2")
def leave_the_tied_copy_behind() -> None:
    """Tied over stages: the head keeps its initial weights."""
    has_refreshed = False

    @instead_of(ties.Ties, ties.Ties.refresh)
    def wrong(right: Any, self: ties.Ties) -> None:
        nonlocal has_refreshed
        if not has_refreshed:
            has_refreshed = True
            right(self)


@harms(_TIED, message=r"last\.head\.weight at step 1 is missing on rank 1")
@fault_of(stages.Stages, stages.Stages.named_parameters)
def train_the_tied_copy(_: Any, self: stages.Stages) -> Any:
    """Tied over stages: the head is a parameter of its own, for the optimizer and for the norm."""
    return (pair for module in self.modules for pair in module.named_parameters())
