"""OLMo 2: our shape, names, logits, loss and gradients agree with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer3d.facts.errors import CheckpointError
from composer3d.models.contract import SequenceInfo
from composer3d.models.locations import hf_locations
from composer3d.models.olmo2 import huggingface as hf
from composer3d.models.olmo2.model import Olmo2
from composer3d.models.olmo2.shape import PRESETS
from composer3d.models.olmo2.table import table
from tests.models.moe.transformers_models import SMALL, compute_in_float64, transformers

TOKENS = (3, 40)  # batch and length
# Keys of config.json: grouped keys; as many keys as queries, tied; heads wider than the stream.
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"rms_norm_eps": 1e-6},
    "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in float64, saved by transformers. No norm has the ones that it starts with.

    A norm of ones could be missing, or stand in the place of another, and no logit would tell.
    """
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(1)
    # The embedding of a token for padding would have no gradient.
    config = transformers.Olmo2Config(**SMALL | KINDS[request.param], pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.float64).save_pretrained(folder)
    return folder


def load_theirs(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    return model.eval()


def load_ours(folder: Path) -> Olmo2:
    shape = hf.read_shape(folder)
    tensors = load_file(folder / "model.safetensors")
    names = {name: place.names[0] for name, place in hf_locations(table(shape)).items()}
    assert tensors.keys() == set(names.values())
    model = Olmo2(shape, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[names[name]])
    return model


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == theirs.dtype == torch.float64
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_logits_loss_and_gradients_equal_those_of_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_float64(monkeypatch, "olmo2")
    ours, theirs = load_ours(folder), load_theirs(folder)
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    # transformers shifts the labels itself.
    labels_BT = torch.cat((tokens_BT[:, 1:], torch.full((len(tokens_BT), 1), -100)), 1)
    positions_BT = torch.arange(TOKENS[1]).expand(TOKENS)

    expected = theirs(tokens_BT, labels=tokens_BT, use_cache=False)
    logits = ours.logits(tokens_BT, SequenceInfo(positions_BT))
    assert relative_error(logits, expected.logits) < 1e-12
    loss = ours(tokens_BT, labels_BT, positions_BT) / (labels_BT != -100).sum()
    assert relative_error(loss, expected.loss) < 1e-12

    loss.backward()
    expected.loss.backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, place in hf_locations(table(ours.shape)).items():
        grad = ours.get_parameter(name).grad
        assert grad is not None
        assert relative_error(grad, grads[place.names[0]]) < 1e-11, name


def test_logits_are_those_of_transformers_as_it_ships(folder: Path) -> None:
    """It computes norms and positions in float32, whatever the model is in."""
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    seq = SequenceInfo(torch.arange(TOKENS[1]).expand(TOKENS))
    with torch.no_grad():
        expected = load_theirs(folder)(tokens_BT).logits
        assert relative_error(load_ours(folder).logits(tokens_BT, seq), expected) < 1e-6


@pytest.mark.parametrize("carries", [False, True])
def test_transformers_loads_our_config(folder: Path, tmp_path: Path, carries: bool) -> None:
    shape, before = hf.read_shape(folder), json.loads((folder / "config.json").read_text())
    config = hf.make_config(shape, "float64", before | {"notes": "mine"} if carries else None)
    assert hf.parse_config(config) == shape
    assert config["architectures"] == ["Olmo2ForCausalLM"]
    assert config.get("notes") == ("mine" if carries else None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    with torch.no_grad():
        assert torch.equal(
            load_theirs(tmp_path)(tokens_BT).logits, load_theirs(folder)(tokens_BT).logits
        )


MINIMAL = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
CONFIG = MINIMAL | {"model_type": "olmo2"}


def test_absent_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    theirs, shape = transformers.AutoConfig.from_pretrained(tmp_path), hf.read_shape(tmp_path)
    assert shape.n_kv_heads == theirs.num_key_value_heads
    assert (shape.norm_eps, shape.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": shape.rope_theta}


# A config.json that asks for something else, and the line about it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases": (
        {"attention_bias": True},
        "attention_bias = true is not supported; it must be false, null or absent",
    ),
    "the clipping of the first OLMo": (
        {"clip_qkv": 8.0},
        "clip_qkv = 8.0 is not supported; it must be false, null or absent",
    ),
    "the windows of OLMo 3": (
        {"sliding_window": 4096},
        "sliding_window = 4096 is not supported; it must be false, null or absent",
    ),
    "layers with windows": (
        {"layer_types": ["sliding_attention"]},
        'layer_types = ["sliding_attention"] is not supported; it must be "full_attention" for '
        "each layer, or absent",
    ),
    "another activation": (
        {"hidden_act": "gelu"},
        'hidden_act = "gelu" is not supported; it must be "silu"',
    ),
    "a size out of range": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers = 1000000000 must be from 1 to 10_000",
    ),
    "another OLMo": (
        {"model_type": "olmo3"},
        'model_type = "olmo3" is not supported; it must be llama, mistral, qwen2, qwen3, mixtral, '
        "qwen3_moe or olmo2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str) -> None:
    changes, line = REFUSED[case]
    with pytest.raises(CheckpointError) as caught:
        hf.parse_config(CONFIG | changes)
    assert caught.value.lines == (line,)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_a_config(preset: str) -> None:
    shape = PRESETS[preset]
    assert hf.parse_config(hf.make_config(shape, "bfloat16")) == shape
