"""Make the next batches in a thread while the step runs."""

import threading
from collections import deque
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from composer3d.data.loader import Batch, Loader
from composer3d.data.order import Order

_CLOSE_S = 5.0

# Batches that are made ahead. A store answers late now and then, and more batches bridge that.
_AHEAD_OF_DISK = 1
_AHEAD_OF_STORE = 4


class _Made(NamedTuple):
    """A batch, and the state of its loader after it."""

    batch: Batch
    state: dict[str, Any]


class BatchesAhead:
    """An iterator over a loader's batches. One batch is made ahead, in a thread.

    If the loader reads an object store, four batches are made ahead, one after the other. ``next``
    returns a batch, and lets the thread make another one. An error of the loader is raised by the
    ``next`` that would have returned its batch. The first ``next`` starts the thread.

    Args:
        loader: makes the batches. Nobody else may call it as long as this object is in use.
        device: the device that the batches go to. For a GPU, tokens, labels and positions are in
            pinned memory, so that the host need not wait while they are copied.
        stop: the step before which the batches end, and from which on none is made; None: never.
    """

    def __init__(self, loader: Loader, device: torch.device, *, stop: int | None = None) -> None:
        self._loader, self._device, self._stop = loader, device, stop
        self._state = loader.state_dict()
        self._ahead = _AHEAD_OF_STORE if loader.reads_store else _AHEAD_OF_DISK
        self._next: deque[Future[_Made]] = deque()
        self._has_failed = False  # whether the batch after ``_state`` could not be made
        self._thread: threading.Thread | None = None
        # What the thread must make, in order; None ends it.
        self._requests: SimpleQueue[Future[_Made] | None] = SimpleQueue()

    @property
    def loader(self) -> Loader:
        """The loader. Only its methods that read no data may be called."""
        return self._loader

    @property
    def order(self) -> Order:
        """The order of the loader's samples."""
        return self._loader.order

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the batch that ``next`` has returned last.

        A run that resumes from it goes on with the batch after that one, made ahead or not.
        """
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the loader, as ``Loader.load_state_dict``, with its errors."""
        self._drop()
        wait(self._next)
        self._next.clear()
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()
        self._has_failed = False

    def __iter__(self) -> "BatchesAhead":
        return self

    def __next__(self) -> Batch:
        if self._has_failed:
            # Who asks again, for example after a store has failed, gets the batch that failed. Only
            # now, as this waits for a read that may hang: the error had to be raised at once.
            self.load_state_dict(self._state)
        if not self._next and self._is_at_end():
            raise StopIteration
        future = self._next.popleft() if self._next else self._request()
        try:
            batch, self._state = future.result()
        except Exception:
            self._has_failed = True
            raise
        while len(self._next) < self._ahead and not self._is_at_end():
            self._next.append(self._request())
        return batch

    def close(self) -> None:
        """End the thread. Wait for the next batch some seconds at most: a read may hang."""
        if self._thread is not None:
            self._drop(keep=1)
            self._requests.put(None)
            self._thread.join(_CLOSE_S)
            self._thread = None

    def _is_at_end(self) -> bool:
        """Return whether no batch is to be made after those that are requested."""
        return self._stop is not None and self._state["next_step"] + len(self._next) >= self._stop

    def _drop(self, *, keep: int = 0) -> None:
        """Let the thread make none of the batches that it has not begun, after the first ones."""
        futures = list(self._next)
        dropped = [future for future in futures[keep:] if future.cancel()]
        self._next = deque(future for future in futures if future not in dropped)

    def _request(self) -> Future[_Made]:
        """Let the thread make the next batch."""
        if self._thread is None:
            # A daemon, so that a read that hangs does not keep the process from ending.
            self._thread = threading.Thread(target=self._serve, name="next batch", daemon=True)
            self._thread.start()
        future: Future[_Made] = Future()
        self._requests.put(future)
        return future

    def _serve(self) -> None:
        """Make batches until the end is requested. This runs in the thread."""
        while (future := self._requests.get()) is not None:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                batch = next(self._loader)
                if self._device.type == "cuda":
                    batch = _pin(batch, self._device)
                future.set_result(_Made(batch, self._loader.state_dict()))
            except BaseException as error:
                future.set_exception(error)


def _pin(batch: Batch, device: torch.device) -> Batch:
    """Copy what goes to the GPU into pinned memory. Documents are read on the CPU."""
    # A thread begins with the first GPU, and pinning would open it.
    torch.cuda.set_device(device)
    return batch._replace(
        tokens_BT=batch.tokens_BT.pin_memory(),
        labels_BT=batch.labels_BT.pin_memory(),
        positions_BT=batch.positions_BT.pin_memory(),
        ahead_B2KT=None if batch.ahead_B2KT is None else batch.ahead_B2KT.pin_memory(),
    )
