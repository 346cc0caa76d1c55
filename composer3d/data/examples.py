"""Examples for fine-tuning: prompts with answers, and conversations, of which a part is learned.

A line of JSONL is an example, and becomes a document: its text is the example as JSON. The tokens
of answers are learned, and so is the end of the document after an answer. In a conversation, the
turns of the assistant are learned, as the chat template renders them; the end of the document is
learned only if the template itself ends the conversation with that token.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from composer3d.data.chat_settings import read_chat_settings
from composer3d.data.documents import END_OF_DOCUMENT, Document, refuse_end_of_document
from composer3d.data.example_lines import (
    ASSISTANT,
    SILENT,
    Pair,
    read_conversation,
    read_object,
    read_pair,
    turns_of,
)
from composer3d.data.tokenizer import (
    USUAL_ENDS,
    ChatFailure,
    ChatSettings,
    Encoded,
    FileTokenizer,
    Tokenizer,
    TokenizerFailure,
    ends_of,
    is_kept,
    read_tokenizer,
    refuse_end_of_bytes,
    second_beginnings,
    tokenizer_file,
)
from composer3d.facts.errors import DataError
from composer3d.facts.text import one_line

# Conversations that every chat template should render, unless it refuses a role.
_ROLES_TO_TRY = (
    ("user", ASSISTANT, "user", ASSISTANT),
    ("system", "user", ASSISTANT, "user", ASSISTANT),
)


@dataclass(frozen=True)
class Answers:
    """JSONL of prompts with answers.

    Attributes:
        prompt: the key of the prompt, a text that is not learned.
        answer: the key of the answer, a text that is learned.
    """

    kind: ClassVar[str] = "answers"

    prompt: str = "prompt"
    answer: str = "answer"

    def parse(self, line: bytes, place: str) -> bytes:
        """Return the example on a line, as JSON. Raises DataError, which names ``place``."""
        wanted = f'{{"{one_line(self.prompt)}": "...", "{one_line(self.answer)}": "..."}}'
        entry = read_object(line, place, wanted)
        pair = read_pair(entry, self.prompt, self.answer, place)
        # The text of a document decides its split, so a learned one keeps its two entries.
        return _as_json(pair[:2] if pair.learned else pair, place)


@dataclass(frozen=True)
class Chat:
    """JSONL of conversations.

    Attributes:
        messages: the key of the messages.
        template: the file of the chat template; None: the one of the tokenizer.
    """

    kind: ClassVar[str] = "chat"

    messages: str = "messages"
    template: str | None = None

    def parse(self, line: bytes, place: str) -> bytes:
        """Return the conversation on a line, as JSON. Raises DataError, which names ``place``."""
        wanted = f'{{"{one_line(self.messages)}": [{{"role": "...", "content": "..."}}, ...]}}'
        read = read_conversation(read_object(line, place, wanted), self.messages, place)
        conversation: dict[str, Any] = {**read.variables, "messages": read.messages}
        if read.tools is not None:
            conversation["tools"] = read.tools
        # The text of a document decides its split, so a learned one has no further entry.
        if read.silent:
            conversation[SILENT] = read.silent
        return _as_json(conversation, place)


def identity_of(text: bytes) -> bytes:
    """Return what equal examples have in common: their JSON, with the keys of objects in order.

    Args:
        text: from ``parse``. A template may print the keys of objects in the order of the line.
    """
    return json.dumps(json.loads(text), ensure_ascii=False, sort_keys=True).encode()


Examples = Answers | Chat


def open_example_tokenizer(name: str, end: str | None, examples: Examples) -> Tokenizer:
    """Open a tokenizer whose documents are examples. The caller must close it.

    Args:
        name: the path of a tokenizer.json; or of a folder that has one, and for conversations also
            a tokenizer_config.json or a chat_template.jinja; or "bytes", for answers only.
        end: as for ``tokenizer.open_tokenizer``.
        examples: the kind of the examples.

    Raises:
        DataError: a file cannot be read or loaded, or there is no chat template.
    """
    if name == "bytes":
        if isinstance(examples, Chat):
            raise DataError(
                "--kind chat needs a tokenizer with special tokens: give a Hugging Face folder in "
                "place of --tokenizer bytes"
            )
        refuse_end_of_bytes(end)
        return _ByteAnswerTokenizer()
    file = tokenizer_file(name)
    content = read_tokenizer(file)
    shown, ends = one_line(file), ends_of(file, end)
    if isinstance(examples, Answers):
        return _AnswerTokenizer(shown, content, ends)
    chat = read_chat_settings(
        Path(name),
        examples.template,
        option="--kind chat",
        way_out="give one by --chat-template",
    )
    # Many models end turns with the token that ends a text. Then another one ends documents.
    candidates = ends if end is not None else tuple(dict.fromkeys((*ends, *USUAL_ENDS)))
    return _ChatTokenizer(shown, content, candidates, chat)


class _ByteAnswerTokenizer(Tokenizer):
    """Makes each byte of prompts and answers a token."""

    def encode(self, documents: Sequence[Document]) -> Encoded:
        tokens, lengths, mask = bytearray(), [], bytearray()
        for document in documents:
            pair = Pair(*json.loads(document.text))
            prompt, answer = pair.prompt.encode(), pair.answer.encode()
            for text in (prompt, answer):
                refuse_end_of_document(document._replace(text=text))
            tokens += prompt + answer + bytes([END_OF_DOCUMENT])
            mask += bytes(len(prompt)) + bytes([pair.learned]) * (len(answer) + 1)
            lengths.append(len(prompt) + len(answer) + 1)
        return Encoded(
            np.frombuffer(bytes(tokens), dtype=np.uint8).astype(self.dtype),
            np.array(lengths, dtype=np.int64),
            np.frombuffer(bytes(mask), dtype=np.uint8),
        )


class _AnswerTokenizer(FileTokenizer):
    """Encodes prompts and answers apart, as a model meets them that goes on with a prompt.

    A prompt begins with the special tokens that the tokenizer adds, as in ``generate``.
    """

    special_as_text = False

    def encode(self, documents: Sequence[Document]) -> Encoded:
        pairs = [Pair(*json.loads(document.text)) for document in documents]
        with self._name_failures(documents):
            counts, tokens = self._worker.encode(
                [pair.prompt.encode() for pair in pairs], as_prompts=True
            )
            answers = self._worker.encode([pair.answer.encode() for pair in pairs])

        surplus = second_beginnings(tokens, counts, self._begin)
        prompts = counts - surplus, tokens[is_kept(counts, surplus)]
        for (counts, tokens), name in ((prompts, "prompt"), (answers, "answer")):
            self._check_tokens(documents, tokens, np.cumsum(counts))
            for document, pair, count in zip(documents, pairs, counts, strict=True):
                if count == 0 and getattr(pair, name).strip():
                    raise DataError(
                        f"{document.place}: no character of the {name} has "
                        f"a token in {self.name}; remove the example, or give another tokenizer"
                    )
        lengths = prompts[0] + answers[0] + 1
        stops = np.cumsum(lengths)
        is_prompt = np.zeros(int(stops[-1]), dtype=np.bool_)
        for start, count in zip(stops - lengths, prompts[0], strict=True):
            is_prompt[start : start + count] = True
        is_answer = ~is_prompt
        is_answer[stops - 1] = False
        tokens = np.full(len(is_prompt), self.end, dtype=self.dtype)
        tokens[is_prompt], tokens[is_answer] = prompts[1], answers[1]
        is_learned = ~is_prompt & np.repeat([pair.learned for pair in pairs], lengths)
        return Encoded(
            tokens, lengths, is_learned.astype(np.uint8), repeated=int((surplus > 0).sum())
        )


class _ChatTokenizer(FileTokenizer):
    """Renders conversations with a chat template, and encodes them.

    The first of ``ends`` that stands nowhere within a rendered conversation ends documents.

    Attributes:
        settings: what of the template determines the tokens, as JSON values.
    """

    special_as_text = False

    def __init__(
        self, name: str, content: bytes, ends: Sequence[str | int], chat: ChatSettings
    ) -> None:
        super().__init__(name, content, ends, chat)
        self.template = chat.template
        # A key without a value is left out: an interrupted prepare that had no such key goes on.
        self.settings = {key: value for key, value in chat._asdict().items() if value is not None}
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            if len(self._ends) > 1:
                inner = self._tokens_within()
                outer = [end for end in self._ends if end.number not in inner]
                self._end_name, self.end = (outer or self._ends)[0]
            self._begin = self._find_begin(chat.tokens.get("bos_token", "")) or self._begin
            on_error.pop_all()

    def _tokens_within(self) -> set[int]:
        """Return the tokens of small conversations, without their last ones."""
        within: set[int] = set()
        for roles in _ROLES_TO_TRY:
            messages = [{"role": role, "content": "a"} for role in roles]
            conversation = {"messages": messages, SILENT: list(range(len(messages)))}
            # A template may refuse some roles. What fails always is reported with its document.
            with contextlib.suppress(ChatFailure, TokenizerFailure):
                chats = self._worker.encode_chats([json.dumps(conversation).encode()])
                within.update(chats.tokens[:-1].tolist())
        return within

    def _find_begin(self, name: str) -> tuple[int, ...]:
        """Return the token that begins a text by the name that templates have for it."""
        with contextlib.suppress(TokenizerFailure):
            _, tokens = self._worker.encode([name.encode()])
            if len(tokens) == 1:
                return (int(tokens[0]),)
        return ()

    def encode(self, documents: Sequence[Document]) -> Encoded:
        try:
            with self._name_failures(documents):
                chats = self._worker.encode_chats([doc.text for doc in documents])
        except ChatFailure as error:
            raise DataError(f"{documents[error.number].place}: {error}") from None

        surplus = second_beginnings(chats.tokens, chats.counts, self._begin)
        kept = is_kept(chats.counts, surplus)
        counts, tokens, mask = chats.counts - surplus, chats.tokens[kept], chats.mask[kept]
        stops = np.cumsum(counts)
        # A conversation that ends with the end of a document needs no second one.
        has_end = (counts > 0) & (tokens[np.maximum(stops - 1, 0)] == self.end)
        is_inner = np.ones(len(tokens), dtype=np.bool_)
        is_inner[stops[has_end] - 1] = False
        self._check_tokens(documents, tokens[is_inner], np.cumsum(counts - has_end))
        missing_ends = stops[~has_end]
        tokens = np.insert(tokens, missing_ends, self.end).astype(self.dtype)
        mask = np.insert(mask, missing_ends, 0)
        lengths = counts + ~has_end
        learned = np.add.reduceat(mask, np.cumsum(lengths) - lengths, dtype=np.int64)
        for number in np.flatnonzero(learned == 0).tolist():
            conversation = json.loads(documents[number].text)
            turns = turns_of(conversation["messages"])
            if not set(conversation.get(SILENT, ())).issuperset(turns):
                raise DataError(
                    f"{documents[number].place}: no character of the assistant has a token in "
                    f"{self.name}; remove the conversation, or give another tokenizer"
                )
        return Encoded(tokens, lengths, mask, chats.turn_ends, repeated=int((surplus > 0).sum()))


def settings_of(examples: Examples, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what determines tokens and masks besides the tokenizer, as JSON values."""
    if isinstance(examples, Answers):
        return {"kind": examples.kind, "prompt": examples.prompt, "answer": examples.answer}
    assert isinstance(tokenizer, _ChatTokenizer)
    return {"kind": examples.kind, "messages": examples.messages, "chat": tokenizer.settings}


def _as_json(value: Any, place: str) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (
        ValueError,
        RecursionError,
    ) as error:  # a lone surrogate, or a number that is not finite
        raise DataError(f"{place}: {one_line(error, 300)}; correct the line") from None
