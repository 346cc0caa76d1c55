"""What the values of a recipe must satisfy, alone (``ranges``) and together (``joint``, ``layout``). Pure.

``violations`` is read by ``load``, which adds where each value came from, and by whoever proposes layouts, so that what
is proposed is what a recipe accepts.
"""

from dataclasses import dataclass

from composer3d.recipe import joint, layout
from composer3d.recipe.ranges import RANGES
from composer3d.recipe.schema import Recipe

RULES = (*joint.RULES, *layout.RULES)


@dataclass(frozen=True)
class Violation:
    """One broken rule. ``others`` are the further keys that it reads; ``message`` writes a key as ``mention`` does."""

    key: str
    message: str
    others: tuple[str, ...] = ()


def violations(recipe: Recipe) -> list[Violation]:
    """Every rule that ``recipe`` breaks. ``mesh.dp_shard`` may still be -1; rules that read it are then passed over."""
    alone = [Violation(key, message) for key, check in RANGES.items() if (message := check(recipe, key))]
    unusable = {violation.key for violation in alone}
    if recipe.mesh.dp_shard == -1:
        unusable.add("mesh.dp_shard")
    together = [
        Violation(keys[0], message, keys[1:])
        for keys, check in RULES
        if unusable.isdisjoint(keys) and (message := check(recipe))
    ]
    return alone + together
