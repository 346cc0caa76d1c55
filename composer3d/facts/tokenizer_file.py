"""What a tokenizer.json says of its tokens, and whether two say the same. No torch or numpy here.

A tokenizer.json is untrusted: nothing in it is run here, and wrong values count as absent.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from composer3d.facts.files import parse_json

_BYTE_0 = "\0"  # the token of byte 0, which ends a document in data of bytes


class Difference(NamedTuple):
    """Something in which two tokenizers differ.

    Attributes:
        what: what it is, such as "token 5" or "merge 17".
        ours, theirs: its value in each of them; None where it is absent.
    """

    what: str
    ours: str | None
    theirs: str | None


def first_difference(ours: bytes, theirs: bytes) -> Difference | None:
    """Return the first difference in the vocabulary, the special tokens or the merges.

    Args:
        ours, theirs: the contents of two files tokenizer.json.

    Returns:
        None if a token means the same in both.

    Raises:
        ValueError: a file differs and is no JSON object.
    """
    if ours == theirs:
        return None
    pair = [_parse(ours), _parse(theirs)]
    names = [token_names(tokenizer) for tokenizer in pair]
    special = [_special_tokens(tokenizer) for tokenizer in pair]
    merges = [dict(enumerate(_merges(tokenizer))) for tokenizer in pair]
    for what, (a, b) in (("token", names), ("special token", special), ("merge", merges)):
        if a != b:
            number = min(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
            return Difference(f"{what} {number}", a.get(number), b.get(number))
    return None


def _parse(content: bytes) -> dict[str, Any]:
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of the special tokens, by id."""
    added = _added_tokens(tokenizer)
    return {entry["id"]: entry["content"] for entry in added if entry.get("special") is True}


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


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the merges of a BPE as texts. Older files have texts, and newer ones have pairs."""
    model = tokenizer.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list):
        return []
    return [
        " ".join(map(str, merge)) if isinstance(merge, list) else str(merge) for merge in merges
    ]


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
