"""The starter: a process that has torch imported already, and forks the processes of ``launch`` from itself.

Its owner speaks to it over an unnamed pair of sockets. There is no port, no named socket and no folder that another
user or host could reach. When the owner ends, in whatever way, its end of the pair closes: the starter then kills what
it has forked, waits for it, and removes the temporary folders that the owner named. When the starter itself is killed,
the kernel kills what it has forked. So no process outlives the command that started it.
"""

import ctypes
import os
import pickle
import pkgutil
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from composer3d.spec.errors import UserError

# A request is one of these letters and the length of the path that follows it. FORK comes with three descriptors: the
# pipe for the task and its answer, the pipe for the process's number and its end, and the file of the world's store.
REQUEST = struct.Struct("!cI")
FORK, KEEP = b"F", b"K"
STORE = "COMPOSER3D_STORE"  # the environment variable with the path of the world's store
STATUS = struct.Struct(
    "!q"
)  # what goes through the second pipe: first the process's number, at its end its exit code
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h
_LONGEST = 30_000  # of a traceback, in characters: what a pipe holds though nobody reads yet
_PREPARED = {
    "sys_path",
    "sys_argv",
    "dir",
    "orig_dir",
    "init_main_from_name",
    "init_main_from_path",
}


def end_with(parent: int) -> None:
    """End this process at once when ``parent``, the process that started it, ends.

    On Linux the kernel sends SIGKILL, which ends even a process that is stopped. Elsewhere a thread looks every second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent").start()
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def preparation() -> dict[str, Any]:
    """What a forked process needs to import the modules of this one: its path, folder and main module."""
    data = spawn.get_preparation_data("composer3d")
    return {key: value for key, value in data.items() if key in _PREPARED}


def serve(control: int, preload: str) -> None:
    """Be the starter: fork on request, report what ended, until the owner is gone. ``control`` is a socket."""
    hangup = signal.getsignal(signal.SIGHUP)
    for number in _STOPPING:  # a job's signals reach its whole group
        signal.signal(number, signal.SIG_IGN)
    owner = socket.socket(fileno=control)
    import_module(preload)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # number of the process: the pipe for its end
    folders: list[str] = []
    with selectors.DefaultSelector() as selector:
        selector.register(owner, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if wake_read in ready:
                os.read(wake_read, 4096)
                _reap(children)
            if owner not in ready:
                continue
            request, descriptors = _receive(owner)
            if request is None:
                break
            letter, text = request
            if letter == KEEP:
                folders.append(text)
                continue
            task, end, *store = descriptors
            # A signal that comes right after the fork waits until the child does not ignore it any more.
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
            me, child = os.getpid(), os.fork()
            if child != 0:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            else:
                nohup = hangup is signal.SIG_IGN
                for descriptor in (control, wake_read, wake_write, end, *children.values()):
                    os.close(descriptor)
                _be_forked(me, task, store[0] if store else None, nohup=nohup)
            children[child] = end
            _tell(end, child)
            for descriptor in (task, *store):
                os.close(descriptor)
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    for folder in folders:  # nobody is left who writes there
        shutil.rmtree(folder, ignore_errors=True)


def _receive(owner: socket.socket) -> tuple[tuple[bytes, str] | None, list[int]]:
    """The next request, or None where the owner is gone, and its descriptors."""
    try:
        head, descriptors, _, _ = socket.recv_fds(owner, REQUEST.size, 3)
        while head and len(head) < REQUEST.size:
            head += _more(owner, REQUEST.size - len(head))
        if not head:
            return None, []
        letter, length = REQUEST.unpack(head)
        text = b""
        while len(text) < length:
            text += _more(owner, length - len(text))
    except (ConnectionError, EOFError):
        return None, []
    return (letter, os.fsdecode(text)), descriptors


def _more(owner: socket.socket, length: int) -> bytes:
    if not (part := owner.recv(length)):
        raise EOFError
    return part


def _reap(children: dict[int, int]) -> None:
    for child in list(children):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            end = children.pop(child)
            _tell(end, os.waitstatus_to_exitcode(status))
            os.close(end)


def _tell(end: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the owner does not listen any more
        os.write(end, STATUS.pack(number))


def _be_forked(parent: int, task: int, store: int | None, *, nohup: bool) -> None:
    """Go on as a process of its own: run the task that comes through the pipe, and end.

    SIGINT, SIGTERM and SIGHUP end it without a word, until the task decides otherwise. With ``nohup`` SIGHUP does not.
    """
    code = 1
    try:
        end_with(parent)
        signal.set_wakeup_fd(-1)
        for number in (*_STOPPING, signal.SIGCHLD):
            ignored = nohup and number == signal.SIGHUP
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        pipe = Connection(task)
        spawn.prepare(pickle.loads(pipe.recv_bytes()))
        function, arguments, environment = pickle.loads(pipe.recv_bytes())
        if (
            store is not None
        ):  # a file without a name: each open has a description of its own, as its locks need
            environment[STORE] = f"/proc/self/fd/{store}"
        run_task(pipe, function, arguments, environment)
        code = 0
    except EOFError:
        pass  # the owner is gone
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_task(
    pipe: Connection,
    task: Callable[..., Any] | str,
    arguments: dict[str, Any],
    environment: dict[str, str],
) -> None:
    """Call ``task(**arguments)`` and send (True, what it returned), or (False, a UserError or a traceback)."""
    os.environ |= environment
    try:
        function = pkgutil.resolve_name(task) if isinstance(task, str) else task
        answer = pickle.dumps((True, function(**arguments)))
    except UserError as error:
        answer = pickle.dumps((False, error))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()[-_LONGEST:]))
    with suppress(BrokenPipeError):  # the owner does not wait for it any more
        pipe.send_bytes(answer)
