"""Every wrong recipe is refused with the exact lines that a user reads."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

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
    lines = refusal_of(wrong, tmp_path)
    assert len(lines) == len(wrong.starts)
    for line, start in zip(lines, wrong.starts, strict=True):
        assert line.startswith(start)
    # Written anew by ``python -m tests.recipe.messages``.
    assert lines == MESSAGES[wrong.name]


def test_the_snapshot_has_the_names_of_the_cases() -> None:
    assert list(MESSAGES) == [wrong.name for wrong in ALL]
    assert len(MESSAGES) == len(ALL) >= 45


def watch_rules(
    folder: Path, monkeypatch: pytest.MonkeyPatch, see: Callable[[Rule, Recipe, str | Breach], None]
) -> None:
    """Load each wrong recipe, and show ``see`` each fault that a rule finds."""

    def watched(rule: Rule) -> Rule:
        def check(recipe: Recipe) -> Iterator[str | Breach]:
            for found in rule.check(recipe):
                see(rule, recipe, found)
                yield found

        return Rule(rule.keys, check)

    monkeypatch.setattr(rules, "RULES", tuple(map(watched, RULES)))
    for number, case in enumerate(wrong_values.ALL):
        (folder / str(number)).mkdir()
        write_files(case, folder / str(number))
        monkeypatch.chdir(folder / str(number))
        with contextlib.suppress(RecipeError):
            load("x.toml", case.sets, world_size=case.world)


def test_every_rule_is_broken_by_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: set[tuple[str, ...]] = set()
    watch_rules(tmp_path, monkeypatch, lambda rule, *_: broken.add(rule.keys))
    assert [keys for keys, _ in RULES if keys not in broken] == []


def test_every_change_removes_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = set()

    def see(rule: Rule, recipe: Recipe, found: str | Breach) -> None:
        remedies = found.remedies if isinstance(found, Breach) else ()
        for remedy in remedies:
            # Another architecture has another shape, which the recipe would have to give.
            if not isinstance(remedy, KeyChange) or remedy.key == "model.architecture":
                continue
            for value in remedy.values:
                changed = variant(recipe, {remedy.key: value})
                assert found not in rule.check(changed), (found.text, remedy)
                changes.add((remedy.key, value))

    watch_rules(tmp_path, monkeypatch, see)
    assert len(changes) > 25
