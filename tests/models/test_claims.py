"""Claims of sharding plans, and what autograd keeps for backward."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from composer3d.facts.errors import PlanError
from composer3d.models import claims
from composer3d.models.contract import SequenceInfo
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.registry import resolve
from tests.models.test_table import NOT_ON_META, SHAPES, model_of
from tests.reference.llama import architecture_of

SHAPE = PRESETS["debug-tiny"]


@pytest.mark.parametrize("name", SHAPES)
def test_our_plans_claim_what_is_true(name: str) -> None:
    shape = SHAPES[name]
    claims.check(model_of(shape), resolve(architecture_of(shape).plan)(shape))


@pytest.mark.parametrize("name", NOT_ON_META)
def test_blocks_that_depend_on_values_are_checked_where_values_are(name: str) -> None:
    shape = SHAPES[name]
    on_meta = model_of(shape)
    with_values = architecture_of(shape).build(shape, dtype=torch.float32, device="cpu")
    for parameter in with_values.parameters():
        nn.init.normal_(parameter, std=0.1)
    claims.check(with_values, resolve(architecture_of(shape).plan)(shape))
    number = str(shape.n_layers - 1)  # it has experts
    assert claims.unread_modules(on_meta, on_meta.blocks[number]) is None
    unread = claims.unread_modules(with_values, with_values.blocks[number])
    assert unread is not None
    assert ("moe.shared.w2" in unread) == (shape.shared_ffn > 0 and not shape.shared_gate)
    assert with_values.blocks[number].moe.router.statistics.sums is None


class PostNorm(nn.Module):
    """A block whose last projection is normalised before it is added."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attn_norm, self.attn = block.attn_norm, block.attn
        self.ffn_norm, self.ffn = block.ffn_norm, block.ffn

    def forward(self, h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        h_BTC = h_BTC + self.attn_norm(self.attn(h_BTC, seq=seq))
        return h_BTC + self.ffn_norm(self.ffn(h_BTC))


class Scaled(nn.Module):
    """An embedding that is multiplied by a parameter, which backward reads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim, device="meta")
        self.scale = nn.Parameter(torch.empty(shape.dim, device="meta"))

    def forward(self, tokens_BT: Tensor, seq: SequenceInfo) -> Tensor:
        return self.embed(tokens_BT) * self.scale


def test_an_output_that_backward_reads_is_not_unread() -> None:
    model, plan = Llama(SHAPE), sharding_plan(SHAPE)
    model.blocks["3"] = PostNorm(model.blocks["3"])
    with pytest.raises(PlanError) as caught:
        claims.check(model, plan)
    assert [line.split(", but")[0] for line in caught.value.lines] == [
        "the plan's unread names 'blocks.3.ffn.w2'"
    ]
    claims.check(model, replace(plan, unread=()))


def test_an_output_that_is_followed_by_others_is_not_unread() -> None:
    """Nothing reads it, but what comes after it is computed again, and so is it."""
    plan = replace(sharding_plan(SHAPE), unread=("blocks.*.attn.wo",))
    with pytest.raises(PlanError, match=r"unread names 'blocks\.0\.attn\.wo', but backward"):
        claims.check(Llama(SHAPE), plan)


def test_a_first_part_that_multiplies_by_a_parameter_does_not_only_look_up() -> None:
    model, plan = Llama(SHAPE), sharding_plan(SHAPE)
    model.first = Scaled(SHAPE)
    with pytest.raises(PlanError, match="backward reads a parameter of `first`"):
        claims.check(model, plan)
    claims.check(model, replace(plan, first_only_looks_up=False))
