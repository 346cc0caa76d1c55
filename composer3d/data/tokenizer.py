"""Turn documents into tokens: bytes as they are, or with a ``tokenizer.json`` of Hugging Face.

A tokenizer.json runs in a process of its own (``tokenizer_worker``), because it can panic, run for
ever or take all memory.
"""

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from composer3d.data.documents import (
    END_OF_DOCUMENT,
    LONGEST_TEXT,
    Document,
    refuse_end_of_document,
    refuse_long,
)
from composer3d.data.special_tokens import read_own_ends
from composer3d.facts.errors import DataError
from composer3d.facts.files import read_plain
from composer3d.facts.model_files import VOCABULARY_NAMES
from composer3d.facts.ranges import MOST_VOCAB
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import TOKENIZER
from composer3d.recipe.tokenizers import code_that_writes_tokenizer
from composer3d.recipe.values import join_with_or

FILE_BYTES = 64 << 20  # in a tokenizer.json; the largest published ones have half of that
_WORKER = Path(__file__).with_name("tokenizer_worker.py")

# The tokenizers library encodes a whole document at once, and takes this much memory for each byte.
DOCUMENT_BYTES = 16 << 20
_MEMORY_PER_BYTE = 156

# Limits of the worker process. CPU time is limited, not wall-clock time, so that the limits do not
# depend on how busy the machine is. The slowest of the usual tokenizers takes some seconds for a
# megabyte of text. A tokenizer.json of 40 MB takes 5 times its size in memory.
_LOAD_S = 2.0
_LOAD_S_PER_MB = 2.0
_ENCODE_S = 2.0
_ENCODE_S_PER_MB = 20.0
_LOAD_MEMORY_PER_BYTE = 24  # per byte of the tokenizer.json
_BASE_MEMORY = 256 << 20
_THREAD_MEMORY = 8 << 20  # for each core, should tokenizers run a thread on each

# Wall-clock time in which an answer must come. This limit ends a process that waits without using
# CPU time.
_WALL_S = 30.0
_WALL_PER_CPU_S = 20

# Names of tokens that end a document, for a tokenizer whose files name none. The first one that a
# vocabulary has is used, so tokens of pretraining come before tokens of chats.
USUAL_ENDS = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "[EOS]",
)


# Files of tokenizers that are not read.
OTHER_TOKENIZERS = (*VOCABULARY_NAMES, "spiece.model", "sentencepiece.bpe.model")


class Encoded(NamedTuple):
    """The tokens of several documents.

    Attributes:
        tokens: the tokens of all documents, with the end-of-document token after each: 1-D, in the
            ``dtype`` of the tokenizer.
        lengths: the number of tokens of each document, with its end: int64, 1-D.
        mask: uint8, 1-D: 1 for each token that is learned, and else 0. None: all are learned.
        turn_ends: the special tokens that end learned turns of conversations.
        repeated: the documents that would have begun with two tokens that begin a text.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None = None
    turn_ends: frozenset[int] = frozenset()
    repeated: int = 0


class Tokenizer:
    """A tokenizer that makes each byte a token. Its subclass runs a tokenizer.json.

    Attributes:
        name: "bytes", or the path of the tokenizer.json.
        vocab: the size of the vocabulary; every token is below it.
        end: the token after each document, which occurs in no text.
        dtype: the dtype of the tokens: little-endian uint16 if every token fits, else uint32.
        content: the content of the tokenizer.json; None for bytes.
        template: the chat template that renders its documents; None if they are no conversations.
        longest: the size of the largest document that is accepted, in bytes.
    """

    name = "bytes"
    vocab = 256
    end = END_OF_DOCUMENT
    dtype: np.dtype[Any] = np.dtype("<u2")
    content: bytes | None = None
    template: str | None = None
    longest = LONGEST_TEXT

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Turn documents into tokens.

        Raises:
            DataError: a text is too long, the tokenizer cannot read it, none of its characters has
                a token, or it contains ``end``. The message names the document, or the first one
                of ``documents`` if the tokenizer itself fails.
        """
        for document in documents:
            refuse_end_of_document(document)
        joined = b"".join(document.text + b"\0" for document in documents)
        lengths = np.array([len(document.text) + 1 for document in documents], dtype=np.int64)
        return Encoded(np.frombuffer(joined, dtype=np.uint8).astype(self.dtype), lengths)

    def another(self) -> "Tokenizer":
        """Return an equal tokenizer, with a process of its own. The caller must close it."""
        return self

    def kill(self) -> None:
        """End the process of the tokenizer, if there is one. Another thread may be using it."""

    def close(self) -> None:
        """End the process of the tokenizer, if there is one, and free its pipes."""


