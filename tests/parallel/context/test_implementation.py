"""Kernels of attention from other packages: one is planted, and refused where it cannot run."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention

from composer3d.facts.errors import DeviceError
from composer3d.models.layers.attention import sdpa
from composer3d.parallel.context import implementation, kernels
from composer3d.runtime.launch import Pool

CPU = torch.device("cpu")


class Planted:
    """Kernels that stand in for those of a package. Each call is noted, and the values are wrong.

    Attributes:
        calls: the number of calls.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._library = Library("aten", "IMPL", "CPU")
        operator = "_scaled_dot_product_flash_attention_for_cpu"
        self._library.impl(operator, self._forward, "CPU", allow_override=True)

    def remove(self) -> None:
        raise AssertionError("a process keeps its kernels")

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        self.calls += 1
        return torch.full_like(q, 7.0), q.new_zeros(q.shape[:-1])


def attend(kernel: str) -> tuple[bool, int, bool]:
    """Attend in a process of its own, with and without documents.

    Returns:
        Whether the planted values came back, the calls, and whether cuDNN has a part in it.
    """
    planted = []

    def register() -> Planted:
        planted.append(Planted())
        return planted[-1]

    attention.register_flash_attention_impl("FA3", register_fn=register)
    implementation._major_capability = lambda device: 9
    implementation.activate(kernel, CPU)
    q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    outs = kernels.attend_block(q, k, v, causal=True)[0], sdpa(q, k, v)
    are_planted = all(bool((out == 7.0).all()) for out in outs)
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    return are_planted, sum(each.calls for each in planted), has_cudnn


@pytest.mark.parametrize(
    ("kernel", "expected"), [("flash3", (True, 2, False)), ("torch", (False, 0, True))]
)
def test_a_planted_implementation_is_called(
    pool: Pool, kernel: str, expected: tuple[bool, int, bool]
) -> None:
    assert pool.run(attend, {"kernel": kernel}, world_size=1) == [expected]


@pytest.mark.parametrize(
    ("kernel", "major", "words"),
    [
        ("flash3", None, "needs a GPU of compute capability 9.x, and this run is on a CPU"),
        ("flash3", 10, "needs a GPU of compute capability 9.x, and this run is on a GPU of 10.x"),
        ("flash4", 8, "compute capability 9.x or 10.x, and this run is on a GPU of 8.x"),
        ("flash3", 9, "needs the module flash_attn_interface, which cannot be used here"),
        ("flash4", 10, "needs the module flash_attn.cute.interface, which cannot be used here"),
    ],
)
def test_what_cannot_run_is_refused(
    kernel: str, major: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "_major_capability", lambda device: major)
    with pytest.raises(DeviceError) as caught:
        implementation.activate(kernel, CPU)
    assert words in caught.value.lines[0]
    assert caught.value.lines[0].endswith('use parallel.attention_kernel = "torch"')


def test_doctor_knows_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert implementation.installed() == []
    module = ModuleType("flash_attn_interface")
    module.__spec__ = torch.__spec__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert implementation.installed() == ["flash3"]
