"""``docs/matrix.md`` and its summary in the README: both come from one report."""

import pytest

from composer3d.verify.proof import Verdict
from tools.prove.matrix import cover, report
from tools.prove.paths import MATRIX_PAGE, ROOT

README = (ROOT / "README.md").read_text()
COVER = cover.read()


def block(readme: str) -> list[str]:
    """The lines between the two markers."""
    _, _, rest = readme.partition(report.BEGIN + "\n")
    return rest.partition("\n" + report.END)[0].splitlines()


def test_the_readme_has_the_summary_of_the_page() -> None:
    title, empty, *lines = MATRIX_PAGE.read_text().splitlines()
    assert title == "# What the covering matrix proves"
    assert empty == ""
    assert block(README) == lines[:3]
    assert lines[3:8] == ["", *report.EXPLANATION]


def test_only_the_block_of_the_readme_is_replaced() -> None:
    replaced = report.with_block(README, ["one", "two", "three"])
    assert block(replaced) == ["one", "two", "three"]
    assert report.with_block(replaced, block(README)) == README


@pytest.mark.parametrize("readme", ["", report.BEGIN, f"{report.END}\n{report.BEGIN}\n"])
def test_a_readme_without_its_markers_is_refused(readme: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md must hold the lines <!-- matrix: begin -->"):
        report.with_block(readme, ["one"])


def verdict(error: float) -> Verdict:
    return Verdict(
        passed=True,
        world_size=8,
        layout="a layout",
        dtype="float64",
        loss_rel_err=error,
        grad_norm_rel_err=2 * error,
        max_grad_rel_err=3 * error,
        max_weight_rel_err=4 * error,
        worst_parameter=None,
        refused=False,
        error=None,
    )


def test_the_summary_has_the_worst_errors() -> None:
    first, second, third = report.summary([verdict(1e-15), verdict(1e-16)], 120.0)
    assert first == (
        "2 compositions on 1 to 8 processes, each against one process in float64 over "
        f"{cover.STEPS} steps and a validation: all exact."
    )
    assert second == (
        "Worst relative errors: loss 1e-15, norm 2e-15, gradients 3e-15, weights 4e-15."
    )
    assert "`bash tools/prove/run matrix`, torch " in third
    assert third.endswith(", 2 minutes.")


def test_the_page_has_every_layout_and_every_refusal() -> None:
    few = cover.Cover((*COVER.rows[:3], COVER.rows[-1]), COVER.refused[:2])
    page = report.page(["summary"], few, [verdict(1e-15)] * 4)
    assert page.startswith("# What the covering matrix proves\n\nsummary\n\nThe layouts hold")
    assert "\n| layouts with | no `pp` | GPipe |" in page
    assert "\n| layouts with | `ep` 1 | `ep` 2 | `ep` 4 | `ep` 8 |\n" in page
    for row in few.rows:
        assert f"\n- 3e-15: {cover.line_of(row)}\n" in page
    for _, row in few.refused:
        assert f": {report.message_of(row)}\n" in page
