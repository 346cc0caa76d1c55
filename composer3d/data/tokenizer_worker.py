"""The process that holds a tokenizer: whatever a tokenizer.json does to it, ``prepare`` goes on.

A tokenizer.json is a program of a kind: its patterns can run for ever, its rules can multiply a text a thousandfold,
and tokenizers, which is Rust, panics or aborts on some. So it is loaded and run here, in a process of its own that has
a limit of processor time and of memory for every request. It imports nothing but tokenizers and the standard library;
it is run as a file, because the package that it lies in imports torch.

Each request and each answer is a frame: its length in 8 bytes, little-endian, and that many bytes. The first request is
the settings (JSON), the second the tokenizer.json; the answer is JSON, ``{"error": TEXT}`` or what is known of the
vocabulary. Each one after it is a batch of texts: how many, and their lengths in bytes, all int64, and the texts in
UTF-8. The answer begins with b"+": the counts of tokens, int64, and all tokens, uint32; or with b"-": an error's text.
"""

import array
import contextlib
import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO


def main() -> None:
    """Answer the requests on standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(read_frame(requests))
    content = read_frame(requests)
    limit(settings, "load", len(content))
    coder = None
    try:
        coder = load(content)
        answer = describe(coder, settings["ends"])
    except BaseException as error:
        answer = {"error": text_of(error)}
    write_frame(answers, json.dumps(answer).encode())
    while coder is not None and (batch := read_frame(requests)):
        limit(settings, "encode", len(batch))
        try:
            answer_bytes = b"+" + encode(coder, batch)
        except BaseException as error:
            answer_bytes = b"-" + text_of(error).encode(errors="replace")
        write_frame(answers, answer_bytes)


def load(content: bytes) -> Any:
    """Make the tokenizer of a tokenizer.json. Raises whatever tokenizers raises, panics included."""
    import tokenizers

    coder = tokenizers.Tokenizer.from_buffer(content)
    coder.no_truncation()
    coder.no_padding()
    coder.encode_special_tokens = True  # "</s>" in a text is text: only prepare ends a document
    return coder


def describe(coder: Any, ends: list[str]) -> dict[str, Any]:
    """Say how large the vocabulary is, and which of ``ends`` it has first.

    It encodes a short text as well: a tokenizer that panics does so here.
    """
    known: dict[str, int] = coder.get_vocab(with_added_tokens=True)
    end = next((each for each in ends if each in known), None)
    largest = max(known.values(), default=-1)  # not their number: ids may have gaps
    with contextlib.suppress(
        Exception
    ):  # it need not know these characters, but a panic is no Exception
        coder.encode_batch_fast(["a b\n1é"], add_special_tokens=False)
    return {"vocab": largest + 1, "end_name": end, "end": known.get(end or "")}


def encode(coder: Any, batch: bytes) -> bytes:
    """Turn a batch of texts into the counts of their tokens and all tokens, in the form that the module describes."""
    (count,) = struct.unpack_from("<q", batch)
    lengths = struct.unpack_from(f"<{count}q", batch, 8)
    begin, texts = 8 * (1 + count), []
    for length in lengths:
        texts.append(batch[begin : begin + length].decode())
        begin += length
    counts, tokens = [], array.array("I")
    for encoding in coder.encode_batch_fast(texts, add_special_tokens=False):
        ids = encoding.ids
        counts.append(len(ids))
        tokens.extend(ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return struct.pack(f"<{count}q", *counts) + tokens.tobytes()


def limit(settings: dict[str, Any], what: str, size: int) -> None:
    """Processor time and memory for a request of ``size`` bytes. Above it, the kernel ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = (
        int(
            used.ru_utime
            + used.ru_stime
            + settings[f"{what}_s"]
            + size * settings[f"{what}_s_per_byte"]
        )
        + 1
    )
    lower(resource.RLIMIT_CPU, seconds)
    memory = settings["memory"] + settings["tokenizer_bytes"] * settings["load_memory_per_byte"]
    if what == "encode":
        memory += size * settings["encode_memory_per_byte"]
    lower(resource.RLIMIT_DATA, memory)


def lower(kind: int, value: int) -> None:
    """Set the soft limit; the hard one of the machine stays, so that the next request can have more."""
    _, hard = resource.getrlimit(kind)
    with contextlib.suppress(
        ValueError, OSError
    ):  # what a system cannot limit, the parent's clock does
        resource.setrlimit(
            kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard)
        )


def text_of(error: BaseException) -> str:
    """What went wrong, on one line. A panic of Rust comes as an exception of its own kind."""
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    text = " ".join(str(error).split())[:500] or type(error).__name__
    return f"it panics: {text}" if type(error).__name__ == "PanicException" else text


def read_frame(file: BinaryIO) -> bytes:
    """Empty where there is none: the parent has closed its end."""
    head = file.read(8)
    return file.read(struct.unpack("<q", head)[0]) if len(head) == 8 else b""


def write_frame(file: BinaryIO, content: bytes) -> None:
    """Write a length and so many bytes, and flush them."""
    file.write(struct.pack("<q", len(content)))
    file.write(content)
    file.flush()


if __name__ == "__main__":
    main()
