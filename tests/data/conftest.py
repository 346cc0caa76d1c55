"""A small tokenizer, and the command that prepares data."""

import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.data.prepare_command import PrepareCommand

END = "<|endoftext|>"


def train_bpe(texts: list[str], *, size: int, special: list[str]) -> Tokenizer:
    """Train a byte-level BPE on some texts. The special tokens get the first numbers."""
    coder = Tokenizer(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    coder.train_from_iterator(texts, trainer)
    return coder


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tokenizer.json: a byte-level BPE of about 400 tokens.

    It asks to truncate and to pad texts, which prepare must not do.
    """
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    coder = train_bpe([text], size=400, special=["<pad>", END])
    coder.enable_truncation(5)
    coder.enable_padding(length=7)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    coder.save(str(path))
    return path


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PrepareCommand:
    return PrepareCommand(tmp_path, capsys)
