"""``prepare --train-tokenizer``: the same text gives the same tokenizer, which others can load."""

import json
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from composer3d import cli
from composer3d.convert.carried import read_carried_files
from composer3d.data import prepare, train_tokenizer
from composer3d.data.documents import Document
from composer3d.runtime import progress
from tests.data.prepare_command import PrepareCommand, write_texts
from tests.data.test_tokenizer import children

DICE = random.Random(0)
SYLLABLES = ["ka", "Lo", "mi", "né", "日本", "(x", "  ", "1", "\n"]
WORDS = ["".join(DICE.choices(SYLLABLES, k=DICE.randint(1, 6))) for _ in range(1000)]
TEXTS = [" ".join(DICE.choices(WORDS, k=100)) for _ in range(50)]
TEXTS += ["héllo 日本語 😀", "it says <|endoftext|>"]
FILES = {"tokens.bin", "documents.bin", "tokens.json", "tokenizer.json", "tokenizer_config.json"}


TRAIN = ("--train-tokenizer", "500")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "x.jsonl", TEXTS)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def documents(texts: list[str]) -> list[Document]:
    return [Document(f"x:{n}", text.encode(), len(text)) for n, text in enumerate(texts)]


def test_transformers_and_our_checks_accept_the_folder(
    command: PrepareCommand, tmp_path: Path, source: Path
) -> None:
    out = tmp_path / "out"
    assert cli.main([*command.arguments(source, *TRAIN), "--json"]) == 0
    shown = command.capsys.readouterr().out
    assert f"{out}/tokenizer.json: trained on this text, 500 tokens\n" in shown
    answer = json.loads(shown.splitlines()[-1])
    assert (answer["vocab"], answer["end_of_document"], answer["documents"]) == (500, 0, len(TEXTS))
    assert answer["trained_tokenizer"] == str(out / "tokenizer.json")
    assert {path.name for path in out.iterdir()} == FILES
    assert not (tmp_path / "out.partial").exists()

    carried, refusals = read_carried_files(out)
    assert refusals == []
    assert set(carried) == {"tokenizer.json", "tokenizer_config.json"}
    coder: Any = AutoTokenizer.from_pretrained(out)
    assert (coder.eos_token, coder.eos_token_id, len(coder)) == ("<|endoftext|>", 0, 500)
    tokens = np.fromfile(out / "tokens.bin", dtype="<u2")
    expected: list[int] = []
    for text in TEXTS[:-1]:  # transformers reads the name in the last one as the token
        expected += [*coder(text).input_ids, 0]
    assert tokens[: len(expected)].tolist() == expected
    assert coder.decode(expected[:-1], skip_special_tokens=False).replace("<|endoftext|>", "") == (
        "".join(TEXTS[:-1])
    )
    assert cli.main(["inspect", str(out), "--full"]) == 0
    assert "tokenizer.json (trained)" in command.capsys.readouterr().out
    # The tokenizer can be given to another prepare, and gives the same tokens.
    assert cli.main(command.arguments(source, "--tokenizer", str(out), out="b")) == 0
    assert (tmp_path / "b" / "tokens.bin").read_bytes() == (out / "tokens.bin").read_bytes()


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"size": 550, "end": "</s>", "source_bytes": 1}
    one = train_tokenizer.train_tokenizer(documents(TEXTS), processes=1, **wanted)
    # Other processes hash words in another order. Many pairs occur equally often here.
    for order, processes in ((TEXTS, 2), (TEXTS[::-1], 3)):
        other = train_tokenizer.train_tokenizer(documents(order), processes=processes, **wanted)
        assert other == one
    fewer = train_tokenizer.train_tokenizer(documents(TEXTS[1:]), processes=1, **wanted)
    assert fewer != one
    coder = Tokenizer.from_buffer(one)
    assert coder.token_to_id("</s>") == 0
    # Every byte has a token.
    text = "".join(map(chr, range(1, 1000)))
    assert coder.decode(coder.encode(text).ids) == text


def test_a_split_has_one_tokenizer(command: PrepareCommand, tmp_path: Path, source: Path) -> None:
    command.run(source, *TRAIN, "--split", "0.4", "--eod", "</s>")
    found = contents(tmp_path / "out")
    parts = {"tokens.bin", "documents.bin", "tokens.json", "tokenizer.json"}
    expected = {f"{side}/{name}" for side in ("train", "validation") for name in parts}
    assert set(found) == expected | {"tokenizer.json", "tokenizer_config.json"}
    assert found["tokenizer.json"] == found["train/tokenizer.json"]
    assert json.loads(found["tokenizer_config.json"])["eos_token"] == "</s>"


