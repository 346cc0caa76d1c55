"""The table of safetensors dtypes agrees with the one of the safetensors package.

Parts of a tensor in a file are read as tensors of their own.
"""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from composer3d.checkpoint.manifest import TensorSpec
from composer3d.convert.formats import DTYPES, SAFETENSORS_DTYPES, Source, dtype_name
from composer3d.convert.tensors import ReadableTensor
from composer3d.models.locations import hf_locations
from composer3d.models.table import Constant, ParameterTable, Row


def test_codes_of_dtypes_are_those_of_safetensors() -> None:
    # An entry may be None, for a dtype that this torch does not have.
    theirs = {code: dtype for code, dtype in safetensors.torch._TYPES.items() if dtype is not None}
    assert {code: SAFETENSORS_DTYPES.get(code) for code in theirs} == theirs


def test_every_dtype_has_one_code() -> None:
    names = [dtype_name(dtype) for dtype in SAFETENSORS_DTYPES.values()]
    assert len(set(names)) == len(names)
    assert set(DTYPES) <= set(names)


@pytest.mark.parametrize("width", [(), (3,)], ids=["biases", "matrices"])
def test_parts_that_share_a_tensor_are_read_apart(tmp_path: Path, width: tuple[int, ...]) -> None:
    """The rows of queries, keys and values lie in one tensor, and so do their biases."""
    sizes = {"q": 8, "k": 2, "v": 2}
    block = tuple(
        Row(f"attn.{name}", (rows, *width), "column", Constant(0.0), hf="h.#.qkv")
        for name, rows in sizes.items()
    )
    table = ParameterTable(first=(), blocks=(block,), last=(), attention="attn")
    whole = torch.arange(12.0).reshape(12, *[1] * len(width)).expand(12, *width)
    spec = TensorSpec(tuple(whole.shape), "float32")
    source = Source(
        format="hf",
        path=tmp_path,
        tensors={"h.0.qkv": ReadableTensor(spec, lambda: whole)},
        locations=hf_locations(table),
    )
    assert {name: spec.shape for name, spec in source.specs().items()} == table.shapes()
    parts = whole.split([*sizes.values()])
    for name, part in zip(sizes, parts, strict=True):
        assert torch.equal(source.read(f"blocks.0.attn.{name}"), part)
    box = (slice(1, 2), *(slice(0, size) for size in width))
    assert torch.equal(source.read("blocks.0.attn.k", box), parts[1][1:2])
