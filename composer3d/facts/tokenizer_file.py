"""What a tokenizer.json says of its tokens, and whether two say the same. No torch or numpy here.

A tokenizer.json is untrusted: nothing in it is run here, and wrong values count as absent.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from composer3d.facts.files import parse_json

# The parts of a tokenizer.json that cut a text before its vocabulary does, besides its model. The
# others add tokens around a text, or make text of tokens.
_CUTTING_PARTS = ("normalizer", "pre_tokenizer")
_APART = ("vocab", "merges")  # of the model: they are compared by number
# What the library ``tokenizers`` adds by default when it saves an older file again.
_LATER_SETTINGS: dict[str, dict[str, Any]] = {
    "ByteLevel": {"use_regex": True},
    "Metaspace": {"prepend_scheme": "always", "split": True},
    "Punctuation": {"behavior": "Isolated"},
}
# Settings that cut no text otherwise: offsets in it, and what Metaspace says twice in older files.
_HARMLESS_SETTINGS = {"ByteLevel": ("trim_offsets",), "Metaspace": ("str_rep", "add_prefix_space")}

_BYTE_0 = "\0"  # the token of byte 0, which ends a document in data of bytes

_Json = Mapping[str, Any]


class Difference(NamedTuple):
    """Something in which two tokenizers differ.

    Attributes:
        what: what it is, such as "token 5", "merge 17" or "setting normalizer.type".
        ours, theirs: its value in each of them; None where it is absent.
    """

    what: str
    ours: str | None
    theirs: str | None


def first_difference(ours: bytes, theirs: bytes) -> Difference | None:
    """Return the first difference in the vocabulary, the added tokens, the merges or settings.

    A vocabulary may have scores, as that of Unigram. The settings are those that cut a text into
    tokens. Others are not compared: what truncates, pads or begins a sequence, and what makes text
    of tokens.

    Args:
        ours, theirs: the contents of two files tokenizer.json.

    Returns:
        None if a token means the same in both, and a text becomes the same tokens.

    Raises:
        ValueError: a file differs and is no JSON object.
    """
    if ours == theirs:
        return None
    pair = [_parse(ours), _parse(theirs)]
    has_normalizer = any(tokenizer.get("normalizer") is not None for tokenizer in pair)
    compared: dict[str, Callable[[_Json], dict[Any, str]]] = {
        "token": token_names,
        "special token": _special_tokens,
        "added token": partial(_added_words, has_normalizer=has_normalizer),
        "score": _scores,
        "merge": lambda tokenizer: dict(enumerate(_merges(tokenizer))),
        "setting": _settings,
    }
    for what, read in compared.items():
        a, b = map(read, pair)
        if a != b:
            first = min(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
            return Difference(f"{what} {first}", a.get(first), b.get(first))
    return None


def is_same(ours: bytes, theirs: bytes) -> bool:
    """Return whether ``first_difference`` can compare two files, and finds nothing."""
    try:
        return first_difference(ours, theirs) is None
    except ValueError:
        return False


def _parse(content: bytes) -> dict[str, Any]:
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of the special tokens, by id."""
    added = _added_tokens(tokenizer)
    return {entry["id"]: entry["content"] for entry in added if entry.get("special") is True}


def _added_words(tokenizer: Mapping[str, Any], *, has_normalizer: bool) -> dict[int, str]:
    """Return the tokens that are found in a text before it is cut, and how, by id.

    A flag that is absent counts as off. ``normalized`` says whether the token is looked for in what
    the normalizer makes of the text, so it counts only where there is a normalizer.
    """
    flags = ["lstrip", "rstrip", "single_word", *(["normalized"] if has_normalizer else [])]
    return {
        entry["id"]: " ".join(
            [entry["content"], *(flag for flag in flags if entry.get(flag) is True)]
        )
        for entry in _added_tokens(tokenizer)
    }


def _added_tokens(tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens that have a number and a name."""
    added = tokenizer.get("added_tokens")
    return [
        entry
        for entry in (added if isinstance(added, list) else [])
        if isinstance(entry, dict)
        and type(entry.get("id")) is int
        and isinstance(entry.get("content"), str)
    ]


def _scores(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the scores by which a Unigram model cuts a text, by id."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return {
        number: str(float(pair[1]))
        for number, pair in enumerate(vocab if isinstance(vocab, list) else [])
        if isinstance(pair, list) and len(pair) > 1 and type(pair[1]) in (int, float)
    }


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the merges of a BPE as texts. Older files have texts, and newer ones have pairs."""
    model = tokenizer.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list):
        return []
    return [
        " ".join(map(str, merge)) if isinstance(merge, list) else str(merge) for merge in merges
    ]


def _settings(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that cut a text, by their places such as ``pre_tokenizer.type``."""
    found = {
        place: text for part in _CUTTING_PARTS for place, text in _flat(tokenizer.get(part), part)
    }
    model = tokenizer.get("model")
    for key, value in model.items() if isinstance(model, dict) else ():
        # Older files leave out the type and what is off. An empty text is no prefix or suffix.
        is_off = value is False or value == ""
        if key not in (*_APART, "type") and not is_off:
            found.update(_flat(value, f"model.{key}"))
    return found


def _flat(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each value within one of JSON. Null counts as absent."""
    if isinstance(value, dict):
        kind = str(value.get("type"))
        for key, item in (_LATER_SETTINGS.get(kind, {}) | value).items():
            if key not in _HARMLESS_SETTINGS.get(kind, ()):
                yield from _flat(item, f"{place}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _flat(item, f"{place}.{number}")
    elif value is not None:
        yield place, value if isinstance(value, str) else json.dumps(value)


def make_byte_tokenizer() -> bytes:
    """Return a tokenizer.json with one token for each byte of UTF-8; its id is the byte's value.

    A vocabulary names each byte by a character, as GPT-2 does. Byte 0 ends documents, so it is a
    special token, and its name is the character U+0000 itself. GPT-2 names it U+0100, and then that
    letter in a text would become the end of a document.
    """
    # GPT-2 names a printable byte by its own character, and the others by characters from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    characters[0] = _BYTE_0
    vocab = {characters[byte]: byte for byte in range(256)}

    end = {
        "id": 0,
        "content": _BYTE_0,
        "special": True,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [],
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def token_names(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of the tokens in a tokenizer.json, by id. The file is untrusted."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    names: dict[int, str] = {}
    if isinstance(vocab, dict):
        names = {token: name for name, token in vocab.items() if type(token) is int}
    elif isinstance(vocab, list):
        # The vocabulary of a Unigram model is a list of pairs: a name and its score.
        for number, pair in enumerate(vocab):
            if isinstance(pair, list) and pair and isinstance(pair[0], str):
                names[number] = pair[0]

    return names | {entry["id"]: entry["content"] for entry in _added_tokens(tokenizer)}
