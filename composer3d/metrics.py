"""What a run says about itself: one console line, one JSON line and one set of TensorBoard points a logged step.

Loss, gradient norm and learning rate are those of the logged step itself, so they do not depend on where a run was
resumed. Throughput and seconds are averages over the steps since the last logged one; validation and checkpoints do not
count as training time.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import torch

from composer3d import log
from composer3d.recipe.schema import MetricsTable

FILE = "metrics.jsonl"
Phase = Literal["data", "validation", "checkpoint"]

_TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "grad_norm": "optim/grad_norm",
    "lr": "optim/lr",
    "tokens_per_s": "speed/tokens_per_s",
    "tokens_per_s_per_rank": "speed/tokens_per_s_per_rank",
    "tflops_per_rank": "speed/tflops_per_rank",
    "mfu": "speed/mfu",
    "step_s": "time/step_s",
    "data_s": "time/data_s",
    "validation_s": "time/validation_s",
    "checkpoint_s": "time/checkpoint_s",
    "memory_gib": "memory/peak_gib",
}


class Metrics:
    """The metrics of one run. Every rank makes one and calls it alike; only the main rank measures and writes.

    Steps are counted from 1: ``step`` is the number of optimizer steps that are done. Every ``table.every`` steps, at
    the first step after the start and at the last one, a line goes to the log, to ``run_dir/metrics.jsonl`` and to
    ``run_dir/tensorboard``. What an earlier process logged beyond ``start_step`` is dropped from both files, so that a
    resumed run has one curve. ``step`` lists the keys of a line of metrics.jsonl, with units.
    """

    def __init__(
        self,
        run_dir: Path,
        table: MetricsTable,
        *,
        total_steps: int,
        tokens_per_step: int,
        world_size: int,
        flops_per_token: float,
        peak_flops: float | None,
        device_type: str,
        main: bool,
        start_step: int = 0,
    ) -> None:
        """Starts the clock, so it is made right before the first step.

        Args:
            run_dir: folder of the run; made if it is not there.
            tokens_per_step: over all ranks.
            flops_per_token: forward and backward, from ``planner.counts``.
            peak_flops: FLOP/s of one device, None where that is not known.
            start_step: steps that were done before this process; 0 drops whatever the folder holds.
        """
        self._every, self._main, self._start_step, self._total_steps = table.every, main, start_step, total_steps
        self._tokens_per_step, self._world_size = tokens_per_step, world_size
        self._flops_per_token, self._peak_flops, self._device_type = flops_per_token, peak_flops, device_type
        self._seconds: dict[str, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._logged_step = start_step
        self._logged_at = time.perf_counter()
        self._first_step_at: float | None = None
        self._tensorboard = None
        if not main:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE
        _drop_lines_after(self._path, start_step)
        if table.tensorboard:
            # Imported here: it takes a second, and only one rank of a job needs it.
            from torch.utils.tensorboard import SummaryWriter

            purge_step = start_step + 1 if start_step else 0
            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step, flush_secs=10)

    @contextmanager
    def timer(self, phase: Phase) -> Iterator[None]:
        """Adds the wall time of its body to a phase; validation and checkpoint are taken out of the throughput."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - begin

    def step(self, step: int, *, loss: float, grad_norm: float, lr: float) -> None:
        """Ends an optimizer step; called for every one, writes where the step is to be logged.

        Writes ``step``, ``loss`` (nats per valid token, of the whole batch), ``grad_norm`` (before clipping), ``lr``,
        ``tokens_per_s`` (all ranks), ``tokens_per_s_per_rank``, ``tflops_per_rank``, ``mfu`` (fraction of the peak, or
        null), ``step_s`` and ``data_s`` (seconds a step), ``validation_s`` and ``checkpoint_s`` (seconds since the last
        line), ``memory_gib`` (peak of this rank since its start). What is not finite becomes null.
        """
        if not self._main:
            return
        now = time.perf_counter()
        first = self._first_step_at is None
        if first:
            self._first_step_at = now
        if not first and step % self._every and step != self._total_steps:
            return
        steps = step - self._logged_step
        training_s = max(now - self._logged_at - self._seconds["validation"] - self._seconds["checkpoint"], 1e-9)
        rate = steps * self._tokens_per_step / training_s
        flops = rate * self._flops_per_token / self._world_size
        line = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_s": rate,
            "tokens_per_s_per_rank": rate / self._world_size,
            "tflops_per_rank": flops / 1e12,
            "mfu": flops / self._peak_flops if self._peak_flops else None,
            "step_s": training_s / steps,
            "data_s": self._seconds["data"] / steps,
            "validation_s": self._seconds["validation"],
            "checkpoint_s": self._seconds["checkpoint"],
            "memory_gib": _peak_memory_gib(self._device_type),
        }
        self._write(step, line)
        log.get().info(self._console(step, line, now))
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._logged_step, self._logged_at = step, now

    def validation(self, step: int, loss: float) -> None:
        """Writes the validation loss (nats per valid token) after ``step``, as ``step`` and ``validation_loss``."""
        if self._main:
            self._write(step, {"validation_loss": loss})
            log.get().info(f"{self._progress(step)}  validation loss {loss:.4f}")

    def close(self) -> None:
        """Writes the time of what came after the last logged step, such as the last checkpoint, and ends the files."""
        if not self._main:
            return
        tail: dict[str, float | None] = {
            f"{phase}_s": self._seconds[phase] for phase in ("validation", "checkpoint") if self._seconds[phase]
        }
        if tail:
            self._write(self._logged_step, tail)
            self._seconds = dict.fromkeys(self._seconds, 0.0)
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def _write(self, step: int, values: dict[str, float | None]) -> None:
        finite = {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")
        if self._tensorboard is not None:
            for key, value in values.items():
                if value is not None:
                    self._tensorboard.add_scalar(_TAGS[key], value, step)

    def _progress(self, step: int) -> str:
        total = str(self._total_steps)
        return f"step {step:>{len(total)}}/{total} {100 * step // self._total_steps:>3}%"

    def _console(self, step: int, line: dict[str, float | None], now: float) -> str:
        mfu = line["mfu"]
        return "  ".join(
            (
                self._progress(step),
                f"loss {line['loss']:.4f}",
                f"norm {line['grad_norm']:.2f}",
                f"lr {line['lr']:.1e}",
                f"{_thousands(line['tokens_per_s'] or 0.0)} tok/s",
                f"{line['tflops_per_rank']:.3g} TFLOP/s",
                f"mfu {mfu:.1%}" if mfu is not None else "mfu n/a",
                f"mem {line['memory_gib']:.1f} GiB",
                f"left {_clock(self._left_s(step, now))}",
            )
        )

    def _left_s(self, step: int, now: float) -> float:
        """Wall time that the rest of the run takes at the pace so far, without the first step, which warms up."""
        done = step - self._start_step - 1
        if done and self._first_step_at is not None:
            pace_s = (now - self._first_step_at) / done
        else:
            pace_s = now - self._logged_at
        return pace_s * (self._total_steps - step)


def _drop_lines_after(path: Path, step: int) -> None:
    """Keeps the lines of steps up to ``step``; a last line that a killed process tore is dropped too."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text().splitlines():
        try:
            if json.loads(text)["step"] <= step:
                kept.append(text + "\n")
        except json.JSONDecodeError:
            continue
    new = path.with_suffix(".new")
    new.write_text("".join(kept if step else []))
    new.replace(path)


def _peak_memory_gib(device_type: str) -> float:
    """Peak since the process started: bytes that torch allocated on an accelerator, resident bytes on CPU."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB on Linux


def _thousands(value: float) -> str:
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.1f}{suffix}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02}m" if hours else f"{m}m{s:02}s" if m else f"{s}s"
