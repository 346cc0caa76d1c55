"""Combine what the ranks have measured: a table, JSON, and what is slow. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from composer3d.doctor.advice import Advice, advice_as_json, describe_links, lines_of
from composer3d.doctor.facts import RankFacts
from composer3d.doctor.links import MachineLinks
from composer3d.recipe.schema import Recipe
from composer3d.reliability.stragglers import medians_of_others

# Clocks that differ by more make the times in the logs of two nodes hard to compare.
_MOST_SKEW_S = 1.0

# Messages of this size or less have a latency, larger ones a bandwidth.
_SMALL_BYTES = 1 << 10

_MOST_NAMED = 4


class Disk(NamedTuple):
    """The place of the run's checkpoints.

    Attributes:
        folder: their folder, or the parent of it that exists; or the URL in an object store.
        free_gib: its free space; None: an object store, which needs no disk.
        checkpoint_gib: the size of one checkpoint: parameters and the optimizer's moments.
        kept: the most checkpoints that exist at a time.
        present: the checkpoints that exist already, which a run that goes on removes in time.
    """

    folder: str
    free_gib: float | None
    checkpoint_gib: float
    kept: int
    present: int = 0

    @property
    def missing(self) -> int:
        """The number of checkpoints that free space must hold: a save needs room for one."""
        return max(1, self.kept - self.present)


class Slowest(NamedTuple):
    """The speed of a collective in the slowest group of its axis.

    Attributes:
        seconds: for one call.
        first_rank: the lowest rank of the group.
        ratio: ``seconds`` over the median of the other groups; 1 if there is no other group.
    """

    seconds: float
    first_rank: int
    ratio: float


@dataclass(kw_only=True)
class AxisReport:
    """The speed of one axis.

    Attributes:
        ranks: the ranks of a group.
        groups: the number of groups.
        nodes: the most nodes that a group spans.
        slowest: by collective, and by the bytes of a message.
    """

    ranks: int
    groups: int
    nodes: int
    slowest: dict[str, dict[int, Slowest]] = field(default_factory=dict)


@dataclass(kw_only=True)
class DoctorReport:
    """What ``composer3d doctor`` has found.

    Attributes:
        problems: lines that fail the examination.
        notes: lines that a person should read.
        ranks: what each rank has reported, by rank.
        axes: the speed of each axis, and of the links inside a node and between nodes.
        versions: of the software, the same on all ranks.
        disk: of the run's folder.
        slowest_rank: the rank with the slowest matrix product; None: nothing was measured.
        links: of the machine of rank 0; None: not examined.
        advice: for that machine.
    """

    problems: list[str]
    notes: list[str]
    ranks: list[RankFacts]
    axes: dict[str, AxisReport]
    versions: dict[str, str]
    disk: Disk
    slowest_rank: int | None
    links: MachineLinks | None = None
    advice: list[Advice] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        """The number of nodes with ranks."""
        return len({rank.node for rank in self.ranks})

    @property
    def is_measured(self) -> bool:
        """Whether speeds were measured."""
        return self.slowest_rank is not None


def bus_bandwidth(collective: str, ranks: int, n_bytes: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes/s, as nccl-tests define it.

    It is what each rank sends over its slowest link in a ring, whatever the number of ranks is.
    """
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "send_recv": 1.0}
    return factors.get(collective, (ranks - 1) / ranks) * n_bytes / seconds


def make_report(
    recipe: Recipe,
    ranks: Sequence[RankFacts],
    sizes: Mapping[str, int],
    problems: Sequence[str],
    versions: Mapping[str, str],
    disk: Disk,
) -> DoctorReport:
    """Combine the facts of all ranks.

    Args:
        recipe: the whole recipe. ``reliability.straggler_factor`` says what is slow.
        ranks: the facts of each rank, by rank.
        sizes: the number of ranks in a group, by axis.
        problems: wrong groups and wrong values.
        versions: of the software.
        disk: of the run's folder.
    """
    report = DoctorReport(
        problems=list(problems),
        notes=[],
        ranks=list(ranks),
        axes={axis: _axis_report(axis, size, ranks) for axis, size in sizes.items()},
        versions=dict(versions),
        disk=disk,
        slowest_rank=None,
    )
    factor = recipe.reliability.straggler_factor
    if any(rank.is_crowded for rank in ranks):
        factor = 0.0
        report.notes.append(
            "a node has more ranks than cores: ranks wait for cores, so none is judged to be slow"
        )
    if not problems:
        dtype = next(iter(ranks[0].matrix_flops))
        rates = [rank.matrix_flops[dtype] for rank in ranks]
        report.slowest_rank = rates.index(min(rates))
        report.notes += _slow_ranks(ranks, rates, factor, dtype)
        report.notes += _slow_groups(report, factor)
    report.notes += _clocks(ranks)
    report.notes += _differences("the driver", {rank.driver for rank in ranks})
    report.notes += _differences("Python", {rank.python for rank in ranks})
    report.notes += _differences("the device", {rank.device for rank in ranks})
    report.problems += _full_disk(disk)
    return report


