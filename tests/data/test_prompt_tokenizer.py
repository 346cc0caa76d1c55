"""Prompts become the tokens that the tokenizers library gives them, and tokens become text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from composer3d.data.prompt_tokenizer import (
    PromptTokenizer,
    TextStream,
    make_prompt_tokenizer,
    open_prompt_tokenizer,
)
from tests.data.conftest import END
from tests.data.test_tokenizer import children, multiply, split, write
from tests.data.token_folders import refuses

TEXTS = ["def f():\n    return 1", "", "Grüße 🙂 an é", f"a {END} b", " x  y "]


@pytest.fixture(scope="module")
def coder(bpe: Path) -> Tokenizer:
    """The small BPE, with a token that begins each text."""
    coder = Tokenizer.from_file(str(bpe))
    coder.no_truncation()
    coder.no_padding()
    pad = coder.token_to_id("<pad>")
    coder.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", pad)]
    )
    return coder


@pytest.fixture(scope="module")
def tokenizer(coder: Tokenizer) -> Iterator[PromptTokenizer]:
    opened = make_prompt_tokenizer("t", coder.to_str().encode())
    yield opened
    opened.close()


NO_MERGES: dict[Any, dict[str, Any]] = {models.BPE: {"merges": []}}


def encode(coder: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the tokens of prompts, by a tokenizer of its own."""
    opened = make_prompt_tokenizer("t", coder.to_str().encode())
    try:
        return opened.encode(texts)
    finally:
        opened.close()


def test_tokens_and_texts_are_those_of_the_library(
    tokenizer: PromptTokenizer, coder: Tokenizer
) -> None:
    encoded = tokenizer.encode(TEXTS)
    assert encoded == [coder.encode(text).ids for text in TEXTS]
    # A name of a special token in a text is that token, and the template adds one.
    assert coder.token_to_id(END) in encoded[3]
    assert all(tokens[0] == coder.token_to_id("<pad>") for tokens in encoded)
    assert tokenizer.end == coder.token_to_id(END)
    assert [tokenizer.decode(tokens) for tokens in encoded] == [
        coder.decode(tokens) for tokens in encoded
    ]


def test_a_prompt_begins_once(tokenizer: PromptTokenizer, coder: Tokenizer) -> None:
    begin = coder.token_to_id("<pad>")
    before = tokenizer.repeated
    found = tokenizer.encode(["<pad>a", "a", "<pad><pad>a", "<pad>", "", "a<pad>"])
    a = coder.encode("a", add_special_tokens=False).ids
    assert found == [[begin, *a], [begin, *a], [begin, *a], [begin], [begin], [begin, *a, begin]]
    assert tokenizer.repeated == before + 3


def test_a_prompt_does_not_end(coder: Tokenizer) -> None:
    """A tokenizer may put a token after each text, but what is generated goes on with a prompt."""
    pad, end = coder.token_to_id("<pad>"), coder.token_to_id(END)
    ending = Tokenizer.from_str(coder.to_str())
    ending.post_processor = processors.TemplateProcessing(
        single=f"<pad> $A {END} <pad>", special_tokens=[("<pad>", pad), (END, end)]
    )
    assert ending.encode("").ids == [pad, end, pad]
    # A token at the end of the text itself stays.
    texts = [*TEXTS, f"a{END}"]
    assert encode(ending, texts) == [coder.encode(text).ids for text in texts]


@pytest.mark.parametrize("model", [models.BPE, models.WordLevel])
def test_a_small_vocabulary_shows_what_is_put_around_a_text(model: Any) -> None:
    """It has no letter of the usual sample, which a model of words then refuses."""
    genes = Tokenizer(model({"<s>": 0, "</s>": 1, "A": 2, "C": 3}, **NO_MERGES.get(model, {})))
    genes.add_special_tokens(["<s>", "</s>"])
    genes.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    genes.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert encode(genes, ["ACCA", "", "<s>A"]) == [[0, 2, 3, 3, 2], [0], [0, 2]]


