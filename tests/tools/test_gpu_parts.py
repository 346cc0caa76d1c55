"""The parts of a GPU hour: they run with tiny sizes, and the page has what they found."""

import gzip
import json
from pathlib import Path

import pytest

from tools.gpu import kernels, traces
from tools.gpu.__main__ import _has_failed, main
from tools.gpu.page import PAGE, RESULTS, text_of
from tools.gpu.parts import PARTS


def test_a_part_is_rehearsed_and_the_page_has_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["run", "attention", "--out", str(tmp_path), "--rehearse"])
    assert status == 0, capsys.readouterr().out
    rows = json.loads((tmp_path / "attention.json").read_text())["figures"]["rows"]
    assert all(row["error"] < 1e-5 for row in rows.values())
    page = text_of(tmp_path)
    assert "| 16 documents | " in page
    assert "## Steps with experts" not in page


def test_kernels_are_rehearsed() -> None:
    grouped = kernels.grouped(True)
    assert list(grouped) == ["even", "uneven", "half are empty"]
    assert all(row["error"] == row["gradient_error"] == 0 for row in grouped.values())
    for row in kernels.cudnn(True).values():  # both sides are composer3d's
        assert "failed" not in row
        assert row["out_error"] == row["dv_error"] == 0


def test_the_page_has_the_results_that_are_kept() -> None:
    """``python -m tools.gpu page`` writes it."""
    assert PAGE.read_text() == text_of(RESULTS)


def test_a_trace_says_where_the_time_of_a_step_goes(tmp_path: Path) -> None:
    """Two kernels of 3 and 1 ms with a gap of 1 ms, one of them launched by the optimizer.

    During the first, a copy runs whose launch was not seen.
    """
    ms = 1000
    events = [
        {"cat": "user_annotation", "name": "Optimizer.step", "tid": 1, "ts": 0, "dur": 9 * ms},
        {"cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 20 * ms, "dur": ms},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": 5, "dur": 1},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": 20 * ms + 5, "dur": 1},
        {"cat": "cuda_runtime", "name": "cudaEventSynchronize", "tid": 1, "ts": 30 * ms, "dur": 1},
        {"cat": "kernel", "name": "adam", "ts": 40 * ms, "dur": 3 * ms},
        {"cat": "gpu_memcpy", "name": "copy", "ts": 41 * ms, "dur": 1 * ms},
        {"cat": "kernel", "name": "gemm", "ts": 44 * ms, "dur": 1 * ms},
    ]
    for event, correlation in ((2, 7), (3, 8), (4, 9), (5, 7), (6, 1), (7, 8)):
        events[event]["args"] = {"correlation": correlation}
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert traces.read(path) == {
        "step_ms": 5.0,
        "idle": pytest.approx(0.2),
        "kernels": 3,
        "waits": 1,
        "optimizer_ms": 3.0,
        "other_ms": 1.0,
        "products_ms": 1.0,
    }


def test_a_part_that_fails_leaves_its_error(tmp_path: Path) -> None:
    if main(["run", "machine", "--out", str(tmp_path)]):  # there is no GPU here
        assert "torch sees no CUDA GPU here" in (tmp_path / "machine.json").read_text()
        assert "It failed:" in text_of(tmp_path)


def test_a_figure_that_failed_fails_its_part() -> None:
    assert _has_failed({"rows": {"window": {"failed": "no kernel"}}})
    assert not _has_failed({"summary": "9 passed", "failed": [], "error": 0.0})


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "memory", "--out", str(tmp_path)])
    assert f"memory: use {', '.join(PARTS)}" in capsys.readouterr().err
