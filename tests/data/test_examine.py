"""``inspect`` of token files shows lengths and texts, and trusts neither files nor tokenizers."""

import json
from pathlib import Path

import numpy as np
import pytest

from composer3d.cli import main
from composer3d.data import examine
from tests.data.token_folders import write_tokens

TEXTS = ["a", "bb\n", "é\x1b[31m", "d" * 500, "", "last one"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "x.jsonl"


def prepared(source: Path, *options: str) -> Path:
    out = source.with_name("out")
    assert main(["prepare", str(source), "-o", str(out), *options]) == 0
    return out


@pytest.mark.parametrize(("shard_tokens", "block"), [("1", 1 << 20), ("1000000", 2)])
def test_lengths_and_samples_of_bytes(
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shard_tokens: str,
    block: int,
) -> None:
    monkeypatch.setattr(examine, "_BLOCK_STARTS", block)
    folder = prepared(source, "--tokenizer", "bytes", "--shard-tokens", shard_tokens)
    capsys.readouterr()
    assert main(["inspect", str(folder), "--json", "--samples", "9"]) == 0
    report = json.loads(capsys.readouterr().out)
    # Each document has a token more, which ends it. The empty one does not count.
    assert report["lengths"] == {
        "mean": pytest.approx((2 + 4 + 8 + 501 + 9) / 5),
        "shortest": 2,
        "longest": 501,
        "histogram": [
            {"from": 1 << k, "to": (2 << k) - 1, "documents": count}
            for k, count in enumerate([0, 1, 1, 2, 0, 0, 0, 0, 1])
        ],
    }
    assert report["samples"] == [
        {"document": 0, "tokens": 2, "text": "a", "learned": None},
        {"document": 1, "tokens": 4, "text": "bb\\n", "learned": None},
        {"document": 2, "tokens": 8, "text": "é\\x1b[31m", "learned": None},
        {"document": 3, "tokens": 501, "text": "d" * 100 + "...", "learned": None},
        {"document": 4, "tokens": 9, "text": "last one", "learned": None},
    ]
    assert main(["inspect", str(folder), "--samples", "2"]) == 0
    out = capsys.readouterr().out
    assert "lengths      mean 104.8 tokens, shortest 2, longest 501; documents by tokens:\n" in out
    assert "8 to 15                        2 ##############################\n" in out
    assert out.endswith("document 0, 2 tokens: a\ndocument 4, 9 tokens: last one\n")
    assert main(["inspect", str(folder), "--samples", "0"]) == 0
    assert "document 0" not in capsys.readouterr().out


def test_samples_are_decoded_by_the_tokenizer(
    source: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepared(source, "--tokenizer", str(bpe))
    capsys.readouterr()
    assert main(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [sample["text"][:100] for sample in report["samples"]] == [
        "a",
        "é\\x1b[31m",
        "last one",
    ]
    assert report["notes"] == []


def make(folder: Path, starts: list[int]) -> Path:
    return write_tokens(folder, np.array([5, 0], dtype="<u2"), starts=starts, vocab=9)


def test_a_hostile_tokenizer_harms_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "t", [0, 2])
    assert main(["inspect", str(folder)]) == 0  # the tokens themselves are whole
    out = capsys.readouterr().out
    assert "cannot be shown: its tokenizer.json cannot be used: " in out
    assert "lengths      mean 2.0" in out


@pytest.mark.parametrize("starts", [[0, 0], [2, 0], [-1, 2], [0, 2**62]], ids=str)
def test_starts_are_not_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], starts: list[int]
) -> None:
    folder = make(tmp_path / "t", starts)
    assert main(["inspect", str(folder)]) == 1  # although the digests are right
    assert "documents.bin does not cut 2 tokens into 1 documents in" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--full"]) == 1
    capsys.readouterr()
    assert main(["inspect", str(folder), "--tensors"]) == 2
    refused = "composer3d inspect: --tensors has no effect on token files; leave it out\n"
    assert capsys.readouterr().err == refused


@pytest.mark.parametrize("number", ["-1", "1001", "x", "9" * 5000])
def test_a_wrong_number_of_samples_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    assert main(["inspect", str(tmp_path), f"--samples={number}"]) == 2
    assert "must be a whole number from 0 to 1000" in capsys.readouterr().err
