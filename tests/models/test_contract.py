"""Sharding plans: all errors of a plan are reported at once, and the first matching glob counts."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from composer3d.facts.errors import PlanError
from composer3d.models import fit
from composer3d.models.contract import Constant, Normal, SequenceInfo
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import PRESETS
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan as moe_plan
from composer3d.models.moe.shape import PRESETS as MOE_PRESETS
from composer3d.parallel import ShardingPlan


class Tiny(nn.Module):
    """Parameters ``up.weight``, ``down.weight`` and ``norm.weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 4, bias=False)
        self.down = nn.Linear(4, 2, bias=False)
        self.norm = nn.RMSNorm(2)


def test_all_errors_of_a_plan_are_reported_at_once() -> None:
    plan = ShardingPlan(
        tensor={"": "gather", "u?": "column", "blocks.*": "row", "norm": "gather"},
        init={
            "up.weight": Normal(1.0),
            "*.bias": Constant(0.0),
            "down.*": Normal(1.0),
            "norm": Constant(1.0),
        },
        unread=("down", "last"),
    )
    with pytest.raises(PlanError) as caught:
        fit.check(Tiny(), plan)
    assert caught.value.lines == (
        "the plan's tensor glob 'blocks.*' matches no module of Tiny",
        "the plan's init glob '*.bias' matches no parameter of Tiny",
        # ``norm`` is a module, not a parameter.
        "the plan's init glob 'norm' matches no parameter of Tiny",
        "the plan's unread glob 'last' matches no module of Tiny",
        "no glob of the plan's tensor table covers parameter 'down.weight'",
        "parameter 'norm.weight' belongs to a module of style \"gather\", which can have none: "
        "give the module another style, or move the parameter into a submodule",
        "no glob of the plan's init table covers parameter 'norm.weight'",
    )


def test_a_plan_that_fits_is_accepted() -> None:
    tensor = {"": "gather", "up": "column", "down": "row", "norm": "norm"}
    plan = ShardingPlan(tensor=tensor, init={"*": Normal(1.0)})  # type: ignore[arg-type]
    fit.check(Tiny(), plan)
    assert [plan.style_of(name) for name in ("up", "down", "norm")] == ["column", "row", "norm"]


def test_a_buffer_is_refused() -> None:
    """Its values would be lost with the meta device, and a run would go on with any others."""
    model = Llama(PRESETS["debug-tiny"], device="meta")
    model.blocks["1"].register_buffer("angles", torch.arange(4.0), persistent=False)
    with pytest.raises(PlanError, match=r"buffer 'blocks\.1\.angles' would hold any values"):
        fit.check(model, sharding_plan(PRESETS["debug-tiny"]))


def test_what_no_stage_would_compute_is_refused() -> None:
    class Own(Llama):
        def hidden(self, tokens_BT_or_h_BTC: torch.Tensor, seq: SequenceInfo) -> torch.Tensor:
            return self.norm(super().hidden(tokens_BT_or_h_BTC, seq))

    model, plan = Own(PRESETS["debug-tiny"]), sharding_plan(PRESETS["debug-tiny"])
    model.norm = nn.RMSNorm(PRESETS["debug-tiny"].dim, device="meta")
    plan = replace(
        plan,
        tensor={**plan.tensor, "norm": "norm"},
        init={**plan.init, "norm.weight": Constant(1.0)},
    )
    with pytest.raises(PlanError) as caught:
        fit.check(model, plan)
    assert caught.value.lines == (
        "Own has a `hidden` of its own, which no stage calls: put what it computes into first, a "
        "block or last",
        "parameter 'norm.weight' is in none of first, blocks and last, so no stage has it",
    )


def test_a_model_with_values_is_refused() -> None:
    """They would be lost: ``compose`` gives every parameter its initial values."""
    model = Llama(PRESETS["debug-tiny"], device="cpu")
    with pytest.raises(PlanError, match=r"'first\.embed\.weight' has values, which would be lost"):
        fit.check(model, sharding_plan(PRESETS["debug-tiny"]))


def test_a_glob_behind_one_that_matches_all_of_it_is_refused() -> None:
    plan = sharding_plan(PRESETS["debug-tiny"])
    behind = replace(plan, init={"*": Normal(0.02), **plan.init})
    norms = [name for name in plan.init if name.endswith("norm.weight")]
    with pytest.raises(PlanError) as caught:
        fit.check(Llama(PRESETS["debug-tiny"]), behind)
    assert len(caught.value.lines) == len(plan.init)
    assert norms
    for name in norms:
        assert (
            f"the plan's init glob {name!r} decides nothing: globs before it match all that it "
            "matches, and the first one counts; move it before them"
        ) in caught.value.lines


def test_dropout_is_refused_because_a_checkpointed_block_would_draw_again() -> None:
    model = Llama(PRESETS["debug-tiny"])
    plan = sharding_plan(PRESETS["debug-tiny"])
    model.blocks["1"].dropout = torch.nn.Dropout(0.0)
    fit.check(model, plan)
    model.blocks["1"].dropout = torch.nn.Dropout(0.1)
    with pytest.raises(PlanError, match=r"'blocks\.1\.dropout' is a dropout of 0\.1: a checkp"):
        fit.check(model, plan)


