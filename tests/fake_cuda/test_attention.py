"""Attention over documents and windows on a GPU in name: few operators, and one copy.

A kernel for each document would be hundreds of operators a layer.
"""

from collections import Counter
from pathlib import Path

import pytest

from composer3d.runtime.launch import Pool
from tests.fake_cuda import attention
from tests.fake_cuda.attention import Case, Layer
from tools.fake_cuda import device
from tools.fake_cuda.counts import Copy

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="no C++ compiler here")

FORWARD, BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
OFFSETS = Copy("aten::copy_", "cpu", "cuda", "to_device.py:copy_to_device_of")

RANK_1 = Case(cp=4, rank=1)

# The calls of the variable-length kernel, forward.
CALLS = {
    Case(documents=100): 1,
    Case(documents=100, rows=4): 1,
    Case(documents=100, window=1000): 1,
    Case(window=4096): 1,
    # A hop without a document in common has no call.
    RANK_1._replace(documents=100): 3,
    RANK_1._replace(documents=2): 4,
    # The window ends in one of the two chunks that came from rank 2.
    RANK_1._replace(window=4096): 5,
    # The window ends at another width in each row.
    RANK_1._replace(documents=4, window=1000, rows=4): 6,
    RANK_1._replace(method="allgather", documents=100): 1,
    # A document in both chunks of the rank.
    RANK_1._replace(method="allgather", documents=1): 2,
    Case(cp=2, method="ulysses", documents=100): 1,
}


def plain(case: Case) -> Case:
    """The same, without documents and without a window."""
    return case._replace(documents=0, window=0)


@pytest.fixture(scope="module")
def layers(library: Path, pool: Pool) -> dict[Case, Layer]:
    cases = list(dict.fromkeys([*CALLS, *map(plain, CALLS)]))
    arguments = {"cases": cases, "library": library}
    (counted,) = pool.run(attention.count_layers, arguments, world_size=1)
    return dict(zip(cases, counted, strict=True))


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_few_operators_and_one_copy_for_all_layers_of_a_micro_batch(
    layers: dict[Case, Layer], case: Case
) -> None:
    layer, without = layers[case], layers[plain(case)]
    assert layer.forward[FORWARD] == layer.backward[BACKWARD] == CALLS[case]
    assert not without.forward[FORWARD]
    assert layer.forward.total() < 1.5 * without.forward.total()
    assert layer.backward.total() < 1.5 * without.backward.total()
    # The two micro-batches have the same offsets if there is no more than one document.
    assert layer.copies == Counter({OFFSETS: 2 if case.documents > 1 else 1})
    assert not without.copies


def test_one_rank_merges_nothing(layers: dict[Case, Layer]) -> None:
    """One call has all keys: no copy of keys and values, no sums, and no zeros to sum to."""
    one, ring = layers[Case(documents=100)], layers[RANK_1._replace(documents=2)]
    merging = {"aten::stack", "aten::zeros_like", "aten::new_zeros", "aten::logaddexp"}
    assert merging <= {*ring.forward, *ring.backward}
    assert not merging & {*one.forward, *one.backward}
    # Documents are searched for their first tokens on the host.
    assert one.forward["aten::nonzero"] == one.backward["aten::nonzero"] == 1
