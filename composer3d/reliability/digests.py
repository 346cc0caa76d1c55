"""Find the rank whose memory or arithmetic is faulty: its digests differ from those of its peers.

Two ranks hold the same bits if they hold the same part of the same parameters: data-parallel
replicas do, and ranks of tp do for the parameters that tp does not cut. Which they are follows from
the placements of the DTensors, not from names: ranks of one pipeline stage with the same coordinate
on each mesh axis that cuts a parameter hold the same part of it. Their optimizer has the same state
for it, too.

A digest is a sum and a weighted sum of the bits, as integers that wrap around. They are exact in
any order, so every device gets the same numbers, and a single wrong bit always changes both.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.parallel.local_gradients import GradientUnit

# Columns of the matrix in which the bits are summed up.
_COLUMNS = 2048

# An odd number with bits everywhere (2^64 divided by the golden ratio), as an int64.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


# More than the parameters of a unit.
_MOST_PARAMETERS = 1 << 20


def bit_digest(tensor: Tensor) -> Tensor:
    """Compute two sums of the bits of ``tensor``. No collective, and no wait for the device.

    Returns:
        int64 (2) on the device of ``tensor``. All weights are odd, so a change of one element
        changes both sums, modulo 2^64.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    n_words = flat.numel() // 8
    rest = flat[8 * n_words :].to(torch.int64)
    words = flat[: 8 * n_words].view(torch.int64)
    n_rows = n_words // _COLUMNS
    matrix = words[: n_rows * _COLUMNS].view(n_rows, _COLUMNS)
    short_row = torch.cat((words[n_rows * _COLUMNS :], rest))
    by_column = torch.cat((matrix.sum(0), short_row))
    by_row = torch.cat((matrix.sum(1), short_row.sum()[None]))
    return torch.stack([(sums * _odd_weights(sums)).sum() for sums in (by_column, by_row)])


def _odd_weights(sums: Tensor) -> Tensor:
    """Return a weight for each position, as a weighted sum sees what a plain sum does not."""
    return (2 * torch.arange(len(sums), device=sums.device) + 1) * _SPREAD


# Says which part of the model a rank has: pairs of a mesh axis and a coordinate, and for gradients
# the number of the stage and of the unit.
_Part = tuple[tuple[str, int], ...]


class Digest(NamedTuple):
    """A digest that each rank with the same ``what`` and ``part`` must have.

    Attributes:
        what: "parameters", "optimizer state", or another value.
        part: says which part of the model a rank has.
        value: the digest.
    """

    what: str
    part: _Part
    value: tuple[int, ...]


class GradientDigests:
    """Digests the gradients of one backward as they come. The host waits once, in ``finish``."""

    def __init__(self) -> None:
        self._sums: dict[GradientUnit, Tensor] = {}
        self._times: Counter[tuple[GradientUnit, int]] = Counter()

    def add(self, unit: GradientUnit, index: int, gradient: Tensor) -> None:
        """Add a gradient, of any shape, of the parameter ``index`` of ``unit``.

        No collective, and no wait.
        """
        # Swapped gradients are seen as well, because each parameter has its own weight. Sums of
        # integers do not depend on the order in which backward comes to the parameters. A bit that
        # flips in two micro-batches must not cancel out: each gradient of a parameter has another
        # weight.
        times = self._times[unit, index]
        self._times[unit, index] += 1
        weight = _wrap((2 * (index + _MOST_PARAMETERS * times) + 1) * _SPREAD)
        digest = bit_digest(gradient) * weight
        self._sums[unit] = self._sums[unit] + digest if unit in self._sums else digest

    def finish(self, part: _Part) -> list[Digest]:
        """Return one digest for each unit. The host waits for the device.

        Args:
            part: says which ranks have computed the same gradients.
        """
        if not self._sums:
            return []
        values = torch.stack(list(self._sums.values())).tolist()
        return [
            Digest(
                f"gradient of {unit.name}",
                (*part, ("stage", unit.stage), ("unit", unit.place)),
                tuple(value),
            )
            for unit, value in zip(self._sums, values, strict=True)
        ]


def _wrap(number: int) -> int:
    """Return the int64 that is ``number`` modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def state_digests(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, *, pp_rank: int
) -> list[Digest]:
    """Digest this rank's shards of parameters and of the optimizer's state. The host waits once.

    No collective.

    Args:
        parameters: those of this rank, in an order that all ranks of the stage share.
        optimizer: the optimizer of these parameters.
        pp_rank: this rank's coordinate on pp.

    Returns:
        One digest of parameters and one of the optimizer's state for each set of axes that cut
        parameters.
    """
    sums: dict[tuple[str, _Part], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        part = (("pp", pp_rank), *_cuts(parameter))
        sums["parameters", part].append(bit_digest(_local(parameter)))
        state = optimizer.state.get(parameter, {})
        for value in state.values():
            if isinstance(value, Tensor):
                sums["optimizer state", part].append(bit_digest(_local(value)))
    keys = list(sums)
    # Two swapped tensors are seen as well, because each has its own weight.
    totals = []
    for key in keys:
        # The step counter of the optimizer may be in host memory, beside states on a device.
        device = sums[key][0].device
        of_tensors = torch.stack([pair.to(device) for pair in sums[key]])
        totals.append((of_tensors * _odd_weights(of_tensors)[:, None]).sum(0))
    if not totals:
        return []
    return [
        Digest(what, part, tuple(total))
        for (what, part), total in zip(keys, torch.stack(totals).tolist(), strict=True)
    ]


def _cuts(parameter: Tensor) -> list[tuple[str, int]]:
    """Return the mesh axes of more than one rank that cut ``parameter``, with this rank's place."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None
    return [
        (names[dim], mesh.get_local_rank(dim))
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Disagreement(NamedTuple):
    """Ranks that should have equal digests, and do not.

    Attributes:
        what, part: as in ``Digest``.
        suspects: the ranks with another digest than most; without a majority, all ranks.
        ranks: all ranks that should agree.
    """

    what: str
    part: _Part
    suspects: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the ranks agree, so that the suspects are wrong."""
        return len(self.suspects) < len(self.ranks)


def disagreements(of_ranks: Sequence[Iterable[Digest]]) -> list[Disagreement]:
    """Compare the digests of all ranks, given by rank."""
    groups: dict[tuple[str, _Part], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, digests in enumerate(of_ranks):
        for digest in digests:
            groups[digest.what, digest.part][rank] = digest.value
    found = []
    for (what, part), values in groups.items():
        (most_common, count), *others = Counter(values.values()).most_common()
        if not others:
            continue
        suspects = tuple(values)
        if 2 * count > len(values):
            suspects = tuple(rank for rank, value in values.items() if value != most_common)
        found.append(Disagreement(what, part, suspects, tuple(values)))
    return found


def can_disagree(of_ranks: Sequence[Iterable[Digest]], what: str) -> bool:
    """Return whether two ranks have a digest of the same ``what`` and part."""
    parts = Counter(
        digest.part for digests in of_ranks for digest in digests if digest.what == what
    )
    return any(count > 1 for count in parts.values())
