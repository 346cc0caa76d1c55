"""Files that belong to a model and are no weights: its tokenizer, its configuration, its licence.

They are copied from one checkpoint to the next as they are, whoever made them. So only files on
``NAMES`` are, only plain ones in the checkpoint's own folder, and only up to a size: a link
``tokenizer.json -> ~/.ssh/id_rsa`` would otherwise carry a secret into what the user publishes.

One kind of link is followed: Hugging Face's hub keeps a snapshot as links to its own store
(``models--NAME/snapshots/REVISION/FILE -> models--NAME/blobs/DIGEST``).

Weights are another matter: they may be links to plain files, because only tensors that the model
asks for are read from them.
"""

import re
import stat
from pathlib import Path

from composer3d.spec.files import MIB, FileTooLargeError, read_plain

# What the repositories of Llama, Mistral and Qwen hold at Hugging Face and at Meta.
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)
# Those of them that say how text becomes tokens.
TOKENIZER_NAMES = frozenset(
    name
    for name in NAMES
    if name.startswith(("token", "tek", "special", "added", "vocab", "merges"))
)
FILE_LIMIT = 64 * MIB  # the largest known tokenizer.json has 33 MB
TOTAL_LIMIT = 128 * MIB
_DIGEST = re.compile(r"[0-9a-f]{64}")


def carried_by(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Read the files of ``folder`` that belong to its model.

    Returns their contents by name, and a line for each file on the list that is left behind,
    because it is a link out of the folder, is no plain file, is too large or cannot be read.
    """
    contents: dict[str, bytes] = {}
    left = []
    for name in NAMES:
        room = min(FILE_LIMIT, TOTAL_LIMIT - sum(map(len, contents.values())))
        try:
            contents[name] = _read(folder, name, room)
        except FileNotFoundError:
            continue
        except FileTooLargeError:
            left.append(f"{folder / name} is not carried along: it has more than {room:,} bytes")
        except OSError as error:
            left.append(f"{folder / name} is not carried along: it {_reason(error)}")
    return contents, left


def trusted_texts(contents: object) -> dict[str, bytes]:
    """Return those of a torch file's texts (bytes decoded as latin-1) that belong to a model."""
    found: dict[str, bytes] = {}
    if not isinstance(contents, dict):
        return found
    for name in NAMES:
        text = contents.get(name)
        total = sum(map(len, found.values()))
        if isinstance(text, str) and len(text) <= min(FILE_LIMIT, TOTAL_LIMIT - total):
            found[name] = text.encode("latin-1")
    return found


def _read(folder: Path, name: str, limit: int) -> bytes:
    path = folder / name
    if stat.S_ISLNK(path.lstat().st_mode):
        path = _hub_file(folder, path) or path
    return read_plain(path, limit=limit, follow_links=False)


def _hub_file(folder: Path, link: Path) -> Path | None:
    """Return the file in the store of Hugging Face's hub that ``link`` stands for, or None.

    Both ends count: the folder is a snapshot, and the link ends in the store of the same
    repository, or in the one that the repositories of a cache share, where names are digests.
    """
    snapshot, target = folder.resolve(), link.resolve()
    repository = snapshot.parent.parent
    if snapshot.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return None
    shared = repository.parent / "blobs" / target.name[:2]
    if target.parent == repository / "blobs":
        return target
    return target if target.parent == shared and _DIGEST.fullmatch(target.name) else None


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    return text if text.startswith("is ") else f"cannot be read ({text})"
