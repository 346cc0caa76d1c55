"""What a profiled step of the card says: where its time goes, and how often the host waits."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Calls of CUDA in which the host waits. The profiler itself waits for the device when it ends.
_WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize")

# What a kernel is for, by the name of the region or operator that launched it: the first that fits.
_PURPOSES = (
    ("FSDP", "FSDP"),
    ("Optimizer", "optimizer"),
    ("attention", "attention"),
    ("grouped_mm", "products of experts"),
    ("log_softmax", "loss"),
    ("nll_loss", "loss"),
    ("mm", "products"),
)


def read(path: Path) -> dict[str, Any]:
    """Return what a trace of one step, ``….json.gz``, says; on a CPU, that no kernel ran.

    Returns:
        ``step_ms``, from the first kernel to the end of the last; ``idle``, the share of it in
        which no kernel runs; ``kernels``, their number; ``waits``, how often the host waited for
        an event or a stream; and, for each purpose, ``PURPOSE_ms`` of its kernels, copies and
        fills.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {"kernels": 0}
    begin = end = min(one["ts"] for one in kernels)
    busy_us = 0.0
    for one in sorted(kernels, key=lambda one: one["ts"]):
        first, last = one["ts"], one["ts"] + one["dur"]
        busy_us += max(0.0, last - max(first, end))
        end = max(end, last)
    calls = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    found = {
        "step_ms": (end - begin) / 1e3,
        "idle": 1 - busy_us / (end - begin),
        "kernels": len(kernels),
        "waits": sum(one["name"] in _WAITS for one in calls),
    }
    times: dict[str, float] = defaultdict(float)
    for purpose, milliseconds in _purposes(events, calls, kernels):
        times[f"{purpose}_ms"] += milliseconds
    return found | dict(sorted(times.items(), key=lambda item: -item[1]))


def _purposes(
    events: list[Mapping[str, Any]],
    calls: list[Mapping[str, Any]],
    kernels: list[Mapping[str, Any]],
) -> Iterator[tuple[str, float]]:
    """Yield the purpose of each kernel and its milliseconds."""
    call_of = {one["args"].get("correlation"): one for one in calls}
    regions: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for one in events:
        if one.get("cat") in ("cpu_op", "user_annotation") and "dur" in one:
            regions[one["tid"]].append(one)
    for kernel in kernels:
        call = call_of.get(kernel["args"].get("correlation"))
        names = "" if call is None else " ".join(_around(call, regions[call["tid"]]))
        fitting = (purpose for word, purpose in _PURPOSES if word in names)
        yield next(fitting, "other"), kernel["dur"] / 1e3


def _around(call: Mapping[str, Any], regions: list[Mapping[str, Any]]) -> list[str]:
    """Return the names of the regions of a thread around a call."""
    end = call["ts"] + call["dur"]
    return [
        one["name"] for one in regions if one["ts"] <= call["ts"] and end <= one["ts"] + one["dur"]
    ]