class TokenizerPool:
    """Several tokenizers that work at the same time, each in a process of its own.

    A process is started when there is work for it. ``close`` ends them all.

    Args:
        first: the tokenizer to multiply. The caller still must close it.
        processes: the number of tokenizers, at least 1.

    Attributes:
        processes: the same.
    """

    def __init__(self, first: Tokenizer, processes: int) -> None:
        self.processes = processes
        self._first = first
        self._idle: deque[Tokenizer] = deque([first])
        self._all: list[Tokenizer] = []  # without the first
        self._is_closed = False
        self._threads = ThreadPoolExecutor(processes, "tokenizer")

    def encode(self, documents: Sequence[Document]) -> "Future[Encoded]":
        """Let the next idle tokenizer encode documents, as ``Tokenizer.encode`` does."""
        return self._threads.submit(self._encode, documents)

    def close(self) -> None:
        """End the processes, also those that are at work, and wait for the threads."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for tokenizer in [self._first, *self._all]:
            tokenizer.kill()  # a thread that waits for its answer gets an error
        self._threads.shutdown()
        for tokenizer in self._all:
            tokenizer.close()

    def _encode(self, documents: Sequence[Document]) -> Encoded:
        try:
            tokenizer = self._idle.pop()
        except IndexError:  # there are no more threads than tokenizers
            tokenizer = self._first.another()
            self._all.append(tokenizer)
        if self._is_closed:
            raise CancelledError
        try:
            return tokenizer.encode(documents)
        finally:
            self._idle.append(tokenizer)


def open_tokenizer(name: str, end: str | None) -> Tokenizer:
    """Open a tokenizer. The caller must close it.

    Args:
        name: "bytes", or the path of a tokenizer.json.
        end: the name of the token after each document. None: the one that the files beside the
            tokenizer.json name (see ``special_tokens``), or else the first usual name that the
            tokenizer.json has. It must be None for "bytes".

    Raises:
        DataError: the file cannot be read or loaded, its vocabulary is too large, it has no token
            that can end a document, or ``end`` is given for "bytes".
    """
    if name == "bytes":
        refuse_end_of_bytes(end)
        return Tokenizer()
    path = tokenizer_file(name)
    return FileTokenizer(one_line(path), read_tokenizer(path), ends_of(path, end))


def refuse_end_of_bytes(end: str | None) -> None:
    """Raise DataError if the user names the token that ends a document of bytes."""
    if end is not None:
        raise DataError(
            f"--eod {one_line(end)} is not used with --tokenizer bytes, because byte 0 ends a "
            "document; remove it"
        )


def tokenizer_file(name: str) -> Path:
    """Return the path of the tokenizer.json that a name means: of the file, or of its folder.

    Raises DataError if the folder has none. The message names the tokenizer that it has instead.
    """
    path = Path(name)
    if not path.is_dir():
        return path
    file = path / TOKENIZER
    if os.path.lexists(file):
        return file
    shown = one_line(path)
    others = [other for other in OTHER_TOKENIZERS if (path / other).exists()]
    others += sorted(one_line(file.name) for file in path.glob("*.tiktoken"))[:1]
    if not others:
        raise DataError(
            f"--tokenizer {shown}: is a folder, not a plain file; give bytes, the path of a "
            f"{TOKENIZER}, or a folder that has one"
        )
    raise DataError(
        f"--tokenizer {shown}: the folder has {others[0]}, which is not read, and no {TOKENIZER}; "
        f"write one with transformers: {code_that_writes_tokenizer(path)}, and give that folder"
    )


def ends_of(path: Path, end: str | None) -> tuple[str | int, ...]:
    """Return the tokens that may end a document, best first.

    Args:
        path: of the tokenizer.json.
        end: the one that the user names; None: those that the files beside it name, or the usual
            ones if there are none.

    Raises:
        DataError: a file beside it cannot be used.
    """
    return (end,) if end is not None else read_own_ends(path) or USUAL_ENDS


def read_tokenizer(path: str | Path) -> bytes:
    """Read a tokenizer.json. Raises DataError if it cannot be read or is too large."""
    try:
        return read_plain(path, limit=FILE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(
            f"--tokenizer {one_line(path)}: {reason or error}; "
            "give bytes, or the path of a tokenizer.json"
        ) from None


def second_beginnings(tokens: np.ndarray, counts: np.ndarray, begin: Sequence[int]) -> np.ndarray:
    """Return how many tokens at the start of each text begin it once more than needed.

    A prompt may begin with the name of the token that begins a text, and a tokenizer or a chat
    template may put that token before it.

    Args:
        tokens: the tokens of all texts: 1-D.
        counts: the number of tokens of each text: 1-D.
        begin: the tokens that begin a text. Empty: no text has too many.

    Returns:
        int64, as long as ``counts``: a multiple of the length of ``begin`` for each text.
    """
    surplus = np.zeros(len(counts), dtype=np.int64)
    length = len(begin)
    if not length:
        return surplus
    starts = np.cumsum(counts) - counts
    numbers = np.flatnonzero(counts >= 2 * length)
    for number in numbers[tokens[starts[numbers] + length] == begin[0]].tolist():
        start, stop = int(starts[number]), int(starts[number] + counts[number])
        while tokens[start : min(start + 2 * length, stop)].tolist() == [*begin, *begin]:
            start += length
        surplus[number] = start - starts[number]
    return surplus


def repeated_beginnings(number: int, what: str) -> str:
    """Return a note for the user: ``number`` texts, named ``what``, had a second beginning."""
    return (
        f"{number:,} {what} begin with the token that begins a text, which the tokenizer or the "
        "chat template adds as well: it stands once"
    )


def is_kept(counts: np.ndarray, surplus: np.ndarray) -> np.ndarray:
    """Return bool, 1-D: False for the first ``surplus`` tokens of each text, and else True."""
    starts = np.cumsum(counts) - counts
    places = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    kept: np.ndarray = places >= np.repeat(surplus, counts)
    return kept


class FileTokenizer(Tokenizer):
    """A tokenizer that runs a tokenizer.json in a process of its own.

    Args:
        name: the path of the tokenizer.json, for messages.
        content: its content.
        ends: names or numbers of tokens that may end a document; the first one that the vocabulary
            has is used.
        chat: as for ``TokenizerProcess``.

    Raises:
        DataError: as ``open_tokenizer``.
    """

    special_as_text = True  # as for ``TokenizerProcess``
    longest = DOCUMENT_BYTES

    def __init__(
        self,
        name: str,
        content: bytes,
        ends: Sequence[str | int],
        chat: "ChatSettings | None" = None,
    ) -> None:
        self.name = name
        self.content = content
        self._chat = chat
        self._worker = TokenizerProcess(
            content, ends, special_as_text=self.special_as_text, chat=chat
        )
        with contextlib.ExitStack() as on_error, name_failures(f"--tokenizer {name}"):
            on_error.callback(self.close)
            vocabulary = _usable(self._worker.load(), ends)
            on_error.pop_all()
        self.vocab, self._ends, self._begin = vocabulary.size, vocabulary.ends, vocabulary.begin
        self._end_name, self.end = self._ends[0]
        self.dtype = np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")

    def another(self) -> Tokenizer:
        assert self.content is not None
        return type(self)(self.name, self.content, (self._end_name,), self._chat)

    def kill(self) -> None:
        self._worker.kill()

    def close(self) -> None:
        self._worker.close()

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Turn documents into tokens, as ``Tokenizer.encode`` does.

        Raises:
            DataError: as ``Tokenizer.encode``.
        """
        for document in documents:
            check_text(document)
        with self._name_failures(documents):
            counts, tokens = self._worker.encode([document.text for document in documents])

        stops = np.cumsum(counts)
        self._check_tokens(documents, tokens, stops)
        # A text without any token would be lost. Only a blank one may be.
        for number in map(int, np.flatnonzero(counts == 0)):
            if not documents[number].text.decode().isspace():
                raise DataError(
                    f"{documents[number].place}: no character of it has a token in {self.name}; "
                    "remove the document, or give a tokenizer that can represent it"
                )
        return Encoded(np.insert(tokens, stops, self.end).astype(self.dtype), counts + 1)

    def _name_failures(self, documents: Sequence[Document]) -> AbstractContextManager[None]:
        """Raise DataError if the tokenizer fails in the body, on one of ``documents``."""
        # The tokenizers library does not say on which text it fails.
        return name_failures(f"{documents[0].place} or soon after: --tokenizer {self.name}")

    def _check_tokens(
        self, documents: Sequence[Document], tokens: np.ndarray, stops: np.ndarray
    ) -> None:
        """Raise DataError if ``end`` is among the tokens, or one is not in the vocabulary.

        Args:
            documents: the documents of the tokens, for messages.
            tokens: int64, 1-D: the tokens of the documents, without their ends.
            stops: int64, 1-D: where in ``tokens`` each document stops.
        """
        wrong_places = np.flatnonzero((tokens == self.end) | (tokens >= self.vocab))
        if len(wrong_places) == 0:
            return
        token = tokens[wrong_places[0]]
        number = int(np.searchsorted(stops, wrong_places[0], side="right"))
        if token == self.end:
            problem = f"{self._end_name}, which would end a document there"
            way_out = "name another token with --eod"
        else:
            problem = f"{token}, which is beyond the vocabulary of {self.name}"
            way_out = "give a tokenizer without this fault"
        raise DataError(
            f"{documents[number].place}: its tokens hold {problem}; "
            f"{way_out}, or remove the document"
        )


