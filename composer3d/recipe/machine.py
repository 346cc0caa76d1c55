"""Checks whether this machine has what a recipe needs: a writable folder, a device, enough text.

``check`` answers from here within milliseconds. Training would find the same problems only after
all its processes have started. No torch here.
"""

import fcntl
import os
import re
import sysconfig
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

from composer3d.recipe.schema import Recipe
from composer3d.spec import files

_LINE_LIMIT = 64 << 20  # bytes of a line of JSONL
_NOTE_LIMIT = 4096  # bytes of the file that names the owner of a run's folder

# Folders of the standard library that training skips.
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)

# The device files made by the drivers of NVIDIA, of AMD, of WSL, and of NVIDIA's embedded boards.
_GPU_FILES = re.compile(r"nvidia\d+|kfd|dxg|nvmap")


def folder_problem(recipe: Recipe) -> str | None:
    """Return why training cannot use the run's folder, else None.

    The folder cannot be written, is a link of another user, or is in use by another job.
    """
    folder = Path(recipe.run.out_dir, recipe.run.name)
    checkpoints = folder / "checkpoints"
    for path in (folder, checkpoints):
        try:
            files.refuse_foreign_link(path)
        except OSError as error:
            return f"{path} {error.strerror}"

    existing = next(
        path for path in (checkpoints, folder, *folder.parents) if os.path.lexists(path)
    )
    if not existing.is_dir():
        return f"{existing} is not a folder, so that {folder} cannot be made"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written by this user"

    owner = owner_of(folder)
    if owner is not None:
        return f"{folder} is in use by {owner}; wait for its end, or give this run another run.name"
    return None


def owner_of(folder: Path) -> str | None:
    """Return who has locked a run's folder, or None if nobody has.

    To find out, this process takes a lock for a moment and releases it at once.
    """
    for path in (folder, folder / "lock"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            note = b""
            with suppress(OSError):
                note = files.read_plain(folder / "lock", limit=_NOTE_LIMIT, follow_links=False)
            text = note.decode(errors="replace")
            return text if text and text.isprintable() else "another job"
        except OSError:  # the file system has no locks
            continue
        finally:
            os.close(descriptor)
    return None


def shows_a_gpu() -> bool:
    """Return whether this machine may have a GPU.

    That is the case if a driver has made its device files, and the environment does not hide all
    GPUs. The GPUs are not counted, and nothing is imported: torch decides in the end.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if os.environ.get(variable, "0").strip() in ("", "-1"):
            return False
    try:
        return any(_GPU_FILES.fullmatch(name) for name in os.listdir("/dev"))
    except OSError:
        return True  # a system without /dev: nothing is known


def count_bytes(source: str, path: str | None, field: str, *, enough: int) -> int | None:
    """Count the tokens of a source whose tokens are bytes.

    Each document that is not empty has one token more, which ends it. The source "python" is
    counted whole, although a part of it is held out.

    Args:
        source: ``data.source``, but not "tokens".
        path: the file or folder, or None for "python".
        field: the key of the text in a line of JSONL.
        enough: the count at which to stop.

    Returns:
        The count, or None if the source cannot be read: training reports what is wrong.
    """
    count = 0
    try:
        for size in _document_sizes(source, path, field):
            count += size + 1 if size else 0
            if count >= enough:
                break
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return count


def _document_sizes(source: str, path: str | None, field: str) -> Iterator[int]:
    """Return the bytes of each document."""
    if source == "python":
        for name in _file_names(sysconfig.get_paths()["stdlib"], ".py", skip=NOT_LIBRARY):
            yield os.stat(name).st_size
    elif source == "text":
        for name in _file_names(path or "", ""):
            yield os.stat(name).st_size
    else:
        for name in _file_names(path or "", ".jsonl"):
            with files.open_plain(name) as file:
                while line := file.readline(_LINE_LIMIT):
                    if line.strip():
                        yield len(files.parse_json(line)[field].encode())


def _file_names(root: str, suffix: str, *, skip: Set[str] = frozenset()) -> Iterator[str]:
    """Return a file, or all files below a folder whose names end with ``suffix``.

    Like training, this skips hidden files and folders, links to folders, and folders in ``skip``.
    """
    if not os.path.isdir(root):
        yield root
        return
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and name not in skip
        ]
        for name in names:
            if name.endswith(suffix) and not name.startswith("."):
                yield os.path.join(folder, name)
