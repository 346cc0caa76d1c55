"""Tensors in MXFP4 are read as transformers reads them, in any box."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer3d.checkpoint.manifest import TensorSpec
from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
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


def make_gpt_oss(folder: Path) -> dict[str, Tensor]:
    """Save a random gpt-oss whose experts are in MXFP4; return the matrices that they stand for."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.integrations.mxfp4")
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=131,
        num_local_experts=3,
        num_experts_per_tok=2,
        pad_token_id=None,
    )
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    written: dict[str, Any] = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}
    (folder / "config.json").write_text(json.dumps(written))

    file, whole = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(110, 125, shape, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = module.convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, file, {"format": "pt"})
    return whole


def test_published_files_of_gpt_oss_are_read_and_written_in_bfloat16(tmp_path: Path) -> None:
    whole = make_gpt_oss(tmp_path / "hf")
    assert len(whole) == 2 * 2
    source = open_source(tmp_path / "hf")
    for layer in range(2):
        for ours, theirs in (("w1", "gate_up_proj"), ("w2", "down_proj")):
            expected = whole[f"model.layers.{layer}.mlp.experts.{theirs}"].mT
            name = f"model.blocks.{layer}.moe.experts.{ours}"
            assert torch.equal(source.read(name), expected)
            box = (slice(1, 3), slice(5, 40), slice(30, 64))
            assert torch.equal(source.read(name, box), expected[box])

    convert(tmp_path / "hf", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "again", "hf")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in whole.items())
    assert "quantization_config" not in (tmp_path / "again" / "config.json").read_text()
