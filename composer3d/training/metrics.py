"""What a run says about itself: one console line, one JSON line and one set of TensorBoard points a logged step.

Loss, gradient norm and learning rate are those of the logged step itself, so they do not depend on where a run was
resumed. Throughput and seconds are averages over the steps since the last logged one; validation and checkpoints do not
count as training time.
"""

import errno
import itertools
import json
import math
import os
import resource
import stat
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch

from composer3d.recipe.schema import MetricsTable
from composer3d.runtime import log
from composer3d.runtime.files import open_own, write_atomic
from composer3d.spec.errors import UserError
from composer3d.spec.files import open_plain, parse_json

FILE = "metrics.jsonl"
_FILE_LIMIT = 1 << 30  # bytes of metrics.jsonl, two million lines and more
_LINE_LIMIT = 64 << 10  # bytes; a line of metrics has some hundred
_LINE_START = b'{"step": '

_GROUPS = {"optim": "grad_norm lr", "time": "step_s data_s validation_s checkpoint_s"}
_GROUPS["speed"] = "tokens_per_s tokens_per_s_per_rank tflops_per_rank mfu cp_balance"
_TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "memory_gib": "memory/peak_gib",
}
_TAGS |= {key: f"{group}/{key}" for group, keys in _GROUPS.items() for key in keys.split()}


@dataclass
class Metrics:
    """The metrics of one run. Every rank makes one and calls it alike; only the main rank measures and writes.

    Steps are counted from 1: ``step`` is the number of optimizer steps that are done. Every ``table.every`` steps, at
    the first step after the start and at the last one, a line goes to the log, to ``run_dir/metrics.jsonl`` and to
    TensorBoard's event files in ``run_dir``. What an earlier process logged beyond ``start_step`` is dropped from both,
    so that a resumed run has one curve. ``step`` lists the keys of a line of metrics.jsonl, with units.

    The clock starts when it is made, so it is made right before the first step.

    Raises:
        UserError, OSError: on the main rank alone, where the files cannot be written.
    """

    run_dir: Path
    table: MetricsTable
    _: KW_ONLY
    total_steps: int
    tokens_per_step: int  # over all ranks
    world_size: int
    flops_per_token: float  # forward and backward, from ``planner.counts``
    peak_flops: float | None  # FLOP/s of one device, None where that is not known
    device_type: str
    main: bool
    may_write: Callable[[], bool] = lambda: True  # whether the run's folder is still this job's
    start_step: int = (
        0  # steps that were done before this process; 0 drops whatever the folder holds
    )

    def __post_init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._logged_step = self.start_step
        self._logged_at = self._first_step_at = time.perf_counter()
        self._tensorboard = None
        if not self.main:
            return
        self._path = self.run_dir / FILE
        _drop_lines_after(self._path, self.start_step)
        if self.table.tensorboard:
            # Imported here: it takes a second, and only one rank of a job needs it.
            from torch.utils.tensorboard import SummaryWriter

            _move_old_events(self.run_dir)
            self._tensorboard = SummaryWriter(
                str(self.run_dir),  # TensorBoard names a run by the folder of its event files
                purge_step=self.start_step + 1 if self.start_step else 0,
                flush_secs=10,
                filename_suffix=f".{uuid.uuid4().hex}",  # a name that nobody can guess and place a link at
            )

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Adds the seconds of its body to "data", "validation" or "checkpoint"; throughput leaves out the last two."""
        begin = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - begin

    def step(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        extra: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Ends an optimizer step; called for every one, writes where the step is to be logged.

        Writes ``step``, ``loss`` (nats per valid token, of the whole batch), ``grad_norm`` (before clipping), ``lr``,
        ``tokens_per_s`` (all ranks), ``tokens_per_s_per_rank``, ``tflops_per_rank``, ``mfu`` (fraction of the peak, or
        null), ``step_s`` and ``data_s`` (seconds a step), ``validation_s`` and ``checkpoint_s`` (seconds since the last
        line), ``memory_gib`` (peak of this rank since its start); and ``extra``: with documents over cp, ``cp_balance``,
        the busiest rank's scores over their mean (of the step's rows on this rank). What is not finite becomes null.
        """
        if not self.main:
            return
        now = time.perf_counter()
        if step == self.start_step + 1:
            self._first_step_at = now
        elif step % self.table.every and step != self.total_steps:
            return
        steps = step - self._logged_step
        training_s = max(
            now - self._logged_at - self._seconds["validation"] - self._seconds["checkpoint"], 1e-9
        )
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
            **extra(),
        }
        self._write(step, line)
        log.get().info(self._console(step, line, now))
        self._seconds.clear()
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
        if tail := {
            f"{phase}_s": seconds for phase, seconds in self._seconds.items() if phase != "data"
        }:
            self._write(self._logged_step, tail)
        try:
            if self._tensorboard is not None:
                self._tensorboard.close()
        except OSError as error:
            log.get().warning(f"TensorBoard's file in {self.run_dir} lacks its end: {error}")

    def _write(self, step: int, values: Mapping[str, float | None]) -> None:
        if not self.may_write():
            return  # the next save says why, and ends the run
        finite = {
            key: value if value is not None and math.isfinite(value) else None
            for key, value in values.items()
        }
        try:
            _append(self._path, (json.dumps({"step": step, **finite}) + "\n").encode())
            for key, value in values.items():
                if value is not None and self._tensorboard is not None:
                    self._tensorboard.add_scalar(_TAGS[key], value, step)
        except OSError as error:  # a full disk must not end a healthy run, nor hide why a checkpoint could not be saved
            log.get().warning(f"the metrics of step {step} are not written: {error}")
            self._tensorboard = None

    def _progress(self, step: int) -> str:
        total = str(self.total_steps)
        return f"step {step:>{len(total)}}/{total} {100 * step // self.total_steps:>3}%"

    def _console(self, step: int, line: dict[str, float | None], now: float) -> str:
        mfu = line["mfu"]
        done = step - self.start_step - 1  # without the first step, which warms up
        pace_s = (now - self._first_step_at) / done if done else now - self._logged_at
        return (
            f"{self._progress(step)}  loss {line['loss']:.4f}  norm {line['grad_norm']:.2f}  lr {line['lr']:.1e}  "
            f"{line['tokens_per_s']:,.0f} tok/s  {line['tflops_per_rank']:.3g} TFLOP/s  "
            f"mfu {'n/a' if mfu is None else f'{mfu:.1%}'}  mem {line['memory_gib']:.1f} GiB  "
            f"left {timedelta(seconds=round(pace_s * (self.total_steps - step)))}"
        )


