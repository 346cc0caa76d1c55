"""Read tensors that files hold in MXFP4, as the published files of gpt-oss do.

OCP Microscaling Formats (MX) Specification 1.0, 2023: 32 consecutive numbers of 4 bits (E2M1) share
a scale of 8 bits, a power of two. Files have two tensors in the place of one, ``NAME_blocks`` and
``NAME_scales``: (E, J, G, 16) and (E, J, G) for a tensor (E, K, J) with K = 32 G.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from composer3d.checkpoint.manifest import TensorSpec
from composer3d.convert.tensors import Box, ReadableTensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # numbers of a scale
_BYTES = _GROUP // 2
_BIAS = 127  # of the exponent that a scale is

# The number of each code: a sign, two bits of exponent and one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor(
    [sign * size for sign in (1.0, -1.0) for size in _MAGNITUDES], dtype=torch.bfloat16
)


def without_blocks(tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """Return the tensors of files with one in bfloat16 for each pair of blocks and scales.

    A number is that of transformers, bit by bit. It is computed when it is read. Pairs whose shapes
    or dtypes do not belong together stay as they are.
    """
    found = dict(tensors)
    for name, blocks in tensors.items():
        whole = name.removesuffix(_BLOCKS)
        scales = tensors.get(f"{whole}{_SCALES}")
        if whole == name or whole in tensors or scales is None or not _is_pair(blocks, scales):
            continue
        experts, rows, groups = scales.spec.shape
        found[whole] = ReadableTensor(
            TensorSpec((experts, groups * _GROUP, rows), "bfloat16"),
            partial(_read, blocks, scales, ()),
            read_box=partial(_read, blocks, scales),
        )
        del found[name], found[f"{whole}{_SCALES}"]
    return found


def _is_pair(blocks: ReadableTensor, scales: ReadableTensor) -> bool:
    of_blocks, of_scales = blocks.spec, scales.spec
    return (
        of_blocks.dtype == of_scales.dtype == "uint8"
        and len(of_scales.shape) == 3
        and of_blocks.shape == (*of_scales.shape, _BYTES)
    )


def _read(blocks: ReadableTensor, scales: ReadableTensor, box: Box) -> Tensor:
    """Return a box of the tensor (E, K, J) that ``blocks`` and ``scales`` stand for."""
    experts, columns, rows = box or (slice(None),) * 3
    begin, end, _ = columns.indices(scales.spec.shape[2] * _GROUP)
    groups = slice(begin // _GROUP, -(-end // _GROUP))
    of_blocks = blocks.read()[experts, rows, groups]
    of_scales = scales.read()[experts, rows, groups]
    numbers = torch.empty(*of_scales.shape, _GROUP, dtype=torch.bfloat16)
    # One expert after the other: what is between takes several times as much as the numbers.
    for codes, scale, into in zip(of_blocks, of_scales, numbers, strict=True):
        # The first number of two is in the lower half of a byte.
        into[..., ::2] = _NUMBERS[(codes & 0xF).int()]
        into[..., 1::2] = _NUMBERS[(codes >> 4).int()]
        exponents = scale.to(torch.int32) - _BIAS
        torch.ldexp(into, exponents[..., None], out=into)
    first = groups.start * _GROUP
    return numbers.flatten(-2)[..., begin - first : end - first].mT
