"""What a recipe needs of this machine: a folder that can be written, a device, enough text. No torch here.

``check`` answers from these in milliseconds what training would say only after all its processes have started.
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
_NOTE_LIMIT = 4096  # bytes of the file that says who holds a run's folder
# Of the standard library's folders: what training passes over.
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
# What the drivers of NVIDIA, of AMD, of WSL and of NVIDIA's boards for embedded systems make.
_GPU_FILES = re.compile(r"nvidia\d+|kfd|dxg|nvmap")


def folder_problem(recipe: Recipe) -> str | None:
    """Why the run's folder cannot be written, or is another job's; None where training can use it."""
    folder = Path(recipe.run.out_dir, recipe.run.name)
    for place in (folder, folder / "checkpoints"):
        try:
            files.refuse_foreign_link(place)
        except OSError as error:
            return f"{place} {error.strerror}"
    place = next(
        place
        for place in (folder / "checkpoints", folder, *folder.parents)
        if os.path.lexists(place)
    )
    if not place.is_dir():
        return f"{place} is no folder, so that {folder} cannot be made"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} cannot be written by this user"
    holder = holder_of(folder)
    return (
        f"{folder} is in use by {holder}; wait for its end, or give this run another run.name"
        if holder
        else None
    )


def holder_of(folder: Path) -> str | None:
    """Who has locked a run's folder; None where no job has. A lock that is tried here is given back at once."""
    for place in (folder, folder / "lock"):
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
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
        except OSError:  # a file system without locks
            continue
        finally:
            os.close(descriptor)
    return None


def shows_a_gpu() -> bool:
    """Whether there may be a GPU: the files of a driver are there, and the environment hides none of its devices.

    It costs no import, and counts nothing: torch has the last word.
    """
    hidden = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    if any(os.environ.get(name, "0").strip() in ("", "-1") for name in hidden):
        return False
    try:
        return any(_GPU_FILES.fullmatch(name) for name in os.listdir("/dev"))
    except OSError:
        return True  # no such system: nothing is known


def count_bytes(source: str, path: str | None, field: str, *, enough: int) -> int | None:
    """The tokens of a source that is read as bytes, counted up to ``enough``; a document ends with one more.

    None where it cannot be read: training says what is wrong. Of the source "python", of which a part is held out,
    this is the whole.
    """
    count = 0
    try:
        for size in _sizes(source, path, field):
            count += size + 1 if size else 0
            if count >= enough:
                break
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return count


def _sizes(source: str, path: str | None, field: str) -> Iterator[int]:
    """The bytes of each document."""
    root = sysconfig.get_paths()["stdlib"] if source == "python" else path or ""
    suffix = {"python": ".py", "jsonl": ".jsonl"}.get(source, "")
    for name in _names(root, suffix, NOT_LIBRARY if source == "python" else frozenset()):
        if source != "jsonl":
            yield os.stat(name).st_size
            continue
        with files.open_plain(name) as file:
            while line := file.readline(_LINE_LIMIT):
                if line.strip():
                    yield len(files.parse_json(line)[field].encode())


def _names(root: str, suffix: str, skip: Set[str]) -> Iterator[str]:
    """A file, or all files below a folder; hidden ones and links to folders are passed over, as training does."""
    if not os.path.isdir(root):
        yield root
        return
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in skip]
        for name in names:
            if name.endswith(suffix) and not name.startswith("."):
                yield os.path.join(folder, name)
