"""A proof that has proven nothing fails: nothing chosen, nothing compared, nothing seen."""

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer3d.facts.errors import UserError
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tools.prove.__main__ import PROOFS
from tools.prove.faults.places import found_by
from tools.prove.full import run as full
from tools.prove.fuzz import run as fuzz
from tools.prove.hostile import case as hostile
from tools.prove.imports import run as imports
from tools.prove.kills import run as kills
from tools.prove.kills import trouble
from tools.prove.kills.jobs import differences
from tools.prove.kills.storm import Storm, check
from tools.prove.kills.storm import kills as planned_kills
from tools.prove.order import Batch, Collective, Group, Message, nothing_seen
from tools.prove.paths import RECIPE


@pytest.mark.parametrize(
    "command",
    [
        "faults no-such-fault",
        "full no-such-fault",
        "fuzz --recipes 0 --tokens 0 --checkpoints 0 --folders 0 --tokenizers 0",
        "fuzz --recipes -1",
        "hostile no-such-case",
        "imports no-such-configuration",
        "jobs --cases 0 --troubles 0",
        "jobs --first 106",
        "kills no-such-scenario",
        "matrix --rows 9-8",
        "order --every 0",
        "random --count 0",
        "random --part 3/2",
        "resume no-such-layout",
        "storm --kills 0",
        "timeline no-such-schedule",
    ],
)
def test_a_choice_of_nothing_is_an_error_of_arguments(command: str) -> None:
    name, *options = command.split()
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(PROOFS[name]).main(options)
    assert caught.value.code == 2


def test_a_part_without_a_layout_proves_nothing() -> None:
    assert importlib.import_module(PROOFS["random"]).main(["--count=1", "--part=2/2"]) == 1


def test_kills_of_nothing_prove_nothing() -> None:
    assert kills.main([kills.RANDOM, "--instants=0"]) == 1


def test_losses_that_nobody_has_logged_are_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences({}, {}) == [
        "the undisturbed job has logged no loss, so nothing was compared"
    ]
    outcome = SimpleNamespace(state="", loop_s=1.0)
    monkeypatch.setattr(kills.Killer, "train", lambda *_, **__: [outcome])
    with kills.Killer() as killer, pytest.raises(RuntimeError, match=r"has logged the losses \{\}"):
        killer.uninterrupted(1, 6)


def test_a_save_that_publishes_nothing_is_not_durable() -> None:
    assert kills.not_durable([]) == ["no checkpoint got its name, so nothing was checked"]


def test_a_storm_whose_resumes_are_not_seen_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert check(Storm(tmp_path, (), hits=Counter(all=1)), {1: 2.0}) == [
        "no resume was seen after a kill, so its lost steps were not counted"
    ]


def test_a_training_that_ends_before_a_kill_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = SimpleNamespace(process=SimpleNamespace(poll=lambda: 0), end=lambda: None)
    monkeypatch.setattr(Storm, "_start", lambda *_: ended)
    storm = Storm(tmp_path, ())
    storm.run(planned_kills(1))
    (problem,) = storm.problems
    assert problem.endswith("it needs more --steps")


@pytest.mark.parametrize(("options", "status"), [([], 1), (["--skip"], 0)])
def test_a_skipped_trouble_is_not_proven(
    options: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def throw(*_: object) -> list[str]:
        raise trouble.SkippedError("not here")

    monkeypatch.setattr(trouble, "throw", throw)
    assert trouble.main(["--cases=0", "--troubles=1", *options]) == status


@pytest.mark.parametrize(("outcomes", "status"), [(("refused",), 1), (("refused", "same"), 0)])
def test_a_kind_whose_cases_are_all_refused_is_wrong(
    outcomes: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def try_all(*_: Any, **__: Any) -> fuzz.Tally:
        return fuzz.Tally(Counter(outcomes), [], 1.0)

    monkeypatch.setattr(fuzz, "try_all", try_all)
    monkeypatch.setattr(fuzz, "make_base", lambda *_: Path())
    others = ("tokens", "checkpoints", "folders", "tokenizers")
    assert fuzz.main(["--recipes=60", *(f"--{kind}=0" for kind in others)]) == status


def test_a_file_system_without_access_times_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile.prepare_outside(tmp_path)
    monkeypatch.setattr(hostile, "_state_of", lambda _: [("secret.txt", 1, 1, False)])
    with pytest.raises(RuntimeError, match="keeps no access times"):
        hostile.prepare_outside(tmp_path)


def test_a_message_that_no_finding_matches_is_an_error() -> None:
    with pytest.raises(ValueError, match="matches a check that finds nothing"):
        found_by("model", "|wrong")(lambda: None)


def test_a_folder_of_configurations_that_has_moved_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(imports, "CONFIGURATIONS", {})
    with pytest.raises(SystemExit) as caught:
        imports.main([])
    assert caught.value.code == 2


def test_a_name_of_a_fault_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "PLANTED", full.PLANTED | {"a_fault_of_old"})
    with pytest.raises(LookupError, match="is called a_fault_of_old"):
        full.cases_of_all_kinds()


def plant_what_is_gone() -> None:
    raise AttributeError("torch has no such function")


def test_a_fault_that_cannot_be_planted_is_not_found(pool: Pool) -> None:
    recipe = load(RECIPE, ["mesh.dp_shard=2"], check_files=False).recipe
    case = full.Case("planted", "x", recipe, plant_what_is_gone, is_fault=True)
    with pytest.raises(full.NotPlantedError, match="torch has no such function"):
        full.look(pool, case)


def test_an_error_that_comes_without_the_fault_is_no_finding(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise UserError("this layout cannot be composed")

    monkeypatch.setattr(full, "check_structure", fail)
    case = full.Case("planted", "x", load(RECIPE, []).recipe, full._nothing, is_fault=True)
    with pytest.raises(full.NotPlantedError, match="without the fault, too"):
        full.look(pool, case)


def test_ranks_that_launch_nothing_are_not_at_the_end() -> None:
    group = Group((0, 1), 0)
    call = Collective(group, "all_reduce")
    batch = Batch((Message(group, 0, 1, 1, sends=True),))
    sharded = load(RECIPE, ["mesh.dp_shard=2"], check_files=False).recipe
    assert nothing_seen(sharded, [[call], []]) == "rank 1 launches no collective"
    assert nothing_seen(sharded, [[call], [call]]) is None
    pipeline = load(RECIPE, ["mesh.pp=2"], check_files=False).recipe
    assert nothing_seen(pipeline, [[call, batch], [call]]) == "rank 1 launches no message"