def _axis_report(axis: str, size: int, ranks: Sequence[RankFacts]) -> AxisReport:
    groups: dict[int, list[RankFacts]] = {}
    for rank in ranks:
        groups.setdefault(rank.first_ranks[axis], []).append(rank)
    found = AxisReport(
        ranks=size,
        groups=len(groups),
        nodes=max(len({rank.node for rank in group}) for group in groups.values()),
    )
    # A group is as slow as its slowest rank.
    seconds: dict[tuple[str, int], dict[int, float]] = {}
    for first, group in groups.items():
        for rank in group:
            for speed in rank.speeds:
                if speed.axis == axis:
                    of_groups = seconds.setdefault((speed.collective, speed.n_bytes), {})
                    of_groups[first] = max(of_groups.get(first, 0.0), speed.seconds)
    for (collective, n_bytes), of_groups in seconds.items():
        first = max(of_groups, key=lambda group: of_groups[group])
        slowest_s = of_groups.pop(first)
        others_s = median(of_groups.values()) if of_groups else slowest_s
        slowest = Slowest(slowest_s, first, slowest_s / others_s)
        found.slowest.setdefault(collective, {})[n_bytes] = slowest
    return found


def _slow_ranks(
    ranks: Sequence[RankFacts], rates: Sequence[float], factor: float, dtype: str
) -> list[str]:
    if len(rates) == 1:
        return []
    others = medians_of_others(rates)
    slow = [rank for rank, rate in enumerate(rates) if factor and rate * factor <= others[rank]]
    slow.sort(key=lambda rank: rates[rank])
    lines = [
        f"slow: {ranks[rank].name} multiplies {dtype} matrices at {rates[rank] / 1e12:.3g} TFLOP/s,"
        f" and the median of the other ranks at {others[rank] / 1e12:.3g}"
        for rank in slow[:_MOST_NAMED]
    ]
    if len(slow) > _MOST_NAMED:
        lines.append(f"and {len(slow) - _MOST_NAMED} more slow ranks")
    return lines


def _slow_groups(report: DoctorReport, factor: float) -> list[str]:
    lines = []
    for axis, found in report.axes.items():
        for collective, by_size in found.slowest.items():
            n_bytes, slowest = max(by_size.items())
            if factor and n_bytes > _SMALL_BYTES and slowest.ratio >= factor:
                lines.append(
                    f"slow: {collective} over {axis} takes {slowest.ratio:.2f} times as long as "
                    "the median of the other groups, in the group of "
                    f"{report.ranks[slowest.first_rank].name}"
                )
    return lines


def _clocks(ranks: Sequence[RankFacts]) -> list[str]:
    lines = []
    for rank in ranks:
        if rank.clock_s is None or abs(rank.clock_s) < _MOST_SKEW_S:
            continue
        word = "ahead of" if rank.clock_s > 0 else "behind"
        lines.append(
            f"the clock of node {rank.node} ({rank.host}) is {abs(rank.clock_s):.2f} s {word} "
            f"that of node 0 ({ranks[0].host}), to {rank.clock_error_s:.3f} s"
        )
    return lines


def _differences(what: str, values: set[str]) -> list[str]:
    if len(values) == 1:
        return []
    return [f"{what} differs between ranks: {', '.join(sorted(values))}"]


def _full_disk(disk: Disk) -> list[str]:
    needed_gib = disk.checkpoint_gib * disk.missing
    if disk.free_gib is None or disk.free_gib >= needed_gib:
        return []
    more = " more" if disk.present else ""
    checkpoints = (
        f"1{more} checkpoint of about {disk.checkpoint_gib:.1f} GiB needs"
        if disk.missing == 1
        else f"{disk.missing}{more} checkpoints of about {disk.checkpoint_gib:.1f} GiB need"
    )
    # A lower ``keep`` cannot spare the room of a new checkpoint.
    lower = ", or lower checkpoint.keep" if disk.missing > 1 else ""
    return [
        f"{disk.folder} has {disk.free_gib:.1f} GiB free, and {checkpoints} {needed_gib:.1f} GiB; "
        f"free some space{lower}, or use another disk (run.out_dir)"
    ]


def _describe_disk(disk: Disk) -> str:
    size = f"a checkpoint takes about {disk.checkpoint_gib:.2g} GiB, at most {disk.kept} at a time"
    if disk.free_gib is None:
        return f"checkpoints: in {disk.folder}, and none on this disk; {size}"
    there = f", {disk.present} there now" if disk.present else ""
    return f"disk: {disk.free_gib:.1f} GiB free in {disk.folder}; {size}{there}"


