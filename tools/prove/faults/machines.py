"""Faults of one rank's machine: memory or arithmetic that gives wrong bits, and a slow processor.

``checks.corruption`` and ``checks.stragglers`` see them. Each begins after ``STEPS_BEFORE`` steps,
on the rank ``WRONG_RANK`` alone.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tools.prove.faults.plant import instead_of

WRONG_RANK = 1
STEPS_BEFORE = 7


def flip_a_bit_of_a_replica() -> None:
    """Memory: a bit of one element of a parameter changes on one replica."""
    _after_some_steps(
        lambda stages, optimizer: _flip(
            dict(stages.named_parameters())["blocks.1.ffn.w2.weight"], bit=12
        )
    )


def flip_a_bit_of_a_moment() -> None:
    """Memory: a bit of one element of AdamW's second moments changes on one replica."""

    def wrong(stages: Any, optimizer: Any) -> None:
        parameter = dict(stages.named_parameters())["last.head.weight"]
        # Its least bits are soon rounded away, and then nothing is wrong.
        _flip(optimizer.state[parameter]["exp_avg_sq"], bit=20)

    _after_some_steps(wrong)


def err_in_one_weight_gradient() -> None:
    """Arithmetic: one element of one layer's weight gradient is off by one bit, on one rank."""

    def wrong(stages: Any, optimizer: Any) -> None:
        from composer3d.parallel.local_gradients import units_of

        (module,) = stages.modules
        (parameters,) = [
            held for unit, held in units_of(0, module).items() if unit.name == "blocks.0"
        ]
        # Before FSDP reduces the gradient.
        parameters[-1].register_hook(_off_by_one_bit)

    _after_some_steps(wrong)


def err_in_the_gradient_of_an_activation() -> None:
    """Arithmetic: the gradient of one block's output is off by one bit, on one rank."""

    def wrong(stages: Any, optimizer: Any) -> None:
        (module,) = stages.modules
        module.get_submodule("blocks.1").register_full_backward_pre_hook(
            lambda _, grads: tuple(_off_by_one_bit(grad) for grad in grads)
        )

    _after_some_steps(wrong)


def err_in_the_forward_of_a_layer() -> None:
    """Arithmetic: one element of one layer's output is off by 1, on one rank."""

    def wrong(stages: Any, optimizer: Any) -> None:
        (module,) = stages.modules

        def add_one(layer: Any, arguments: Any, output: Any) -> Any:
            wrong = output.clone()
            wrong.view(-1)[0] += 1
            return wrong

        module.get_submodule("blocks.0.ffn").register_forward_hook(add_one)

    _after_some_steps(wrong)


def take_half_as_long_again() -> None:
    """Processor: one rank takes 1.5 times its own time for each step."""
    if int(os.environ["RANK"]) != WRONG_RANK:
        return
    from composer3d.training.observers.stragglers import StragglerWatch

    @instead_of(StragglerWatch, StragglerWatch.step)
    @contextmanager
    def wrong(right: Any, self: Any, number: int) -> Iterator[None]:
        with right(self, number):
            begun_s = time.perf_counter()
            yield
            if number > STEPS_BEFORE:
                own_s = time.perf_counter() - begun_s - self._blocked_s
                time.sleep(own_s / 2)


def _after_some_steps(wrong: Callable[[Any, Any], None]) -> None:
    """On the wrong rank, call ``wrong`` once, with the stages and the optimizer, after a step."""
    if int(os.environ["RANK"]) != WRONG_RANK:
        return
    from composer3d.training import loop

    steps = 0

    @instead_of(loop, loop.update)
    def update(right: Any, stages: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal steps
        values = right(stages, optimizer, *arguments, **keywords)
        steps += 1
        if steps == STEPS_BEFORE:
            wrong(stages, optimizer)
        return values


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
