"""The words with which gloo, NCCL and the stores of torch say that a peer is lost.

This module does not import torch, because the launcher reads such messages too.
"""

import re

_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|is closed)|"
    r"timed out|time-?out|connectFullMesh|failed to (connect|recv|send)|unexpected (eof|close)|"
    r"remote process|not reach|ncclRemoteError",
    re.IGNORECASE,
)

# The error of a kernel or a compiler can mention a time-out too. These words identify the error of
# a collective.
_COLLECTIVE = re.compile("gloo|nccl|c10d|(tcp|file|hash|prefix)store", re.IGNORECASE)

# Whole messages of stores, which do not name themselves.
_STORE_TIMEOUT = re.compile(r"\b(wait timeout|socket timeout)\b", re.IGNORECASE)


def tells_lost_connection(text: str) -> bool:
    """Return whether the message of a collective or a store says that it lost a peer."""
    return _LOST_CONNECTION.search(text) is not None


def tells_lost_peer(text: str) -> bool:
    """Return whether the message of any error says that a collective or a store lost a peer."""
    if _STORE_TIMEOUT.search(text):
        return True
    return _COLLECTIVE.search(text) is not None and tells_lost_connection(text)
