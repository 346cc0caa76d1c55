"""A row of hardware from what was measured, which ``composer3d plan --gpu FILE`` reads.

No torch here.
"""

import json
from math import log2
from statistics import median
from typing import Any, NamedTuple

from composer3d.doctor.report import DoctorReport, bus_bandwidth
from composer3d.facts.hardware import CPU, Hardware, find
from composer3d.planner.compute import MEMORY_SHARE

_TABLE = "from composer3d's table: not measured"


class HardwareNumber(NamedTuple):
    """A number of the row, and where it comes from."""

    number: float
    origin: str


class HardwareRow(NamedTuple):
    """A row of hardware, with the keys of ``hardware.read_row``.

    Attributes:
        name: of the device.
        generation: of the device.
        numbers: by key.
        matrix_tflops: measured, by dtype.
        peak_tflops: of composer3d's table, by dtype; empty for a device that it lacks.
    """

    name: str
    generation: str
    numbers: dict[str, HardwareNumber]
    matrix_tflops: dict[str, float]
    peak_tflops: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the keys and values of the row's file."""
        tables = {"matrix_tflops": self.matrix_tflops}
        if self.peak_tflops:
            tables["peak_tflops"] = self.peak_tflops
        numbers = {key: value.number for key, value in self.numbers.items()}
        return {"name": self.name, "generation": self.generation, **numbers, **tables}


def row_of(report: DoctorReport) -> HardwareRow:
    """Return the row of the devices that were measured.

    Links have the bus bandwidth of the largest message in the slowest group. The planner takes one
    rate for gathers and for reductions, which gloo does not do equally fast: the row has the rate
    of both in turn. Without two ranks on a node, or two nodes, a link has the figure of
    composer3d's table, or for an unknown device that of a CPU.
    """
    first = report.ranks[0]
    known = find(first.device)
    table = CPU if known is None else known
    numbers = {
        "memory_gib": HardwareNumber(min(rank.memory_gib for rank in report.ranks), "measured"),
        "memory_gb_s": _memory(report, known),
        **_links(report, table),
    }
    return HardwareRow(
        name=f"{first.device}, measured",
        generation=first.generation,
        numbers=numbers,
        matrix_tflops={
            # The slowest device is the one that all others wait for.
            dtype: min(rank.matrix_flops[dtype] for rank in report.ranks) / 1e12
            for dtype in first.matrix_flops
        },
        peak_tflops={k: v / 1e12 for k, v in known.peaks.items()} if known is not None else {},
    )


def _memory(report: DoctorReport, known: Hardware | None) -> HardwareNumber:
    if known is not None:
        return HardwareNumber(known.memory_bytes_s / 1e9, _TABLE)
    measured = median(rank.memory_bytes_s for rank in report.ranks) / 1e9
    return HardwareNumber(
        measured / MEMORY_SHARE, f"a copy reached {measured:.3g}, usually {MEMORY_SHARE}"
    )


def _links(report: DoctorReport, table: Hardware) -> dict[str, HardwareNumber]:
    links = table.links
    assert links is not None  # every row of the table has them
    ring = _measured(report, "node", "all_gather", "reduce_scatter")
    reduced = _measured(report, "node", "all_reduce")
    card = _measured(report, "between nodes", "all_gather", "reduce_scatter")
    numbers = {"nvlink_gb_s": HardwareNumber(links.nvlink_bytes_s / 1e9, _TABLE)}
    if ring is not None:
        if ring.number > numbers["nvlink_gb_s"].number or table.generation == "cpu":
            numbers["nvlink_gb_s"] = HardwareNumber(ring.number, "as ring_gb_s")
        numbers["ring_gb_s"] = ring
    if reduced is not None:
        numbers["all_reduce_gb_s"] = reduced
    numbers["nic_gbit"] = HardwareNumber(8 * links.nic_bytes_s / 1e9, _TABLE)
    if card is not None:
        numbers["nic_gbit"] = HardwareNumber(8 * card.number, card.origin)
    for key, axis in (("latency_us", "node"), ("nic_latency_us", "between nodes")):
        latency = _latency(report, axis)
        if latency is not None:
            numbers[key] = latency
    numbers["host_gb_s"] = HardwareNumber(links.host_bytes_s / 1e9, _TABLE)
    return numbers


def _measured(report: DoctorReport, axis: str, *collectives: str) -> HardwareNumber | None:
    """Return the GB/s of a link in these collectives one after the other, or None."""
    found = report.axes.get(axis)
    if found is None or not found.slowest:
        return None
    seconds_of_byte = 0.0
    for collective in collectives:
        n_bytes, slowest = max(found.slowest[collective].items())
        rate = bus_bandwidth(collective, found.ranks, n_bytes, slowest.seconds)
        seconds_of_byte += 1 / rate / len(collectives)
    words = f"{' and '.join(collectives)} of {n_bytes >> 10:,} KiB, {found.ranks} ranks"
    return HardwareNumber(1e-9 / seconds_of_byte, f"measured: {words}")


def _latency(report: DoctorReport, axis: str) -> HardwareNumber | None:
    """Return the microseconds of a small all-reduce for each doubling of its ranks, or None."""
    found = report.axes.get(axis)
    if found is None or not found.slowest:
        return None
    n_bytes, slowest = min(found.slowest["all_reduce"].items())
    doublings = log2(found.ranks)
    origin = f"measured: all_reduce of {n_bytes:,} bytes, {found.ranks} ranks, by log2 of them"
    return HardwareNumber(1e6 * slowest.seconds / doublings, origin)


def toml_of(row: HardwareRow) -> str:
    """Return the row as TOML text, with the origin of each number."""
    lines = ["# Made by composer3d doctor. Read by: composer3d plan RECIPE --gpu FILE"]
    lines += [f"name = {json.dumps(row.name)}", f'generation = "{row.generation}"']
    for key, value in row.numbers.items():
        lines.append(f"{key} = {value.number:.6g}  # {value.origin}")
    lines += ["", "[matrix_tflops]  # measured, on the slowest device"]
    lines += [f"{dtype} = {rate:.6g}" for dtype, rate in row.matrix_tflops.items()]
    if row.peak_tflops:
        lines += ["", f"[peak_tflops]  # {_TABLE}"]
        lines += [f"{dtype} = {rate:.6g}" for dtype, rate in row.peak_tflops.items()]
    return "\n".join(lines) + "\n"
