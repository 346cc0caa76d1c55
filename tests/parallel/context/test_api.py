"""Context parallelism: exact values, the documented number of bytes, and refused arguments."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import PRESETS
from composer3d.parallel.checkpointing import save_policy
from composer3d.parallel.context import api, kernels, ownership
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from tests.parallel.context.attention import (
    HEADS,
    ON_GPU,
    Mask,
    composed,
    group_of_all,
    inputs,
    random,
    random_documents,
    reference,
    relative_error,
)
from tests.parallel.context.recorder import record, recording

METHODS = {"ring": HEADS, "allgather": HEADS, "ulysses": [(16, 16), (16, 8), (8, 8)]}


# --- values ---


def check_values(method: str, heads: list[tuple[int, int]]) -> int:
    """Compare with one process, for all kinds of masks, and lengths that divide or do not.

    Returns the number of comparisons.
    """
    count = 0
    with pool_world():
        size = dist.get_world_size()
        probabilities, windows = (0.03, 0.2, 1.0), (0, 1, 7, 30)
        if size > 2:
            probabilities, windows = (0.2,), (0, 7)
        for (query_heads, kv_heads), tokens in product(heads, (12 * size, 12 * size - 5)):
            whole = inputs(query_heads, kv_heads, tokens)
            all_documents = [None]
            all_documents += [random_documents(tokens, value) for value in probabilities]
            masks = [Mask(*values) for values in product(all_documents, windows)]
            sinks_H = torch.linspace(-2, 3, query_heads, dtype=torch.float64)
            masks += [mask._replace(sinks_H=sinks_H) for mask in (masks[0], masks[-1])]
            if tokens % (2 * size) == 0:
                masks += [Mask(documents, 0, causal=False) for documents in all_documents]
            for mask, balanced in product(masks, (True, False)):
                results = composed(*whole, mask, method=method, balanced=balanced)
                for actual, expected in zip(results, reference(*whole, mask), strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
                count += 1
    return count


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_attention_agrees_with_one_process(pool: Pool, size: int, method: str) -> None:
    heads = METHODS[method]
    if (method, size) == ("ulysses", 3):
        heads = [(6, 3)]
    elif size == 4:
        heads = heads[1:2]  # two query heads share a key head
    for count in pool.run(check_values, {"method": method, "heads": heads}, world_size=size):
        assert count >= len(heads) * 2 * 4 * 2


def check_random_documents(examples: int) -> None:
    """Attention over packed documents is causal attention of each document alone."""
    with pool_world():
        size = dist.get_world_size()

        @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
        @given(
            lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
            method=st.sampled_from(["ring", "allgather", "ulysses"]),
            balanced=st.booleans(),
            window=st.sampled_from([0, 0, 5]),
        )
        def check(lengths: list[int], method: str, balanced: bool, window: int) -> None:
            whole = inputs(2 * size, size, sum(lengths), batch=1, width=4)
            documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
            packed = composed(*whole, Mask(documents, window), method=method, balanced=balanced)
            results_by_document = zip(*(x.split(lengths, 2) for x in packed), strict=True)
            for number, results in enumerate(results_by_document):
                document_inputs = [x.split(lengths, 2)[number] for x in whole]
                alone = reference(*document_inputs, Mask(window=window))
                for actual, expected in zip(results, alone, strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

        check()


def test_random_documents_attend_as_each_alone(pool: Pool) -> None:
    pool.run(check_random_documents, {"examples": 100}, world_size=2)
    pool.run(check_random_documents, {"examples": 30}, world_size=3)


class Errors(NamedTuple):
    """Relative errors against float64: of all ranks, and of one block that has all tokens."""

    ranks: float
    one_block: float


def measure_errors() -> dict[tuple[str, torch.dtype], list[Errors]]:
    """Measure the errors of the output and of the three gradients, by method and dtype."""
    with pool_world():
        errors = {}
        for method, dtype in product(METHODS, (torch.float32, torch.bfloat16)):
            heads = (8, 8) if method == "ulysses" else (4, 2)
            whole = inputs(*heads, 32 * dist.get_world_size())
            q, k, v, grad = (x.to(dtype) for x in whole)
            out, lse = kernels.attend_block(q, k, v, causal=True)
            block_grads = kernels.attend_block_backward(grad, q, k, v, out, lse, causal=True)
            over_ranks = composed(q, k, v, grad, dtype=dtype, method=method)
            exact = reference(*(x.double() for x in (q, k, v, grad)))
            errors[method, dtype] = [
                Errors(relative_error(a, expected), relative_error(b, expected))
                for a, b, expected in zip(over_ranks, (out, *block_grads), exact, strict=True)
            ]
        return errors


def test_error_does_not_grow_with_ranks(pool: Pool) -> None:
    errors = pool.run(measure_errors, {}, world_size=8)[0]
    for (_, dtype), errors_of_dtype in errors.items():
        for error in errors_of_dtype:
            assert torch.finfo(dtype).eps / 16 < error.ranks < 1.3 * error.one_block, errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_one_rank_with_documents_and_a_window(device: str, dtype: torch.dtype) -> None:
    """The last dimension of the inputs is not contiguous."""
    whole = [x.to(dtype) for x in inputs(4, 2, 600, width=16)]
    mask = Mask(random_documents(600, 0.01), 280)
    expected = reference(*(x.double() for x in whole), mask)
    q, k, v, grad = (x.to(device).mT.contiguous().mT.requires_grad_() for x in whole)
    out = api.ring_attention(q, k, v, group=None, documents=mask.documents, window=mask.window)
    results = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    for actual, wanted in zip(results, expected, strict=True):
        assert relative_error(actual.detach().cpu(), wanted) < 8 * torch.finfo(dtype).eps


def test_an_output_without_a_gradient_gives_zero_gradients() -> None:
    class NoGradient(torch.autograd.Function):
        """Returns its input; backward returns no gradient."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    q, k, v, _ = (x.requires_grad_() for x in inputs(4, 2, 8))
    out = api.ring_attention(q, k, v, group=None, window=3)
    for grad in torch.autograd.grad(NoGradient.apply(out).sum(), (q, k, v)):
        assert not grad.any()


