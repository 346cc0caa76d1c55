"""Context parallelism: a ring computes what one process computes, sends what its docstring says, and is run once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

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
from composer3d.parallel.context import api, kernels, ownership, ring, tiles
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from tests.parallel.context.attention import (
    HEADS,
    ON_GPU,
    PLAIN,
    Mask,
    documents_of,
    error,
    inputs,
    random,
    reference,
)


def group_of_all() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mask: Mask = PLAIN,
    *,
    dtype: torch.dtype = torch.float64,
    method: str = "ring",
    balanced: bool = True,
) -> list[Tensor]:
    """The same from this rank's shards of the four, gathered again."""
    group, length, (documents, window, causal) = group_of_all(), q.shape[2], mask
    parts = [
        ownership.shard_sequence(x, 2, group, balanced=balanced, fill=0).to(dtype)
        for x in (q, k, v, grad)
    ]
    leaves, grad = [x.requires_grad_() for x in parts[:3]], parts[3]
    if documents is not None:  # what is appended belongs to the last document
        documents = documents[:, torch.arange(grad.shape[2] * group.size()).clamp(max=length - 1)]
    kind = {
        "causal": causal,
        "document_ids": documents,
        "window": window,
        "method": method,
        "balanced": balanced,
    }
    out = api.ring_attention(*leaves, group=group, **kind)
    assert out.dtype == dtype
    got = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return [
        ownership.unshard_sequence(part, 2, group, balanced=balanced, length=length) for part in got
    ]


