"""Mixture of experts on one process: routing, the losses, and the rows of experts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from composer3d.dryrun.memory import MemoryLedger
from composer3d.models.contract import SequenceInfo
from composer3d.models.layers import moe
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.layers.moe import (
    Experts,
    Groups,
    MoE,
    Router,
    expert_ffn,
    weighted_sum,
)
from tests.parallel.test_checkpointing import OperatorCounter

DIM, EXPERTS, FFN = 8, 6, 5


def positions(rows: int, tokens: int) -> SequenceInfo:
    return SequenceInfo(torch.arange(tokens).repeat(rows, 1))


def make_router(**settings: Any) -> Router:
    generator = torch.Generator().manual_seed(1)
    router = Router(dim=DIM, experts=EXPERTS, per_token=2, **settings).double()
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, DIM, generator=generator))
    return router


def make_moe(shared: bool = False, **settings: Any) -> MoE:
    generator = torch.Generator().manual_seed(2)
    layer = MoE(
        make_router(**settings),
        Experts(EXPERTS, DIM, FFN),
        FeedForward(DIM, FFN) if shared else None,
    ).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "router" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def inputs(rows: int = 2, tokens: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, tokens, DIM, generator=generator, dtype=torch.float64)


def test_groups_and_bias_choose_and_do_not_weigh() -> None:
    """A bias decides which experts are chosen; the weights are the scores without it."""
    plain = make_router(scores="sigmoid", renormalise=False)
    biased = make_router(scores="sigmoid", renormalise=False, has_bias=True, groups=3)
    assert biased.bias is not None
    biased.bias.data = torch.tensor([0.0, 0.0, 9.0, 9.0, 0.0, 0.0], dtype=torch.float64)
    x_BTC = inputs()
    routing = biased(x_BTC, positions(2, 7))
    assert routing.experts_NK.sort().values.unique(dim=0).tolist() == [[2, 3]]
    scores_NE = (x_BTC.flatten(0, 1) @ plain.weight.T).sigmoid()
    torch.testing.assert_close(routing.weights_NK, scores_NE.gather(1, routing.experts_NK))


def test_a_token_chooses_the_groups_with_the_best_two_scores() -> None:
    """A group with one very good expert loses against one with two good ones."""
    router = make_router(scores="sigmoid", has_bias=True, groups=2)
    assert router.bias is not None
    router.weight.data.zero_()
    router.bias.data = torch.tensor([0.5, 0.0, 0.0, 0.3, 0.3, 0.0], dtype=torch.float64)
    routing = router(inputs(1, 1), positions(1, 1))
    assert routing.experts_NK.sort().values.tolist() == [[3, 4]]


def run_backward(router: Router, x_BTC: Tensor, seq: SequenceInfo) -> Tensor:
    """Run forward, and backward of nothing but the router's own losses; return the sums."""
    routing = router(x_BTC, seq)
    (routing.weights_NK * 0).sum().backward()
    assert router.statistics.sums is not None
    return router.statistics.sums