def as_json_of(report: DoctorReport) -> dict[str, Any]:
    """Return what ``doctor --json`` prints."""
    ranks = report.ranks
    answer: dict[str, Any] = {}
    answer["passed"] = not report.problems
    answer["problems"], answer["notes"] = report.problems, report.notes
    answer["ranks"], answer["nodes"] = len(ranks), report.nodes
    answer["device"], answer["versions"] = ranks[0].device, report.versions
    answer["disk"] = report.disk._asdict()
    answer["axes"] = {axis: _axis_json(found) for axis, found in report.axes.items()}
    answer["clocks"] = [
        {"node": rank.node, "ahead_s": rank.clock_s, "error_s": rank.clock_error_s}
        for rank in ranks
        if rank.clock_s is not None
    ]
    answer["environment"] = None
    if report.links is not None:
        answer["environment"] = advice_as_json(report.links, report.advice)
    answer["matrix"] = None
    if report.slowest_rank is not None:
        slowest = ranks[report.slowest_rank]
        answer["matrix"] = {
            "tflops": {
                dtype: median(rank.matrix_flops[dtype] for rank in ranks) / 1e12
                for dtype in slowest.matrix_flops
            },
            "slowest_rank": report.slowest_rank,
            "slowest_tflops": {k: v / 1e12 for k, v in slowest.matrix_flops.items()},
            "memory_gb_s": median(rank.memory_bytes_s for rank in ranks) / 1e9,
        }
    return answer


def _axis_json(found: AxisReport) -> dict[str, Any]:
    collectives: dict[str, Any] = {}
    for collective, by_size in found.slowest.items():
        collectives[collective] = {
            "latency_us": 1e6 * by_size[min(by_size)].seconds,
            "bus_gb_s": {
                str(n_bytes): bus_bandwidth(collective, found.ranks, n_bytes, slowest.seconds) / 1e9
                for n_bytes, slowest in by_size.items()
                if n_bytes > _SMALL_BYTES
            },
            "slowest_first_rank": by_size[max(by_size)].first_rank,
        }
    return {
        "ranks": found.ranks,
        "groups": found.groups,
        "nodes": found.nodes,
        "collectives": collectives,
    }


def text_of(report: DoctorReport) -> str:
    """Return the table that ``doctor`` prints."""
    ranks = report.ranks
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    nodes = "1 node" if report.nodes == 1 else f"{report.nodes} nodes"
    lines = [f"{len(ranks)} x {ranks[0].device} on {nodes}; {versions}"]
    if not report.problems and report.axes:
        lines.append("every group has its ranks, and every collective gave the right values")
    if report.slowest_rank is not None:
        lines += _table(report)
        slowest = ranks[report.slowest_rank]
        for dtype, rate in slowest.matrix_flops.items():
            usual = median(rank.matrix_flops[dtype] for rank in ranks) / 1e12
            lines.append(
                f"{dtype} products: median {usual:.3g} TFLOP/s, and {rate / 1e12:.3g} on the "
                f"slowest, {slowest.name}"
            )
        memory = median(rank.memory_bytes_s for rank in ranks) / 1e9
        lines.append(f"memory: median {memory:.3g} GB/s, read and written by a copy")
    for rank in ranks:
        if rank.clock_s is not None:
            lines.append(
                f"clock of node {rank.node}: {1000 * rank.clock_s:+.1f} ms from that of node 0, "
                f"to {1000 * rank.clock_error_s:.1f} ms"
            )
    lines.append(_describe_disk(report.disk))
    if report.links is not None:
        lines.append(f"machine of rank 0: {describe_links(report.links)}")
        lines += lines_of(report.advice)
    return "\n".join([*lines, *report.notes, *(f"WRONG   {line}" for line in report.problems)])


def _table(report: DoctorReport) -> list[str]:
    lines = ["axis           ranks groups nodes  collective       latency      GB/s  slowest group"]
    for axis, found in report.axes.items():
        for collective, by_size in found.slowest.items():
            n_bytes, slowest = max(by_size.items())
            latency = f"{1e6 * by_size[min(by_size)].seconds:,.0f} us"
            bandwidth = bus_bandwidth(collective, found.ranks, n_bytes, slowest.seconds) / 1e9
            place = ""
            if found.groups > 1:
                place = f"with rank {slowest.first_rank}, "
                place += f"{slowest.ratio:.2f} x the median of the others"
            lines.append(
                f"{axis:14} {found.ranks:5,} {found.groups:6,} {found.nodes:5,}  {collective:14}"
                f"{latency:>10} {bandwidth:9.3g}  {place}".rstrip()
            )
    lines.append("latency: 1 KiB; GB/s: bus bandwidth of the largest message, in the slowest group")
    return lines
