"""The tokenizer of the data is that of the weights that a run starts from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from composer3d import cli
from composer3d.facts.errors import RecipeError
from composer3d.facts.tokenizer_file import Difference, first_difference, make_byte_tokenizer
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import DataTable
from composer3d.recipe.tokenizers import find_difference
from tests.recipe.wrong import HF, token_files

END: dict[str, Any] = {"id": 3, "content": "</s>", "special": True}
BPE: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "added_tokens": [END],
    "post_processor": None,
}
ADDED = {"added_tokens": BPE["added_tokens"]}


def changed(**parts: Any) -> dict[str, Any]:
    return {**BPE, **parts, "model": {**BPE["model"], **parts.pop("model", {})}}


# Another tokenizer, and where it differs.
OTHERS: dict[str, tuple[dict[str, Any], tuple[str, str | None, str | None] | None]] = {
    "the same": (changed(), None),
    "pairs": (changed(model={"merges": [["a", "b"]]}), None),
    "what adds tokens": (changed(post_processor={"type": "ByteLevel"}), None),
    "a name": (changed(model={"vocab": {"a": 0, "c": 1, "ab": 2}}), ("token 1", "b", "c")),
    "fewer": (changed(model={"vocab": {"a": 0, "b": 1}}), ("token 2", "ab", None)),
    "more": (
        changed(added_tokens=[*BPE["added_tokens"], {"id": 4, "content": "<x>"}]),
        ("token 4", None, "<x>"),
    ),
    "not special": (
        changed(added_tokens=[{"id": 3, "content": "</s>", "special": False}]),
        ("special token 3", "</s>", None),
    ),
    "found with spaces": (
        changed(added_tokens=[END | {"rstrip": True, "lstrip": False}]),
        ("added token 3", "</s>", "</s> rstrip"),
    ),
    "found before cutting": (
        changed(added_tokens=[END, {"id": 2, "content": "ab", "special": False}]),
        ("added token 2", None, "ab"),
    ),
    # Without a normalizer, there is no other text to look for it in.
    "found in what is normalised": (changed(added_tokens=[END | {"normalized": True}]), None),
    "another merge": (changed(model={"merges": ["b a"]}), ("merge 0", "a b", "b a")),
    "wrong values": (
        {"model": {"vocab": {"a": "x"}, "merges": 7}, "added_tokens": [7, {"id": "3"}]},
        ("token 0", "a", None),
    ),
    "what cuts and pads sequences": (
        changed(truncation={"max_length": 8}, padding={"pad_id": 3}, version="1.0", decoder=None),
        None,
    ),
    "another regex": (
        changed(pre_tokenizer={"type": "Split", "pattern": {"Regex": "\\w"}}),
        ("setting pre_tokenizer.pattern.Regex", None, "\\w"),
    ),
    "normalised": (
        changed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
        ("setting normalizer.normalizers.0.type", None, "NFC"),
    ),
    "merges that are skipped": (
        changed(model={"ignore_merges": True}),
        ("setting model.ignore_merges", None, "true"),
    ),
    "scores": (
        {"model": {"vocab": [["a", 0.1], ["b", 1], ["ab", 2]]}, **ADDED},
        ("score 0", None, "0.1"),
    ),
    "pieces": ({"model": {"vocab": [["a", 0.1], ["b", 1], 7]}}, ("token 2", "ab", None)),
}


@pytest.mark.parametrize(("other", "expected"), OTHERS.values(), ids=OTHERS)
def test_vocabulary_added_tokens_merges_and_settings_are_compared(
    other: Any, expected: Any
) -> None:
    found = first_difference(json.dumps(BPE).encode(), json.dumps(other, indent=1).encode())
    assert found == (None if expected is None else Difference(*expected))


# Parts that cut a text, as older versions of the library ``tokenizers`` have saved them.
OLDER: tuple[dict[str, Any], ...] = (
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}},
    {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
        | {"strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "_", "add_prefix_space": True}
        | {"str_rep": "_"},
    },
    {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "\\w+"}, "behavior": "Removed"}
                | {"invert": True},
                {"type": "Punctuation"},
            ],
        },
    },
)


@pytest.mark.parametrize("parts", OLDER, ids=["bytes", "words", "a sequence"])
def test_a_copy_that_is_saved_again_is_the_same_tokenizer(parts: dict[str, Any]) -> None:
    parts = {"added_tokens": [], "normalizer": None, "decoder": None} | parts
    model = {"continuing_subword_prefix": "", "fuse_unk": False}
    older = json.dumps(changed(**parts, version="1.0", model=model))
    tokenizer = tokenizers.Tokenizer.from_str(older)
    tokenizer.enable_truncation(8)
    assert json.loads(tokenizer.to_str())["model"]["merges"] == [["a", "b"]]
    assert first_difference(older.encode(), tokenizer.to_str().encode()) is None


def test_a_recipe_may_insist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = token_files("t", tokenizer=json.dumps(BPE).encode())
    files |= {"m/config.json": HF, "m/tokenizer.json": make_byte_tokenizer()}
    files["x.toml"] = '[model]\nhf = "m"\n[data]\nsource = "tokens"\npath = "t"\nseq_len = 8\n'
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RecipeError, match=r'"t" has another tokenizer than model.hf = "m": token'):
        load("x.toml")
    load("x.toml", ["data.other_tokenizer=true"])
    # A run with checkpoints of its own does not read the folder.
    Path("runs/run/checkpoints/step-00000001").mkdir(parents=True)
    load("x.toml", ["run.name=run"])
    # Data of bytes fits a model of bytes alone.
    Path("a.txt").write_text("some words")
    assert cli.main(["prepare", "a.txt", "-o", "bytes", "--tokenizer", "bytes"]) == 0
    load("x.toml", ["data.path=bytes"])
    Path("m/tokenizer.json").write_text(json.dumps(BPE))
    table = DataTable(source="tokens", path="bytes")
    assert find_difference(table, "m") == 'token 0 is "\\u0000" in the data and "a" in the model'
    for data in (DataTable(source="text", path="a.txt"), DataTable()):
        assert find_difference(data, "m") == find_difference(table, "m")
        assert find_difference(replace(data, other_tokenizer=True), "m") is None
        assert find_difference(data, "m", ["tokenizer.json"]) == find_difference(data, "m")
        assert find_difference(data, "m", ["config.json"]) is None
    # A recipe without data may be meant for a plan. Text as bytes must be insisted on.
    Path("y.toml").write_text('[run]\nname = "y"\n[model]\nhf = "m"\n[data]\nseq_len = 8\n')
    load("y.toml")
    text = ["data.source=text", "data.path=a.txt"]
    with pytest.raises(RecipeError, match='"text" makes each byte a token, but model'):
        load("y.toml", text)
    load("y.toml", [*text, "data.other_tokenizer=true"])
    Path("m/tokenizer.json").write_bytes(make_byte_tokenizer())
    load("y.toml", text)
    Path("m/tokenizer.json").unlink()
    assert find_difference(table, "m") is None
    load("y.toml", text)


def test_a_recipe_for_a_plan_is_accepted_whatever_wrote_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """import and plan --write write data.source = "python", which a recipe need not."""
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    Path("m/config.json").write_text(HF)
    Path("m/tokenizer.json").write_text(json.dumps(BPE))
    deepspeed = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    Path("ds.json").write_text(json.dumps(deepspeed))
    command = ["import", "ds.json", "--gpus", "1", "-o", "made.toml", "--set", "model.hf=m"]
    assert cli.main([*command, "--set", "data.seq_len=8"]) == 0
    plan = ["plan", "made.toml", "--gpus", "1", "--gpu", "H100", "--top", "1"]
    assert cli.main([*plan, "--write", "fast.toml"]) == 0
    for recipe in ("made.toml", "fast.toml"):
        assert 'source = "python"' in Path(recipe).read_text()
        assert cli.main(["check", recipe]) == 0
        assert cli.main(["layout", recipe]) == 0