class Recorder:
    """What a rank does, in order: ("post", bytes) and ("wait",) a message; a block, with how many queries and keys."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def kinds(self) -> list[str]:
        return [event[0] for event in self.events]

    def sent(self) -> int:
        return sum(event[1] for event in self.events if event[0] == "post")

    def collective(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Of what leaves a rank: an all-gather sends its input to the others, the other two send them their parts."""

        def run(out: Tensor, x: Tensor, *, group: dist.ProcessGroup) -> Any:
            others = group.size() - 1
            self.events.append(
                (
                    "post",
                    others * x.nbytes
                    if name == "all_gather"
                    else others * x.nbytes // group.size(),
                )
            )
            return real(out, x, group=group)

        return run

    def batch(self, ops: list[dist.P2POp]) -> list[Any]:
        self.events.append(("post", sum(op.tensor.nbytes for op in ops if op.op is dist.isend)))
        works = REAL_BATCH(ops)
        return [works[0], Waited(works[1], self)]

    def block(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            q, k = arguments[:2] if name == "forward" else arguments[1:3]
            self.events.append((name, keywords["causal"], q.shape[2], k.shape[2]))
            return function(*arguments, **keywords)

        return run


class Waited:
    def __init__(self, work: Any, recorder: Recorder) -> None:
        self.work, self.recorder = work, recorder

    def wait(self) -> None:
        self.recorder.events.append(("wait",))
        self.work.wait()


REAL_BATCH = dist.batch_isend_irecv


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", recorder.batch)
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            real = getattr(dist, f"{name}_single")
            patch.setattr(dist, f"{name}_single", recorder.collective(name, real))
        patch.setattr(kernels, "attend_block", recorder.block("forward", kernels.attend_block))
        patch.setattr(
            kernels,
            "attend_block_backward",
            recorder.block("backward", kernels.attend_block_backward),
        )
        yield recorder


def check_values(method: str, heads: list[tuple[int, int]]) -> int:
    """Every kind of mask over lengths that divide into chunks and that do not; how many were compared."""
    count = 0
    with pool_world():
        size = dist.get_world_size()
        for (query_heads, kv_heads), tokens in product(heads, (12 * size, 12 * size - 5)):
            whole = inputs(query_heads, kv_heads, tokens)
            often, windows = ((0.03, 0.2, 1.0), (0, 1, 7, 30)) if size < 4 else ((0.2,), (0, 7))
            documents = [None, *(documents_of(tokens, each) for each in often)]
            kinds = [Mask(*each) for each in product(documents, windows)]
            kinds += [Mask(each, 0, False) for each in documents if tokens % (2 * size) == 0]
            for kind, balanced in product(kinds, (True, False)):
                got = composed(*whole, kind, method=method, balanced=balanced)
                for mine, expected in zip(got, reference(*whole, kind), strict=True):
                    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
                count += 1
    return count


def check_order(balanced: bool) -> list[int]:
    with pool_world():
        size, group = dist.get_world_size(), group_of_all()
        positions_BT = torch.arange(4 * size).repeat(2, 1)
        mine = ownership.shard_sequence(positions_BT, 1, group, balanced=balanced)
        assert torch.equal(mine[0], mine[1])
        for dim, whole in (
            (1, positions_BT),
            (2, random(2, 3, 4 * size - 3, 5, seed=0)),
            (0, positions_BT.T),
        ):
            part = ownership.shard_sequence(whole, dim, group, balanced=balanced, fill=7)
            assert torch.equal(
                ownership.unshard_sequence(
                    part, dim, group, balanced=balanced, length=whole.shape[dim]
                ),
                whole,
            )
            filled = ownership.unshard_sequence(part, dim, group, balanced=balanced)
            assert (
                filled.narrow(dim, whole.shape[dim], filled.shape[dim] - whole.shape[dim]) == 7
            ).all()
        return mine[0].tolist()


def record(method: str, balanced: bool) -> dict[torch.dtype, tuple[Recorder, Recorder]]:
    """Forward and backward of H = 16, K = 8, D = 4, 8 local tokens, a batch of 2."""
    with pool_world():
        size, group = dist.get_world_size(), group_of_all()
        records = {}
        for dtype in (torch.float64, torch.bfloat16):
            whole = inputs(16, 8, 8 * size, width=4)
            q, k, v, grad = (
                ownership.shard_sequence(x, 2, group, balanced=balanced).to(dtype) for x in whole
            )
            leaves = [x.requires_grad_() for x in (q, k, v)]
            with recording() as forward:
                out = api.ring_attention(*leaves, group=group, method=method, balanced=balanced)
            with recording() as backward:
                out.backward(grad)
            records[dtype] = forward, backward
        return records


def measure_errors(
    method: str, heads: int, kv_heads: int
) -> dict[torch.dtype, list[tuple[float, float]]]:
    """Errors against float64 of ranks and of one block that holds all: of the output and the three gradients."""
    with pool_world():
        errors = {}
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v, grad = narrow = [
                x.to(dtype) for x in inputs(heads, kv_heads, 32 * dist.get_world_size())
            ]
            out, lse = kernels.attend_block(q, k, v, causal=True)
            one = [out, *kernels.attend_block_backward(grad, q, k, v, out, lse, causal=True)]
            mine, exact = (
                composed(*narrow, dtype=dtype, method=method),
                reference(*(x.double() for x in narrow)),
            )
            errors[dtype] = [
                (error(a, c), error(b, c)) for a, b, c in zip(mine, one, exact, strict=True)
            ]
        return errors


def check_checkpointed(method: str) -> dict[str, tuple[float, int]]:
    """How often the causal block is computed forward, and what is sent: without, under full, selective checkpoint."""
    with pool_world():
        group = group_of_all()
        leaves = [
            ownership.shard_sequence(x, 2, group).requires_grad_()
            for x in inputs(4, 2, 8 * group.size())[:3]
        ]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return api.ring_attention(
                q.sin(), k.sin(), v.sin(), group=group, method=method, window=9
            ).square()

        def selective(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            policy = save_policy(sharding_plan(PRESETS["debug-tiny"]).save)
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(run, q, k, v, use_reentrant=False, context_fn=contexts)

        ways = {
            "none": run,
            "full": lambda *x: checkpoint(run, *x, use_reentrant=False),
            "selective": selective,
        }
        counts, expected = {}, None
        for name, way in ways.items():
            with recording() as recorder:
                grads = torch.autograd.grad(way(*leaves).sum(), leaves)
            expected = expected or grads
            for got, wanted in zip(grads, expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
            blocks = [
                sum(event[0] == way for event in recorder.events) for way in ("forward", "backward")
            ]
            counts[name] = blocks[0] / blocks[1], recorder.kinds().count("post")
        return counts


def check_banded() -> None:
    """The kernel that makes all scores of a block gets a few queries at a time, whatever the mask."""
    with pool_world(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "kernel_of", lambda q: "plain scores")
        patch.setattr(tiles, "BAND", 5)
        size = dist.get_world_size()
        whole = inputs(4, 2, 24 * size)
        for method, documents, window in product(
            ("ring", "allgather"), (None, documents_of(24 * size, 0.1)), (0, 3, 9)
        ):
            for kind in (Mask(documents, window), Mask(documents, 0, False)):
                with recording() as recorder:
                    got = composed(*whole, kind, method=method)
                torch.testing.assert_close(got, reference(*whole, kind), rtol=1e-12, atol=1e-12)
                blocks = [
                    event[2] for event in recorder.events if event[0] in ("forward", "backward")
                ]
                assert (
                    max(blocks, default=0) <= 5
                )  # without a mask, one rank runs torch's attention


def check_alone() -> None:
    """A group of one: torch's attention, nothing sent; and the operators are what torch asks of operators."""
    with pool_world():
        group, whole = group_of_all(), inputs(4, 2, 6)
        with recording() as recorder:
            torch.testing.assert_close(composed(*whole), reference(*whole), rtol=1e-12, atol=1e-12)
        assert "forward" not in recorder.kinds()
        assert recorder.sent() == 0
        assert ownership.shard_sequence(torch.ones(5), 0, group).shape == (
            5,
        )  # one rank needs no two chunks
        q, k, v = (x.clone().requires_grad_() for x in whole[:3])
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        for documents, window in product((None, documents_of(6, 0.3)), (0, 3)):
            operator = torch.ops.composer3d.ring_attention.default
            backward = torch.ops.composer3d.ring_attention_backward.default
            kind = (window, "ring zigzag", "")
            torch.library.opcheck(operator, (q, k, v, documents, *kind), test_utils=checks)
            out, lse = operator(q, k, v, documents, *kind)
            assert not lse.requires_grad
            saved = (whole[3], [x.detach() for x in (q, k, v, out, lse)], documents, *kind)
            torch.library.opcheck(backward, saved, test_utils=(checks[0], checks[2]))
        torch.library.opcheck(
            torch.ops.composer3d.all_to_all.default, (q[None], group.group_name), test_utils=checks
        )


def check_refusals() -> None:
    with pool_world():
        group = group_of_all()
        q, k, v, _ = (ownership.shard_sequence(x, 2, group) for x in inputs(6, 3, 16))
        with pytest.raises(
            ValueError,
            match="ulysses cuts heads over 2 ranks, which must divide the 6 query heads and the 3 key-value heads",
        ):
            api.ring_attention(q, k, v, group=group, method="ulysses")
        with pytest.raises(
            ValueError, match="each rank holds 7 tokens; balanced order needs an even number"
        ):
            api.ring_attention(*(x[:, :, :7] for x in (q, k, v)), group=group)
        with pytest.raises(ValueError, match=r"document_ids are \(1, 16\); they must be \(2, 16\)"):
            api.ring_attention(q, k, v, group=group, document_ids=torch.zeros(1, 16))
        with pytest.raises(
            ValueError, match='method = "rings" must be "ring", "allgather" or "ulysses"'
        ):
            api.ring_attention(q, k, v, group=group, method="rings")
        with pytest.raises(
            ValueError, match="5 tokens cannot be cut into 4 equal chunks; give a value for `fill`"
        ):
            ownership.shard_sequence(torch.ones(5), 0, group)
        with pytest.raises(ValueError, match="5 tokens cannot be cut into 2 equal chunks"):
            ownership.shard_sequence(torch.ones(5), 0, group, balanced=False)
        with pytest.raises(ValueError, match="5 tokens a rank are not two chunks"):
            ownership.unshard_sequence(torch.ones(5), 0, group)
        arrived = ring._send_to_next(q, group)
        arrived()
        with pytest.raises(AssertionError, match="received twice"):
            arrived()


METHODS = {"ring": HEADS, "allgather": HEADS, "ulysses": [(16, 16), (16, 8), (8, 8)]}


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_attention_is_that_of_the_whole(pool: Pool, size: int, method: str) -> None:
    heads = [(6, 3)] if (method, size) == ("ulysses", 3) else METHODS[method]
    for count in pool.run(check_values, {"method": method, "heads": heads}, world_size=size):
        assert count >= len(heads) * 2 * 4 * 2


@pytest.mark.parametrize(
    ("balanced", "held"),
    [
        (True, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_order_comes_back(pool: Pool, balanced: bool, held: list[list[int]]) -> None:
    assert pool.run(check_order, {"balanced": balanced}, world_size=3) == held


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_formula(pool: Pool, size: int, method: str) -> None:
    q_elements, kv_elements = (
        2 * 16 * 8 * 4,
        2 * 2 * 8 * 8 * 4,
    )  # B, H, n, D; keys and values of K heads
    for balanced in (True, False):
        for rank in pool.run(record, {"method": method, "balanced": balanced}, world_size=size):
            for dtype, (forward, backward) in rank.items():
                q, kv, dkv = (x * dtype.itemsize for x in (q_elements, kv_elements, kv_elements))
                dkv = max(dkv, 4 * kv_elements)
                if method == "ulysses":
                    assert (
                        forward.sent() * size == backward.sent() * size == (size - 1) * (2 * q + kv)
                    )
                else:
                    assert forward.sent() == (size - 1) * kv
                    assert backward.sent() == (size - 1) * (kv + dkv)


def test_next_block_is_in_flight_while_one_is_computed(pool: Pool) -> None:
    """And every message is waited for once, and no rank computes more than another."""
    for rank, records in enumerate(
        pool.run(record, {"method": "ring", "balanced": True}, world_size=3)
    ):
        forward, backward = records[torch.float64]
        assert forward.kinds() == ["post", "forward", "wait", "post", "forward", "wait", "forward"]
        # Key-values arrive, the next set out, a block is computed, its gradients set out: the last hop home is hidden.
        first, second = (
            ["post", "wait", "post", "backward", "post"],
            ["wait", "backward", "wait", "post"],
        )
        assert backward.kinds() == [*first, *second, "backward", "wait"]
        blocks = [event for event in forward.events if event[0] == "forward"]
        earlier = [(rank - step) % 3 < rank for step in (1, 2)]
        assert [event[1:] for event in blocks] == [
            (True, 8, 8),
            *((False, 8, 4) if is_earlier else (False, 4, 8) for is_earlier in earlier),
        ]


@pytest.mark.parametrize(
    ("method", "heads", "kv_heads"), [("ring", 4, 2), ("allgather", 4, 2), ("ulysses", 8, 8)]
)
def test_error_does_not_grow_with_ranks(pool: Pool, method: str, heads: int, kv_heads: int) -> None:
    task = {"method": method, "heads": heads, "kv_heads": kv_heads}
    errors = pool.run(measure_errors, task, world_size=8)[0]
    for dtype, of_dtype in errors.items():
        for of_ranks, of_one in of_dtype:
            assert torch.finfo(dtype).eps / 16 < of_ranks < 1.3 * of_one, errors


@pytest.mark.parametrize(
    ("method", "forward", "backward"), [("ring", 1, 2), ("allgather", 1, 2), ("ulysses", 2, 2)]
)
def test_saved_attention_is_not_run_again(
    pool: Pool, method: str, forward: int, backward: int
) -> None:
    for counts in pool.run(check_checkpointed, {"method": method}, world_size=2):
        once = (1, forward + backward)
        assert counts == {"none": once, "full": (2, 2 * forward + backward), "selective": once}


def test_shapes_that_kernels_would_read_beyond_are_refused() -> None:
    """Torch's kernel of a block checks nothing: it returned numbers of no one's, or ended the process."""
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
    for name, parts in wrong.items():
        with pytest.raises(
            ValueError, match=r"they must be \(B, H, n, D\), \(B, K, n, D\) and \(B, K, n, D\)"
        ):
            print(name, api.ring_attention(*parts, group=None, document_ids=ids).shape)
    for causal, window in ((True, -1), (False, 3)):
        with pytest.raises(
            ValueError,
            match="it must be 0, or with causal = True the number of keys that a query sees",
        ):
            api.ring_attention(q, k, v, group=None, document_ids=ids, causal=causal, window=window)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_one_rank_with_documents_and_a_window(device: str, dtype: torch.dtype) -> None:
    """Queries whose last dimension is not contiguous; a loss that reads a part of the output."""
    whole = [x.to(dtype) for x in inputs(4, 2, 600, width=16)]
    mask = Mask(documents_of(600, 0.01), 280)
    expected = reference(*(x.double() for x in whole), mask)
    q, k, v, grad = (x.to(device).mT.contiguous().mT.requires_grad_() for x in whole)
    out = api.ring_attention(q, k, v, group=None, document_ids=mask[0], window=mask[1])
    got = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    for mine, wanted in zip(got, expected, strict=True):
        assert error(mine.detach().cpu(), wanted) < 8 * torch.finfo(dtype).eps


def test_output_that_nothing_reads_has_no_gradient() -> None:
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    q, k, v, _ = (x.requires_grad_() for x in inputs(4, 2, 8))
    out = api.ring_attention(q, k, v, group=None, window=3)
    for grad in torch.autograd.grad(Cut.apply(out).sum(), (q, k, v)):
        assert not grad.any()


@pytest.mark.parametrize("size", [1, 2])
def test_plain_scores_are_made_in_bands(pool: Pool, size: int) -> None:
    pool.run(check_banded, {}, world_size=size)


def test_group_of_one(pool: Pool) -> None:
    pool.run(check_alone, {}, world_size=1)


def test_what_cannot_be_is_refused(pool: Pool) -> None:
    pool.run(check_refusals, {}, world_size=2)


def check_documents(examples: int) -> None:
    """Random documents: what ranks compute together is, of each document alone, causal attention."""
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
            got = composed(*whole, Mask(documents, window), method=method, balanced=balanced)
            for number, mine in enumerate(
                zip(*(each.split(lengths, 2) for each in got), strict=True)
            ):
                alone = [x.split(lengths, 2)[number] for x in whole]
                for a, b in zip(mine, reference(*alone, Mask(window=window)), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

        check()


def test_random_documents_are_those_of_each_alone(pool: Pool) -> None:
    pool.run(check_documents, {"examples": 200}, world_size=2)
    pool.run(check_documents, {"examples": 40}, world_size=3)
