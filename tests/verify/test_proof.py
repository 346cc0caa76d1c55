"""Twin tests: every layout is exact in float64, and every planted fault is found."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from composer3d import cli
from composer3d.facts.errors import UserError
from composer3d.recipe.draft import split_overrides
from composer3d.recipe.resolve import load
from composer3d.recipe.rules import violations
from composer3d.recipe.schema import MeshTable, Recipe
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import coordinates
from composer3d.verify import limits
from composer3d.verify.judge import (
    RankErrors,
    ReferenceStats,
    ShardError,
    Verdict,
    has_little_noise,
    judge,
    scalar_scale,
)
from composer3d.verify.proof import _in_one, badness, describe, verify_layout
from composer3d.verify.shrink import shrink
from tests.long import some_of
from tools.prove.faults.catch import STEPS, catch
from tools.prove.faults.checks import CHECKS
from tools.prove.faults.table import FAULTS, Fault
from tools.prove.paths import LAYOUTS as LAYOUTS_PATH
from tools.prove.paths import RECIPE as RECIPE_PATH

RECIPE = str(RECIPE_PATH)
LAYOUTS = [
    line.strip()
    for line in LAYOUTS_PATH.read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
# The command in the first line of the file proves all. The matrix, of which tests/prove proves a
# slice, has the simplest layouts, and no pipeline of four ranks or whole documents. Some that are
# compiled are in tests/parallel/test_compile.py.
SLICE = [
    *(layout for layout in LAYOUTS[34::9] if "compile" not in layout),
    "mesh.pp=4 parallel.schedule=ZBVZeroBubble model.n_layers=9 mesh.dp_shard=2",
    "mesh.cp=2 mesh.dp_shard=2 data.packing=whole_documents",
    # Routers through which no gradient passes
    "model.architecture=moe model.preset=debug-moe model.router_bias=true model.router=sigmoid "
    "mesh.dp_shard=2 mesh.ep=2 memory.activation_checkpoint=full "
    'optim.train=["last.*","blocks.1.moe.experts.w2"]',
]


@some_of(9, "layout", SLICE)
def test_layout_is_exact(pool: Pool, references: Path, layout: str) -> None:
    sets = split_overrides(layout)
    verdict = verify_layout(pool, references, RECIPE, sets, dtype="float64", steps=STEPS)
    assert verdict.passed, verdict
    errors = (
        verdict.loss_rel_err,
        verdict.grad_norm_rel_err,
        verdict.max_grad_rel_err,
        verdict.max_weight_rel_err,
    )
    assert all(error is not None and error <= 1e-9 for error in errors), verdict


def test_layout_is_exact_in_float32(pool: Pool, references: Path) -> None:
    layout = ["mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2"]
    verdict = verify_layout(pool, references, RECIPE, layout, dtype="float32", steps=3)
    assert verdict.passed, verdict
    assert verdict.max_grad_rel_err is not None
    assert verdict.max_grad_rel_err > 1e-9  # it did run in float32


# Of each technique some faults, and of all that a proof compares one that nothing else shows.
# ``tools/prove/run faults`` plants all. Those of machines are left to tests/training.
SOME = """
    repeat_own_shard_of_the_sequence drop_reduction_of_norms reduce_shards_twice cut_rows_twice
    send_gradients_wide sum_shards_in_bfloat16 reduce_only_the_first_block_of_a_unit
    untie_the_head
    lose_the_hop_of_keys join_the_parts_as_if_cut_in_order lose_the_first_key
    join_late_chunks_in_an_order_for_two_ranks
    let_documents_begin_one_late
    double_the_gradients_between_stages lose_a_deferred_gradient train_the_tied_copy
    evaluate_one_micro_batch_less
    train_frozen_parameters freeze_the_norms_too keep_the_gradients_of_the_last_step
    recompute_with_other_positions learn_ignored_labels take_the_scales_of_the_first_rank
    norm_of_the_first_rank count_replicas_in_the_norm do_not_clip forget_to_give_the_bound
    step_on_one_rank_only
    set_the_learning_rate_of_one_group take_the_last_group_that_matches
    rise_again_after_the_decay
    give_positions_of_a_contiguous_part cut_documents_in_samples_of_whole_ones
    validate_by_a_mean_of_ranks
    send_the_part_of_the_owner mix_the_experts stop_one_step_early
    clip_by_the_norm_of_own_ep_group read_rows_that_nobody_wrote skip_experts_without_tokens
    divide_losses_by_own_tokens keep_biases_in_bfloat16 count_every_call
    norm_in_the_dtype_of_gradients route_narrow merge_blocks_narrow update_narrow
    turn_neighbours forget_the_stretch_of_positions norm_after_the_rotation
    forget_to_divide_shares drop_reduction_of_gates draw_by_whole_logits
    start_every_block_alike start_every_run_alike start_norms_at_zero
    round_what_is_loaded validate_in_the_order_of_new_runs
    keep_what_was_rolled_back draw_the_same_numbers_in_every_step
    turn_rotary_pairs_back round_to_half
    count_windows_from_the_stage rotate_every_block count_windows_from_zero see_windows_alone
    forget_the_norm_of_remembered_latents
    add_one_twice_under_tp generate_from_a_small_embedding forget_the_norm_of_a_depth
