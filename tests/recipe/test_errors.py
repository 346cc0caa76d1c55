"""Every wrong recipe is refused with the exact lines that a user reads."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer3d.facts.errors import RecipeError
from composer3d.recipe import rules
from composer3d.recipe.resolve import load
from composer3d.recipe.rules import RULES
from composer3d.recipe.rules.rule import Rule
from composer3d.recipe.schema import Recipe
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


def test_every_rule_is_broken_by_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: set[tuple[str, ...]] = set()

    def watched(rule: Rule) -> Rule:
        def check(recipe: Recipe) -> Iterator[str]:
            for message in rule.check(recipe):
                broken.add(rule.keys)
                yield message

        return Rule(rule.keys, check)

    monkeypatch.setattr(rules, "RULES", tuple(map(watched, RULES)))
    for number, case in enumerate(wrong_values.ALL):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_files(case, folder)
        monkeypatch.chdir(folder)
        with contextlib.suppress(RecipeError):
            load("x.toml", case.sets, world_size=case.world)
    assert [keys for keys, _ in RULES if keys not in broken] == []
