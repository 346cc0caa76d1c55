"""Read numbers and dicts out of Python text, and evaluate products of integers. Nothing runs."""

import ast
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

from composer3d.facts.bounds import check_values
from composer3d.facts.errors import RecipeError
from composer3d.facts.text import one_line

_MOST_EXPRESSION = 200  # characters of an arithmetic expression
_MOST_NUMBER = 10**18

_MAIN = "__name__ == '__main__'"
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Unread(NamedTuple):
    """A value that is an expression, which the import does not evaluate.

    Attributes:
        text: the expression.
    """

    text: str


class Entry(NamedTuple):
    """One key of a dict, or one keyword of a call.

    Attributes:
        path: the keys of the dicts around it, outermost first, and its own key last.
        value: a literal, or ``Unread``.
        line: the line of the value, from 1.
        is_unsure: it is not known whether this counts: it stands under a condition or in a loop, or
            a function changes what is not its own.
    """

    path: tuple[str, ...]
    value: Any
    line: int
    is_unsure: bool = False


def arithmetic(text: str) -> int:
    """Evaluate sums, products, whole quotients and remainders of integers.

    Args:
        text: the expression, such as ``8*(4+1)``.

    Raises:
        ValueError: the text is something else, or too long or too large.
    """
    if len(text) > _MOST_EXPRESSION:
        raise ValueError(f"an expression of more than {_MOST_EXPRESSION} characters")
    try:
        tree = _parse(text.strip(), "eval")
        return _evaluate(tree.body)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
        raise ValueError("no arithmetic of integers") from None


def _evaluate(node: Any) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluate(node.operand)
    elif isinstance(node, ast.BinOp):
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        if isinstance(node.op, ast.Div) and right and left % right == 0:
            value = left // right
        elif type(node.op) in _OPERATORS:
            value = _OPERATORS[type(node.op)](left, right)
        else:
            raise ValueError("an operator that is not evaluated")
    else:
        raise ValueError("no arithmetic of integers")
    if abs(value) > _MOST_NUMBER:
        raise ValueError("a number that is too large")
    return value


