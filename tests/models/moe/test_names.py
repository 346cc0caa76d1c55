"""The places of experts in the files of Hugging Face, both forms."""

from dataclasses import replace

import pytest

from composer3d.facts.errors import CheckpointError
from composer3d.models.locations import Location
from composer3d.models.moe.names import hf_locations
from composer3d.models.moe.shape import MoeShape

MIXTRAL = MoeShape(
    dim=48,
    n_layers=12,
    n_heads=4,
    n_kv_heads=2,
    ffn=80,
    vocab=99,
    experts=5,
    experts_per_token=2,
)
QWEN_3 = replace(MIXTRAL, qk_norm=True, expert_ffn=24, dense_layers=2)
QWEN_2 = replace(QWEN_3, qk_norm=False, qkv_bias=True, shared_ffn=56, shared_gate=True)
EXPERTS = "blocks.11.moe.experts"
MIXTRAL_BLOCK = "model.layers.11.block_sparse_moe"
QWEN_BLOCK = "model.layers.11.mlp"
PACKED = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(12)]


def in_order(block: str, projection: str) -> tuple[str, ...]:
    return tuple(f"{block}.experts.{expert}.{projection}.weight" for expert in range(5))


def test_published_names() -> None:
    mixtral, qwen_3 = hf_locations(MIXTRAL), hf_locations(QWEN_3)
    for leaf, projection in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        wide, narrow = ((48, 80), (48, 24)) if leaf == "w2" else ((80, 48), (24, 48))
        names = in_order(MIXTRAL_BLOCK, leaf)
        assert mixtral[f"{EXPERTS}.{leaf}"] == Location(names, wide, is_stack=True)
        names = in_order(QWEN_BLOCK, projection)
        assert qwen_3[f"{EXPERTS}.{leaf}"] == Location(names, narrow, is_stack=True)
    router = "blocks.11.moe.router.weight"
    assert mixtral[router] == Location((f"{MIXTRAL_BLOCK}.gate.weight",), (5, 48))
    assert qwen_3[router] == Location((f"{QWEN_BLOCK}.gate.weight",), (5, 48))
    dense = Location(("model.layers.1.mlp.gate_proj.weight",), (80, 48))
    assert qwen_3["blocks.1.ffn.w1.weight"] == dense
    assert "blocks.2.ffn.w1.weight" not in qwen_3


@pytest.mark.parametrize("shape", [MIXTRAL, QWEN_3], ids=["mixtral", "qwen 3"])
def test_packed_names_are_the_same_in_both_families(shape: MoeShape) -> None:
    """Gates come before up projections, and one tensor in the file has both."""
    places = hf_locations(shape, PACKED)
    width = shape.expert_width
    gate_up = (f"{QWEN_BLOCK}.experts.gate_up_proj",)
    packed = (5, 2 * width, 48)
    assert places[f"{EXPERTS}.w1"] == Location(gate_up, packed, rows=(0, width))
    assert places[f"{EXPERTS}.w3"] == Location(gate_up, packed, rows=(width, 2 * width))
    down = (f"{QWEN_BLOCK}.experts.down_proj",)
    assert places[f"{EXPERTS}.w2"] == Location(down, (5, 48, width))
    router = places["blocks.11.moe.router.weight"]
    assert router == Location((f"{QWEN_BLOCK}.gate.weight",), (5, 48))


def test_the_shared_expert_and_its_gate_have_names() -> None:
    for in_files in ((), PACKED):
        places = hf_locations(QWEN_2, in_files)
        for ours, projection in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            size = (48, 56) if ours == "w2" else (56, 48)
            name = f"{QWEN_BLOCK}.shared_expert.{projection}.weight"
            assert places[f"blocks.11.moe.shared.{ours}.weight"] == Location((name,), size)
        gate = Location((f"{QWEN_BLOCK}.shared_expert_gate.weight",), (1, 48))
        assert places["blocks.11.moe.shared_gate.weight"] == gate


def test_every_tensor_has_a_name_of_its_own() -> None:
    for shape in (MIXTRAL, QWEN_2, QWEN_3):
        places = hf_locations(shape)
        names = [name for place in places.values() for name in place.names]
        assert len(set(names)) == len(names)
        of_attention = 4 + 2 + 2 * shape.qk_norm + 3 * shape.qkv_bias
        of_experts = 1 + 3 * 5 + 4 * shape.shared_gate
        dense = shape.n_layers - shape.moe_layers
        assert len(names) == 12 * of_attention + shape.moe_layers * of_experts + dense * 3 + 3


def test_whole_shapes_are_those_of_our_tensors() -> None:
    for in_files in ((), PACKED):
        places = hf_locations(MIXTRAL, in_files)
        for leaf, size in (("w1", (5, 80, 48)), ("w2", (5, 48, 80)), ("w3", (5, 80, 48))):
            assert places[f"{EXPERTS}.{leaf}"].whole_shape == size
        assert places["last.norm.weight"].whole_shape == (48,)


def test_files_without_most_experts_are_refused() -> None:
    """A file that lacks some is compared name by name, so that each is named."""
    places = hf_locations(MIXTRAL)
    names = [name for place in places.values() for name in place.names if ".experts." in name]
    assert hf_locations(MIXTRAL, names[:100]) == places
    with pytest.raises(CheckpointError) as caught:
        hf_locations(MIXTRAL, names[:80])
    assert caught.value.lines == (
        "there are 80 tensors of experts, but the model of config.json has 180; "
        "copy the missing files",
    )
