"""Tasks of processes whose starter has not imported torch, which would take seconds."""

import os
import signal
import time
from pathlib import Path


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