def dicts_of(text: str, name: str) -> list[Entry]:
    """Return the entries of the dicts and calls in Python text, without running it.

    Read are dicts and keywords of calls that stand alone, are assigned or are returned, and values
    that are assigned to an attribute or a key. A name is never looked up. What is merged and is no
    dict of this text has the key ``**EXPRESSION``, and a computed key is ``[EXPRESSION]``.

    Args:
        text: the Python text, at most as long as ``source`` allows.
        name: the file, for messages.

    Raises:
        RecipeError: the text is not Python.
    """
    try:
        tree = _parse(text, "exec")
        entries = list(_entries_within(tree, _Scope(_names_of_dicts(tree))))
        check_values({".".join(entry.path): entry.value for entry in entries})
        return entries
    except SyntaxError as error:
        reason = one_line(str(error.msg))
        raise RecipeError(f"{name}:{error.lineno or 1}: not Python: {reason}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        # A NUL byte, deep nesting, or a number with thousands of digits.
        reason = one_line(str(error)) or "it nests too deep"
        raise RecipeError(f"{name}: cannot be read as Python: {reason}") from None


def _parse(text: str, mode: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        return ast.parse(text, mode=mode)


class _Scope(NamedTuple):
    """Where statements stand.

    Attributes:
        dicts: the names that are dicts of this text, whose entries are read where they stand.
        is_unsure: whether it is not known that the statements run.
        own: in a function, the names that it sets; elsewhere None.
    """

    dicts: frozenset[str]
    is_unsure: bool = False
    own: frozenset[str] | None = None

    def inside(self, statement: ast.stmt) -> "_Scope":
        """Return the scope of the statements inside of a statement."""
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names = (one.id for one in ast.walk(statement) if _is_stored(one))
            return self._replace(own=frozenset((*names, "self")))
        is_main = isinstance(statement, ast.If) and ast.unparse(statement.test) == _MAIN
        if is_main or isinstance(statement, ast.ClassDef | ast.With | ast.AsyncWith):
            return self
        return self._replace(is_unsure=True)

    def of(self, target: Any) -> "_Scope":
        """Return the scope of a change of ``target``, which may not be a function's own."""
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        is_own = self.own is None or not isinstance(target, ast.Name) or target.id in self.own
        return self if is_own else self._replace(is_unsure=True)


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _names_of_dicts(tree: ast.Module) -> frozenset[str]:
    """Return the names that are set to dicts of this text, and to nothing else."""
    dicts: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_dict(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            dicts.update(one.id for one in targets if isinstance(one, ast.Name))
        if _is_stored(node):
            others[node.id] += 1
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            others[node.target.id] -= 1  # what it adds is read, or tells by itself
        elif isinstance(node, ast.arg):
            others[node.arg] += 1
        elif isinstance(node, ast.alias):
            others[node.asname or node.name] += 1
    return frozenset(name for name, count in dicts.items() if count == others[name])


def _is_dict(node: Any) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_dict(node.left) or _is_dict(node.right)
    return isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and _merges(node))


def _merges(call: ast.Call) -> bool:
    """Return whether the arguments of a call are dicts whose keys are taken over."""
    func = call.func
    is_update = isinstance(func, ast.Attribute) and func.attr == "update"
    return is_update or (isinstance(func, ast.Name) and func.id == "dict")


def _entries_within(parent: ast.AST, scope: _Scope) -> Iterator[Entry]:
    """Yield the entries of the statements in a module or in another statement, in order."""
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, ast.stmt):
            yield from _entries_of_statement(child, scope)
            yield from _entries_within(child, scope.inside(child))
        elif isinstance(child, ast.excepthandler | ast.match_case):
            yield from _entries_within(child, scope)


def _entries_of_statement(statement: ast.stmt, scope: _Scope) -> Iterator[Entry]:
    """Yield the entries of one statement, without those of the statements in it."""
    match statement:
        case ast.Return(value=value):
            yield from _entries_of(value, (), scope)
        case ast.Expr(value=value):
            # ``config.update(...)`` changes config.
            yield from _entries_of(value, (), scope.of(getattr(value, "func", None)))
        case ast.AnnAssign(target=target, value=value) if value is not None:
            yield from _entries_of(value, _path_of(target), scope.of(target))
        case ast.Assign(targets=targets, value=value):
            for one in targets:
                if isinstance(one, ast.Tuple | ast.List):
                    yield from _changes_of(statement, one.elts, scope)
                else:
                    yield from _entries_of(value, _path_of(one), scope.of(one))
        case ast.AugAssign(target=ast.Name(id=name) as target, op=ast.BitOr(), value=value):
            if name in scope.dicts or _is_tree(value, scope):
                yield from _merged(value, (), scope.of(target))
        case ast.AugAssign(target=target):
            yield from _changes_of(statement, [target], scope)
        case ast.Delete(targets=targets):
            yield from _changes_of(statement, targets, scope)


def _changes_of(statement: ast.stmt, targets: list[ast.expr], scope: _Scope) -> Iterator[Entry]:
    """Yield the entries of keys that are set to what is not evaluated."""
    for target in targets:
        if path := _path_of(target):
            value = Unread(ast.unparse(statement))
            yield Entry(path, value, statement.lineno, scope.of(target).is_unsure)


def _path_of(target: Any) -> tuple[str, ...]:
    """Return the keys of ``config.model.size`` or ``config["size"]``, without the first name."""
    keys: list[str] = []
    while isinstance(target, ast.Attribute | ast.Subscript):
        key = target.attr if isinstance(target, ast.Attribute) else _key_of(target.slice)
        if key is None:
            return ()
        keys.insert(0, key)
        target = target.value
    return tuple(keys)


def _key_of(node: ast.expr) -> str | None:
    """Return a key, in brackets if it is computed; None if it is no text, such as an index."""
    key = _literal(node)
    if isinstance(key, Unread) and not isinstance(node, ast.Slice | ast.Tuple):
        return f"[{key.text}]"
    return key if isinstance(key, str) else None


def _is_tree(node: Any, scope: _Scope) -> bool:
    """Return whether an expression has entries: dicts, keywords of calls, and what merges them."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            sides = (left, right)
            return any(_is_tree(one, scope) or _is_name(one, scope.dicts) for one in sides)
        case ast.IfExp(body=body, orelse=other):
            return _is_tree(body, scope) or _is_tree(other, scope)
        case ast.Call(args=args, keywords=keywords):
            return bool(keywords) or _merges(node) or any(_is_tree(one, scope) for one in args)
    return isinstance(node, ast.Dict)


def _is_name(node: Any, names: frozenset[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _entries_of(node: Any, path: tuple[str, ...], scope: _Scope) -> Iterator[Entry]:
    """Yield the entries of an expression, or the expression itself if it has none but a path."""
    pairs: list[tuple[str | None, ast.expr]] = []  # without a key, the value is merged
    if not _is_tree(node, scope):
        if path:
            yield Entry(path, _literal(node), node.lineno, scope.is_unsure)
        return
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else _key_of(key)
            if key is None or name is not None:
                pairs.append((name, value))
    elif isinstance(node, ast.Call):
        merged = [one for one in node.args if _merges(node) or _is_tree(one, scope)]
        pairs = [*((None, one) for one in merged), *((one.arg, one.value) for one in node.keywords)]
    elif isinstance(node, ast.IfExp):
        pairs, scope = [(None, node.body), (None, node.orelse)], scope._replace(is_unsure=True)
    else:
        pairs = [(None, node.left), (None, node.right)]
    for name, value in pairs:
        if name is None:
            yield from _merged(value, path, scope)
        else:
            yield from _entries_of(value, (*path, name), scope)


def _merged(node: ast.expr, path: tuple[str, ...], scope: _Scope) -> Iterator[Entry]:
    """Yield the entries of what is merged into a dict, or one that stands for them."""
    if _is_tree(node, scope):
        yield from _entries_of(node, path, scope)
    elif not isinstance(node, ast.Constant) and not _is_name(node, scope.dicts):
        text = ast.unparse(node)
        yield Entry((*path, f"**{text}"), Unread(text), node.lineno, scope.is_unsure)


def _literal(node: Any) -> Any:
    """Return the value of a literal or of arithmetic with integers, else ``Unread``."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass
    text = ast.unparse(node)
    try:
        return arithmetic(text)
    except ValueError:
        return Unread(text)
