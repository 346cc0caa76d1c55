"""Check that every public name of composer3d is documented, with its errors and its shapes.

    python -m tools.docstrings

Each class, function and method without a leading underscore needs a docstring. An override may
leave it to the method of its base class, and ``forward``, ``__init__`` and a few more may leave it
to their class. The docstring tells

- the class of each error that the function itself raises and does not catch, except for
  AssertionError;
- the shapes of the tensors and arrays in the annotations, unless their names do: ``q_BHTD``. The
  docstring of the class or of the module may tell them instead.

A name counts where it is defined, not where it is imported. The shape of a tensor is (B, T), 2-D,
scalar, any shape, or in a name: ``h_BTC``. Constants have no docstrings. An error is caught by a
handler that names its own class. Base classes, and functions that make errors, are found by their
names alone, in whatever module they stand.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "composer3d"

Function = ast.FunctionDef | ast.AsyncFunctionDef

# The methods that a class explains.
_OF_CLASS = {"__init__", "__post_init__", "__enter__", "__call__", "forward"}

# What only a mistake in composer3d itself raises.
_OWN_MISTAKE = "AssertionError"
# Errors that a context manager around the body turns into others, by function.
_TURNED = {"read_metadata": {"PickleError"}}

_TENSORS = {"Tensor", "DTensor", "ndarray"}
# What a type is written with: ``Name``, ``torch.Name``, ``Name[...]``, ``Name | Name``.
_OF_TYPES = ast.Name | ast.Attribute | ast.Subscript | ast.BinOp

# (B, T), (2), (N / n), (rows, K + 1), (..., C), (parts,), h_BTC, "2-D", "a scalar", "any shape".
_DIM = r"[A-Za-z0-9_.]+(?: ?[-+*/] ?[A-Za-z0-9_.]+)*"
_HAS_LETTER_OR_NUMBER = r"(?=[^()]*(?:\b[A-Z]\b|\b\d{1,3}\b|\.\.\.))"
_SHAPE = re.compile(
    rf"\({_HAS_LETTER_OR_NUMBER}{_DIM}(?:, {_DIM})*\)|\({_DIM},\)"
    r"|[a-z]_[A-Z0-9]+\b|\b\d-(?:D|dim)\b|\bscalar|\b[Ss]hape"
)
_SHAPE_IN_NAME = re.compile(r"_[A-Z0-9]+$")


def main() -> int:
    """Print the complaints; return 1 if there are any."""
    paths = sorted(PACKAGE.rglob("*.py"))
    found = complaints(
        {path.relative_to(PACKAGE.parent).as_posix(): path.read_text() for path in paths}
    )
    print("\n".join(found) if found else "every public name is documented")
    return 1 if found else 0


def complaints(sources: Mapping[str, str]) -> list[str]:
    """Return what the docstrings of a package lack, as "path:line: what".

    Args:
        sources: the text of each module, by its path from the folder that holds the package.
    """
    trees = {path: ast.parse(source, path) for path, source in sources.items()}
    definitions = _definitions(trees.values())
    aliases = {_dotted(path): _aliases(tree) for path, tree in trees.items()}
    found = []
    for path, tree in trees.items():
        imported = {
            name.asname or name.name
            for statement in tree.body
            if isinstance(statement, ast.ImportFrom)
            for name in statement.names
            if name.name in aliases.get(statement.module or "", ())
        }
        check = _Check(definitions, _TENSORS | aliases[_dotted(path)] | imported)
        lacking = check.of_body(tree, "", (_docstring(tree),))
        found += [f"{path}:{line}: {complaint}" for line, complaint in lacking]
    return found


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _aliases(module: ast.Module) -> set[str]:
    """Return the names that a module gives to types with tensors in them."""
    found: set[str] = set()
    for statement in module.body:
        is_alias = isinstance(statement, ast.Assign) and isinstance(statement.value, _OF_TYPES)
        if is_alias and (_TENSORS | found) & _words(statement.value):
            found.update(map(_last_name, statement.targets))
    return found


class _Definitions(NamedTuple):
    """What the modules of a package define.

    Attributes:
        classes: by name.
        results: the class of the result of each function and method that says it, by name.
    """

    classes: dict[str, ast.ClassDef]
    results: dict[str, str]


def _definitions(modules: Iterable[ast.Module]) -> _Definitions:
    found = _Definitions({}, {})
    for module in modules:
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                found.classes[node.name] = node
            elif isinstance(node, Function) and node.returns:
                found.results[node.name] = _last_name(node.returns)
    return found


class _Check:
    """The check of one module.

    Args:
        definitions: those of its package.
        tensors: the names of types that are tensors or hold some.
    """

    def __init__(self, definitions: _Definitions, tensors: set[str]) -> None:
        self._definitions, self._tensors = definitions, tensors

    def of_body(
        self, parent: ast.Module | ast.ClassDef, prefix: str, around: tuple[str, ...]
    ) -> Iterator[tuple[int, str]]:
        """Yield the line of each definition that lacks something, with what it lacks.

        Args:
            parent: the module or the class.
            prefix: the classes around the definitions, as in "Outer.Inner.".
            around: the docstrings around the definitions, innermost first.
        """
        for entry in _statements(parent):
            if isinstance(entry, ast.ClassDef) and not entry.name.startswith("_"):
                yield from self._of_class(entry, prefix, around)
            elif isinstance(entry, Function) and not _completes_another(entry):
                for complaint in self._of_function(entry, parent, around):
                    yield entry.lineno, f"{prefix}{entry.name} {complaint}"

    def _of_class(
        self, node: ast.ClassDef, prefix: str, around: tuple[str, ...]
    ) -> Iterator[tuple[int, str]]:
        name = f"{prefix}{node.name}"
        inside = (_docstring(node), *around)
        if not _docstring(node):
            yield node.lineno, f"{name} has no docstring"
        elif self._has_tensors(_fields(node)) and not _tells_shapes(inside):
            yield node.lineno, f"{name} tells no shapes"
        yield from self.of_body(node, f"{name}.", inside)

    def _of_function(
        self, node: Function, parent: ast.Module | ast.ClassDef, around: tuple[str, ...]
    ) -> Iterator[str]:
        docstring = _docstring(node)
        if isinstance(parent, ast.ClassDef) and node.name in _OF_CLASS:
            docstring = f"{docstring}\n{around[0]}"
        elif node.name.startswith("_"):
            return
        elif isinstance(parent, ast.ClassDef) and not docstring:
            docstring = self._inherited_docstring(node.name, parent)

        if not docstring:
            yield "has no docstring"
            return
        caught = {_OWN_MISTAKE} | _TURNED.get(node.name, set())
        for error in sorted({*self._raised(node.body, caught)}):
            if not re.search(rf"\b{error}\b", docstring):
                yield f"does not tell of {error}"
        if self._has_tensors(_annotations(node)) and not _tells_shapes((docstring, *around)):
            yield "tells no shapes"

    def _inherited_docstring(self, method: str, of: ast.ClassDef) -> str:
        """Return the docstring of a method in the first base class that has one, else ""."""
        for expression in of.bases:
            # The base may be generic.
            of_base = expression.value if isinstance(expression, ast.Subscript) else expression
            base = self._definitions.classes.get(_last_name(of_base))
            if base is None:
                continue
            for entry in _statements(base):
                if isinstance(entry, Function) and entry.name == method and _docstring(entry):
                    return _docstring(entry)
            if inherited := self._inherited_docstring(method, base):
                return inherited
        return ""

    def _has_tensors(self, annotations: Iterable[ast.expr]) -> bool:
        return any(self._tensors & _words(annotation) for annotation in annotations)

    def _raised(self, body: Iterable[ast.AST], caught: set[str]) -> Iterator[str]:
        """Yield the classes of errors that statements raise, except for those in ``caught``."""
        for node in body:
            if isinstance(node, ast.Raise):
                error = self._class_raised(node)
                if error and error not in caught:
                    yield error
            elif isinstance(node, ast.Try):
                yield from self._raised(node.body, caught | _caught_by(node))
                others = [*node.handlers, *node.orelse, *node.finalbody]
                yield from self._raised(others, caught)
            elif not isinstance(node, ast.ClassDef | Function):
                yield from self._raised(ast.iter_child_nodes(node), caught)

    def _class_raised(self, node: ast.Raise) -> str:
        """Return the class of the error in a ``raise``; "" if the source does not name it.

        If a helper makes the error, the annotation of its result names the class.
        """
        is_call = isinstance(node.exc, ast.Call)
        name = _last_name(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        if name.lstrip("_")[:1].isupper():
            return name
        return self._definitions.results.get(name, "") if is_call else ""


def _caught_by(node: ast.Try) -> set[str]:
    """Return the classes that handlers name. One that raises its error again does not count."""
    caught: set[str] = set()
    for handler in node.handlers:
        if handler.type and not any(_raises_again(child, handler) for child in ast.walk(handler)):
            caught |= _words(handler.type)
    return caught


def _statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, and those in its ``if`` and ``try``."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)


def _docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def _words(expression: ast.expr) -> set[str]:
    """Return the names in an expression, and those in its texts."""
    return set(re.findall(r"\w+", ast.unparse(expression)))


def _last_name(expression: ast.expr | None) -> str:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def _completes_another(node: Function) -> bool:
    """Whether a definition is part of one with a docstring: it is a setter or an overload."""
    decorators = map(_last_name, node.decorator_list)
    return not {"setter", "deleter", "overload"}.isdisjoint(decorators)


def _raises_again(node: ast.AST, handler: ast.ExceptHandler) -> bool:
    """Whether a statement raises the error that its handler has caught."""
    if not isinstance(node, ast.Raise):
        return False
    return node.exc is None or (isinstance(node.exc, ast.Name) and node.exc.id == handler.name)


def _fields(node: ast.ClassDef) -> Iterator[ast.expr]:
    """Yield the annotations of the public fields whose names do not tell the shape."""
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign):
            name = _last_name(entry.target)
            if not name.startswith("_") and not _SHAPE_IN_NAME.search(name):
                yield entry.annotation


def _annotations(node: Function) -> Iterator[ast.expr]:
    """Yield the annotation of the result, and those of arguments with no shape in the name."""
    if node.returns:
        yield node.returns
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    arguments += filter(None, [node.args.vararg, node.args.kwarg])
    for argument in arguments:
        if argument.annotation and not _SHAPE_IN_NAME.search(argument.arg):
            yield argument.annotation


def _tells_shapes(docstrings: Iterable[str]) -> bool:
    return any(map(_SHAPE.search, docstrings))


if __name__ == "__main__":
    sys.exit(main())
