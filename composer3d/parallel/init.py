"""Initial weights that do not depend on the layout: each element is a function of (seed, parameter name, global index).

A counter-based generator in the manner of Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"):
splitmix64 (Steele et al. 2014) hashes the index to 64 bits, and Box-Muller turns two 26-bit halves into a normal
number. A rank computes its own shard and nothing else, so that no rank ever holds a whole parameter.
"""

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from composer3d.parallel.plan import Constant, Plan

# Of splitmix64, as int64 holds them.
_STEP, _MIX_1, _MIX_2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_CHUNK = 1 << 20  # elements computed at once: a few float64 temporaries of 8 MiB


def initialise(stage: nn.Module, plan: Plan, seed: int, skip: Collection[str] = ()) -> None:
    """Fill the parameters of ``stage`` in place, by their global names, but for those of ``skip``.

    A rank fills its own shards; nothing is sent.
    """
    for name, parameter in stage.named_parameters():
        if name in skip:
            continue
        how = plan.init_of(name)
        assert how is not None, name  # Plan.check has seen the whole model
        local, offset = local_part(parameter)
        if isinstance(how, Constant):
            local.fill_(how.value)
        else:
            fill_normal(local, tuple(parameter.shape), offset, std=how.std, key=_key(seed, name))


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's elements of ``parameter`` and the global index of the first of them."""
    data = parameter.detach()
    if not isinstance(data, DTensor):
        return data, (0,) * data.dim()
    _, offset = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
    return data.to_local(), tuple(offset)


def fill_normal(local: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], *, std: float, key: int) -> None:
    """Fill ``local``, the box of a tensor of ``shape`` that begins at ``offset``, with numbers of that ``key``."""
    if local.numel() == 0:
        return
    stride = torch.tensor([1, *reversed(shape[1:])]).cumprod(0).flip(0).tolist()
    # Rows of the last dimension are contiguous in the whole tensor: number the rows, then the columns.
    rows = torch.zeros((), dtype=torch.int64)
    for dim in range(len(shape) - 1):
        rows = rows[..., None] + (torch.arange(local.shape[dim]) + offset[dim]) * stride[dim]
    rows = rows.reshape(-1, 1).to(local.device)
    columns = torch.arange(local.shape[-1], device=local.device) + offset[-1]
    flat = local.view(-1, local.shape[-1])
    step = max(1, _CHUNK // local.shape[-1])
    for begin in range(0, flat.shape[0], step):
        flat[begin : begin + step] = normal_of(rows[begin : begin + step] + columns, key).mul_(std)


def normal_of(index: Tensor, key: int) -> Tensor:
    """Standard normal numbers (float64) of the elements with these global indices (int64)."""
    bits = _splitmix64(index, key)
    one = ((bits >> 38) & 0x3FFFFFF).to(torch.float64).add_(0.5).mul_(2.0**-26)  # in (0, 1): the logarithm is finite
    two = ((bits >> 12) & 0x3FFFFFF).to(torch.float64).mul_(2.0**-26 * 2 * torch.pi)
    return one.log_().mul_(-2).sqrt_().mul_(two.cos_())


def _splitmix64(index: Tensor, key: int) -> Tensor:
    # int64 arithmetic wraps around as the unsigned one does; a right shift must be made logical by a mask.
    x = (index + 1) * _STEP + key
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
