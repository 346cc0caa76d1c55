"""Count what the house is made of: ``python -m tools.house [--against COMMIT] [--densest N]``.

It prints one table: the counts of the working tree, and beside them those of a commit, which is
read through git and not checked out. ``docs/architecture.md`` says which files are read to
understand a training step, and through which a batch passes; a test compares the figures in it.

A branch is a place where the way through a function parts: ``if``, a loop, ``except``, a ``case``,
each ``and`` or ``or``, and in comprehensions each ``for`` and each ``if``.
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import mean, quantiles
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/architecture.md"
FOLDERS = ("composer3d", "tests", "tools")
TECHNIQUES = ("tensor parallelism", "context parallelism")

# A function with fewer lines is not listed among the densest: one expression would make it so.
_LEAST_LINES = 8
# Texts and bodies of functions below these sizes are alike by chance.
_LEAST_TEXT, _LEAST_STATEMENTS = 60, 3

Function = ast.FunctionDef | ast.AsyncFunctionDef
Sources = Mapping[str, str]


_parse = lru_cache(maxsize=None)(ast.parse)


def read_tree(root: Path = ROOT) -> dict[str, str]:
    """Return the text of each file of the working tree that is counted, by its path in ``root``."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    paths += [root / "README.md", root / PAGE, *sorted((root / "recipes").glob("*.toml"))]
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def read_commit(commit: str, root: Path = ROOT) -> dict[str, str]:
    """Return the same of a commit. Raises CalledProcessError if git does not know it."""
    command = ["git", "-C", str(root), "archive", "--format=tar", commit]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    sources = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = member.name
            is_code = name.endswith(".py") and name.partition("/")[0] in FOLDERS
            is_recipe = re.fullmatch(r"recipes/[^/]+\.toml", name) is not None
            if member.isfile() and (is_code or is_recipe or name in ("README.md", PAGE)):
                file = tar.extractfile(member)
                assert file is not None
                sources[name] = file.read().decode()
    return sources


def reading_path(page: str, technique: str) -> list[str]:
    """Return the files of "Read in this order": those for every reader, and those of a technique.

    A file for every reader is a link in the section. A link in the item of a technique, which
    begins with its name in bold, is for readers of that technique.
    """
    section = page.partition("## Read in this order")[2].partition("\n## ")[0]
    section, *techniques = re.split(r"^ +- \*\*", section, flags=re.MULTILINE)
    (chosen,) = (text for text in techniques if text.lower().startswith(technique))
    links = re.findall(r"\]\(\.\./([\w./-]+)\)", section + chosen)
    return list(dict.fromkeys(links))


def batch_path(page: str) -> list[str]:
    """Return the files of the list "From the loop to the kernel", without ``composer3d/``."""
    return re.findall(r"^\d+\. (?:\*\*)?`([\w/]+\.py)`", page, re.MULTILINE)


def lines_of(sources: Sources, paths: list[str]) -> int:
    """Return the number of lines of some files; a file that is not there has none."""
    return sum(len(sources.get(path, "").splitlines()) for path in paths)


class Body(NamedTuple):
    """A function that is counted.

    Attributes:
        place: file, line and qualified name.
        lines: the lines from ``def`` to the end.
        statement_lines: those without the docstring.
        branches: the number of branches, those of inner functions included.
    """

    place: str
    lines: int
    statement_lines: int
    branches: int

    @property
    def density(self) -> float:
        """Branches a line, without the docstring."""
        return self.branches / self.statement_lines


def functions(sources: Sources) -> list[Body]:
    """Return the functions and methods of the package; an inner function belongs to its outer."""
    found = []
    for path, text in sources.items():
        if path.startswith("composer3d/"):
            for name, node in _outer_functions(_parse(text)):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                docstring = _docstring_lines(node)
                place = f"{path}:{node.lineno} {name}"
                found.append(Body(place, lines, lines - docstring, branches(node)))
    return found


def _outer_functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _outer_functions(child, f"{prefix}{child.name}.")
        else:
            yield from _outer_functions(child, prefix)


def _docstring_lines(node: Function) -> int:
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def branches(node: ast.AST) -> int:
    """Return the number of branches below a node."""
    count = 0
    for child in ast.walk(node):
        if isinstance(child, ast.BoolOp):
            count += len(child.values) - 1
        elif isinstance(child, ast.comprehension):
            count += 1 + len(child.ifs)
        elif isinstance(
            child,
            ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.match_case,
        ):
            count += 1
    return count


def class_names_in_many_files(sources: Sources) -> dict[str, list[str]]:
    """Return the names of classes that stand in more than one file, with the files."""
    files: dict[str, set[str]] = defaultdict(set)
    for path, text in sources.items():
        if path.endswith(".py"):
            for node in ast.walk(_parse(text)):
                if isinstance(node, ast.ClassDef):
                    files[node.name].add(path)
    return {name: sorted(found) for name, found in sorted(files.items()) if len(found) > 1}