def test_losses_of_micro_batches_add_up() -> None:
    """Their values and gradients do not depend on how many rows go through at once."""
    x_BTC = inputs(4, 6)
    results = []
    for rows in (4, 2, 1):
        router = make_router(balance_loss=0.5, z_loss=0.1)
        for first in range(0, 4, rows):
            seq = positions(rows, 6)
            seq.step_tokens = 24
            sums = run_backward(router, x_BTC[first : first + rows], seq)
        assert router.weight.grad is not None
        assert router.weight.grad.norm() > 1e-3
        results.append((sums, router.weight.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-14)


def test_balance_loss_is_one_at_best() -> None:
    router = make_router(balance_loss=1.0)
    router.weight.data.zero_()  # all probabilities are equal
    sums = run_backward(router, inputs(), positions(2, 7))
    assert sums[EXPERTS].item() == pytest.approx(1.0, rel=1e-12)
    assert sums[EXPERTS + 2].item() == pytest.approx(14 * math.log(EXPERTS), rel=1e-12)


def test_z_loss_is_a_mean_over_tokens() -> None:
    router = make_router(z_loss=0.25)
    x_BTC = inputs()
    sums = run_backward(router, x_BTC, positions(2, 7))
    logits = x_BTC.flatten(0, 1) @ router.weight.T
    expected = 0.25 * logits.logsumexp(-1).square().mean()
    assert sums[EXPERTS + 1].item() == pytest.approx(expected.item(), rel=1e-12)
    (expected_grad,) = torch.autograd.grad(expected, router.weight)
    torch.testing.assert_close(router.weight.grad, expected_grad, rtol=1e-12, atol=1e-14)


def test_statistics_count_each_token_once() -> None:
    """Not in an evaluation, and not again when a checkpointed block runs twice."""
    from torch.utils.checkpoint import checkpoint

    layer, x_BTC, seq = make_moe(), inputs().requires_grad_(), positions(2, 7)
    checkpoint(layer, x_BTC, seq, use_reentrant=False).sum().backward()
    with torch.no_grad():
        layer(x_BTC, seq)
    layer.eval()
    layer(x_BTC, seq).sum().backward()
    assert layer.router.statistics.sums is not None
    assert layer.router.statistics.sums[:EXPERTS].sum().item() == 2 * 14


@pytest.mark.parametrize("trained", [[], ["experts.w2"], ["router.weight"]])
def test_statistics_do_not_depend_on_what_trains(trained: list[str]) -> None:
    """Where the input has no gradient and the router is frozen, no backward passes the router."""
    from torch.utils.checkpoint import checkpoint

    layer = make_moe()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    out = checkpoint(layer, inputs(), positions(2, 7), use_reentrant=False)
    if trained:
        out.sum().backward()
    sums = layer.router.statistics.sums
    assert sums is not None
    assert sums[:EXPERTS].sum().item() == 2 * 14


def test_biases_move_towards_experts_with_few_tokens() -> None:
    router = make_router(has_bias=True, bias_rate=0.25)
    move = router.bias_move(torch.tensor([4.0, 2.0, 3.0, 3.0, 6.0, 0.0]))
    assert move.tolist() == [-0.25, 0.25, 0.0, 0.0, -0.25, 0.25]


@pytest.mark.parametrize("tokens", [[3, 0, 4, 1, 0, 2], [0, 0, 0, 0, 0, 0], [0, 10, 0, 0, 0, 0]])
def test_grouped_kernel_agrees_with_the_loop(tokens: list[int]) -> None:
    """An expert without rows has a gradient of zeros, not None, with either."""
    generator = torch.Generator().manual_seed(4)
    sizes = [(sum(tokens), 16), (EXPERTS, 8, 16), (EXPERTS, 16, 8), (EXPERTS, 8, 16)]
    values = [torch.randn(size, generator=generator) for size in sizes]
    results = []
    for dtype in (torch.float32, torch.float64):
        rows, w1, w2, w3 = (value.to(dtype, copy=True).requires_grad_() for value in values)
        assert moe._has_grouped_kernel(rows.element_size(), *w1.shape[1:]) == (
            dtype == torch.float32
        )
        out = expert_ffn(rows, Groups(torch.tensor(tokens)), w1, w2, w3)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        grads = [tensor.grad for tensor in (rows, w1, w2, w3)]
        for expert, count in enumerate(tokens):
            for grad in grads[1:]:
                assert grad is not None
                assert (grad[expert].norm() > 0) == (count > 0)
        results.append([out.float(), *(grad.float() for grad in grads if grad is not None)])
    for grouped, looped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, rtol=1e-4, atol=1e-3)


class Temporaries(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger(offload=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.ledger.see(leaf)
        return out


def test_outputs_of_experts_are_added_up_without_float32_of_all_of_them() -> None:
    """The sum and its gradients are those of the formula, in 2 x N x C numbers beside them."""
    tokens, per_token, dim = 60, 8, 32
    generator = torch.Generator().manual_seed(4)
    for dtype in (torch.bfloat16, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        out_NKC, weights_NK, grad_NC = (
            torch.randn(size, generator=generator, dtype=torch.float64)
            for size in ((tokens, per_token, dim), (tokens, per_token), (tokens, dim))
        )
        leaves = (out_NKC.to(dtype).requires_grad_(), weights_NK.to(wide).requires_grad_())
        grad_NC = grad_NC.to(wide)
        expected = (leaves[0] * leaves[1][..., None]).sum(1)
        expected_gradients = torch.autograd.grad(expected, leaves, grad_NC)

        with Temporaries() as temporaries:
            found = weighted_sum(*leaves)
            gradients = torch.autograd.grad(found, leaves, grad_NC)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients, expected_gradients)
        # Operators return views of the leaves as well.
        others = sum(x.nbytes for x in (*leaves, *gradients))
        assert temporaries.ledger.lap()[-1] - others <= 2 * tokens * dim * wide.itemsize


def test_recomputation_leaves_out_the_sum_of_the_outputs() -> None:
    """It is the last of a block, and backward reads its operands alone."""
    leaves = (torch.randn(6, 3, 4).requires_grad_(), torch.randn(6, 3).requires_grad_())

    def outputs_and_sum(out_NKC: Tensor, weights_NK: Tensor) -> Tensor:
        return weighted_sum(out_NKC.sin(), weights_NK)

    with OperatorCounter() as counter:
        checkpoint(outputs_and_sum, *leaves, use_reentrant=False).sum().backward()
    assert (counter.counts["sin"], counter.counts["addcmul_"]) == (2, 3)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_trains_gets_a_gradient_of_the_sum(frozen: int) -> None:
    leaves = [torch.randn(6, 3, 4).requires_grad_(), torch.randn(6, 3).requires_grad_()]
    leaves[frozen].requires_grad_(False)
    with OperatorCounter() as counter:
        weighted_sum(leaves[0], leaves[1]).sum().backward()
    assert leaves[frozen].grad is None
    assert leaves[1 - frozen].grad is not None
    # Each of three experts costs a product; for weights, also a sum.
    assert (counter.counts["mul"], counter.counts["sum"]) == (3, 1 + 3 * (frozen == 0))
