"""Run a tokenizer.json in a process of its own, whose failure ``prepare`` can report.

A tokenizer.json works like a program. Its patterns can run for ever, its rules can multiply a text
a thousandfold, and the tokenizers library, which is Rust, panics or aborts on some files. So it is
loaded and run in a separate process, with a limit of CPU time and of memory for every request.

This file imports nothing but tokenizers, the standard library and, for chat templates, the file
beside it. It is run as a script, because an import of its package would import torch.

Each request and each answer is a frame: its length in 8 bytes, little-endian, then its content.

- The first request is the settings (JSON), the second the tokenizer.json. The answer to both is
  JSON: ``{"error": TEXT, "part": "tokenizer" or "template"}``, or what ``_describe`` returns.
- A further request may be b"e" and a batch of texts: their number and their lengths in bytes, all
  int64, then the texts in UTF-8. The answer is b"+", the number of tokens of each text (int64),
  and all tokens (uint32); or b"-" and the text of an error.
- b"p" in place of b"e" adds the special tokens that the tokenizer puts before a text. Those that
  it puts after a text are left out, because the text goes on.
- b"c" in place of b"e" has conversations in place of texts: JSON objects. The answer is b"+", the
  number of tokens of each (int64), all tokens (uint32), a byte for each token, which is 1 in the
  turns of the assistant that are learned, and the special tokens that end such turns (uint32); or
  b"-", the number of a conversation (int64), and what is wrong with it. The number is -1 if the
  tokenizer fails.
- Or it is b"r" and messages: a JSON list. The answer is b"+" and their text in UTF-8, with what
  the chat template puts before an answer; or b"-" and the text of an error.
- Or it is b"d" and tokens (uint32). The answer is b"+" and their text in UTF-8; or b"-" and the
  text of an error. b"D" in place of b"d" keeps special tokens.

If the settings have ``_train``, a tokenizer is trained instead. The requests after the settings are
batches of texts, as after b"e", and at last b".". The one answer is b"+" and a tokenizer.json; or
b"-" and the text of an error.
"""

import array
import bisect
import contextlib
import importlib.util
import itertools
import json
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

_LONGEST_WORD = 256  # bytes of a word that a tokenizer is trained on
_SAMPLE = "a b\n1é"  # a text to try a tokenizer with
_MOST_SAMPLES = 1000  # tokens that are tried as texts, until one of them has a token


def main() -> None:
    """Answer the requests on standard input until it ends."""
    # Ctrl-C reaches all processes of a terminal, but the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(_read_frame(requests))
    if "train" in settings:
        try:
            answer_bytes = b"+" + _train(settings["train"], _read_batches(requests))
        except BaseException as error:
            answer_bytes = b"-" + _explain(error).encode(errors="replace")
        _write_frame(answers, answer_bytes)
        return
    content = _read_frame(requests)

    _limit(settings, "load", len(content))
    tokenizer = template = None
    own_end = 0
    part = "tokenizer"
    try:
        if settings["chat"] is not None:
            part = "template"
            template = _load_template(settings["chat"])
            part = "tokenizer"
        tokenizer = _load(content, special_as_text=settings["special_as_text"])
        # A tokenizer that panics on its first text does so here, before the real texts.
        # It need not know these characters. A panic is a BaseException, so it passes.
        with contextlib.suppress(Exception):
            tokenizer.encode_batch_fast([_SAMPLE], add_special_tokens=False)
        begin, own_end = _own_tokens(tokenizer)
        answer = _describe(tokenizer, settings["ends"], settings["begins"]) | {"begin": begin}
    except BaseException as error:
        answer = {"error": _explain(error), "part": part}
    _write_frame(answers, json.dumps(answer).encode())

    while tokenizer is not None:
        request = _read_frame(requests)
        if not request:
            break
        _limit(settings, "encode", len(request))
        try:
            if request[:1] in (b"d", b"D"):
                skips_special = request[:1] == b"d"
                answer_bytes = b"+" + _decode(tokenizer, request[1:], skips_special=skips_special)
            elif request[:1] == b"r":
                assert template is not None  # the settings have one
                answer_bytes = b"+" + template.ask(json.loads(request[1:])).encode()
            elif request[:1] == b"c":
                answer_bytes = _encode_chats(tokenizer, template, request[1:], settings)
            else:
                adds_special = settings["adds_special_tokens"] or request[:1] == b"p"
                left_out = own_end if adds_special else 0
                answer_bytes = b"+" + _encode(
                    tokenizer, request[1:], adds_special=adds_special, left_out=left_out
                )
        except BaseException as error:
            number = struct.pack("<q", -1) if request[:1] == b"c" else b""
            answer_bytes = b"-" + number + _explain(error).encode(errors="replace")
        _write_frame(answers, answer_bytes)