def test_only_embeddings_are_only_looked_up() -> None:
    model = Llama(PRESETS["debug-tiny"])
    plan = sharding_plan(PRESETS["debug-tiny"])
    assert plan.first_only_looks_up
    model.first.add_module("up", nn.Linear(2, 2, bias=False, device="meta"))
    plan = replace(
        plan,
        tensor={**plan.tensor, "first.up": "embedding"},
        init={**plan.init, "first.up.weight": Normal(1.0)},
    )
    with pytest.raises(PlanError, match=r"but 'first\.up\.weight' is a parameter of a"):
        fit.check(model, plan)
    fit.check(model, replace(plan, first_only_looks_up=False))


@pytest.mark.parametrize("preset", ["debug-tiny", "llama3-405b"])
def test_llama_has_a_plan(preset: str) -> None:
    plan = sharding_plan(PRESETS[preset])
    fit.check(Llama(PRESETS[preset]), plan)
    assert plan.style_of("blocks.1.attn.wq") == "column"
    assert plan.style_of("blocks.1.attn.wk") == "kv_column"
    assert plan.kv_heads == PRESETS[preset].n_kv_heads


def test_key_value_columns_need_the_number_of_heads() -> None:
    plan = ShardingPlan(
        tensor={"": "gather", "up": "column", "down": "kv_column", "norm": "norm"},
        init={"*": Normal(1.0)},
    )
    with pytest.raises(
        PlanError, match='has modules of style "kv_column", so it must give kv_heads'
    ):
        fit.check(Tiny(), plan)
    fit.check(Tiny(), replace(plan, kv_heads=2))


def test_columns_need_a_module_that_gathers_their_input() -> None:
    plan = ShardingPlan(
        tensor={"up": "column", "down": "row", "norm": "norm"}, init={"*": Normal(1.0)}
    )
    with pytest.raises(
        PlanError,
        match="the plan cuts 'up' into columns, so a module above it needs style \"gather\"",
    ):
        fit.check(Tiny(), plan)


@pytest.mark.parametrize(
    ("experts", "lines"),
    [
        (
            "blocks.*.experts.*",
            (
                "the plan's experts glob 'blocks.*.experts.*' matches no module of MoeLlama",
                *(
                    f"no glob of the plan's tensor table covers parameter 'blocks.0.{name}'"
                    for name in ("moe.experts.w1", "moe.experts.w2", "moe.experts.w3")
                ),
                "'blocks.0.moe.experts' has the seam `exchange`; the plan's experts glob must "
                "match it",
            ),
        ),
        (
            None,
            (
                *(
                    f"no glob of the plan's tensor table covers parameter 'blocks.0.{name}'"
                    for name in ("moe.experts.w1", "moe.experts.w2", "moe.experts.w3")
                ),
                "'blocks.0.moe.experts' has the seam `exchange`; the plan's experts glob must "
                "match it",
            ),
        ),
        (
            "blocks.*.moe.*",
            (
                "the plan's experts glob matches 'blocks.0.moe.router', which has no seam "
                "`exchange`",
            ),
        ),
    ],
    ids=["no match", "no glob", "too much"],
)
def test_experts_are_the_modules_with_the_seam_exchange(
    experts: str | None, lines: tuple[str, ...]
) -> None:
    shape = replace(MOE_PRESETS["debug-moe"], n_layers=1)
    plan = moe_plan(shape)
    fit.check(MoeLlama(shape), plan)
    with pytest.raises(PlanError) as caught:
        fit.check(MoeLlama(shape), replace(plan, experts=experts))
    assert caught.value.lines == lines


def test_the_first_glob_that_matches_counts() -> None:
    norm_values, other_values = Constant(1.0), Normal(0.02)
    norms_first = ShardingPlan(tensor={}, init={"*norm.weight": norm_values, "*": other_values})
    norms_last = ShardingPlan(tensor={}, init={"*": other_values, "*norm.weight": norm_values})
    assert norms_first.init_of("last.norm.weight") == norm_values
    assert norms_last.init_of("last.norm.weight") == other_values

    everything = ShardingPlan(tensor={}, init={"*": other_values})
    assert everything.init_of("head.weight") == other_values
    # Case matters.
    capital = ShardingPlan(tensor={}, init={"*Norm.weight": norm_values})
    assert capital.init_of("last.norm.weight") is None


def test_projections_into_the_residual_stream_start_smaller_with_depth() -> None:
    plan = sharding_plan(PRESETS["llama3-8b"])
    scaled = Normal(0.02 / 8)  # 1 / sqrt(2 * 32 blocks)
    assert plan.init_of("blocks.31.attn.wo.weight") == scaled
    assert plan.init_of("blocks.0.ffn.w2.weight") == scaled
    assert plan.init_of("blocks.31.attn.wq.weight") == Normal(0.02)
    assert plan.init_of("last.head.weight") == Normal(0.02)
    assert plan.init_of("blocks.3.ffn_norm.weight") == Constant(1.0)
    assert plan.init_of("last.norm.weight") == Constant(1.0)
