"""A DeepSeek-V3 and a GLM-4.5 go to a checkpoint and back to Hugging Face with the same bits."""

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
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "topk_group": 2,
}
_OF_TYPE = {
    "deepseek_v3": {
        "kv_lora_rank": 24,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
    },
    "glm4_moe": {"attention_bias": True, "head_dim": 24, "use_qk_norm": True},
}


@pytest.fixture(params=_OF_TYPE)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model in bfloat16, whose biases of routers are float32, as in the published files."""
    torch.manual_seed(1)
    settings = _CONFIG | _OF_TYPE[request.param]
    config = transformers.AutoConfig.for_model(request.param, **settings, pad_token_id=None)
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


def set_depths(folder: Path, depths: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = depths
    (folder / "config.json").write_text(json.dumps(config))


COPIES = {
    "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight": "lm_head.weight",
}


def add_prediction(folder: Path) -> None:
    """Add a layer of multi-token prediction as published files have it, with both copies."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.2."):
            tensors[name.replace("layers.2.", "layers.3.")] = torch.randn_like(tensor)
    dim = _CONFIG["hidden_size"]
    sizes = {
        "enorm": (dim,),
        "hnorm": (dim,),
        "shared_head.norm": (dim,),
        "eh_proj": (dim, 2 * dim),
    }
    for name, size in sizes.items():
        tensors[f"model.layers.3.{name}.weight"] = torch.randn(size, dtype=torch.bfloat16)
    for copy, original in COPIES.items():
        tensors[copy] = tensors[original].clone()
    save_file(tensors, file, {"format": "pt"})
    set_depths(folder, 1)


def test_multi_token_prediction_comes_back_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    add_prediction(folder)
    before = load_file(folder / "model.safetensors")
    convert(folder, tmp_path / "dcp", "dcp")
    # Several files, of which each copy may be in another than its original.
    report = convert(tmp_path / "dcp", tmp_path / "again", "hf", shard=100_000)
    assert report["notes"] == []
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert len(files) > 2
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(("copy", "original"), COPIES.items())
def test_a_copy_that_is_another_tensor_is_refused(folder: Path, copy: str, original: str) -> None:
    add_prediction(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[copy][3, 3] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{copy}.*not the same as.*{original}"):
        open_source(folder)
    del tensors[copy]  # files may leave it out
    save_file(tensors, file, {"format": "pt"})
    assert open_source(folder).shape.mtp_layers == 1


def test_a_layer_with_a_missing_tensor_is_refused(folder: Path) -> None:
    add_prediction(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.3.shared_head.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no 'model\.layers\.3\.shared_head\.norm"):
        open_source(folder)


def test_layers_that_config_json_does_not_name_are_left_out(folder: Path, tmp_path: Path) -> None:
    expected = load_file(folder / "model.safetensors").keys()
    add_layer(folder, "eh_proj", "enorm", "hnorm")
    set_depths(folder, 0)
    report = convert(folder, tmp_path / "again", "hf")
    assert report["notes"] == [
        "left out: 3 tensors that are no part of the model, such as 'model.layers.3.eh_proj.weight'"
    ]
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == expected
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0


def test_layers_of_which_no_tensor_is_there_are_left_out(folder: Path, tmp_path: Path) -> None:
    """transformers saves the number of layers, and none of their tensors."""
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    report = convert(folder, tmp_path / "again", "hf")
    assert report["notes"] == [
        "left out: the layers of multi-token prediction that config.json names, of which the files "
        "hold no tensor"
    ]
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0


def test_another_layer_too_many_is_refused(folder: Path) -> None:
    add_layer(folder, "enorm")
    set_depths(folder, 0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.enorm\.weight"):
        open_source(folder)


def test_quantized_files_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config"):
        open_source(folder)
