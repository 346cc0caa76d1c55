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
scalar, any shape, or in a name: ``h_BTC``. Constants have no docstrings.
"""

import ast
import builtins
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

_TENSORS = {"Tensor", "DTensor", "ndarray"}

# (B, T), (2), (N / n), (rows, K + 1), (..., C), (parts,), h_BTC, "2-D", "a scalar", "any shape".
_DIM = r"[A-Za-z0-9_.]+(?: ?[-+*/] ?[A-Za-z0-9_.]+)*"
_HAS_LETTER_OR_NUMBER = r"(?=[^()]*(?:\b[A-Z]\b|\b\d{1,3}\b|\.\.\.))"
_SHAPE = re.compile(
    rf"\({_HAS_LETTER_OR_NUMBER}{_DIM}(?:, {_DIM})*\)|\({_DIM},\)"
    r"|[a-z]_[A-Z0-9]+\b|\b\d-(?:D|dim)\b|\bscalar|\b[Ss]hape"
)
_SHAPE_IN_NAME = re.compile(r"_[A-Z0-9]+$")


class _Import(NamedTuple):
    """The statement ``from module import name``."""

    module: str
    name: str


class _Module(NamedTuple):
    """A parsed module.

    Attributes:
        path: the path that its complaints begin with.
        names: its global names: the statement that defines each, or where it comes from.
        functions: its functions and methods, by name.
    """

    path: str
    tree: ast.Module
    names: dict[str, ast.stmt | _Import]
    functions: dict[str, Function]


class _Definition(NamedTuple):
    """The statement that defines a name, and its module."""

    statement: ast.stmt
    module: _Module


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
    package = _Package(sources)
    return [
        f"{module.path}:{line}: {complaint}"
        for module in package.modules.values()
        for line, complaint in _Check(package, module).complaints()
    ]


class _Package:
    """The modules of a package by dotted name, and what their names stand for."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.modules: dict[str, _Module] = {}
        for path, source in sources.items():
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            self.modules[name] = _parse(path, source)

    def find(self, expression: ast.expr, module: _Module) -> _Definition | None:
        """Return the definition of a global name; None if the package does not define it."""
        if isinstance(expression, ast.Subscript):
            expression = expression.value
        return self._find(expression.id, module) if isinstance(expression, ast.Name) else None

    def _find(self, name: str, module: _Module) -> _Definition | None:
        found = module.names.get(name)
        if isinstance(found, _Import):
            origin = self.modules.get(found.module)
            return self._find(found.name, origin) if origin else None
        return _Definition(found, module) if found else None

    def find_function(self, called: ast.expr, module: _Module) -> tuple[Function, _Module] | None:
        """Return the function that a call runs, if the package defines it.

        A method is found by its name alone, in the same module.
        """
        found = self.find(called, module)
        if found:
            statement = found.statement
            return (statement, found.module) if isinstance(statement, Function) else None
        method = module.functions.get(_last_name(called))
        return (method, module) if method else None

    def names_in(self, expression: ast.expr, module: _Module) -> set[str]:
        """Return the names in an expression, without what stands before their dots.

        A constant of the package, such as an alias of a type, stands for the names in its value.
        """
        names: set[str] = set()
        for node in ast.walk(expression):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"\w+", node.value))
            elif isinstance(node, ast.Name):
                found = self.find(node, module)
                if found and isinstance(found.statement, ast.Assign):
                    names |= self.names_in(found.statement.value, found.module)
                else:
                    names.add(node.id)
        return names

    def class_names(self, error: ast.expr, module: _Module) -> set[str]:
        """Return the names of a class of errors and of its bases."""
        names = {_last_name(error)}
        builtin = getattr(builtins, _last_name(error), None)
        if isinstance(builtin, type):
            names |= {base.__name__ for base in builtin.mro()}
        found = self.find(error, module)
        if found and isinstance(found.statement, ast.ClassDef):
            for base in found.statement.bases:
                names |= self.class_names(base, found.module)
        return names

    def inherited_docstring(self, method: str, of: ast.ClassDef, module: _Module) -> str:
        """Return the docstring of a method in the first base class that has one, else ""."""
        for expression in of.bases:
            base = self.find(expression, module)
            if not base or not isinstance(base.statement, ast.ClassDef):
                continue
            for entry in _statements(base.statement):
                if isinstance(entry, Function) and entry.name == method and _docstring(entry):
                    return _docstring(entry)
            inherited = self.inherited_docstring(method, base.statement, base.module)
            if inherited:
                return inherited
        return ""