class TokenizerFailure(Exception):
    """The tokenizer has failed. The text says why, and what to change."""


def _usable(vocabulary: "_Vocabulary", ends: Sequence[str | int]) -> "_Vocabulary":
    """Return a vocabulary that has a token to end documents. Raises TokenizerFailure otherwise."""
    if not vocabulary.ends:
        names = one_line(join_with_or(list(map(str, ends))))
        raise TokenizerFailure(
            f"it has no {names} to end a document; name one of its tokens with --eod"
        )
    if vocabulary.size > MOST_VOCAB:
        raise TokenizerFailure(
            f"it has token ids up to {vocabulary.size - 1:,}; use one below {MOST_VOCAB:,}"
        )
    return vocabulary


@contextlib.contextmanager
def name_failures(name: str) -> Iterator[None]:
    """Raise DataError, which begins with ``name``, if a tokenizer fails in the body."""
    try:
        yield
    except TokenizerFailure as error:
        raise DataError(f"{name}: {error}") from None


class ChatFailure(Exception):
    """A conversation cannot be rendered.

    Attributes:
        number: its number in the request, from 0.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class ChatSettings(NamedTuple):
    """Chat templates, and what they may read besides a conversation.

    Attributes:
        template: the template, in the language of Jinja.
        tokens: the special tokens by their names in a template, such as ``bos_token``.
        tool_use: the template of conversations with tools; None: the same one.
    """

    template: str
    tokens: dict[str, str]
    tool_use: str | None = None


class End(NamedTuple):
    """A token that may end a document: its name and its number."""

    name: str
    number: int


class _Vocabulary(NamedTuple):
    """Facts about the vocabulary of a tokenizer.json.

    Attributes:
        size: the largest token plus 1.
        ends: the tokens that may end a document, best first.
        begins: the tokens that may begin a text, best first.
        begin: the tokens that the tokenizer puts before a text, such as the one that begins it.
    """

    size: int
    ends: tuple[End, ...]
    begins: tuple[int, ...]
    begin: tuple[int, ...]


class EncodedChats(NamedTuple):
    """The tokens of several conversations, without the ends of documents.

    Attributes:
        counts: the number of tokens of each conversation: int64, 1-D.
        tokens: the tokens of all conversations: int64, 1-D.
        mask: 1 for each token of a turn of the assistant that is learned, and else 0: uint8, 1-D.
        turn_ends: the special tokens that end such turns.
    """

    counts: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    turn_ends: frozenset[int]


class TokenizerProcess:
    """The process that runs a tokenizer.json, and the requests to it.

    Args:
        content: the content of the tokenizer.json.
        ends: names or numbers of tokens that may end a document, best first.
        begins: names of tokens that may begin a text, best first.
        special_as_text: whether the name of a special token in a text is ordinary text.
        adds_special_tokens: whether texts get the special tokens that the tokenizer adds to them,
            such as the one that begins a text.
        chat: the templates that render conversations, if there are any.
    """

    def __init__(
        self,
        content: bytes,
        ends: Sequence[str | int],
        *,
        begins: Sequence[str] = (),
        special_as_text: bool = True,
        adds_special_tokens: bool = False,
        chat: ChatSettings | None = None,
    ) -> None:
        # One thread: prepare runs as many of these processes as it may use cores.
        self._process = start_worker(threads=1)
        settings = {
            "ends": list(ends),
            "begins": list(begins),
            "special_as_text": special_as_text,
            "adds_special_tokens": adds_special_tokens,
            "chat": None if chat is None else chat._asdict(),
            "load_s": _LOAD_S,
            "load_s_per_byte": _LOAD_S_PER_MB / 1e6,
            "encode_s": _ENCODE_S,
            "encode_s_per_byte": _ENCODE_S_PER_MB / 1e6,
            "memory": _BASE_MEMORY + _THREAD_MEMORY * (os.cpu_count() or 1),
            "tokenizer_bytes": len(content),
            "load_memory_per_byte": _LOAD_MEMORY_PER_BYTE,
            "encode_memory_per_byte": 2 * _MEMORY_PER_BYTE,
        }
        self._size = len(content)
        self._first_requests = [json.dumps(settings).encode(), content]

    def load(self) -> _Vocabulary:
        """Load the tokenizer, and return the facts about its vocabulary.

        Raises:
            TokenizerFailure: the tokenizer.json is refused, or the process ends.
        """
        cpu_s = _LOAD_S + self._size / 1e6 * _LOAD_S_PER_MB
        answer = json.loads(self._ask(self._first_requests, cpu_s, "when it is loaded"))
        if answer.get("part") == "template":
            raise TokenizerFailure(
                f"the chat template cannot be used: {answer['error']}; correct it, or give another "
                "by --chat-template"
            )
        if "error" in answer:
            raise TokenizerFailure(
                f"{answer['error']}; give bytes, or the path of a tokenizer.json"
            )
        ends = tuple(End(*end) for end in answer["ends"])
        begins, begin = tuple(answer["begins"]), tuple(answer["begin"])
        return _Vocabulary(answer["vocab"], ends, begins, begin)

    def encode(
        self, texts: Sequence[bytes], *, as_prompts: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts, which must be UTF-8.

        Args:
            texts: the texts.
            as_prompts: add special tokens, even if the process does not do so by default.

        Returns:
            counts: the number of tokens of each text: int64, 1-D.
            tokens: the tokens of all texts: int64, 1-D.

        Raises:
            TokenizerFailure: the tokenizer refuses a text, or the process ends.
        """
        request = (b"p" if as_prompts else b"e") + pack(texts)
        cpu_s = _ENCODE_S + len(request) / 1e6 * _ENCODE_S_PER_MB
        answer = self._ask([request], cpu_s, f"on {sum(map(len, texts)):,} bytes of text")
        if answer[:1] != b"+":
            raise TokenizerFailure(f"{answer[1:].decode()}; give one that can represent this text")
        counts = np.frombuffer(answer, dtype="<i8", count=len(texts), offset=1)
        tokens = np.frombuffer(answer, dtype="<u4", offset=1 + 8 * len(texts))
        return counts, tokens.astype(np.int64)

    def encode_chats(self, conversations: Sequence[bytes]) -> "EncodedChats":
        """Render conversations and encode them. The process must have a chat template.

        Args:
            conversations: JSON objects with the variables of the template.

        Raises:
            ChatFailure: a conversation cannot be rendered.
            TokenizerFailure: the tokenizer refuses a conversation, or the process ends.
        """
        request = b"c" + pack(conversations)
        # A template may make a short conversation long.
        cpu_s = 2 * _ENCODE_S + 4 * len(request) / 1e6 * _ENCODE_S_PER_MB
        occasion = f"with its chat template, on {sum(map(len, conversations)):,} bytes"
        answer = self._ask([request], cpu_s, occasion)
        if answer[:1] != b"+":
            (number,) = struct.unpack_from("<q", answer, 1)
            text = answer[9:].decode()
            if number < 0:
                raise TokenizerFailure(f"{text}; give one that can represent these conversations")
            raise ChatFailure(number, text)
        counts = np.frombuffer(answer, dtype="<i8", count=len(conversations), offset=1)
        begin, total = 1 + 8 * len(counts), int(counts.sum())
        tokens = np.frombuffer(answer, dtype="<u4", count=total, offset=begin)
        mask = np.frombuffer(answer, dtype=np.uint8, count=total, offset=begin + 4 * total)
        ends = np.frombuffer(answer, dtype="<u4", offset=begin + 5 * total)
        return EncodedChats(counts, tokens.astype(np.int64), mask, frozenset(ends.tolist()))

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render messages, and after them what the chat template puts before an answer.

        The process must have a chat template.

        Raises:
            TokenizerFailure: the template fails, or the process ends.
        """
        request = b"r" + json.dumps(messages).encode()
        cpu_s = 2 * _ENCODE_S + 4 * len(request) / 1e6 * _ENCODE_S_PER_MB
        answer = self._ask([request], cpu_s, "with its chat template")
        text = answer[1:].decode(errors="replace")
        if answer[:1] != b"+":
            raise TokenizerFailure(f"its chat template cannot render the prompt: {text}")
        return text

    def decode(self, tokens: Sequence[int], *, skips_special: bool = True) -> str:
        """Return the text of tokens, which must be below 2**32.

        ``skips_special`` leaves special tokens out.

        Raises:
            TokenizerFailure: the tokenizer refuses the tokens, or the process ends.
        """
        request = (b"d" if skips_special else b"D") + struct.pack(f"<{len(tokens)}I", *tokens)
        cpu_s = _ENCODE_S + len(request) / 1e6 * _ENCODE_S_PER_MB
        answer = self._ask([request], cpu_s, f"on {len(tokens):,} tokens")
        text = answer[1:].decode(errors="replace")
        if answer[:1] != b"+":
            raise TokenizerFailure(f"{text}; give one that can represent these tokens")
        return text

    def kill(self) -> None:
        """Kill the process. A request that waits for its answer fails."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, wait for it, and close the pipes to it."""
        end_worker(self._process)

    def _ask(self, requests: Sequence[bytes], cpu_s: float, occasion: str) -> bytes:
        """Send requests and return the answer.

        Args:
            requests: the contents of the frames to send.
            cpu_s: the CPU time that the process may take, in seconds.
            occasion: when or on what the process works, for messages.
        """
        pipe = self._process.stdin
        assert pipe is not None
        deadline_s = time.monotonic() + _WALL_S + _WALL_PER_CPU_S * cpu_s
        try:
            for request in requests:
                send_frame(pipe, request)
            pipe.flush()
            (size,) = struct.unpack("<q", self._read(8, deadline_s))
            return self._read(size, deadline_s)
        except (BrokenPipeError, EOFError):
            pass  # the process has ended; its exit status says why
        except TimeoutError:
            raise TokenizerFailure(
                f"it does not answer {occasion}; give another tokenizer.json"
            ) from None

        status = self._process.wait()
        if status == -signal.SIGXCPU:
            raise TokenizerFailure(
                f"it takes more than {cpu_s:.0f} s of processor time {occasion}; "
                "a pattern in it may run for ever; give another tokenizer.json"
            )
        raise TokenizerFailure(
            f"its process ended with status {status} {occasion}: it takes too much memory, or "
            "tokenizers cannot run it; give another tokenizer.json"
        )

    def _read(self, size: int, deadline_s: float) -> bytes:
        """Read ``size`` bytes of the answer.

        Raises EOFError if the process has ended, and TimeoutError at the deadline.
        """
        pipe = self._process.stdout
        assert pipe is not None
        content = bytearray()
        while len(content) < size:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise TimeoutError
            piece = os.read(pipe.fileno(), min(size - len(content), 1 << 20))
            if not piece:
                raise EOFError
            content += piece
        return bytes(content)


