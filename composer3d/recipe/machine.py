"""Check whether this machine has what a recipe needs: a writable folder, a GPU, enough text.

``composer3d check`` calls these functions and answers within milliseconds. Training would find the
same problems only after all its processes have started. No torch here.
"""

import fcntl
import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

from composer3d.facts import files
from composer3d.facts.remote import PACKAGES, RemotePath, is_url
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import as_toml

_LINE_LIMIT = 64 << 20  # bytes in a line of JSONL
_NOTE_LIMIT = 4096  # bytes in the file that names the owner of a run's folder
_MOST_NAMES = 10_000  # in a folder that is searched for JSONL

# What is wrong with a file of JSONL that is read as text.
JSONL_AS_TEXT = (
    "is JSONL, whose keys and quotes would be learned; "
    'use data.source = "jsonl", or rename the file'
)

# Folders of the standard library that training skips.
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)

# The device files made by the drivers of NVIDIA, of AMD, of WSL, and of NVIDIA's embedded boards.
_GPU_FILES = re.compile(r"nvidia\d+|kfd|dxg|nvmap")


def folder_problem(recipe: Recipe) -> str | None:
    """Return why training cannot use the run's folder, or None if it can.

    Training cannot use a folder that this user cannot make or write, that is a symbolic link of
    another user, or that another job has locked. Nothing is written.
    """
    folder = Path(recipe.run.out_dir, recipe.run.name)
    checkpoints = recipe.checkpoint_folder
    places = [folder, checkpoints] if isinstance(checkpoints, Path) else [folder]
    for path in places:
        try:
            files.refuse_foreign_link(path)
        except OSError as error:
            return f"{path} {error.strerror}"

    # Training writes into both folders, or makes them in the nearest parent that exists.
    for path in places:
        existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if not existing.is_dir():
            return f"{existing} is not a folder, so that {path} cannot be made"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} cannot be written by this user"

    owner = _owner_of(folder)
    if owner is not None:
        return f"{folder} is in use by {owner}; wait for its end, or give this run another run.name"
    return None


def _owner_of(folder: Path) -> str | None:
    """Return the job that has locked a run's folder, or None if no job has.

    The result is the job's note in the file ``lock``, or "another job" if there is no readable
    note. To find out, this process takes a shared lock and releases it at once.
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


def package_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield each key whose value needs packages that are missing, and what to do.

    The packages are not imported: that takes seconds.
    """
    yield from _tracker_problems(recipe)
    checkpoint = recipe.checkpoint
    for name in ("folder", "resume", "init"):
        place = getattr(checkpoint, name)
        package = PACKAGES[RemotePath(place).kind] if place and is_url(place) else None
        if package and not _is_installed(package):
            yield (
                f"checkpoint.{name}",
                f"checkpoint.{name} = {as_toml(place)} needs {package}: pip install "
                f"composer3d[{RemotePath(place).kind}], or name a folder on a disk",
            )


def _tracker_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the key of each service that gets the metrics and lacks its packages, and why."""
    needed = {"wandb": ["wandb"], "mlflow": ["mlflow"], "prometheus": ["prometheus_client"]}
    if "MLFLOW_TRACKING_URI" not in os.environ:
        needed["mlflow"] += ["sqlalchemy", "alembic"]
    for service in recipe.metrics.trackers:
        missing = [name for name in needed[service] if not _is_installed(name)]
        if missing:
            value = getattr(recipe.metrics, service)
            way_out = f"set metrics.{service} = false" if value is True else "leave it out"
            shown = "true" if value is True else value
            yield (
                f"metrics.{service}",
                f"metrics.{service} = {shown} needs {' and '.join(missing)}: pip install "
                f"composer3d[{service}], or {way_out}",
            )


def _is_installed(package: str) -> bool:
    """Return whether a package is there. A mere folder with its name does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def shows_a_gpu() -> bool:
    """Return whether this machine may have a GPU that training can use.

    It may have one if a driver has made device files, and no environment variable hides all GPUs.
    The GPUs are not counted, and torch is not imported. Training asks torch itself.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if os.environ.get(variable, "0").strip() in ("", "-1"):
            return False
    try:
        return any(_GPU_FILES.fullmatch(name) for name in os.listdir("/dev"))
    except OSError:
        return True  # the system has no /dev, so nothing is known


def count_bytes(source: str, path: str | None, field: str, *, enough: int) -> int | None:
    """Count the tokens of a source whose tokens are bytes.

    Every document that is not empty counts one more token, which ends it. For the source "python",
    the files that training holds out for validation are counted too.

    Args:
        source: ``data.source``, but not "tokens".
        path: the file or folder, or None for "python".
        field: the key of the text in a line of JSONL.
        enough: counting stops after the document that reaches this number of tokens.

    Returns:
        The count, or None if the source cannot be read, or is compressed. Training then reports
        what is wrong.
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


def find_jsonl(path: str) -> str | None:
    """Return the first file of JSONL that is met in a folder, or the path of such a file itself.

    None if there is none among the first names. Training looks at all of them.
    """
    with suppress(OSError):
        for name in _file_names(path, files.JSONL_SUFFIXES, most=_MOST_NAMES):
            if files.is_jsonl_name(name) and os.path.isfile(name):
                return name
    return None


def _document_sizes(source: str, path: str | None, field: str) -> Iterator[int]:
    """Yield the size of each document in bytes."""
    if source == "python":
        for name in _file_names(sysconfig.get_paths()["stdlib"], ".py", skip=NOT_LIBRARY):
            yield os.stat(name).st_size
    elif source == "text":
        for name in _file_names(path or "", ""):
            _refuse_compressed(name)
            yield os.stat(name).st_size
    else:
        for name in _file_names(path or "", files.JSONL_SUFFIXES):
            _refuse_compressed(name)
            with files.open_plain(name) as file:
                while line := file.readline(_LINE_LIMIT):
                    if line.strip():
                        yield len(files.parse_json(line)[field].encode())


def _refuse_compressed(name: str) -> None:
    if name.lower().endswith(files.COMPRESSED_SUFFIXES):
        raise ValueError("the size of its text is not known")


def _file_names(
    root: str,
    suffix: str | tuple[str, ...],
    *,
    skip: Set[str] = frozenset(),
    most: float = float("inf"),
) -> Iterator[str]:
    """Yield the file ``root``, or all files below the folder ``root`` that end with ``suffix``.

    The suffix, or one of several, may be in capitals. Like training, this skips hidden files and
    folders, links to folders, and folders in ``skip``. After ``most`` names of any kind it ends.

    Raises:
        OSError: a folder cannot be read.
    """
    if not os.path.isdir(root):
        yield root
        return
    n_names, pending = 0, [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                n_names += 1
                if n_names > most:
                    return
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if not entry.is_symlink() and entry.name not in skip:
                        pending.append(entry.path)
                elif entry.name.lower().endswith(suffix):
                    yield entry.path
