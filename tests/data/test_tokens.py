"""A loader reads token files; every kind of damage to them is refused by name."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer3d.cli import main
from composer3d.data import Loader, open_corpus, tokens
from composer3d.data.blend import Blend
from composer3d.facts import token_manifest
from composer3d.facts.errors import DataError
from composer3d.facts.token_manifest import digest_of, digest_of_manifest

N = 1_000
CHUNK = 512  # bytes; tokens.bin has four chunks


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_manifest, "CHUNK_BYTES", CHUNK)


def make(folder: Path, ids: np.ndarray, **changed: Any) -> Path:
    """Make token files; ``changed`` are other facts of the manifest.

    The last token is the one that ends documents.
    """
    folder.mkdir(parents=True)
    starts = [0, *(np.flatnonzero(ids == ids[-1]) + 1)]
    (folder / "tokens.bin").write_bytes(ids.tobytes())
    (folder / "documents.bin").write_bytes(np.array(starts, dtype="<i8").tobytes())
    (folder / "tokenizer.json").write_text("{}")
    facts = {
        "dtype": ids.dtype.name,
        "vocab": int(ids.max()) + 1,
        "tokens": len(ids),
        "documents": len(starts) - 1,
        "end_of_document": int(ids[-1]),
    }
    facts |= {"tokenizer": {"name": "t", "digest": digest_of(b"{}")}}
    tokens.write_manifest(folder, {**facts, **changed})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "t", np.arange(N, dtype="<u2"))


def with_ends(ids: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Put a token that ends documents before each cut and at the end, and nowhere else."""
    ended = ids.copy()
    ended[[*(cut - 1 for cut in cuts), -1]] = ids.max() + 1
    return ended


def make_shards(folder: Path, ids: np.ndarray, cuts: list[int]) -> Path:
    """Make token files of several shards, cut at ``cuts``, from what ``with_ends`` returns.

    Each shard is one document.
    """
    folder.mkdir(parents=True)
    parts = np.split(ids, cuts)
    for number, part in enumerate(parts):
        (folder / f"tokens-{number:05}.bin").write_bytes(part.tobytes())
        starts = np.array([0, len(part)], dtype="<i8")
        (folder / f"documents-{number:05}.bin").write_bytes(starts.tobytes())
    facts = {
        "dtype": ids.dtype.name,
        "vocab": int(ids.max()) + 1,
        "tokens": len(ids),
        "documents": len(parts),
        "end_of_document": int(ids[-1]),
        "tokenizer": {"name": "bytes", "digest": None},
        "shards": [{"tokens": len(part), "documents": 1} for part in parts],
    }
    tokens.write_manifest(folder, facts)
    return folder


def opened(folder: Path) -> Any:
    return open_corpus("tokens", folder, split="train")


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_loader_reads_rows_of_the_map(tmp_path: Path, dtype: str) -> None:
    step = 65 if dtype == "<u2" else 4_000_000  # the largest is beyond 15 and beyond 31 bits
    corpus = opened(make(tmp_path / "t", (np.arange(N, dtype=np.int64) * step).astype(dtype)))
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.dtype == np.dtype(dtype)
    seq_len, n_samples = 37, 27  # 27 x 37 = 999: the last sample ends with the last token
    loader = Loader(
        corpus, seq_len=seq_len, global_batch=n_samples, seed=1, batch_rank=0, batch_ranks=1
    )
    batch = next(loader)
    rows = {
        int(row[0]) // step: row
        for row in torch.cat([batch.tokens_BT, batch.labels_BT[:, -1:]], dim=1)
    }
    assert sorted(rows) == [sample * seq_len for sample in range(n_samples)]
    for first, row in rows.items():
        assert row.tolist() == [(first + i) * step for i in range(seq_len + 1)]
    assert batch.tokens_BT.dtype == batch.labels_BT.dtype == torch.int64
    assert torch.equal(batch.tokens_BT[:, 1:], batch.labels_BT[:, :-1])


