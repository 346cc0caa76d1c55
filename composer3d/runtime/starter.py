"""The starter: a process that has already imported torch and forks the processes of ``launch``.

The owner, which is the process that needs them, talks to the starter over an unnamed pair of
sockets. There is no port, no named socket and no folder that another user or host could reach.

No process outlives the command that started it:

- When the owner ends for any reason, its end of the pair closes. The starter then kills the
  processes that it forked, waits for them, and removes the temporary folders that the owner
  registered.
- When the starter itself is killed, the kernel kills the forked processes.
"""

import errno
import os
import pickle
import pkgutil
import select
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from composer3d.facts.errors import UserError
from composer3d.facts.interrupts import STOP_SIGNALS
from composer3d.runtime import collector, console
from composer3d.runtime.environment import STORE_VARIABLE
from composer3d.runtime.parent import die_with_parent

# A request starts with its kind and the length of the path that follows.
REQUEST = struct.Struct("!cI")

# A FORK request has an empty path. It comes with these descriptors: the pipe for the call and its
# answer, the pipe for the statuses of the process, and the file of the world's store, if any.
FORK = b"F"

# A REMOVE_AT_END request has the path of a temporary folder.
REMOVE_AT_END = b"R"

# The status pipe of a forked process carries two such numbers: its process id, and later its exit
# code. If there was no memory for it, the first one is minus the number of the error.
STATUS = struct.Struct("!q")

# The last characters of a traceback that are sent. A pipe can hold that many bytes unread, so the
# process can send them and end at once.
_TRACEBACK_LIMIT = 30_000

_PREPARATION_KEYS = {"sys_path", "sys_argv", "dir", "orig_dir"}
_MAIN_KEYS = {"init_main_from_name", "init_main_from_path"}

# Whether a starter has forked this process.
is_forked = False


class Call(NamedTuple):
    """The function that a forked process runs, and its environment.

    Attributes:
        function: a function at the top of a module, or its name as ``module:function``.
        arguments: its keyword arguments.
        environment: the variables to set before the call.
    """

    function: Callable[..., Any] | str
    arguments: dict[str, Any]
    environment: dict[str, str]


class Answer(NamedTuple):
    """The outcome of a call.

    Attributes:
        succeeded: whether the function returned.
        value: the returned value. After a failure it is the UserError, or the traceback of any
            other error as text.
    """

    succeeded: bool
    value: Any


class _Request(NamedTuple):
    kind: bytes
    path: str
    descriptors: list[int]


@contextmanager
def _ending_with(owner: socket.socket) -> Iterator[None]:
    """End this process at once if the owner ends within the block, which reads no requests."""
    done_read, done_write = os.pipe()
    poller = select.poll()
    poller.register(owner, 0)  # the end of the other side is always told
    poller.register(done_read, select.POLLIN)

    def watch() -> None:
        if all(descriptor == done_read for descriptor, _ in poller.poll()):
            return
        while (request := _receive_request(owner)) is not None:
            if request.kind == REMOVE_AT_END:
                shutil.rmtree(request.path, ignore_errors=True)
        os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True, name="owner")
    watcher.start()
    try:
        yield
    finally:
        os.close(done_write)
        # No process may be forked while there is a second thread.
        watcher.join()
        os.close(done_read)


def preparation_data(*, with_main: bool) -> dict[str, Any]:
    """Return ``sys.path``, ``sys.argv`` and the folders of this process.

    A forked process needs them to import the same modules.

    Args:
        with_main: whether to return its main module as well, which the forked process then runs
            as ``__mp_main__``: a function that is defined there is found in no other way. A script
            that is no module of ours may have no ``if __name__ == "__main__":``, and would do all
            its work again.
    """
    data = spawn.get_preparation_data("composer3d")
    keys = _PREPARATION_KEYS | _MAIN_KEYS if with_main else _PREPARATION_KEYS
    return {key: value for key, value in data.items() if key in keys}


