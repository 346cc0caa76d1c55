"""Define ``Rule``: a check of several keys that yields a message for each fault."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import FIELDS, as_toml, join_with_or, mention, value_of

_KEY = re.compile(r"<([\w.]+)>")


class Violation(NamedTuple):
    """A broken rule, or a value outside of its range.

    Attributes:
        key: the key at fault.
        template: the message. ``<mesh.tp>`` in it stands for that key with its value.
        others: the other keys that the rule reads.
    """

    key: str
    template: str
    others: tuple[str, ...] = ()

    def message(self, recipe: Recipe, origins: Mapping[str, str] = {}) -> str:
        """Return the message, in which ``mention`` has written each key with its value.

        ``origins`` gives the origin to show after the value, by key.
        """

        def replace_key(match: re.Match[str]) -> str:
            key = match[1]
            origin = f" ({origins[key]})" if key in origins else ""
            return mention(recipe, key) + origin

        return _KEY.sub(replace_key, self.template)


# A function that yields the template of a message for each fault of a recipe.
Check = Callable[[Recipe], Iterator[str]]


class Rule(NamedTuple):
    """A check, and the keys that it reads; the first key is the one at fault.

    A rule is skipped if one of its keys has a value outside of its range. So a check cannot divide
    by zero, for example. If a check reads a key that it does not declare, it must accept any value
    of that key.
    """

    keys: tuple[str, ...]
    check: Check


def rule(*keys: str) -> Callable[[Check], Rule]:
    """Return a decorator that makes a check into a rule. The rule declares ``keys``."""
    return lambda check: Rule(keys, check)


def must_be_above(key: str, bound_key: str, reason: str = "") -> Rule:
    """Return the rule that ``key`` is absent or above ``bound_key``.

    ``reason`` ends the message.
    """

    @rule(key, bound_key)
    def check(recipe: Recipe) -> Iterator[str]:
        value, bound = value_of(recipe, key), value_of(recipe, bound_key)
        if value is not None and not value > bound:
            yield f"<{key}> must be above <{bound_key}>{reason}"

    return check


def must_be_at_most(key: str, bound_key: str) -> Rule:
    """Return the rule that ``key`` is absent or at most ``bound_key``."""

    @rule(key, bound_key)
    def check(recipe: Recipe) -> Iterator[str]:
        value, bound = value_of(recipe, key), value_of(recipe, bound_key)
        if value is not None and not value <= bound:
            yield f"<{key}> must be at most <{bound_key}>"

    return check


def only_used_with(
    key: str, switch: str, choices: Sequence[str], way_out: str | None = None
) -> Rule:
    """Return the rule that ``key`` keeps its default unless ``switch`` is one of ``choices``.

    ``way_out`` ends the message. By default, it says to remove the key or to change the switch.
    """
    if way_out is None:
        way_out = f"remove it, or use {switch} = {join_with_or(map(as_toml, choices))}"

    @rule(key, switch)
    def check(recipe: Recipe) -> Iterator[str]:
        is_default = value_of(recipe, key) == FIELDS[key].default
        if value_of(recipe, switch) not in choices and not is_default:
            yield f"<{key}> is not used with <{switch}>; {way_out}"

    return check


def needed_with(key: str, switch: str, meanings: Mapping[str, str]) -> Rule:
    """Return the rule that ``key`` is set if ``switch`` is in ``meanings``, and absent otherwise.

    ``meanings`` says what ``key`` must name, for each choice of ``switch`` that needs it.
    """
    unused = only_used_with(key, switch, list(meanings))

    @rule(key, switch)
    def check(recipe: Recipe) -> Iterator[str]:
        yield from unused.check(recipe)
        chosen = value_of(recipe, switch)
        if chosen in meanings and value_of(recipe, key) is None:
            yield f"<{switch}> needs {key}: {meanings[chosen]}"

    return check
