"""Find the checkpoints in a folder: the folders named after a step. No torch here."""

import os
import re

from composer3d.facts.remote import Place, RemotePath

_DIGITS = 8
STEP_FOLDER = re.compile(rf"step-[0-9]{{{_DIGITS}}}")
LAST_STEP = 10**_DIGITS - 1  # the last one whose folder has a name of this form


def step_folder(step: int) -> str:
    """Return the name of the folder of a step, at most ``LAST_STEP``.

    Names have the order of their steps, because all have the same number of digits.
    """
    return f"step-{step:0{_DIGITS}d}"


def list_steps(place: Place) -> list[Place]:
    """List the folders named after a step in ``place``, lowest first.

    Anything under another name belongs to the user. Links, pipes and files are left out as well: a
    link could lead to a checkpoint of another user. In an object store, a folder that a killed
    save has left is listed too.

    Raises OSError if the folder is there and cannot be read. ``Path.glob`` would find nothing, and
    a run would start anew beside its checkpoints.
    """
    if isinstance(place, RemotePath):
        return [place / name for name in place.folders() if STEP_FOLDER.fullmatch(name)]
    try:
        with os.scandir(place) as entries:
            # ``Path.is_dir`` of newer Pythons says no if it cannot be found out.
            names = [
                entry.name
                for entry in entries
                if STEP_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
    return [place / name for name in sorted(names)]
