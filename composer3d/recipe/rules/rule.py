"""What a rule is: a check of several keys, which yields a violation for each fault."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import FIELDS, as_toml, join_with_or, mention, value_of

_KEY = re.compile(r"<([\w.]+)>")


class Violation(NamedTuple):
    """One broken rule.

    Attributes:
        key: the key at fault.
        template: the message. ``<mesh.tp>`` in it stands for that key with its value.
        others: the other keys that the rule reads.
    """

    key: str
    template: str
    others: tuple[str, ...] = ()

    def message(self, recipe: Recipe, origins: Mapping[str, str] = {}) -> str:
        """Return the message, with each key as ``mention`` writes it.

        ``origins`` are the origins to show after the values, by key.
        """

        def replace_key(match: re.Match[str]) -> str:
            key = match[1]
            origin = f" ({origins[key]})" if key in origins else ""
            return mention(recipe, key) + origin

        return _KEY.sub(replace_key, self.template)


# Yields the template of a message for each fault of a recipe.
Check = Callable[[Recipe], Iterator[str]]


class Rule(NamedTuple):
    """A check, and the keys that it reads; the first key is the one at fault.

    A rule is skipped if one of its keys has a value outside of its range. So a check never meets,
    for example, a zero to divide by. If it reads another key as well, it must accept any value.
    """

    keys: tuple[str, ...]
    check: Check


def rule(*keys: str) -> Callable[[Check], Rule]:
    """Make a check into a rule that reads ``keys``."""
    return lambda check: Rule(keys, check)


def must_be_above(key: str, bound_key: str, reason: str = "") -> Rule:
    """``key``, unless absent, must be above ``bound_key``. ``reason`` ends the message."""

    @rule(key, bound_key)
    def check(recipe: Recipe) -> Iterator[str]:
        value, bound = value_of(recipe, key), value_of(recipe, bound_key)
        if value is not None and not value > bound:
            yield f"<{key}> must be above <{bound_key}>{reason}"

    return check


def must_be_at_most(key: str, bound_key: str) -> Rule:
    """``key``, unless absent, must be at most ``bound_key``."""

    @rule(key, bound_key)
    def check(recipe: Recipe) -> Iterator[str]:
        value, bound = value_of(recipe, key), value_of(recipe, bound_key)
        if value is not None and not value <= bound:
            yield f"<{key}> must be at most <{bound_key}>"

    return check


def only_used_with(
    key: str, switch: str, choices: Sequence[str], way_out: str | None = None
) -> Rule:
    """``key`` must keep its default unless ``switch`` is one of ``choices``.

    ``way_out`` ends the message; the default says to remove the key or to change the switch.
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
    """``key`` must be set if ``switch`` is in ``meanings``, and must be absent otherwise.

    ``meanings`` says what ``key`` is for each choice of ``switch`` that needs it.
    """
    unused = only_used_with(key, switch, list(meanings))

    @rule(key, switch)
    def check(recipe: Recipe) -> Iterator[str]:
        yield from unused.check(recipe)
        chosen = value_of(recipe, switch)
        if chosen in meanings and value_of(recipe, key) is None:
            yield f"<{switch}> needs {key}: {meanings[chosen]}"

    return check
