"""The rate of ``composer3d prepare`` beside the batch rate of the tokenizers library.

The text is the sources of Python's standard library as JSONL, several times over. The tokenizer is
a byte-level BPE of 32,000 tokens that is trained on a part of it. Both sides run in fresh
processes, in turn, on all cores. Neither counts the start of Python. ``prepare`` counts all else:
it starts its processes, loads the tokenizer in each, reads and parses the file, checks all tokens,
and writes the shards with their digests. The library counts ``encode_batch`` alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tools.bench.tables import print_row, ratio_with_range, with_range

VOCAB = 32_000
END = "<|endoftext|>"
BATCH = 1_000  # documents that the library gets at once
TRAINED_BYTES = 4_000_000


def prepare(args: argparse.Namespace) -> int:
    """Compare both, and print a row for each side. Returns 0."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        megabytes = _write_text(folder / "text.jsonl", args.copies) / 1e6
        _train(folder / "text.jsonl", folder / "tokenizer.json")
        rates: dict[str, list[float]] = {"tokenizers": [], "composer3d": []}
        for repeat in range(args.repeats):
            rates["tokenizers"].append(megabytes / _library_s(args.python, folder))
            rates["composer3d"].append(megabytes / _prepare_s(args.python, folder, repeat))
    print(f"{megabytes:.0f} MB of text, {os.cpu_count()} cores, {args.repeats} repeats")
    for side, values in rates.items():
        print_row(side, with_range(values, unit=" MB/s"))
    print(f"ratio {ratio_with_range(rates['composer3d'], rates['tokenizers'], '.3f')}")
    if args.json:
        ratio = statistics.median(rates["composer3d"]) / statistics.median(rates["tokenizers"])
        print(json.dumps({"rates_mb_per_s": rates, "ratio": ratio}))
    return 0


def _write_text(path: Path, copies: int) -> int:
    """Write the text, and return its size in bytes, without that of the JSON around it."""
    texts = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts and "dist-packages" not in file.parts:
            texts.append(file.read_text(errors="replace"))
    with open(path, "w") as output:
        for _ in range(copies):
            for text in texts:
                if text:
                    output.write(json.dumps({"text": text}) + "\n")
    return copies * sum(len(text.encode()) for text in texts)


def _texts(path: Path) -> list[str]:
    with open(path) as lines:
        return [json.loads(line)["text"] for line in lines]


def _train(text: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    coder = Tokenizer(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample, size = [], 0
    for document in _texts(text):
        sample.append(document)
        size += len(document)
        if size > TRAINED_BYTES:
            break
    coder.train_from_iterator(sample, trainer)
    coder.save(str(tokenizer))


def _library_s(python: str, folder: Path) -> float:
    """Return the seconds that the library takes, in a process of its own."""
    return float(_run([python, "-m", "tools.bench.tokenizing", str(folder)]).split()[-1])


def _prepare_s(python: str, folder: Path, repeat: int) -> float:
    command = [python, "-m", "composer3d", "prepare", str(folder / "text.jsonl"), "--json"]
    command += ["-o", str(folder / f"out{repeat}"), "--tokenizer", str(folder / "tokenizer.json")]
    return float(json.loads(_run(command).splitlines()[-1])["seconds"])


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _measure_library(folder: Path) -> None:
    """Print the seconds that encode_batch takes for all texts."""
    from tokenizers import Tokenizer

    coder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = _texts(folder / "text.jsonl")
    begin_s = time.monotonic()
    for first in range(0, len(texts), BATCH):
        coder.encode_batch(texts[first : first + BATCH], add_special_tokens=False)
    print(time.monotonic() - begin_s)


if __name__ == "__main__":
    _measure_library(Path(sys.argv[1]))
