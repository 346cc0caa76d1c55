"""A copy to a GPU comes from pinned memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer3d.models.to_device import copy_to_device_of


@pytest.mark.parametrize("is_cuda", [False, True])
def test_a_gpu_gets_a_copy_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 10)
    like: Any = SimpleNamespace(is_cuda=is_cuda, new_empty=torch.empty)
    copied = copy_to_device_of(like, torch.tensor([[1, 2]]))
    assert copied.tolist() == ([[11, 12]] if is_cuda else [[1, 2]])
