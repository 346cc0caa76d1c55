"""Find the complete checkpoints in a folder. No torch here."""

import errno
import os

from composer3d.checkpoint import manifest as manifests
from composer3d.facts.remote import Place, RemotePath
from composer3d.facts.step_folders import list_steps


def published(place: Place) -> list[Place]:
    """List the step folders in ``place`` that have a manifest, lowest first. Raises OSError."""
    return [path for path in list_steps(place) if is_there(path / manifests.FILE)]


def is_there(path: Place) -> bool:
    """Return whether there is a file of this path. Raises OSError if that cannot be found out.

    ``Path.exists`` of newer Pythons says no in that case, and the checkpoint would be removed.
    """
    if isinstance(path, RemotePath):
        return path.exists()
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return True