def check_one_rank() -> None:
    """A group of one runs torch's attention and sends nothing; torch accepts the operators."""
    with pool_world():
        group, whole = group_of_all(), inputs(4, 2, 6)
        with recording() as recorder:
            torch.testing.assert_close(composed(*whole), reference(*whole), rtol=1e-12, atol=1e-12)
        assert "forward" not in recorder.kinds()
        assert recorder.sent_bytes() == 0

        q, k, v = (x.clone().requires_grad_() for x in whole[:3])
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        sinks_H = torch.randn(4, dtype=torch.float64, requires_grad=True)
        for documents, window in product((None, random_documents(6, 0.3)), (0, 3)):
            sinks = sinks_H if window else None
            operator = torch.ops.composer3d.ring_attention.default
            backward = torch.ops.composer3d.ring_attention_backward.default
            options = (window, "ring", True, "")  # method, balanced, group
            torch.library.opcheck(
                operator, (q, k, v, sinks, documents, *options), test_utils=checks
            )
            out, lse = operator(q, k, v, sinks, documents, *options)
            assert not lse.requires_grad
            saved = [x.detach() for x in (q, k, v, out, lse)]
            arguments = (whole[3], saved, documents, *options)
            torch.library.opcheck(backward, arguments, test_utils=(checks[0], checks[2]))
        torch.library.opcheck(
            torch.ops.composer3d.all_to_all.default, (q[None], group.group_name), test_utils=checks
        )


def test_a_group_of_one_rank(pool: Pool) -> None:
    pool.run(check_one_rank, {}, world_size=1)


# --- bytes sent ---


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_the_formula(pool: Pool, size: int) -> None:
    q_elements = 2 * 16 * 8 * 4  # B, H, n, D
    kv_elements = 2 * 2 * 8 * 8 * 4  # keys and values; B, K, n, D
    for records_of_rank in pool.run(record, {"methods": list(METHODS)}, world_size=size):
        for (method, _, dtype), records in records_of_rank.items():
            forward, backward = (recorder.sent_bytes() for recorder in records)
            q, kv = q_elements * dtype.itemsize, kv_elements * dtype.itemsize
            dkv = max(kv, 4 * kv_elements)  # in float32 or wider
            if method == "ulysses":
                assert forward * size == backward * size == (size - 1) * (2 * q + kv)
            else:
                assert forward == (size - 1) * kv
                assert backward == (size - 1) * (kv + dkv)


# --- activation checkpointing ---


