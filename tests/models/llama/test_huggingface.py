"""Our shapes, names and logits agree with transformers, and other models are refused.

Importing transformers takes seconds, so all tests that need it are in this file.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from composer3d.facts.errors import CheckpointError
from composer3d.models.contract import SequenceInfo
from composer3d.models.llama import huggingface as hf
from composer3d.models.llama.model import Last, Llama
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.llama.table import table
from composer3d.models.registry import huggingface_model_types
from tests.models.names_in_files import hf_names

transformers = pytest.importorskip("transformers")

_SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, **_SCALED}
_GROUPS = {"num_key_value_heads": 2}


def layer_types(layers: int, every: int) -> list[str]:
    """Windows in all layers but every so many."""
    kinds = {True: "full_attention", False: "sliding_attention"}
    return [kinds[layer % every == every - 1] for layer in range(layers)]


_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3.1": ("Llama", {**_GROUPS, "rope_parameters": _LLAMA3}),
    "llama 3.2": (
        "Llama",
        {**_GROUPS, "rope_parameters": _LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True},
    ),
    "llama, wide heads": ("Llama", {**_GROUPS, "head_dim": 24, "rms_norm_eps": 1e-5}),
    "mistral, windows": ("Mistral", {**_GROUPS, "sliding_window": 7}),
    "mistral, none": ("Mistral", {**_GROUPS, "sliding_window": None, "head_dim": 8}),
    "qwen 2": (
        "Qwen2",
        {**_GROUPS, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
    ),
    "qwen 2, windows": ("Qwen2", {**_GROUPS, **_WINDOW}),
    "qwen 2, every third layer without": (
        "Qwen2",
        {**_GROUPS, **_WINDOW, "num_hidden_layers": 5, "layer_types": layer_types(5, 3)},
    ),
    "qwen 3": ("Qwen3", {**_GROUPS, "head_dim": 32}),
    "qwen 3, windows": (
        "Qwen3",
        {**_GROUPS, **_WINDOW, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen 3, every second layer without": (
        "Qwen3",
        {**_GROUPS, **_WINDOW, "head_dim": 16, "layer_types": layer_types(3, 2)},
    ),
    "smollm 3": ("SmolLM3", {**_GROUPS, "num_hidden_layers": 5}),
    "smollm 3, untied, positions in every second layer": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False, "rope_parameters": _LLAMA3},
    ),
    "smollm 3, positions in no layer": ("SmolLM3", {**_GROUPS, "no_rope_layer_interval": 1}),
    "smollm 3, windows, every second layer without": (
        "SmolLM3",
        {
            **_GROUPS,
            "num_hidden_layers": 6,
            "no_rope_layer_interval": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": layer_types(6, 2),
        },
    ),
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 131,
}


def transformers_config(name: str) -> Any:
    """Make a configuration of transformers for a model of the table."""
    family, settings = MODELS[name]
    # The token for padding of a SmolLM3 would lie beyond the vocabulary.
    others = {"max_position_embeddings": 256, "num_key_value_heads": 4, "pad_token_id": None}
    return getattr(transformers, f"{family}Config")(**SMALL | others | settings)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random model with transformers."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers_config(request.param))
    # Norms and biases start as ones and zeros, so that a test would not see two of them swapped.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    path = tmp_path_factory.mktemp("hf")
    model.save_pretrained(path)
    return path


def load_ours(folder: Path) -> Llama:
    """Load a saved model with our code."""
    shape = hf.read_shape(folder)
    model = Llama(shape).to_empty(device="cpu")
    if shape.tied:
        model.last.head.weight = model.first.embed.weight
    tensors, names = load_file(folder / "model.safetensors"), hf_names(shape)
    assert set(names.values()) == tensors.keys()
    assert {name: tuple(tensors[names[name]].shape) for name in names} == table(shape).shapes()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[names[name]])
    return model


def load_theirs(folder: Path) -> Any:
    """Load a saved model with transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32"
    )
    return model.eval()


