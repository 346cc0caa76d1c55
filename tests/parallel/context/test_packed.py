"""Calls of a variable-length kernel: each visible score in one call, few calls, exact values."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer3d.parallel.context import api, kernels, packed, ring, segment_kernel
from composer3d.parallel.context.ownership import owned_ranges
from composer3d.parallel.context.tiles import NOT_CAUSAL, starts_of
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.verify import segments
from tests.parallel.context.attention import (
    Mask,
    composed,
    inputs,
    random_documents,
    reference,
)
from tests.parallel.context.segments import count_scores
from tests.reference.attention import visible_keys

WINDOWS = (0, 1, 2, 5, 9, 16, 30, NOT_CAUSAL)


# --- geometry ---


def places_of(rank: int, size: int, tokens: int, balanced: bool) -> Tensor:
    """The position in the sequence of each place in a rank's shard."""
    owned = owned_ranges(rank, size, tokens, balanced=balanced)
    return torch.cat([torch.arange(x.position, x.position + x.length) for x in owned])


def check_plan(
    documents: Tensor | None, size: int, tokens: int, window: int, balanced: bool
) -> int:
    """Check that each visible score is computed once, and no other; return the most calls."""
    rows, length = 2, size * tokens
    starts = starts_of(documents)
    visible = visible_keys(
        length, documents_BT=documents, window=max(window, 0), is_causal=window != NOT_CAUSAL
    ).expand(rows, -1, -1)
    for method, rank in product(("ring", "allgather"), range(size)):
        plan = packed.plan_calls(rank, size, rows, tokens, starts, window, method, balanced)
        own = places_of(rank, size, tokens, balanced)
        for source, calls in enumerate(plan.rounds):
            keys = torch.arange(length)
            if method == "ring":
                keys = places_of(source, size, tokens, balanced)
            counts = torch.zeros(rows, tokens, len(keys), dtype=torch.int64)
            for call in calls:
                counts += count_scores(plan, call, rows, tokens, len(keys))
            assert torch.equal(counts, visible[:, own][:, :, keys].long()), (method, rank, source)
            if size == 1 or (window <= 0 and method == "ring"):
                assert len(calls) <= 1
            elif window <= 0:
                assert len(calls) <= 2


@settings(max_examples=150, derandomize=True, database=None)
@given(
    size=st.integers(1, 4),
    half=st.integers(1, 6),
    window=st.sampled_from(WINDOWS),
    balanced=st.booleans(),
    data=st.data(),
)
def test_each_visible_score_is_in_one_call(
    size: int, half: int, window: int, balanced: bool, data: st.DataObject
) -> None:
    tokens = 2 * half
    documents = None
    if data.draw(st.booleans()):
        ends = data.draw(
            st.lists(st.integers(0, 3), min_size=2 * size * tokens, max_size=2 * size * tokens)
        )
        is_end = torch.tensor(ends).view(2, size * tokens) == 0
        documents = is_end.cumsum(1)
    check_plan(documents, size, tokens, window, balanced)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("window", [0, 40, NOT_CAUSAL])
def test_documents_need_one_call_a_round(window: int, balanced: bool) -> None:
    documents = random_documents(512, 0.05)
    starts = starts_of(documents)
    assert starts is not None
    assert min(map(len, starts)) > 10
    for size, method in product((1, 2, 4), ("ring", "allgather")):
        counts = [
            len(calls)
            for rank in range(size)
            for calls in packed.plan_calls(
                rank, size, 2, 512 // size, starts, window, method, balanced
            ).rounds
        ]
        if size == 1 or (method == "ring" and window <= 0):
            assert max(counts) == 1
        # With a window: the tokens of a document that is in both chunks, and each row's edge.
        assert max(counts) <= (2 if window <= 0 else 4)


def test_a_plan_is_made_and_copied_once() -> None:
    documents = random_documents(64, 0.1)
    first, second = (
        packed.plan_calls(0, 1, 2, 64, starts_of(documents.clone()), 0, "ring", True)
        for _ in range(2)
    )
    assert first is second
    assert first.offsets_on(documents) is first.offsets_on(documents)


# --- values ---


def check_values(heads: list[tuple[int, int]], methods: tuple[str, ...]) -> int:
    """Compare with one process, with the kernel's model in place of it; count comparisons."""
    count = 0
    with pool_world(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(segment_kernel.VARIABLE_LENGTH, kernels.Kernel.CPU_FLASH, segments.KERNEL)
        blocks: list[type] = []
        attend = ring._Round.attend

        def watch(self: ring._Round, block: packed.KernelCall, q: Tensor) -> tuple[Tensor, Tensor]:
            blocks.append(type(block))
            return attend(self, block, q)

        patch.setattr(ring._Round, "attend", watch)
        size = dist.get_world_size()
        tokens = 12 * size
        all_documents = [None, *(random_documents(tokens, value) for value in (0.03, 0.2, 1.0))]
        masks = [Mask(*values) for values in product(all_documents, (0, 1, 7, 30))]
        masks += [Mask(documents, 0, causal=False) for documents in all_documents[1:]]
        for (query_heads, kv_heads), method in product(heads, methods):
            whole = inputs(query_heads, kv_heads, tokens)
            for mask, balanced in product(masks[1:], (True, False)):
                blocks.clear()
                results = composed(*whole, mask, method=method, balanced=balanced)
                uses_calls = mask.documents is not None or mask.window < tokens
                expected_block = packed.KernelCall if uses_calls else ring.Tile
                assert set(blocks) <= {expected_block}
                assert blocks or not uses_calls
                for actual, expected in zip(results, reference(*whole, mask), strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
                count += 1
    return count


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_are_those_of_one_process(pool: Pool, size: int) -> None:
    methods = ("ring", "allgather", "ulysses") if size > 1 else ("ring",)
    arguments = {"heads": [(2 * size, size)], "methods": methods}
    for count in pool.run(check_values, arguments, world_size=size):
        assert count == len(methods) * 18 * 2


@settings(max_examples=60, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    window=st.sampled_from([0, 5, 17]),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    contiguous=st.booleans(),
)
def test_one_rank_agrees_with_tiles(
    lengths: list[int], window: int, heads: tuple[int, int], contiguous: bool
) -> None:
    """The values and strides are the same."""
    *whole, grad = inputs(*heads, sum(lengths), batch=2, width=8)
    if not contiguous:  # in the last dim
        whole = [x.mT.contiguous().mT for x in whole]
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    documents = torch.stack((numbers, numbers.flip(0)))
    results = []
    for kernel in (None, segments.KERNEL):
        with pytest.MonkeyPatch.context() as patch:
            if kernel is not None:
                patch.setitem(segment_kernel.VARIABLE_LENGTH, kernels.Kernel.CPU_FLASH, kernel)
            leaves = [x.clone().requires_grad_() for x in whole]
            out = api.ring_attention(*leaves, group=None, documents=documents, window=window)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        assert actual.stride() == expected.stride()
