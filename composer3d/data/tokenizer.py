"""From documents to tokens: bytes as they are, or a ``tokenizer.json`` of Hugging Face's ``tokenizers``.

A tokenizer.json runs in a process of its own (``tokenizer_worker``): it can panic, run for ever or take all memory.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer3d.data.documents import (
    END_OF_DOCUMENT,
    LONGEST_TEXT,
    Document,
    refuse_end_of_document,
    refuse_long,
)
from composer3d.recipe.values import join_with_or, one_line
from composer3d.spec.errors import DataError
from composer3d.spec.files import read_plain
from composer3d.spec.ranges import MOST_VOCAB

_FILE_BYTES = 64 << 20  # of a tokenizer.json; the largest published ones have half of that
_DOCUMENT_BYTES = 16 << 20  # tokenizers takes a text whole, and _MEMORY bytes for each byte of it
_MEMORY = 156

# What the process may use. Its times are of the processor, so that a busy machine changes nothing: the slowest of the
# usual tokenizers takes some seconds for a megabyte. Memory: a tokenizer.json of 40 MB takes 5 times its size.
_LOAD_S, _LOAD_S_PER_MB = 2.0, 2.0
_ENCODE_S, _ENCODE_S_PER_MB = 2.0, 20.0
_LOAD_MEMORY = 24  # bytes for each byte of the tokenizer.json
_BASE_MEMORY = 256 << 20
_THREAD_MEMORY = 8 << 20  # for each core: tokenizers runs a thread on each
_WALL_S, _WALL = (
    30.0,
    20,
)  # and 20 times the processor's: for a process that waits for what never comes

# The first that a vocabulary has ends its documents: what pretraining used comes before what chats do.
_USUAL_ENDS = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "[EOS]",
)


class Tokenizer:
    """Bytes as they are, and the form of all others.

    ``vocab``: above every token. ``end``: the token after each document, which no text holds. ``dtype`` of the tokens:
    the smaller of little-endian uint16 and uint32 that holds ``vocab``. ``content`` of the ``tokenizer.json``, None for
    bytes.
    """

    name, vocab, end = "bytes", 256, END_OF_DOCUMENT
    dtype: np.dtype[Any] = np.dtype("<u2")
    content: bytes | None = None
    longest = LONGEST_TEXT  # bytes of a document

    def encode(self, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all documents, 1-D of ``dtype``, with ``end`` after each; how many are of each, int64.

        Raises DataError, naming the document, where its text is too long, is not what the tokenizer takes, becomes no
        token, or holds ``end``.
        """
        for document in documents:
            refuse_end_of_document(document)
        joined = b"".join(text + b"\0" for _, text, _ in documents)
        lengths = np.array([len(text) + 1 for _, text, _ in documents], dtype=np.int64)
        return np.frombuffer(joined, dtype=np.uint8).astype(self.dtype), lengths

    def close(self) -> None:
        """End what was started for it."""


def open_tokenizer(name: str, end: str | None) -> Tokenizer:
    """``bytes``, or the path of a ``tokenizer.json``. ``end`` names the end-of-document token of the latter.

    The caller closes it. Raises DataError where the file cannot be read or no token ends documents.
    """
    if name != "bytes":
        return _FromFile(name, end)
    if end is not None:
        raise DataError(
            f"--eod {one_line(end)} is not read with --tokenizer bytes, where byte 0 ends a document; remove it"
        )
    return Tokenizer()


