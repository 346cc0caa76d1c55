"""The checkpoints and token files that commands read or make.

Each is a path on a disk, or a URL of an object store. What is read may also be a name on the
Hugging Face Hub.
"""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.steps import published
from composer3d.facts.errors import CheckpointError, SaveError
from composer3d.facts.remote import RemotePath, is_url, local_copy, upload
from composer3d.models import hub
from composer3d.runtime import environment
from composer3d.runtime.progress import Progress


@contextmanager
def local_source(text: str) -> Iterator[Path]:
    """Yield a folder or file on a disk with a checkpoint, or with token files.

    What a name or a URL stands for is copied before. That of a URL is copied anew each time, by
    each process, and goes at the end of the block.

    Args:
        text: a path; ``hf://ORGANISATION/NAME[@REVISION]``; or the URL of a folder or file in an
            object store. A folder of several checkpoints stands for the newest with a manifest.

    Raises:
        CheckpointError: the name or the URL is malformed, or the files cannot be copied.
    """
    shows_progress = environment.rank() == 0
    if not is_url(text):
        yield hub.folder(text, shows_progress=shows_progress)
        return
    with ExitStack() as at_end:
        try:
            place = _checkpoint_in(RemotePath(text))
            n_bytes = sum(place.sizes().values())
            if not n_bytes:
                raise CheckpointError(f"{place} holds no files; give the folder of a checkpoint")
            with Progress(f"copy of {place}", n_bytes, "B") as progress:
                report = progress.advance if shows_progress else lambda n_bytes: None
                folder = at_end.enter_context(local_copy(place, report))
        except ValueError as error:
            raise CheckpointError(f"{text} {error}") from None
        except OSError as error:
            raise CheckpointError(f"{text} cannot be copied: {error.strerror}") from None
        yield folder


def _checkpoint_in(place: RemotePath) -> RemotePath:
    """Return the newest checkpoint of a run at ``place``, or ``place``. Raises OSError."""
    if (place / manifests.FILE).exists():
        return place
    newest = next(reversed(published(place)), place)
    assert isinstance(newest, RemotePath)
    return newest


@contextmanager
def local_target(text: str, last: str | None = None) -> Iterator[Path]:
    """Yield a path on a disk where a command makes a file or a folder.

    For a URL it is in a new folder of the system's folder for such things, which TMPDIR names. At
    the end of the block, what was made there is uploaded, and the new folder goes. It stays if the
    upload fails, because what is in it may have taken long.

    Args:
        text: a path, or the URL in an object store.
        last: the name of the files that readers open first: they are uploaded last.

    Raises:
        CheckpointError: the URL is malformed, something is there, or nothing can be written there.
            The block has not run.
        SaveError: the upload has failed.
    """
    if not is_url(text):
        yield Path(text)
        return
    place = _require_writable(text)
    try:
        folder = Path(tempfile.mkdtemp(prefix="composer3d-"))
    except OSError as error:
        raise CheckpointError(f"TMPDIR has no folder to write to: {error.strerror}") from None
    path = folder / place.name
    is_kept = False
    try:
        yield path
        try:
            _send(path, place, last)
        except OSError as error:
            is_kept = True
            raise SaveError(
                f"{place} cannot be written: {error.strerror}; what was sent is removed as far as "
                f"possible, and all of it is kept in {path}: copy it yourself, or remove it"
            ) from None
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def _require_writable(text: str) -> RemotePath:
    """Return the place that a URL names, if nothing is there and a file can be written there.

    Raises CheckpointError.
    """
    try:
        place = RemotePath(text)
    except ValueError as error:
        raise CheckpointError(f"{text} {error}") from None
    try:
        is_there = place.exists()
        if not is_there:
            # A bucket that is missing, or only read, would show after hours of work.
            place.write(b"")
            place.remove()
    except OSError as error:
        raise CheckpointError(f"{place} cannot be written: {error.strerror}") from None
    if is_there:
        raise CheckpointError(
            f"{place} exists; give a URL at which nothing is, or remove what is there, such as the "
            "rest of an upload that was killed"
        )
    return place


def _send(path: Path, place: RemotePath, last: str | None) -> None:
    """Upload a file or a folder, and say how far that is. Raises OSError."""
    if place.exists():
        raise OSError(errno.EEXIST, "another process has written there meanwhile", str(place))
    n_bytes = sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file())
    with Progress(f"upload to {place}", n_bytes, "B") as progress:
        upload(path, place, last, progress.advance)