def _append(path: Path, line: bytes) -> None:
    """Add a line to the end of a file, whole or not at all. Raises OSError, as where the disk is full."""
    with open_own(path, append=True) as file:
        number = file.fileno()
        end = os.fstat(number).st_size
        if os.write(number, line) < len(
            line
        ):  # not buffered: what is left would be written when the file is closed
            os.ftruncate(number, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to ``step``, and none where that is 0; make the file where there is none.

    A last line that a killed process tore is dropped too. A file with anything else that is no line of metrics is kept
    beside, as ``metrics.jsonl.1`` or the next free number, so that nothing is lost that someone put there.

    Raises:
        UserError: ``path`` is no plain file, or cannot be read.
        OSError: the new file cannot be written.
    """
    try:
        file = open_plain(path, follow_links=False)
    except FileNotFoundError:
        open_own(path).close()
        return
    except OSError as error:
        raise UserError(
            f"{path} {error.strerror}; the run writes its metrics there: move it away"
        ) from None
    with file:
        large = os.fstat(file.fileno()).st_size > _FILE_LIMIT
        if large or any(_step_of(line) is None for line in _lines(file)):
            beside = _free_name(path)
            os.rename(path, beside)
            why = (
                f"is larger than {_FILE_LIMIT:,} bytes"
                if large
                else "holds what is no line of metrics"
            )
            log.get().warning(f"{path} {why}: it is kept as {beside}")
        file.seek(0)
        lines = _lines(file) if step and not large else ()
        write_atomic(
            path,
            (line for line in lines if (found := _step_of(line)) is not None and found <= step),
        )


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, but for a last one that a killed process tore. A line that is too long comes in pieces."""
    while line := file.readline(_LINE_LIMIT):
        torn = not line.endswith(b"\n") and len(line) < _LINE_LIMIT
        if line != b"\n" and not (
            torn and (line.startswith(_LINE_START) or _LINE_START.startswith(line))
        ):
            yield line


def _step_of(line: bytes) -> int | None:
    """The step of a line of metrics; None where it is something else."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return step if type(step) is int and step >= 0 else None


def _free_name(path: Path) -> Path:
    """``path`` with the first number at its end that no file has."""
    return next(
        name
        for n in itertools.count(1)
        if not os.path.lexists(name := path.with_name(f"{path.name}.{n}"))
    )


def _move_old_events(run_dir: Path) -> None:
    """Bring the event files of a run of composer3d 0.1, which are in ``tensorboard``, where new ones are written.

    TensorBoard would else show the curve in two runs, NAME and NAME/tensorboard.
    """
    old = run_dir / "tensorboard"
    if old.is_symlink() or not old.is_dir():
        return
    for file in sorted(old.glob("events.out.tfevents.*")):
        if stat.S_ISREG(file.lstat().st_mode) and not os.path.lexists(run_dir / file.name):
            file.rename(run_dir / file.name)
    with suppress(OSError):  # a user's files are in it
        old.rmdir()


def _peak_memory_gib(device_type: str) -> float:
    """Peak since the process started: bytes that torch allocated on an accelerator, resident bytes on CPU."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB on Linux
