"""A fixed slice of the changed inputs; ``bash tools/prove/run fuzz`` tries thousands."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from composer3d.models.registry import OURS
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import model_table
from composer3d.recipe.values import FIELDS, entries_of
from composer3d.runtime.launch import Pool
from tools.prove.fuzz import recipe_oracle, run
from tools.prove.fuzz.child import Case, WrongError, observe
from tools.prove.hostile.case import prepare_outside

SLICE = {"recipes": 40, "tokens": 20, "checkpoints": 10, "folders": 8, "tokenizers": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    root = tmp_path_factory.mktemp("fuzz")
    run.make_base(root, set(SLICE), pool)
    return root


def try_slice(kind: str, root: str) -> run.Tally:
    """Run the first cases of a kind, in this process of the pool."""
    numbers = range(SLICE[kind])
    return run.try_all(kind, numbers, run.SEED, Path(root), Path(root) / "base", jobs=1)


@pytest.mark.parametrize("kind", SLICE)
def test_changed_inputs_are_refused_or_read_rightly(root: Path, pool: Pool, kind: str) -> None:
    (tally,) = pool.run(try_slice, {"kind": kind, "root": str(root)}, world_size=1)
    assert tally.findings == []
    assert tally.outcomes["refused"] >= SLICE[kind] // 4
    assert len(tally.outcomes) > 1  # some are read
    assert sum(tally.outcomes.values()) == SLICE[kind]


# The traps: each of these cases must be found.


def _raises() -> str:
    raise RuntimeError("a bug")


def _is_wrong() -> str:
    raise WrongError("a wrong value")


def _writes_outside() -> str:
    Path("../outside/new").write_text("x")
    return "fine"


def _runs_a_program() -> str:
    os.system("true")
    return "fine"


def _runs_the_payload() -> str:
    marker = Path("../outside") / f"EXECUTED-{Path.cwd().name}"
    marker.touch()
    return "fine"


def _loops() -> str:
    while True:
        pass


def _takes_memory() -> str:
    return "fine" if bytearray(700 << 20) else ""


def _dies() -> str:
    os._exit(3)


def _prints_a_traceback() -> str:
    os.write(2, b"Traceback (most recent call last)")
    return "fine"


TRAPS: dict[Callable[[], str], str] = {
    _raises: "it raised:",
    _is_wrong: "a wrong value",
    _writes_outside: "it touched open",
    _runs_a_program: "it touched os.system",
    _runs_the_payload: "it ran code of the input",
    _loops: "signal 24 (SIGXCPU)",
    _takes_memory: "it took 7",
    _dies: "status 3",
    _prints_a_traceback: "it printed 'Traceback (most'",
}


def spring(root: str) -> list[list[str]]:
    """Run each trap, and return its problems."""
    found = []
    for number, act in enumerate(TRAPS):

        def make(base: Path, draw: random.Random, act: Callable[[], str] = act) -> Case:
            return Case("a trap", act, cpu_s=0.5 if act is _loops else 30.0)

        running = observe(make, Path(root) / "base", Path(root) / f"trap-{number}", "seed")
        while (verdict := running.poll()) is None:
            time.sleep(0.01)
        found.append(verdict.problems)
    return found


def test_each_trap_can_be_sprung(tmp_path: Path, pool: Pool) -> None:
    prepare_outside(tmp_path)
    (found,) = pool.run(spring, {"root": str(tmp_path)}, world_size=1)
    for problems, expected in zip(found, TRAPS.values(), strict=True):
        assert any(problem.startswith(expected) or expected in problem for problem in problems), (
            expected,
            problems,
        )


# The oracle of recipes.


def accepted(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    recipe = asdict(load(path, check_files=False).recipe)
    for table in recipe.values():
        for name, value in table.items():
            table[name] = list(value) if isinstance(value, tuple) else value
    return recipe, recipe_oracle.values_given(Path(path), [])


def test_the_oracle_of_recipes_knows_every_key() -> None:
    """It knows them from their rows; ``tests/recipe/test_bounds.py`` has bounds written by hand."""
    keys = {f"{table}.{name}" for table, keys in recipe_oracle.ALL_TABLES.items() for name in keys}
    models = [entries_of({"model": model_table(name)}) for name in OURS]
    assert keys == set(FIELDS).union(*models)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("mesh.tp", 3, "tp divides heads"),
        ("mesh.tp", 0, "mesh.tp = 0 was accepted"),
        ("data.micro_batch", 3, "the batch divides"),
        ("optim.lr", 0.0, "optim.lr = 0.0 was accepted"),
        ("optim.lr", float("nan"), "optim.lr = nan was accepted"),
        ("run.steps", True, "run.steps = True was accepted"),
        ("data.packing", "x", "data.packing = 'x' was accepted"),
        ("model.dim", 62, "a head has an even width"),
        ("run.steps", 21, "run.steps = 20 became 21"),
    ],
)
def test_the_oracle_of_recipes_finds_wrong_values(key: str, value: Any, problem: str) -> None:
    recipe, given = accepted("recipes/debug-1-single.toml")
    assert recipe_oracle.problems_of(recipe, given, None) == []
    table, name = key.split(".")
    recipe[table][name] = value
    if "became" not in problem:
        given.pop(key, None)
    assert any(problem in found for found in recipe_oracle.problems_of(recipe, given, None))
