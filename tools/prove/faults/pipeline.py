"""Faults between the stages of a pipeline, of weight gradients that are put off, and of tied parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from composer3d.parallel import stages
from composer3d.parallel.pipeline import runtime, ties, zero_bubble


def lose_a_gradient_between_stages() -> None:
    """The gradient of one micro-batch does not reach the stage before."""
    receive = _PipelineStageBase._retrieve_recv_grads

    def lose(self: object, chunk: int) -> object:
        grads = receive(self, chunk)
        return tuple(grad * 0 for grad in grads) if chunk == 1 else grads

    _PipelineStageBase._retrieve_recv_grads = lose


def double_the_gradients_between_stages() -> None:
    """Every gradient reaches the stage before twice."""
    receive = _PipelineStageBase._retrieve_recv_grads
    _PipelineStageBase._retrieve_recv_grads = lambda self, chunk: tuple(
        grad * 2 for grad in receive(self, chunk)
    )


def receive_the_activations_of_another_micro_batch() -> None:
    """A stage runs micro-batch 1 on what it received for micro-batch 0."""
    receive, kept = _PipelineStageBase._retrieve_recv_activations, {}

    def stale(self: Any, chunk: int) -> tuple[Tensor, ...]:
        held = receive(self, chunk)
        kept[self.stage_index, chunk] = [
            each.detach().clone() for each in held if isinstance(each, Tensor)
        ]
        with torch.no_grad():
            for each, old in zip(held, kept.get((self.stage_index, 0), ()), strict=False):
                if chunk == 1:
                    each.copy_(old)
        return held

    _PipelineStageBase._retrieve_recv_activations = stale


def take_the_labels_of_the_next_micro_batch() -> None:
    """The last stage scores each micro-batch against the labels of the next one."""
    right = runtime.Pipeline.step

    def wrong(
        self: runtime.Pipeline, tokens: Tensor, keywords: dict[str, Tensor], valid_tokens: float
    ) -> Tensor:
        if "labels_BT" in keywords:
            keywords["labels_BT"] = keywords["labels_BT"].roll(-self._stage_activation.shape[0], 0)
        return right(self, tokens, keywords, valid_tokens)

    runtime.Pipeline.step = wrong


def swap_the_middle_stages() -> None:
    """Of four stages of one layer each, the second and the third run in the other order."""
    right = stages.Stage.__init__

    def wrong(self: stages.Stage, model: object, blocks: range, **more: object) -> None:
        start = {1: 2, 2: 1}.get(blocks.start, blocks.start)
        right(self, model, range(start, start + 1), **more)

    stages.Stage.__init__ = wrong


def evaluate_one_micro_batch_less() -> None:
    """Validation under pp forgets its last micro-batch."""
    right = runtime.Pipeline.forward_only
    runtime.Pipeline.forward_only = lambda self, micro_batches: right(self, micro_batches[:-1])


def _change_put_off_work(change: Callable[[int, zero_bubble.Work], zero_bubble.Work]) -> None:
    """Give each stage ``change(number, work)`` for what is put off of its ``number``-th micro-batch of the run."""
    right = zero_bubble.defer_weight_grads

    def wrong(*arguments: Any) -> Callable[[], zero_bubble.Work]:
        builder, calls = right(*arguments), []

        def build() -> zero_bubble.Work:
            calls.append(builder())
            return change(len(calls) - 1, calls[-1])

        return build

    zero_bubble.defer_weight_grads = wrong


def lose_a_put_off_gradient() -> None:
    """Zero bubble: the weight gradients of the second micro-batch are never computed."""
    _change_put_off_work(lambda number, work: (lambda: None) if number == 1 else work)


def run_a_put_off_gradient_twice() -> None:
    """Zero bubble: the weight gradients of the second micro-batch are added twice."""
    _change_put_off_work(lambda number, work: (lambda: (work(), work())) if number == 1 else work)


def put_off_with_the_input_of_another_micro_batch() -> None:
    """Zero bubble: weight gradients are made of the input of the first micro-batch."""
    right, first = zero_bubble._DeferredLinear.forward, {}

    def wrong(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        out = right(ctx, x, weight, *rest)
        ctx.save_for_backward(first.setdefault(id(weight), x.detach()))
        return out

    zero_bubble._DeferredLinear.forward = staticmethod(wrong)


def lose_the_gradient_of_the_follower() -> None:
    """Tied over stages: what the head adds to the embedding's gradient stays on the last stage."""
    ties.Ties.add_gradients = lambda self: None


def leave_the_follower_behind() -> None:
    """Tied over stages: the head keeps the weights that it began with."""
    right, begun = ties.Ties.refresh, []

    def wrong(self: ties.Ties) -> None:
        if not begun:
            begun.append(right(self))

    ties.Ties.refresh = wrong


def train_the_follower() -> None:
    """Tied over stages: the head is one more parameter, with an optimizer state and a term of the norm."""

    def every(self: stages.Stages) -> Any:
        return (pair for module in self.modules for pair in module.named_parameters())

    stages.Stages.named_parameters = every
