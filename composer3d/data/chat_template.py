"""Render conversations with a chat template of Hugging Face, and find the turns of the assistant.

A chat template comes from outside and is a program. It runs in Jinja's sandbox, and only in the
process of ``tokenizer_worker``, whose time and memory are limited. That process loads this file by
its path, so it imports nothing but jinja2 and the standard library.
"""

import json
import re
import secrets
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ASSISTANT = "assistant"

# Characters that a template may make of one conversation: this many for each one of the
# conversation, and this many in any case.
_CHARACTERS_PER_CHARACTER = 64
_LEAST_LIMIT = 1 << 20

# The keys of a message with its reasoning, best first: a template may read any of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")

# Filters whose first argument is the key of a message.
_FILTERS_OF_KEYS = frozenset(("attr", "groupby", "rejectattr", "selectattr"))

Spans = list[tuple[int, int]]


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template.
        tokens: the special tokens by their names in the template, such as ``bos_token``.

    Raises:
        jinja2.TemplateError: the template has an error of syntax.
    """

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        del environment.filters["random"]  # the same conversation must give the same tokens
        # Templates test whether strftime_now is defined. It is not: the tokens of a conversation
        # must not depend on the day.
        environment.globals = {
            "range": environment.globals["range"],
            "dict": _make_dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
        }
        # No content can hold these marks, because they are drawn anew.
        self._nonce = secrets.token_hex(16)
        self._begin, self._end = f"\0<{self._nonce}", f"\0>{self._nonce}"
        environment.extend(generation_marks=(self._begin, self._end), has_generation_tag=False)
        tree = environment.parse(source)
        self._read_keys = _find_read_keys(tree)
        self._template = environment.from_string(tree)
        has_tag: bool = environment.has_generation_tag  # type: ignore[attr-defined]
        self._has_generation_tag = has_tag
        self._tokens = tokens

    def render(self, conversation: dict[str, Any]) -> tuple[str, Spans]:
        """Render a conversation, and find what the assistant says in it.

        If the template marks it with ``{% generation %}``, these are the turns of the assistant.
        Else a turn is what the conversation up to the turn has more than the conversation before
        it, with the generation prompt.

        Args:
            conversation: ``messages``, and the other variables of the template; and ``silent``, the
                numbers of messages that are not learned, which the template does not see.

        Returns:
            The text, and the ranges of its characters that are learned, in order.

        Raises:
            ValueError: the turns of the assistant cannot be found, there are none, the template
                leaves out a part of the conversation, or the text is too long.
            Exception: whatever the template raises.
        """
        silent = frozenset(conversation.get("silent", ()))
        conversation = {key: value for key, value in conversation.items() if key != "silent"}
        messages = conversation["messages"] = _name_reasoning(conversation["messages"])
        turns = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        is_silent = bool(silent) and silent.issuperset(turns)
        allowed = _CHARACTERS_PER_CHARACTER * len(json.dumps(conversation))
        limit = max(_LEAST_LIMIT, allowed)
        marked = self._render(conversation, messages, limit)
        self._refuse_losses(conversation, marked, limit)
        if self._has_generation_tag:
            text, spans = self._find_marks(marked)
            if silent and not is_silent:
                spans = self._without_silent(conversation, text, spans, turns, silent, limit)
        else:
            learned = [number for number in turns if number not in silent]
            text, spans = marked, self._find_turns(conversation, marked, learned, limit)
        if is_silent:
            return text, []
        if not any(begin < end for begin, end in spans):
            raise ValueError(
                f"the chat template gives no text of the role {ASSISTANT!r}, so nothing is "
                "learned; remove the conversation"
            )
        return text, spans

    def ask(self, messages: list[Any]) -> str:
        """Render messages, and after them what the template puts before an answer.

        Raises:
            ValueError: the template fails, or the text is too long.
            Exception: whatever the template raises.
        """
        limit = max(_LEAST_LIMIT, _CHARACTERS_PER_CHARACTER * len(json.dumps(messages)))
        text = self._render({"messages": messages}, messages, limit, asks_for_answer=True)
        return self._find_marks(text)[0] if self._has_generation_tag else text

    def _render(
        self,
        conversation: dict[str, Any],
        messages: list[Any],
        limit: int,
        *,
        asks_for_answer: bool = False,
    ) -> str:
        variables = {
            **self._tokens,
            "tools": None,
            "documents": None,
            **conversation,
            "messages": messages,
            "add_generation_prompt": asks_for_answer,
        }
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > limit:
                    raise ValueError(
                        f"the chat template makes more than {limit:,} characters of it; give "
                        "another template"
                    )
        except jinja2.TemplateError as error:
            if len(messages) == len(conversation["messages"]):
                raise ValueError(f"the chat template fails: {error}") from None
            raise ValueError(
                f"the chat template fails on the first {len(messages)} messages alone: {error}; "
                "give a template with {% generation %} around what is learned, by --chat-template"
            ) from None
        return "".join(pieces)

    def _refuse_losses(self, conversation: dict[str, Any], text: str, limit: int) -> None:
        """Raise ValueError if the template leaves out a part of the conversation.

        These are the reasoning, the calls of tools and all tools, unless the template reads their
        keys anywhere: some leave out the reasoning of earlier turns on purpose. And these are all
        messages of a role, such as the system's, or all but the first of them.

        Args:
            conversation: the conversation.
            text: what ``_render`` makes of it.
            limit: as in ``_render``.
        """

        def is_lost(changed: dict[str, Any], messages: list[Any]) -> bool:
            try:
                return self._render(changed | {"messages": messages}, messages, limit) == text
            except Exception:  # whatever a template raises: it fails, so it reads what has changed
                return False

        way_out = "or give another template by --chat-template"
        messages = conversation["messages"]
        for keys in (_REASONING, ("tool_calls",), ("tools",)):
            if not self._read_keys.isdisjoint(keys):
                continue
            others = [_without(message, keys) for message in messages]
            # Other variables of these names are switches, such as ``thinking``.
            without = _without(conversation, keys) if keys == ("tools",) else conversation
            is_changed = others != messages or without.keys() != conversation.keys()
            if is_changed and is_lost(without, others):
                raise ValueError(
                    f"the chat template does not read {' or '.join(keys)}, so a part of the "
                    f"conversation would be lost; remove the key, {way_out}"
                )
        roles = {message["role"] for message in messages} - {"user", ASSISTANT}
        for role in sorted(roles):
            places = [
                place
                for place, message in enumerate(messages)
                if message["role"] == role and message.get("content")
            ]
            # Some templates read a system message only if it is the first.
            for chosen in (places, places[1:]):
                others = [
                    _change(message) if place in chosen else message
                    for place, message in enumerate(messages)
                ]
                if others != messages and is_lost(conversation, others):
                    raise ValueError(
                        f"the chat template leaves out messages of the role {role!r}; remove them, "
                        f"{way_out}"
                    )

    def _find_marks(self, marked: str) -> tuple[str, Spans]:
        """Return the text without marks, and the ranges between them."""
        text, spans = "", []
        begin = depth = 0
        for piece in re.split(f"({self._begin}|{self._end})", marked):
            if piece == self._begin:
                begin = begin if depth else len(text)
                depth += 1
            elif piece == self._end:
                depth -= 1
                if depth == 0:
                    spans.append((begin, len(text)))
            else:
                text += piece
        if depth or self._nonce in text.lower():
            raise ValueError(
                "the chat template changes a text after {% generation %} has marked it, so the "
                "assistant's part is unknown; put {% generation %} around the text that it prints"
            )
        return text, spans

    def _without_silent(
        self,
        conversation: dict[str, Any],
        text: str,
        spans: Spans,
        turns: list[int],
        silent: frozenset[int],
        limit: int,
    ) -> Spans:
        """Return the marked ranges without those of silent messages.

        The range of a message is the one that changes when the message does. This is tried, because
        a template may mark a turn in several pieces, or leave one out.

        Args:
            conversation: the conversation.
            text: the text of it, without marks.
            spans: the marked ranges of ``text``.
            turns: the numbers of the messages of the assistant.
            silent: the numbers of messages that are not learned.
            limit: as in ``_render``.

        Raises:
            ValueError: the ranges and the messages are not one to one.
        """
        messages = conversation["messages"]
        pieces = [text[begin:end] for begin, end in spans]
        kept = list(spans)
        for place, number in enumerate(turns):
            if number not in silent:
                continue
            others = [*messages[:number], _change(messages[number]), *messages[number + 1 :]]
            changed, ranges = self._find_marks(self._render(conversation, others, limit))
            others_pieces = [changed[begin:end] for begin, end in ranges]
            same = [a == b for a, b in zip(pieces, others_pieces, strict=False)]
            if not (
                len(pieces) == len(others_pieces) == len(turns)
                and [index for index, is_same in enumerate(same) if not is_same] == [place]
            ):
                raise ValueError(
                    f"the chat template does not put one {{% generation %}} around each turn of "
                    f"the role {ASSISTANT!r}, so the part of message {number + 1}, which is not to "
                    "be learned, is unknown; give another template by --chat-template, or remove "
                    "the conversation"
                )
            kept.remove(spans[place])
        return kept

    def _find_turns(
        self, conversation: dict[str, Any], text: str, turns: list[int], limit: int
    ) -> Spans:
        """Return the range of each message of ``turns``, by rendering the turns before it."""
        messages = conversation["messages"]
        spans = []
        for number in turns:
            before = self._render(conversation, messages[:number], limit, asks_for_answer=True)
            until = self._render(conversation, messages[: number + 1], limit)
            if until.startswith(before) and text.startswith(until):
                spans.append((len(before), len(until)))
                continue
            without_prompt = self._render(conversation, messages[:number], limit)
            if until.startswith(without_prompt) and text.startswith(until):
                raise ValueError(
                    f"the chat template does not begin message {number + 1} with what it puts "
                    "before an answer (add_generation_prompt), so the assistant's part is unknown; "
                    "give a template with {% generation %} around what is learned, by "
                    "--chat-template"
                )
            raise ValueError(
                f"the chat template renders the turns up to message {number + 1} otherwise "
                "when others follow, so the assistant's part is unknown; give a template with "
                "{% generation %} around what is learned, by --chat-template"
            )
        return spans


class ChatTemplates:
    """The chat templates of a tokenizer, of which each conversation gets one, as in transformers.

    Args:
        default: the template.
        tokens: as for ``ChatTemplate``.
        tool_use: the template of conversations with tools, also with an empty list of them; None:
            the same one.

    Raises:
        jinja2.TemplateError: as ``ChatTemplate``.
    """

    def __init__(self, default: str, tokens: dict[str, str], tool_use: str | None) -> None:
        self._default = ChatTemplate(default, tokens)
        self._tool_use = self._default if tool_use is None else ChatTemplate(tool_use, tokens)

    def render(self, conversation: dict[str, Any]) -> tuple[str, Spans]:
        """Render a conversation as ``ChatTemplate.render``."""
        has_tools = conversation.get("tools") is not None
        return (self._tool_use if has_tools else self._default).render(conversation)

    def ask(self, messages: list[Any]) -> str:
        """Render messages as ``ChatTemplate.ask``."""
        return self._default.ask(messages)


def _name_reasoning(messages: list[Any]) -> list[Any]:
    """Return messages whose reasoning has all names that templates read, as transformers does."""
    named = []
    for message in messages:
        found = [message[key] for key in _REASONING if message.get(key) is not None]
        if found:
            message = {"thinking": found[0], **message, "reasoning_content": found[0]}
        named.append(message)
    return named


def _find_read_keys(tree: nodes.Template) -> frozenset[str]:
    """Return the keys of messages that a template reads, and ``tools`` if it reads that variable.

    A key of any other object counts as one of a message, except those of a ``namespace``.
    """
    namespaces = {
        statement.target.name
        for statement in tree.find_all(nodes.Assign)
        if isinstance(statement.target, nodes.Name)
        and isinstance(statement.node, nodes.Call)
        and isinstance(statement.node.node, nodes.Name)
        and statement.node.node.name == "namespace"
    }
    found: set[object] = set()
    for attribute in tree.find_all(nodes.Getattr):
        owner = attribute.node
        if not (isinstance(owner, nodes.Name) and owner.name in namespaces):
            found.add(attribute.attr)
    found.update(_constant(item.arg) for item in tree.find_all(nodes.Getitem))
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "get":
            found.update(map(_constant, call.args[:1]))
    for comparison in tree.find_all(nodes.Compare):
        if comparison.ops[0].op in ("in", "notin"):
            found.add(_constant(comparison.expr))
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name in _FILTERS_OF_KEYS:
            found.update(map(_constant, filtered.args[:1]))
        found.update(_constant(each.value) for each in filtered.kwargs if each.key == "attribute")
    found.update(name.name for name in tree.find_all(nodes.Name) if name.name == "tools")
    return frozenset(key for key in found if isinstance(key, str))


def _constant(node: nodes.Node) -> object:
    """Return the value of a literal; None for another expression."""
    return node.value if isinstance(node, nodes.Const) else None


def _without(entry: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a message or a conversation without those of ``keys`` that have a content."""
    return {key: value for key, value in entry.items() if key not in keys or not value}


def _change(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with another content, or with other calls of tools if it has none."""
    if isinstance(message.get("content"), str):
        return {**message, "content": f"{message['content']}x"}
    calls = json.loads(json.dumps(message.get("tool_calls")))
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            function["name"] = f"{function.get('name')}x"
    return {**message, "tool_calls": calls}


class _GenerationTag(Extension):
    """The tag ``{% generation %} ... {% endgeneration %}``: marks stand around its text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        self.environment.has_generation_tag = True  # type: ignore[attr-defined]
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        begin, end = self.environment.generation_marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _make_dict(*items: Any, **values: Any) -> dict[Any, Any]:
    return dict(*items, **values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text. Jinja's own filter would escape characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
