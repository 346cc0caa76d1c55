"""The folder in which ``prepare`` works until its output is whole, so that it can go on later.

The folder is ``OUT.partial``, beside the folder to make. It holds the finished shards and a
journal: a line of settings, then a line for each finished piece of the source. A piece is one shard
of each split. Its line is written when the files of its shards are on the disk. The line says how
far the source has been read, and has a digest of what tells that the files up to there have not
changed. So an interrupted ``prepare`` goes on after the last piece, and writes the same bytes that
it would have written without the interrupt.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from composer3d.data.documents import BEGINNING, Position, SourceFile
from composer3d.data.tokens import add_content
from composer3d.facts import token_manifest
from composer3d.facts.errors import DataError
from composer3d.facts.files import parse_json, read_plain
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import TOKENIZER, ContentDigest, File, mask_file, shard_files
from composer3d.runtime.files import append_whole, open_own, sync, write_atomic

_JOURNAL, _LOCK = "journal.jsonl", "lock"
_OUR_NAMES = re.compile(r"(tokens|documents|mask)(-\d+)?\.bin|token(s|izer)\.json|\..*\.tmp")
_MOST_JOURNAL_BYTES = 256 << 20


def unfinished_folder(out: Path) -> Path:
    """Return the folder in which ``prepare`` works until the folder ``out`` is whole."""
    return out.with_name(f"{out.name}.partial")


class FinishedShard(NamedTuple):
    """A finished shard: what it holds, and the entries of its files.

    ``content`` is the value of its ``ContentDigest``, in hexadecimal. If the shard has a mask,
    ``learned`` is the number of tokens that are learned.
    """

    tokens: int
    documents: int
    content: str
    tokens_file: File
    documents_file: File
    learned: int | None = None
    mask_file: File | None = None

    def files(self, number: int) -> dict[str, File]:
        """Return the entries of the files by name. ``number`` is that of the shard."""
        tokens_name, documents_name = shard_files(number)
        files = {tokens_name: self.tokens_file, documents_name: self.documents_file}
        if self.mask_file is not None:
            files[mask_file(number)] = self.mask_file
        return files


class Piece(NamedTuple):
    """A finished piece of the source.

    Attributes:
        end: where the source has been read to.
        source_bytes: bytes of the source up to there, from the beginning.
        shards: the shard of each split, by the name of the split. One without a document is absent.
        turn_ends: the tokens that end learned turns of conversations, of all splits together, from
            the beginning of the source.
    """

    end: Position
    source_bytes: int
    shards: dict[str, FinishedShard]
    turn_ends: frozenset[int] = frozenset()


class Unfinished:
    """The unfinished folder of a ``prepare`` that runs.

    Use it as a context. At its end, the folder is removed if no piece is finished; else it stays.
    It also stays after an interrupt, if the tokenizer in it has been trained.

    Args:
        out: the folder to make. Its parent exists.
        settings: everything besides the source that determines the output. JSON values.
        sources: the files of the source.
        splits: the names of the subfolders to make, or "" for the folder itself.
        keeps_tokenizer: whether the folder's tokenizer.json was made here, from the same source
            and settings, and is kept for the next attempt.
        is_kept: whether there may be a next attempt; otherwise the folder goes in any case.

    Attributes:
        folder: the folder.
        pieces: the finished pieces. Of an earlier ``prepare``, those of unchanged files.

    Raises:
        DataError: another prepare is at work there, or an earlier one had other settings, or no
            finished piece is of this source.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        out: Path,
        settings: Mapping[str, Any],
        sources: Sequence[SourceFile],
        splits: Sequence[str],
        *,
        keeps_tokenizer: bool = False,
        is_kept: bool = True,
    ) -> None:
        self.folder = unfinished_folder(out)
        self.pieces: list[Piece] = []
        self._out, self._splits = out, splits
        self._kept_tokenizer = self.folder / TOKENIZER if keeps_tokenizer else None
        self._sources, self._is_kept = _SourceDigests(sources), is_kept
        self._is_published = self._is_other_source = False

        self._require_own_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        try:
            self._read_journal(dict(settings))
            self._remove_unknown_files()
        except BaseException:
            self._lock.close()
            raise

    @property
    def last(self) -> Piece:
        """The last finished piece, or an empty one at the beginning of the source."""
        return self.pieces[-1] if self.pieces else Piece(BEGINNING, 0, {})

    def shards_of(self, split: str) -> list[FinishedShard]:
        """Return the finished shards of a split, in order."""
        return [piece.shards[split] for piece in self.pieces if split in piece.shards]

    def add(self, piece: Piece) -> None:
        """Add a piece, whose files are on the disk."""
        for split in self._splits:
            sync(self.folder / split)
        line = {**_as_json(piece), "sources": self._sources.up_to(piece.end)}
        append_whole(self.folder / _JOURNAL, json.dumps(line).encode() + b"\n")
        sync(self.folder / _JOURNAL)
        self.pieces.append(piece)

    def discard(self) -> None:
        """Do not keep the folder: the same command would fail again."""
        self.pieces.clear()
        self._kept_tokenizer = None

    def publish(self) -> None:
        """Give the folder its final name. All of it must be on the disk."""
        sync(self.folder)
        self.folder.rename(self._out)
        self._is_published = True
        for name in (_JOURNAL, _LOCK):
            (self._out / name).unlink()
        sync(self._out.parent)

    def __enter__(self) -> "Unfinished":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_published:
            is_interrupt = kind is not None and not issubclass(kind, Exception)
            has_tokenizer = self._kept_tokenizer is not None and self._kept_tokenizer.is_file()
            if self._is_kept and (self.pieces or (is_interrupt and has_tokenizer)):
                parts = f"{len(self.pieces)} finished parts" if self.pieces else "its tokenizer"
                print(
                    f"{one_line(self.folder)} keeps {parts}; "
                    "run the same command again to go on, or remove it",
                    file=sys.stderr,
                )
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _require_own_folder(self) -> None:
        """Raise DataError if the folder exists and no prepare has made it: it must not be lost."""
        if not os.path.lexists(self.folder):
            return
        is_own = not self.folder.is_symlink() and self.folder.is_dir()
        if is_own and not (self.folder / _JOURNAL).is_file():
            is_own = {path.name for path in self.folder.iterdir()} <= {_LOCK}
        if not is_own:
            raise DataError(
                f"{one_line(self.folder)} is in the way: prepare works in a folder of that "
                "name, and has not made this one; move it away, or give another -o"
            )

    def _read_journal(self, settings: dict[str, Any]) -> None:
        """Read the pieces of an earlier prepare, and write the journal of this one."""
        path = self.folder / _JOURNAL
        shown = one_line(self.folder)
        lines: list[bytes] = []
        if os.path.lexists(path):
            try:
                content = read_plain(path, limit=_MOST_JOURNAL_BYTES, follow_links=False)
                # A power failure may have cut the last line.
                lines = content.split(b"\n")[:-1]
                if lines and _parse_object(lines[0]) != settings:
                    raise DataError(
                        f"{shown} was begun with another tokenizer or other options "
                        f"({_differences(_parse_object(lines[0]), settings)}); give the same, "
                        "or remove it to begin anew"
                    )
                self._keep_valid_pieces([_parse_object(line) for line in lines[1:]])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{shown}: its {_JOURNAL} cannot be used ({one_line(error)}); remove the "
                    "folder to begin anew"
                ) from None
            if self._is_other_source:
                raise DataError(
                    f"{shown} was begun with another source, or its first files have changed; "
                    "give the same source, or remove the folder to begin anew"
                )
            if self.pieces:
                print(
                    f"{shown}: goes on after {len(self.pieces)} of {len(lines) - 1} finished parts",
                    file=sys.stderr,
                )
        kept = [json.dumps(settings).encode(), *lines[1 : 1 + len(self.pieces)]]
        write_atomic(path, b"\n".join(kept) + b"\n")

    def _keep_valid_pieces(self, entries: Iterable[dict[str, Any]]) -> None:
        """Keep the pieces before the first whose source has changed or whose files are missing."""
        for number, entry in enumerate(entries):
            piece = _from_json(entry, self._splits)
            if self._sources.up_to(piece.end) != entry["sources"]:
                self._is_other_source = number == 0
                return
            if not self._has_files(piece):
                return
            self.pieces.append(piece)

    def _has_files(self, piece: Piece) -> bool:
        for split, shard in piece.shards.items():
            for name, entry in shard.files(len(self.shards_of(split))).items():
                path = self.folder / split / name
                if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.bytes:
                    return False
        return True

    def _remove_unknown_files(self) -> None:
        """Remove files of pieces that are not kept, and make the folders of the splits."""
        kept = {self.folder / _JOURNAL, self.folder / _LOCK, self._kept_tokenizer}
        for split in self._splits:
            folder = self.folder / split
            for number, shard in enumerate(self.shards_of(split)):
                kept |= {folder / name for name in shard.files(number)}
            for path in folder.iterdir() if folder.is_dir() else ():
                if path not in kept and _OUR_NAMES.fullmatch(path.name):
                    path.unlink()
        for split in self._splits:
            (self.folder / split).mkdir(exist_ok=True)