def test_special_tokens_can_be_left_out(bpe: Path, coder: Tokenizer, tmp_path: Path) -> None:
    coder.save(str(tmp_path / "t.json"))
    opened = open_prompt_tokenizer(str(tmp_path / "t.json"), adds_special_tokens=False)
    expected = coder.encode(TEXTS[0], add_special_tokens=False).ids
    assert opened.encode(TEXTS[:1]) == [expected]
    opened.close()


def test_a_text_is_encoded_as_it_is(coder: Tokenizer, tmp_path: Path) -> None:
    """With special tokens or without them, and with two that begin it."""
    coder.save(str(tmp_path / "t.json"))
    opened = open_prompt_tokenizer(str(tmp_path / "t.json"), adds_special_tokens=False)
    for text in (TEXTS[0], "<pad>a"):
        for adds in (True, False):
            expected = coder.encode(text, add_special_tokens=adds).ids
            assert opened.encode_as_is(text, adds_special_tokens=adds) == expected
    opened.close()
    assert PromptTokenizer().encode_as_is("ab", adds_special_tokens=True) == [97, 98]


@pytest.mark.parametrize(
    ("config", "map_of_tokens", "name"),
    [
        ({"bos_token": "<pad>"}, {}, "<pad>"),
        ({"bos_token": {"content": "<pad>"}}, {"bos_token": END}, "<pad>"),
        ({"bos_token": "none such"}, {"bos_token": END}, END),
        ({"bos_token": None}, {}, None),
        ({}, {}, None),
    ],
)
def test_the_files_beside_a_tokenizer_say_what_begins_a_text(
    config: Any, map_of_tokens: Any, name: str | None, coder: Tokenizer, tmp_path: Path
) -> None:
    coder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(map_of_tokens))
    # As in transformers, the number in the model's own files is not that of the tokenizer.
    (tmp_path / "config.json").write_text('{"bos_token_id": 7}')
    opened = open_prompt_tokenizer(str(tmp_path))
    assert opened.begin == (None if name is None else coder.token_to_id(name))
    opened.close()


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_stream_gives_whole_characters(kind: str, tokenizer: PromptTokenizer) -> None:
    used = PromptTokenizer() if kind == "bytes" else tokenizer
    for tokens in used.encode([TEXTS[2], TEXTS[4]]):
        stream = TextStream(used)
        pieces = [stream.add(token) for token in tokens]
        assert not any("\ufffd" in piece for piece in pieces)
        assert sum(map(bool, pieces)) > 1
        assert "".join(pieces) + stream.finish() == used.decode(tokens)


def test_bytes_are_tokens() -> None:
    tokenizer = open_prompt_tokenizer("bytes")
    assert tokenizer.encode(["é\n"]) == [[0xC3, 0xA9, 10]]
    assert tokenizer.decode([0xC3, 0xA9, 0, 300, 10, 0xC3]) == "é\n\ufffd"
    assert tokenizer.end == 0


def test_a_tokenizer_that_fails_is_named(tmp_path: Path) -> None:
    before = children()
    opened = open_prompt_tokenizer(write(tmp_path, pre_tokenizer=split("(x+x+)+y")))
    with refuses(r"^--tokenizer \S+t\.json: it panics: Onig"):
        opened.encode(["x" * 100])
    opened.close()
    opened = open_prompt_tokenizer(write(tmp_path, decoder=multiply(1_000_000)))
    with refuses(r"^--tokenizer \S+t\.json: .*too much memory"):
        opened.decode([0] * 10_000)
    opened.close()
    with refuses(r"--tokenizer \S+no: No such file"):
        open_prompt_tokenizer(str(tmp_path / "no"))
    (tmp_path / "wrong").write_text("{}")
    with refuses("give bytes, or the path of a tokenizer"):
        open_prompt_tokenizer(str(tmp_path / "wrong"))
    assert children() == before
