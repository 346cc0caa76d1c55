"""What may stand in place of a plain file of a checkpoint."""

import os
from pathlib import Path

# Kinds, and what an error says of each.
NO_PLAIN_FILE = {
    "link": "is a symbolic link",
    "pipe": "is a named pipe",
    "folder": "is a folder",
}


def replace_by(kind: str, place: Path) -> None:
    """Move a file out of its folder, and put something of ``kind`` there, or nothing."""
    elsewhere = place.parent.parent / "elsewhere"
    place.rename(elsewhere)
    if kind == "link":
        place.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
