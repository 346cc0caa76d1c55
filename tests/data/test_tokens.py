"""A loader reads token files; every kind of damage to them is refused by name."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer3d.cli import main
from composer3d.data import Loader, tokens
from composer3d.data.blend import Blend
from composer3d.facts import token_manifest
from composer3d.facts.errors import DataError
from composer3d.facts.token_manifest import digest_of
from tests.data import samples
from tests.data.token_folders import opened, refuses, reseal, write_tokens

N = 1_000
CHUNK = 512  # bytes; tokens.bin has four chunks
IDS = np.arange(N, dtype="<u2")
FILES = ["tokens.bin", "documents.bin", "tokenizer.json"]
# Cuts inside of samples, at their ends, and shards shorter than a sample.
CUTS = [1, 37, 74, 75, 76, 500, 999]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_manifest, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "t", IDS)


def with_ends(ids: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Put a token that ends documents before each cut and at the end, and nowhere else."""
    ended = ids.copy()
    ended[[*(cut - 1 for cut in cuts), -1]] = ids.max() + 1
    return ended


def make_shards(folder: Path, ids: np.ndarray, cuts: list[int]) -> Path:
    """Make token files of several shards, cut at ``cuts``. Each shard is one document."""
    return write_tokens(folder, with_ends(ids, cuts), cuts=cuts, tokenizer_file=None)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return make_shards(tmp_path / "t", IDS, CUTS)


