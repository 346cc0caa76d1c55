"""Files that the proofs and the tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MOE_RECIPE = ROOT / "tools" / "prove" / "verify-moe.toml"  # the same, with experts
RECIPE = ROOT / "tools" / "prove" / "verify.toml"  # the small recipe whose layouts are proven
LAYOUTS = ROOT / "tools" / "prove" / "layouts.txt"
MATRIX = ROOT / "tools" / "prove" / "matrix" / "matrix.txt"
MATRIX_PAGE = ROOT / "docs" / "matrix.md"
