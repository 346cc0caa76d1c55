"""The changes since a checkpoint: every key once, on one line, whatever the checkpoint contains."""

import time
from dataclasses import replace

import pytest

from composer3d.recipe.changes import TEXT_LIMIT, Change, changes, values_of
from composer3d.recipe.resolve import Resolved, load
from composer3d.recipe.values import FIELDS
from tools.prove.paths import ROOT


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    return load(ROOT / "recipes" / "quickstart.toml")


def test_every_value_that_differs_is_listed_in_order(resolved: Resolved) -> None:
    recipe = resolved.recipe
    now = replace(
        recipe,
        optim=replace(recipe.optim, lr=1e-3, decay=200, betas=(0.9, 0.99)),
        mesh=replace(recipe.mesh, tp=1),
        data=replace(recipe.data, packing="documents"),
    )
    assert changes(resolved.to_toml(), now) == [
        Change("data.packing", '"none"', '"documents"'),
        Change("mesh.tp", "2", "1"),
        Change("optim.betas", "[0.9, 0.95]", "[0.9, 0.99]"),
        Change("optim.decay", "absent", "200"),
        Change("optim.lr", "0.004", "0.001"),
    ]


def test_a_key_that_an_older_version_lacked_had_its_default(resolved: Resolved) -> None:
    lines = [
        line for line in resolved.to_toml().splitlines() if not line.startswith("every_minutes")
    ]
    assert changes("\n".join(lines), resolved.recipe) == []


def test_a_key_and_a_value_of_another_version_are_no_error(resolved: Resolved) -> None:
    text = resolved.to_toml().replace('schedule = "cosine"', 'schedule = "spiral"')
    text = text.replace("[mesh]", "[mesh]\nwarp = 9")
    assert changes(text, resolved.recipe) == [Change("optim.schedule", '"spiral"', '"cosine"')]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (r'"a\u001b[2J\u0007\u202e"', "a"),
        ('"' + "x" * 100_000 + '"', "x"),
        ("[" * 15 + "]" * 15, "["),
        ("2020-01-01T00:00:00Z", "2020"),
        ("nan", "nan"),
        ("{ a = { b = 1 } }", "{ a"),
        ("true", "true"),
        ("3.0", "3.0"),
    ],
    ids=lambda value: value[:12],
)
def test_any_old_value_is_shown_on_one_short_line(
    resolved: Resolved, value: str, shown: str
) -> None:
    (change,) = [
        change
        for change in changes(
            resolved.to_toml().replace("steps = 250", f"steps = {value}"), resolved.recipe
        )
        if change.key == "run.steps"
    ]
    assert shown in change.then
    assert change.then.isprintable()
    assert len(change.then) <= 90


@pytest.mark.parametrize(
    "text",
    [
        "[[",
        "run = 3\nrun = 4",
        "[run]\nname = " + "[" * 20_000,
        "[run]\n" + "#" * TEXT_LIMIT,
        "a." * 50_000 + "a = 1",
    ],
    ids=["not TOML", "twice", "deep", "long", "dotted"],
)
def test_a_text_that_cannot_be_parsed_raises_soon(text: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"."):
        values_of(text)
    assert time.monotonic() - begin < 2


def test_all_keys_of_a_resolved_recipe_are_read(resolved: Resolved) -> None:
    found = values_of(resolved.to_toml())
    absent = {line.split()[1] for line in resolved.to_toml().splitlines() if " is absent" in line}
    assert {key for key in FIELDS if key.split(".")[1] not in absent} <= set(found)