def loader_of(corpus: Any, seq_len: int, global_batch: int = 2, **options: Any) -> Loader:
    return samples.loader_of(corpus, seq_len=seq_len, global_batch=global_batch, **options)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_loader_reads_rows_of_the_map(tmp_path: Path, dtype: str) -> None:
    step = 65 if dtype == "<u2" else 4_000_000  # the largest is beyond 15 and beyond 31 bits
    ids = (np.arange(N, dtype=np.int64) * step).astype(dtype)
    corpus = opened(write_tokens(tmp_path / "t", ids))
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.dtype == np.dtype(dtype)
    seq_len, n_samples = 37, 27  # 27 x 37 = 999: the last sample ends with the last token
    batch = next(loader_of(corpus, seq_len, n_samples))
    whole_rows = torch.cat([batch.tokens_BT, batch.labels_BT[:, -1:]], dim=1)
    rows = {int(row[0]) // step: row for row in whole_rows}
    assert sorted(rows) == [sample * seq_len for sample in range(n_samples)]
    for first, row in rows.items():
        assert row.tolist() == [(first + i) * step for i in range(seq_len + 1)]
    assert batch.tokens_BT.dtype == batch.labels_BT.dtype == torch.int64
    assert torch.equal(batch.tokens_BT[:, 1:], batch.labels_BT[:, :-1])


def test_a_loader_refuses_other_data(tmp_path: Path, folder: Path) -> None:
    state = loader_of(opened(folder), N - 1).state_dict()
    moved = {"name": "moved", "digest": digest_of(b"{}")}
    same = write_tokens(tmp_path / "same", IDS, tokenizer=moved)
    loader_of(opened(same), N - 1).load_state_dict(state)
    # A checkpoint of an older composer3d has the digest of the files.
    content = {"digest": "1" * 32, "files": opened(folder).digest}
    newer = write_tokens(tmp_path / "newer", IDS, content=content)
    assert opened(newer).digest == "1" * 32
    loader_of(opened(newer), N - 1).load_state_dict(state)
    older_blend, newer_blend = (
        loader_of(Blend((opened(path),) * 2, (1.0, 2.0)), N - 1) for path in (folder, newer)
    )
    newer_blend.load_state_dict(older_blend.state_dict())
    other = write_tokens(tmp_path / "other", np.arange(1, N + 1, dtype="<u2"))
    with refuses("the data has changed since"):
        loader_of(opened(other), N - 1).load_state_dict(state)


@pytest.mark.parametrize("most_maps", [1, 3, 128])
@pytest.mark.parametrize("packing", ["none", "documents"])
def test_samples_do_not_depend_on_the_shards(
    tmp_path: Path, most_maps: int, packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(0).integers(0, 50, N).astype("<u2")
    whole_folder = write_tokens(tmp_path / "whole", with_ends(ids, CUTS))
    whole = loader_of(opened(whole_folder), 37, 9, packing=packing)
    monkeypatch.setattr(tokens, "MOST_MAPS", most_maps)
    folder = make_shards(tmp_path / "shards", ids, CUTS)
    corpus = tokens.open_tokens(folder, name="shards", most_maps=most_maps)
    cut = loader_of(corpus, 37, 9, packing=packing)
    for _ in range(6):  # two epochs
        for of_whole, of_cut in zip(next(whole), next(cut), strict=True):
            assert of_whole is of_cut is None or torch.equal(of_whole, of_cut)
    assert len(corpus.tokens) == N
    assert isinstance(corpus.tokens, tokens.ShardedTokens)
    assert len(corpus.tokens._maps) == min(most_maps, 8)
    assert corpus.tokens[np.arange(N)].tolist() == with_ends(ids, CUTS).tolist()


def test_a_start_reads_only_the_shards_of_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(4_000, dtype="<u4")
    folder = make_shards(tmp_path / "t", ids, [*range(20, 4_000, 20)])  # 200 shards
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
    next(loader_of(corpus, 15, 4))
    # A sample of 16 tokens is in one shard or in two.
    assert 4 <= len(mapped) <= 8
    # More shards are read than files may be open.
    batch = next(loader_of(corpus, 15, 266))
    assert torch.equal(batch.tokens_BT[:, 1:], batch.labels_BT[:, :-1])
    assert len(set(mapped)) == 200
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert 0 < sum(path.startswith(str(folder)) for path in maps) <= tokens.MOST_MAPS


@pytest.mark.parametrize("name", ["tokens-00002.bin", "documents-00007.bin"])
@pytest.mark.parametrize("full", [False, True])
def test_a_damaged_shard_is_named(
    shards: Path, name: str, full: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (flip(0) if full else cut)(shards / name)
    assert main(["inspect", str(shards), *(["--full"] if full else [])]) == 1
    problem = "is damaged between bytes 0 and 512" if full else "bytes, but tokens.json says"
    out = capsys.readouterr().out
    assert problem in out
    lines = [line for line in out.splitlines() if line.startswith(str(shards))]
    assert lines[0].startswith(f"{shards}/{name} ")
    # Tokens are compared with the file of documents, so they too are in doubt if it is damaged.
    assert all(f"-{name[-9:]} " in line for line in lines)
    if not full:  # a start verifies all sizes, and 16 of the 18 parts
        with refuses(name):
            opened(shards)


def test_a_shard_that_shrinks_during_a_run_is_refused(shards: Path) -> None:
    corpus = opened(shards)
    cut(shards / "tokens-00006.bin")
    with refuses(r"tokens-00006\.bin has 997 bytes, but"):
        corpus.tokens[np.array([600])]


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


IS_DAMAGED = r"is damaged between bytes {} and {}: its digest there is not the one in tokens.json;"
ANOTHER_SIZE = r"has \d+ bytes, but tokens.json says \d+ bytes;"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "first byte": (flip(0), IS_DAMAGED.format(0, CHUNK)),
    "last byte": (flip(-1), IS_DAMAGED.format(r"\d+", r"\d+")),
    "truncated": (cut, ANOTHER_SIZE),
    "too long": (grow, ANOTHER_SIZE),
    "missing": (Path.unlink, r"is missing, but tokens.json says \d+ bytes;"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_by_its_name(
    folder: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    assert opened(folder).n_documents == 1
    damage(folder / name)
    with refuses(rf"t/{name} {message} make the folder again with composer3d prepare"):
        opened(folder)


def test_a_change_of_the_manifest_is_found(folder: Path) -> None:
    path = folder / "tokens.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab": 1_071}))
    with refuses(r"t/tokens\.json cannot be used \(its digest does not match its content\); make"):
        opened(folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "Expecting"),
        (b"\xff\xfe\xff", "'utf-16-le' codec can't decode"),
        (b"[]", r"it must be an object, not \[\]\); make"),
        (b"{}", r"it lacks version\); make"),
        (b'{"version": 4, "digest": ""}', ".* version 4, but this composer3d reads 1, 2 and 3"),
        (b'{"version": true}', "it has version true, but this composer3d reads 1, 2 and 3"),
        (b'{"version": Infinity}', "it holds Infinity, which JSON does not have"),
        (b"[" * 100_000, "it nests too deep"),
        (b"9" * 5_000, "it holds an integer of 5,000 digits"),
        (b" " * (65 << 20), "is larger than 67,108,864 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_that_cannot_be_used_is_refused(
    folder: Path, content: bytes, problem: str
) -> None:
    (folder / "tokens.json").write_bytes(content)
    with refuses(rf"t/tokens\.json cannot be used \({problem}"):
        opened(folder)


def test_what_is_no_folder_of_tokens_is_refused(folder: Path) -> None:
    with refuses(r"tokens\.bin has no tokens\.json; give a folder"):
        opened(folder / "tokens.bin")
    (folder / "tokens.json").unlink()
    with refuses(r"t has no tokens\.json; give a folder that composer3d prepare made"):
        opened(folder)


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
    (line,) = lines  # one rank reads the chunk
    assert f"tokens.bin is damaged between bytes {at // CHUNK * CHUNK} and" in line


def test_a_process_alone_verifies_everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    flip(0)(folder / "tokens.bin")
    with refuses("is damaged"):
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
    def inspect(status: int, *options: str) -> str:
        assert main(["inspect", str(folder), *options]) == status
        return capsys.readouterr().out

    monkeypatch.setattr(tokens, "_MOST_CHUNKS", 1)
    out = inspect(0, "--full")
    assert "tokens       1,000\n" in out
    assert "whole        yes: every digest is right\n" in out
    for at in (0, CHUNK, 2 * N - 1):
        flip(at)(folder / "tokens.bin")
    report = json.loads(inspect(1, "--full", "--json"))
    assert report["whole"] is False
    damaged = [line.split(" between ")[0] for line in report["problems"]]
    assert damaged == [f"{folder}/tokens.bin is damaged"] * 3
    # The sizes are right.
    assert "every size is right; --full compares the digests" in inspect(0)
    (folder / "tokens.bin").unlink()
    assert inspect(1).count("tokens.bin is missing") == 1


@pytest.mark.parametrize(("dtype", "at"), [("<u2", 0), ("<u2", N - 2), ("<u4", N // 2)])
def test_a_token_above_the_vocabulary_is_refused(tmp_path: Path, dtype: str, at: int) -> None:
    ids = np.full(N, 9, dtype=dtype)
    ids[-1] = 7
    ids[at] = 10
    assert opened(write_tokens(tmp_path / "whole", ids, vocab=11)).n_documents == 1
    above = write_tokens(tmp_path / "t", ids, vocab=10)
    with refuses(r"tokens\.bin holds token 10 between bytes \d+ and \d+, but .* of 10; make"):
        opened(above)


# Where documents begin, over three chunks.
STARTS: dict[str, list[int]] = {
    "first": [1, *range(2, 152), N],
    "last": [*range(151), N - 1],
    "twice, over two chunks": [*range(64), 63, *range(65, 151), N],
    "negative": [*range(150), -1, N],
    "empty": [*range(150), N, N],
    "huge": [0, *range(2**62, 2**62 + 150), N],
}


@pytest.mark.parametrize("case", ["right", *STARTS])
def test_documents_must_be_in_order(tmp_path: Path, case: str) -> None:
    ids = np.full(N, 9, dtype="<u2")
    ids[[*range(150), N - 1]] = 7
    starts = STARTS.get(case, [*range(151), N])
    folder = write_tokens(tmp_path / "t", ids, starts=starts, vocab=N)
    if case == "right":
        assert opened(folder).n_documents == 151
    else:
        with refuses(rf"documents\.bin does not cut {N} tokens into 15[01] documents in order; m"):
            opened(folder)


@pytest.mark.parametrize(
    ("dtype", "at"), [("<u2", 0), ("<u2", 255), ("<u2", 256), ("<u2", N - 1), ("<u4", N // 2)]
)
def test_ends_of_documents_must_stand_where_documents_end(
    tmp_path: Path, dtype: str, at: int
) -> None:
    """Who makes the digests again can write other ends. Training would split rows at them."""
    ids = np.full(N, 9, dtype=dtype)
    ids[[127, 128, 255, N - 1]] = 7
    facts: dict[str, Any] = {"starts": [0, 128, 129, 256, N], "end_of_document": 7, "vocab": 10}
    assert opened(write_tokens(tmp_path / "whole", ids, **facts)).n_documents == 4
    ids[at] = 8 if ids[at] == 7 else 7
    changed = write_tokens(tmp_path / "t", ids, **facts)
    with refuses(r"tokens\.bin holds the end of a document \(token 7\) between bytes \d+"):
        opened(changed)


def test_large_files_may_be_links_and_the_tokenizer_may_not(folder: Path, tmp_path: Path) -> None:
    for name in FILES:
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    with refuses(r"t/tokenizer\.json is a symbolic link, which is not followed here; put the"):
        opened(folder)
    (folder / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    assert opened(folder).n_documents == 1


@pytest.mark.timeout(10)  # opening a pipe would wait forever
@pytest.mark.parametrize("name", ["tokens.json", *FILES])
def test_a_pipe_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with refuses(rf"t/{name} (cannot be used \()?is a named pipe, not a plain file"):
        opened(folder)


def refusal(folder: Path) -> str:
    """Return what is wrong with a manifest whose digest is right."""
    with pytest.raises(DataError) as caught:
        opened(folder)
    before = f"{folder}/tokens.json cannot be used ("
    line = caught.value.lines[0]
    assert line.startswith(before)
    return line.removeprefix(before)


# Changed facts of a manifest, and what refuses them.
WRONG_MANIFESTS: list[tuple[dict[str, Any], str]] = [
    ({"format": "other"}, 'its format is "other", not "composer3d tokens"'),
    ({"dtype": "object"}, 'dtype is "object", not uint16 or uint32'),
    ({"dtype": ["<u2"]}, 'dtype is ["<u2"], not uint16 or uint32'),
    ({"vocab": 65_537}, "vocab is 65537, not a whole number from 1 to 65536"),
    ({"vocab": "9"}, 'vocab is "9", not a whole number'),
    ({"vocab": True}, "vocab is true, not a whole number"),
    ({"tokens": 1000.0}, "tokens is 1000.0, not a whole number"),
    ({"tokens": 10**18}, "tokens is 1000000000000000000, not a whole number"),
    ({"tokens": 999}, "files.tokens.bin.bytes is 2000, but its tokens and documents make 1998"),
    ({"dtype": "uint32"}, "files.tokens.bin.bytes is 2000, but its tokens and documents make 4000"),
    ({"documents": 0}, "documents is 0, not a whole number from 1 to 1000"),
    ({"documents": 1001}, "documents is 1001, not a whole number from 1 to 1000"),
    ({"documents": 2}, "files.documents.bin.bytes is 16, but its tokens and documents make 24"),
    ({"end_of_document": N}, "end_of_document is 1000, not a whole number from 0 to 999"),
    ({"end_of_document": -1}, "end_of_document is -1, not a whole number"),
    ({"tokenizer": "t"}, 'tokenizer must be an object, not "t"'),
    ({"tokenizer": {"name": "t"}}, "tokenizer lacks digest"),
    ({"tokenizer": {"name": 1, "digest": None}}, "tokenizer.name is 1, not a text"),
    ({"tokenizer": {"name": "t", "digest": "00"}}, 'tokenizer.digest has "00", not a digest'),
    (
        {"tokenizer": {"name": "t", "digest": "0" * 32}},
        "tokenizer.digest differs from the digest of tokenizer.json",
    ),
    (
        {"tokenizer": {"name": "bytes", "digest": None}},
        'files has "tokenizer.json", which does not belong there',
    ),
    ({"files": {}}, "files lacks tokens.bin"),
    ({"files": []}, "files must be an object, not []"),
    ({"more": 1}, 'it has "more", which does not belong there'),
    ({"content": "0" * 32}, "content must be an object, not "),
    ({"content": {"digest": "0" * 32}}, "content lacks files"),
    ({"content": {"digest": 1, "files": "0" * 32}}, "content.digest has 1, not a digest"),
    ({"turn_ends": 1}, "turn_ends must be a list of tokens below vocab"),
    ({"turn_ends": [True]}, "turn_ends must be a list of tokens below vocab"),
    ({"turn_ends": [1000]}, "turn_ends must be a list of tokens below vocab"),
    ({"turn_ends": [1, 1]}, "turn_ends must ascend"),
    ({"chat_template": "x"}, 'chat_template has "x", not a digest'),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_MANIFESTS, ids=str)
def test_no_value_of_a_manifest_is_trusted(
    folder: Path, changed: dict[str, Any], message: str
) -> None:
    reseal(folder, lambda manifest: manifest.update(changed))
    assert refusal(folder).startswith(message)


def sizes(*pairs: tuple[int, int]) -> list[dict[str, int]]:
    """Describe shards by their numbers of tokens and documents."""
    return [{"tokens": n_tokens, "documents": n_documents} for n_tokens, n_documents in pairs]


WRONG_SHARDS: dict[str, tuple[Any, str]] = {
    "none": ([], "shards must be a list of 1 to 100000 objects"),
    "an object": ({}, "shards must be a list of 1 to 100000 objects"),
    "too few tokens": (sizes((999, 8)), "tokens is 1000, but its shards have"),
    "too many documents": (sizes((N, 9)), "documents is 8, but its shards have"),
    "a shard of nothing": (sizes((0, 0)), "shards[0].tokens is 0, not a whole"),
    "a negative one": (sizes((N, 8), (-1, 1)), "shards[1].tokens is -1"),
    "a name": (
        [{"tokens": N, "documents": 8, "file": "/etc/passwd"}],
        'shards[0] has "file", which does not belong there',
    ),
    "a file too many": (sizes((N, 8)), 'files has "'),
    "a file too few": (
        sizes(*[(100, 1)] * 7, *[(150, 1)] * 2),
        "documents is 8, but its shards have 9",
    ),
}


@pytest.mark.parametrize(("changed", "message"), WRONG_SHARDS.values(), ids=WRONG_SHARDS)
def test_no_shard_of_a_manifest_is_trusted(shards: Path, changed: Any, message: str) -> None:
    reseal(shards, lambda manifest: manifest.update(shards=changed))
    assert refusal(shards).startswith(message)


# Changed facts of tokens.bin in a manifest, and what refuses them.
WRONG_FILES: list[tuple[dict[str, Any], str]] = [
    ({"digests": ["0" * 32] * 5}, ".digests must be a list of 4, one for each 512 bytes"),
    ({"digests": "0" * 4}, ".digests must be a list of 4"),
    ({"digests": [0] * 4}, ".digests has 0, not a digest of 32 hexadecimal digits"),
    ({"digests": ["A" * 32] * 4}, f'.digests has "{"A" * 32}", not a digest'),
    ({"bytes": 1999}, ".bytes is 1999, but its tokens and documents make 2000"),
    ({"bytes": 0}, ".bytes is 0, not a whole number"),
    ({"bytes": None}, ".bytes is null, not a whole number"),
    ({"link": "/etc/passwd"}, ' has "link", which does not belong there'),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_FILES, ids=str)
def test_no_file_of_a_manifest_is_trusted(
    folder: Path, changed: dict[str, Any], message: str
) -> None:
    reseal(folder, lambda manifest: manifest["files"]["tokens.bin"].update(changed))
    assert refusal(folder).startswith(f"files.tokens.bin{message}")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "tokens.bin\0"])
def test_a_manifest_names_no_other_files(folder: Path, name: str) -> None:
    reseal(folder, lambda m: m["files"].update({name: m["files"]["tokens.bin"]}))
    line = refusal(folder)
    assert line.startswith("files has ")
    assert ", which does not belong there)" in line
