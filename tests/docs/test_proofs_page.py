"""The numbers of proofs in the README and in ``docs/``: those of the proofs' own tables.

The line of a proof that pages show has the layout that ``verify`` proves for the recipe.
"""

import re

import pytest

from composer3d.recipe.resolve import load
from composer3d.verify.proof import describe
from composer3d.verify.shrink import shrink
from tools.prove.faults.table import FAULTS
from tools.prove.fuzz.run import KINDS
from tools.prove.hostile.cases import CASES
from tools.prove.paths import LAYOUTS, ROOT

PLANTED = len({fault.plant for fault in FAULTS})


def _layouts() -> int:
    lines = (line.strip() for line in LAYOUTS.read_text().splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


@pytest.mark.parametrize(
    ("page", "sentence", "numbers"),
    [
        ("README.md", r"tested too: (\d+) faults are planted", [PLANTED]),
        ("docs/proofs.md", r"It plants (\d+) faults in (\d+) places", [PLANTED, len(FAULTS)]),
        ("docs/proofs.md", r"layouts\.txt # (\d+) layouts, one a line", [_layouts()]),
        ("docs/proofs.md", r"hostile +# ([\d,]+) files and folders", [len(CASES)]),
        ("docs/checkpoints.md", r"opens ([\d,]+) malicious files and folders", [len(CASES)]),
        ("docs/proofs.md", r"fuzz +# ([\d,]+) inputs, changed at random", [sum(KINDS.values())]),
    ],
)
def test_pages_have_the_numbers_of_the_proofs(page: str, sentence: str, numbers: list[int]) -> None:
    found = re.search(sentence, (ROOT / page).read_text())
    assert found is not None, f"{page} lacks {sentence!r}"
    assert [int(number.replace(",", "")) for number in found.groups()] == numbers


@pytest.mark.parametrize("page", ["README.md", "docs/proofs.md"])
def test_the_line_of_a_proof_has_the_layout_that_runs(page: str) -> None:
    text = (ROOT / page).read_text()
    (recipe,) = set(re.findall(r"^composer3d verify (recipes/llama3-70b\S+)", text, re.MULTILINE))
    (small,) = shrink(load(str(ROOT / recipe), check_files=False).recipe)
    assert f"\nexact   {describe(small)}  (float64, and float32)  loss " in text
