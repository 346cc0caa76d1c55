"""Turn prompts into tokens, and new tokens into text.

A tokenizer.json works here as in transformers: it adds the token that begins a text, if it has
one, and the name of a special token in a prompt is that token. But what it puts after a text is
left out, because a prompt goes on. ``prepare`` adds none of these to documents. As there, the file
runs in a process of its own.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from composer3d.data.chat_settings import read_chat_settings
from composer3d.data.documents import END_OF_DOCUMENT
from composer3d.data.special_tokens import read_own_begins
from composer3d.data.tokenizer import (
    USUAL_ENDS,
    ChatSettings,
    TokenizerProcess,
    ends_of,
    name_failures,
    read_tokenizer,
    second_beginnings,
    tokenizer_file,
)
from composer3d.facts.errors import DataError
from composer3d.facts.text import one_line

# What to do if --chat finds no template.
NO_TEMPLATE = "leave --chat out, or give a folder that has one by --tokenizer"


class PromptTokenizer:
    """A tokenizer that makes each byte of UTF-8 a token. Its subclass runs a tokenizer.json.

    Attributes:
        name: for messages.
        end: the token that ends a text; None if none is known.
        begin: the token that begins a text by the files of the tokenizer; None if they name none.
        repeated: the prompts that would have begun with two tokens that begin a text.
    """

    name = "bytes"
    end: int | None = END_OF_DOCUMENT
    begin: int | None = None
    repeated = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text.

        Raises DataError if the tokenizer fails.
        """
        return [list(text.encode()) for text in texts]

    def encode_as_is(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        """Return the tokens of a text, also if it then begins with two tokens that begin a text.

        Args:
            text: the text.
            adds_special_tokens: whether it gets the special tokens that the tokenizer adds. False
                needs a tokenizer that adds none by default.

        Raises DataError if the tokenizer fails.
        """
        return list(text.encode())

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a conversation, with what stands before an answer.

        ``messages`` have the keys ``role`` and ``content``.

        Raises DataError if there is no chat template, or it fails.
        """
        raise DataError("--chat needs a chat template, which a tokenizer of bytes does not have")

    def decode(self, tokens: Sequence[int], *, skips_special: bool = True) -> str:
        """Return the text of tokens, without special tokens if ``skips_special``.

        Bytes that are not UTF-8, such as the first half of a character, become U+FFFD.

        Raises DataError if the tokenizer fails.
        """
        text = bytes(token for token in tokens if token != END_OF_DOCUMENT and token < 256)
        return text.decode(errors="replace")

    def close(self) -> None:
        """End the process of the tokenizer, if there is one."""


class _FileTokenizer(PromptTokenizer):
    def __init__(
        self,
        name: str,
        content: bytes,
        ends: Sequence[str | int],
        *,
        begins: Sequence[str],
        adds_special_tokens: bool,
        chat: ChatSettings | None,
    ) -> None:
        self.name, self._adds_special_tokens = name, adds_special_tokens
        self._process = TokenizerProcess(
            content,
            ends,
            begins=begins,
            special_as_text=False,
            adds_special_tokens=adds_special_tokens,
            chat=chat,
        )
        with contextlib.ExitStack() as on_error, name_failures(name):
            on_error.callback(self.close)
            vocabulary = self._process.load()
            on_error.pop_all()
        self.end = vocabulary.ends[0].number if vocabulary.ends else None
        self.begin = vocabulary.begins[0] if vocabulary.begins else None
        self._own_begin = vocabulary.begin if adds_special_tokens else ()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        with name_failures(self.name):
            counts, tokens = self._process.encode([text.encode() for text in texts])
        surplus = second_beginnings(tokens, counts, self._own_begin)
        self.repeated += int((surplus > 0).sum())
        stops = np.cumsum(counts)
        starts = stops - counts + surplus
        return [tokens[start:stop].tolist() for start, stop in zip(starts, stops, strict=True)]

    def encode_as_is(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        assert adds_special_tokens or not self._adds_special_tokens
        with name_failures(self.name):
            _, tokens = self._process.encode([text.encode()], as_prompts=adds_special_tokens)
        return tokens.tolist()

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        with name_failures(self.name):
            return self._process.ask(messages)

    def decode(self, tokens: Sequence[int], *, skips_special: bool = True) -> str:
        with name_failures(self.name):
            return self._process.decode(tokens, skips_special=skips_special)

    def close(self) -> None:
        self._process.close()


def make_prompt_tokenizer(
    name: str,
    content: bytes,
    *,
    ends: Sequence[str | int] = (),
    begins: Sequence[str] = (),
    adds_special_tokens: bool = True,
    chat: ChatSettings | None = None,
) -> PromptTokenizer:
    """Start a tokenizer. The caller must close it.

    Args:
        name: for messages.
        content: of the tokenizer.json.
        ends: the names or numbers of tokens that may end a text, best first. Empty: usual names.
        begins: the names of tokens that may begin a text, best first.
        adds_special_tokens: whether a prompt gets the special tokens that the tokenizer adds.
        chat: the chat template, for ``ask``.

    Raises:
        DataError: the tokenizer or the template cannot be loaded.
    """
    return _FileTokenizer(
        one_line(name),
        content,
        ends or USUAL_ENDS,
        begins=begins,
        adds_special_tokens=adds_special_tokens,
        chat=chat,
    )


def open_prompt_tokenizer(
    path: str, *, adds_special_tokens: bool = True, has_chat: bool = False
) -> PromptTokenizer:
    """Start the tokenizer in a file, or the one of bytes. The caller must close it.

    Args:
        path: "bytes", or the path of a tokenizer.json or of a folder that has one.
        adds_special_tokens: as in ``make_prompt_tokenizer``.
        has_chat: whether to read the chat template beside it, for ``ask``.

    Raises:
        DataError: the file cannot be read, or the tokenizer cannot be loaded, or there is no chat
            template.
    """
    if path == "bytes":
        return PromptTokenizer()
    file = tokenizer_file(path)
    return make_prompt_tokenizer(
        f"--tokenizer {one_line(path)}",
        read_tokenizer(file),
        ends=ends_of(file, None),
        begins=read_own_begins(file),
        adds_special_tokens=adds_special_tokens,
        chat=read_chat_settings(Path(path), None, option="--chat", way_out=NO_TEMPLATE)
        if has_chat
        else None,
    )


class TextStream:
    """Turns tokens that arrive one by one into pieces of text.

    Args:
        tokenizer: decodes them.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._text = ""

    def add(self, token: int) -> str:
        """Return the text that a further token adds.

        Text after the last whole character waits for the next token. So do spaces at its end, as
        some tokenizers join or drop them when they know what follows.
        """
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        whole = text.rstrip("\ufffd ")
        return self._advance(whole) if whole.startswith(self._text) else ""

    def finish(self) -> str:
        """Return the text that is still missing."""
        text = self._tokenizer.decode(self._tokens)
        return self._advance(text) if text.startswith(self._text) else ""

    def _advance(self, text: str) -> str:
        piece = text[len(self._text) :]
        self._text = text
        return piece
