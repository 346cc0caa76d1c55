"""Holds the size of the code: exits with 1 where a file, a function, a recipe or the package is too long."""

import ast
import sys
from pathlib import Path

PACKAGE_LINES = 8000
FILE_LINES = 399
FUNCTION_LINES = 70
RECIPE_LINES = 40


def main(root: Path) -> int:
    offenders: list[str] = []
    sizes: dict[Path, int] = {}
    for path in sorted((root / "composer3d").rglob("*.py")):
        text = path.read_text()
        sizes[path] = len(text.splitlines())
        if sizes[path] > FILE_LINES:
            offenders.append(f"{path.relative_to(root)}: {sizes[path]} lines, at most {FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    offenders.append(f"{where}: {node.name} has {lines} lines, at most {FUNCTION_LINES}")
    total = sum(sizes.values())
    if total > PACKAGE_LINES:
        offenders.append(f"composer3d: {total} lines, at most {PACKAGE_LINES}")
    recipes = sorted((root / "recipes").rglob("*.toml"))
    for path in recipes:
        lines = len(path.read_text().splitlines())
        if lines > RECIPE_LINES:
            offenders.append(f"{path.relative_to(root)}: {lines} lines, at most {RECIPE_LINES}")

    largest = max(sizes, key=lambda path: sizes[path])
    print(
        f"composer3d: {total} of {PACKAGE_LINES} lines in {len(sizes)} files, "
        f"the longest {largest.relative_to(root)} with {sizes[largest]}; {len(recipes)} recipes"
    )
    for offender in offenders:
        print(f"over budget: {offender}", file=sys.stderr)
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
