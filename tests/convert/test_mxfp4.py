"""Tensors in MXFP4 are read as transformers reads them, in any box."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from composer3d.checkpoint.manifest import TensorSpec
from composer3d.convert.mxfp4 import without_blocks
from composer3d.convert.tensors import ReadableTensor

EXPERTS, ROWS, GROUPS = 3, 5, 4


def readable(tensor: Tensor) -> ReadableTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ReadableTensor(TensorSpec(tuple(tensor.shape), dtype), tensor.clone)


@pytest.fixture
def stored() -> dict[str, Tensor]:
    """All 256 bytes, and scales from the least to the greatest."""
    size = (EXPERTS, ROWS, GROUPS, 16)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    scales = torch.randint(256, size[:-1], generator=generator, dtype=torch.uint8)
    scales.view(-1)[:4] = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)
    return {"w_blocks": blocks, "w_scales": scales, "bias": torch.ones(3)}


def test_numbers_are_those_of_transformers(stored: dict[str, Tensor]) -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    convert: Callable[..., Tensor] = module.convert_moe_packed_tensors
    expected = convert(stored["w_blocks"], stored["w_scales"])
    tensors = without_blocks({name: readable(tensor) for name, tensor in stored.items()})
    assert tensors.keys() == {"w", "bias"}
    assert tensors["w"].spec == TensorSpec((EXPERTS, 32 * GROUPS, ROWS), "bfloat16")
    same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    same(tensors["w"].read(), expected)

    read_box = tensors["w"].read_box
    assert read_box is not None
    same(read_box(()), expected)
    for columns in ((0, 128), (0, 1), (31, 33), (32, 64), (40, 41), (100, 128)):
        box = (slice(1, 3), slice(*columns), slice(2, 5))
        same(read_box(box), expected[box])


@pytest.mark.parametrize(
    "changes",
    [
        {"w_scales": torch.zeros(EXPERTS, ROWS, GROUPS + 1, dtype=torch.uint8)},
        {"w_scales": torch.zeros(EXPERTS, ROWS, GROUPS)},
        {"w_blocks": torch.zeros(EXPERTS, ROWS, GROUPS, 15, dtype=torch.uint8)},
        {"w_blocks": torch.zeros(GROUPS, 16, dtype=torch.uint8)},
        {"w_scales": None},
        {"w": torch.ones(2)},
    ],
    ids=["groups", "dtype", "bytes", "dims", "no scales", "the tensor itself"],
)
def test_what_is_no_pair_stays_as_it_is(
    stored: dict[str, Tensor], changes: dict[str, Tensor | None]
) -> None:
    tensors = {
        name: readable(tensor) for name, tensor in (stored | changes).items() if tensor is not None
    }
    assert without_blocks(tensors) == tensors
