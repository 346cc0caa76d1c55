"""All hostile cases."""

from hostile import checkpoints, exports, recipes_data
from hostile.case import Case

# Each of these also runs by itself, in test_recipes_data.
_RECIPES_AND_DATA = [
    Case(f"recipes-{number:03d}", case.make, case.says, statuses=(2,), title=case.name)
    for number, case in enumerate(recipes_data.CASES)
]
CASES: list[Case] = [*checkpoints.CASES, *exports.CASES, *_RECIPES_AND_DATA]
