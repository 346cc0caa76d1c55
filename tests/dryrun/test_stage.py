"""Parts of the step of one pipeline rank on tensors without data."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from composer3d.dryrun import stage
from composer3d.dryrun.collectives import CollectiveCounter
from composer3d.dryrun.kernels import norms_of_a_gpu
from composer3d.dryrun.memory import MemoryLedger
from composer3d.facts.errors import UserError
from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import dry_run_of, recipe_of, traffic_of
from tools.prove.paths import ROOT

OFFSETS = torch.tensor([16, 48], dtype=torch.int32)
EXPERTS = (
    'model.architecture="moe"',
    'model.preset="debug-moe"',
    "mesh.dp_shard=4",
    "mesh.ep=4",
)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(48, 16), torch.ones(2, 16, 32)),
        (torch.ones(32, 48), torch.ones(48, 16)),
    ],
    ids=["rows of a", "the shared dim"],
)
def test_a_grouped_product_has_the_shape_of_the_real_one(a: Tensor, b: Tensor) -> None:
    real = F.grouped_mm(a, b, offs=OFFSETS)
    described = stage._grouped_product(a, b, OFFSETS)
    assert (described.shape, described.dtype) == (real.shape, real.dtype)


def test_inside_of_a_custom_operator_a_copy_counts_and_a_kernel_stays_one_operator() -> None:
    ledger = MemoryLedger(offload=False)
    recorder = stage.Recorder(ledger)
    x = torch.ones(4, 4)
    with (
        recorder,
        recorder.counting(CollectiveCounter(lambda _: "")),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        same = x.contiguous()
        assert ledger.now[-1] == 0
        copied = x.mT.contiguous().to(torch.float64)
        assert ledger.now[-1] == 4 * 4 * 8
        assert recorder.operators == 2
        torch.ops.aten.silu_backward(copied, copied)
        assert recorder.operators == 3
    assert same is x


def test_operators_count_that_compute_or_copy() -> None:
    """Views and allocations launch nothing, nor does what torch asks tensors without data."""
    recorder = stage.Recorder(MemoryLedger(offload=False))
    with recorder, recorder.without_data, recorder.counting(CollectiveCounter(lambda _: "")):
        x = torch.empty(4, 4)
        with record_function("a range of a profile"):
            assert x.device.type == "cpu"
        torch.ops.aten._unsafe_view(x.view(16), [2, 8])
        assert recorder.operators == 0
        x.add_(1)
        torch.split_with_sizes_copy(x, [2, 2], out=[torch.empty(2, 4), x.new_empty(2, 4)])
        assert recorder.operators == 2


def test_a_norm_of_a_gpu_is_one_operator_in_each_direction() -> None:
    ledger = MemoryLedger(offload=False)
    recorder = stage.Recorder(ledger)
    with recorder, recorder.without_data, norms_of_a_gpu():
        x = torch.empty(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(8, dtype=torch.bfloat16, requires_grad=True)
        before = ledger.now[-1]
        with recorder.counting(CollectiveCounter(lambda _: "")):
            output = F.rms_norm(x, (8,), weight)
            assert recorder.operators == 1
            # The output, and a number in float32 for each of 6 rows.
            assert ledger.now[-1] - before == 2 * 48 + 4 * 6
            torch.autograd.grad(output, (x, weight), output.detach())
            assert recorder.operators == 2


def test_a_number_that_decides_what_is_done_is_refused() -> None:
    recorder = stage.Recorder(MemoryLedger(offload=False))
    with recorder, recorder.without_data:
        number = torch.ones(1, dtype=torch.int64)
        with pytest.raises(UserError, match=r"cannot know a number of torch\.int64"):
            number.item()


@pytest.mark.parametrize("other", [F.gelu, F.silu])
def test_blocks_that_call_another_function_are_not_alike(other: object) -> None:
    recipe = recipe_of(ROOT / "recipes" / "debug-1-single.toml", ())
    blocks = [nn.Linear(2, 2) for _ in range(2)]
    for block, function in zip(blocks, (F.silu, other), strict=True):
        block.act = function
    one, same = (stage._content_of_block(recipe, "blocks.0", block, (), "none") for block in blocks)
    assert (one == same) == (other is F.silu)


def test_skewed_routing_brings_more_rows_to_the_busiest_rank(pool: Pool) -> None:
    recipe = recipe_of(ROOT / "recipes" / "debug-1-single.toml", EXPERTS)
    even = traffic_of(dry_run_of(pool, recipe))
    skewed = traffic_of(dry_run_of(pool, recipe, skew=2.0))
    calls, even_bytes = even["ep"]["all_to_all"]
    skewed_calls, skewed_bytes = skewed["ep"]["all_to_all"]
    assert calls == skewed_calls
    # Of 128 rows, rank 0 sends 96 to 3 others, or 64 with a skew of 2. The 3 others send it 32
    # rows each, or 64, and get as many outputs back. Backward sends both again.
    rows = 4 * 2 * 2 * 64 * 4  # layers, micro-batches, forward and backward, width, float32
    numbers = even_bytes - rows * (96 + 96)
    assert skewed_bytes == numbers + rows * (64 + 192)
