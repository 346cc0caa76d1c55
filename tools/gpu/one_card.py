"""Ranks that share one card: ``python -m tools.gpu.one_card ARGUMENTS`` is one rank of a job.

NCCL refuses two ranks on a card. Here the groups of a job carry every tensor through the host, over
gloo. So ``composer3d verify --here`` proves the values of a layout with the kernels and streams of
the card. Times say nothing, and whatever waits for a collective waits for the host.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "through_host"

# Of ``ProcessGroup``: operations whose first argument is both input and output, and operations
# whose first argument is the output and the second the input.
_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
_OUT_AND_IN = (
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "alltoall",
    "gather",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
)


class _ThroughHost(dist.ProcessGroup):
    """A group that copies tensors to the host, calls gloo there, and copies the results back."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._on_host = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._on_host._register_backend(torch.device("cpu"), kind, gloo)
        self._on_host._set_default_backend(kind)

    def barrier(self, *_: Any, **__: Any) -> Any:
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        return self._on_host.barrier(options)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        sent = _to_host(tensors)
        return _Transfer(self._on_host.send(sent, to, tag), sent, [])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        received = _to_host(tensors)
        return _Transfer(self._on_host.recv(received, source, tag), received, tensors)

    @property
    def group_name(self) -> Any:
        """The name under which torch has registered the group.

        torch tells it to its own groups, but not to one that is written in Python.
        """
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME


class _Transfer:
    """A message on its way.

    Args:
        work: of gloo.
        on_host: what is sent or received; it is kept until the end.
        into: where ``wait`` copies what has come; empty for a sender.
    """

    def __init__(self, work: Any, on_host: list[torch.Tensor], into: list[torch.Tensor]) -> None:
        self._work, self._on_host, self._into = work, on_host, into

    def wait(self, *_: Any) -> bool:
        self._work.wait()
        if self._into:
            _copy_back(self._into, self._on_host)
        return True


def _to_host(tensors: Any) -> Any:
    """Return copies in host memory, in the same lists."""
    return tree_map_only(torch.Tensor, lambda one: one.detach().to("cpu", copy=True), tensors)


def _copy_back(tensors: Any, on_host: Any) -> None:
    for to, source in zip(tree_leaves(tensors), tree_leaves(on_host), strict=True):
        to.detach().copy_(source)


def _done(value: Any) -> Any:
    """Return a work that has ended."""
    future: Future[Any] = Future()
    future.set_result(value)
    return _create_work_from_future(future)


def _in_place(name: str) -> Callable[..., Any]:
    def call(self: _ThroughHost, tensors: Any, *arguments: Any) -> Any:
        on_host = _to_host(tensors)
        getattr(self._on_host, name)(on_host, *arguments).wait()
        _copy_back(tensors, on_host)
        return _done(tensors)

    return call


def _out_and_in(name: str) -> Callable[..., Any]:
    def call(self: _ThroughHost, out: Any, given: Any, *arguments: Any) -> Any:
        out_on_host = _to_host(out)
        getattr(self._on_host, name)(out_on_host, _to_host(given), *arguments).wait()
        _copy_back(out, out_on_host)
        return _done(out)

    return call


for _name in _IN_PLACE:
    setattr(_ThroughHost, _name, _in_place(_name))
for _name in _OUT_AND_IN:
    setattr(_ThroughHost, _name, _out_and_in(_name))


def main() -> int:
    """Run a command of composer3d as a rank that shares its device."""
    from composer3d.cli import main as run_command
    from composer3d.runtime import devices, process_group

    dist.Backend.register_backend(NAME, _ThroughHost, devices=["cpu", "cuda"])
    for device in process_group._BACKENDS:
        process_group._BACKENDS[device] = NAME
    devices.refuse_shared_gpus = lambda *_, **__: None
    # torch asks the group of a device for a backend of its own, which this kind lacks.
    form = dist.init_process_group
    dist.init_process_group = lambda *given, **named: form(*given, **{**named, "device_id": None})
    return run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
