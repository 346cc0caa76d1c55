"""A recorder of the messages, waits and blocks of a rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.parallel.context import api, kernels, ownership
from composer3d.runtime.process_group import pool_world
from tests.parallel.context.attention import group_of_all, inputs

REAL_BATCH = dist.batch_isend_irecv


class Block(NamedTuple):
    """The block that a kernel computes, by its size."""

    causal: bool
    queries: int
    keys: int


class Event(NamedTuple):
    """A message that starts, the end of the wait for one, or a block, forward or backward."""

    kind: Literal["post", "wait", "forward", "backward"]
    sent_bytes: int = 0
    block: Block | None = None


class Recorder:
    """The events of a rank, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def sent_bytes(self) -> int:
        return sum(event.sent_bytes for event in self.events)

    def blocks(self, *kinds: str) -> list[Block]:
        """The blocks of the events of these kinds."""
        return [
            event.block for event in self.events if event.kind in kinds and event.block is not None
        ]

    def record_collective(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a collective to record the bytes that leave the rank.

        An all-gather sends its input to all others. The other two send each of them its part.
        """

        def run(out: Tensor, x: Tensor, *, group: dist.ProcessGroup) -> Any:
            sent = (group.size() - 1) * x.nbytes
            if name != "all_gather":
                sent //= group.size()
            self.events.append(Event("post", sent))
            return collective(out, x, group=group)

        return run

    def record_batch(self, ops: list[dist.P2POp]) -> list[Any]:
        """Replace ``dist.batch_isend_irecv`` for a send and a receive."""
        sent = sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        self.events.append(Event("post", sent))
        send, receive = REAL_BATCH(ops)
        return [send, RecordedWork(receive, self)]

    def record_forward(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``kernels.attend_block``."""

        def run(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
            block = Block(keywords["causal"], q.shape[2], k.shape[2])
            self.events.append(Event("forward", block=block))
            return kernel(q, k, v, **keywords)

        return run

    def record_backward(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``kernels.attend_block_backward``."""

        def run(grad: Tensor, q: Tensor, k: Tensor, *tensors: Tensor, **keywords: Any) -> Any:
            block = Block(keywords["causal"], q.shape[2], k.shape[2])
            self.events.append(Event("backward", block=block))
            return kernel(grad, q, k, *tensors, **keywords)

        return run


class RecordedWork:
    """A request of torch's that records when it is waited for."""

    def __init__(self, work: Any, recorder: Recorder) -> None:
        self.work, self.recorder = work, recorder

    def wait(self) -> None:
        self.recorder.events.append(Event("wait"))
        self.work.wait()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record all messages and blocks inside the context."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", recorder.record_batch)
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            collective = getattr(dist, f"{name}_single")
            patch.setattr(dist, f"{name}_single", recorder.record_collective(name, collective))
        forward, backward = kernels.attend_block, kernels.attend_block_backward
        patch.setattr(kernels, "attend_block", recorder.record_forward(forward))
        patch.setattr(kernels, "attend_block_backward", recorder.record_backward(backward))
        yield recorder


class Records(NamedTuple):
    """The recorders of one rank, forward and backward."""

    forward: Recorder
    backward: Recorder


def record(methods: list[str]) -> dict[tuple[str, bool, torch.dtype], Records]:
    """Record attention with H = 16, K = 8, D = 4, 8 tokens on each rank and a batch of 2.

    Returns the records by method, whether the order is balanced, and dtype.
    """
    with pool_world():
        size, group = dist.get_world_size(), group_of_all()
        records = {}
        dtypes = (torch.float64, torch.bfloat16)
        for method, balanced, dtype in product(methods, (True, False), dtypes):
            q, k, v, grad = (
                ownership.shard_sequence(x, 2, group, balanced=balanced).to(dtype)
                for x in inputs(16, 8, 8 * size, width=4)
            )
            leaves = [x.requires_grad_() for x in (q, k, v)]
            with recording() as forward:
                out = api.ring_attention(*leaves, group=group, method=method, balanced=balanced)
            with recording() as backward:
                out.backward(grad)
            records[method, balanced, dtype] = Records(forward, backward)
        return records
