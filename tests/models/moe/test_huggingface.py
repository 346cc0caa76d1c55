"""Mixtral and Qwen 2 and 3 MoE: our shapes, names, logits and gradients agree with transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer3d.facts.errors import CheckpointError
from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.moe import Router
from composer3d.models.moe import huggingface as hf
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.names import hf_locations
from composer3d.models.moe.shape import PRESETS, MoeShape
from composer3d.models.registry import huggingface_model_types
from tests.models.moe.transformers_models import (
    MODELS,
    SMALL,
    compute_in_float64,
    load_folder,
    make_folder,
    take,
    transformers,
)

TOKENS = (3, 40)  # batch and length: within a window, and beyond it


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hf"), request.param, dtype=torch.float64)


def load_ours(folder: Path, **fields: Any) -> MoeLlama:
    """Load a saved model with our code, in the dtype of the files; ``fields`` are of the shape."""
    shape = replace(hf.read_shape(folder), **fields)
    tensors = load_file(folder / "model.safetensors")
    locations = hf_locations(shape, tensors)
    assert tensors.keys() == {name for place in locations.values() for name in place.names}
    model = MoeLlama(shape, device="cpu", dtype=next(iter(tensors.values())).dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(take(locations[name], tensors))
    return model


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == theirs.dtype == torch.float64
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_logits_loss_and_gradients_equal_those_of_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load_ours(folder)
    compute_in_float64(monkeypatch, ours.shape.model_type)
    theirs = load_folder(folder, torch.float64)
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    # transformers shifts the labels itself.
    labels_BT = torch.cat((tokens_BT[:, 1:], torch.full((len(tokens_BT), 1), -100)), 1)
    n_labels = (labels_BT != -100).sum()
    positions_BT = torch.arange(TOKENS[1]).expand(TOKENS)

    expected = theirs(tokens_BT, labels=tokens_BT, use_cache=False)
    seq = SequenceInfo(positions_BT)
    assert relative_error(ours.logits(tokens_BT, seq), expected.logits) < 1e-12
    loss = ours(tokens_BT, labels_BT, positions_BT) / n_labels
    assert relative_error(loss, expected.loss) < 1e-12

    loss.backward()
    expected.loss.backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    locations = hf_locations(ours.shape, grads)  # packed, as transformers has them in memory
    for name, parameter in ours.named_parameters():
        assert relative_error(parameter.grad, take(locations[name], grads)) < 1e-11, name


def test_the_balance_losses_are_related_as_the_module_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer and one sequence: their loss is ours times ``num_experts_per_tok``."""
    folder = make_folder(tmp_path, "qwen 3", dtype=torch.float64, num_hidden_layers=1)
    compute_in_float64(monkeypatch, "qwen3_moe")
    theirs = load_folder(folder, torch.float64)
    ours = load_ours(folder, balance_loss=1.0)
    tokens_BT = torch.randint(SMALL["vocab_size"], (1, 40))
    positions_BT = torch.arange(40)[None]
    expected = theirs(tokens_BT, output_router_logits=True).aux_loss

    # The coefficient's share of the gradient shows that the loss is really added.
    ours(tokens_BT, tokens_BT, positions_BT).backward()
    (router,) = (module for module in ours.modules() if isinstance(module, Router))
    assert router.statistics.sums is not None
    balance = router.statistics.sums[router.experts]
    assert relative_error(router.per_token * balance, expected.detach()) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("carries", [False, True])
def test_transformers_loads_our_config(folder: Path, tmp_path: Path, carries: bool) -> None:
    shape, before = hf.read_shape(folder), json.loads((folder / "config.json").read_text())
    config = hf.make_config(shape, "float32", before | {"notes": "mine"} if carries else None)
    assert hf.parse_config(config) == shape
    assert "rope_parameters" not in config  # transformers 4 does not know it
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    again, first = load_folder(tmp_path), load_folder(folder)
    assert type(again) is type(first)
    assert again.config.dtype == torch.float32
    assert config.get("notes") == ("mine" if carries else None)
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    assert torch.equal(again(tokens_BT).logits, first(tokens_BT).logits)