"""
PLANTED = [fault for fault in FAULTS if fault.plant.__name__ in SOME.split()]


def test_every_check_has_a_planted_fault() -> None:
    assert {fault.plant.__name__ for fault in PLANTED} == set(SOME.split())
    checks = {"verify", "dtypes", *CHECKS}
    assert {fault.check for fault in PLANTED} == checks - {"corruption", "stragglers"}


@some_of(36, "fault", PLANTED, ids=lambda fault: fault.title)
def test_planted_fault_is_seen(pool: Pool, references: Path, fault: Fault) -> None:
    outcome = catch(pool, references, fault)
    assert outcome.is_caught, outcome.finding


# What ``model`` checks, the tests of the models compare as well.
@pytest.mark.parametrize("check", ["conversion", "generation", "rollback", "training", "weights"])
def test_checks_of_faults_find_nothing_if_nothing_is_planted(pool: Pool, check: str) -> None:
    assert pool.run(f"tools.prove.faults.checks:{check}", {"plant": None}, world_size=1) == [[]]


MESH = MeshTable(dp_shard=2, tp=2)
SMALL = load(RECIPE, ["mesh.dp_shard=2", "mesh.tp=2"]).recipe
STATS = ReferenceStats(
    noise=[{}],
    norms_of_all=[math.hypot(2.0, 4.0, 1.0)],
    norms={
        kind: [{"last.a": 2.0, "last.b": 4.0, "last.c": 1.0}] for kind in ("gradient", "weight")
    },
    shapes={"last.a": [4], "last.b": [4, 4], "last.c": [1]},
    clips=[True],
)


def judged(
    changes: dict[int, dict[str, ShardError | None]] | None = None,
    stats: ReferenceStats = STATS,
    stages: tuple[int, ...] = (0, 0, 0, 0),
    dtype: str = "float64",
    **rank_fields: Any,
) -> Verdict:
    """The verdict on 4 ranks: tensor a is cut over tp, b over dp_shard, and all ranks hold c.

    Args:
        changes: by rank and name, other shards of gradients; None removes one.
        stats: of the reference.
        stages: the pipeline rank of each rank.
        dtype: of the verdict.
        rank_fields: other values of the fields of ``RankErrors`` on all ranks.
    """
    ranks = []
    for rank in range(4):
        coords = coordinates(rank, MESH) | {"pp": stages[rank]}
        shards = [
            ShardError(0, "gradient", "last.a", (2 * coords["tp"],), (2,), 0.0, 2.0, 2.0),
            ShardError(0, "gradient", "last.b", (2 * coords["dp_shard"], 0), (2, 4), 0.0, 8.0, 8.0),
            ShardError(0, "gradient", "last.c", (0,), (1,), 0.0, 1.0, 1.0),
        ]
        changed = [(changes or {}).get(rank, {}).get(shard.name, shard) for shard in shards]
        errors = RankErrors(
            identity=f"rank {rank}",
            coords=coords,
            loss=[0.0, 0.0],
            norm=[0.0],
            clipped=[0.0],
            shards=[
                *(shard for shard in changed if shard is not None),
                *(shard._replace(kind="weight") for shard in shards),
            ],
        )
        ranks.append(replace(errors, **rank_fields))
    return judge(Verdict(passed=False, world_size=4, layout="", dtype=dtype), ranks, SMALL, stats)


def test_boxes_that_agree_are_exact() -> None:
    verdict = judged()
    assert verdict.passed
    assert verdict.error is None
    assert verdict.max_grad_rel_err == 0.0


def test_error_of_a_tensor_is_that_of_its_boxes_together() -> None:
    # Of ranks 0 and 2, which hold the same box, the worse counts: sqrt(0.09 + 0.16) / 2.
    shard = ShardError(0, "gradient", "last.a", (0,), (2,), 0.09, 2.0, 2.0)
    verdict = judged(
        {
            0: {"last.a": shard},
            2: {"last.a": shard._replace(diff_sq=0.04)},
            3: {"last.a": shard._replace(offset=(2,), diff_sq=0.16)},
        }
    )
    assert verdict.max_grad_rel_err == pytest.approx(0.25)
    assert verdict.error is not None
    assert verdict.error.startswith("gradient of last.a at step 1 is off by 2.5e-01 on rank 3")
    assert verdict.error.endswith("; only on ranks 0, 2, 3; 1 of 3 are off: last.a")


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_factor_on_all_shards_names_the_axes(factor: float) -> None:
    off = ShardError(0, "gradient", "last.a", (0,), (2,), 2 * (factor - 1) ** 2, 2.0, 2 * factor)
    verdict = judged({rank: {"last.a": off._replace(offset=(rank % 2 * 2,))} for rank in range(4)})
    assert verdict.error is not None
    suspects = "dp_shard or tp" if factor == 2.0 else "dp_shard x tp or micro-batches"
    assert f"it is {factor:g} times the reference, suspect {suspects};" in verdict.error


def test_ranks_that_are_off_are_described_by_shared_coordinates() -> None:
    shard = ShardError(0, "gradient", "last.a", (2,), (2,), 1.0, 2.0, 2.0)
    verdict = judged({1: {"last.a": shard}, 3: {"last.a": shard}})
    assert verdict.error is not None
    assert "only on ranks 1, 3 with tp1" in verdict.error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({1: {"last.a": None}, 3: {"last.a": None}}, "ranks hold only 2 of 4 elements of last.a"),
        (
            {rank: {"last.c": None} for rank in range(4)},
            "ranks hold only 0 of 1 elements of last.c",
        ),
        (
            {1: {"last.a": ShardError(0, "gradient", "last.a", (1,), (2,), 0.0, 2.0, 2.0)}},
            r"ranks hold shards of last.a that overlap: \[2\] at \[0\], \[2\] at \[1\]",
        ),
        (
            {
                2: {
                    "last.c": ShardError(
                        0, "gradient", "last.c", (), (0,), float("inf"), 0.0, 0.0, "is missing"
                    )
                }
            },
            "gradient of last.c at step 1 is missing on rank 2; only on rank 2 with dp_shard1 tp0",
        ),
        (
            {
                2: {
                    "last.c": ShardError(
                        0, "gradient", "last.c", (0,), (1,), float("nan"), 1.0, float("nan")
                    )
                }
            },
            "gradient of last.c at step 1 is off by inf on rank 2",
        ),
    ],
    ids=["lost shard", "lost tensor", "overlap", "missing", "not a number"],
)
def test_missing_or_unusable_shards_fail(
    change: dict[int, dict[str, ShardError | None]], words: str
) -> None:
    verdict = judged(change)
    assert not verdict.passed
    assert verdict.max_grad_rel_err is None
    assert verdict.error is not None
    assert re.search(words, verdict.error), verdict.error


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"loss": [0.0]}, "validation loss is off by inf"),
        ({"norm": []}, "gradient norm at step 1 is off by inf"),
        ({"loss": [float("nan"), 0.0]}, "loss at step 1 is off by nan"),
        ({"norm": [2e-9]}, "gradient norm at step 1 is off by 2.0e-09"),
    ],
    ids=["no validation", "no norm", "not a number", "norm"],
)
def test_missing_or_wrong_scalars_fail(more: dict[str, Any], words: str) -> None:
    verdict = judged(**more)
    assert not verdict.passed
    assert words in (verdict.error or "")


@pytest.mark.parametrize(("kind", "bound"), [("loss", 1e-6), ("norm", 1e-5), ("clipped", 5e-7)])
def test_numbers_in_float32_have_bounds_of_their_own(kind: str, bound: float) -> None:
    rest = [0.0] * (kind == "loss")  # the validation's
    assert judged(dtype="float32", **{kind: [0.9 * bound, *rest]}).passed
    assert not judged(dtype="float32", **{kind: [1.1 * bound, *rest]}).passed


def test_a_norm_that_was_not_clipped_has_the_bound_of_a_norm() -> None:
    stats = STATS._replace(clips=[False])
    assert judged(stats=stats, dtype="float32", clipped=[9e-6]).passed
    assert not judged(stats=stats, dtype="float32", clipped=[1.1e-5]).passed
    assert not judged(stats=stats, clipped=[1.1e-9]).passed


@pytest.mark.parametrize(
    "rule", ["wrong_learning_rate", "wrong_reduction", "wrong_load", "wrong_bad_step"]
)
def test_a_broken_rule_fails_a_proof_in_which_all_else_is_right(rule: str) -> None:
    verdict = judged(**{rule: "learning rate of step 51 is 1, not 2"})
    assert not verdict.passed
    assert verdict.error == "learning rate of step 51 is 1, not 2"


def test_a_replica_that_holds_nothing_fails() -> None:
    """The other ranks hold every element, so that none is missing in the whole."""
    verdict = judged({3: {"last.c": None}})
    assert not verdict.passed
    assert verdict.error is not None
    assert "last.c is missing on rank 3, while other ranks of its stage hold it" in verdict.error


def test_a_tensor_of_two_stages_fails() -> None:
    """Rank 3 holds the same boxes as rank 1, as a replica would, but belongs to another stage."""
    verdict = judged(stages=(0, 0, 0, 1))
    assert not verdict.passed
    assert verdict.error is not None
    assert re.search(
        r"pipeline ranks 0, 1 hold last\.[abc], which belongs to one stage", verdict.error
    )


@pytest.mark.parametrize(
    ("norm", "noise", "of_all", "most"),
    [
        # Rounding is far below the bound: an error is relative to the norm.
        (2.0, 1e-16, 4.0, 2e-9),
        (1e-6, 1e-22, 4.0, 1e-15),
        # The gradient of a query that sees one key is zero but for rounding: it may be any rounding
        # of the terms, and at least one of all gradients.
        (1e-19, 1e-19, 4.0, 4 * 2.0**-52),
        (0.0, 0.0, 4.0, 4 * 2.0**-52),
        (1e-17, 1e-16, 4.0, 32e-16),
        # It may be that of all parameters that train. The others tell the size of the terms.
        (1e-19, 1e-19, 400.0, 400 * 2.0**-52),
        # A small gradient without rounding of its size has all its digits, down to a share of all.
        (1e-11, 1e-27, 4.0, 1e-20),
        (1e-13, 1e-29, 4.0, 4e-21),
        # Rounding that one process measures is no error.
        (1e-6, 1e-16, 4.0, 32e-16),
        # But it explains no more than a share, however large it is.
        (2.0, 1.0, 4.0, 2e-3),
        (2.0, math.inf, 4.0, 2e-3),
        (2.0, math.nan, 4.0, 2e-9),
        (1e-19, 1.0, 4.0, 4e-6),
    ],
)
def test_rounding_of_what_was_summed_is_no_error(
    norm: float, noise: float, of_all: float, most: float
) -> None:
    norms = {
        kind: [{"last.a": norm, "last.b": 0.0, "last.c": 0.0}] for kind in ("gradient", "weight")
    }
    stats = STATS._replace(norms=norms, noise=[{"last.a": noise}], norms_of_all=[of_all])

    def off_by(error: float) -> Verdict:
        shards = [
            ShardError(0, "gradient", "last.a", (at,), (2,), error**2 / 2, norm**2 / 2, 0.0)
            for at in (0, 2)
        ]
        return judged({rank: {"last.a": shards[rank % 2]} for rank in range(4)}, stats)

    verdict = off_by(0.99 * most)
    assert verdict.passed
    # The error that is reported is within its bound, whatever was summed.
    assert verdict.max_grad_rel_err == pytest.approx(0.99e-9, rel=1e-3)
    assert not off_by(1.01 * most).passed


@pytest.mark.parametrize(
    ("norm", "noise", "of_all", "most"),
    [
        (2.0, 1e-8, 4.0, 2e-5),
        (2.0, 1e-5, 4.0, 8e-5),
        (2.0, 1.0, 4.0, 2e-3),
        # Zero but for rounding, also if one process finds zero itself.
        (1e-19, 1e-19, 4.0, 4 * 2.0**-23),
        (0.0, 0.0, 4.0, 4 * 2.0**-23),
        (1e-7, 1e-7, 4.0, 8e-7),
        # A small gradient that one process finds with its digits is not zero.
        (1e-9, 1e-16, 4.0, 4e-17 * 2**29),
    ],
)
def test_rounding_in_float32_is_no_error(
    norm: float, noise: float, of_all: float, most: float
) -> None:
    norms = {
        kind: [{"last.a": norm, "last.b": 0.0, "last.c": 0.0}] for kind in ("gradient", "weight")
    }
    stats = STATS._replace(norms=norms, noise=[{"last.a": noise}], norms_of_all=[of_all])

    def passes(error: float) -> bool:
        shards = [
            ShardError(0, "gradient", "last.a", (at,), (2,), error**2 / 2, norm**2 / 2, 0.0)
            for at in (0, 2)
        ]
        changed = {rank: {"last.a": shards[rank % 2]} for rank in range(4)}
        return judged(changed, stats, dtype="float32").passed

    assert passes(0.99 * most)
    assert not passes(1.01 * most)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_weight_is_right_if_it_is_the_references_or_the_step_from_own_gradients(
    dtype: str,
) -> None:
    """What rounding does not explain is ``diff_sq``, and the whole difference is apart."""
    stats = STATS._replace(shapes={"last.a": [4]}, norms={"weight": [{"last.a": 2.0}]})

    def off_by(unexplained: float, whole: float) -> Verdict:
        shard = ShardError(0, "weight", "last.a", (0,), (4,), unexplained**2, 4.0, 4.0, None)
        shards = [shard._replace(whole_diff_sq=whole**2)]
        return judged(stats=stats, dtype=dtype, shards=shards)

    for unexplained, whole, error in ((0.0, 1e-3, 0.0), (1e-3, 1e-10, 5e-11), (1e-10, 1e-3, 5e-11)):
        verdict = off_by(unexplained, whole)
        assert verdict.passed
        assert verdict.max_weight_rel_err == pytest.approx(error)
    assert not off_by(1e-8, 1e-8).passed


def test_a_weight_must_be_right_on_every_replica() -> None:
    """One replica has the reference's weight, and another one has neither."""
    ranks = []
    for rank, (unexplained, whole) in enumerate(((2e-3, 0.0), (1e-3, 1e-3))):
        shard = ShardError(0, "weight", "last.a", (0,), (4,), unexplained**2, 4.0, 4.0)
        shards = [shard._replace(whole_diff_sq=whole**2)]
        coords = coordinates(rank, MeshTable(dp_replicate=2, dp_shard=1))
        ranks.append(
            RankErrors(
                identity="", coords=coords, loss=[0.0] * 2, norm=[0.0], clipped=[0.0], shards=shards
            )
        )
    stats = STATS._replace(shapes={"last.a": [4]}, norms={"weight": [{"last.a": 2.0}]})
    verdict = Verdict(passed=False, world_size=2, layout="", dtype="float64")
    assert not judge(verdict, ranks, SMALL, stats).passed


