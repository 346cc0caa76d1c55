"""The TCP sockets of this process, as Linux shows them."""

import os
from contextlib import suppress
from pathlib import Path

CONNECTED, LISTENING = "01", "0A"


def addresses(state: str) -> list[str]:
    """Return the address of each socket in a state, in the kernel's hexadecimal form."""
    inodes = set()
    for number in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the list itself
            inodes.add(os.readlink(number))
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [
        row[1].partition(":")[0]
        for row in rows
        if row[3] == state and f"socket:[{row[9]}]" in inodes
    ]
