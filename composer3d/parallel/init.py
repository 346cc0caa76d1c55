"""Initial weights that do not depend on the layout.

Each element is a function of the seed, the parameter's name and the element's global index. The
generator is counter-based, in the manner of Salmon et al. 2011 ("Parallel random numbers: as easy
as 1, 2, 3"): splitmix64 (Steele et al. 2014) hashes the index to 64 bits, and Box-Muller turns
two groups of 26 of these bits into a normal number. A rank computes only its own shard, so no rank
ever holds a whole parameter.
"""

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.facts.limits import JOB
from composer3d.models.contract import Constant, ShardingPlan
from composer3d.runtime.torch_private import offset_of

# The constants of splitmix64, as signed int64.
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)

# Elements computed at once. The few float64 temporaries take 8 MiB each.
CHUNK = JOB.initial_weights


def initialise(stage: nn.Module, plan: ShardingPlan, seed: int, skip: Collection[str] = ()) -> None:
    """Fill the parameters of ``stage`` in place, except those named in ``skip``. No collective."""
    for name, parameter in stage.named_parameters():
        if name in skip:
            continue
        values = plan.init_of(name)
        # ``models.fit.check`` refuses a parameter without initial values.
        assert values is not None, name
        local, offset = local_part(parameter)
        if isinstance(values, Constant):
            local.fill_(values.value)
        else:
            fill_normal(local, tuple(parameter.shape), offset, std=values.std, key=_key(seed, name))


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of ``parameter``, and the global index of its first element.

    A plain tensor is its own shard.

    Returns:
        shard: a plain tensor of the shard's shape, detached. Writing to it changes ``parameter``.
        index: one number for each dim.
    """
    data = parameter.detach()
    if not isinstance(data, DTensor):
        return data, (0,) * data.dim()
    return data.to_local(), offset_of(data)


def fill_normal(
    local: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], *, std: float, key: int
) -> None:
    """Fill one shard of a tensor with normal numbers of mean 0.

    Args:
        local: the shard: a box of the whole tensor. It is filled in place.
        shape: the shape of the whole tensor.
        offset: the global index of the shard's first element.
        std: the standard deviation.
        key: distinguishes the tensors of a run.
    """
    if local.numel() == 0:
        return
    if not shape:  # a scalar: fill it as a row of one element
        local, shape, offset = local.view(1), (1,), (0,)
    strides = torch.tensor([1, *reversed(shape[1:])]).cumprod(0).flip(0).tolist()
    # The flat index, in the whole tensor, of column 0 of each local row. Indices are consecutive
    # along a row.
    rows = torch.zeros((), dtype=torch.int64)
    for dim in range(len(shape) - 1):
        rows = rows[..., None] + (torch.arange(local.shape[dim]) + offset[dim]) * strides[dim]
    rows = rows.reshape(-1, 1).to(local.device)
    columns = torch.arange(local.shape[-1], device=local.device) + offset[-1]

    flat = local.view(-1, local.shape[-1])
    rows_at_once = max(1, CHUNK // local.shape[-1])
    for begin in range(0, flat.shape[0], rows_at_once):
        part = slice(begin, begin + rows_at_once)
        flat[part] = normal_of(rows[part] + columns, key).mul_(std)


def normal_of(index: Tensor, key: int) -> Tensor:
    """Compute the standard normal numbers of flat global indices.

    Args:
        index: int64, of any shape.
        key: distinguishes the tensors of a run.

    Returns:
        float64, of the shape of ``index``.
    """
    bits = _splitmix64(index, key)
    # Adding 0.5 keeps ``uniform`` above 0, so that its logarithm is finite.
    uniform = ((bits >> 38) & 0x3FFFFFF).to(torch.float64).add_(0.5).mul_(2.0**-26)
    angle = ((bits >> 12) & 0x3FFFFFF).to(torch.float64).mul_(2.0**-26 * 2 * torch.pi)
    return uniform.log_().mul_(-2).sqrt_().mul_(angle.cos_())


def _splitmix64(index: Tensor, key: int) -> Tensor:
    # int64 wraps around as unsigned arithmetic does; masks make the right shifts logical ones.
    x = (index + 1) * _INCREMENT + key
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
