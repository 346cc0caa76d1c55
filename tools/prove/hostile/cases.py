"""All hostile cases."""

from tools.prove.hostile import checkpoints, exports, recipes_data
from tools.prove.hostile.case import Case

CASES: list[Case] = [*checkpoints.CASES, *exports.CASES, *recipes_data.CASES]
