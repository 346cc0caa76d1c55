"""The table of parameter names, Meta's rotary pairs and params.json."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer3d.facts.errors import CheckpointError
from composer3d.models.layers.rope import rope_table, rotate
from composer3d.models.llama import names
from composer3d.models.llama.rope import rope_of
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.llama.table import table
from tests.models.names_in_files import hf_names
from tests.reference.rotation import rotations, turn_neighbours

SHAPE = ModelShape(dim=48, n_layers=12, n_heads=4, n_kv_heads=2, ffn=80, vocab=99)
WQ = "blocks.11.attn.wq.weight"


def test_every_parameter_has_a_name_of_its_own() -> None:
    shape = replace(SHAPE, qk_norm=True, qkv_bias=True)
    found = hf_names(shape)
    assert list(found) == list(table(shape).shapes())
    assert len(set(found.values())) == len(found) == 12 * 14 + 3
    assert found[WQ] == "model.layers.11.self_attn.q_proj.weight"
    assert found["blocks.2.attn.wk.bias"] == "model.layers.2.self_attn.k_proj.bias"
    assert "last.head.weight" not in hf_names(replace(SHAPE, tied=True))
    meta = names.meta_names(SHAPE)
    assert len(set(meta.values())) == len(meta) == 12 * 9 + 3
    assert meta[WQ] == "layers.11.attention.wq.weight"
    assert [
        meta[name] for name in ("first.embed.weight", "last.norm.weight", "last.head.weight")
    ] == [
        "tok_embeddings.weight",
        "norm.weight",
        "output.weight",
    ]


def test_attention_scores_in_metas_layout_equal_ours() -> None:
    width = SHAPE.head_width
    x_TC = torch.randn(7, SHAPE.dim, dtype=torch.float64)
    ours = {kind: torch.randn(48, 48, dtype=torch.float64) for kind in ("wq", "wk", "wv")}
    meta = {
        kind: names.to_meta(f"blocks.0.attn.{kind}.weight", whole, SHAPE)
        for kind, whole in ours.items()
    }
    assert torch.equal(meta["wv"], ours["wv"])
    for kind in ("wq", "wk"):
        assert not torch.equal(meta[kind], ours[kind])
        assert torch.equal(
            names.to_meta(f"blocks.0.attn.{kind}.weight", meta[kind], SHAPE, inverse=True),
            ours[kind],
        )
    shape = replace(SHAPE, rope_theta=100.0)
    table = rope_table(rope_of(shape), torch.arange(7)[None], torch.float64)
    q, k = (rotate((x_TC @ ours[kind].T).view(1, 7, 4, width), table)[0] for kind in ("wq", "wk"))
    turns = rotations(shape, range(7))
    a, b = (
        turn_neighbours((x_TC @ meta[kind].T).view(7, 4, width), turns) for kind in ("wq", "wk")
    )
    for head in range(4):
        expected = a[:, head] @ b[:, head].T
        torch.testing.assert_close(q[:, head] @ k[:, head].T, expected, rtol=1e-12, atol=1e-12)


def width_in_meta(dim: int, params: dict[str, Any]) -> int:
    """Compute the width of the feed-forward as Meta's code does."""
    hidden = int(params["ffn_dim_multiplier"] * int(2 * (4 * dim) / 3))
    multiple: int = params["multiple_of"]
    return multiple * ((hidden + multiple - 1) // multiple)


@given(dim=st.integers(4, 1 << 15), ffn=st.integers(2, 1 << 17))
def test_metas_code_computes_the_same_width(dim: int, ffn: int) -> None:
    shape = ModelShape(dim=2 * dim, n_layers=1, n_heads=1, n_kv_heads=1, ffn=ffn, vocab=9)
    assert width_in_meta(2 * dim, names.make_meta_params(shape)) == ffn


@pytest.mark.parametrize(
    "preset",
    ["llama3-8b", "llama3-405b", "llama3.1-70b", "llama3.2-1b", "llama3.2-3b", "debug-tiny"],
)
def test_params_survive_a_round_trip(preset: str) -> None:
    shape = replace(PRESETS[preset], head_dim=None)
    params = names.make_meta_params(PRESETS[preset])
    sizes: dict[str, Any] = {"vocab": shape.vocab, "ffn": shape.ffn, "tied": shape.tied}
    assert names.parse_meta_params(params, **sizes) == shape
    params.pop("rope_scaling_factor", None)  # Meta's own files do not have it
    assert names.parse_meta_params(params, **sizes) == shape


# The params.json that Meta published: Llama 2 70B, and what Llama 3.1 8B and 3.2 1B share.
LLAMA_2 = {
    "dim": 8192,
    "multiple_of": 4096,
    "ffn_dim_multiplier": 1.3,
    "n_heads": 64,
    "n_kv_heads": 8,
    "n_layers": 80,
}
LLAMA_3 = {
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
    "vocab_size": 128256,
    "n_kv_heads": 8,
}
LLAMA_3_2 = LLAMA_3 | {"dim": 2048, "n_layers": 16, "n_heads": 32}


def test_published_params_are_read() -> None:
    params: dict[str, Any] = LLAMA_2 | {"norm_eps": 1e-05, "vocab_size": -1}
    assert width_in_meta(8192, params) == 28672
    two = names.parse_meta_params(params, vocab=32000, ffn=28672, tied=False)
    assert two == replace(PRESETS["llama3-70b"], vocab=32000, rope_theta=1e4)
    del params["n_kv_heads"]
    assert names.parse_meta_params(params, vocab=32000, ffn=28672, tied=False).n_kv_heads == 64
    three = names.parse_meta_params(
        LLAMA_3 | {"dim": 4096, "n_layers": 32, "n_heads": 32}, vocab=128256, ffn=14336, tied=False
    )
    assert three == PRESETS["llama3.1-8b"]
    small = names.parse_meta_params(LLAMA_3_2, vocab=128256, ffn=8192, tied=True)
    assert small == replace(PRESETS["llama3.2-1b"], head_dim=None)


NO_FACTOR = "params.json has use_scaled_rope, but no rope_scaling_factor, and not the sizes of a "
OTHER_KEYS = "is not supported, and may change what the model computes; give the model in the form"
# What is added to the params.json of Llama 3.2 1B, and a part of what refuses it.
REFUSED_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "no sizes": ({"dim": None, "n_heads": None}, "params.json lacks dim, n_heads; take the one th"),
    "a window": ({"sliding_window": 4096}, f"params.json: 'sliding_window' = 4096 {OTHER_KEYS}"),
    "Mistral's widths": (
        {"hidden_dim": 8192, "head_dim": 64},
        f"params.json: 'head_dim' = 64, 'hidden_dim' = 8192 {OTHER_KEYS}",
    ),
    "pictures": ({"vision_chunk_size": 448}, "params.json: 'vision_chunk_size' = 448 is not"),
    "many": (dict.fromkeys("abcde", 1), "'a' = 1, 'b' = 1, 'c' = 1 and 2 others is not"),
    "other sizes": ({"n_layers": 15}, NO_FACTOR),
    "a switch": ({"use_scaled_rope": 1}, "use_scaled_rope = 1 must be true or false"),
    "an end of the ramp": (
        {"rope_high_freq_factor": 2.0},
        "Meta's format of Llama has no rope_* = (32.0, 1.0, 2.0, 8192); convert to hf",
    ),
    "a wrong end": ({"rope_high_freq_factor": "4"}, 'rope_high_freq_factor = "4" must be a num'),
}


