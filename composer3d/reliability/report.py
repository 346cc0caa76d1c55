"""A finding about a job, for those who watch it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple


class Report(NamedTuple):
    """What was found about the ranks of a job, or about its steps.

    Attributes:
        lines: warnings for the console, for the run's events, and for TensorBoard as a text.
        values: metrics, by name.
        tag: the tag of the text in TensorBoard, and the kind of the events.
    """

    lines: Sequence[str]
    values: Mapping[str, float] = MappingProxyType({})
    tag: Literal["ranks", "bad steps"] = "ranks"
