"""GLM-4.5: its presets are the published models, and what only it has is where it should be."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.data.loader import Batch, tokens_ahead
from composer3d.facts.errors import CheckpointError
from composer3d.models import claims, counts, fit
from composer3d.models.contract import SequenceInfo
from composer3d.models.deepseek.names import copies, left_out
from composer3d.models.glm import huggingface as hf
from composer3d.models.glm.model import Glm
from composer3d.models.glm.names import hf_locations
from composer3d.models.glm.plan import sharding_plan
from composer3d.models.glm.shape import PRESETS, GlmShape
from composer3d.models.glm.table import table
from composer3d.models.module_table import read_table

DEBUG = PRESETS["debug-glm"]

# What huggingface.co/api/models/zai-org/NAME says of the published files: they hold one layer of
# multi-token prediction, with a copy of the embedding and of the head.
PUBLISHED = {"glm-4.5": 358_337_791_296, "glm-4.5-air": 110_468_824_832}


def model_of(shape: GlmShape, std: float = 0.3) -> Glm:
    model = Glm(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return model


def batch_of(rows: int, length: int) -> Batch:
    """Make rows of one document each."""
    tokens_BT = torch.arange(rows * (length + 1)).view(rows, -1) * 7 % DEBUG.vocab
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], torch.arange(length).repeat(rows, 1))


def loss_of(shape: GlmShape) -> Tensor:
    batch = batch_of(2, 24)
    ahead = tokens_ahead(batch, shape.mtp_layers) if shape.mtp_layers else None
    with torch.no_grad():
        return model_of(shape)(*batch[:4], ahead).sum()


def test_the_published_files_are_counted_to_the_last_parameter() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"debug-glm"}
    for preset, numel in PUBLISHED.items():
        shape = replace(PRESETS[preset], mtp_layers=1)
        matrix = shape.vocab * shape.dim
        assert counts.parameters(table(shape)) + len(copies(shape)) * matrix == numel, preset


def test_the_report_names_the_parameters_that_compute_a_token() -> None:
    """Table 1 of arXiv 2508.06471, in billions, counts neither the embedding nor the head."""
    for preset, active in {"glm-4.5": 32, "glm-4.5-air": 12}.items():
        for depths in (0, 1):
            shape = replace(PRESETS[preset], mtp_layers=depths)
            of_a_token = counts.active_parameters(table(shape), shape)
            assert round((of_a_token - 2 * shape.vocab * shape.dim) / 1e9) == active


def test_the_table_is_that_of_the_model() -> None:
    """Also with multi-token prediction, which no preset has."""
    shape = replace(DEBUG, mtp_layers=2, tied=True)
    model, plan = Glm(shape), sharding_plan(shape)
    fit.check(model, plan)
    claims.check(Glm(shape, device="cpu"), plan)
    parameters = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert list(parameters.items()) == list(table(shape).shapes().items())
    assert read_table(Glm, sharding_plan, shape).shapes() == parameters


@pytest.mark.parametrize("depths", [0, 2])
def test_flops_are_what_torch_counts(depths: int) -> None:
    shape = replace(DEBUG, mtp_layers=depths, dense_layers=2)
    model, batch = model_of(shape), batch_of(2, 20)
    ahead = tokens_ahead(batch, depths) if depths else None
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*batch[:4], ahead).sum().backward()
    expected = counts.flops_per_token(table(shape), shape, 20, causal=False)
    assert counter.get_total_flops() == batch.tokens_BT.numel() * expected


def test_no_option_is_lost() -> None:
    """The tests of all families compare with transformers where each of them is."""
    changes = (
        *({}, {"rope_share": 0.25}, {"rope_share": 1.0}, {"qk_norm": False}),
        *({"qkv_bias": False}, {"dense_layers": 2}, {"expert_groups": 4, "groups_per_token": 1}),
        *({"mtp_layers": 1}, {"mtp_layers": 1, "mtp_loss": 0.1}, {"window": 7}, {"nope_every": 2}),
    )
    losses = {round(loss_of(replace(DEBUG, **change)).item(), 6) for change in changes}
    assert len(losses) == len(changes)


def test_pairs_are_whole() -> None:
    """Of an odd number of rotated elements, the last one is not rotated; two are the fewest."""
    widths = {0.5: 12, 0.55: 12, 0.24: 4, 0.01: 2, 1.0: 24}
    for share, width in widths.items():
        assert replace(DEBUG, rope_share=share).rotated_width == width, share


@pytest.mark.parametrize("width", [24, 44, 88, 100, 104, 128, 176, 224])
def test_transformers_rotates_as_many_numbers_as_its_file_says(width: int) -> None:
    """It rounds the product of the width and the share down: 44 x (30 / 44) is below 30."""
    for rotated in range(2, width + 1, 2):
        shape = replace(DEBUG, head_dim=width, rope_share=min(1.0, (rotated + 0.5) / width))
        assert shape.rotated_width == rotated
        config = hf.make_config(shape, "float32")
        assert int(width * config["partial_rotary_factor"]) == rotated
        assert hf.parse_config(config) == hf.canonical(shape)


def test_the_share_is_that_of_the_object_that_transformers_reads() -> None:
    config = hf.make_config(DEBUG, "float32")
    config["rope_parameters"] = {"partial_rotary_factor": 1.0}
    assert hf.parse_config(config).rope_share == 1.0
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    assert hf.parse_config(config).rope_share == 0.5


def test_a_stretch_that_the_rotated_part_cannot_have_is_refused() -> None:
    shape = replace(
        DEBUG,
        rope_theta=5.0,
        rope_scaling="yarn",
        rope_factor=2.0,
        rope_context=4096,
        rope_truncate=False,
    )
    config = hf.make_config(replace(shape, rope_theta=1e4), "float32")
    config["rope_theta"] = 5.0
    with pytest.raises(CheckpointError, match="leaves YaRN no pair to stretch from"):
        hf.parse_config(config)
    # A whole head, twice as wide, could not have this one.
    config |= {"rope_theta": 5.0, "rope_scaling": config["rope_scaling"] | {"truncate": True}}
    config["rope_scaling"]["original_max_position_embeddings"] = 5
    assert hf.parse_config(config).yarn_ramp == (0, 0.001)


def test_positions_are_in_the_first_part_of_a_head_alone() -> None:
    """Of equal tokens, the other part of queries and keys is the same at all positions."""
    shape = replace(DEBUG, qk_norm=False, qkv_bias=False)
    attention = model_of(shape).blocks["0"].attn
    seen: list[Tensor] = []

    def remember(q: Tensor, k: Tensor, v: Tensor, **settings: object) -> Tensor:
        seen.extend((q, k))
        return q

    attention.attend = remember
    x_BTC = torch.randn(1, 1, shape.dim, dtype=torch.float64).expand(1, 5, -1)
    positions = batch_of(1, 5).positions_BT
    attention(x_BTC, seq=SequenceInfo(positions))
    for turned in seen:
        moves = (turned - turned[:, :, :1]).abs().amax((0, 1, 2))
        assert (moves[:12] > 1e-6).all()
        assert (moves[12:] < 1e-12).all()  # rounding of the projections


def test_the_layers_of_prediction_are_those_of_config_json() -> None:
    shape = replace(DEBUG, mtp_layers=1)
    config = hf.make_config(shape, "float32")
    assert config["num_nextn_predict_layers"] == 1
    assert hf.parse_config(config) == shape
    in_files = {name for place in hf_locations(shape).values() for name in place.names}
    assert {"model.layers.4.eh_proj.weight", "model.layers.4.self_attn.q_norm.weight"} <= in_files
    main = {name for place in hf_locations(DEBUG).values() for name in place.names}
    assert left_out(DEBUG, in_files) == in_files - main


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"window": 7}, "has no window = 7"),
        ({"nope_every": 2}, "has no nope_every = 2"),
        ({"shared_gate": True}, "has no shared_gate = True"),
        ({"router": "softmax"}, "has no router = softmax"),
        ({"router_bias": False}, "has no router_bias = False"),
        ({"moe_every": 2}, "has no moe_every = 2"),
        ({"shared_ffn": 0}, "has shared experts as wide as the others, and shared_ffn = 0"),
        ({"expert_groups": 8}, "has two experts in a group at least, and experts = 8 has one"),
        ({"expert_groups": 2, "group_best": "one"}, "has no group_best = one"),
    ],
)
def test_what_transformers_lacks_is_not_exported(changes: dict[str, object], line: str) -> None:
    with pytest.raises(CheckpointError, match=f"Hugging Face's glm4_moe {line}"):
        hf.make_config(replace(DEBUG, **changes), "float32")
