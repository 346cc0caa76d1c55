"""Processes that end when the process that started them ends.

torchrun's agent ends its ranks when it is asked to stop. Nothing ends them when it is killed.
"""

import ctypes
import os
import signal
import sys
import threading
import time

from composer3d.runtime import environment

_PR_SET_PDEATHSIG = 1  # from sys/prctl.h


def die_with_agent() -> None:
    """Make this process end when torchrun's agent ends, if the agent has started it.

    Call it before torch is imported. That takes seconds, and the parent of a rank whose agent is
    killed meanwhile is another process, which may live for ever. (So it is if the agent is killed
    while the interpreter starts. The rank then ends when it does not find the others.)
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not environment.has_launcher():
        die_with_parent(os.getppid())


def die_with_parent(parent: int) -> None:
    """Make this process end when its parent ends.

    On Linux the kernel then sends SIGKILL, which ends even a stopped process. On other systems a
    thread checks every second.

    Args:
        parent: the process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        watcher = threading.Thread(
            target=_exit_after_parent, args=(parent,), daemon=True, name="parent"
        )
        watcher.start()

    # The parent may have ended before the lines above.
    if os.getppid() != parent:
        os._exit(1)


def _exit_after_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