@pytest.mark.parametrize(
    ("dtype", "kind", "value", "noise", "whole", "most"),
    [
        ("float64", "loss", 5.0, 1e-15, None, 5e-9),
        ("float64", "loss", 0.0, 0.0, None, 1e-9),  # no token has a label
        # The loss of a token that is nearly certain is the difference of large numbers.
        ("float64", "loss", 1e-9, 1e-15, None, 32e-15),
        ("float64", "loss", 1e-9, 1.0, None, 1e-6),
        ("float64", "norm", 2.0, 1e-16, 4.0, 2e-9),
        ("float64", "norm", 1e-19, 1e-19, 4.0, 32e-19),
        ("float64", "norm", 1e-19, 1.0, 4.0, 4e-6),
        ("float64", "norm", 1e-19, math.nan, 4.0, 1e-28),
        ("float32", "loss", 5.0, 1e-7, None, 5e-6),
        ("float32", "norm", 2.0, 1e-7, 4.0, 2e-5),
        ("float32", "norm", 1e-19, 1e-9, 4.0, 8e-9),
        ("float32", "norm", 1e-19, 1.0, 4.0, 4e-3),
    ],
)
def test_rounding_of_what_was_summed_into_a_number_is_no_error(
    dtype: str, kind: str, value: float, noise: float, whole: float | None, most: float
) -> None:
    scale = scalar_scale(kind, dtype, value, noise=noise, whole=whole)
    rest = [0.0] * (kind == "loss")  # the validation's
    assert judged(dtype=dtype, **{kind: [0.99 * most / scale, *rest]}).passed
    assert not judged(dtype=dtype, **{kind: [1.01 * most / scale, *rest]}).passed


