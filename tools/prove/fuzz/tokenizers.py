"""Hostile tokenizer.json: ``prepare`` refuses each, or makes a whole folder of token files.

The files that it makes are compared with each other, and with the tokens that the tokenizers
library gives for each document by itself.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np

from tools.prove.fuzz.child import Case, WrongError, command
from tools.prove.fuzz.mutate import change_json, flip, replace_file, written

_TEXTS = ("a b ab", "the cat\nthe hat 12", "x" * 40, "caf\u00e9 \u4e16\u754c", "<eos> [UNK] \u0120")
_END = "<eos>"
_PATTERNS = (
    *(r"(a+)+$", r"(x+x+)+y", r"(x*)*y", r"(?:x?){40}x{40}", r"\p{L}+|\p{N}+", "(", "[", "*", ""),
    *("a{0,100000}", "(?<=x)*", r"\1(a)", "(" * 500 + ")" * 500, "\x00"),
)
_PIECES = {
    "normalizer": (
        {"type": "NFKC"},
        {"type": "Lowercase"},
        {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 200},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
        {"type": "Prepend", "prepend": "x" * 3000},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    ),
    "pre_tokenizer": (
        {"type": "Whitespace"},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Digits", "individual_digits": True},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    ),
    "post_processor": (
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "BertProcessing", "sep": ["x", 10**9], "cls": ["x", 0]},
    ),
    "decoder": ({"type": "ByteLevel"}, {"type": "Fuse"}, {"type": "BPEDecoder", "suffix": "x"}),
    "truncation": (
        {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10**9},
    ),
    "padding": (
        {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
        {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
    ),
}


def make_base(base: Path) -> None:
    """Write the sound tokenizers, of all four models of the library."""
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a", "\u00c3", "\u00a9"]
    words = {token: number for number, token in enumerate([_END, "[UNK]", *letters, "th", "the"])}
    pieces = [[token, -float(number)] for token, number in words.items()]
    added = [
        {"id": 0, "content": _END, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    models: dict[str, dict[str, Any]] = {
        "bpe": {"type": "BPE", "vocab": words, "merges": ["t h", "th e"], "unk_token": "[UNK]"},
        "wordpiece": {"type": "WordPiece", "vocab": words, "unk_token": "[UNK]"}
        | {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        "unigram": {"type": "Unigram", "unk_id": 1, "vocab": pieces, "byte_fallback": False},
        "wordlevel": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    folder = base / "tokenizers"
    folder.mkdir()
    for name, model in models.items():
        is_bpe = name == "bpe"
        split = {"type": "Split", "pattern": {"Regex": r"\s+|\w+"}, "behavior": "Isolated"}
        document = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
            "pre_tokenizer": byte_level | {"use_regex": True}
            if is_bpe
            else split | {"invert": False},
            "post_processor": None,
            "decoder": None,
            "model": model,
        }
        (folder / f"{name}.json").write_text(json.dumps(document))
    lines = [json.dumps({"text": text}) for text in _TEXTS]
    (base / "texts.jsonl").write_text("\n".join(lines) + "\n")


def make(base: Path, draw: random.Random) -> Case:
    """Change a tokenizer, and prepare a few documents with it."""
    name = draw.choice(("bpe", "bpe", "wordpiece", "unigram", "wordlevel"))
    document = json.loads((base / "tokenizers" / f"{name}.json").read_bytes())
    evil = Path("evil.json")
    ways = ("any", "any", "any", "piece", "piece", "pattern", "pattern", "deep", "ids", "huge")
    way = draw.choice((*ways, "bytes", "file", "merges", "added"))
    content: bytes | None = None
    if way == "any":
        for _ in range(draw.choice((1, 1, 3))):
            document, way = change_json(document, draw)
    elif way == "piece":
        part = draw.choice(list(_PIECES))
        document[part] = draw.choice(_PIECES[part])
        way = f"{part}: {json.dumps(document[part])[:80]}"
    elif way == "pattern":
        pattern = draw.choice(_PATTERNS)
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "y"}
        if draw.random() < 0.6:
            document["pre_tokenizer"] = split | {"invert": draw.random() < 0.5}
        else:
            document["normalizer"] = replace
        way = f"pattern {pattern[:40]!r}"
    elif way == "deep":
        depth = draw.choice((10, 120, 3000, 100_000))
        kind = draw.choice(("normalizer", "pre_tokenizer"))
        text = json.dumps(document)
        plural = f"{kind}s".replace("pre_tokenizers", "pretokenizers")
        nested = f'{{"type": "Sequence", "{plural}": [' * depth + "]}" * depth
        old = json.dumps(document[kind])
        content = text.replace(f'"{kind}": {old}', f'"{kind}": {nested}').encode()
        way = f"{kind} of depth {depth}"
    elif way == "ids" and isinstance(document["model"]["vocab"], dict):
        token = draw.choice(list(document["model"]["vocab"]))
        number = draw.choice((0, 1, 10**6, 2**24, 2**31, 2**32 - 1, 2**32, 10**30, -1, 1.5))
        document["model"]["vocab"][token] = number
        way = f"id of {token!r} is {number}"
    elif way == "huge":
        vocab = document["model"]["vocab"]
        if isinstance(vocab, dict):
            vocab.update({f"t{number}": 1000 + number for number in range(200_000)})
        way = "200,000 more words"
    elif way == "bytes":
        content = flip(written(document, draw), draw)
    elif way == "merges" and "merges" in document["model"]:
        document["model"]["merges"] = draw.choice(
            (["t h"] * 5000, ["x"], ["a b c"], [["t", "h"]], ["zz qq"], [""], 5, ["th the"])
        )
    elif way == "added":
        other = {**document["added_tokens"][0]}
        other.update(draw.choice(({"id": 10**9}, {"content": ""}, {"content": "x", "id": 0})))
        document["added_tokens"].append(other)
        if draw.random() < 0.5:
            document["added_tokens"] = [
                {**other, "id": 200 + number, "content": f"<{number}>"} for number in range(20_000)
            ]
    evil.write_bytes(content if content is not None else written(document, draw))
    if way == "file":
        way = f"file: {replace_file(evil, base.parent / 'outside', draw)}"
    eod = draw.choice((None, None, None, _END, "t", "", "no such token"))
    return Case(f"{name}: {way}, --eod {eod}", lambda: _act(base, evil, eod), cpu_s=5.0)


def _act(base: Path, evil: Path, eod: str | None) -> str:
    arguments = ["prepare", str(base / "texts.jsonl"), "-o", "out", "--tokenizer", str(evil)]
    if eod is not None:
        arguments += ["--eod", eod]
    ran = command(*arguments)
    out = Path("out")
    if ran.status != 0:
        left = [path.name for path in Path().iterdir() if path not in (evil, Path("not-there"))]
        if left:
            raise WrongError(f"a refused preparation left {left}")
        return "refused"

    inspected = command("inspect", "out", statuses=(0, 1, 2))
    if inspected.status != 0:
        raise WrongError("it wrote token files that inspect refuses")
    if (out / "tokenizer.json").read_bytes() != evil.read_bytes():
        raise WrongError("the copy of the tokenizer differs")
    _compare_tokens(out, evil, eod)
    return "made the right tokens"


def _compare_tokens(out: Path, evil: Path, eod: str | None) -> None:
    """Encode each document by itself, and compare."""
    import tokenizers

    document = json.loads((out / "tokens.json").read_bytes())
    dtype = {"uint16": "<u2", "uint32": "<u4"}[document["dtype"]]
    found = np.frombuffer((out / "tokens.bin").read_bytes(), dtype).tolist()
    library = tokenizers.Tokenizer.from_file(str(evil))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    end = document["end_of_document"]
    if eod is not None and library.token_to_id(eod) != end:
        raise WrongError(f"--eod {eod} is {library.token_to_id(eod)}, not {end}")
    expected: list[int] = []
    for text in _TEXTS:
        expected += [*library.encode(text, add_special_tokens=False).ids, end]
    if found != expected:
        raise WrongError(f"the tokens {found[:20]} are not {expected[:20]}")
    starts = np.frombuffer((out / "documents.bin").read_bytes(), "<i8")
    ends = [place + 1 for place, token in enumerate(found) if token == end]
    if starts.tolist() != [0, *ends] or max(found) >= document["vocab"]:
        raise WrongError("documents.bin or the vocabulary does not fit the tokens")
    if re.search(r"[^0-9a-f]", document["digest"]):
        raise WrongError("the manifest has no digest")
