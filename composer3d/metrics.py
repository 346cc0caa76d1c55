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
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import torch

from composer3d import log
from composer3d.recipe.schema import MetricsTable

FILE = "metrics.jsonl"
Phase = Literal["data", "validation", "checkpoint"]

_GROUPS = {
    "optim": ("grad_norm", "lr"),
    "speed": ("tokens_per_s", "tokens_per_s_per_rank", "tflops_per_rank", "mfu"),
    "time": ("step_s", "data_s", "validation_s", "checkpoint_s"),
}
_TAGS = {"loss": "loss/train", "validation_loss": "loss/validation", "memory_gib": "memory/peak_gib"}
_TAGS |= {key: f"{group}/{key}" for group, keys in _GROUPS.items() for key in keys}


@dataclass
class Metrics:
    """The metrics of one run. Every rank makes one and calls it alike; only the main rank measures and writes.

    Steps are counted from 1: ``step`` is the number of optimizer steps that are done. Every ``table.every`` steps, at
    the first step after the start and at the last one, a line goes to the log, to ``run_dir/metrics.jsonl`` and to
    ``run_dir/tensorboard``. What an earlier process logged beyond ``start_step`` is dropped from both files, so that a
    resumed run has one curve. ``step`` lists the keys of a line of metrics.jsonl, with units.

    The clock starts when it is made, so it is made right before the first step.
    """

    run_dir: Path  # made if it is not there
    table: MetricsTable
    _: KW_ONLY
    total_steps: int
    tokens_per_step: int  # over all ranks
    world_size: int
    flops_per_token: float  # forward and backward, from ``planner.counts``
    peak_flops: float | None  # FLOP/s of one device, None where that is not known
    device_type: str
    main: bool
    start_step: int = 0  # steps that were done before this process; 0 drops whatever the folder holds

    def __post_init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._logged_step = self.start_step
        self._logged_at = time.perf_counter()
        self._first_step_at: float | None = None
        self._tensorboard = None
        if not self.main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._path = self.run_dir / FILE
        _drop_lines_after(self._path, self.start_step)
        if self.table.tensorboard:
            # Imported here: it takes a second, and only one rank of a job needs it.
            from torch.utils.tensorboard import SummaryWriter

            purge_step = self.start_step + 1 if self.start_step else 0
            self._tensorboard = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=purge_step, flush_secs=10)

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
        if not self.main:
            return
        now = time.perf_counter()
        if self._first_step_at is None:
            self._first_step_at = now
        elif step % self.table.every and step != self.total_steps:
            return
        steps = step - self._logged_step
        training_s = max(now - self._logged_at - self._seconds["validation"] - self._seconds["checkpoint"], 1e-9)
        rate = steps * self.tokens_per_step / training_s
        flops = rate * self.flops_per_token / self.world_size
        line = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_s": rate,
            "tokens_per_s_per_rank": rate / self.world_size,
            "tflops_per_rank": flops / 1e12,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "step_s": training_s / steps,
            "data_s": self._seconds["data"] / steps,
            "validation_s": self._seconds["validation"],
            "checkpoint_s": self._seconds["checkpoint"],
            "memory_gib": _peak_memory_gib(self.device_type),
        }
        self._write(step, line)
        log.get().info(self._console(step, line, now))
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._logged_step, self._logged_at = step, now

    def validation(self, step: int, loss: float) -> None:
        """Writes the validation loss (nats per valid token) after ``step``, as ``step`` and ``validation_loss``."""
        if self.main:
            self._write(step, {"validation_loss": loss})
            log.get().info(f"{self._progress(step)}  validation loss {loss:.4f}")

    def close(self) -> None:
        """Writes the time of what came after the last logged step, such as the last checkpoint, and ends the files."""
        if not self.main:
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
        total = str(self.total_steps)
        return f"step {step:>{len(total)}}/{total} {100 * step // self.total_steps:>3}%"

    def _console(self, step: int, line: dict[str, float | None], now: float) -> str:
        mfu = line["mfu"]
        return (
            f"{self._progress(step)}  loss {line['loss']:.4f}  norm {line['grad_norm']:.2f}  lr {line['lr']:.1e}  "
            f"{line['tokens_per_s']:,.0f} tok/s  {line['tflops_per_rank']:.3g} TFLOP/s  "
            f"mfu {'n/a' if mfu is None else f'{mfu:.1%}'}  mem {line['memory_gib']:.1f} GiB  "
            f"left {timedelta(seconds=round(self._left_s(step, now)))}"
        )

    def _left_s(self, step: int, now: float) -> float:
        """Wall time that the rest of the run takes at the pace so far, without the first step, which warms up."""
        since, done = self._first_step_at, step - self.start_step - 1
        pace_s = (now - since) / done if done and since is not None else now - self._logged_at
        return pace_s * (self.total_steps - step)


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
