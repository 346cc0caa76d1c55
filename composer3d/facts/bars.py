"""Bars of tqdm, which other libraries show."""

from functools import cache
from threading import RLock

from tqdm import tqdm


@cache  # once: a bar of another thread may hold the lock
def share_bars_by_threads() -> None:
    """Have tqdm share its bars between the threads of this process alone.

    Its own lock is also a semaphore, for processes that are forked. A process that ends without its
    interpreter's end, as a rank does, leaves the semaphore behind, and Python warns of it.
    """
    tqdm.set_lock(RLock())
