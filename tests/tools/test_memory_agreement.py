"""A fixed slice of ``tools/memory_agreement.py``: the planner's memory against dry runs."""

import pytest
import torch

from composer3d.runtime.launch import Pool
from tests.long import some_of
from tools.memory_agreement import CASES, SLICE, Agreement, compare


@some_of(7, "name", SLICE)
def test_the_planner_agrees_with_dry_runs(name: str, pool: Pool) -> None:
    # The order in which FSDP frees its buffers was read off torch 2.13. Newer ones have another.
    limit = 0.0125 if torch.__version__.startswith("2.13.") else 0.05
    found = compare(pool, [name], at_once=2)
    assert [row.pp_rank for row in found] == list(range(len(found)))
    for row in found:
        assert abs(row.error) <= limit, row


def test_the_cases_cover_every_axis_and_schedule() -> None:
    text = " ".join(" ".join(sets) for sets in CASES.values())
    for words in (
        *("mesh.tp=", "mesh.cp=", "mesh.pp=", "mesh.ep=", "mesh.dp_replicate=2"),
        *(f"parallel.zero={level}" for level in range(4)),
        *("cp_method=allgather", "cp_method=ulysses"),
        *("GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"),
        *("DualPipeV", "schedule=csv", "cpu_offload", "documents", "tied", "loss_chunks"),
    ):
        assert words in text
    assert set(SLICE) <= set(CASES)


def test_an_error_is_that_of_the_planner() -> None:
    assert Agreement("one", 0, planned=95.0, counted=100.0).error == pytest.approx(-0.05)