def _load(content: bytes, *, special_as_text: bool) -> Any:
    """Load a tokenizer.json. Raises the exceptions of the tokenizers library, panics included.

    With ``special_as_text``, "</s>" in a text is ordinary text: only ``prepare`` may end a
    document.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special_as_text
    # Dropout would make the tokens of a text random, and prepare could not go on exactly.
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer


def _own_tokens(tokenizer: Any) -> tuple[list[int], int]:
    """Return the tokens that the tokenizer puts before a text, and the number of those after it.

    In an empty text, the two could not be told apart. So texts are tried until one has a token.
    """
    tokens = range(min(tokenizer.get_vocab_size(with_added_tokens=True), _MOST_SAMPLES))
    # Special tokens are not always wanted, so a panic here must not refuse the tokenizer.
    with contextlib.suppress(BaseException):
        for text in itertools.chain([_SAMPLE], (tokenizer.decode([token]) for token in tokens)):
            with contextlib.suppress(Exception):
                encoding = tokenizer.encode(text, add_special_tokens=True)
                is_own = encoding.special_tokens_mask
                if 0 in is_own:
                    return encoding.ids[: is_own.index(0)], is_own[::-1].index(0)
    return [], 0


def _describe(tokenizer: Any, ends: list[str | int], begins: list[str]) -> dict[str, Any]:
    """Return facts about the vocabulary.

    Args:
        tokenizer: the tokenizer.
        ends: names and numbers of tokens that may end a text.
        begins: names of tokens that may begin one.

    Returns:
        ``vocab``, the largest token plus 1; ``ends``, the name and the number of each of ``ends``
        that the vocabulary has; and ``begins``, the numbers of those of ``begins``.
    """
    tokens: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    names = {number: name for name, number in tokens.items()}
    wanted = [names.get(end) if isinstance(end, int) else end for end in ends]
    # The largest token counts, not the number of tokens, because there may be gaps.
    largest = max(tokens.values(), default=-1)
    return {
        "vocab": largest + 1,
        "ends": [[name, tokens[name]] for name in wanted if name in tokens],
        "begins": [tokens[name] for name in begins if name in tokens],
    }


def _encode(tokenizer: Any, batch: bytes, *, adds_special: bool, left_out: int) -> bytes:
    """Encode a batch of texts. The docstring of the module gives the format of both.

    With ``adds_special``, each text gets the special tokens that the tokenizer adds, without the
    last ``left_out``.
    """
    texts = _unpack(batch)
    counts, tokens = [], array.array("I")
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=adds_special):
        ids = encoding.ids
        ids = ids[: len(ids) - left_out]
        counts.append(len(ids))
        tokens.extend(ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return struct.pack(f"<{len(counts)}q", *counts) + tokens.tobytes()


def _encode_chats(tokenizer: Any, template: Any, batch: bytes, settings: dict[str, Any]) -> bytes:
    """Render and encode a batch of conversations. Returns a whole answer, also of an error."""
    rendered = []
    for number, conversation in enumerate(_unpack(batch)):
        try:
            rendered.append(template.render(json.loads(conversation)))
        except Exception as error:
            return b"-" + struct.pack("<q", number) + _explain(error).encode(errors="replace")

    texts = [text for text, _ in rendered]
    _limit(settings, "encode", len(batch) + sum(len(text.encode()) for text in texts))
    counts, tokens, mask = [], array.array("I"), bytearray()
    # Only the slower encode_batch keeps the places of tokens in the text.
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    special = {
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    }
    special.add(tokenizer.token_to_id(settings["chat"]["tokens"].get("eos_token", "")))
    ends: set[int] = set()
    for encoding, (text, spans) in zip(encodings, rendered, strict=True):
        counts.append(len(encoding.ids))
        tokens.extend(encoding.ids)
        mask += _mask_of(encoding.offsets, spans)
        ends |= _ends_of(text, encoding.ids, encoding.offsets, spans, special)
    if sys.byteorder == "big":
        tokens.byteswap()
    return (
        b"+"
        + struct.pack(f"<{len(counts)}q", *counts)
        + tokens.tobytes()
        + bytes(mask)
        + struct.pack(f"<{len(ends)}I", *sorted(ends))
    )


def _ends_of(
    text: str,
    ids: list[int],
    offsets: list[tuple[int, int]],
    spans: list[tuple[int, int]],
    special: set[int | None],
) -> set[int]:
    """Return the special tokens that end spans. Blanks may follow in the span.

    Args:
        text: the whole text.
        ids: its tokens.
        offsets: where the text of each token begins and ends, in characters, in ascending order.
        spans: ranges of characters.
        special: the special tokens.
    """
    ends = set()
    begins = [begin for begin, _ in offsets]
    for first, last in spans:
        # From the last token of the span backwards, over those of blanks.
        number = bisect.bisect_left(begins, last) - 1
        while number >= 0 and offsets[number][0] >= first:
            begin, end = offsets[number]
            if ids[number] in special and begin < end <= last:
                ends.add(ids[number])
                break
            if text[begin:end].strip():
                break
            number -= 1
    return ends


def _mask_of(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> bytearray:
    """Return a byte for each token: 1 from the first to the last token with text of a span.

    Args:
        offsets: where the text of each token begins and ends, in characters. A token without text
            of its own, such as a space that the tokenizer drops, has an empty range.
        spans: ranges of characters.
    """
    mask = bytearray(len(offsets))
    for first, last in spans:
        inside = [
            number
            for number, (begin, end) in enumerate(offsets)
            if begin < end and begin < last and end > first
        ]
        if inside:
            count = inside[-1] + 1 - inside[0]
            mask[inside[0] : inside[-1] + 1] = b"\1" * count
    return mask


def _unpack(batch: bytes) -> list[str]:
    """Return the texts of a batch, in the format of the module."""
    (count,) = struct.unpack_from("<q", batch)
    lengths = struct.unpack_from(f"<{count}q", batch, 8)
    begin = 8 * (1 + count)
    texts = []
    for length in lengths:
        texts.append(batch[begin : begin + length].decode())
        begin += length
    return texts


def _load_template(chat: dict[str, Any]) -> Any:
    """Compile the chat templates of the settings, and forbid this process to write files."""
    # -P keeps this folder out of sys.path, so the file beside this one is loaded by its path.
    path = Path(__file__).with_name("chat_template.py")
    spec = importlib.util.spec_from_file_location("chat_template", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    template = module.ChatTemplates(chat["template"], chat["tokens"], chat["tool_use"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return template


def _decode(tokenizer: Any, content: bytes, *, skips_special: bool) -> bytes:
    """Return the text of tokens, in the formats of the module."""
    tokens = struct.unpack(f"<{len(content) // 4}I", content)
    text: str = tokenizer.decode(tokens, skip_special_tokens=skips_special)
    return text.encode(errors="replace")


def _read_batches(requests: BinaryIO) -> Iterator[str]:
    """Yield the texts to train on. Raises EOFError if the parent has ended before the last one."""
    while (batch := _read_frame(requests)) != b".":
        if not batch:
            raise EOFError("there is no end of the texts")
        yield from _unpack(batch)


def _train(wanted: dict[str, Any], texts: Iterator[str]) -> bytes:
    """Train a byte-level BPE, and return its tokenizer.json.

    The texts are cut into words by GPT-2's pattern, and tokens do not go beyond a word. Longer ones
    than ``_LONGEST_WORD``, such as runs of blanks or encoded data, are cut further. Equal texts
    give equal bytes, in any order and with any number of threads: the trainer takes the pair that
    occurs most often, and of those that occur equally often the one with the smallest tokens.

    Args:
        wanted: ``size``, the number of tokens, and ``end``, the name of the token that ends a
            document, which gets the number 0. Its 256 successors are the bytes.
        texts: what to train on.

    Raises:
        ValueError: the texts give fewer tokens, or they could become ``end``.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # No token goes beyond a word, so no text becomes a token that consists of several words.
    if len(words.pre_tokenize_str(wanted["end"])) < 2:
        raise ValueError(
            f"a text could become {wanted['end']}, which is to end a document; give another --eod, "
            "such as <|endoftext|>"
        )
    tokenizer = Tokenizer(models.BPE())
    # Merging a pair takes a time in proportion to the square of the length of a word.
    pieces = pre_tokenizers.Split(Regex(f".{{{_LONGEST_WORD}}}"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=wanted["size"],
        # A pair that occurs once makes no token.
        min_frequency=2,
        special_tokens=[wanted["end"]],
        initial_alphabet=words.alphabet(),
        show_progress=False,
    )
    characters = 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            characters += len(text)
            yield text

    tokenizer.train_from_iterator(counted(), trainer)
    reached = tokenizer.get_vocab_size()
    if reached < wanted["size"]:
        raise ValueError(
            f"a text of {characters:,} characters gives only {reached:,} tokens; give more text, "
            "or a lower number"
        )
    tokenizer.pre_tokenizer = words
    text: str = tokenizer.to_str()
    return text.encode()


def _limit(settings: dict[str, Any], request: Literal["load", "encode"], size: int) -> None:
    """Limit the CPU time and memory of this process for one request.

    Beyond the limit of CPU time, the kernel ends the process. Beyond that of memory, allocations
    fail.

    Args:
        settings: the first request. ``load_s``, ``load_s_per_byte``, ``encode_s`` and
            ``encode_s_per_byte`` limit CPU time. ``memory``, ``tokenizer_bytes``,
            ``load_memory_per_byte`` and ``encode_memory_per_byte`` limit memory.
        request: the kind of the request.
        size: the size of the request, in bytes.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    used_s = used.ru_utime + used.ru_stime
    allowed_s = settings[f"{request}_s"] + size * settings[f"{request}_s_per_byte"]
    _set_soft_limit(resource.RLIMIT_CPU, int(used_s + allowed_s) + 1)

    memory = settings["memory"] + settings["tokenizer_bytes"] * settings["load_memory_per_byte"]
    if request == "encode":
        memory += size * settings["encode_memory_per_byte"]
    _set_soft_limit(resource.RLIMIT_DATA, memory)


def _set_soft_limit(resource_number: int, value: int) -> None:
    """Set the soft limit of a resource.

    The hard limit is not changed, so that the next request can have a higher soft limit.
    """
    _, hard = resource.getrlimit(resource_number)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # If the system cannot set this limit, the parent's deadline still ends the process.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource_number, (soft, hard))


def _explain(error: BaseException) -> str:
    """Return the reason of an error on one line. A Rust panic is raised as a PanicException."""
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    text = " ".join(str(error).split())[:500] or type(error).__name__
    return f"it panics: {text}" if type(error).__name__ == "PanicException" else text


def _read_frame(file: BinaryIO) -> bytes:
    """Read the content of a frame. It is empty if the parent has closed the pipe."""
    header = file.read(8)
    if len(header) < 8:
        return b""
    return file.read(struct.unpack("<q", header)[0])


def _write_frame(file: BinaryIO, content: bytes) -> None:
    """Write a frame, and flush it."""
    file.write(struct.pack("<q", len(content)))
    file.write(content)
    file.flush()


if __name__ == "__main__":
    main()