@torch.no_grad()
def logits(model: Llama, tokens_BT: torch.Tensor) -> torch.Tensor:
    seq = SequenceInfo(torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT))
    h_BTC = model.first(tokens_BT, seq)
    for block in model.blocks.values():
        h_BTC = block(h_BTC, seq)
    return cast(Last, model.last).logits(h_BTC)


@torch.no_grad()
def test_logits_equal_those_of_transformers(folder: Path) -> None:
    ours, theirs = load_ours(folder), load_theirs(folder)
    # Within a window, beyond it, and beyond the context before the stretch of positions.
    for length in (4, 33, 200):
        tokens_BT = torch.randint(SMALL["vocab_size"], (2, length))
        expected = theirs(tokens_BT, use_cache=False).logits
        error = (logits(ours, tokens_BT) - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, length


@torch.no_grad()
@pytest.mark.parametrize("carries", [False, True])
def test_transformers_loads_our_config(folder: Path, tmp_path: Path, carries: bool) -> None:
    shape, before = hf.read_shape(folder), json.loads((folder / "config.json").read_text())
    config = hf.make_config(shape, "float32", before | {"notes": "mine"} if carries else None)
    assert hf.parse_config(config) == shape
    assert "rope_parameters" not in config  # transformers 4 does not know it
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", tmp_path)
    again, first = load_theirs(tmp_path), load_theirs(folder)
    assert type(again) is type(first) or not carries
    assert again.config.dtype == torch.float32
    assert (again.config.vocab_size, config.get("notes")) == (
        SMALL["vocab_size"],
        "mine" if carries else None,
    )
    tokens_BT = torch.randint(SMALL["vocab_size"], (2, 40))
    assert torch.equal(again(tokens_BT).logits, first(tokens_BT).logits)
    if shape.window == 0 or again.config.model_type != "llama":
        assert again.generate(
            tokens_BT[:, :9], max_new_tokens=9, do_sample=False, pad_token_id=0
        ).shape == (2, 18)


MINIMAL = {key: value for key, value in SMALL.items() if key != "vocab_size"} | {"vocab_size": 99}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_sliding_window": True, "num_hidden_layers": 29}],
    ids=["least", "windows"],
)
def test_absent_keys_have_the_defaults_of_transformers(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    heads = 32  # divisible by the default num_key_value_heads of each model_type
    config = MINIMAL | {"model_type": kind, "num_attention_heads": heads} | settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    if len(set(getattr(theirs, "layer_types", None) or [])) > 1:
        with pytest.raises(CheckpointError, match=r"layer_types = .* must be sliding_attention"):
            hf.read_shape(tmp_path)
        return
    shape = hf.read_shape(tmp_path)
    assert shape.n_kv_heads == theirs.num_key_value_heads
    assert shape.head_width == getattr(theirs, "head_dim", 64 // heads)
    assert (shape.norm_eps, shape.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": shape.rope_theta}
    assert shape.window == (getattr(theirs, "sliding_window", None) or 0)
    rotary = [shape.is_rotary(layer) for layer in range(shape.n_layers)]
    assert rotary == list(map(bool, getattr(theirs, "no_rope_layers", rotary)))
    assert theirs.hidden_act == "silu"


LLAMA = MINIMAL | {"model_type": "llama"}


@pytest.mark.parametrize(
    "written",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4, **_SCALED}},
        {"rope_theta": 7e4, "rope_scaling": {"rope_type": "llama3", **_SCALED}},
        {
            "rope_theta": 7e4,
            "rope_scaling": {"type": "llama3", **_SCALED},
            "rope_parameters": {"rope_type": "default"},
        },
        {
            "rope_theta": 1.0,
            "rope_scaling": {"rope_type": "llama3", "type": "yarn", "rope_theta": 7e4, **_SCALED},
        },
    ],
    ids=["new", "old", "older", "theta within"],
)
def test_positions_are_read_in_every_notation(written: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA | {"max_position_embeddings": 256} | written)
    )
    shape = hf.read_shape(tmp_path)
    stretch = (
        shape.rope_theta,
        shape.rope_factor,
        shape.rope_low_freq,
        shape.rope_high_freq,
        shape.rope_context,
    )
    assert stretch == (7e4, 8.0, 1.0, 4.0, 16)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert stretch == (theirs["rope_theta"], *(theirs[key] for key in _SCALED))
    assert theirs["rope_type"] == "llama3"


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("factor", [1, 1.0])
def test_a_linear_scaling_by_one_is_none(
    place: str, key: str, factor: float, tmp_path: Path
) -> None:
    written = {place: {key: "linear", "factor": factor}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | written))
    shape = hf.read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert shape == hf.read_shape(tmp_path)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_a_round_trip(preset: str) -> None:
    shape = PRESETS[preset]
    plain = (
        replace(shape, head_dim=None) if shape.head_width * shape.n_heads == shape.dim else shape
    )
    config = hf.make_config(shape, "bfloat16")
    assert hf.parse_config(config) == plain
    theirs = transformers.AutoConfig.for_model(**config)
    assert (theirs.head_dim, theirs.num_key_value_heads) == (shape.head_width, shape.n_kv_heads)
    assert (
        theirs.architectures[0]
        in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )


