"""From documents to tokens: bytes as they are, or a ``tokenizer.json`` of Hugging Face's ``tokenizers``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer3d.data.documents import END_OF_DOCUMENT, Document, refuse_end_of_document
from composer3d.errors import DataError
from composer3d.recipe.values import either

_DOCUMENT_BYTES = 16 << 20  # tokenizers takes a text whole, and _MEMORY bytes for each byte of it
_MEMORY = 156

# The first that a vocabulary has ends its documents: what pretraining used comes before what chats do.
_USUAL_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>", "[EOS]")


class Tokenizer:
    """Bytes as they are, and the form of all others.

    ``vocab``: above every token. ``end``: the token after each document, which no text holds. ``dtype`` of the tokens:
    the smaller of little-endian uint16 and uint32 that holds ``vocab``. ``content`` of the ``tokenizer.json``, None for
    bytes.
    """

    name, vocab, end = "bytes", 256, END_OF_DOCUMENT
    dtype: np.dtype[Any] = np.dtype("<u2")
    content: bytes | None = None

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


def open_tokenizer(name: str, end: str | None) -> Tokenizer:
    """``bytes``, or the path of a ``tokenizer.json``. ``end`` names the end-of-document token of the latter.

    Raises DataError where the file cannot be read or no token ends documents.
    """
    if name != "bytes":
        return _FromFile(name, end)
    if end is not None:
        raise DataError(f"--eod {end} is not read with --tokenizer bytes, where byte 0 ends a document; remove it")
    return Tokenizer()


class _FromFile(Tokenizer):
    def __init__(self, path: str, end: str | None) -> None:
        import tokenizers

        self.name = path
        try:
            content = Path(path).read_bytes()
            coder = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises plain ones
            raise DataError(f"--tokenizer {path}: {error}; give bytes, or the path of a tokenizer.json") from None
        coder.no_truncation()
        coder.no_padding()
        coder.encode_special_tokens = True  # "</s>" in a text is text: only prepare ends a document
        known = coder.get_vocab(with_added_tokens=True)
        ends = (end,) if end is not None else _USUAL_ENDS
        self.end_name = next((each for each in ends if each in known), None)
        if self.end_name is None:
            raise DataError(
                f"--tokenizer {path}: it has no {either(list(ends))} to end a document; name a token of it with --eod"
            )
        self.vocab = max(known.values()) + 1  # not their number: ids may have gaps
        self.end = known[self.end_name]
        self.dtype = np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")
        self.content, self._coder = content, coder

    def encode(self, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
        texts = list(map(_decoded, documents))
        try:
            encodings = self._coder.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises plain ones, and does not say for which text
            place = f"{documents[0].place} or soon after: --tokenizer {self.name}"
            raise DataError(f"{place}: {error}; give one that can represent all text") from None
        parts = []
        for document, text, encoding in zip(documents, texts, encodings, strict=True):
            part = np.array([*encoding.ids, self.end], dtype=self.dtype)
            if len(part) == 1 and not text.isspace():
                raise DataError(
                    f"{document.place}: no character of it has a token in {self.name}; "
                    "take the document away, or give a tokenizer that can represent it"
                )
            if self.end in part[:-1]:
                raise DataError(
                    f"{document.place}: its tokens hold {self.end_name}, which would end a document there; "
                    "name another token with --eod, or take the document away"
                )
            parts.append(part)
        return np.concatenate(parts), np.array(list(map(len, parts)), dtype=np.int64)


def _decoded(document: Document) -> str:
    size = len(document.text)
    if size > _DOCUMENT_BYTES:
        raise DataError(
            f"{document.place}: one document of {size / 1e6:,.0f} MB would take about {size * _MEMORY / 1e9:,.0f} GB "
            "of memory to tokenize; cut it into documents, a file or a JSONL line each"
        )
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.place}: byte 0x{document.text[error.start]:02x} at offset {error.start} is not UTF-8; "
            "convert the file, move it away if it is not text, or use --tokenizer bytes"
        ) from None
