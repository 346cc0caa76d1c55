"""Faults of one rank's machine: memory or arithmetic that gives wrong bits, and a slow processor.

``checks.corruption`` and ``checks.stragglers`` see them. Each begins after ``STEPS_BEFORE`` steps,
on the rank ``WRONG_RANK`` alone.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from composer3d.parallel.local_gradients import units_of
from composer3d.training import loop
from composer3d.training.observers.stragglers import StragglerWatch
from tools.prove.faults.places import Place, found_by
from tools.prove.faults.plant import fault_by, instead_of

WRONG_RANK = 1
STEPS_BEFORE = 7


def _corrupted(what: str) -> Place:
    """The first comparison after step 7, which is that after step 10, must find the fault."""
    return found_by("corruption", rf"^step 10: corruption: {what} on rank 1 \(")


def _after_some_steps(wrong: Callable[[Any, Any], None]) -> None:
    """On the wrong rank, call ``wrong`` once, with the stages and the optimizer, after a step."""
    if int(os.environ["RANK"]) != WRONG_RANK:
        return
    steps = 0

    @instead_of(loop, loop.update)
    def update(right: Any, stages: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal steps
        values = right(stages, optimizer, *arguments, **keywords)
        steps += 1
        if steps == STEPS_BEFORE:
            wrong(stages, optimizer)
        return values


@_corrupted("other parameters")
@fault_by(_after_some_steps)
def flip_a_bit_of_a_replica(stages: Any, optimizer: Any) -> None:
    """Memory: a bit of one element of a parameter changes on one replica."""
    _flip(dict(stages.named_parameters())["blocks.1.ffn.w2.weight"], bit=12)


@found_by("corruption", r"step 10: corruption: another optimizer state on rank 1 \(")
@fault_by(_after_some_steps)
def flip_a_bit_of_a_moment(stages: Any, optimizer: Any) -> None:
    """Memory: a bit of one element of AdamW's second moments changes on one replica."""
    parameter = dict(stages.named_parameters())["last.head.weight"]
    # Its least bits are soon rounded away, and then nothing is wrong.
    _flip(optimizer.state[parameter]["exp_avg_sq"], bit=20)


@_corrupted(r"another gradient of blocks\.0, .*")
@fault_by(_after_some_steps)
def err_in_one_weight_gradient(stages: Any, optimizer: Any) -> None:
    """Arithmetic: one element of one layer's weight gradient is off by one bit, on one rank."""
    (module,) = stages.modules
    (parameters,) = [held for unit, held in units_of(0, module).items() if unit.name == "blocks.0"]
    # Before FSDP reduces the gradient.
    parameters[-1].register_hook(_off_by_one_bit)


@_corrupted(r"another gradient of blocks\.1, .*")
@fault_by(_after_some_steps)
def err_in_the_gradient_of_an_activation(stages: Any, optimizer: Any) -> None:
    """Arithmetic: the gradient of one block's output is off by one bit, on one rank."""
    (module,) = stages.modules
    module.get_submodule("blocks.1").register_full_backward_pre_hook(
        lambda _, grads: tuple(_off_by_one_bit(grad) for grad in grads)
    )


@_corrupted("another loss of a micro-batch .*")
@fault_by(_after_some_steps)
def err_in_the_forward_of_a_layer(stages: Any, optimizer: Any) -> None:
    """Arithmetic: one element of one layer's output is off by 1, on one rank."""
    (module,) = stages.modules

    def add_one(layer: Any, arguments: Any, output: Any) -> Any:
        wrong = output.clone()
        wrong.view(-1)[0] += 1
        return wrong

    module.get_submodule("blocks.0.ffn").register_forward_hook(add_one)


@found_by("stragglers", r"(?m)^step (1\d|2[0-7]): straggler: rank 1 \(")
def take_half_as_long_again() -> None:
    """Processor: one rank takes 1.5 times its own time for each step."""
    if int(os.environ["RANK"]) != WRONG_RANK:
        return

    @instead_of(StragglerWatch, StragglerWatch.step)
    @contextmanager
    def wrong(right: Any, self: Any, number: int) -> Iterator[None]:
        with right(self, number):
            begun_s = time.perf_counter()
            yield
            if number > STEPS_BEFORE:
                own_s = time.perf_counter() - begun_s - self._blocked_s
                time.sleep(own_s / 2)


def _flip(tensor: Any, *, bit: int = 0) -> None:
    """Flip a bit of one element of a float32 tensor, or of this rank's part, in place."""
    import torch
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.view(-1).view(torch.int32)
    bits[len(bits) // 2] ^= 1 << bit


def _off_by_one_bit(gradient: Any) -> Any:
    wrong = gradient.clone()
    _flip(wrong)
    return wrong