def test_a_bound_in_float32_grows_with_the_noise() -> None:
    def off_by(error: float, noise: float) -> Verdict:
        shards = [
            ShardError(0, "gradient", "last.a", (at,), (2,), (2 * error) ** 2 / 2, 2.0, 2.0)
            for at in (0, 2)
        ]
        change: dict[int, dict[str, ShardError | None]] = {
            rank: {"last.a": shards[rank % 2]} for rank in range(4)
        }
        return judged(change, STATS._replace(noise=[{"last.a": 2 * noise}]), dtype="float32")

    assert off_by(0.9e-5, 0.0).passed
    assert not off_by(1.1e-5, 0.0).passed
    assert off_by(7e-5, 1e-5).passed
    assert not off_by(9e-5, 1e-5).passed
    # No noise, however large, infinite or not a number, excuses an error beyond the largest bound.
    for noise in (1.0, float("inf"), float("nan")):
        assert not off_by(2e-3, noise).passed
    # It may be rounding where rounding moves the gradients of the whole step by more than a bound.
    assert [off_by(2e-3, noise).undecided for noise in (2e-4, 1e-3)] == [False, True]
    assert off_by(2e-3, 1e-3).error == (
        "not proven: rounding alone moves the gradient of last.a at step 1 by 1.0e-03 of itself, "
        "so no error could be told from it; use --dtype float64, or change the settings of optim "
        "that make a step so large"
    )
    # It is none if it is larger than that.
    assert not off_by(9e-3, 1e-3).undecided
    assert not off_by(math.inf, math.inf).undecided