def test_a_large_source_gives_a_part_of_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(train_tokenizer, "send_frame", lambda _, content: sent.append(content))
    texts = [f"text {number}" for number in range(1000)]
    options: dict[str, Any] = {"source_bytes": 1000}
    train_tokenizer._send_documents(None, documents(texts), 0.25, **options)  # type: ignore[arg-type]
    (batch,) = sent
    assert 200 < int.from_bytes(batch[:8], "little") < 300
    train_tokenizer._send_documents(None, documents(texts), 1.0, **options)  # type: ignore[arg-type]
    assert int.from_bytes(sent[1][:8], "little") == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--train-tokenizer", "32000"],
            r"^--train-tokenizer 32000: a text of [\d,]{6} characters gives only [\d,]{3,5} "
            "tokens; give more text, or a lower number$",
        ),
        (["--eod", "abc"], "^--train-tokenizer 500: a text could become abc, which is to end a"),
        (
            ["--train-tokenizer", "256"],
            "argument --train-tokenizer: must be from 257 .the bytes, and the end of a document. "
            "to 16,777,216, got 256$",
        ),
        (
            ["--tokenizer", "bytes"],
            "argument --tokenizer: not allowed with argument --train-tokenizer$",
        ),
        (["--field", "body"], r"x.jsonl:1: must be a JSON object such as .\"body\": \"...\".: got"),
    ],
    ids=["too little text", "an end of ordinary text", "too small", "both", "a wrong key"],
)
def test_what_cannot_be_trained_is_refused(
    command: PrepareCommand, tmp_path: Path, source: Path, options: list[str], message: str
) -> None:
    errors = command.errors(2, source, *TRAIN, *options)
    assert re.search(message, errors.splitlines()[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_one_of_both_options_is_needed(command: PrepareCommand, source: Path) -> None:
    assert cli.main(["prepare", str(source), "-o", "out"]) == 2
    error = "one of the arguments --tokenizer --train-tokenizer is required"
    assert error in command.capsys.readouterr().err


def test_after_an_interrupt_the_tokenizer_is_not_trained_again(
    command: PrepareCommand, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.run(source, *TRAIN, out="whole")
    partial = tmp_path / "out.partial"

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare.train, "train_tokenizer", interrupted)
        command.errors(130, source, *TRAIN)
        assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
        patch.undo()
        patch.setattr(prepare, "FileTokenizer", interrupted)
        shown = command.errors(130, source, *TRAIN)
    assert f"{partial} keeps its tokenizer; run the same command" in shown
    kept = contents(partial)
    assert set(kept) == {"journal.jsonl", "lock", "tokenizer.json", "tokenizer_config.json"}

    # It is of this size and of this text only.
    wrong = "was begun with another tokenizer or other options (tokenizer); give the same"
    assert wrong in command.refusal(source, "--train-tokenizer", "501")
    before = source.stat()
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert wrong in command.refusal(source, *TRAIN)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr(prepare.train, "train_tokenizer", interrupted)
    shown = command.errors(0, source, *TRAIN)
    assert f"{partial}: goes on with the tokenizer that it holds" in shown
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_training_says_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_tokenizer, "_NOTICE_S", 0.01)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    texts = documents([text.ljust(1_000_000) for text in TEXTS[:3]])
    options: dict[str, Any] = {"size": 280, "end": "</s>", "processes": 1}
    train_tokenizer.train_tokenizer(texts, source_bytes=4_000_000, **options)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("read text for the tokenizer: 1 of 4 MB, 0:00:00 so far")
    assert re.match(r"train the tokenizer: 1 s, 0:00:00 so far$", lines[3])


def test_ctrl_c_ends_the_training_at_once(
    command: PrepareCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A text of unlike words, on which the trainer takes minutes.
    text = " ".join(f"{number * 7919 % 10**9:x}{number:o}" for number in range(200_000))
    (tmp_path / "x.txt").write_text(text)
    trained: list[str] = []
    wait = train_tokenizer._wait

    def interrupted(answers: IO[bytes]) -> bytes:
        """Send Ctrl-C to this process and to that of the training, as a terminal does."""
        trained.extend(children())
        for process in (*map(int, trained), os.getpid()):
            threading.Timer(0.3, os.kill, (process, signal.SIGINT)).start()
        return wait(answers)

    monkeypatch.setattr(train_tokenizer, "_wait", interrupted)
    begin_s = time.monotonic()
    command.errors(130, "x.txt", "--train-tokenizer", "99999")
    assert time.monotonic() - begin_s < 30
    assert len(trained) == 1
    assert not children()
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]