class _Check:
    """The check of one module."""

    def __init__(self, package: _Package, module: _Module) -> None:
        self._package = package
        self._module = module

    def complaints(self) -> Iterator[tuple[int, str]]:
        """Yield the line of each definition that lacks something, with what it lacks."""
        return self._of_body(self._module.tree, "", (_docstring(self._module.tree),))

    def _of_body(
        self, parent: ast.Module | ast.ClassDef, prefix: str, around: tuple[str, ...]
    ) -> Iterator[tuple[int, str]]:
        """Yield the complaints about what a module or a class defines.

        Args:
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
        yield from self._of_body(node, f"{name}.", inside)

    def _of_function(
        self, node: Function, parent: ast.Module | ast.ClassDef, around: tuple[str, ...]
    ) -> Iterator[str]:
        docstring = _docstring(node)
        if isinstance(parent, ast.ClassDef) and node.name in _OF_CLASS:
            docstring = f"{docstring}\n{around[0]}"
        elif node.name.startswith("_"):
            return
        elif isinstance(parent, ast.ClassDef) and not docstring:
            docstring = self._package.inherited_docstring(node.name, parent, self._module)

        if not docstring:
            yield "has no docstring"
            return
        for error in sorted({*self._raised(node.body, {_OWN_MISTAKE})}):
            if not re.search(rf"\b{error}\b", docstring):
                yield f"does not tell of {error}"
        if self._has_tensors(_annotations(node)) and not _tells_shapes((docstring, *around)):
            yield "tells no shapes"

    def _has_tensors(self, annotations: Iterable[ast.expr]) -> bool:
        names = (self._package.names_in(entry, self._module) for entry in annotations)
        return any(_TENSORS & found for found in names)

    def _raised(self, body: Iterable[ast.AST], caught: set[str]) -> Iterator[str]:
        """Yield the classes of errors that statements raise, except for those in ``caught``."""
        for node in body:
            if isinstance(node, ast.Raise):
                error = self._class_raised(node)
                if error and not caught & self._package.class_names(error, self._module):
                    yield _last_name(error)
            elif isinstance(node, ast.Try):
                yield from self._raised(node.body, caught | self._handled(node, self._module))
                others = [*node.handlers, *node.orelse, *node.finalbody]
                yield from self._raised(others, caught)
            elif isinstance(node, ast.With):
                handled = set[str]().union(*map(self._handled_by, node.items))
                yield from self._raised(node.body, caught | handled)
            elif not isinstance(node, ast.ClassDef | Function):
                yield from self._raised(ast.iter_child_nodes(node), caught)

    def _class_raised(self, node: ast.Raise) -> ast.expr | None:
        """Return the class of the error in a ``raise``; None if the source does not name it.

        If a helper makes the error, the annotation of its result names the class.
        """
        if not isinstance(node.exc, ast.Call):
            return node.exc if node.exc and _is_class(node.exc) else None
        if _is_class(node.exc.func):
            return node.exc.func
        helper = self._package.find_function(node.exc.func, self._module)
        return helper[0].returns if helper else None

    def _handled(self, node: ast.Try, module: _Module) -> set[str]:
        """Return the errors that do not leave a ``try`` as they are."""
        handled: set[str] = set()
        for handler in node.handlers:
            if any(_raises_again(child, handler) for child in ast.walk(handler)):
                continue
            if handler.type is None:
                handled.add("BaseException")
            else:
                handled |= self._package.names_in(handler.type, module)
        return handled

    def _handled_by(self, item: ast.withitem) -> set[str]:
        """Return the errors that do not leave a context manager as they are.

        They are the arguments of ``suppress``, and what a generator handles around its ``yield``.
        """
        manager = item.context_expr
        if not isinstance(manager, ast.Call):
            return set()
        handled: set[str] = set()
        if _last_name(manager.func) == "suppress":
            for error in manager.args:
                handled |= self._package.names_in(error, self._module)
        generator = self._package.find_function(manager.func, self._module)
        if generator:
            function, module = generator
            for node in ast.walk(function):
                if isinstance(node, ast.Try) and _yields(node):
                    handled |= self._handled(node, module)
        return handled


def _parse(path: str, source: str) -> _Module:
    tree = ast.parse(source, path)
    names: dict[str, ast.stmt | _Import] = {}
    for statement in _statements(tree):
        if isinstance(statement, ast.ClassDef | Function):
            names[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                names[_last_name(target)] = statement
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                names[alias.asname or alias.name] = _Import(statement.module, alias.name)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    return _Module(path, tree, names, functions)


def _statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, and those in its ``if`` and ``try``."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)


def _docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def _last_name(expression: ast.expr) -> str:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def _is_class(expression: ast.expr) -> bool:
    return _last_name(expression).lstrip("_")[:1].isupper()


def _completes_another(node: Function) -> bool:
    """Whether a definition is part of one with a docstring: it is a setter or an overload."""
    decorators = map(_last_name, node.decorator_list)
    return not {"setter", "deleter", "overload"}.isdisjoint(decorators)


def _raises_again(node: ast.AST, handler: ast.ExceptHandler) -> bool:
    """Whether a statement raises the error that its handler has caught."""
    if not isinstance(node, ast.Raise):
        return False
    return node.exc is None or (isinstance(node.exc, ast.Name) and node.exc.id == handler.name)


def _yields(node: ast.Try) -> bool:
    return any(isinstance(child, ast.Yield) for part in node.body for child in ast.walk(part))


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
