"""Tasks of processes whose starter has not imported torch, which would take seconds."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from composer3d.runtime import rank_logs


def answer(base: int) -> tuple[int, str, str]:
    return base + int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]


def hang_up() -> int:
    os.kill(os.getpid(), signal.SIGHUP)
    return 0


def kill_my_parent() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)


def write_and_sleep(pids: Path, temporary: Path) -> None:
    (temporary / "file").write_text("")
    (pids / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        # A stopped process cannot look whether its parent lives.
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)


def print_and_die(folder: Path) -> int:
    """Print in several ways with ``run.rank_logs``. Then rank 1 is killed, and rank 0 raises."""
    with rank_logs.kept(folder):
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run(["echo", "from a child"], check=True)
        faulthandler.dump_traceback(sys.__stderr__)
        if os.environ["RANK"] == "1":
            os.write(2, b"last words")
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("of rank 0")
