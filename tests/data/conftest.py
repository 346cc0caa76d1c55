"""A small tokenizer, and the command that prepares data."""

import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.data.prepare_command import PrepareCommand

END = "<|endoftext|>"


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tokenizer.json: a byte-level BPE of about 400 tokens.

    It asks to truncate and to pad texts, which prepare must not do.
    """
    coder = Tokenizer(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    coder.train_from_iterator([text], trainer)
    coder.enable_truncation(5)
    coder.enable_padding(length=7)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    coder.save(str(path))
    return path


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PrepareCommand:
    return PrepareCommand(tmp_path, capsys)
