"""Deferred weight gradients: backward computes input gradients at once and weight gradients later.

Qi et al. 2023 (zero bubble, arXiv 2401.10241). The previous stage waits for input gradients only. A
schedule computes weight gradients when a rank would otherwise be idle.

torch's own way is to split the backward of a whole stage. It bypasses FSDP's hooks, and gradients
are lost. Here a stage has an ordinary backward, in which the linear layers of its blocks skip their
weight gradients and store the work for later. Norms, embedding and head compute all gradients at
once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.parallel.data import fsdp
from composer3d.parallel.float8 import Float8Linear, input_gradient, output_product

Work = Callable[[], None]


class _DeferredLinear(nn.Linear):
    """A linear layer whose backward appends the work for its weight and bias to ``deferred``.

    The input is (..., K), and the output (..., M).
    """

    def __init__(self, linear: nn.Linear, deferred: list[Work]) -> None:
        # These parameters are replaced by those of ``linear``.
        super().__init__(1, 1, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.deferred = deferred
        self.is_float8 = isinstance(linear, Float8Linear)

    def forward(self, input: Tensor) -> Tensor:
        call = _Call(self.weight, self.bias, self.deferred, is_float8=self.is_float8)
        return _DeferredProduct.apply(_KeptInput.apply(input, self.weight, call), self.weight, call)


class _Call:
    """One call of a layer. Backward comes to the product first, and then to the input.

    The parameters are not in ``save_for_backward``: under activation checkpointing
    ``saved_tensors`` returns a copy, and a gradient accumulated on a copy is lost.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, deferred: list[Work], *, is_float8: bool
    ) -> None:
        self.weight, self.bias, self.deferred = weight, bias, deferred
        self.is_float8 = is_float8
        self.grad: Tensor | None = None  # of the output, once backward has come to the product

    def defer(self, x: Tensor) -> None:
        """Append the work for the weight and the bias, and let go of everything."""
        weight, bias, grad = self.weight, self.bias, self.grad
        assert grad is not None, "the gradient of an output comes before that of its input"
        self.grad = None

        # The input belongs to the graph of its micro-batch. Without ``no_grad``, the products would
        # add to this graph.
        @torch.no_grad()
        def compute_weight_grads() -> None:
            grad_rows = grad.flatten(0, -2)
            # ``weight`` may be a slice of the parameter, or the local part of a DTensor. Only
            # ``backward`` carries the gradient on to the parameter.
            if bias is None or not bias.requires_grad:
                torch.autograd.backward([weight], [grad_rows.T @ x.flatten(0, -2)])
            else:
                weight_grad, bias_grad = grad_rows.T @ x.flatten(0, -2), grad_rows.sum(0)
                torch.autograd.backward([weight, bias], [weight_grad, bias_grad])

        self.deferred.append(compute_weight_grads)


class _KeptInput(torch.autograd.Function):
    """Save the input before the product is computed, and return it.

    Recomputation ends with the last tensor that backward reads. If the product itself saved its
    input, it would do so when it is done, and recomputation would compute the last one for nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: _Call) -> Tensor:
        # With ``weight`` as an input, backward comes here even if nothing before needs a gradient.
        ctx.save_for_backward(x)
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.call.defer(x)
        ctx.call = None
        return grads[0], None, None


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        # As one matrix, so that it is always the product that selective checkpointing saves. For
        # some strides, torch would call a batched product.
        rows = x.flatten(0, -2)
        if call.is_float8:
            out = output_product(rows, weight)
            out = out if call.bias is None else out + call.bias
        else:
            out = F.linear(rows, weight, call.bias)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, ctx.call = ctx.call, None
        (call.grad,) = grads
        if call.is_float8:
            rows = input_gradient(call.grad.flatten(0, -2), call.weight)
            return rows.unflatten(0, call.grad.shape[:-1]), None, None
        return call.grad @ call.weight, None, None


def defer_weight_grads(stage: nn.Module, blocks: nn.Module) -> Callable[[], Work]:
    """Replace the linear layers of ``blocks`` by ``_DeferredLinear``, before anything wraps them.

    Returns:
        The ``dw_builder`` of the stage, for torch's pipeline runtime. It is called after the
        backward of a micro-batch, and returns a function that does the deferred work. Until that
        function is called, the inputs and output gradients of the linear layers stay in memory.
    """
    deferred: list[Work] = []
    # A module may have several names, which must get the same replacement.
    replacements: dict[nn.Module, _DeferredLinear] = {}
    for name, module in list(blocks.named_modules(remove_duplicate=False)):
        # A frozen weight has no gradient to put off.
        if type(module) in (nn.Linear, Float8Linear) and module.weight.requires_grad:
            if module not in replacements:
                replacements[module] = _DeferredLinear(module, deferred)
            blocks.set_submodule(name, replacements[module])

    def take_deferred_work() -> Work:
        works = tuple(deferred)
        deferred.clear()

        def finish() -> None:
            for work in works:
                work()
            fsdp.flush_deferred_grads(stage)

        return finish

    return take_deferred_work