def serve(control: int, preload: str) -> None:
    """Run the starter: fork on request and report exit codes until the owner is gone.

    Args:
        control: the descriptor of the socket to the owner.
        preload: the module to import before the first fork.
    """
    console.steady_errors()
    # After `nohup`, the forked processes ignore SIGHUP as well.
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    # A terminal sends its signals to the whole process group; only the owner decides when to
    # stop.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    owner = socket.socket(fileno=control)
    with _ending_with(owner), collector.importing():
        import_module(preload)

    # The end of a child wakes the selector through this pipe.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    status_pipes: dict[int, int] = {}  # by the process id of the child
    folders: list[str] = []
    with selectors.DefaultSelector() as selector:
        selector.register(owner, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if wake_read in ready:
                os.read(wake_read, 4096)
                _reap(status_pipes)
            if owner not in ready:
                continue

            request = _receive_request(owner)
            if request is None:
                break
            if request.kind == REMOVE_AT_END:
                folders.append(request.path)
                continue

            call_pipe, status_pipe, *store = request.descriptors
            try:
                child = _fork(
                    call_pipe,
                    store[0] if store else None,
                    nohup=nohup,
                    close=(control, wake_read, wake_write, status_pipe, *status_pipes.values()),
                )
            except OSError as error:
                _send_status(status_pipe, -(error.errno or errno.ENOMEM))
                os.close(status_pipe)
            else:
                status_pipes[child] = status_pipe
                _send_status(status_pipe, child)
            for descriptor in (call_pipe, *store):
                os.close(descriptor)

    for child in status_pipes:
        os.kill(child, signal.SIGKILL)
    for child in status_pipes:
        os.waitpid(child, 0)

    # The folders are removed last: no process is left that writes to them.
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _receive_request(owner: socket.socket) -> _Request | None:
    """Read the next request; None if the owner is gone."""
    try:
        head, descriptors, _, _ = socket.recv_fds(owner, REQUEST.size, 3)
        if not head:
            return None
        head += _receive_exactly(owner, REQUEST.size - len(head))
        kind, length = REQUEST.unpack(head)
        path = _receive_exactly(owner, length)
    except (ConnectionError, EOFError):
        return None
    return _Request(kind, os.fsdecode(path), descriptors)


def _receive_exactly(owner: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes. Raises EOFError if the stream ends before."""
    content = b""
    while len(content) < size:
        received = owner.recv(size - len(content))
        if not received:
            raise EOFError
        content += received
    return content


def _reap(status_pipes: dict[int, int]) -> None:
    """Send the exit code of each child that has ended, and forget the child."""
    for child in list(status_pipes):
        ended_child, wait_status = os.waitpid(child, os.WNOHANG)
        if ended_child:
            status_pipe = status_pipes.pop(child)
            _send_status(status_pipe, os.waitstatus_to_exitcode(wait_status))
            os.close(status_pipe)


def _send_status(status_pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the owner has closed the pipe
        os.write(status_pipe, STATUS.pack(number))


def _fork(call_pipe: int, store: int | None, *, nohup: bool, close: Iterable[int]) -> int:
    """Fork a process that runs the call from ``call_pipe``. Returns its process id.

    Args:
        call_pipe: the descriptor of the pipe for the call and its answer.
        store: the descriptor of the world's store.
        nohup: whether the process ignores SIGHUP.
        close: descriptors that the process must not keep open.

    Raises OSError if there is no memory or no room for another process.
    """
    # The child inherits that stop signals are ignored. So they are blocked during the fork: a
    # signal for the child stays pending until the child has reset its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        raise
    if child == 0:
        for descriptor in close:
            os.close(descriptor)
        _run_child(parent, call_pipe, store, nohup=nohup)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return child


def _run_child(parent: int, call_pipe: int, store: int | None, *, nohup: bool) -> NoReturn:
    """Run the call from ``call_pipe`` in a process that was just forked, and end the process.

    ``STOP_SIGNALS`` end it silently, unless the call installs handlers of its own. With
    ``nohup``, SIGHUP is ignored.
    """
    global is_forked
    is_forked = True
    code = 1
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            ignored = nohup and number == signal.SIGHUP
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

        pipe = Connection(call_pipe)
        spawn.prepare(pickle.loads(pipe.recv_bytes()))
        call: Call = pickle.loads(pipe.recv_bytes())
        if store is not None:
            # The file has no name. Opening it through this path gives each process an open file
            # description of its own, which the locks of the store need.
            call.environment[STORE_VARIABLE] = f"/proc/self/fd/{store}"
        _run_call(pipe, call)
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


def _run_call(pipe: Connection, call: Call) -> None:
    """Run ``call`` and send an ``Answer`` through ``pipe``."""
    os.environ |= call.environment
    try:
        function = call.function
        if isinstance(function, str):
            function = pkgutil.resolve_name(function)
        answer = pickle.dumps(Answer(True, function(**call.arguments)))
    except UserError as error:
        answer = pickle.dumps(Answer(False, error))
    except BaseException:
        answer = pickle.dumps(Answer(False, traceback.format_exc()[-_TRACEBACK_LIMIT:]))
    with suppress(BrokenPipeError):  # the owner no longer waits for the answer
        pipe.send_bytes(answer)
