"""The structure of a job: planted faults are found without a number, and nothing in right jobs."""

import re
from typing import Any

import pytest
import torch

from composer3d.dryrun.replay import Key, keys
from composer3d.dryrun.run import dry_run, rank_actions
from composer3d.full.check import (
    Structure,
    _problem_of_path,
    _small_job,
    _with_every_action,
    check_structure,
)
from composer3d.full.paths import GradientPath, Sum
from composer3d.full.places import SAME, digits
from composer3d.full.verdict import FullVerdict
from composer3d.full.witness import _overlap
from composer3d.recipe.draft import split_overrides
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from composer3d.verify.judge import Verdict
from tests.long import some_of
from tools.prove.faults.exchanges import (
    drop_reduction_of_norms,
    drop_sum_of_outputs,
    lose_the_hop_of_key_gradients,
    lose_the_hop_of_keys,
)
from tools.prove.faults.pipeline import lose_a_gradient_between_stages
from tools.prove.full.at_scale import (
    count_batch_ranks_by_replicas,
    gather_once_more_late_in_the_order,
    lose_a_matrix_between_rounds,
    lose_the_seventeenth_message,
    pair_ranks_of_cp,
    run_blocks_in_the_order_of_their_names,
    send_to_the_rank_before,
)
from tools.prove.full.run import _nothing
from tools.prove.full.spoil import Spoil
from tools.prove.paths import RECIPE, ROOT

_3D = "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 data.global_batch=8"
_RING = "mesh.cp=4 data.global_batch=4"


def _spoil(way: str, call: str) -> Any:
    return way, *call.split()