MINIMAL = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("settings", [{}, {"use_sliding_window": True}], ids=["least", "windows"])
def test_absent_keys_have_the_defaults_of_transformers(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = MINIMAL | {"model_type": kind, "num_attention_heads": 16} | settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    shape = hf.read_shape(tmp_path)
    assert shape.n_kv_heads == theirs.num_key_value_heads
    assert shape.head_width == SMALL["hidden_size"] // 16
    assert (shape.norm_eps, shape.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": shape.rope_theta}
    assert shape.window == (theirs.sliding_window or 0)
    layer_types = getattr(theirs, "layer_types", None) if kind == "qwen2_moe" else None
    if layer_types is not None:
        kinds = ["sliding_attention" if shape.window_of(n) else "full_attention" for n in range(3)]
        assert kinds == layer_types
    assert theirs.hidden_act == "silu"
    experts = getattr(theirs, "num_local_experts", None) or theirs.num_experts
    assert (shape.experts, shape.experts_per_token) == (experts, theirs.num_experts_per_tok)
    assert shape.shared_ffn == getattr(theirs, "shared_expert_intermediate_size", 0)
    assert shape.qkv_bias == getattr(theirs, "qkv_bias", False)
    width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert shape.expert_width == width
    assert shape.renormalise == getattr(theirs, "norm_topk_prob", True)
    assert shape.moe_layers == shape.n_layers
    assert shape.balance_loss == 0


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_every_name_of_the_number_of_experts_is_read(key: str) -> None:
    assert hf.parse_config(MIXTRAL | {key: 5}).experts == 5


# mlp_only_layers and decoder_sparse_step, and the same as dense_layers and moe_every.
LAYERS_WITH_EXPERTS = [
    ([], 1, 0, 1),
    (None, 2, 0, 2),
    ([0], 1, 1, 1),
    ([0, 1, 2], 1, 3, 1),
    ([0], 2, 0, 2),
    ([1], 2, 2, 2),
    ([0, 1, 3], 2, 0, 6),
    ([1, 0], 3, 0, 3),
]


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(("dense", "step", "dense_layers", "moe_every"), LAYERS_WITH_EXPERTS)
def test_layers_with_experts_are_those_of_transformers(
    kind: str, dense: list[int] | None, step: int, dense_layers: int, moe_every: int
) -> None:
    config = (
        SMALL
        | {"model_type": kind}
        | {"num_hidden_layers": 7, "mlp_only_layers": dense, "decoder_sparse_step": step}
    )
    theirs = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    has_experts = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    shape = hf.parse_config(config)
    assert (shape.dense_layers, shape.moe_every) == (dense_layers, moe_every)
    assert [shape.has_experts(layer) for layer in range(7)] == has_experts
    assert hf.parse_config(hf.make_config(shape, "float32")) == shape


PUBLISHED = [name for name in PRESETS if name.startswith(("mixtral", "qwen"))]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_survive_a_round_trip(preset: str) -> None:
    shape = PRESETS[preset]
    config = hf.make_config(shape, "bfloat16")
    again = hf.parse_config(config)
    assert replace(again, balance_loss=shape.balance_loss, head_dim=shape.head_dim) == shape
    theirs = transformers.AutoConfig.for_model(**config)
    assert (theirs.head_dim, theirs.num_key_value_heads) == (shape.head_width, shape.n_kv_heads)
    assert (getattr(theirs, "num_local_experts", None) or theirs.num_experts) == shape.experts
    assert (
        theirs.architectures[0]
        in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )


def test_equal_models_have_one_canonical_shape() -> None:
    shape = PRESETS["debug-moe"]
    assert hf.canonical(shape) == hf.canonical(
        replace(shape, expert_ffn=shape.ffn, ffn=7, head_dim=16, z_loss=0.5)
    )
    assert hf.canonical(shape) == hf.canonical(replace(shape, group_best="one"))
    assert hf.canonical(shape) != hf.canonical(replace(shape, expert_ffn=shape.ffn + 1))
    qwen = replace(shape, qk_norm=True, moe_every=2)
    assert hf.canonical(qwen) == hf.canonical(replace(qwen, dense_layers=1, balance_loss=0.1))
    assert hf.canonical(qwen) != hf.canonical(replace(qwen, dense_layers=2))
    assert hf.canonical(qwen) != hf.canonical(replace(qwen, ffn=7, expert_ffn=shape.ffn))


def test_a_carried_config_of_another_shape_gives_ids_and_the_longest_sequence() -> None:
    carried = MIXTRAL | {"eos_token_id": [8, 9], "max_position_embeddings": 77, "notes": "mine"}
    shape = replace(hf.parse_config(carried), experts=5)
    config = hf.make_config(shape, "bfloat16", carried)
    assert hf.parse_config(config) == shape
    assert (config["eos_token_id"], config["max_position_embeddings"]) == ([8, 9], 77)
    assert "notes" not in config


MIXTRAL = MINIMAL | {"model_type": "mixtral", "num_key_value_heads": 4}
QWEN = MINIMAL | {"model_type": "qwen3_moe"}
QWEN_2 = MINIMAL | {"model_type": "qwen2_moe", "num_key_value_heads": 4}
RULE = "is not supported; it must be"
*_TYPES, _LAST_TYPE = huggingface_model_types()
NO_TYPE = f"is not supported; composer3d reads {', '.join(_TYPES)} and {_LAST_TYPE}"
LAYERS = (
    "a list of the first layers: model.dense_layers and model.moe_every of a recipe describe no "
    "others"
)
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another model": (
        MIXTRAL | {"model_type": "granitemoe"},
        [f'model_type = "granitemoe" {NO_TYPE}'],
    ),
    "a model without experts": (
        MIXTRAL | {"model_type": "llama"},
        ['model_type = "llama" needs another architecture; set model.architecture = "llama"'],
    ),
    "a model of no type": (
        MIXTRAL | {"model_type": ["mixtral"]},
        [f'model_type = ["mixtral"] {NO_TYPE}'],
    ),
    "two at once": (
        MIXTRAL | {"hidden_act": "gelu", "attention_bias": True},
        [
            f'hidden_act = "gelu" {RULE} "silu"',
            f"attention_bias = true {RULE} false, null or absent",
        ],
    ),
    "a bias of qwen": (
        QWEN | {"attention_bias": True},
        [f"attention_bias = true {RULE} false, null or absent"],
    ),
    "a bias in words": (
        QWEN_2 | {"qkv_bias": "yes"},
        [f'qkv_bias = "yes" {RULE} true, false or absent'],
    ),
    "no shared expert": (
        QWEN_2 | {"shared_expert_intermediate_size": 0},
        [f"shared_expert_intermediate_size = 0 {RULE} a positive integer"],
    ),
    "a shared expert beyond all": (
        QWEN_2 | {"shared_expert_intermediate_size": 10**9},
        ["shared_expert_intermediate_size = 1000000000 must be from 0 to 4_194_304"],
    ),
    "experts under a name that Qwen 2 does not read": (
        QWEN_2 | {"num_local_experts": 8},
        [f"num_local_experts = 8 {RULE} num_experts = 60"],
    ),
    "a window of the first layer only": (
        QWEN_2 | {"use_sliding_window": True, "max_window_layers": 1},
        [
            'layer_types = ["sliding_attention", "full_attention", "full_attention"] '
            f"{RULE} sliding_attention, and full_attention in every N-th layer: N, 2N, 3N ... "
            "counted from 1"
        ],
    ),
    "windows without a width": (
        QWEN_2 | {"layer_types": ["sliding_attention"] * 3},
        [f"sliding_window = null {RULE} a positive integer"],
    ),
    "quantized": (
        QWEN | {"quantization_config": {"bits": 4}},
        [f'quantization_config = {{"bits": 4}} {RULE} false, null or absent'],
    ),
    "experts in words": (
        QWEN | {"num_experts": "8"},
        [f'num_experts = "8" {RULE} a positive integer'],
    ),
    "true experts": (
        MIXTRAL | {"num_local_experts": True},
        [f"num_local_experts = true {RULE} a positive integer"],
    ),
    "no experts": (QWEN | {"num_experts": 0}, [f"num_experts = 0 {RULE} a positive integer"]),
    "experts beyond all": (
        QWEN | {"num_experts": 10**9},
        ["num_experts = 1000000000 must be from 1 to 65_536"],
    ),
    "two numbers of experts": (
        QWEN | {"num_experts": 4, "num_local_experts": 8},
        [f"num_experts = 4 {RULE} num_local_experts = 8"],
    ),
    "more than all experts": (
        MIXTRAL | {"num_local_experts": 2, "num_experts_per_tok": 3},
        ["num_experts_per_tok = 3 must be at most the experts of num_local_experts = 2"],
    ),
    "half an expert": (
        MIXTRAL | {"num_experts_per_tok": 0.5},
        [f"num_experts_per_tok = 0.5 {RULE} a positive integer"],
    ),
    "no width": (
        QWEN | {"moe_intermediate_size": None},
        [f"moe_intermediate_size = null {RULE} a positive integer"],
    ),
    "norm in words": (
        QWEN | {"norm_topk_prob": "no"},
        [f'norm_topk_prob = "no" {RULE} true, false or absent'],
    ),
    "a step of 0": (
        QWEN | {"decoder_sparse_step": 0},
        [f"decoder_sparse_step = 0 {RULE} a positive integer or absent"],
    ),
    "a layer in the middle": (
        QWEN | {"mlp_only_layers": [1]},
        [f"mlp_only_layers = [1] {RULE} {LAYERS}"],
    ),
    "the last layer": (
        QWEN | {"mlp_only_layers": [2]},
        [f"mlp_only_layers = [2] {RULE} {LAYERS}"],
    ),
    "all layers": (
        QWEN | {"mlp_only_layers": [0, 1, 2]},
        ["mlp_only_layers = [0, 1, 2] and decoder_sparse_step = 1 leave no layer with experts"],
    ),
    "a step beyond the layers": (
        QWEN | {"decoder_sparse_step": 4},
        ["mlp_only_layers = [] and decoder_sparse_step = 4 leave no layer with experts"],
    ),
    "a layer that is not there": (
        QWEN | {"mlp_only_layers": [3]},
        [f"mlp_only_layers = [3] {RULE} a list of integers from 0 to 2, null or absent"],
    ),
    "a number of layers": (
        QWEN | {"mlp_only_layers": 1},
        [f"mlp_only_layers = 1 {RULE} a list of integers from 0 to 2, null or absent"],
    ),
    "layers beyond all": (
        QWEN | {"num_hidden_layers": 10**12},
        ["num_hidden_layers = 1000000000000 must be from 1 to 10_000"],
    ),
    "windows of some layers": (
        QWEN
        | {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        [
            'layer_types = ["full_attention", "sliding_attention", "sliding_attention"] '
            f'{RULE} "sliding_attention" for each layer, or absent'
        ],
    ),
    "windows of no layer": (
        MIXTRAL | {"sliding_window": 8, "layer_types": ["full_attention"] * 3},
        [
            'layer_types = ["full_attention", "full_attention", "full_attention"] '
            f'{RULE} "sliding_attention" for each layer, or absent'
        ],
    ),
    "a window of nothing": (
        MIXTRAL | {"sliding_window": 0},
        [f"sliding_window = 0 {RULE} a positive integer, null or absent"],
    ),
    "longrope": (
        QWEN | {"rope_scaling": {"type": "longrope", "factor": 4.0}},
        [
            f'rope_scaling.rope_type = "longrope" {RULE} "default", "llama3", "linear", '
            '"dynamic" or "yarn"'
        ],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_values_are_named(case: str, tmp_path: Path) -> None:
    config, lines = REFUSED[case]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        hf.read_shape(tmp_path)
    assert list(caught.value.lines) == [f"{file}: {line}" for line in lines]


@pytest.mark.parametrize("config", [[], None, 3, "mixtral"])
def test_a_config_that_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model_type = null is not supported"):
        hf.parse_config(config)


def test_minimal_configs_are_not_refused() -> None:
    """Otherwise the refusals above could have another cause."""
    assert hf.parse_config(MIXTRAL).experts == 8
    assert hf.parse_config(QWEN | {"layer_types": ["full_attention"] * 3}).experts == 128
    qwen_2 = hf.parse_config(QWEN_2 | {"attention_bias": False, "num_experts": 8})
    assert (qwen_2.experts, qwen_2.shared_gate) == (8, True)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "sigmoid": ({"router": "sigmoid"}, "mixtral has no router = sigmoid"),
    "scale": ({"router_scale": 2.5}, "mixtral has no router_scale = 2.5"),
    "groups": ({"expert_groups": 2, "groups_per_token": 2}, "mixtral has no expert_groups = 2"),
    "bias": ({"router_bias": True}, "mixtral has no router_bias = True"),
    "shared": ({"shared_ffn": 8, "qk_norm": True}, "qwen3_moe has no shared_ffn = 8"),
    "gate and norms": (
        {"shared_ffn": 8, "shared_gate": True, "qk_norm": True},
        "qwen2_moe has no qk_norm = True",
    ),
    "biases of attention": ({"qkv_bias": True}, "mixtral has no qkv_bias = True"),
    "weights as they are": ({"renormalise": False}, "mixtral has no renormalise = False"),
    "dense": ({"dense_layers": 1}, "mixtral has experts in all layers, not in 3 of 4"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_shapes_that_transformers_does_not_compute_are_refused(case: str) -> None:
    fields, line = UNSUPPORTED[case]
    shape = replace(PRESETS["debug-moe"], **fields)
    with pytest.raises(CheckpointError) as caught:
        hf.make_config(shape, "float32")
    assert caught.value.lines == (f"Hugging Face's {line}; convert to torch or dcp",)


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "router in words": ({"router": "tanh"}, 'router = "tanh" must be "softmax" or "sigmoid"'),
    "router in a list": ({"router": ["softmax"]}, 'router = ["softmax"] must be "softmax" or'),
    "groups": ({"expert_groups": 3}, "expert_groups = 3 must divide experts = 8"),
    "chosen groups": (
        {"groups_per_token": 2},
        "groups_per_token = 2 must be at most expert_groups = 1",
    ),
    "experts in groups": (
        {"expert_groups": 4, "experts_per_token": 3},
        "experts_per_token = 3 must be at most the experts in groups_per_token = 1 of experts = 8",
    ),
    "a gate of nothing": (
        {"shared_gate": True},
        "shared_gate = true has no expert to weigh with shared_ffn = 0",
    ),
    "layers": (
        {"dense_layers": 3, "moe_every": 2, "n_layers": 3},
        "dense_layers = 3 and moe_every = 2 leave none of n_layers = 3 with experts",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_of_a_manifest_are_checked(case: str) -> None:
    changes, line = VALUES[case]
    shape = PRESETS["debug-moe"]
    values = {name: getattr(shape, name) for name in MoeShape.__dataclass_fields__}
    assert hf.make_shape(values) == shape
    with pytest.raises(CheckpointError) as caught:
        hf.make_shape(values | changes)
    assert len(caught.value.lines) == 1
    assert caught.value.lines[0].startswith(line)
