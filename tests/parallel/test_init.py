"""Initial weights: a shard has the values of the whole tensor, and the numbers are normal."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from composer3d.models.contract import Constant, Normal, ShardingPlan
from composer3d.parallel import init
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world

PLAN = ShardingPlan(tensor={}, init={"norm.*": Constant(1.5), "*": Normal(0.02)})


def filled(
    shape: tuple[int, ...],
    *,
    offset: tuple[int, ...] | None = None,
    whole_shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Fill the box of ``shape`` at ``offset`` of a tensor of ``whole_shape``.

    Without ``offset`` and ``whole_shape``, the box is the whole tensor.
    """
    box = torch.full(shape, math.nan, dtype=torch.float64)
    if offset is None:
        offset = (0,) * len(shape)
    key = init._key(3, "weight")
    init.fill_normal(box, whole_shape or shape, offset, std=0.5, key=key)
    return box


def initialised(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Initialise modules of these names, each with a ``weight`` of its shape."""
    module = nn.Module()
    for name, shape in shapes.items():
        child = nn.Module()
        child.weight = nn.Parameter(torch.full(shape, math.nan, dtype=torch.float64))
        module.add_module(name, child)
    init.initialise(module, PLAN, seed)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def shard_has_values_of_whole(
    mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> bool:
    """Whether the shard that this rank fills is its part of the tensor that one process fills."""
    with pool_world():
        mesh = init_device_mesh("cpu", mesh_shape)
        module = nn.Module()
        empty = distribute_tensor(
            torch.full(shape, math.nan, dtype=torch.float64), mesh, placements, src_data_rank=None
        )
        module.first = nn.Module()
        module.first.weight = nn.Parameter(empty)
        init.initialise(module, PLAN, seed=0)
        assert isinstance(module.first.weight, DTensor)
        whole = initialised({"first": shape})["first.weight"]
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        return torch.equal(module.first.weight.to_local(), expected.to_local())


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[slice]]:
    """The shape of a tensor and the slices of a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, [slice(begin, end) for begin, end in ends]


@given(box=boxes(), chunk=st.sampled_from([1, 7, 1 << 20]))
def test_a_box_has_the_values_of_the_whole_tensor(
    box: tuple[tuple[int, ...], list[slice]], chunk: int
) -> None:
    shape, slices = box
    whole = filled(shape)
    assert not whole.isnan().any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "CHUNK", chunk)
        box_shape = tuple(part.stop - part.start for part in slices)
        offset = tuple(part.start for part in slices)
        values = filled(box_shape, offset=offset, whole_shape=shape)
    assert torch.equal(values, whole[tuple(slices)])


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [
        ((2,), [Shard(0)], (5, 3)),
        ((2,), [Shard(1)], (3, 7)),
        ((4,), [Shard(0)], (2, 3)),
        ((2, 2), [Shard(0), Shard(1)], (5, 7)),
    ],
    ids=["rows", "columns", "empty shards", "both"],
)
def test_ranks_fill_their_shards_of_one_tensor(
    pool: Pool, mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    arguments = {"mesh_shape": mesh_shape, "placements": placements, "shape": shape}
    assert all(pool.run(shard_has_values_of_whole, arguments, world_size=math.prod(mesh_shape)))


def test_numbers_are_normal() -> None:
    count = 1_000_000
    numbers = init.normal_of(torch.arange(count), init._key(0, "blocks.0.attn.wq.weight"))
    assert numbers.dtype == torch.float64
    assert numbers.isfinite().all()
    assert len(numbers.unique()) == count
    # Five standard errors of each statistic.
    assert abs(numbers.mean().item()) < 5 / math.sqrt(count)
    assert abs(numbers.std().item() - 1) < 5 / math.sqrt(2 * count)
    assert abs(numbers.pow(3).mean().item()) < 5 * math.sqrt(15 / count)
    assert abs(numbers.pow(4).mean().item() - 3) < 5 * math.sqrt(96 / count)
    for lag in (1, 2, 64, 4096):
        assert abs((numbers[lag:] * numbers[:-lag]).mean().item()) < 5 / math.sqrt(count)
    # The Kolmogorov-Smirnov test, at a significance of 0.1 %.
    expected = torch.special.ndtr(numbers.sort().values)
    distance = (expected - (torch.arange(count) + 0.5) / count).abs().max().item()
    assert distance < 1.95 / math.sqrt(count)


def test_numbers_from_all_zeros_and_all_ones_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_splitmix64", lambda index, key: index)
    numbers = init.normal_of(torch.tensor([0, -1]), key=0)
    assert numbers.isfinite().all()
    assert numbers.abs().max().item() < 7


def test_indices_beyond_32_bits_have_different_numbers() -> None:
    numbers = init.normal_of(torch.tensor([5, 5 + 2**32, 5 + 2**40]), key=0)
    assert len(numbers.unique()) == 3
    far = filled((1, 4), whole_shape=(200_000, 128_256), offset=(150_000, 100))
    indices = 150_000 * 128_256 + 100 + torch.arange(4)
    assert torch.equal(far[0] / 0.5, init.normal_of(indices, init._key(3, "weight")))


def test_names_and_seeds_give_different_numbers() -> None:
    shapes = {"one": (64, 64), "two": (64, 64)}
    first, again, other = initialised(shapes), initialised(shapes), initialised(shapes, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    tensors = [first["one.weight"], first["two.weight"], other["one.weight"], other["two.weight"]]
    for index, a in enumerate(tensors):
        assert a.std().item() == pytest.approx(0.02, rel=0.06)
        for b in tensors[:index]:
            assert not (a == b).any()
            correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
            assert abs(correlation) < 5 / 64


def test_a_constant_fills_the_tensor() -> None:
    weight = initialised({"norm": (7,)})["norm.weight"]
    assert torch.equal(weight, torch.full((7,), 1.5, dtype=torch.float64))


def test_a_scalar_has_the_value_of_a_tensor_with_one_element() -> None:
    assert torch.equal(filled(()), filled((1,))[0])


def test_float32_is_float64_rounded() -> None:
    narrow = torch.empty(4, 5)
    init.fill_normal(narrow, (4, 5), (0, 0), std=0.5, key=init._key(3, "weight"))
    assert torch.equal(narrow, filled((4, 5)).to(torch.float32))
