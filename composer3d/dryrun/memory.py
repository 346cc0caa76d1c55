"""Counts the bytes of a rank's tensors by kind, while a step runs.

Storages are counted, not tensors: a view costs nothing. A storage lives until the last tensor on it
is freed, as in the allocator of a device. What the allocator rounds up or keeps is not counted,
nor the workspaces inside of kernels.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor, UntypedStorage


class Kind(IntEnum):
    """What a storage holds."""

    PARAMETERS = 0  # this rank's shards
    GATHERED = 1  # parameters that FSDP has gathered
    WHOLE_GRADIENTS = 2  # before they are reduced, in FSDP's buffers as well
    GRADIENTS = 3  # this rank's shards
    OPTIMIZER = 4
    ACTIVATIONS = 5  # all else: activations, batches, messages and temporary values


# What ``MemoryLedger.now`` counts: four sums of kinds, and what lies on the device.
_OF_KIND = (0, 0, 1, 1, 2, 3)  # the sum of each ``Kind``
_ON_DEVICE, _COUNTED = 4, 5

# With parameters in host memory, what lies on the device.
_NEVER_IN_HOST_MEMORY = frozenset({Kind.GATHERED, Kind.WHOLE_GRADIENTS, Kind.ACTIVATIONS})


@dataclass(slots=True)
class _Held:
    """A storage that is alive. ``reference`` removes it when it is freed."""

    n_bytes: int
    kind: Kind
    reference: "weakref.ref[UntypedStorage]"


class MemoryLedger:
    """The storages of a rank that are alive, and their bytes by kind.

    Tensors may have any shape: only the size of their storage counts.

    Args:
        offload: parameters, gradients and the optimizer's state are in host memory, and do not
            count on the device.
    """

    def __init__(self, *, offload: bool) -> None:
        self._held: dict[int, _Held] = {}
        self._on_device = [not offload or kind in _NEVER_IN_HOST_MEMORY for kind in Kind]
        self._now = [0] * _COUNTED
        self._most = [0] * _COUNTED

    @property
    def now(self) -> tuple[int, ...]:
        """The bytes alive, in the order of ``report.Memory``.

        They are those of parameters (shards and gathered ones), gradients (whole and sharded), the
        optimizer's state and all else, and those of all kinds on the device.
        """
        return tuple(self._now)

    def lap(self) -> tuple[int, ...]:
        """Return the most bytes since the last call, as in ``now``, and begin to count anew.

        Each is the most at one time: not all at the same time.
        """
        most = tuple(self._most)
        self._most = list(self._now)
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
        self._count(_OF_KIND[kind], n_bytes)
        if self._on_device[kind]:
            self._count(_ON_DEVICE, n_bytes)

    def _count(self, place: int, n_bytes: int) -> None:
        self._now[place] += n_bytes
        self._most[place] = max(self._most[place], self._now[place])
