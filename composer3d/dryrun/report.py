"""What a dry run found, as data, as JSON and as a table for people. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from composer3d.facts.text import bytes_text, gib_form
from composer3d.planner.memory import GIB


@dataclass(frozen=True)
class Operation:
    """The calls of one collective on one axis in a step, on one rank.

    Attributes:
        count: the number of calls.
        sent_bytes: what the rank sends in all of them; of "recv", what it receives.
        across_nodes: whether the ranks of the group are on several nodes.
    """

    count: int
    sent_bytes: int
    across_nodes: bool


class Memory(NamedTuple):
    """Bytes of a rank. Each kind is the most at one time, not all at the same time.

    Attributes:
        params: shards of parameters, and parameters that FSDP has gathered.
        grads: gradients of parameters, whole and sharded.
        optimizer: the state of the optimizer.
        activations: all else: activations, the batch, messages, temporary values.
        peak: the most bytes of all kinds at one time.
    """

    params: int
    grads: int
    optimizer: int
    activations: int
    peak: int


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """A step of one pipeline rank. All its ranks are alike, apart from uneven shards.

    Attributes:
        stage: the pipeline rank.
        ranks: the number of ranks of the job on this pipeline rank.
        memory: bytes of one rank.
        comm: by axis and operation.
        operators: operators of a step that compute, copy or send.
    """

    stage: int
    ranks: int
    memory: Memory
    comm: dict[str, dict[str, Operation]]
    operators: int


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The dry run of a recipe: one report for each pipeline rank, in order.

    Attributes:
        world_size: the number of ranks of the job.
        seconds: how long the dry run took.
        stages: one report for each pipeline rank.
    """

    world_size: int
    seconds: float
    stages: tuple[StageReport, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``dryrun --json`` prints."""
        return {
            "world_size": self.world_size,
            "seconds": round(self.seconds, 1),
            "stages": [_stage_json(stage) for stage in self.stages],
        }


def _stage_json(report: StageReport) -> dict[str, Any]:
    memory = report.memory
    return {
        "stage": report.stage,
        "ranks": report.ranks,
        "params_gib": memory.params / GIB,
        "grads_gib": memory.grads / GIB,
        "optimizer_gib": memory.optimizer / GIB,
        "activations_gib": memory.activations / GIB,
        "peak_gib": memory.peak / GIB,
        "operators": report.operators,
        "comm": {
            axis: {
                name: {"count": operation.count, "bytes": operation.sent_bytes}
                for name, operation in operations.items()
            }
            for axis, operations in report.comm.items()
        },
    }


def memory_table(stages: Sequence[StageReport]) -> list[str]:
    """Return the lines of a table: the bytes of each pipeline rank by kind, in GiB."""
    digits = gib_form(max((report.memory.peak for report in stages), default=0) / GIB, ".2f")
    heads = ("stage", "ranks", "params", "grads", "optimizer", "activations", "peak", "operators")
    rows = [
        (
            str(report.stage),
            f"{report.ranks:,}",
            *(f"{n_bytes / GIB:{digits}}" for n_bytes in report.memory),
            f"{report.operators:,}",
        )
        for report in stages
    ]
    return _table(heads, rows)


def traffic_table(report: StageReport, compute_s: float) -> list[str]:
    """Return the lines of a table: each collective of a rank's step, axis by axis.

    Args:
        report: of the pipeline rank.
        compute_s: the seconds that a rank computes in a step. The bandwidth that hides an axis is
            its bytes divided by this time.
    """
    heads = ("axis", "collective", "a step", "sent each", "sent a step", "to hide it", "link")
    rows = []
    for axis, operations in report.comm.items():
        for name, operation in operations.items():
            rows.append(
                (
                    axis,
                    name.replace("_", "-"),
                    f"{operation.count:,}",
                    bytes_text(operation.sent_bytes / max(operation.count, 1)),
                    bytes_text(operation.sent_bytes),
                    _bandwidth_text(operation.sent_bytes / compute_s),
                    "between nodes" if operation.across_nodes else "inside a node",
                )
            )
    return _table(heads, rows)


def _bandwidth_text(bytes_per_s: float) -> str:
    gb_per_s = bytes_per_s / 1e9
    return f"{gb_per_s:.2f} GB/s" if gb_per_s >= 0.01 else "0 GB/s"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: text to the left, numbers to the right."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    is_number = [
        bool(rows) and all(row[column][:1].isdigit() or row[column] == "-" for row in rows)
        for column in range(len(heads))
    ]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    ]