def test_sizes_that_transformers_refuses_for_a_llama_make_a_mistral() -> None:
    shape = ModelShape(dim=60, n_layers=2, n_heads=8, n_kv_heads=2, ffn=96, vocab=99, head_dim=16)
    config = hf.make_config(shape, "float32")
    assert hf.parse_config(config) == shape
    assert transformers.AutoConfig.for_model(**config).model_type == "mistral"


def test_a_carried_config_of_another_shape_gives_ids_and_the_longest_sequence() -> None:
    carried = LLAMA | {
        "bos_token_id": 7,
        "eos_token_id": [8, 9],
        "max_position_embeddings": 77,
        "notes": "mine",
    }
    shape = replace(hf.parse_config(carried), ffn=128)
    config = hf.make_config(shape, "bfloat16", carried)
    assert hf.parse_config(config) == shape
    assert (config["bos_token_id"], config["eos_token_id"], config["max_position_embeddings"]) == (
        7,
        [8, 9],
        77,
    )
    assert "notes" not in config


RULE = "is not supported; it must be"
PATTERN = "sliding_attention, and full_attention in every N-th layer: N, 2N, 3N ... counted from 1"
*_TYPES, _LAST_TYPE = huggingface_model_types()
NO_TYPE = f"is not supported; composer3d reads {', '.join(_TYPES)} and {_LAST_TYPE}"
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a model with experts": (
        {"model_type": "mixtral"},
        ['model_type = "mixtral" needs another architecture; set model.architecture = "moe"'],
    ),
    "another model": (
        {"model_type": "gpt2"},
        [f'model_type = "gpt2" {NO_TYPE}'],
    ),
    "no model": ({"model_type": None}, [f"model_type = null {NO_TYPE}"]),
    "two at once": (
        {"hidden_act": "gelu", "mlp_bias": True},
        [f'hidden_act = "gelu" {RULE} "silu"', f"mlp_bias = true {RULE} false, null or absent"],
    ),
    "no bools": (
        {"tie_word_embeddings": "no", "use_sliding_window": 0},
        [
            f'tie_word_embeddings = "no" {RULE} true, false or absent',
            f"use_sliding_window = 0 {RULE} true, false or absent",
        ],
    ),
    "a bias": ({"attention_bias": True}, [f"attention_bias = true {RULE} false, null or absent"]),
    "a bias of qwen 3": (
        {"model_type": "qwen3", "attention_bias": True},
        [f"attention_bias = true {RULE} false, null or absent"],
    ),
    "a window of llama": (
        {"sliding_window": 8},
        [f"sliding_window = 8 {RULE} false, null or absent"],
    ),
    "no size": ({"hidden_size": None}, [f"hidden_size = null {RULE} a positive integer"]),
    "a size in words": ({"vocab_size": "99"}, [f'vocab_size = "99" {RULE} a positive integer']),
    "heads of half a width": (
        {"head_dim": 7.5},
        [f"head_dim = 7.5 {RULE} a positive integer, null or absent"],
    ),
    "heads of no width": (
        {"head_dim": 0},
        [f"head_dim = 0 {RULE} a positive integer, null or absent"],
    ),
    "quantized": (
        {"quantization_config": 1},
        [f"quantization_config = 1 {RULE} false, null or absent"],
    ),
    "half a stretch": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
            }
        },
        [f"rope_parameters.original_max_position_embeddings = null {RULE} a positive integer"],
    ),
    "two contexts": (
        {
            "rope_scaling": {"type": "llama3", **_SCALED, "original_max_position_embeddings": 5},
            "original_max_position_embeddings": 16,
        },
        [
            f"original_max_position_embeddings = 16 {RULE} "
            "rope_scaling.original_max_position_embeddings = 5"
        ],
    ),
    "positions by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        [
            f'rope_parameters = {{"full_attention": {{"rope_theta": 1000000.0}}}} {RULE} '
            "without these keys, "
            "because its rope_type is default"
        ],
    ),
    "part of a head": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        [f"partial_rotary_factor = 0.5 {RULE} 1"],
    ),
    "windows of some layers": (
        {
            "model_type": "qwen2",
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
        [
            f'layer_types = ["full_attention", "sliding_attention", "sliding_attention"] {RULE} '
            f"{PATTERN}"
        ],
    ),
    "windows of some layers of smollm 3": (
        {
            "model_type": "smollm3",
            "use_sliding_window": True,
            "sliding_window": 5,
            "no_rope_layer_interval": 2,
        },
        [
            f'layer_types = ["full_attention", "sliding_attention", "full_attention"] {RULE} '
            f"{PATTERN}"
        ],
    ),
    "windows that smollm 3 says it does not use": (
        {
            "model_type": "smollm3",
            "sliding_window": 5,
            "layer_types": layer_types(3, 2),
        },
        [f"sliding_window = null {RULE} a positive integer"],
    ),
    "positions in the first layer only": (
        {"model_type": "smollm3", "no_rope_layers": [1, 0, 0]},
        [
            f"no_rope_layers = [1, 0, 0] {RULE} 1, and 0 in every N-th layer: N, 2N, 3N ... "
            "counted from 1"
        ],
    ),
    "positions in words": (
        {"model_type": "smollm3", "no_rope_layers": [1, True, 0]},
        [f"no_rope_layers = [1, true, 0] {RULE} 0 or 1 for each layer"],
    ),
    "positions of two layers": (
        {"model_type": "smollm3", "no_rope_layers": [1, 1]},
        [f"no_rope_layers = [1, 1] {RULE} 0 or 1 for each layer"],
    ),
    "no interval": (
        {"model_type": "smollm3", "no_rope_layer_interval": 0},
        [f"no_rope_layer_interval = 0 {RULE} a positive integer"],
    ),
    "a bias of smollm 3": (
        {"model_type": "smollm3", "attention_bias": True},
        [f"attention_bias = true {RULE} false, null or absent"],
    ),
    "layers without windows, which mistral does not read": (
        {
            "model_type": "mistral",
            "num_key_value_heads": 4,
            "sliding_window": 8,
            "layer_types": ["full_attention"] * 3,
        },
        [
            'layer_types = ["full_attention", "full_attention", "full_attention"] '
            f'{RULE} "sliding_attention" for each layer, or absent'
        ],
    ),
    "a window of nothing": (
        {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 0},
        [f"sliding_window = 0 {RULE} a positive integer, null or absent"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_values_are_named(case: str, tmp_path: Path) -> None:
    settings, lines = REFUSED[case]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | settings))
    with pytest.raises(CheckpointError) as caught:
        hf.read_shape(tmp_path)
    assert list(caught.value.lines) == [f"{file}: {line}" for line in lines]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
    ],
    ids=["none", "no JSON"],
)
def test_an_unreadable_config_is_refused(text: str | None, cause: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        CheckpointError,
        match=f"config.json cannot be read .*{cause}.*give a folder in the format of Hugging Face",
    ):
        hf.read_shape(tmp_path)


def test_a_shape_without_an_architecture_of_transformers_is_refused() -> None:
    with pytest.raises(CheckpointError, match="both qk_norm and qkv_bias; convert to torch or dcp"):
        hf.make_config(replace(PRESETS["debug-tiny"], qk_norm=True, qkv_bias=True), "float32")
