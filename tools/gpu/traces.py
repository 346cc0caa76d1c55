"""What a profiled step of the card says: the kernels that take its time, and when none runs."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

_SHOWN_KERNELS = 14


def read(path: Path) -> dict[str, Any]:
    """Return what a trace of one step, ``….json.gz``, says.

    Returns:
        ``step_ms``, from the first kernel to the end of the last; ``idle``, the share of it in
        which no kernel runs; ``kernels``, their number; ``top``, the kernels that take most time,
        by name: milliseconds, number.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    on_card = [
        one
        for one in events
        if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in one
    ]
    if not on_card:
        return {"kernels": 0}
    spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in on_card)
    begin, busy_us, end = spans[0][0], 0.0, spans[0][0]
    for first, last in spans:
        busy_us += max(0.0, last - max(first, end))
        end = max(end, last)
    times: dict[str, list[float]] = defaultdict(list)
    for one in on_card:
        times[one["name"][:110]].append(one["dur"] / 1e3)
    most = sorted(times.items(), key=lambda item: -sum(item[1]))[:_SHOWN_KERNELS]
    return {
        "step_ms": (end - begin) / 1e3,
        "idle": 1 - busy_us / (end - begin),
        "kernels": len(on_card),
        "top": {name: f"{sum(of):.2f} ms, {len(of)}" for name, of in most},
    }