def test_a_loader_refuses_too_few_tokens_and_other_data(tmp_path: Path, folder: Path) -> None:
    order = {"global_batch": 2, "seed": 1, "batch_rank": 0, "batch_ranks": 1}
    with pytest.raises(
        DataError, match=rf"corpus \S+/t \(train\) has {N} tokens: too few for data.seq_len = {N}"
    ):
        Loader(opened(folder), seq_len=N, **order)
    state = Loader(opened(folder), seq_len=N - 1, **order).state_dict()
    same = make(
        tmp_path / "same",
        np.arange(N, dtype="<u2"),
        tokenizer={"name": "moved", "digest": digest_of(b"{}")},
    )
    Loader(opened(same), seq_len=N - 1, **order).load_state_dict(state)
    # A checkpoint of an older composer3d has the digest of the files.
    content = {"digest": "1" * 32, "files": opened(folder).digest}
    newer = make(tmp_path / "newer", np.arange(N, dtype="<u2"), content=content)
    assert opened(newer).digest == "1" * 32
    Loader(opened(newer), seq_len=N - 1, **order).load_state_dict(state)
    blends = [
        Loader(Blend((opened(path),) * 2, (1.0, 2.0)), seq_len=N - 1, **order)
        for path in (folder, newer)
    ]
    blends[1].load_state_dict(blends[0].state_dict())
    other = make(tmp_path / "other", np.arange(1, N + 1, dtype="<u2"))
    with pytest.raises(DataError, match="the data has changed since"):
        Loader(opened(other), seq_len=N - 1, **order).load_state_dict(state)


# Cuts inside of samples, at their ends, and shards shorter than a sample.
CUTS = [1, 37, 74, 75, 76, 500, 999]


