"""Define ``Rule``: a check of several keys that yields a message for each fault."""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import FIELDS, as_toml, join_with_or, mention, value_of

_KEY = re.compile(r"<([\w.]+)>")


class KeyChange(NamedTuple):
    """A change of one key that removes a fault.

    Attributes:
        key: the key to change.
        values: the values that remove the fault, the first one before the others; None is an absent
            key.
        words: the words for it in a message; "": "use KEY = VALUES", or "remove KEY".
    """

    key: str
    values: tuple[Any, ...]
    words: str = ""


def use(key: str, *values: Any) -> KeyChange:
    """Return the remedy to give ``key`` one of ``values``."""
    return KeyChange(key, values)


def remove(key: str, words: str = "") -> KeyChange:
    """Return the remedy to leave out ``key``, so that it has its default."""
    return KeyChange(key, (FIELDS[key].default,), words or f"remove {key}")


# A remedy that only the user can choose is told in words, such as "mesh.tp above 1".
Remedy = KeyChange | str


class Breach(NamedTuple):
    """What is wrong with a recipe, and what removes it.

    Attributes:
        text: what is wrong. ``<mesh.tp>`` in it stands for that key with its value.
        remedies: each of them removes the fault. The message lists them in this order.
    """

    text: str
    remedies: tuple[Remedy, ...] = ()


def breach(text: str, *remedies: Remedy) -> Breach:
    """Return a breach with its remedies."""
    return Breach(text, remedies)


def _way_out(remedies: Sequence[Remedy]) -> str:
    """Return the end of a message: "; use parallel.async_tp = false, or mesh.tp above 1"."""
    parts = []
    says_use = False
    for remedy in remedies:
        if isinstance(remedy, KeyChange) and not remedy.words:
            part = f"{remedy.key} = {join_with_or(map(as_toml, remedy.values))}"
            parts.append(part if says_use else f"use {part}")
            says_use = True
        else:
            parts.append(remedy.words if isinstance(remedy, KeyChange) else remedy)
            says_use = says_use or parts[-1].startswith("use ")
    return f"; {', or '.join(parts)}" if parts else ""


class Violation(NamedTuple):
    """A broken rule, or a value outside of its range.

    Attributes:
        key: the key at fault.
        breach: what is wrong, and what removes it.
        others: the other keys that the rule reads.
    """

    key: str
    breach: Breach
    others: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        """The message. ``<mesh.tp>`` in it stands for that key with its value."""
        return self.breach.text + _way_out(self.breach.remedies)

    def message(self, recipe: Recipe, origins: Mapping[str, str] = {}) -> str:
        """Return the message, in which ``mention`` has written each key with its value.

        ``origins`` gives the origin to show after the value, by key.
        """
        return _fill(self.template, recipe, origins)

    def reason(self, recipe: Recipe) -> str:
        """Return the message without what removes the fault."""
        return _fill(self.breach.text, recipe, {})

    def change_of(self, keys: Container[str]) -> KeyChange | None:
        """Return the first remedy that changes one of ``keys``, or None."""
        changes = (remedy for remedy in self.breach.remedies if isinstance(remedy, KeyChange))
        return next((change for change in changes if change.key in keys), None)


def _fill(template: str, recipe: Recipe, origins: Mapping[str, str]) -> str:
    """Replace each ``<key>`` by the key with its value, and its origin if it is given."""

    def replace_key(match: re.Match[str]) -> str:
        key = match[1]
        origin = f" ({origins[key]})" if key in origins else ""
        return mention(recipe, key) + origin

    return _KEY.sub(replace_key, template)


# A function that yields each fault of a recipe. A text alone is a fault whose text ends with what
# removes it, for a user who must choose it.
Check = Callable[[Recipe], Iterator[str | Breach]]


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
    def check(recipe: Recipe) -> Iterator[Breach]:
        value, bound = value_of(recipe, key), value_of(recipe, bound_key)
        if value is not None and not value <= bound:
            text = f"<{key}> must be at most <{bound_key}>"
            yield breach(text, use(key, bound), f"a larger {bound_key}")

    return check


def only_used_with(
    key: str, switch: str, choices: Sequence[str], way_out: str | None = None
) -> Rule:
    """Return the rule that ``key`` keeps its default unless ``switch`` is one of ``choices``.

    ``way_out`` ends the message. By default, it says to remove the key or to change the switch.
    """
    remedies: tuple[Remedy, ...] = (remove(key, "remove it"), use(switch, *choices))
    if way_out is not None:
        remedies = (remove(key, way_out),)

    @rule(key, switch)
    def check(recipe: Recipe) -> Iterator[Breach]:
        is_default = value_of(recipe, key) == FIELDS[key].default
        if value_of(recipe, switch) not in choices and not is_default:
            yield breach(f"<{key}> is not used with <{switch}>", *remedies)

    return check


def needed_with(key: str, switch: str, meanings: Mapping[str, str]) -> Rule:
    """Return the rule that ``key`` is set if ``switch`` is in ``meanings``, and absent otherwise.

    ``meanings`` says what ``key`` must name, for each choice of ``switch`` that needs it.
    """
    unused = only_used_with(key, switch, list(meanings))

    @rule(key, switch)
    def check(recipe: Recipe) -> Iterator[str | Breach]:
        yield from unused.check(recipe)
        chosen = value_of(recipe, switch)
        if chosen in meanings and value_of(recipe, key) is None:
            yield f"<{switch}> needs {key}: {meanings[chosen]}"

    return check
