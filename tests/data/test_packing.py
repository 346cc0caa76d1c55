"""Rows are split into documents: their numbers, positions and labels, and training on them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer3d.data import Batch
from composer3d.models.contract import IGNORE_INDEX
from composer3d.runtime.launch import Pool
from tests.data.samples import corpus_of, loader_of
from tests.training.jobs import RECIPE, SINGLE, build_and_train

END = 2


def batch_of(tokens: list[int], seq_len: int, packing: str) -> Batch:
    sizes = {"seq_len": seq_len, "global_batch": (len(tokens) - 1) // seq_len}
    return next(loader_of(corpus_of(tokens, end=END), packing=packing, **sizes))


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
    assert packed.ahead_B2KT is None
    for part in packed[:4]:
        assert part is not None
        assert part.dtype == torch.int64
        assert part.is_contiguous()


def test_rows_that_are_not_split_have_no_documents() -> None:
    batch = batch_of([1, END, 1, 1, END], 4, "none")
    assert batch.documents_BT is None
    assert batch.labels_BT.tolist() == [[END, 1, 1, END]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3]]


SETS = ["data.source=jsonl", "data.path=train.jsonl", "validation.path=held-out.jsonl"]
SETS += ["run.steps=3", "optim.warmup=0", "checkpoint.every=0"]
SETS += ["validation.every=3", "validation.steps=2"]


def test_layouts_agree_on_packed_documents(pool: Pool, tmp_path: Path) -> None:
    for name, count in (("train", 60), ("held-out", 30)):
        lines = [
            json.dumps({"text": f"{name} {i}: " + "abc "[: i % 5] * (i % 11)}) for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    losses = {}
    for name, world_size, *sets in (
        ("plain", 1),
        ("one", 1, "data.packing=documents"),
        ("several", 4, "data.packing=documents", "mesh.cp=2", "mesh.pp=2", "data.micro_batch=2"),
    ):
        arguments = {"folder": str(tmp_path), "sets": [*SETS, f"run.out_dir={name}", *sets]}
        limits = {"minutes": None, "largest_file": None}
        pool.run(build_and_train, arguments | limits, world_size=world_size)
        metrics = (tmp_path / name / "small/metrics.jsonl").read_text().splitlines()
        losses[name] = [
            row[key]
            for row in map(json.loads, metrics)
            for key in ("loss", "validation_loss")
            if key in row
        ]
        assert len(losses[name]) == 4
    assert losses["several"] == pytest.approx(losses["one"], rel=1e-5)
    assert all(abs(a - b) > 1e-4 for a, b in zip(losses["plain"], losses["one"], strict=True))