@pytest.mark.parametrize(("added", "line"), REFUSED_PARAMS.values(), ids=REFUSED_PARAMS)
def test_params_that_are_not_understood_are_refused(added: dict[str, Any], line: str) -> None:
    params = LLAMA_3_2 | added
    with pytest.raises(CheckpointError, match=re.escape(line)):
        names.meta_names(names.parse_meta_params(params, vocab=9, ffn=8192, tied=False))


def test_what_changes_nothing_in_params_is_read() -> None:
    """An untied fine-tune has the stretch of the model that it was made from."""
    added = {"max_seq_len": 4096, "max_batch_size": 1, "lora_args": None, "vocab_size": -1}
    added |= {"rope_high_freq_factor": 4}
    shape = names.parse_meta_params(LLAMA_3_2 | added, vocab=9, ffn=8192, tied=False)
    assert shape == replace(PRESETS["llama3.2-1b"], vocab=9, head_dim=None, tied=False)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"qkv_bias": True}, "qkv_bias = True"),
        ({"qk_norm": True}, "qk_norm = True"),
        ({"window": 8}, "window = 8"),
        ({"head_dim": 16}, "head_dim = 16"),
        ({"rope_factor": 4.0}, r"rope_\* = \(4.0, 1.0, 4.0, 8192\)"),
        ({"rope_factor": 8.0, "rope_scaling": "linear"}, "rope_scaling = linear"),
        ({"rope_factor": 8.0, "rope_context": 4096}, r"rope_\* = \(8.0, 1.0, 4.0, 4096\)"),
    ],
)
def test_fields_that_meta_lacks_are_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"Meta's format of Llama has no {problem}; convert to hf"
    ):
        names.meta_names(replace(SHAPE, **fields))
