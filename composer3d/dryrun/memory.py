"""Counts the bytes of a rank's tensors by kind, while a step runs.

Storages are counted, not tensors: a view costs nothing. A storage lives until the last tensor on it
is freed, as in the allocator of a device. What the allocator rounds up or keeps is not counted,
nor the workspaces inside of kernels.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor, UntypedStorage


class Kind(IntEnum):
    """What a storage holds."""

    PARAMETERS = 0  # this rank's shards
    GATHERED = 1  # parameters that FSDP has gathered
    WHOLE_GRADIENTS = 2  # before they are reduced, in FSDP's buffers as well
    GRADIENTS = 3  # this rank's shards
    OPTIMIZER = 4
    ACTIVATIONS = 5  # all else: activations, batches, messages and temporary values


# The kinds that a report adds up.
class Bytes(NamedTuple):
    """Bytes by kind.

    Attributes:
        params: shards of parameters, and gathered parameters.
        grads: of parameters, whole and sharded.
        optimizer: the optimizer's state.
        activations: all else.
    """

    params: int
    grads: int
    optimizer: int
    activations: int


_CLASS_OF = (0, 0, 1, 1, 2, 3)  # the field of ``Bytes`` for each ``Kind``

# With parameters in host memory, what lies on the device.
_ON_DEVICE = frozenset({Kind.GATHERED, Kind.WHOLE_GRADIENTS, Kind.ACTIVATIONS})


@dataclass(slots=True)
class _Held:
    """A storage that is alive. ``reference`` removes it when it is freed."""

    n_bytes: int
    kind: Kind
    reference: "weakref.ref[UntypedStorage]"


class MemoryLedger:
    """The storages of a rank that are alive, their bytes by kind, and the peaks.

    Tensors may have any shape: only the size of their storage counts.

    Args:
        offload: parameters, gradients and the optimizer's state are in host memory, and do not
            count in the peak.

    Attributes:
        peak: the most bytes alive at one time on the device.
        at_peak: bytes by ``Kind`` at that time, host memory included.
    """

    def __init__(self, *, offload: bool) -> None:
        self._held: dict[int, _Held] = {}
        self._now = [0] * len(Kind)
        self._class_now = [0] * 4
        self._class_most = [0] * 4
        self._counts = [not offload or kind in _ON_DEVICE for kind in Kind]
        self._total = 0
        self._lap_most = [0] * 4
        self._lap_peak = 0
        self.peak = 0
        self.at_peak = tuple(self._now)

    @property
    def most(self) -> Bytes:
        """The most bytes of each kind at one time: not all at the same time."""
        return Bytes(*self._class_most)

    @property
    def now(self) -> tuple[int, ...]:
        """The bytes alive: of each kind of ``Bytes``, and on the device."""
        return (*self._class_now, self._total)

    def lap(self) -> tuple[int, ...]:
        """Return the most bytes since the last call, as in ``now``, and begin to count anew."""
        most = (*self._lap_most, self._lap_peak)
        self._lap_most, self._lap_peak = list(self._class_now), self._total
        return most

    def see(self, tensor: Tensor, kind: Kind = Kind.ACTIVATIONS) -> None:
        """Count the storage of ``tensor``, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return

        def forget(_: object) -> None:
            held = self._held.pop(key)
            self._add(held.kind, -held.n_bytes)

        n_bytes = storage.nbytes()
        self._held[key] = _Held(n_bytes, kind, weakref.ref(storage, forget))
        self._add(kind, n_bytes)

    def mark(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Set the kind of the storages of ``tensors``, and count those that are new."""
        for tensor in tensors:
            self.see(tensor, kind)
            held = self._held[tensor.untyped_storage()._cdata]
            if held.kind is not kind:
                self._add(held.kind, -held.n_bytes)
                held.kind = kind
                self._add(kind, held.n_bytes)

    def kind_of(self, tensor: Tensor) -> Kind | None:
        """Return the kind of the storage of ``tensor``; None: it is not counted."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        return None if held is None else held.kind

    def resize(self, storage: UntypedStorage) -> None:
        """Count the bytes of a storage anew: FSDP frees gathered parameters by resizing to 0."""
        held = self._held.get(storage._cdata)
        if held is not None:
            change = storage.nbytes() - held.n_bytes
            held.n_bytes += change
            self._add(held.kind, change)

    def _add(self, kind: Kind, n_bytes: int) -> None:
        self._now[kind] += n_bytes
        of_class = _CLASS_OF[kind]
        self._class_now[of_class] += n_bytes
        if n_bytes > 0:
            now = self._class_now[of_class]
            self._class_most[of_class] = max(self._class_most[of_class], now)
            self._lap_most[of_class] = max(self._lap_most[of_class], now)
        if self._counts[kind]:
            self._total += n_bytes
            self._lap_peak = max(self._lap_peak, self._total)
            if self._total > self.peak:
                self.peak = self._total
                self.at_peak = tuple(self._now)