class ShardWriter:
    """Writes the files of a shard, and computes their digests on the way.

    Args:
        folder: the folder of the shard.
        number: the number of the shard.
        has_mask: whether the shard has a mask.
    """

    def __init__(self, folder: Path, number: int, *, has_mask: bool = False) -> None:
        self._tokens_file, self._documents_file = (
            _DigestingFile(folder / name) for name in shard_files(number)
        )
        self._mask_file = _DigestingFile(folder / mask_file(number)) if has_mask else None
        self._content = ContentDigest()
        self.tokens = self.documents = self._learned = 0

    def write(
        self, tokens: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None = None
    ) -> None:
        """Add documents. The 1-D arrays are those of ``tokenizer.Encoded``.

        Args:
            tokens: the tokens of all documents, in the dtype of the files.
            lengths: the number of tokens of each document.
            mask: uint8, 1 for each token that is learned; None for a shard without a mask.
        """
        starts = self.tokens + np.cumsum(lengths) - lengths
        self._tokens_file.write(tokens)
        self._documents_file.write(starts.astype("<i8"))
        self.tokens += len(tokens)
        self.documents += len(lengths)
        add_content(self._content, tokens, lengths, mask)
        if self._mask_file is not None and mask is not None:
            self._mask_file.write(mask)
            self._learned += int(mask.sum())

    def finish(self) -> FinishedShard | None:
        """Sync the files, and return what was written; None, and no files, if that is nothing."""
        self._documents_file.write(np.array([self.tokens], dtype="<i8"))
        if not self.documents:
            self.remove()
            return None
        return FinishedShard(
            self.tokens,
            self.documents,
            f"{self._content.value:x}",
            self._tokens_file.finish(),
            self._documents_file.finish(),
            *(() if self._mask_file is None else (self._learned, self._mask_file.finish())),
        )

    def remove(self) -> None:
        """Close and remove the files."""
        self._tokens_file.remove()
        self._documents_file.remove()
        if self._mask_file is not None:
            self._mask_file.remove()


