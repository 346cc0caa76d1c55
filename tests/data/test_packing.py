"""Rows are split into documents: their numbers, positions and labels, and training on them."""

import json
import sys
from pathlib import Path
from subprocess import run

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer3d import cli
from composer3d.data import Batch, Corpus, Loader, open_corpus
from composer3d.models.contract import IGNORE_INDEX

END = 2


def batch_of(tokens: list[int], seq_len: int, packing: str) -> Batch:
    array = np.array(tokens, dtype=np.uint16)
    corpus = Corpus(tokens=array, end_of_document=END, digest="", n_documents=1, name="test")
    rows = (len(tokens) - 1) // seq_len
    return next(
        Loader(
            corpus,
            seq_len=seq_len,
            global_batch=rows,
            seed=1,
            batch_rank=0,
            batch_ranks=1,
            packing=packing,
        )
    )


def split(row: list[int], following: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return documents, positions and labels of a row, computed token by token."""
    documents, positions, labels = [], [], []
    document = position = 0
    for token, label in zip(row, following, strict=True):
        documents.append(document)
        positions.append(position)
        labels.append(IGNORE_INDEX if token == END else label)
        document, position = (document + 1, 0) if token == END else (document, position + 1)
    return documents, positions, labels


@settings(deadline=None, max_examples=60)
@given(
    seq_len=st.integers(1, 12),
    tokens=st.lists(st.sampled_from([0, 1, END, 3, 60_000]), min_size=13, max_size=80),
)
def test_rows_are_split_where_documents_end(seq_len: int, tokens: list[int]) -> None:
    packed, plain = (batch_of(tokens, seq_len, packing) for packing in ("documents", "none"))
    # The samples and their order are the same.
    assert torch.equal(packed.tokens_BT, plain.tokens_BT)
    rows = [
        split(*row) for row in zip(plain.tokens_BT.tolist(), plain.labels_BT.tolist(), strict=True)
    ]
    assert packed.documents_BT is not None
    assert [[*row] for row in zip(*rows, strict=True)] == [
        part.tolist() for part in (packed.documents_BT, packed.positions_BT, packed.labels_BT)
    ]
    for part in packed:
        assert part is not None
        assert part.dtype == torch.int64
        assert part.is_contiguous()


def test_rows_that_are_not_split_have_no_documents() -> None:
    batch = batch_of([1, END, 1, 1, END], 4, "none")
    assert batch.documents_BT is None
    assert batch.labels_BT.tolist() == [[END, 1, 1, END]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3]]


def test_every_source_names_its_end_of_document(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "text" / name).write_text(f"text of {name}\n" * 5)
    out = tmp_path / "tokens"
    assert (
        cli.main(["prepare", str(tmp_path / "text"), "-o", str(out), "--tokenizer", str(bpe)]) == 0
    )
    for corpus, end in (
        (open_corpus("text", tmp_path / "text", split="train"), 0),
        (open_corpus("tokens", out, split="train"), 1),
    ):
        assert corpus.end_of_document == end
        assert np.count_nonzero(corpus.tokens == end) == corpus.n_documents == 3


RECIPE = """\
[run]
name = "packed"
steps = 3
device = "cpu"

[model]
preset = "debug-tiny"

[data]
source = "jsonl"
path = "train.jsonl"
seq_len = 64
global_batch = 4
seed = 1

[validation]
every = 3
steps = 2
path = "held-out.jsonl"

[metrics]
every = 1
tensorboard = false
"""


def test_layouts_agree_on_packed_documents(tmp_path: Path) -> None:
    for name, count in (("train", 60), ("held-out", 30)):
        lines = [
            json.dumps({"text": f"{name} {i}: " + "abc "[: i % 5] * (i % 11)}) for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    losses = {}
    for name, *sets in (
        ("plain",),
        ("one", "data.packing=documents"),
        ("several", "data.packing=documents", "mesh.cp=2", "mesh.pp=2", "data.micro_batch=2"),
    ):
        command = [
            sys.executable,
            "-m",
            "composer3d",
            "train",
            "recipe.toml",
            f"--set=run.out_dir={name}",
        ]
        command += [f"--set={override}" for override in sets]
        done = run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        rows = [
            json.loads(line)
            for line in (tmp_path / name / "packed/metrics.jsonl").read_text().splitlines()
        ]
        losses[name] = [
            row[key] for key in ("loss", "validation_loss") for row in rows if key in row
        ]
        assert len(losses[name]) == 4
    assert losses["several"] == pytest.approx(losses["one"], rel=1e-5)
    assert all(abs(a - b) > 1e-4 for a, b in zip(losses["plain"], losses["one"], strict=True))
