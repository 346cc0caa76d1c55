"""When Python's garbage collector runs.

The collector frees objects that refer to each other in a circle. To find them, it looks through all
objects that it has not set aside. Importing torch makes about 300,000 that live as long as the
process, and looking through them takes 0.2 s. Each rank does so at a moment of its own, and the
others wait for it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector within the block, which makes many objects and no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Pause the collector within the block, which imports modules, and set all objects aside.

    A process that is forked later shares the memory of these objects until somebody writes to them,
    as the collector would.
    """
    with paused():
        yield
        gc.freeze()


def set_aside() -> None:
    """Free the garbage there is, and set all other objects aside: the collector skips them.

    What is made later is collected as usual.
    """
    gc.collect()
    gc.freeze()
