"""The table of metrics in docs/review.md is what the code says."""

import pytest

from tools.metrics_page import PAGE, page


def test_the_page_has_the_metrics_of_the_code() -> None:
    """``python -m tools.metrics_page`` writes them."""
    assert page(PAGE.read_text()) == PAGE.read_text()


def test_a_page_without_a_place_for_them_is_refused() -> None:
    with pytest.raises(ValueError, match="metrics: begin"):
        page("# Looking at a run\n")
