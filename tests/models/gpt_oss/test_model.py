"""gpt-oss: its presets are the published models, and what only it has is where it should be."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from composer3d.models import counts, fit
from composer3d.models.gpt_oss.model import GptOss, GptOssExperts
from composer3d.models.gpt_oss.plan import sharding_plan
from composer3d.models.gpt_oss.shape import PRESETS, GptOssShape
from composer3d.models.gpt_oss.table import table
from composer3d.models.layers.moe import Groups

# Billions of parameters, of all and of those that compute a token: table 1 of arXiv 2508.10925.
PUBLISHED = {"gpt-oss-20b": (20.91, 3.61), "gpt-oss-120b": (116.83, 5.13)}
# The second count there has the head, but not the embedding.


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"debug-gpt-oss"}
    for preset, (total, active) in PUBLISHED.items():
        shape = PRESETS[preset]
        rows = table(shape)
        assert round(counts.parameters(rows) / 1e9, 2) == total, preset
        embedding = shape.vocab * shape.dim
        of_a_token = counts.active_parameters(rows, shape) - embedding
        assert round(of_a_token / 1e9, 2) == active, preset


def test_every_preset_has_a_plan_and_meta_allocates_nothing() -> None:
    for shape in PRESETS.values():
        model, plan = GptOss(replace(shape, n_layers=2)), sharding_plan(replace(shape, n_layers=2))
        fit.check(model, plan)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def loss_of(shape: GptOssShape) -> Tensor:
    model = GptOss(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    tokens_BT = torch.arange(24)[None]
    with torch.no_grad():
        return model(tokens_BT, tokens_BT, tokens_BT)


def test_no_option_is_lost() -> None:
    """The tests of all families compare with transformers where each of them is."""
    shape = replace(PRESETS["debug-gpt-oss"], window=7)
    changes = ({}, {"gate_slope": 1.0}, {"gate_limit": 0.5}, {"window": 9}, {"full_every": 3})
    losses = {round(loss_of(replace(shape, **change)).item(), 6) for change in changes}
    assert len(losses) == len(changes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_experts_are_those_of_a_loop(dtype: torch.dtype) -> None:
    """Rows of each expert, also of one without rows; each of its biases has its gradient."""
    shape = replace(PRESETS["debug-gpt-oss"], experts=4)
    experts = GptOssExperts(shape).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    sizes = [5, 0, 3, 8]
    rows = torch.randn(sum(sizes), shape.dim, generator=generator).to(dtype).requires_grad_()
    own = dict(experts.named_parameters())
    out = experts.compute(rows, Groups(torch.tensor(sizes)), **own)

    parts = []
    for number, part in enumerate(rows.split(sizes)):
        inner = part @ own["w1"][number].T + own["b1"][number]
        gate, up = inner.unflatten(-1, (-1, 2)).unbind(-1)
        gate = gate.clamp(max=shape.gate_limit)
        up = up.clamp(-shape.gate_limit, shape.gate_limit)
        gated = (up + 1) * (gate * (gate * shape.gate_slope).sigmoid())
        parts.append(gated @ own["w2"][number].T + own["b2"][number])
    expected = torch.cat(parts)
    leaves = [rows, *own.values()]
    bound = 32 * torch.finfo(dtype).eps
    for actual, wanted in zip(
        (out, *torch.autograd.grad(out.sin().sum(), leaves)),
        (expected, *torch.autograd.grad(expected.sin().sum(), leaves)),
        strict=True,
    ):
        assert (actual - wanted).norm() <= bound * wanted.norm()
