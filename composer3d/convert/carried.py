"""Read the files that belong to a model but hold no weights: tokenizer, configuration, licence.

A conversion copies these files into the new checkpoint, although the old one is untrusted. So it
copies only files that ``is_carried`` knows, only plain files in the checkpoint's own folder, and
only up to a size limit. Otherwise a link ``tokenizer.json -> ~/.ssh/id_rsa`` would copy a secret
into the files that the user publishes.

One kind of link is followed: the Hugging Face hub keeps a snapshot as links into its own store
(``models--NAME/snapshots/REVISION/FILE -> models--NAME/blobs/DIGEST``).

Weights may be links to plain files, because only the tensors of the model are read from them.
"""

import re
import stat
from collections.abc import Collection
from os.path import realpath
from pathlib import Path

from composer3d.facts.files import MIB, FileTooLargeError, read_plain
from composer3d.facts.model_files import CARRIED_NAMES, CHAT_TEMPLATES, is_carried
from composer3d.facts.text import one_line

FILE_LIMIT = 64 * MIB  # the largest known tokenizer.json has 33 MB
TOTAL_LIMIT = 128 * MIB
_HUB_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_carried_files(
    folder: Path, listed: Collection[str] | None = None
) -> tuple[dict[str, bytes], list[str]]:
    """Read the files of ``folder`` that belong to its model.

    Args:
        folder: the folder.
        listed: the paths in it that may be read; None: all.

    Returns:
        The contents by the paths in ``folder``, and one line for each file that is refused.
        A file is refused if it is a link (other than a link of the Hugging Face hub), is not a
        plain file, is too large, or cannot be read. Missing files are left out.
    """
    contents: dict[str, bytes] = {}
    templates, refusals = _find_templates(folder)
    for name in (*CARRIED_NAMES, *templates):
        if listed is not None and name not in listed:
            continue
        path = folder / name
        limit = min(FILE_LIMIT, TOTAL_LIMIT - sum(map(len, contents.values())))
        try:
            contents[name] = _read(folder, name, limit)
        except FileNotFoundError:
            continue
        except FileTooLargeError:
            refusals.append(f"{path} is not copied: it has more than {limit:,} bytes")
        except OSError as error:
            refusals.append(f"{path} is not copied: it {_explain(error)}")
    return contents, refusals


def select_carried_texts(contents: object) -> dict[str, bytes]:
    """Return the contents of the files that a torch file carries, by their paths.

    Files that ``is_carried`` does not know, or that exceed a size limit, are left out.

    Args:
        contents: the untrusted value in the torch file. It should be a dict from paths to texts,
            each of which is the bytes of a file decoded as latin-1.
    """
    selected: dict[str, bytes] = {}
    if not isinstance(contents, dict):
        return selected
    templates = [name for name in contents if isinstance(name, str) and name not in CARRIED_NAMES]
    for name in (*CARRIED_NAMES, *filter(is_carried, templates)):
        text = contents.get(name)
        limit = min(FILE_LIMIT, TOTAL_LIMIT - sum(map(len, selected.values())))
        if isinstance(text, str) and len(text) <= limit:
            selected[name] = text.encode("latin-1")
    return selected


def _find_templates(folder: Path) -> tuple[list[str], list[str]]:
    """Return the paths of the chat templates in a folder of their own, and lines of refusals."""
    templates = folder / CHAT_TEMPLATES
    if templates.is_symlink():
        return [], [f"{templates} is not copied: it is a link, which is not followed here"]
    paths = [f"{CHAT_TEMPLATES}/{path.name}" for path in sorted(templates.glob("*.jinja"))]
    refusals = [
        f"{one_line(folder / path)} is not copied: its name has other characters than letters, "
        "digits, _, - and ."
        for path in paths
        if not is_carried(path)
    ]
    return list(filter(is_carried, paths)), refusals


def _read(folder: Path, name: str, limit: int) -> bytes:
    path = folder / name
    if stat.S_ISLNK(path.lstat().st_mode):
        path = _find_hub_file(folder, path) or path
    return read_plain(path, limit=limit, follow_links=False)


def _find_hub_file(folder: Path, link: Path) -> Path | None:
    """Return the target of ``link`` if it is in the store of the Hugging Face hub, else None.

    Both ends of the link are checked. ``folder`` must be a snapshot. The target must be in the
    store of the same repository, or in the store that all repositories of a cache may share. In
    the shared store, its name must be a digest.
    """
    # ``Path.resolve`` would raise RuntimeError for a cycle of links under Python 3.11 and 3.12.
    snapshot, target = Path(realpath(folder)), Path(realpath(link))
    repository = snapshot.parent.parent
    if snapshot.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return None
    if target.parent == repository / "blobs":
        return target
    shared_store = repository.parent / "blobs" / target.name[:2]
    if target.parent == shared_store and _HUB_DIGEST.fullmatch(target.name):
        return target
    return None


def _explain(error: OSError) -> str:
    """Return the reason of an error, in a form that can follow "it"."""
    reason = error.strerror or str(error)
    return reason if reason.startswith("is ") else f"cannot be read ({reason})"