def start_worker(*, threads: int) -> subprocess.Popen[bytes]:
    """Start the process that runs or trains a tokenizer.json. ``end_worker`` must end it."""
    # -P keeps the folder of the program out of sys.path, so that its modules hide no others.
    return subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Rust prints its panics there
        env={
            **os.environ,
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
            "RAYON_NUM_THREADS": str(threads),
        },
    )


def end_worker(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, wait for it, and close the pipes to it."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    process.wait()


def send_frame(pipe: IO[bytes], content: bytes) -> None:
    """Write a frame, as the worker reads it: the length, then the content."""
    pipe.write(struct.pack("<q", len(content)))
    pipe.write(content)


def pack(texts: Sequence[bytes]) -> bytes:
    """Return a batch of texts as the worker reads it: number, lengths, then the texts."""
    header = struct.pack(f"<{len(texts) + 1}q", len(texts), *map(len, texts))
    return header + b"".join(texts)


def check_text(document: Document) -> None:
    """Raise DataError if a text is too long for a tokenizer.json, or is not UTF-8."""
    if len(document.text) > DOCUMENT_BYTES:
        refuse_long(document.place, len(document.text), DOCUMENT_BYTES)
    try:
        document.text.decode()
    except UnicodeDecodeError as error:
        wrong_byte = document.text[error.start]
        raise DataError(
            f"{document.place}: byte 0x{wrong_byte:02x} at offset {error.start} is not UTF-8; "
            "convert the file, move it away if it is not text, or use --tokenizer bytes"
        ) from None
