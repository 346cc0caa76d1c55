"""The checkpoints that commands read: a path, a name on the Hugging Face Hub, or a URL."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.steps import published
from composer3d.facts.errors import CheckpointError
from composer3d.facts.remote import RemotePath, is_url, local_copy
from composer3d.models import hub
from composer3d.runtime import environment
from composer3d.runtime.progress import Progress


@contextmanager
def local_source(text: str) -> Iterator[Path]:
    """Yield a folder or file on a disk with a checkpoint, or with token files.

    What a name or a URL stands for is copied before. That of a URL is copied anew each time, by
    each process, and goes at the end of the block.

    Args:
        text: a path; ``hf://ORGANISATION/NAME[@REVISION]``; or the URL of a folder in an object
            store. A folder of several checkpoints stands for the newest with a manifest.

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
            n_bytes = sum(place.files().values())
            if not n_bytes:
                raise CheckpointError(f"{place} holds no files; give the folder of a checkpoint")
            with Progress(f"copy of {place}", n_bytes, "B") as progress:
                report = progress.advance if shows_progress else lambda n_bytes: None
                folder = at_end.enter_context(local_copy(place, report))
        except ValueError as error:
            raise CheckpointError(f"{text} {error}") from None
        except OSError as error:
            raise CheckpointError(f"{error.filename} cannot be copied: {error.strerror}") from None
        yield folder


def _checkpoint_in(place: RemotePath) -> RemotePath:
    """Return the newest checkpoint of a run at ``place``, or ``place``. Raises OSError."""
    if (place / manifests.FILE).exists():
        return place
    newest = next(reversed(published(place)), place)
    assert isinstance(newest, RemotePath)
    return newest