class _FromFile(Tokenizer):
    def __init__(self, path: str, end: str | None) -> None:
        self.name, self.longest = one_line(path), _DOCUMENT_BYTES
        try:
            self.content = read_plain(path, limit=_FILE_BYTES)
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise DataError(
                f"--tokenizer {self.name}: {why}; give bytes, or the path of a tokenizer.json"
            ) from None
        ends = (end,) if end is not None else _USUAL_ENDS
        self._worker = _Worker(self.content, ends)
        try:
            known = self._worker.known()
            if known["end_name"] is None:
                shown = one_line(join_with_or(list(ends)))
                raise _Failed(f"it has no {shown} to end a document; name a token of it with --eod")
            if known["vocab"] > MOST_VOCAB:
                raise _Failed(
                    f"it has token ids up to {known['vocab'] - 1:,}; use one below {MOST_VOCAB:,}"
                )
        except _Failed as failed:
            self.close()
            raise DataError(f"--tokenizer {self.name}: {failed}") from None
        except BaseException:
            self.close()
            raise
        self.vocab, self.end, self.end_name = known["vocab"], known["end"], known["end_name"]
        self.dtype = np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")

    def close(self) -> None:
        self._worker.close()

    def encode(self, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
        for document in documents:
            _check_text(document)
        try:
            counts, ids = self._worker.encode([document.text for document in documents])
        except _Failed as failed:  # tokenizers does not say for which text
            place = f"{documents[0].place} or soon after: --tokenizer {self.name}"
            raise DataError(f"{place}: {failed}") from None
        stops = np.cumsum(counts)
        wrong = np.flatnonzero((ids == self.end) | (ids >= self.vocab))
        for number in map(int, np.searchsorted(stops, wrong[:1], side="right")):
            said = f"{self.end_name}, which would end a document there"
            if ids[wrong[0]] != self.end:
                said = f"{ids[wrong[0]]}, which is beyond its own vocabulary"
            raise DataError(
                f"{documents[number].place}: its tokens hold {said}; "
                "name another token with --eod, or take the document away"
            )
        for number in map(int, np.flatnonzero(counts == 0)):
            if not documents[number].text.decode().isspace():
                raise DataError(
                    f"{documents[number].place}: no character of it has a token in {self.name}; "
                    "take the document away, or give a tokenizer that can represent it"
                )
        return np.insert(ids, stops, self.end).astype(self.dtype), counts + 1


class _Failed(Exception):
    """The tokenizer cannot do it. Says why, and the way out."""


class _Worker:
    """A tokenizer in a process of its own. Raises _Failed where that process refuses, panics, or is ended."""

    def __init__(self, content: bytes, ends: Sequence[str]) -> None:
        program = Path(__file__).with_name("tokenizer_worker.py")
        # -P: not with the folder of the program among those that modules come from.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic of Rust writes there
        )
        settings = {
            "ends": list(ends),
            "load_s": _LOAD_S,
            "load_s_per_byte": _LOAD_S_PER_MB / 1e6,
            "encode_s": _ENCODE_S,
            "encode_s_per_byte": _ENCODE_S_PER_MB / 1e6,
            "memory": _BASE_MEMORY + _THREAD_MEMORY * (os.cpu_count() or 1),
            "tokenizer_bytes": len(content),
            "load_memory_per_byte": _LOAD_MEMORY,
            "encode_memory_per_byte": 2 * _MEMORY,
        }
        self._size = len(content)
        self._requests = [json.dumps(settings).encode(), content]

    def known(self) -> dict[str, Any]:
        """``vocab``, ``end_name`` and ``end``: what its vocabulary holds."""
        seconds = _LOAD_S + self._size / 1e6 * _LOAD_S_PER_MB
        answer: dict[str, Any] = json.loads(self._ask(self._requests, seconds, "when it is loaded"))
        if "error" in answer:
            raise _Failed(f"{answer['error']}; give bytes, or the path of a tokenizer.json")
        return answer

    def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The counts of tokens of each text, int64, and the tokens of all, int64. The texts are UTF-8."""
        request = struct.pack(f"<{len(texts) + 1}q", len(texts), *map(len, texts)) + b"".join(texts)
        seconds = _ENCODE_S + len(request) / 1e6 * _ENCODE_S_PER_MB
        answer = self._ask([request], seconds, f"on {sum(map(len, texts)):,} bytes of text")
        if answer[:1] != b"+":
            raise _Failed(f"{answer[1:].decode()}; give one that can represent this text")
        counts = np.frombuffer(answer, dtype="<i8", count=len(texts), offset=1)
        return counts, np.frombuffer(answer, dtype="<u4", offset=1 + 8 * len(texts)).astype(
            np.int64
        )

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def _ask(self, requests: Sequence[bytes], seconds: float, what: str) -> bytes:
        """The answer to a request, for which the process may take ``seconds`` of the processor."""
        pipe = self._process.stdin
        assert pipe is not None
        ends_at = time.monotonic() + _WALL_S + _WALL * seconds
        try:
            for request in requests:
                pipe.write(struct.pack("<q", len(request)))
                pipe.write(request)
            pipe.flush()
            (size,) = struct.unpack("<q", self._read(8, ends_at))
            return self._read(size, ends_at)
        except (BrokenPipeError, EOFError):
            pass
        except TimeoutError:
            raise _Failed(f"it does not come back {what}; give another tokenizer.json") from None
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            way_out = "a pattern in it may run for ever; give another tokenizer.json"
            raise _Failed(f"it takes more than {seconds:.0f} s of processor time {what}; {way_out}")
        why = "it takes too much memory, or tokenizers cannot run it"
        raise _Failed(
            f"its process ended with status {status} {what}: {why}; give another tokenizer.json"
        )

    def _read(self, size: int, ends_at: float) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        content = bytearray()
        while len(content) < size:
            left = ends_at - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError
            part = os.read(pipe.fileno(), min(size - len(content), 1 << 20))
            if not part:
                raise EOFError
            content += part
        return bytes(content)


def _check_text(document: Document) -> None:
    """Raises DataError where a text is too long for a tokenizer, or is no UTF-8."""
    if len(document.text) > _DOCUMENT_BYTES:
        refuse_long(document.place, len(document.text), _DOCUMENT_BYTES)
    try:
        document.text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.place}: byte 0x{document.text[error.start]:02x} at offset {error.start} is not UTF-8; "
            "convert the file, move it away if it is not text, or use --tokenizer bytes"
        ) from None
