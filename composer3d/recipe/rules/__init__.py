"""Check the values of a recipe: each by itself (``RANGES``), and several together (``RULES``).

These checks read no file. They return the violations of a recipe, and ``resolve.load`` adds where
each value came from. Code that proposes layouts calls ``violations`` too, so that every layout it
proposes is legal.
"""

from collections.abc import Collection
from functools import cache
from typing import Any

from composer3d.facts.ranges import Range
from composer3d.recipe.rules import data, layout, model, reliability, trained
from composer3d.recipe.rules.data import PATHS
from composer3d.recipe.rules.rule import Breach, KeyChange, Rule, Violation
from composer3d.recipe.schema import Model, Recipe
from composer3d.recipe.values import FIELDS, Entries, entries_of_shape, has_key, value_of, variant

__all__ = ["PATHS", "RANGES", "RULES", "KeyChange", "Violation", "settle", "violations"]


def _ranges(entries: Entries) -> dict[str, Range]:
    return {
        key: entry.metadata["range"]
        for key, entry in entries.items()
        if entry.metadata["range"] is not None
    }


RANGES: dict[str, Range] = _ranges(FIELDS)

# Violations are reported in this order.
RULES: tuple[Rule, ...] = (
    *model.RULES,
    *data.RULES,
    *layout.RULES,
    *trained.RULES,
    *reliability.RULES,
)


@cache
def _ranges_of(shape: Any) -> dict[str, Range]:
    """Return the ranges of the keys of a recipe whose table [model] is of this class."""
    return RANGES if shape is Model else _ranges(entries_of_shape(shape))


def violations(recipe: Recipe) -> list[Violation]:
    """Return every violation of ``recipe``: of ranges first, then of rules.

    A rule is skipped if it reads a value outside of its range, ``mesh.dp_shard`` while that is
    still -1, or a key that the shape of the recipe's architecture lacks.
    """
    shape: Any = type(recipe.model)  # mypy takes a class of dataclasses for unhashable
    broken_ranges = []
    for key, allowed in _ranges_of(shape).items():
        value = value_of(recipe, key)
        if value is not None and not allowed.accepts(value):
            broken_ranges.append(Violation(key, Breach(f"<{key}> {allowed.requirement}")))

    unusable_keys = {violation.key for violation in broken_ranges}
    if recipe.mesh.dp_shard == -1:
        unusable_keys.add("mesh.dp_shard")

    broken_rules = []
    for keys, check in RULES:
        # Shapes of other architectures lack some keys of ours.
        if unusable_keys.isdisjoint(keys) and all(has_key(recipe, key) for key in keys):
            blamed_key, others = keys[0], keys[1:]
            broken_rules += [
                Violation(blamed_key, Breach(found) if isinstance(found, str) else found, others)
                for found in check(recipe)
            ]
    return broken_ranges + broken_rules


def settle(recipe: Recipe, keys: Collection[str]) -> Recipe:
    """Apply the remedies of broken rules that change one of ``keys``, each key at most once.

    Args:
        recipe: a recipe, legal or not.
        keys: the keys that may give way.

    Returns:
        The recipe with other values of ``keys``. It may still break rules without such a remedy.
    """
    left = set(keys)
    while left:
        changes = (violation.change_of(left) for violation in violations(recipe))
        change = next((change for change in changes if change is not None), None)
        if change is None:
            break
        recipe = variant(recipe, {change.key: change.values[0]})
        left.discard(change.key)
    return recipe
