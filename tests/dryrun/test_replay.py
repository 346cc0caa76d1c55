"""The reports of pipeline ranks that did not run themselves, and of micro-batches left out."""

from dataclasses import replace

import pytest

from composer3d.dryrun.replay import Key, Lap, Tape, keys, replay
from composer3d.dryrun.report import Memory
from composer3d.dryrun.run import dry_run, run_ranks
from composer3d.dryrun.stage import TapedStage, tape_stage
from composer3d.facts.schedules import Action
from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import recipe_of
from tests.long import some_of
from tools.prove.paths import ROOT

BASE = ROOT / "recipes" / "debug-1-single.toml"
SIZES = ("model.n_layers=8", "data.seq_len=32", "data.micro_batch=1", "mesh.dp_shard=2")


@some_of(
    4,
    ("schedule", "sets"),
    [
        ("1F1B", ["parallel.zero=3", "data.global_batch=10"]),
        ("Interleaved1F1B", ["parallel.virtual_stages=2", "data.global_batch=8"]),
        # The last rank has both stages in the middle, and sends no messages between them.
        ("ZBVZeroBubble", ["data.global_batch=10"]),
        # Stages 1 and 2 have the same shapes, and train other parameters.
        (
            "GPipe",
            [
                "data.global_batch=8",
                'optim.train=["first.*","last.*","blocks.[01]*","*.attn.*","blocks.[4567]*"]',
            ],
        ),
        # Only stage 1 has matrices.
        ("GPipe", ["data.global_batch=8", "optim.name=muon", 'optim.matrices=["blocks.2.*.w*"]']),
        # Stages 1 and 2 have the same parameters. One is checkpointed; one sees all tokens, or has
        # no positions; the weights of one decay.
        (
            "GPipe",
            ["data.global_batch=8", "memory.activation_checkpoint=full in the first 2 stages"],
        ),
        ("GPipe", ["data.global_batch=8", "model.window=8", "model.full_every=5"]),
        ("GPipe", ["data.global_batch=8", "model.nope_every=3"]),
        (
            "GPipe",
            ["data.global_batch=8", 'optim.groups=[{train=["blocks.2.*"],weight_decay=0.5}]'],
        ),
    ],
)
def test_ranks_that_did_not_run_are_reported_as_if_they_had(
    pool: Pool, schedule: str, sets: list[str]
) -> None:
    recipe = recipe_of(BASE, (*SIZES, "mesh.pp=4", f'parallel.schedule="{schedule}"', *sets))
    for report in dry_run(recipe).stages[1:]:
        (own,) = run_ranks(pool, [(recipe, report.stage)])
        assert report == own


@pytest.mark.parametrize(
    "sets",
    [
        ["parallel.zero=3", "memory.activation_checkpoint=selective"],
        ["parallel.zero=1", "mesh.tp=2", 'data.packing="documents"'],
    ],
)
def test_micro_batches_that_did_not_run_count(pool: Pool, sets: list[str]) -> None:
    recipe = recipe_of(BASE, (*SIZES, "model.n_layers=2", "data.global_batch=14", *sets))
    arguments = {"recipe": recipe, "pp_rank": 0, "skew": 1.0, "run_all": True}
    taped: TapedStage
    (taped,) = pool.run(tape_stage, arguments, world_size=1)
    assert len(taped.tape.actions) == 7
    (report,) = run_ranks(pool, [(recipe, 0)])
    whole = taped.report(0, taped.tape.actions)
    assert whole is not None
    assert report == whole


def test_a_rank_that_has_run_is_reported_as_it_ran() -> None:
    """Two laps of one key differ: torch gathers parameters at times of its own."""
    ran = [Action(0, "F", batch) for batch in range(4)]
    laps = [
        Lap(number, {("fsdp", "all_gather"): (number, 10)}, (0,), (number,)) for number in range(6)
    ]
    own = replay(Tape(ran, laps, (0,)), ran)
    assert own is not None
    assert own.operators == sum(range(6))
    assert own.traffic == {("fsdp", "all_gather"): (sum(range(6)), 60)}
    assert own.most == (5,)


def test_the_nodes_of_a_rank_that_did_not_run_are_its_own() -> None:
    ran = [Action(1, "F", 0)]
    traffic = {(axis, "send"): (1, 10) for axis in ("pp", "tp", "world")}
    none = (0,) * len(Memory._fields)
    laps = [Lap(1, {}, none, none), Lap(1, traffic, none, none)]
    groups = {"pp": [(0, 2), (2, 4)], "tp": [(2, 3)], "world": [tuple(range(8))]}
    taped = TapedStage(1, 2, Tape(ran, laps, none), groups)
    for stage, is_across in ((1, False), (2, False), (3, True)):
        report = taped.report(stage, [Action(stage, "F", 0)])
        assert report is not None
        across = {axis: usage["send"].across_nodes for axis, usage in report.comm.items()}
        assert across == {"pp": is_across, "tp": False, "world": False}


def test_actions_are_added_up_in_the_order_of_the_other_rank() -> None:
    """Forwards keep 1 byte, backwards free it; each lap's number is its operators."""
    ran = [Action(0, kind, batch) for batch in range(3) for kind in "FB"]
    levels = [0, 0, 1, 0, 1, 0, 1, 0]
    laps = [
        Lap(5 + index, {("pp", "send"): (1, 10)}, (levels[index],), (levels[index] + 3,))
        for index in range(8)
    ]
    laps[0] = replace(laps[0], traffic={})
    laps[-1] = replace(laps[-1], traffic={})
    tape = Tape(ran, laps, (0,))
    own = replay(tape, ran)
    assert own is not None
    assert own.operators == sum(range(5, 13))
    assert own.traffic == {("pp", "send"): (6, 60)}
    assert own.most == (4,)

    # "F after F" is not on the tape.
    assert replay(tape, [Action(0, kind, batch) for kind in "FB" for batch in range(3)]) is None
    # Two more micro-batches repeat the one in the middle: 8 + 9 operators, of which 2 are messages.
    longer = replay(tape, [Action(0, kind, batch) for batch in range(5) for kind in "FB"])
    assert longer is not None
    assert longer.operators == own.operators + 2 * (8 + 9)
    assert longer.traffic == {("pp", "send"): (10, 100)}


def test_keys_tell_the_ends_and_the_action_before() -> None:
    found = keys([Action(4, "F", 0), Action(4, "F", 1), Action(4, "B", 0), Action(4, "B", 1)])
    assert found == [
        Key(0, "F", "first", ""),
        Key(0, "F", "last", "F"),
        Key(0, "B", "first", "F"),
        Key(0, "B", "last", "B"),
    ]
