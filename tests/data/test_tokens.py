"""Token files that training opens: what a loader reads of them, and every kind of damage, refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer3d.data import Loader, open_corpus, tokens
from composer3d.errors import DataError

N = 1_000
CHUNK = 512  # bytes: four of them in tokens.bin


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CHUNK_BYTES", CHUNK)


def make(folder: Path, ids: np.ndarray, **changed: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(ids.tobytes())
    (folder / "documents.bin").write_bytes(np.array([0, len(ids)], dtype="<i8").tobytes())
    (folder / "tokenizer.json").write_text("{}")
    facts = {"dtype": ids.dtype.name, "vocab": 70_000, "tokens": len(ids), "documents": 1, "end_of_document": 7}
    tokens.write_manifest(folder, {**facts, "tokenizer": {"name": "t", "digest": None}, **changed})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "t", np.arange(N, dtype="<u2"))


def opened(folder: Path) -> Any:
    return open_corpus("tokens", folder, split="train")


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_loader_reads_rows_of_the_map(tmp_path: Path, dtype: str) -> None:
    step = 65 if dtype == "<u2" else 4_000_000  # the largest is beyond 15 and beyond 31 bits
    corpus = opened(make(tmp_path / "t", (np.arange(N, dtype=np.int64) * step).astype(dtype)))
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.dtype == np.dtype(dtype)
    seq_len, n_samples = 37, 27  # 27 x 37 = 999: the last sample ends with the last token
    loader = Loader(corpus, seq_len=seq_len, global_batch=n_samples, seed=1, batch_rank=0, batch_ranks=1)
    batch = next(loader)
    rows = {int(row[0]) // step: row for row in torch.cat([batch.tokens_BT, batch.labels_BT[:, -1:]], dim=1)}
    assert sorted(rows) == [sample * seq_len for sample in range(n_samples)]
    for first, row in rows.items():
        assert row.tolist() == [(first + i) * step for i in range(seq_len + 1)]
    assert batch.tokens_BT.dtype == batch.labels_BT.dtype == torch.int64
    assert torch.equal(batch.tokens_BT[:, 1:], batch.labels_BT[:, :-1])


def test_a_loader_refuses_too_few_tokens_and_other_data(tmp_path: Path, folder: Path) -> None:
    order = {"global_batch": 2, "seed": 1, "batch_rank": 0, "batch_ranks": 1}
    with pytest.raises(DataError, match=rf"corpus \S+/t \(train\) has {N} tokens: too few for data.seq_len = {N}"):
        Loader(opened(folder), seq_len=N, **order)
    state = Loader(opened(folder), seq_len=N - 1, **order).state_dict()
    same = make(tmp_path / "same", np.arange(N, dtype="<u2"), tokenizer={"name": "moved", "digest": None})
    Loader(opened(same), seq_len=N - 1, **order).load_state_dict(state)
    other = make(tmp_path / "other", np.arange(1, N + 1, dtype="<u2"))
    with pytest.raises(DataError, match="the data has changed since"):
        Loader(opened(other), seq_len=N - 1, **order).load_state_dict(state)


def flip(at: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    return damage


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.json"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip(0), rf"is damaged between bytes 0 and {CHUNK}: their digest is not that of tokens.json;"),
        (flip(-1), r"is damaged between bytes \d+ and \d+: their digest is not that of tokens.json;"),
        (cut, r"has \d+ bytes, but tokens.json says \d+ bytes;"),
        (grow, r"has \d+ bytes, but tokens.json says \d+ bytes;"),
        (Path.unlink, r"is missing, but tokens.json says \d+ bytes;"),
    ],
    ids=["first byte", "last byte", "truncated", "too long", "missing"],
)
def test_a_damaged_file_is_refused_by_its_name(
    folder: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    assert opened(folder).n_documents == 1
    damage(folder / name)
    with pytest.raises(DataError, match=rf"t/{name} {said} make the folder again with composer3d prepare"):
        opened(folder)


def test_no_byte_of_the_manifest_can_change_unseen(folder: Path) -> None:
    path = folder / "tokens.json"
    whole = json.loads(path.read_text())
    for key, value in {"vocab": 71, "tokens": 999, "documents": 2, "dtype": "uint32", "end_of_document": 1}.items():
        path.write_text(json.dumps(whole | {key: value}))
        with pytest.raises(
            DataError, match=r"t/tokens\.json cannot be used \(ValueError: it does not have its own digest\); make"
        ):
            opened(folder)
    path.write_text(json.dumps(whole))
    assert opened(folder).n_documents == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"t has no tokens\.json; give a folder that composer3d prepare made"),
        (b"{", r"t/tokens\.json cannot be used \(JSONDecodeError: Expecting"),
        (b"\xff\xfe\xff", r"t/tokens\.json cannot be used \(UnicodeDecodeError: "),
        (b"[]", r"t/tokens\.json cannot be used \(TypeError: "),
        (b"{}", r"t/tokens\.json cannot be used \(KeyError: 'version'\); make"),
        (b'{"version": 2, "digest": ""}', r"t/tokens\.json cannot be used \(.* version 2, this composer3d reads 1\)"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(folder: Path, content: bytes | None, said: str) -> None:
    (folder / "tokens.json").unlink()
    if content is not None:
        (folder / "tokens.json").write_bytes(content)
    with pytest.raises(DataError, match=said):
        opened(folder)


def test_a_file_is_no_folder_of_tokens(folder: Path) -> None:
    with pytest.raises(DataError, match=r"tokens\.bin has no tokens\.json; give a folder"):
        opened(folder / "tokens.bin")


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
@pytest.mark.parametrize("at", [0, CHUNK, 2 * N - 1])
def test_the_ranks_of_a_node_share_the_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, at: int
) -> None:
    flip(at)(folder / "tokens.bin")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    saw = []
    for rank in range(ranks):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        try:
            opened(folder)
        except DataError as error:
            saw += error.lines
    assert len(saw) == 1  # one rank reads the chunk, and sees it
    assert f"tokens.bin is damaged between bytes {at // CHUNK * CHUNK} and" in saw[0]


def test_a_process_of_a_pool_checks_all_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    flip(0)(folder / "tokens.bin")
    with pytest.raises(DataError, match="is damaged"):
        opened(folder)