class Work(NamedTuple):
    """Forward blocks for each backward block, and the number of messages."""

    forwards_per_backward: float
    messages: int


def count_work(method: str) -> dict[str, Work]:
    """Count the work of forward and backward in each mode of activation checkpointing.

    The gradients must be equal bit for bit.
    """
    with pool_world():
        group = group_of_all()
        leaves = [
            ownership.shard_sequence(x, 2, group).requires_grad_()
            for x in inputs(4, 2, 8 * group.size())[:3]
        ]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = api.ring_attention(
                q.sin(), k.sin(), v.sin(), group=group, method=method, window=9
            )
            return out.square()

        def run_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return checkpoint(run, q, k, v, use_reentrant=False)

        def run_selective(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            policy = save_policy(sharding_plan(PRESETS["debug-tiny"]).save)
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(run, q, k, v, use_reentrant=False, context_fn=contexts)

        modes: dict[str, Callable[..., Tensor]] = {
            "none": run,
            "full": run_full,
            "selective": run_selective,
        }
        counts, expected = {}, None
        for mode, run_mode in modes.items():
            with recording() as recorder:
                grads = torch.autograd.grad(run_mode(*leaves).sum(), leaves)
            if expected is None:
                expected = grads
            for actual, wanted in zip(grads, expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
            kinds = recorder.kinds()
            ratio = kinds.count("forward") / kinds.count("backward")
            counts[mode] = Work(ratio, kinds.count("post"))
        return counts


@pytest.mark.parametrize(
    ("method", "forward", "backward"), [("ring", 1, 2), ("allgather", 1, 2), ("ulysses", 2, 2)]
)
def test_saved_attention_does_not_run_again(
    pool: Pool, method: str, forward: int, backward: int
) -> None:
    for counts in pool.run(count_work, {"method": method}, world_size=2):
        once = Work(1, forward + backward)
        again = Work(2, 2 * forward + backward)
        assert counts == {"none": once, "full": again, "selective": once}


# --- refused arguments ---


def test_shapes_beyond_which_kernels_would_read_are_refused() -> None:
    """torch's kernel checks no shapes: it returned unrelated numbers, or ended the process."""
    q, k, v, _ = inputs(4, 2, 8)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    wrong = {
        "heads that do not divide": (random(2, 5, 8, 8, seed=1), k, v),
        "more key-value heads than heads": (q[:, :1], k, v),
        "keys without values": (q, k, v[:, :, :4]),
        "fewer keys than queries": (q, k[:, :, :4], v[:, :, :4]),
        "another width": (q, k[..., :4], v[..., :4]),
        "other rows": (q, k[:1], v[:1]),
    }
    for name, tensors in wrong.items():
        with pytest.raises(
            ValueError, match=r"they must be \(B, H, n, D\), \(B, K, n, D\) and \(B, K, n, D\)"
        ):
            # Printed only if it is not refused.
            print(name, api.ring_attention(*tensors, group=None, documents=ids).shape)
    for causal, window in ((True, -1), (False, 3)):
        with pytest.raises(
            ValueError,
            match="it must be 0, or with causal = True the number of keys that a query sees",
        ):
            api.ring_attention(q, k, v, group=None, documents=ids, causal=causal, window=window)


def check_refusals() -> None:
    with pool_world():
        group = group_of_all()
        q, k, v, _ = (ownership.shard_sequence(x, 2, group) for x in inputs(6, 3, 16))
        with pytest.raises(
            ValueError,
            match="ulysses cuts heads over 2 ranks, which must divide the 6 query heads and the "
            "3 key-value heads",
        ):
            api.ring_attention(q, k, v, group=group, method="ulysses")
        with pytest.raises(
            ValueError, match="each rank holds 7 tokens; balanced order needs an even number"
        ):
            api.ring_attention(*(x[:, :, :7] for x in (q, k, v)), group=group)
        with pytest.raises(ValueError, match=r"documents are \(1, 16\); they must be \(2, 16\)"):
            api.ring_attention(q, k, v, group=group, documents=torch.zeros(1, 16))
        with pytest.raises(
            ValueError, match='method = "rings" must be one of ring, allgather, ulysses'
        ):
            api.ring_attention(q, k, v, group=group, method="rings")


def test_arguments_that_do_not_fit_are_refused(pool: Pool) -> None:
    pool.run(check_refusals, {}, world_size=2)