@pytest.mark.timeout(900)  # each forks up to ten processes
@some_of(
    14,
    ("layout", "plant", "finding"),
    [
        (_3D, _nothing, None),
        # The balance loss counts the experts of 16 documents a row.
        (
            "model.architecture=moe model.preset=debug-moe model.balance_loss=0.5 mesh.tp=2 "
            "mesh.ep=1 data.packing=documents",
            _nothing,
            None,
        ),
        ("mesh.cp=3 data.seq_len=252 data.global_batch=4", _nothing, None),
        # The last of three ranks has a smaller shard of each norm, whose gradients tp sums.
        ("mesh.dp_shard=3 mesh.tp=2 data.global_batch=12", _nothing, None),
        # Three ranks share 1,024 rows, and 64 in the small model.
        (
            "model.architecture=moe model.preset=debug-moe mesh.pp=2 mesh.dp_shard=3 mesh.ep=3 "
            "model.experts=6 data.global_batch=120",
            _nothing,
            None,
        ),
        # Some ranks see none of the keys that a ring brings last, for one reason each.
        (f"{_RING} data.packing=documents", _nothing, None),
        (f"{_RING} parallel.cp_balance=contiguous", _nothing, None),
        (f"{_RING} model.window=8", _nothing, None),
        # Kernels do not take the sizes of the small model.
        (
            "mesh.pp=2 mesh.tp=2 data.global_batch=40 precision.matmul=float8 "
            "precision.compute=bfloat16 model.dim=64 model.n_heads=4 model.n_kv_heads=2 "
            "model.head_dim=16 model.ffn=64",
            _nothing,
            None,
        ),
        (
            "mesh.tp=2",
            drop_reduction_of_norms,
            r"gradients: .*norm\.weight: it is summed over noth",
        ),
        (
            "mesh.tp=2 parallel.sequence_parallel=false",
            drop_sum_of_outputs,
            "seams: the activations after block 0 vary between the ranks of tp",
        ),
        ("mesh.cp=2", lose_the_hop_of_keys, "seams: .* results of recv are read by nothing"),
        # Ranks that must not read the last keys must still read the rest.
        *(
            (f"{_RING} {hides}", fault, "seams: .* results of recv are read by nothing")
            for hides in ("data.packing=documents", "parallel.cp_balance=contiguous")
            for fault in (lose_the_hop_of_keys, lose_the_hop_of_key_gradients)
        ),
        # Latents of keys that no query sees are read as well.
        (
            "model.architecture=deepseek model.preset=debug-deepseek model.n_kv_heads=8 mesh.cp=2 "
            "data.packing=documents",
            lose_the_hop_of_key_gradients,
            "seams: .* results of recv are read by nothing",
        ),
        # All of it trains, so nothing is left out of the check.
        (
            "mesh.cp=2 optim.train=['*']",
            lose_the_hop_of_keys,
            "seams: .* results of recv are read by nothing",
        ),
        (
            "mesh.pp=2",
            lose_a_gradient_between_stages,
            "seams: the gradients that stage 0 takes for micro-batch 1 are not those",
        ),
        # More than have every kind of action.
        (
            "mesh.pp=2 data.global_batch=40",
            lose_the_seventeenth_message,
            "messages: activations of stage 0, micro-batch 16: sent 0 times",
        ),
        (
            "optim.name=muon mesh.dp_shard=2 model.dim=8192 model.ffn=32768 model.vocab=512",
            lose_a_matrix_between_rounds,
            "seams: the update of blocks.0.attn.wo.weight writes 0 elements of 33,554,432",
        ),
        (
            "mesh.pp=2 mesh.dp_shard=2 parallel.virtual_stages=4 model.n_layers=8 "
            "parallel.schedule=Interleaved1F1B data.global_batch=80",
            gather_once_more_late_in_the_order,
            "collectives: pipeline rank 0: .* all_gather of .* over fsdp",
        ),
        ("mesh.cp=4 data.global_batch=4", pair_ranks_of_cp, "groups: rank 0 sends over cp to"),
        (
            "mesh.cp=3 data.seq_len=252 data.global_batch=4",
            send_to_the_rank_before,
            "messages: rank 0 does not receive over",
        ),
        (_3D, _spoil("call twice", "reduce_scatter fsdp"), "should be over fsdp|and should be"),
        (_3D, _spoil("take the average", "all_reduce tp"), "0.5|take the average"),
        (_3D, _spoil("last rank skips", "all_gather fsdp"), "peers: call"),
        (_3D, _spoil("lose one", "message pp"), "messages: .*sent 0 times from pipeline rank"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_found_and_a_right_layout_is_sound(
    pool: Pool, layout: str, plant: Any, finding: str | None
) -> None:
    full = load(str(RECIPE), split_overrides(layout), check_files=False).recipe
    if isinstance(plant, tuple):
        plant = Spoil(*plant, full.mesh)
    structure = check_structure(pool, full, [full], plant=plant)
    words = "\n".join(map(str, structure.findings))
    assert words == "" if finding is None else re.search(finding, words), words
    assert structure.passed == (finding is None)
    if layout == _3D and finding is None:
        # Each check has compared something.
        assert all(structure.counts[check] > 0 for check in structure.counts)
        assert structure.counts["messages"] == 4
        assert (structure.micro_batches_run, structure.micro_batches) == (2, 2)


@pytest.mark.parametrize(
    ("plant", "finding"),
    [
        (None, []),
        (
            count_batch_ranks_by_replicas,
            [
                f"rank {rank} takes the samples of batch rank {rank - 2}, and should take those of "
                f"{rank}"
                for rank in range(4, 8)
            ],
        ),
    ],
)
def test_a_rank_that_takes_the_samples_of_another_is_found(
    pool: Pool, plant: Any, finding: list[str]
) -> None:
    layout = split_overrides("mesh.dp_replicate=2 mesh.dp_shard=4")
    full = load(str(RECIPE), layout, check_files=False).recipe
    arguments = {"recipe": full, "ranks": [0, 5], "plant": plant}
    task = "composer3d.full.witness:wrong_groups"
    assert pool.run(task, arguments, world_size=1) == [finding]


_PREDICTING = (
    "model.architecture=deepseek model.preset=debug-deepseek model.n_kv_heads=8 model.n_layers=3 "
    "model.mtp_layers=1 mesh.pp=2 data.global_batch=8 memory.activation_checkpoint=full"
)


@pytest.mark.parametrize(
    ("layout", "plant", "unmet"),
    [
        (
            "model.n_layers=12",
            run_blocks_in_the_order_of_their_names,
            ("the blocks of stage 0 run in another order: in place 2 it is 10, not 2",),
        ),
        # The last block is that of multi-token prediction.
        (_PREDICTING, None, ()),
        ("model.n_layers=12 memory.activation_checkpoint=full mesh.tp=2", None, ()),
    ],
)
def test_a_stage_that_runs_blocks_in_another_order_is_found(
    pool: Pool, layout: str, plant: Any, unmet: tuple[str, ...]
) -> None:
    full = load(str(RECIPE), split_overrides(layout), check_files=False).recipe
    rank = full.world_size // 2
    arguments = {"job": (full, rank // (full.world_size // full.mesh.pp), rank), "plant": plant}
    (seen,) = pool.run("composer3d.full.witness:see", arguments, world_size=1)
    assert seen.unmet == unmet


@pytest.mark.timeout(900)
def test_a_reduced_step_is_called_so_and_each_message_counts_once(pool: Pool) -> None:
    full = load(str(RECIPE), split_overrides("mesh.pp=2 data.global_batch=40"), check_files=False)
    structure = check_structure(pool, full.recipe, [full.recipe])
    assert structure.findings == []
    assert (structure.micro_batches_run, structure.micro_batches) == (4, 20)
    # Activations and their gradients, once for each micro-batch.
    assert structure.counts["messages"] == 2 * 20
    verdict = Verdict(passed=True, world_size=2, layout="", dtype="float64")
    lines = str(FullVerdict(verdict, 1, structure)).splitlines()
    assert (
        "  the full-size model ran a reduced step: 4 of 20 micro-batches, which show every kind of "
        "action"
    ) in lines


def test_frozen_gradients_and_messages_of_the_pipeline_are_not_counted(pool: Pool) -> None:
    overrides = ["mesh.pp=2", "mesh.dp_shard=2", "data.global_batch=8"]
    overrides.append('optim.train=["last.*","blocks.*.attn.wo.weight"]')
    full = load(str(RECIPE), overrides, check_files=False).recipe
    structure = check_structure(pool, full, [full])
    assert structure.findings == []
    # One of each of four blocks, the last norm and the head.
    assert structure.counts["gradients"] == 4 + 2
    reports = dry_run(full).stages
    assert structure.counts["collectives"] == sum(
        len(operations)
        for report in reports
        for axis, operations in report.comm.items()
        if axis != "pp"
    )


def test_a_verdict_does_not_praise_what_a_check_found_wrong() -> None:
    structure = Structure(world_size=2, micro_batches=1)
    structure.add("gradients", ["the gradient of x: it is multiplied by 2"], 7)
    structure.add("messages", [], 4)
    verdict = Verdict(passed=True, world_size=2, layout="", dtype="float64")
    lines = str(FullVerdict(verdict, 1, structure)).splitlines()
    assert "          7 checked for gradients, and there are problems" in lines
    assert (
        "          4 messages of small models in a pipeline, each sent once and received once"
        in lines
    )
    assert not any("summed once" in line for line in lines)


@pytest.mark.parametrize(
    ("recipe", "overrides", "number"),
    [
        ("glm-4.5-air-64", [], 10),
        # The middle one of three forwards is the only kind of its own.
        ("glm-4.5-air-64", ["parallel.schedule=GPipe"], 3),
        ("glm-4.5-air-64", ["data.global_batch=32"], 8),
        ("debug-2-csv", [], 4),
        ("llama3-8b-8-fsdp", [], 4),
    ],
)
def test_as_many_micro_batches_run_as_have_every_kind_of_action(
    recipe: str, overrides: list[str], number: int
) -> None:
    full = load(ROOT / "recipes" / f"{recipe}.toml", overrides, check_files=False).recipe

    def kinds_of(job: Recipe) -> list[set[Key]]:
        return [set(keys(rank_actions(job, pp_rank))) for pp_rank in range(job.mesh.pp)]

    job = _with_every_action(full)
    assert job.micro_batches == number
    assert kinds_of(job) == kinds_of(full)
    if number < full.micro_batches:
        assert kinds_of(full.with_micro_batches(number - 1)) != kinds_of(full)


@pytest.mark.parametrize("recipe", ["mixtral-8x7b-64-4d", "llama-175b-512-3d", "glm-4.5-air-64"])
def test_the_small_model_on_the_mesh_of_the_job_runs_every_kind_of_its_actions(recipe: str) -> None:
    full = load(ROOT / "recipes" / f"{recipe}.toml", [], check_files=False).recipe
    small = _small_job(full)
    for pp_rank in range(full.mesh.pp):
        wanted = set(keys(rank_actions(full, pp_rank)))
        assert set(keys(rank_actions(small, pp_rank))) == wanted


@pytest.mark.parametrize(
    ("parts", "have_common"),
    [
        ([], False),
        ([(slice(0, 4), slice(0, 6))], False),
        ([(slice(0, 2), slice(0, 6)), (slice(2, 4), slice(0, 6))], False),
        ([(slice(0, 4), slice(0, 3)), (slice(0, 4), slice(3, 6))], False),
        # As many elements as the weight has: a row is written twice, and one never.
        ([(slice(0, 2), slice(0, 6)), (slice(1, 3), slice(0, 6))], True),
        ([(slice(0, 2), slice(0, 6)), (slice(0, 2), slice(0, 6))], True),
    ],
)
def test_parts_of_a_weight_that_overlap_are_seen(
    parts: list[tuple[slice, slice]], have_common: bool
) -> None:
    # A shard lies anywhere in its memory.
    weight = torch.zeros(29)[5:].view(4, 6)
    written = [weight[part] for part in parts]
    places = [(int(part.storage_offset()), tuple(part.shape)) for part in written]
    assert _overlap(places, weight) == have_common


def test_the_ranks_of_a_formula_and_the_axes_of_the_types_must_agree() -> None:
    full = load(str(RECIPE), ["mesh.dp_shard=2", "mesh.tp=2"], check_files=False).recipe
    (tp, shards), ranks = digits(full.mesh), (0, 2)
    over_shards = GradientPath(
        sums=(Sum("reduce_scatter", ranks),), partial_over=frozenset((shards,))
    )
    assert _problem_of_path(full, 0, ranks, over_shards) == ""
    for partial_over, axes in ((SAME, "no axis"), (frozenset((tp, shards)), "dp_shard, tp")):
        problem = _problem_of_path(full, 0, ranks, over_shards._replace(partial_over=partial_over))
        assert problem == f"it is summed over fsdp (2 ranks), and is partial over {axes}"
