"""The ring: messages in flight while a block is computed, and the size of a block."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from composer3d.parallel.context import kernels, ownership, ring, tiles
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.torch_private import body_of
from tests.parallel.context.attention import (
    Mask,
    composed,
    group_of_all,
    inputs,
    random_documents,
    reference,
)
from tests.parallel.context.recorder import Block, record, recording


def test_next_block_is_in_flight_while_one_is_computed(pool: Pool) -> None:
    """Also, a rank waits for every message once, and no rank computes more than another."""
    for rank, records in enumerate(pool.run(record, {"methods": ["ring"]}, world_size=3)):
        forward, backward = records["ring", True, torch.float64]
        assert forward.kinds() == ["post", "forward", "wait", "post", "forward", "wait", "forward"]

        # In each round key-values arrive, the next ones leave, a block is computed, and its
        # gradients leave. The rank's own block hides the last send of gradients to their owner.
        first_round = ["post", "wait", "post", "backward", "post"]
        second_round = ["wait", "backward", "wait", "post"]
        own_block = ["backward", "wait"]
        assert backward.kinds() == [*first_round, *second_round, *own_block]

        blocks = forward.blocks("forward")
        source_is_earlier = [(rank - step) % 3 < rank for step in (1, 2)]
        assert blocks == [
            Block(causal=True, queries=8, keys=8),
            *(
                Block(causal=False, queries=8, keys=4)
                if is_earlier
                else Block(causal=False, queries=4, keys=8)
                for is_earlier in source_is_earlier
            ),
        ]


# The operators of ``ring._merge``, and those that fill an output before the first block.
MERGE = {"lerp_", "sigmoid", "logaddexp"}
FILL = {"zeros_like", "new_full"}


class OperatorNames(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_merges(method: str) -> tuple[int, Counter[str]]:
    """Count the rounds of attention without documents or windows, and its operators."""
    with pool_world():
        group = group_of_all()
        size = group.size()
        q, k, v, _ = inputs(4, 2, 8)  # this rank's parts
        attend = body_of(torch.ops.composer3d.ring_attention.default)
        assert attend is not None
        name = group.group_name if size > 1 else ""
        with OperatorNames() as operators:
            attend(q, k, v, None, None, 0, method, True, name)
        return size, operators.counts


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_block_of_all_queries_is_not_merged(pool: Pool, size: int) -> None:
    """One tile is the output itself; a ring merges once in each round after its first."""
    for rounds, counts in pool.run(count_merges, {"method": "ring"}, world_size=size):
        assert {name: counts[name] for name in MERGE} == dict.fromkeys(MERGE, rounds - 1)
        assert not FILL & counts.keys()


def check_bands() -> None:
    """A kernel that builds all scores of a block gets few queries at a time, with any mask."""
    with pool_world(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "kernel_of", lambda q: kernels.Kernel.REFERENCE)
        patch.setattr(tiles, "BAND", 5)
        size = dist.get_world_size()
        whole = inputs(4, 2, 24 * size)
        for method, documents, window in product(
            ("ring", "allgather"), (None, random_documents(24 * size, 0.1)), (0, 3, 9)
        ):
            for mask in (Mask(documents, window), Mask(documents, 0, causal=False)):
                with recording() as recorder:
                    results = composed(*whole, mask, method=method)
                expected = reference(*whole, mask)
                torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
                # One rank without documents and window runs torch's attention, and no block.
                blocks = recorder.blocks("forward", "backward")
                assert max((block.queries for block in blocks), default=0) <= 5


@pytest.mark.parametrize("size", [1, 2])
def test_plain_scores_are_computed_in_bands(pool: Pool, size: int) -> None:
    pool.run(check_bands, {}, world_size=size)


def receive_twice() -> None:
    with pool_world():
        group = group_of_all()
        q = ownership.shard_sequence(inputs(6, 3, 16)[0], 2, group)
        receive = ring._send_to_next(q, group)
        receive()
        with pytest.raises(AssertionError, match="received twice"):
            receive()


def test_a_message_cannot_be_received_twice(pool: Pool) -> None:
    assert pool.run(receive_twice, {}, world_size=2) == [None, None]  # both refused the second
