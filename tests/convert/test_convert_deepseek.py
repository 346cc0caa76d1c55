"""A DeepSeek-V3 goes to a checkpoint and back to Hugging Face with the same bits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
from composer3d.facts.errors import CheckpointError

transformers = pytest.importorskip("transformers")

_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "topk_group": 2,
    "v_head_dim": 20,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in bfloat16, whose biases of routers are float32, as in the published files."""
    torch.manual_seed(1)
    config = transformers.DeepseekV3Config(**_CONFIG, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, bias in model.named_buffers():
        if name.endswith("correction_bias"):
            bias.data = torch.randn(bias.shape)
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_files_come_back_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    before = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16, torch.float32}
    convert(folder, tmp_path / "dcp", "dcp")
    report = convert(tmp_path / "dcp", tmp_path / "again", "hf", logits=True)
    assert report["logits"] == {"bitwise": True, "relative_error": 0.0}
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


def add_layer(folder: Path, *names: str) -> None:
    """Add tensors of a layer after the last one."""
    file = folder / "model.safetensors"
    tensors = {f"model.layers.3.{name}.weight": torch.ones(4) for name in names}
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def test_multi_token_prediction_is_left_out_and_said(folder: Path, tmp_path: Path) -> None:
    expected = load_file(folder / "model.safetensors").keys()
    add_layer(folder, "eh_proj", "enorm", "hnorm")
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    report = convert(folder, tmp_path / "again", "hf")
    assert report["notes"] == [
        "left out: 3 tensors that are no part of the model, such as 'model.layers.3.eh_proj.weight'"
    ]
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == expected
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0


def test_another_layer_too_many_is_refused(folder: Path) -> None:
    add_layer(folder, "enorm")
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.enorm\.weight"):
        open_source(folder)


def test_quantized_files_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config"):
        open_source(folder)