def public_names(sources: Sources) -> int:
    """Return how many public functions, classes and values the modules of ``sources`` define."""
    count = 0
    for path, text in sources.items():
        if not path.endswith(".py"):
            continue
        names = set()
        for node in _parse(text).body:
            if isinstance(node, Function | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
        count += sum(not name.startswith("_") for name in names)
    return count


def comments(sources: Sources) -> int:
    """Return the number of comments."""
    return sum(
        token.type == tokenize.COMMENT
        for text in sources.values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def duplicates(sources: Sources) -> int:
    """Return how many long texts and bodies of functions stand more than once in the package.

    They are the copies of a fact that can be counted. Docstrings are left out.
    """
    seen: Counter[str] = Counter()
    for path, text in sources.items():
        if path.startswith("composer3d/"):
            seen.update(_texts_and_bodies(_parse(text)))
    return sum(count - 1 for count in seen.values())


def _texts_and_bodies(module: ast.Module) -> Iterator[str]:
    docstrings = set()
    for node in ast.walk(module):
        # ``ast.walk`` comes to a docstring after what it belongs to.
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            body = node.body
            if ast.get_docstring(node) is not None:
                assert isinstance(body[0], ast.Expr)
                docstrings.add(body[0].value)
                body = body[1:]
            if isinstance(node, Function) and len(body) >= _LEAST_STATEMENTS:
                yield "\n".join(ast.dump(statement) for statement in body)
        if isinstance(node, ast.Constant) and node not in docstrings:
            value = node.value
            if isinstance(value, str) and len(value) >= _LEAST_TEXT:
                yield value


def counts(sources: Sources, page: str) -> dict[str, str]:
    """Return the counts of a tree, by what is counted.

    Args:
        sources: the files of the tree.
        page: ``docs/architecture.md``, which says which files are read.
    """
    folders = {
        folder: {path: text for path, text in sources.items() if path.startswith(f"{folder}/")}
        for folder in FOLDERS
    }
    package = folders["composer3d"]
    lines = [line for text in package.values() for line in text.splitlines()]
    bodies = functions(sources)
    lengths = [body.lines for body in bodies]
    share = sum(body.branches for body in bodies) / sum(body.statement_lines for body in bodies)
    adam = re.compile("AdamW|exp_avg")

    table = {f"lines of {folder}": f"{lines_of(tree, [*tree])}" for folder, tree in folders.items()}
    for technique in TECHNIQUES:
        read = lines_of(sources, reading_path(page, technique))
        table[f"lines of the reading path, with {technique}"] = f"{read}"
    return table | {
        "files of a batch's way": f"{len(batch_path(sources.get(PAGE, '')))}",
        "length of a function, mean": f"{mean(lengths):.1f}",
        "length of a function, 95th percentile": f"{quantiles(lengths, n=20)[-1]:.0f}",
        "branches a line of function": f"{share:.3f}",
        "comments a line": f"{comments(package) / len(lines):.1%}",
        "width of a line that is not empty, mean": f"{mean(len(x) for x in lines if x):.1f}",
        "class names in several files": f"{len(class_names_in_many_files(package))}",
        "the same, with tests and tools": f"{len(class_names_in_many_files(sources))}",
        "public names of modules": f"{public_names(package)}",
        "files that name AdamW or exp_avg": f"{sum(1 for x in package.values() if adam.search(x))}",
        "texts and bodies that stand twice": f"{duplicates(sources)}",
    }


def main() -> None:
    """Print the table, or the functions with the most branches a line."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="count this commit as well")
    parser.add_argument("--densest", metavar="N", type=int, help="list N functions instead")
    parser.add_argument("--classes", action="store_true", help="list classes of one name instead")
    arguments = parser.parse_args()
    sources = read_tree()
    if arguments.densest is not None:
        bodies = [body for body in functions(sources) if body.statement_lines >= _LEAST_LINES]
        for body in sorted(bodies, key=lambda body: -body.density)[: arguments.densest]:
            print(
                f"{body.density:.2f}  {body.branches:3} in {body.statement_lines:3}  {body.place}"
            )
        return
    if arguments.classes:
        for name, files in class_names_in_many_files(sources).items():
            print(f"{name}: {', '.join(files)}")
        return
    after = counts(sources, sources[PAGE])
    if arguments.against is None:
        for what, count in after.items():
            print(f"{what:50} {count:>9}")
        return
    before = counts(read_commit(arguments.against), sources[PAGE])
    print(f"{'':50} {arguments.against[:9]:>9} {'now':>9}")
    for what, count in after.items():
        print(f"{what:50} {before[what]:>9} {count:>9}")


if __name__ == "__main__":
    main()
