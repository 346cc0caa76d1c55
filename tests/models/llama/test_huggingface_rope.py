"""Stretched rotary positions: config.json, angles, loss and gradients agree with transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer3d.facts.errors import CheckpointError
from composer3d.models.contract import SequenceInfo
from composer3d.models.llama import huggingface as hf
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.locations import hf_locations
from composer3d.models.registry import architecture, resolve
from composer3d.models.rotary import YarnRamp
from tests.models.moe.transformers_models import SMALL, compute_in_float64, transformers

# The architecture of each model_type.
FAMILIES = {"llama": "llama", "qwen2": "llama", "qwen3": "llama", "olmo2": "olmo2"}
TOKENS = (2, 60)  # batch and length
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "llama3": {**_LLAMA3, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": _YARN,
    "yarn, a ratio, uneven bounds": {
        **_YARN,
        "beta_fast": 5.0,
        "beta_slow": 0.7,
        "mscale": 1.0,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn, other scores": {**_YARN, "attention_factor": 0.8, "beta_fast": 8},
    "yarn, a step at the first pair": {**_YARN, "original_max_position_embeddings": 6},
    # The slowest pair still turns more than once.
    "yarn, a ramp beyond the last pair": {
        **_YARN,
        "original_max_position_embeddings": 1000,
        "rope_theta": 10.0,
    },
}


def make_folder(folder: Path, family: str, kind: str) -> Path:
    """Save a random model in float64 with transformers."""
    torch.manual_seed(1)
    rope = {"rope_theta": 1e4, **KINDS[kind]}
    # "dynamic" positions are not stretched up to the length of the sequences.
    settings = SMALL | {"rope_parameters": rope, "max_position_embeddings": TOKENS[1]}
    config = transformers.AutoConfig.for_model(family, **settings, pad_token_id=None)
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


def load_ours(family: str, folder: Path) -> tuple[Any, dict[str, str]]:
    """Return our model with the weights of a folder, and the name of each parameter there."""
    ours = architecture(FAMILIES[family])
    shape = resolve(ours.huggingface).read_shape(folder)
    tensors = load_file(folder / "model.safetensors")
    places = hf_locations(ours.table_of(shape))
    names = {name: place.names[0] for name, place in places.items()}
    model = ours.build(shape, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[names[name]])
    return model, names


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == theirs.dtype == torch.float64
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, family, kind)
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    labels_BT = torch.cat((tokens_BT[:, 1:], torch.full((len(tokens_BT), 1), -100)), 1)
    positions_BT = torch.arange(TOKENS[1]).expand(TOKENS)
    ours, names = load_ours(family, folder)
    logits = ours.logits(tokens_BT, SequenceInfo(positions_BT))
    with torch.no_grad():
        shipped = load_theirs(folder)(tokens_BT).logits
    # It computes norms and positions in float32, whatever the model is in.
    assert relative_error(logits, shipped) < 1e-6

    compute_in_float64(monkeypatch, family)
    theirs = load_theirs(folder)
    expected = theirs(tokens_BT, labels=tokens_BT, use_cache=False)
    assert relative_error(logits, expected.logits) < 1e-12
    loss = ours(tokens_BT, labels_BT, positions_BT) / (labels_BT != -100).sum()
    assert relative_error(loss, expected.loss) < 1e-12
    loss.backward()
    expected.loss.backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert relative_error(parameter.grad, grads[names[name]]) < 1e-10, name


@torch.no_grad()
@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_our_config(kind: str, tmp_path: Path, carries: bool) -> None:
    folder = make_folder(tmp_path / "theirs", "qwen3", kind)
    before = json.loads((folder / "config.json").read_text())
    shape = hf.read_shape(folder)
    config = hf.make_config(shape, "float64", before | {"notes": "mine"} if carries else None)
    assert hf.canonical(hf.parse_config(config)) == hf.canonical(shape)
    assert config.get("notes") == ("mine" if carries else None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    again, first = (load_theirs(place)(tokens_BT).logits for place in (tmp_path, folder))
    assert torch.equal(again, first)


LLAMA = SMALL | {"model_type": "llama", "max_position_embeddings": 4096, "rope_theta": 1e4}
_OF_4 = {"rope_type": "yarn", "factor": 4.0}
_AT_1024 = {"original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("written", "context"),
    [
        ({"rope_scaling": _OF_4 | _AT_1024}, 1024),
        ({"rope_parameters": _OF_4 | _AT_1024}, 1024),
        ({"rope_scaling": {"type": "yarn", "factor": 4} | _AT_1024}, 1024),
        ({"rope_scaling": _OF_4 | _AT_1024, **_AT_1024}, 1024),
        ({"rope_scaling": _OF_4}, 4096),
        ({"rope_scaling": _OF_4 | {"beta_fast": None, "attention_factor": None}}, 4096),
    ],
)
def test_the_context_before_the_stretch_is_that_of_transformers(
    written: dict[str, Any], context: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    shape = hf.read_shape(tmp_path)
    assert shape.rope_context == theirs["original_max_position_embeddings"] == context
    assert (shape.rope_scaling, shape.rope_factor) == ("yarn", 4.0)
    assert shape.stretched_context == 4 * context


def test_published_configurations_are_read() -> None:
    """What the cards of Qwen 2.5 and 3 recommend, and the positions of two models of DeepSeek."""
    card = {"factor": 4.0, "original_max_position_embeddings": 32768}
    qwen_3 = LLAMA | {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6}
    qwen_3 |= {"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", **card}}
    shape = hf.parse_config(qwen_3)
    assert (shape.rope_context, shape.rope_factor) == (32768, 4.0)
    # 0.1 ln 4 + 1, and 64 log_1e6(32768 / (2 pi turns)) = 23.6 and 39.7 for 32 turns and for one.
    assert shape.attention_factor == pytest.approx(1.138629436111989, rel=1e-15)
    assert shape.yarn_ramp == YarnRamp(23, 40)

    v3 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    v3 |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    sizes = {"head_dim": 64, "max_position_embeddings": 163840}
    shape = hf.parse_config(LLAMA | sizes | {"rope_scaling": v3})
    assert (shape.attention_factor, shape.yarn_ramp) == (1.0, YarnRamp(10, 23))

    coder = {"rope_theta": 100000, "rope_scaling": {"factor": 4.0, "type": "linear"}}
    shape = hf.parse_config(LLAMA | coder)
    assert (shape.rope_theta, shape.rope_scaling, shape.rope_factor) == (1e5, "linear", 4.0)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_factor_of_one_stretches_nothing(kind: str) -> None:
    written = {"rope_scaling": {"type": kind, "factor": 1}}
    assert hf.parse_config(LLAMA | written) == hf.parse_config(LLAMA)


def test_the_context_of_dynamic_positions_replaces_a_carried_one() -> None:
    shape = replace(
        PRESETS["debug-tiny"], rope_scaling="dynamic", rope_factor=2.0, rope_context=1024
    )
    assert hf.make_config(shape, "float32")["max_position_embeddings"] == 1024
    carried = LLAMA | {"max_position_embeddings": 4096}
    assert hf.make_config(shape, "float32", carried)["max_position_embeddings"] == 1024
    assert hf.parse_config(hf.make_config(shape, "float32")) == shape


RULE = "is not supported; it must be"
_TYPES = '"default", "llama3", "linear", "dynamic" or "yarn"'
_RATIO = "both mscale and mscale_all_dim above 0, without attention_factor, or neither"
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "longrope": (
        {"rope_scaling": {"type": "longrope", "factor": 4.0}},
        [f'rope_scaling.rope_type = "longrope" {RULE} {_TYPES}'],
    ),
    "a type that is no text": (
        {"rope_parameters": {"rope_type": ["yarn"]}},
        [f'rope_parameters.rope_type = ["yarn"] {RULE} {_TYPES}'],
    ),
    "no factor": (
        {"rope_scaling": {"type": "linear"}},
        [f"rope_scaling.factor = null {RULE} a number"],
    ),
    "a factor that transformers would infer": (
        {"rope_scaling": {"type": "yarn", **_AT_1024}},
        [f"rope_scaling.factor = null {RULE} a number"],
    ),
    "a factor below 1": (
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        ["factor = 0.5 must be from 1 to 1_000_000"],
    ),
    "keys of another type": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32, **_AT_1024}},
        [
            'rope_scaling = {"beta_fast": 32, "original_max_position_embeddings": 1024} '
            f"{RULE} without these keys, because its rope_type is linear"
        ],
    ),
    "two contexts": (
        {"rope_scaling": _OF_4 | _AT_1024, "original_max_position_embeddings": 512},
        [
            f"original_max_position_embeddings = 512 {RULE} "
            "rope_scaling.original_max_position_embeddings = 1024"
        ],
    ),
    "a context that the model alone would read": (
        {"rope_parameters": _OF_4, **_AT_1024},
        [
            f"original_max_position_embeddings = 1024 {RULE} "
            "rope_parameters.original_max_position_embeddings = 4096"
        ],
    ),
    "no context": (
        {"rope_scaling": _OF_4, "max_position_embeddings": None},
        [f"rope_scaling.original_max_position_embeddings = null {RULE} a positive integer"],
    ),
    "numbers of text": (
        {"rope_scaling": _OF_4 | {"beta_fast": "32", "beta_slow": True, "truncate": 1}},
        [
            f'rope_scaling.beta_fast = "32" {RULE} a number',
            f"rope_scaling.beta_slow = true {RULE} a number",
            f"rope_scaling.truncate = 1 {RULE} true, false or absent",
        ],
    ),
    "bounds the wrong way round": (
        {"rope_scaling": _OF_4 | {"beta_fast": 2, "beta_slow": 3}},
        ["beta_slow = 3 must be at most beta_fast = 2"],
    ),
    "bounds of nothing": (
        {"rope_scaling": _OF_4 | {"beta_fast": 1e-320, "beta_slow": 5e-324}},
        [
            "beta_fast = 1e-320 must be from 1e-06 to 1_000_000",
            "beta_slow = 5e-324 must be from 1e-06 to 1_000_000",
        ],
    ),
    "no pair to stretch from": (
        {"rope_scaling": _OF_4 | {"original_max_position_embeddings": 1}},
        [
            "rope_theta = 10000.0 with original_max_position_embeddings = 1 leaves YaRN no pair "
            "to stretch from"
        ],
    ),
    "pairs that turn alike": (
        {"rope_scaling": _OF_4 | _AT_1024, "rope_theta": 1},
        [
            "rope_theta = 1 with original_max_position_embeddings = 1024 leaves YaRN no pair to "
            "stretch from"
        ],
    ),
    "half a ratio": (
        {"rope_scaling": _OF_4 | _AT_1024 | {"mscale_all_dim": 1.0}},
        [f"rope_scaling.mscale = null {RULE} {_RATIO}"],
    ),
    "a ratio and a factor": (
        {
            "rope_scaling": _OF_4
            | _AT_1024
            | {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1.5}
        },
        [f"rope_scaling.mscale = 1 {RULE} {_RATIO}"],
    ),
    "larger scores of positions that are not stretched": (
        {"rope_scaling": {"type": "yarn", "factor": 1, "attention_factor": 1.2}},
        [f"rope_scaling.attention_factor = 1.2 {RULE} 1, null or absent, because the factor is 1"],
    ),
    "no scores": (
        {"rope_scaling": _OF_4 | {"attention_factor": 0}},
        ["attention_factor = 0 must be above 0 and at most 1_000"],
    ),
    "dynamic positions of any length": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": None},
        [
            f"max_position_embeddings = null {RULE} a positive integer up to 134_217_728, because "
            "the rope_type is dynamic"
        ],
    ),
    "dynamic positions of two lengths": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, **_AT_1024},
        [f"original_max_position_embeddings = 1024 {RULE} max_position_embeddings = 4096"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_values_are_named(case: str) -> None:
    settings, lines = REFUSED[case]
    with pytest.raises(CheckpointError) as caught:
        hf.parse_config(LLAMA | settings)
    assert list(caught.value.lines) == lines


def test_shapes_say_how_far_they_go() -> None:
    def stretched(**values: Any) -> ModelShape:
        return replace(PRESETS["debug-tiny"], **values)

    assert stretched(rope_scaling="linear", rope_factor=4.0).stretched_context is None
    dynamic = stretched(rope_scaling="dynamic", rope_factor=4.0, rope_context=100)
    assert (dynamic.stretched_context, dynamic.most_tokens) == (100, 100)
    assert replace(dynamic, rope_factor=1.0).most_tokens is None
    yarn = replace(dynamic, rope_scaling="yarn")
    assert (yarn.stretched_context, yarn.most_tokens) == (400, None)
