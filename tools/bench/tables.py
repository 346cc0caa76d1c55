"""What the commands print: rows of tables, and a median with its range."""

import statistics
from collections.abc import Sequence


def print_head(*columns: str) -> None:
    """Print the first two lines of a table."""
    print_row(*columns)
    print("|" + "---|" * len(columns), flush=True)


def print_row(*cells: object) -> None:
    """Print a line of a table at once."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def with_range(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """Return the median and the range: ``1.50 s (1.25..1.75)``."""
    return _with_range(statistics.median(values), values, form, unit)


def ratio_with_range(values: Sequence[float], others: Sequence[float], form: str = ".2f") -> str:
    """Return the ratio of two medians, and the range of the ratios of neighbouring runs."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    return _with_range(statistics.median(values) / statistics.median(others), ratios, form, "")


def _with_range(middle: float, values: Sequence[float], form: str, unit: str) -> str:
    return f"{middle:{form}}{unit} ({min(values):{form}}..{max(values):{form}})"
