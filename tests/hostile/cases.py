"""All hostile cases."""

from hostile import checkpoints, exports, recipes_data
from hostile.case import Case

CASES: list[Case] = [*checkpoints.CASES, *exports.CASES, *recipes_data.CASES]
