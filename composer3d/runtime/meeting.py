"""Let the ranks of a job meet in its store, before they are connected with each other."""

import socket
import time

import torch.distributed as dist

# Seconds of one attempt to reach the host of the store, and between two attempts.
_ATTEMPT_S = 5.0
_PAUSE_S = 0.2


def wait_for_host(host: str, port: int, *, is_host: bool, deadline_s: float) -> None:
    """Wait until ``host`` has an address, and until something listens there, unless ``is_host``.

    torch would wait as well, but would then print the frames of its C++ code.

    Args:
        host: the machine with the store of the job.
        port: the port of the store.
        is_host: whether this process will open the store.
        deadline_s: when to give up, as ``time.monotonic`` counts.

    Raises:
        OSError: the reason of the last attempt before the deadline.
    """
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            if is_host:
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            else:
                timeout_s = max(0.1, min(_ATTEMPT_S, left_s))
                socket.create_connection((host, port), timeout_s).close()
            return
        except socket.gaierror as error:
            # The name of a machine that is being started may become known.
            found: OSError = OSError(error.errno, f"{host} is not known ({error.strerror})")
        except TimeoutError:
            found = OSError(0, "nobody answers there")
        except OSError as error:
            found = OSError(error.errno, f"nobody listens there ({error.strerror})")
        if left_s <= _PAUSE_S:
            raise found
        time.sleep(_PAUSE_S)


def wait_in_store(store: dist.Store, name: str, size: int) -> None:
    """Wait until all ranks have called this function with ``name``. Collective over all ranks.

    It communicates through the store: two or three requests of each rank.

    Args:
        store: the store of the job. Its time-out limits the wait.
        name: the beginning of the two keys that only this meeting uses.
        size: the number of ranks.

    Raises:
        RuntimeError: ranks are missing after the time-out. ``peers.is_lost_peer`` knows the error.
    """
    if store.add(f"{name}/ranks", 1) == size:
        store.set(f"{name}/all", "1")
    store.wait([f"{name}/all"])
