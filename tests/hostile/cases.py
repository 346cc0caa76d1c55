"""All hostile cases."""

from hostile import checkpoints, exports
from hostile.case import Case

CASES: list[Case] = [*checkpoints.CASES, *exports.CASES]
