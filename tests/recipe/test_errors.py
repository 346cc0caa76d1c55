"""Every wrong recipe is refused with the exact lines that a user reads."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.facts.errors import RecipeError
from composer3d.recipe import rules
from composer3d.recipe.resolve import load
from composer3d.recipe.rules import RULES
from composer3d.recipe.rules.rule import Change, Fault, Rule
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import variant
from tests.recipe import wrong_texts, wrong_values
from tests.recipe.wrong import Wrong

ALL = wrong_texts.ALL + wrong_values.ALL


@pytest.fixture(params=ALL, ids=lambda wrong: wrong.name)
def wrong(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wrong:
    case: Wrong = request.param
    write_files(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    return case


def write_files(case: Wrong, folder: Path) -> None:
    files = case.files if isinstance(case.files, Mapping) else {"x.toml": case.files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def test_check_prints_the_lines_and_exits_with_2(
    wrong: Wrong, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["check", "x.toml", "--json", *(f"--set={text}" for text in wrong.sets)]
    status = cli.main(argv + ([f"--gpus={wrong.world}"] if wrong.world else []))
    out, err = capsys.readouterr()
    assert status == 2
    assert err.splitlines() == wrong.lines
    assert json.loads(out.splitlines()[-1]) == {"ok": False, "errors": wrong.lines}


def watch_rules(
    folder: Path, monkeypatch: pytest.MonkeyPatch, see: Callable[[Rule, Recipe, str | Fault], None]
) -> None:
    """Load each wrong recipe, and show ``see`` each fault that a rule finds."""

    def watched(rule: Rule) -> Rule:
        def check(recipe: Recipe) -> Iterator[str | Fault]:
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

    def see(rule: Rule, recipe: Recipe, found: str | Fault) -> None:
        remedies = found.remedies if isinstance(found, Fault) else ()
        for remedy in remedies:
            # Another architecture has another shape, which the recipe would have to give.
            if not isinstance(remedy, Change) or remedy.key == "model.architecture":
                continue
            for value in remedy.values:
                changed = variant(recipe, {remedy.key: value})
                assert found not in rule.check(changed), (found.text, remedy)
                changes.add((remedy.key, value))

    watch_rules(tmp_path, monkeypatch, see)
    assert len(changes) > 25


def test_names_of_cases_are_unique() -> None:
    assert len({wrong.name for wrong in ALL}) == len(ALL) >= 45
