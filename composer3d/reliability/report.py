"""What rank 0 tells about ranks of the job."""

from typing import NamedTuple


class RankReport(NamedTuple):
    """What was found about ranks.

    Attributes:
        lines: for the console, and for TensorBoard as a text.
        values: metrics, by name.
    """

    lines: list[str]
    values: dict[str, float]
