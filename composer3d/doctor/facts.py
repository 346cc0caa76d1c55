"""What each rank reports to rank 0. No torch here."""

from typing import NamedTuple

from composer3d.facts.hardware import Generation


class Speed(NamedTuple):
    """How long a collective of one size took.

    Attributes:
        axis: the axis of the group.
        collective: a name of ``runtime.exchanges.Collective``.
        n_bytes: as nccl-tests count: what each rank gives to a reduction or to an all-to-all, what
            a gather returns, or what a rank sends.
        seconds: for one call, on this rank.
    """

    axis: str
    collective: str
    n_bytes: int
    seconds: float


class RankFacts(NamedTuple):
    """What one rank knows and has measured.

    Attributes:
        name: the rank, with its coordinates, node and host.
        node: a number for its node: ranks of one node have the same.
        host: the name of its host.
        device: the name of its device.
        generation: of the device.
        memory_gib: of the device; on a CPU this rank's share of the host's.
        matrix_flops: measured FLOP/s of a large matrix product, by dtype.
        memory_bytes_s: measured bytes per second, read and written, of a large copy.
        first_ranks: the lowest rank of this rank's group, by axis.
        speeds: of its collectives.
        clock_s: how far the clock of its host is ahead of rank 0's; None: not measured.
        clock_error_s: the largest error of ``clock_s``.
        driver: the version of the GPU's driver; "" without.
        python: the version of Python.
        is_crowded: whether its node has more ranks on CPUs than cores.
    """

    name: str
    node: int
    host: str
    device: str
    generation: Generation
    memory_gib: float
    matrix_flops: dict[str, float]
    memory_bytes_s: float
    first_ranks: dict[str, int]
    speeds: list[Speed]
    clock_s: float | None
    clock_error_s: float
    driver: str
    python: str
    is_crowded: bool
