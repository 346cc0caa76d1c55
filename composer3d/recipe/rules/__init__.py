"""What the values of a recipe must satisfy: each by itself (``RANGES``), and together (``RULES``).

Everything here is pure: values go in, violations by key come out. ``resolve.load`` adds where each
value came from. Code that proposes layouts calls ``violations`` too, so that it proposes only legal
ones.
"""

from composer3d.recipe.rules import data, layout, model
from composer3d.recipe.rules.data import PATHS
from composer3d.recipe.rules.rule import Rule, Violation
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import FIELDS, value_of
from composer3d.spec.ranges import Range

__all__ = ["PATHS", "RANGES", "RULES", "Violation", "violations"]

RANGES: dict[str, Range] = {
    key: entry.metadata["range"]
    for key, entry in FIELDS.items()
    if entry.metadata["range"] is not None
}

# In the order in which violations are reported.
RULES: tuple[Rule, ...] = (*model.RULES, *data.RULES, *layout.RULES)


def violations(recipe: Recipe) -> list[Violation]:
    """Return every violation of ``recipe``: of ranges first, then of rules.

    A rule is skipped if it reads a value outside of its range, or ``mesh.dp_shard`` while that is
    still -1.
    """
    broken_ranges = []
    for key, allowed in RANGES.items():
        value = value_of(recipe, key)
        if value is not None and not allowed.accepts(value):
            broken_ranges.append(Violation(key, f"<{key}> {allowed.requirement}"))

    unusable_keys = {violation.key for violation in broken_ranges}
    if recipe.mesh.dp_shard == -1:
        unusable_keys.add("mesh.dp_shard")

    broken_rules = []
    for keys, check in RULES:
        if unusable_keys.isdisjoint(keys):
            fault, *others = keys
            broken_rules += [
                Violation(fault, template, tuple(others)) for template in check(recipe)
            ]
    return broken_ranges + broken_rules