def test_noise_excuses_gradients_and_their_norm_and_no_factor() -> None:
    noisy = STATS._replace(noise=[{"last.b": 8.0}])
    assert not has_little_noise(noisy, "float64")
    assert not has_little_noise(STATS._replace(noise=[{"last.b": math.nan}]), "float64")
    for scalars in (
        {"loss": [0.1, 0.0]},
        {"norm": [0.1]},
        {"clipped": [0.1]},
        {"loss": [0.0, 0.1]},
    ):
        verdict = judged(stats=noisy, **scalars)
        assert not verdict.passed
        assert not verdict.undecided

    def off(diff_sq: float, dot: float) -> dict[int, Any]:
        shards = [
            ShardError(0, "gradient", "last.b", (2 * shard, 0), (2, 4), diff_sq, 8.0, dot)
            for shard in (0, 1)
        ]
        return {rank: {"last.b": shards[rank // 2]} for rank in range(4)}

    noise = off(8.0, 8.0)
    assert judged(noise, noisy).undecided
    assert judged(stats=noisy, norm=[0.05]).undecided
    rule = "learning rate is wrong"
    assert judged(noise, noisy, wrong_learning_rate=rule).error == rule
    doubled = judged(off(8.0, 16.0), noisy)
    assert doubled.error is not None
    assert "it is 2 times the reference" in doubled.error

    # What is surely wrong is named, and not what may be rounding beside it.
    wrong = ShardError(0, "gradient", "last.c", (0,), (1,), 1e-4, 1.0, 1.0)
    both = judged({rank: {**noise[rank], "last.c": wrong} for rank in range(4)}, noisy)
    assert both.worst_parameter == "last.c"
    assert both.error is not None
    assert both.error.endswith("1 of 3 are off: last.c")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_proves_nothing(number: float) -> None:
    norms = {
        kind: [{"last.a": number, "last.b": 4.0, "last.c": 1.0}] for kind in ("gradient", "weight")
    }
    shard = ShardError(0, "gradient", "last.a", (0,), (2,), number - number, number, number)
    change: dict[int, dict[str, ShardError | None]] = {
        rank: {"last.a": shard._replace(offset=(rank % 2 * 2,))} for rank in range(4)
    }
    assert not judged(change, STATS._replace(norms=norms)).passed


def test_float8_is_proven_in_float64_alone(pool: Pool, references: Path) -> None:
    sets = ["precision.compute=bfloat16", "precision.matmul=float8"]
    verdict = verify_layout(pool, references, RECIPE, sets, dtype="float32", steps=2)
    assert verdict.refused
    assert verdict.error is not None
    assert verdict.error.startswith('precision.matmul = "float8" is proven in float64 alone')


def test_refused_layout_says_why(pool: Pool, references: Path) -> None:
    verdict = verify_layout(pool, references, RECIPE, ["mesh.tp=3"], dtype="float64", steps=1)
    assert verdict.refused
    assert not verdict.passed
    assert verdict.error is not None
    assert "mesh.tp = 3 must divide model.n_heads = 8" in verdict.error


def test_command_prints_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout that is not proven in time is not called wrong, and the next one is proven."""
    monkeypatch.setattr(limits, "_COMPILED_RUN_S", 0.1)
    layouts = tmp_path / "layouts.txt"
    layouts.write_text(
        "# three\nmesh.dp_shard=2 data.global_batch=4 compile.enabled=true\n"
        "mesh.dp_shard=2 data.global_batch=4\n\nmesh.tp=3\n"
    )
    status = cli.main(["verify", RECIPE, "--steps", "1", "--layouts", str(layouts), "--json"])
    lines = capsys.readouterr().out.splitlines()
    answer = json.loads(lines[-1])
    assert status == 1
    assert not answer["passed"]
    states = [(r["passed"], r["refused"], r["timed_out"]) for r in answer["results"]]
    assert states == [(False, False, True), (True, False, False), (False, True, False)]
    assert [r["world_size"] for r in answer["results"]] == [2, 2, 0]
    assert lines[0].startswith("NO TIME mesh.dp_shard=2")
    assert "no answer after 0 s" in answer["results"][0]["error"]
    assert set(answer["results"][0]) == {
        "passed",
        "world_size",
        "layout",
        "dtype",
        "float32",
        "loss_rel_err",
        "grad_norm_rel_err",
        "max_grad_rel_err",
        "max_weight_rel_err",
        "worst_parameter",
        "refused",
        "timed_out",
        "undecided",
        "error",
    }


def test_shrinking_keeps_axes_and_layers(root: Path) -> None:
    for path in sorted((root / "recipes").glob("*.toml")):
        full = load(path).recipe
        for small in shrink(full):
            assert small.world_size <= 16
            # Sizes that kernels of float8 do not take: a proof emulates them.
            assert small.precision.matmul == full.precision.matmul
            in_wide_dtypes = replace(small.precision, matmul="compute")
            assert not violations(replace(small, precision=in_wide_dtypes))
            assert small.model.dim <= 512
            assert (small.model.n_kv_heads < small.model.n_heads) == (
                full.model.n_kv_heads < full.model.n_heads
            )
            if small.mesh.pp > 1:
                assert (small.model.n_layers % small.mesh.pp > 0) == (
                    full.model.n_layers % full.mesh.pp > 0
                )
            for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
                assert (getattr(small.mesh, axis) > 1) <= (getattr(full.mesh, axis) > 1)


def shrunk(*sets: str) -> Recipe:
    (small,) = shrink(load(RECIPE, list(sets), check_files=False).recipe)
    return small


def test_shrinking_keeps_the_switches() -> None:
    sets = [
        "mesh.tp=2",
        "model.vocab=50257",
        "memory.loss_chunks=16",
        "data.packing=documents",
        "memory.cpu_offload=true",
    ]
    small = shrunk(*sets)
    assert small.model.vocab % 2 == 1
    assert small.model.vocab >= 256
    assert small.memory.loss_chunks == 3
    for word in ("loss in 3 chunks", "offload", "packing documents", "tp 2"):
        assert word in describe(small)
    assert shrunk("mesh.tp=2", "model.vocab=50258").model.vocab == 256
    assert "compile" in describe(shrunk("compile.enabled=true"))
    # The small sizes are not those of kernels, which the full recipe must have.
    in_float8 = shrunk("mesh.tp=2", "precision.compute=bfloat16", "precision.matmul=float8")
    assert in_float8.model.ffn // 2 % 16
    assert "mixed emulated float8" in describe(in_float8)


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches", "expected"),
    [
        ("1F1B", 4, 64, 8),
        ("Interleaved1F1B", 8, 40, 16),
        ("InterleavedZeroBubble", 4, 6, 6),
        ("DualPipeV", 8, 16, 16),
        ("ZBVZeroBubble", 4, 3, 3),
        ("LoopedBFS", 4, 2, 2),
    ],
)
def test_shrinking_keeps_enough_micro_batches(
    schedule: str, pp: int, micro_batches: int, expected: int
) -> None:
    sets = [
        f"mesh.pp={pp}",
        f"parallel.schedule={schedule}",
        "data.micro_batch=1",
        "model.n_layers=16",
    ]
    small = shrunk(*sets, f"data.global_batch={micro_batches}")
    assert small.mesh.pp == pp
    assert small.micro_batches == expected


def csv_of(folder: Path, pp: int) -> str:
    """A schedule of one stage a rank and 12 micro-batches: all forwards, then all backwards."""
    lines = [
        ",".join(f"{rank}{what}{number}" for what in "FB" for number in range(12))
        for rank in range(pp)
    ]
    path = folder / "schedule.csv"
    path.write_text("\n".join(lines))
    return str(path)


def test_shrinking_keeps_the_pipeline_of_a_file(tmp_path: Path) -> None:
    def smalls(pp: int, *sets: str) -> list[Recipe]:
        given = [
            "parallel.schedule=csv",
            f"parallel.schedule_csv={csv_of(tmp_path, pp)}",
            "parallel.virtual_stages=1",
        ]
        size = ["data.micro_batch=1", f"mesh.pp={pp}", "model.n_layers=20"]
        return shrink(load(RECIPE, [*given, *size, *sets], check_files=False).recipe)

    for small in smalls(8, "mesh.dp_shard=4", "mesh.tp=2", "data.global_batch=48"):
        assert (small.mesh.pp, small.micro_batches, small.world_size) == (8, 12, 16)
    (small,) = smalls(3, "mesh.dp_shard=4", "mesh.tp=2", "data.global_batch=48")
    assert (small.mesh.pp, small.mesh.dp_shard, small.mesh.tp, small.micro_batches) == (3, 2, 2, 12)
    with pytest.raises(UserError, match="is for 18 pipeline ranks"):
        smalls(18, "data.global_batch=12")


def test_an_exact_layout_has_the_largest_errors_of_all_its_small_models() -> None:
    def exact(layout: str, *errors: float) -> Verdict:
        loss, norm, gradient, weight = errors
        return Verdict(
            passed=True,
            world_size=2,
            layout=layout,
            dtype="float64",
            loss_rel_err=loss,
            grad_norm_rel_err=norm,
            max_grad_rel_err=gradient,
            max_weight_rel_err=weight,
        )

    verdicts = [exact("pp 2 tp 2", 3e-16, 0.0, 8e-16, 5e-10), exact("cp 3", 0.0, 2e-16, 9e-16, 0.0)]
    assert _in_one(verdicts, verdicts[1]) == exact(
        "cp 3, and 1 further small model", 3e-16, 2e-16, 9e-16, 5e-10
    )


def test_the_worst_failure_stands_for_a_layout() -> None:
    """A gradient that is not finite has no error, and is worse than any error."""
    ranked = [
        Verdict(passed=True, world_size=2, layout="exact", dtype="float64", max_grad_rel_err=0.0),
        Verdict(passed=False, world_size=2, layout="refused", dtype="float64", refused=True),
        Verdict(
            passed=False,
            world_size=2,
            layout="noisy",
            dtype="float64",
            max_grad_rel_err=0.2,
            undecided=True,
        ),
        Verdict(passed=False, world_size=2, layout="slow", dtype="float64", timed_out=True),
        Verdict(passed=False, world_size=2, layout="off", dtype="float64", max_grad_rel_err=0.1),
        Verdict(passed=False, world_size=2, layout="not finite", dtype="float64"),
    ]
    for better, worse in pairwise(ranked):
        assert badness(better) < badness(worse)
