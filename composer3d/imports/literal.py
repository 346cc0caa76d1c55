"""Read numbers and dicts out of Python text, and evaluate products of integers. Nothing runs."""

import ast
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from composer3d.facts.bounds import check_values
from composer3d.facts.errors import RecipeError
from composer3d.facts.text import one_line

_MOST_EXPRESSION = 200  # characters of an arithmetic expression
_MOST_NUMBER = 10**18

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
    """

    path: tuple[str, ...]
    value: Any
    line: int


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
    that are assigned to an attribute or a key. A name is never looked up.

    Args:
        text: the Python text, at most as long as ``source`` allows.
        name: the file, for messages.

    Raises:
        RecipeError: the text is not Python.
    """
    try:
        tree = _parse(text, "exec")
        entries = list(_entries_of_module(tree))
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


def _entries_of_module(tree: ast.Module) -> Iterator[Entry]:
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [None]
        path = _path_of(targets[0])
        value = statement.value
        if isinstance(value, ast.Dict) or (isinstance(value, ast.Call) and value.keywords):
            yield from _entries_of(value, path)
        elif path:
            yield Entry(path, _literal(value), statement.lineno)


def _path_of(target: Any) -> tuple[str, ...]:
    """Return the keys of ``config.model.size`` or ``config["size"]``, without the first name."""
    keys: list[str] = []
    while isinstance(target, ast.Attribute | ast.Subscript):
        key = target.attr if isinstance(target, ast.Attribute) else _literal(target.slice)
        if not isinstance(key, str):
            return ()
        keys.insert(0, key)
        target = target.value
    return tuple(keys)


def _entries_of(node: ast.Dict | ast.Call, path: tuple[str, ...]) -> Iterator[Entry]:
    if isinstance(node, ast.Dict):
        pairs = [(_literal(key), value) for key, value in zip(node.keys, node.values, strict=True)]
    else:
        pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
    for key, value in pairs:
        if not isinstance(key, str):  # ``**other``, or a key that is no text
            continue
        if isinstance(value, ast.Dict) or (isinstance(value, ast.Call) and value.keywords):
            yield from _entries_of(value, (*path, key))
        else:
            yield Entry((*path, key), _literal(value), value.lineno)


def _literal(node: Any) -> Any:
    """Return the value of a literal or of arithmetic with integers, else ``Unread``."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass
    text = ast.unparse(node)
    try:
        return arithmetic(text)
    except ValueError:
        return Unread(text)
