"""Samples of whole documents: what is in them, against a plain loop and against their rules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer3d import cli
from composer3d.data import Batch, Blend, Corpus, Loader
from composer3d.data.rows import FILLING, WholeDocumentRows
from composer3d.data.tokens import document_bounds, open_tokens
from composer3d.models.contract import IGNORE_INDEX
from composer3d.verify.data import whole_document_samples
from tests.data.samples import corpus_of, loader_of
from tests.data.token_folders import refuses

END = 9


OPTIONS = {"seq_len": 6, "global_batch": 4, "packing": "whole_documents"}


def documents_of(tokens: list[int], mask: list[int] | None = None) -> Corpus:
    return corpus_of(tokens, end=END, mask=mask)


def whole_loader_of(
    corpus: Corpus | Blend, rank: int = 0, ranks: int = 1, **changed: Any
) -> Loader:
    return loader_of(corpus, rank, ranks, **OPTIONS | changed)


def rows_of(batch: Batch) -> list[tuple[list[int], ...]]:
    """Return tokens, labels, positions and documents of each row, in the order of the tokens."""
    parts = [part.tolist() for part in batch if part is not None]
    return sorted(zip(*parts, strict=True))


@settings(deadline=None, max_examples=200)
@given(
    seq_len=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    rest=st.integers(0, 5),
)
def test_samples_of_whole_documents(seq_len: int, lengths: list[int], rest: int) -> None:
    tokens = [token for length in lengths for token in [*[1] * (length - 1), END]]
    corpus = documents_of([*tokens, *[1] * rest])
    cut = WholeDocumentRows.of(corpus, seq_len)
    places = cut.places(np.arange(len(cut)))
    assert places.shape == (len(cut), seq_len)
    samples = [[place for place in row if place != FILLING] for row in places.tolist()]
    assert samples == whole_document_samples(corpus, seq_len)
    # Each token of a document is in one sample. What fills a sample up stands at its end.
    assert sorted(place for sample in samples for place in sample) == list(range(len(tokens)))
    assert all(
        FILLING not in row[: len(sample)] for row, sample in zip(places, samples, strict=True)
    )
    assert cut.n_cut == sum(length > seq_len for length in lengths)
    assert cut.filled == len(tokens) / (len(samples) * seq_len)

    owner = {place: number for number, sample in enumerate(samples) for place in sample}
    first = 0
    for length in lengths:
        owners = [owner[place] for place in range(first, first + length)]
        if length <= seq_len:
            assert len(set(owners)) == 1
        else:  # cut every seq_len tokens
            parts = [owners[at : at + seq_len] for at in range(0, length, seq_len)]
            assert all(len(set(part)) == 1 for part in parts)
            assert len({part[0] for part in parts}) == len(parts)
        first += length
    # No two samples could be joined.
    shortest = sorted(map(len, samples))[:2]
    assert len(shortest) == 1 or sum(shortest) > seq_len


# Documents of 4, 3, 8, 1 and 4 tokens.
TOKENS = [1, 2, 3, END, 4, 5, END, 1, 2, 3, 4, 5, 6, 7, END, END, 5, 6, 7, END]
MASK = [0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1]


def test_a_batch_of_whole_documents() -> None:
    batch = next(whole_loader_of(documents_of(TOKENS)))
    x = IGNORE_INDEX
    assert rows_of(batch) == [
        # The third document is too long: its beginning.
        ([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]),
        # The first document, and what is left of the third one.
        ([1, 2, 3, END, 7, END], [2, 3, END, x, END, x], [0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1]),
        # The second document. What fills the sample up is a document, too.
        ([4, 5, END, END, END, END], [5, END, x, x, x, x], [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]),
        # The fourth document is only its end; then the fifth one.
        ([END, 5, 6, 7, END, END], [x, 6, 7, END, x, x], [0, 0, 1, 2, 3, 0], [0, 1, 1, 1, 1, 2]),
    ]
    assert batch.ahead_B2KT is None
    for part in batch[:4]:
        assert part is not None
        assert part.dtype == torch.int64
        assert part.is_contiguous()


def test_a_mask_and_what_fills_up_leave_labels_out() -> None:
    plain, masked = (next(whole_loader_of(documents_of(TOKENS, mask))) for mask in (None, MASK))
    assert torch.equal(masked.tokens_BT, plain.tokens_BT)
    # In the order of ``test_a_batch_of_whole_documents``, what is learned of each row.
    x = IGNORE_INDEX
    assert [labels for _, labels, *_ in rows_of(masked)] == [
        [x, 3, 4, 5, 6, 7],
        [2, 3, END, x, END, x],
        [x, END, x, x, x, x],
        [x, x, 7, END, x, x],
    ]


def test_a_blend_of_whole_documents_sees_each_sample_once_an_epoch() -> None:
    first, second = documents_of(TOKENS), documents_of([7, 7, END, 8, 8, END])
    loader = whole_loader_of(Blend((first, second), (4.0, 1.0)), global_batch=5)
    tokens = sorted(row[0] for row in rows_of(loader[0]))
    alone = [row[0] for row in rows_of(whole_loader_of(first)[0])]
    assert tokens == sorted([*alone, [7, 7, END, 8, 8, END]])
    seen = loader.epochs_in(2)
    assert [(epoch.n_samples, epoch.epochs, epoch.n_cut) for epoch in seen] == [
        (4, 2, 1),
        (1, 2, 0),
    ]
    assert [epoch.filled for epoch in seen] == [20 / 24, 1]


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_other_samples_are_refused(packing: str) -> None:
    whole, even = (
        whole_loader_of(documents_of(TOKENS)),
        whole_loader_of(documents_of(TOKENS), packing=packing),
    )
    with refuses(f"packing = {packing}, .* made with whole_documents"):
        even.load_state_dict(whole.state_dict())
    with refuses(r"= whole_documents, .* made with documents or none"):
        whole.load_state_dict(even.state_dict())


def test_a_corpus_without_a_whole_document_is_refused() -> None:
    with refuses("test has no whole document"):
        whole_loader_of(documents_of([1, 2, 3, 4, 5, 6, 7]))


@pytest.mark.parametrize("shards", [1, 3])
def test_the_documents_of_a_folder(tmp_path: Path, shards: int) -> None:
    texts = [b"x" * (7 * number % 23) for number in range(1, 40)]
    lines = tmp_path / "text.jsonl"
    lines.write_text("".join(f'{{"text": "{text.decode()}"}}\n' for text in texts))
    folder = tmp_path / "tokens"
    options = ["--tokenizer", "bytes", *(["--shard-tokens", "200"] if shards > 1 else [])]
    assert cli.main(["prepare", str(lines), "-o", str(folder), *options]) == 0
    corpus = open_tokens(folder, name="folder")
    assert corpus.manifest is not None
    assert (len(corpus.manifest.shards) > 1) == (shards > 1)
    lengths = [len(text) + 1 for text in texts if text]
    assert document_bounds(corpus).tolist() == np.cumsum([0, *lengths]).tolist()

    damaged = folder / corpus.manifest.shards[-1].documents_file
    content = bytearray(damaged.read_bytes())
    content[8:16] = bytes(8)  # the second document of the shard begins where the first one does
    damaged.write_bytes(content)
    with refuses(f"{damaged.name} does not cut"):
        document_bounds(corpus)
