"""Every wrong recipe is refused with the exact lines that a user reads."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from composer3d.facts.errors import RecipeError
from composer3d.recipe import rules
from composer3d.recipe.resolve import load
from composer3d.recipe.rules import RULES
from composer3d.recipe.rules.rule import Breach, KeyChange, Rule
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import variant
from tests.recipe import messages, wrong_values
from tests.recipe.messages import ALL, refusal_of, write_files
from tests.recipe.wrong import Wrong

MESSAGES = messages.read()


@pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: wrong.name)
def test_check_names_what_is_wrong_and_exits_with_2(wrong: Wrong, tmp_path: Path) -> None:
    # Written anew by ``python -m tests.recipe.messages``.
    assert refusal_of(wrong, tmp_path) == MESSAGES[wrong.name]


def test_the_snapshot_has_the_names_of_the_cases() -> None:
    assert list(MESSAGES) == [wrong.name for wrong in ALL]
    assert len(MESSAGES) == len(ALL) >= 45


class RuleFault(NamedTuple):
    """A fault that a rule has found in a recipe."""

    rule: Rule
    recipe: Recipe
    found: str | Breach


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[RuleFault]:
    """All faults that rules find while the wrong recipes are loaded."""
    faults: list[RuleFault] = []

    def watched(rule: Rule) -> Rule:
        def check(recipe: Recipe) -> Iterator[str | Breach]:
            for found in rule.check(recipe):
                faults.append(RuleFault(rule, recipe, found))
                yield found

        return Rule(rule.keys, check)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "RULES", tuple(map(watched, RULES)))
        for case in wrong_values.ALL:
            folder = tmp_path_factory.mktemp("wrong")
            write_files(case, folder)
            patch.chdir(folder)
            with contextlib.suppress(RecipeError):
                load("x.toml", case.sets, world_size=case.world)
    return faults


def test_every_rule_is_broken_by_a_case(faults: list[RuleFault]) -> None:
    broken = {fault.rule.keys for fault in faults}
    assert [keys for keys, _ in RULES if keys not in broken] == []


def test_every_change_removes_its_fault(faults: list[RuleFault]) -> None:
    changes = set()
    for rule, recipe, found in faults:
        for remedy in found.remedies if isinstance(found, Breach) else ():
            # Another architecture has another shape, which the recipe would have to give.
            if not isinstance(remedy, KeyChange) or remedy.key == "model.architecture":
                continue
            for value in remedy.values:
                changed = variant(recipe, {remedy.key: value})
                assert found not in rule.check(changed), (found.text, remedy)
                changes.add((remedy.key, value))
    assert len(changes) > 25