@pytest.mark.parametrize("most_maps", [1, 3, 128])
@pytest.mark.parametrize("packing", ["none", "documents"])
def test_samples_do_not_depend_on_the_shards(
    tmp_path: Path, most_maps: int, packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = with_ends(np.random.default_rng(0).integers(0, 50, N).astype("<u2"), CUTS)
    order: dict[str, Any] = {"seq_len": 37, "global_batch": 9, "seed": 1, "packing": packing}
    order |= {"batch_rank": 0, "batch_ranks": 1}
    whole = Loader(opened(make(tmp_path / "whole", ids)), **order)
    monkeypatch.setattr(tokens, "MOST_MAPS", most_maps)
    folder = make_shards(tmp_path / "shards", ids, CUTS)
    corpus = tokens.open_tokens(folder, name="shards", most_maps=most_maps)
    cut = Loader(corpus, **order)
    for _ in range(6):  # two epochs
        for of_whole, of_cut in zip(next(whole), next(cut), strict=True):
            assert of_whole is of_cut is None or torch.equal(of_whole, of_cut)
    assert len(corpus.tokens) == N
    assert isinstance(corpus.tokens, tokens.ShardedTokens)
    assert len(corpus.tokens._maps) == min(most_maps, 8)
    assert corpus.tokens[np.arange(N)].tolist() == ids.tolist()


def test_a_thousand_shards_open_few_files_and_quickly(tmp_path: Path) -> None:
    cuts = list(range(20, 20_000, 20))
    folder = make_shards(tmp_path / "t", with_ends(np.arange(20_000, dtype="<u2"), cuts), cuts)
    start_s = time.process_time()
    corpus = opened(folder)
    loader = Loader(corpus, seq_len=64, global_batch=300, seed=0, batch_rank=0, batch_ranks=1)
    batch = next(loader)
    assert time.process_time() - start_s < 5
    assert torch.equal(batch.tokens_BT[:, 1:], batch.labels_BT[:, :-1])
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert 0 < sum(path.startswith(str(folder)) for path in mapped) <= tokens.MOST_MAPS


def test_a_start_reads_the_shards_of_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = list(range(100, 100_000, 100))
    folder = make_shards(tmp_path / "t", with_ends(np.arange(100_000, dtype="<u4"), cuts), cuts)
    verified: list[Any] = []
    mapped: list[str] = []
    whole = tokens._map_shard

    def map_shard(manifest: Any, shard: Any) -> Any:
        mapped.append(shard.tokens_file)
        return whole(manifest, shard)

    monkeypatch.setattr(tokens, "_verify_chunk", lambda _, *chunk: verified.append(chunk))
    monkeypatch.setattr(tokens, "_map_shard", map_shard)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    corpus = opened(folder)
    assert (len(verified), mapped) == (16, [])
    next(Loader(corpus, seq_len=64, global_batch=4, seed=0, batch_rank=0, batch_ranks=1))
    # A sample of 65 tokens is in one shard or in two.
    assert 4 <= len(mapped) <= 8


@pytest.mark.parametrize("name", ["tokens-00002.bin", "documents-00007.bin"])
@pytest.mark.parametrize("full", [False, True])
def test_a_damaged_shard_is_named(
    tmp_path: Path, name: str, full: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_shards(tmp_path / "t", with_ends(np.arange(N, dtype="<u2"), CUTS), CUTS)
    (flip(0) if full else cut)(folder / name)
    assert main(["inspect", str(folder), *(["--full"] if full else [])]) == 1
    problem = "is damaged between bytes 0 and 512" if full else "bytes, but tokens.json says"
    out = capsys.readouterr().out
    assert problem in out
    lines = [line for line in out.splitlines() if line.startswith(str(folder))]
    assert lines[0].startswith(f"{folder}/{name} ")
    # Tokens are compared with the file of documents, so they too are in doubt if it is damaged.
    assert all(f"-{name[-9:]} " in line for line in lines)
    if not full:  # a start verifies all sizes, and 16 of the 18 parts
        with pytest.raises(DataError, match=name):
            opened(folder)


def test_a_shard_that_shrinks_during_a_run_is_refused(tmp_path: Path) -> None:
    corpus = opened(make_shards(tmp_path / "t", with_ends(np.arange(N, dtype="<u2"), CUTS), CUTS))
    cut(tmp_path / "t" / "tokens-00006.bin")
    with pytest.raises(DataError, match=r"tokens-00006\.bin has 997 bytes, but"):
        corpus.tokens[np.array([600])]


WRONG_SHARDS: dict[str, tuple[Any, str]] = {
    "none": ([], "shards must be a list of 1 to 100000 objects"),
    "an object": ({}, "shards must be a list of 1 to 100000 objects"),
    "too few tokens": ([{"tokens": 999, "documents": 8}], "tokens is 1000, but its shards have"),
    "too many documents": ([{"tokens": N, "documents": 9}], "documents is 8, but its shards have"),
    "a shard of nothing": ([{"tokens": 0, "documents": 0}], "shards[0].tokens is 0, not a whole"),
    "a negative one": (
        [{"tokens": N, "documents": 8}, {"tokens": -1, "documents": 1}],
        "shards[1].tokens is -1",
    ),
    "a name": (
        [{"tokens": N, "documents": 8, "file": "/etc/passwd"}],
        'shards[0] has "file", which does not belong there',
    ),
    "a file too many": ([{"tokens": N, "documents": 8}], 'files has "'),
    "a file too few": (
        [*[{"tokens": 100, "documents": 1}] * 7, *[{"tokens": 150, "documents": 1}] * 2],
        "documents is 8, but its shards have 9",
    ),
}


@pytest.mark.parametrize(("shards", "message"), WRONG_SHARDS.values(), ids=WRONG_SHARDS)
def test_no_shard_of_a_manifest_is_trusted(tmp_path: Path, shards: Any, message: str) -> None:
    folder = make_shards(tmp_path / "t", with_ends(np.arange(N, dtype="<u2"), CUTS), CUTS)
    manifest = json.loads((folder / "tokens.json").read_text()) | {"shards": shards}
    manifest["digest"] = digest_of_manifest(manifest)
    (folder / "tokens.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError) as caught:
        opened(folder)
    assert f"tokens.json cannot be used ({message}" in caught.value.lines[0]


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
    ("damage", "message"),
    [
        (
            flip(0),
            rf"is damaged between bytes 0 and {CHUNK}: its digest there is not the one in "
            rf"tokens.json;",
        ),
        (
            flip(-1),
            r"is damaged between bytes \d+ and \d+: its digest there is not the one in "
            r"tokens.json;",
        ),
        (cut, r"has \d+ bytes, but tokens.json says \d+ bytes;"),
        (grow, r"has \d+ bytes, but tokens.json says \d+ bytes;"),
        (Path.unlink, r"is missing, but tokens.json says \d+ bytes;"),
    ],
    ids=["first byte", "last byte", "truncated", "too long", "missing"],
)
def test_a_damaged_file_is_refused_by_its_name(
    folder: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    assert opened(folder).n_documents == 1
    damage(folder / name)
    with pytest.raises(
        DataError, match=rf"t/{name} {message} make the folder again with composer3d prepare"
    ):
        opened(folder)


def test_changes_of_the_manifest_are_found(folder: Path) -> None:
    path = folder / "tokens.json"
    whole = json.loads(path.read_text())
    sizes, digest = "its tokens and documents make", "its digest does not match its content"
    changes: dict[str, tuple[Any, str]] = {
        "vocab": (1_071, digest),
        "tokens": (999, f"files.tokens.bin.bytes is 2000, but {sizes} 1998"),
        "documents": (2, f"files.documents.bin.bytes is 16, but {sizes} 24"),
        "dtype": ("uint32", f"files.tokens.bin.bytes is 2000, but {sizes} 4000"),
        "end_of_document": (1, digest),
    }
    for key, (value, problem) in changes.items():
        path.write_text(json.dumps(whole | {key: value}))
        with pytest.raises(DataError, match=rf"t/tokens\.json cannot be used \({problem}\); make"):
            opened(folder)
    path.write_text(json.dumps(whole))
    assert opened(folder).n_documents == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"t has no tokens\.json; give a folder that composer3d prepare made"),
        (b"{", r"t/tokens\.json cannot be used \(Expecting"),
        (b"\xff\xfe\xff", r"t/tokens\.json cannot be used \('utf-16-le' codec can't decode"),
        (b"[]", r"t/tokens\.json cannot be used \(it must be an object, not a list\); make"),
        (b"{}", r"t/tokens\.json cannot be used \(it lacks version\); make"),
        (
            b'{"version": 4, "digest": ""}',
            r"t/tokens\.json cannot be used \(.* version 4, but this composer3d reads 1, 2 and 3\)",
        ),
        (
            b'{"version": true}',
            r"cannot be used \(it has version true, but this composer3d reads 1, 2 and 3\)",
        ),
        (
            b'{"version": Infinity}',
            r"cannot be used \(it holds Infinity, which JSON does not have\)",
        ),
        (b"[" * 100_000, r"cannot be used \(it nests too deep\)"),
        (b"9" * 5_000, r"cannot be used \(it holds an integer of 5,000 digits"),
        (b" " * (65 << 20), r"cannot be used \(is larger than 67,108,864 bytes"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(
    folder: Path, content: bytes | None, message: str
) -> None:
    (folder / "tokens.json").unlink()
    if content is not None:
        (folder / "tokens.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        opened(folder)


def test_a_file_in_place_of_the_folder_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"tokens\.bin has no tokens\.json; give a folder"):
        opened(folder / "tokens.bin")


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
@pytest.mark.parametrize("at", [0, CHUNK, 2 * N - 1])
def test_the_ranks_of_a_node_share_the_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, at: int
) -> None:
    flip(at)(folder / "tokens.bin")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    lines: list[str] = []
    for rank in range(ranks):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        try:
            opened(folder)
        except DataError as error:
            lines += error.lines
    assert len(lines) == 1  # one rank reads the chunk
    assert f"tokens.bin is damaged between bytes {at // CHUNK * CHUNK} and" in lines[0]


def test_a_process_alone_verifies_everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    flip(0)(folder / "tokens.bin")
    with pytest.raises(DataError, match="is damaged"):
        opened(folder)


def test_a_rank_verifies_a_bounded_number_of_chunks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="composer3d")
    verified: list[tuple[str, int]] = []
    monkeypatch.setattr(tokens, "_verify_chunk", lambda _, *chunk: verified.append(chunk))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    whole = [("documents.bin", 0), ("tokenizer.json", 0)]
    whole += [("tokens.bin", number) for number in range(4)]
    opened(folder)
    assert sorted(verified) == whole  # in several threads
    assert not caplog.records

    monkeypatch.setattr(tokens, "_MOST_CHUNKS", 3)
    seen = set()
    for _ in range(100):  # each chunk is left out of all with a probability of 2^-100
        verified.clear()
        opened(folder)
        assert len(set(verified)) == len(verified) == 3
        seen |= set(verified)
    assert seen == set(whole)
    logged = caplog.records[0].getMessage()
    assert "has 6 parts of up to 0 MiB: each node verifies 3 at random" in logged
    assert logged.endswith(f"composer3d inspect {folder} --full verifies all")


def test_inspect_verifies_all_chunks(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MOST_CHUNKS", 1)
    assert main(["inspect", str(folder), "--full"]) == 0
    out = capsys.readouterr().out
    assert "tokens       1,000\n" in out
    assert "whole        yes: every digest is right\n" in out
    for at in (0, CHUNK, 2 * N - 1):
        flip(at)(folder / "tokens.bin")
    assert main(["inspect", str(folder), "--full", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["whole"] is False
    assert main(["inspect", str(folder)]) == 0  # the sizes are right
    assert "every size is right; --full compares the digests" in capsys.readouterr().out
    assert [line.split(" between ")[0] for line in report["problems"]] == [
        f"{folder}/tokens.bin is damaged"
    ] * 3
    (folder / "tokens.bin").unlink()
    assert main(["inspect", str(folder)]) == 1
    assert capsys.readouterr().out.count("tokens.bin is missing") == 1


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("at", [0, 1, N // 2, N - 2])
def test_a_token_above_the_vocabulary_is_refused(tmp_path: Path, dtype: str, at: int) -> None:
    ids = np.full(N, 9, dtype=dtype)
    ids[-1] = 7
    ids[at] = 10
    assert opened(make(tmp_path / "whole", ids, vocab=11)).n_documents == 1
    with pytest.raises(
        DataError, match=r"tokens\.bin holds token 10 between bytes \d+ and \d+, but .* of 10; make"
    ):
        opened(make(tmp_path / "t", ids, vocab=10))


@pytest.mark.parametrize(
    "starts",
    [
        [*range(150), 150, N],
        [1, *range(2, 152), N],
        [*range(151), N - 1],
        [*range(64), 63, *range(65, 151), N],
        [*range(150), -1, N],
        [*range(150), N, N],
        [0, *range(2**62, 2**62 + 150), N],
    ],
    ids=["right", "first", "last", "twice, over two chunks", "negative", "empty", "huge"],
)
def test_documents_must_be_in_order(tmp_path: Path, starts: list[int]) -> None:
    ids = np.full(N, 9, dtype="<u2")
    ids[[*range(150), N - 1]] = 7
    folder = make(tmp_path / "t", ids)
    for name in ("tokens.json", "documents.bin"):
        (folder / name).unlink()
    (folder / "documents.bin").write_bytes(np.array(starts, dtype="<i8").tobytes())  # three chunks
    facts = {
        "dtype": "uint16",
        "vocab": N,
        "tokens": N,
        "documents": len(starts) - 1,
        "end_of_document": 7,
    }
    tokens.write_manifest(folder, {**facts, "tokenizer": {"name": "t", "digest": digest_of(b"{}")}})
    if starts[:2] == [0, 1] and starts == sorted(set(starts)) and starts[-1] == N:
        assert opened(folder).n_documents == 151
    else:
        with pytest.raises(
            DataError,
            match=rf"documents\.bin does not cut {N} tokens into 15[01] documents in order; make",
        ):
            opened(folder)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("at", [0, 255, 256, N // 2, N - 1])
def test_ends_of_documents_must_stand_where_documents_end(
    tmp_path: Path, dtype: str, at: int
) -> None:
    """Who makes the digests again can write other ends. Training would split rows at them."""
    ids = np.full(N, 9, dtype=dtype)
    ids[[127, 128, 255, N - 1]] = 7
    folder = make(tmp_path / "t", ids)
    assert opened(folder).n_documents == 4
    (folder / "tokens.json").unlink()
    ids[at] = 8 if ids[at] == 7 else 7
    (folder / "tokens.bin").write_bytes(ids.tobytes())
    facts = {"dtype": ids.dtype.name, "vocab": 10, "tokens": N, "documents": 4}
    facts |= {"end_of_document": 7, "tokenizer": {"name": "t", "digest": digest_of(b"{}")}}
    tokens.write_manifest(folder, facts)
    with pytest.raises(
        DataError, match=r"tokens\.bin holds the end of a document \(token 7\) between bytes \d+"
    ):
        opened(folder)


def test_large_files_may_be_links_and_the_tokenizer_may_not(folder: Path, tmp_path: Path) -> None:
    for name in ("tokens.bin", "documents.bin", "tokenizer.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(
        DataError,
        match=r"t/tokenizer\.json is a symbolic link, which is not followed here; put the",
    ):
        opened(folder)
    (folder / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    assert opened(folder).n_documents == 1


@pytest.mark.timeout(10)  # opening a pipe would wait forever
@pytest.mark.parametrize("name", ["tokens.json", "tokens.bin", "documents.bin", "tokenizer.json"])
def test_a_pipe_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(
        DataError, match=rf"t/{name} (cannot be used \()?is a named pipe, not a plain file"
    ):
        opened(folder)


WRONG_MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "other"}, 'its format is "other", not "composer3d tokens"'),
    "dtype": ({"dtype": "object"}, 'dtype is "object", not uint16 or uint32'),
    "dtype of a list": ({"dtype": ["<u2"]}, "dtype is a list, not uint16 or uint32"),
    "vocab beyond the dtype": (
        {"vocab": 65_537},
        "vocab is 65537, not a whole number from 1 to 65536",
    ),
    "vocab of a text": ({"vocab": "9"}, 'vocab is "9", not a whole number'),
    "vocab of a bool": ({"vocab": True}, "vocab is true, not a whole number"),
    "tokens below 0": ({"tokens": -1}, "tokens is -1, not a whole number"),
    "tokens of a float": ({"tokens": 1000.0}, "tokens is 1000.0, not a whole number"),
    "tokens beyond all disks": (
        {"tokens": 10**18},
        "tokens is 1000000000000000000, not a whole number",
    ),
    "no documents": ({"documents": 0}, "documents is 0, not a whole number from 1 to 1000"),
    "more documents than tokens": (
        {"documents": 1001},
        "documents is 1001, not a whole number from 1 to 1000",
    ),
    "end beyond the vocabulary": (
        {"end_of_document": N},
        "end_of_document is 1000, not a whole number from 0 to 999",
    ),
    "end below 0": ({"end_of_document": -1}, "end_of_document is -1, not a whole number"),
    "tokenizer of a text": ({"tokenizer": "t"}, 'tokenizer must be an object, not "t"'),
    "tokenizer without digest": ({"tokenizer": {"name": "t"}}, "tokenizer lacks digest"),
    "tokenizer of no name": (
        {"tokenizer": {"name": 1, "digest": None}},
        "tokenizer.name is 1, not a text",
    ),
    "digest of other form": (
        {"tokenizer": {"name": "t", "digest": "00"}},
        'tokenizer.digest has "00", not a digest',
    ),
    "digest of another": (
        {"tokenizer": {"name": "t", "digest": "0" * 32}},
        "tokenizer.digest differs from the digest of tokenizer.json",
    ),
    "bytes with a tokenizer": (
        {"tokenizer": {"name": "bytes", "digest": None}},
        'files has "tokenizer.json", which does not belong there',
    ),
    "no files": ({"files": {}}, "files lacks tokens.bin"),
    "files of a list": ({"files": []}, "files must be an object, not a list"),
    "a key too many": ({"more": 1}, 'it has "more", which does not belong there'),
    "content of a text": ({"content": "0" * 32}, "content must be an object, not "),
    "content of no files": ({"content": {"digest": "0" * 32}}, "content lacks files"),
    "content of a number": (
        {"content": {"digest": 1, "files": "0" * 32}},
        "content.digest has 1, not a digest",
    ),
    "ends of a number": ({"turn_ends": 1}, "turn_ends must be a list of tokens below vocab"),
    "ends of bools": ({"turn_ends": [True]}, "turn_ends must be a list of tokens below vocab"),
    "ends beyond": ({"turn_ends": [1000]}, "turn_ends must be a list of tokens below vocab"),
    "ends twice": ({"turn_ends": [1, 1]}, "turn_ends must ascend"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG_MANIFESTS.values(), ids=WRONG_MANIFESTS)
def test_no_value_of_a_manifest_is_trusted(
    folder: Path, changed: dict[str, Any], message: str
) -> None:
    manifest = json.loads((folder / "tokens.json").read_text()) | changed
    manifest["digest"] = digest_of_manifest(manifest)
    (folder / "tokens.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError) as caught:
        opened(folder)
    assert caught.value.lines[0].startswith(f"{folder}/tokens.json cannot be used ({message}")


WRONG_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "no digests": ({"digests": []}, r"digests must be a list of 4, one for each 512 bytes"),
    "a digest less": ({"digests": ["0" * 32] * 3}, r"digests must be a list of 4"),
    "a digest more": ({"digests": ["0" * 32] * 5}, r"digests must be a list of 4"),
    "digests of a text": ({"digests": "0" * 4}, r"digests must be a list of 4"),
    "digests of numbers": (
        {"digests": [0] * 4},
        r"digests has 0, not a digest of 32 hexadecimal digits",
    ),
    "upper case": ({"digests": ["A" * 32] * 4}, r'digests has "A{32}", not a digest'),
    "an odd size": ({"bytes": 1999}, r"bytes is 1999, but its tokens and documents make 2000"),
    "no size": ({"bytes": 0}, r"bytes is 0, not a whole number"),
    "below 0": ({"bytes": -2}, r"bytes is -2, not a whole number"),
    "null": ({"bytes": None}, r"bytes is null, not a whole number"),
    "a key too many": ({"link": "/etc/passwd"}, r'has "link", which does not belong there'),
}


@pytest.mark.parametrize(("changed", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_no_file_of_a_manifest_is_trusted(
    folder: Path, changed: dict[str, Any], message: str
) -> None:
    manifest = json.loads((folder / "tokens.json").read_text())
    manifest["files"]["tokens.bin"] |= changed
    manifest["digest"] = digest_of_manifest(manifest)
    (folder / "tokens.json").write_text(json.dumps(manifest))
    with pytest.raises(
        DataError, match=rf"tokens\.json cannot be used \(files\.tokens\.bin.?{message}"
    ):
        opened(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", ".", "tokens.bin\0"])
def test_a_manifest_names_no_other_files(folder: Path, name: str) -> None:
    manifest = json.loads((folder / "tokens.json").read_text())
    manifest["files"][name] = manifest["files"]["tokens.bin"]
    manifest["digest"] = digest_of_manifest(manifest)
    (folder / "tokens.json").write_text(json.dumps(manifest))
    with pytest.raises(
        DataError, match=r"cannot be used \(files has .*, which does not belong there\)"
    ):
        opened(folder)
