"""Multi-token prediction: what it computes, what it adds to counts, and what leaves it out."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.data.loader import Batch, tokens_ahead
from composer3d.facts.errors import CheckpointError
from composer3d.models import claims, counts, fit
from composer3d.models.contract import IGNORE_INDEX
from composer3d.models.deepseek import huggingface as hf
from composer3d.models.deepseek.attention import LatentAttention
from composer3d.models.deepseek.model import Deepseek
from composer3d.models.deepseek.names import copies
from composer3d.models.deepseek.plan import sharding_plan
from composer3d.models.deepseek.shape import PRESETS
from composer3d.models.deepseek.table import table
from composer3d.models.module_table import read_table
from tests.models.deepseek.test_model import attend_without_padding
from tests.reference import latent, prediction

SHAPE = replace(PRESETS["debug-deepseek"], mtp_layers=2)
V3 = PRESETS["deepseek-v3"]

# What huggingface.co/api/models/deepseek-ai/DeepSeek-V3 says of the published files, by dtype.
# F32 are the biases of routers, and one scale for each block of 128 x 128 numbers in F8_E4M3.
PUBLISHED = {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600}


def batch_of(rows: int, length: int) -> Batch:
    """Make rows of one document each."""
    tokens_BT = torch.arange(rows * (length + 1)).view(rows, -1) * 7 % SHAPE.vocab
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], torch.arange(length).repeat(rows, 1))


def test_losses_and_gradients_are_those_computed_by_hand() -> None:
    assert prediction.compare() == []


def test_the_published_files_are_counted_to_the_last_parameter() -> None:
    """They hold the embedding and the head twice."""
    shape = replace(V3, mtp_layers=1)
    in_files = counts.parameters(table(shape)) + len(copies(shape)) * V3.vocab * V3.dim
    biases_of_routers = 59 * V3.experts  # of 58 blocks, and of the prediction
    assert in_files == PUBLISHED["BF16"] + PUBLISHED["F8_E4M3"] + biases_of_routers
    blocks_of_128 = (PUBLISHED["F32"] - biases_of_routers) * 128**2
    assert PUBLISHED["F8_E4M3"] <= blocks_of_128 < 1.001 * PUBLISHED["F8_E4M3"]
    own = counts.parameters(table(shape)) - counts.parameters(table(V3))
    assert own == 11_610_068_224
    # README_WEIGHTS of the files leaves the projection out: 11.5B, of which 2.4B compute a token
    # with the embedding and the head.
    projection = 2 * V3.dim**2
    active = counts.active_parameters(table(shape), shape) - counts.active_parameters(table(V3), V3)
    assert round((own - projection) / 1e8) == 115
    assert round((active - projection + 2 * V3.vocab * V3.dim) / 1e8) == 24


def test_the_table_is_that_of_the_model() -> None:
    for tied in (False, True):
        shape = replace(SHAPE, tied=tied)
        model, plan = Deepseek(shape), sharding_plan(shape)
        fit.check(model, plan)
        claims.check(Deepseek(shape, device="cpu"), plan)
        parameters = {name: tuple(value.shape) for name, value in model.named_parameters()}
        assert list(parameters.items()) == list(table(shape).shapes().items())
        assert read_table(Deepseek, sharding_plan, shape).shapes() == parameters
        assert model.last.embed.weight is model.first.embed.weight


def test_flops_are_what_torch_counts() -> None:
    model, batch = latent.random_model(SHAPE), batch_of(2, 20)
    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.attend = partial(attend_without_padding, SHAPE.value_dim)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*batch[:4], tokens_ahead(batch, SHAPE.mtp_layers)).sum().backward()
    expected = counts.flops_per_token(table(SHAPE), SHAPE, 20, causal=False)
    assert counter.get_total_flops() == batch.tokens_BT.numel() * expected


def test_without_tokens_ahead_the_model_is_the_main_one() -> None:
    model, batch = latent.random_model(SHAPE), batch_of(2, 12)
    main = Deepseek(SHAPE.without_mtp, dtype=torch.float64, device="cpu")
    parameters = dict(model.named_parameters())
    for name, parameter in main.named_parameters():
        parameter.data.copy_(parameters[name].data)
    loss = model(*batch[:4])
    assert loss.shape == ()
    assert torch.equal(loss, main(*batch[:4]))
    (first, *_) = model(*batch[:4], tokens_ahead(batch, SHAPE.mtp_layers))
    assert torch.equal(first, loss)


def test_a_depth_without_a_label_adds_nothing() -> None:
    """A row of two tokens has none for the second depth."""
    model, batch = latent.random_model(SHAPE), batch_of(2, 2)
    ahead_B2KT = tokens_ahead(batch, SHAPE.mtp_layers)
    assert (ahead_B2KT[:, 1, 1] == IGNORE_INDEX).all()
    losses = model(*batch[:4], ahead_B2KT)
    assert losses[1] > 0
    assert losses[2] == 0
    losses.sum().backward()
    assert all(value.grad.isfinite().all() for value in model.parameters() if value.requires_grad)


def test_the_number_of_layers_is_that_of_config_json() -> None:
    config = hf.make_config(SHAPE, "float32")
    assert config["num_nextn_predict_layers"] == 2
    assert hf.parse_config(config) == SHAPE
    for wrong in (-1, True, "1", 1.0):
        with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
            hf.parse_config(config | {"num_nextn_predict_layers": wrong})
    with pytest.raises(CheckpointError, match="from 0 to 16"):
        hf.parse_config(config | {"num_nextn_predict_layers": 17})
    shape = replace(
        PRESETS["deepseek-v2-lite"], experts=8, mtp_layers=1, n_layers=2, dim=256, n_heads=16
    )
    with pytest.raises(CheckpointError, match="deepseek_v2 has no mtp_layers = 1"):
        hf.make_config(shape, "float32")