class _DigestingFile:
    """A new file, with the digest of each chunk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb")  # noqa: SIM115 - finish or remove closes it
        self._bytes = 0
        self._digests: list[str] = []
        self._digest = token_manifest.new_digest()

    def write(self, content: np.ndarray) -> None:
        data = np.ascontiguousarray(content).data.cast("B")
        self._file.write(data)
        while data:
            room = token_manifest.CHUNK_BYTES - self._bytes % token_manifest.CHUNK_BYTES
            self._digest.update(data[:room])
            self._bytes += len(data[:room])
            data = data[room:]
            if self._bytes % token_manifest.CHUNK_BYTES == 0:
                self._end_chunk()

    def finish(self) -> File:
        if self._bytes % token_manifest.CHUNK_BYTES:
            self._end_chunk()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return File(self._bytes, tuple(self._digests))

    def remove(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _end_chunk(self) -> None:
        self._digests.append(self._digest.hexdigest())
        self._digest = token_manifest.new_digest()


class _SourceDigests:
    """Digests of the identity of the first files of a source.

    Positions must be asked for in ascending order, apart from those before the last one.
    """

    def __init__(self, sources: Sequence[SourceFile]) -> None:
        self._sources = sources
        self._done = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def up_to(self, end: Position) -> str:
        """Return the digest of the files that have been read up to ``end``, in part or whole."""
        count = end.file + (1 if end.offset else 0)
        if count < self._done:
            self._done, self._digest = 0, hashlib.blake2b(digest_size=16)
        for file in self._sources[self._done : count]:
            identity = [os.fsencode(file.path).hex(), file.size, file.modified_ns]
            self._digest.update(json.dumps(identity).encode())
        self._done = count
        return f"{count} {self._digest.hexdigest()}"


def _lock(folder: Path) -> BinaryIO:
    """Lock the folder for this process. Raises DataError if another process has locked it."""
    file = open_own(folder / _LOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DataError(
            f"{one_line(folder)} is in use by another prepare; wait for its end, or give another -o"
        ) from None
    except OSError:
        pass  # the file system has no locks
    return file


def _parse_object(line: bytes) -> dict[str, Any]:
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError("a line of it is not an object")
    return value


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in now if then.get(name) != now[name]]
    return ", ".join(names) or "an older version of composer3d"


def _as_json(piece: Piece) -> dict[str, Any]:
    return {
        "end": list(piece.end),
        "source_bytes": piece.source_bytes,
        "turn_ends": sorted(piece.turn_ends),
        "shards": {
            split: [value for value in shard if value is not None]
            for split, shard in piece.shards.items()
        },
    }


def _from_json(entry: dict[str, Any], splits: Sequence[str]) -> Piece:
    """Return the piece of a line. Raises ValueError, KeyError or TypeError if it is none."""
    shards = {}
    for split, (tokens, documents, content, *files) in entry["shards"].items():
        if split not in splits:
            raise ValueError(f"{split} is no split")
        tokens_file, documents_file, *mask = files
        shard = FinishedShard(
            int(tokens),
            int(documents),
            f"{int(content, 16):x}",
            _file_entry(*tokens_file),
            _file_entry(*documents_file),
        )
        if mask:
            learned, entry_of_mask = mask
            shard = shard._replace(learned=int(learned), mask_file=_file_entry(*entry_of_mask))
        shards[split] = shard
    file, offset, line = map(int, entry["end"])
    turn_ends = frozenset(map(int, entry["turn_ends"]))
    return Piece(Position(file, offset, line), int(entry["source_bytes"]), shards, turn_ends)


def _file_entry(size: Any, digests: Any) -> File:
    return File(int(size), tuple(map(str, digests)))
