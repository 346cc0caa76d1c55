"""Cases of tests that a run of the suite leaves out: ``bash tools/test -m ""`` runs all.

A test with a long list of cases takes minutes, and most of its cases pass through the same code. So
the suite runs some of them; ``long`` marks the others.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(
    number: int, names: str | tuple[str, ...], cases: Iterable[Any], **options: Any
) -> pytest.MarkDecorator:
    """Return ``parametrize`` of which ``number`` cases, evenly spread, always run.

    A case is one value, or a plain tuple of the values of several arguments.
    """
    cases = list(cases)
    always = {place * len(cases) // number for place in range(number)}
    found = []
    for place, case in enumerate(cases):
        values = case if type(case) is tuple else (case,)
        marks = () if place in always else (pytest.mark.long,)
        found.append(pytest.param(*values, marks=marks))
    return pytest.mark.parametrize(names, found, **options)
