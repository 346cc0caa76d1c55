"""Write the metrics of logged steps to the console, to a JSON Lines file and to TensorBoard.

Other services get them from processes of their own, which read that file (``runtime.trackers``).

Loss, gradient norm and learning rate are those of the logged step itself, so they do not depend
on where a run was resumed. Throughput and seconds are averages over the steps since the last
logged one, without those that the run leaves out. Validation, checkpoints and comparisons of
replicas do not count as training time.
"""

import itertools
import json
import math
import os
import resource
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from composer3d.data import Batch
from composer3d.facts import events
from composer3d.facts.errors import UserError
from composer3d.facts.files import open_plain, parse_json
from composer3d.facts.text import rough_duration
from composer3d.models.registry import architecture
from composer3d.parallel import Stages
from composer3d.parallel.context.imbalance import attention_imbalance
from composer3d.parallel.expert.balance import expert_metrics
from composer3d.planner.memory import GIB
from composer3d.planner.trained import has_frozen
from composer3d.recipe.rates import matrix_lr_factor
from composer3d.recipe.schema import MetricsTable, OptimTable, Recipe
from composer3d.reliability.report import Report
from composer3d.runtime import log, process_group
from composer3d.runtime.files import LineFile, open_own, write_atomic
from composer3d.runtime.trackers import Tracker
from composer3d.training.observers.observer import Observer, Phase, StepResult
from composer3d.training.owed import METRICS

if TYPE_CHECKING:
    from composer3d.training.observers.tensorboard import TensorBoard

FILE = METRICS

# Bytes of metrics.jsonl: room for more than two million lines.
_FILE_LIMIT = 1 << 30

# Bytes. A line of metrics has a few hundred bytes.
_LINE_LIMIT = 64 << 10

_LINE_START = b'{"step": '

# The phases that stand between steps: their seconds are no time of a step.
_BETWEEN_STEPS: tuple[Phase, ...] = ("validation", "checkpoint", "replicas")

# Seconds after which a service whose process has failed is tried again.
_TRACKER_RETRY_S = 300.0


@dataclass
class Metrics(Observer):
    """The metrics of one run. Every rank creates and calls one, but only the main rank writes.

    Steps are counted from 1: ``step`` is the number of optimizer steps done. A line goes to the
    log, to ``run_dir/metrics.jsonl`` and to TensorBoard's event files in ``run_dir`` every
    ``table.every`` steps, at the first step after the start, and at the last step. Lines and
    points of an earlier process beyond ``start_step`` are dropped, so that a resumed run has one
    curve. The docstring of ``log_step`` lists the keys of a line, with their units.

    The clock starts with the first ``step``.

    Attributes:
        run_dir: the run's folder.
        table: the recipe's ``[metrics]``.
        total_steps: ``run.steps``.
        tokens_per_step: tokens in a step, over all ranks.
        world_size: the number of ranks.
        flops_per_token: returns the FLOPs of forward and backward of a token, from the documents of
            packed rows, int64 (B, T), or None; returns None if they are not counted
            (``count_flops``).
        peak_flops: peak FLOP/s of one device; None if unknown.
        device_type: "cpu" or "cuda".
        main: whether this rank measures and writes.
        may_write: returns whether the run's folder still belongs to this job; None: it always does.
        start_step: the number of steps done before this process. 0 drops all earlier metrics.
        further: returns further metrics of a step. It is called only if the step is logged.

    Raises:
        UserError, OSError: the files cannot be written. Raised on the main rank only.
    """

    run_dir: Path
    table: MetricsTable
    _: KW_ONLY
    total_steps: int
    tokens_per_step: int
    world_size: int
    flops_per_token: Callable[[Tensor | None], float | None]
    peak_flops: float | None
    device_type: str
    main: bool
    may_write: Callable[[], bool] | None = None
    start_step: int = 0
    further: Callable[[StepResult], Mapping[str, float]] = lambda _: {}

    def __post_init__(self) -> None:
        # Seconds by phase, and of the steps themselves, since the last logged step.
        self._seconds: dict[str, float] = defaultdict(float)
        self._training_s = 0.0
        self._logged_step = self.start_step
        # The step that this process has trained last.
        self._trained_step: int | None = None
        # Steps that this process has trained, and how many of them the last line knew.
        self._trained = self._trained_at_line = 0
        # All seconds since the first one belong to the step that comes or lasts.
        self._step_began_s = self._first_step_at_s = time.perf_counter()
        self._tensorboard: TensorBoard | None = None
        self._trackers: list[Tracker] = []
        # The services that have failed, with the time (monotonic) at which they are tried again.
        self._tracker_retries: dict[str, float] = {}
        if not self.main:
            return

        may_write = self.may_write if self.may_write is not None else lambda: True
        self._file = LineFile(self.run_dir / FILE, _warn, may_write)
        self._events = LineFile(self.run_dir / events.FILE, _warn, may_write)
        _drop_lines_after(self.run_dir / FILE, self.start_step)
        self._former_bytes = (self.run_dir / FILE).stat().st_size
        if self.table.tensorboard:
            # Imported here: it takes a second, and only one rank needs it.
            from composer3d.training.observers import tensorboard

            _move_old_events(self.run_dir)
            self._tensorboard = tensorboard.TensorBoard(
                self.run_dir,
                start_step=self.start_step,
                tokens_per_step=self.tokens_per_step,
                not_before_s=_latest_time(self.run_dir),
                tell=_warn,
            )
        for service in self.table.trackers:
            self._start_tracker(service, self.start_step)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the seconds of the body to those of the phase."""
        begin_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin_s
        if name != "gradients":
            self._seconds[name] += seconds
        if name in _BETWEEN_STEPS:
            self._step_began_s += seconds

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Drop the seconds before the first step, and those of steps that are left out."""
        if number - 1 != self._trained_step:
            now_s = time.perf_counter()
            self._first_step_at_s += now_s - self._step_began_s
            self._step_began_s = now_s
        yield

    def wants_norm_by_part(self, number: int) -> bool:
        return self.is_due(number)

    def end_step(self, result: StepResult) -> None:
        self.log_step(
            result.step,
            loss=result.values.loss,
            grad_norm=result.values.norm,
            lr=result.lr,
            documents_BT=result.batch.documents_BT,
            extra=partial(self.further, result),
        )

    def is_due(self, step: int) -> bool:
        """Return whether ``step`` is logged: the same on all ranks."""
        is_first, is_last = step == self.start_step + 1, step == self.total_steps
        return is_first or is_last or step % self.table.every == 0

    def log_step(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        documents_BT: Tensor | None = None,
        extra: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """End an optimizer step, and log it if it is due. Call this after each trained step.

        A line has these keys; a value that is not finite becomes null:

        - ``step``; ``loss`` (nats per valid token, of the whole batch); ``grad_norm`` (before
          clipping); ``lr``, that of the schedule.
        - ``tokens_per_s`` (all ranks), ``tokens_per_s_per_rank``; what counts as a token is in
          ``tags.COUNTED_TOKENS``.
        - ``tflops_per_rank``: null if FLOPs are not counted; of packed documents, each with its
          own length, those of this rank's rows in this step.
        - ``mfu``: the same as a fraction of the peak FLOP/s; null if the peak is unknown.
        - ``step_s``, and ``data_s`` in which the main rank waited for data: seconds per step.
        - ``validation_s``, ``checkpoint_s`` (saves, and going back to a checkpoint) and
          ``replicas_s`` (of ``ReplicaCheck``): seconds since the last line.
        - ``memory_gib``: on a CPU, the largest resident memory of the main rank since its start.
          On a GPU, the largest size of torch's tensors since the start, of the rank that had most.
        - on a GPU, ``memory_reserved_gib``: the same for the memory that torch's allocator has
          taken from the GPU; and ``memory_retries``: how often the allocator found no room and
          gave back unused memory before it tried again, of the rank with most since the start.
        - the keys of ``extra``: ``grad_norm/PART`` for each part of the model (see
          ``parallel.grad_norm.PARTS``), with ``optim.matrix_lr`` ``matrix_lr``, with documents over
          cp ``cp_balance`` (see ``cp_balance``), and with experts their load (see
          ``balance.expert_metrics``).

        Args:
            step: the number of steps done, counted from 1.
            loss, grad_norm, lr: as above.
            documents_BT: int64 (B, T): the documents of this rank's rows in the step, if they are
                packed.
            extra: returns further metrics. It is called only if the step is logged.

        Collective over all ranks on a GPU, if the step is logged: ``process_group.max_over_ranks``.
        """
        now_s = time.perf_counter()
        self._training_s += now_s - self._step_began_s
        self._step_began_s = now_s
        self._trained_step = step
        self._trained += 1
        if self._trained == 1:
            self._first_step_at_s = now_s
        if not self.is_due(step):
            return
        memory = _peak_memory(self.device_type)
        if not self.main:
            return
        steps = self._trained - self._trained_at_line
        training_s = max(self._training_s, 1e-9)
        tokens_per_s = steps * self.tokens_per_step / training_s
        flops_per_token = self.flops_per_token(documents_BT)
        flops_per_rank = None
        if flops_per_token is not None:
            flops_per_rank = tokens_per_s * flops_per_token / self.world_size
        line = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_rank": tokens_per_s / self.world_size,
            "tflops_per_rank": flops_per_rank and flops_per_rank / 1e12,
            "mfu": flops_per_rank / self.peak_flops if flops_per_rank and self.peak_flops else None,
            "step_s": training_s / steps,
            "data_s": self._seconds["data"] / steps,
            **{f"{phase}_s": self._seconds[phase] for phase in _BETWEEN_STEPS},
            **memory,
            **extra(),
        }
        self._write(step, line)
        log.get().info(self._console_line(step, line, now_s))
        self._seconds.clear()
        self._training_s = 0.0
        self._logged_step = step
        self._trained_at_line = self._trained

    def end_validation(self, step: int, loss: float) -> None:
        """Log the validation loss (nats per valid token) after ``step``.

        The line has the keys ``step`` and ``validation_loss``.
        """
        if self.main:
            self._write(step, {"validation_loss": loss})
            log.get().info(f"{self._progress(step)}  validation loss {loss:.4f}")

    def event(
        self,
        step: int,
        kind: events.Kind,
        text: str,
        *,
        device: str | None = None,
        seconds: float | None = None,
    ) -> None:
        """Add a line to ``events.jsonl`` (``facts.events``). Only the main rank writes.

        Args:
            step: the number of steps done.
            kind, text, device, seconds: as in ``events.Event``.
        """
        if self.main:
            found = events.Event(step, round(time.time(), 3), kind, text, device, seconds)
            self._events.append(events.line(found))

    def report(self, step: int, report: Report) -> None:
        """Write a report: on the main rank alone, whichever rank calls it.

        The lines go to the console as warnings, to ``events.jsonl`` and to TensorBoard; the values
        go where those of other lines go.
        """
        if not self.main:
            return
        for line in report.lines:
            log.get().warning(f"step {step}: {line}")
            self.event(step, report.tag, line)
        if report.values:
            self._write(step, report.values)
        if self._tensorboard is not None:
            # A line break of Markdown.
            self._tensorboard.add_text(report.tag, "  \n".join(report.lines), step)
            self._tensorboard.flush()

    def describe(
        self,
        texts: Mapping[str, str],
        images: Mapping[str, bytes],
        hparams: Mapping[str, Any],
        *,
        has_experts: bool,
    ) -> None:
        """Tell TensorBoard what is the same for all steps; see ``TensorBoard.describe``."""
        if self._tensorboard is not None:
            self._tensorboard.describe(texts, images, hparams, has_experts=has_experts)
            self._tensorboard.flush()

    def close(self) -> None:
        """Write the seconds of the phases between steps since the last line, and close the files.

        The keys of the line are ``step`` (the last logged one), and ``validation_s``,
        ``checkpoint_s`` and ``replicas_s`` for the phases that there were.
        """
        if not self.main:
            return
        tail = {
            f"{phase}_s": self._seconds[phase] for phase in _BETWEEN_STEPS if phase in self._seconds
        }
        if tail:
            self._write(self._logged_step, tail)
        for tracker in self._trackers:
            problem = tracker.close()
            if problem is not None:
                _warn_of_tracker(tracker.service, problem)

    def _write(self, step: int, values: Mapping[str, float | None]) -> None:
        if not self._owns_folder():
            # The next save raises an error with the reason, which ends the run.
            return
        finite = {
            key: value if value is not None and math.isfinite(value) else None
            for key, value in values.items()
        }
        # A full disk must not end a healthy run, nor hide why a save failed.
        self._file.append((json.dumps({"step": step, **finite}) + "\n").encode())
        if self._tensorboard is not None:
            for name, value in values.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        self._watch_trackers(step)

    def _owns_folder(self) -> bool:
        # A folder of which the file system says nothing may still be this job's own.
        with suppress(OSError):
            return self.may_write is None or self.may_write()
        return True

    def _start_tracker(self, service: str, step: int) -> None:
        """Start the process of a service; step 0 begins a new run there."""
        try:
            tracker = Tracker(
                service,
                self.run_dir,
                start_step=step,
                former_bytes=self._former_bytes,
                tokens_per_step=self.tokens_per_step,
            )
        except OSError as error:
            self._drop_tracker(service, str(error))
        else:
            self._trackers.append(tracker)

    def _watch_trackers(self, step: int) -> None:
        """Drop services whose process has failed, and try them again after a while."""
        for tracker in [*self._trackers]:
            problem = tracker.problem()
            if problem is not None:
                self._trackers.remove(tracker)
                self._drop_tracker(tracker.service, problem)
        now_s = time.monotonic()
        for service, retry_at_s in [*self._tracker_retries.items()]:
            is_running = any(tracker.service == service for tracker in self._trackers)
            if not is_running and now_s >= retry_at_s:
                # Not 0: the run at the service has begun.
                self._start_tracker(service, max(1, step))

    def _drop_tracker(self, service: str, problem: str) -> None:
        # The disk may have been full, or the network gone for a while. It is said once.
        if service not in self._tracker_retries:
            _warn_of_tracker(service, problem)
        self._tracker_retries[service] = time.monotonic() + _TRACKER_RETRY_S

    def _progress(self, step: int) -> str:
        total = str(self.total_steps)
        return f"step {step:>{len(total)}}/{total}"

    def _console_line(self, step: int, line: dict[str, float | None], now_s: float) -> str:
        # The first step is left out of the pace, as it warms up.
        timed_steps = self._trained - 1
        pace_s = self._training_s
        if timed_steps:
            pace_s = (now_s - self._first_step_at_s) / timed_steps
        left = rough_duration(pace_s * (self.total_steps - step))
        tflops, mfu = line["tflops_per_rank"], line["mfu"]
        used = "" if tflops is None else f"{tflops:.3g} TFLOP/s"
        # Of a usual run, a line fits 100 columns.
        parts = [
            self._progress(step),
            f"loss {line['loss']:.4f}",
            f"norm {line['grad_norm']:.2f}",
            f"lr {line['lr']:.1e}",
            f"{line['tokens_per_s']:,.0f} tok/s",
            used if mfu is None else f"mfu {mfu:.1%}",
            f"{line['memory_gib']:.1f} GiB",
            f"left {left}",
        ]
        return "  ".join(filter(None, parts))


def _warn(text: str) -> None:
    log.get().warning(text)


def _warn_of_tracker(service: str, problem: str) -> None:
    _warn(
        f"metrics.{service}: {problem}; the training does not need it; it is tried again every "
        f"{_TRACKER_RETRY_S / 60:.0f} minutes, and then gets what it has missed"
    )


def _latest_time(run_dir: Path) -> float:
    """Return the latest time in the events of the run, in seconds since 1970; 0 without events."""
    with suppress(OSError):
        return max((found.unix_s for found in events.read(run_dir) if found is not None), default=0)
    return 0.0


def _drop_lines_after(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``, or all lines if it is 0.

    A missing file is created. A last line that was cut off when its process was killed is dropped
    too. If the file is too large or has other lines that are not metrics, the whole file is kept as
    ``metrics.jsonl.1``, or with the next free number: a user may need it.

    Raises:
        UserError: ``path`` is not a plain file, or cannot be read.
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
        is_too_large = os.fstat(file.fileno()).st_size > _FILE_LIMIT
        if is_too_large or any(_is_foreign(line) for line in _complete_lines(file)):
            backup = _free_name(path)
            os.rename(path, backup)
            if is_too_large:
                problem = f"is larger than {_FILE_LIMIT:,} bytes"
            else:
                problem = "has lines that are not metrics"
            log.get().warning(f"{path} {problem}: it is kept as {backup}")
        file.seek(0)
        keeps_lines = step > 0 and not is_too_large
        write_atomic(path, _lines_up_to(file, step) if keeps_lines else ())


def _lines_up_to(file: BinaryIO, step: int) -> Iterator[bytes]:
    """Yield the lines of metrics of the steps up to ``step``."""
    for line in _complete_lines(file):
        line_step = _step_of(line)
        if line_step is not None and line_step <= step:
            yield line


def _complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file. Lines beyond ``_LINE_LIMIT`` bytes come in pieces.

    Empty lines are skipped. So is a last line of metrics that was cut off when its process was
    killed.
    """
    while line := file.readline(_LINE_LIMIT):
        if line == b"\n":
            continue
        has_no_end = not line.endswith(b"\n") and len(line) < _LINE_LIMIT
        starts_as_metrics = line.startswith(_LINE_START) or _LINE_START.startswith(line)
        if not (has_no_end and starts_as_metrics):
            yield line


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of metrics, or None for any other line."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    # Not ``isinstance``: True is an int too.
    return step if type(step) is int and step >= 0 else None


def _is_foreign(line: bytes) -> bool:
    """Return whether a line is neither one of metrics nor a beginning of one.

    A line stays cut off if the disk was full, and even its beginning could not be taken back.
    """
    text = line.rstrip(b"\n")
    is_cut = not text.endswith(b"}") and (
        text.startswith(_LINE_START) or _LINE_START.startswith(text)
    )
    return not is_cut and _step_of(line) is None


def _free_name(path: Path) -> Path:
    """Return ``path.1``, or the same with the first number that makes a free name."""
    candidates = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def _move_old_events(run_dir: Path) -> None:
    """Move the event files of composer3d 0.1 from ``run_dir/tensorboard`` to ``run_dir``.

    Otherwise TensorBoard would show the curve in two runs, NAME and NAME/tensorboard.
    """
    old = run_dir / "tensorboard"
    if old.is_symlink() or not old.is_dir():
        return
    for file in sorted(old.glob("events.out.tfevents.*")):
        if stat.S_ISREG(file.lstat().st_mode) and not os.path.lexists(run_dir / file.name):
            file.rename(run_dir / file.name)
    # The folder stays if a user has other files in it.
    with suppress(OSError):
        old.rmdir()


def _peak_memory(device_type: str) -> dict[str, float]:
    """Return the metrics of memory. On a GPU, it is collective over all ranks; no host waits."""
    if device_type == "cuda":
        own = {
            "memory_gib": torch.cuda.max_memory_allocated() / GIB,
            "memory_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "memory_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }
        return dict(zip(own, process_group.max_over_ranks([*own.values()]), strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ``ru_maxrss`` is in bytes on macOS, and in KiB on Linux.
    return {"memory_gib": peak / GIB if sys.platform == "darwin" else peak / 2**20}


def count_flops(recipe: Recipe) -> Callable[[Tensor | None], float | None]:
    """Return ``Metrics.flops_per_token``: it counts as the recipe's architecture does.

    Of packed documents, int64 (B, T), each counts with its own length. Nothing is counted if
    ``optim.train`` leaves parameters out: backward then does less than the architecture counts.
    """
    model, seq_len = recipe.model, recipe.data.seq_len
    count = partial(architecture(model.architecture).count_flops, model)
    if has_frozen(recipe):
        return lambda _: None

    def flops_per_token(documents_BT: Tensor | None) -> float:
        if documents_BT is None:
            return count(seq_len)
        # Numbers of documents begin anew in each row.
        rows_B1 = torch.arange(len(documents_BT), device=documents_BT.device)[:, None]
        numbers_BT = documents_BT + rows_B1 * seq_len
        _, lengths = torch.unique_consecutive(numbers_BT, return_counts=True)
        flops = sum(length * count(length) for length in lengths.tolist())
        return flops / documents_BT.numel()

    return flops_per_token


def further_metrics(recipe: Recipe, stages: Stages, result: StepResult) -> dict[str, float]:
    """Return the metrics of a step beside its loss and norm: ``extra`` of ``Metrics.log_step``.

    On a GPU, the host waits for them. No collective.
    """
    tokens = recipe.data.global_batch * recipe.data.seq_len
    norms = result.values.norm_by_part
    return {
        **{f"grad_norm/{part}": norm for part, norm in norms.items()},
        **further_rates(recipe.optim, result.lr),
        **mtp_metrics(recipe, result.values.mtp_losses),
        **cp_balance(recipe, result.batch),
        **expert_metrics(stages.router_loads, tokens),
    }


def further_rates(optim: OptimTable, lr: float) -> dict[str, float]:
    """Return ``matrix_lr``, the learning rate of Muon's matrices, if they have one of their own."""
    if optim.matrix_lr is None:
        return {}
    return {"matrix_lr": lr * matrix_lr_factor(optim)}


def mtp_metrics(recipe: Recipe, mtp_losses: Sequence[float]) -> dict[str, float]:
    """Return ``mtp_loss``, the mean loss of all depths of multi-token prediction, without its
    coefficient; and ``mtp_loss/1`` and so on for each depth, if there are several.

    Args:
        recipe: its ``[model]`` has the coefficient.
        mtp_losses: ``StepValues.mtp_losses``.
    """
    if not mtp_losses:
        return {}
    coefficient = recipe.model.mtp_loss
    of_depths = [loss * len(mtp_losses) / coefficient for loss in mtp_losses]
    metrics = {"mtp_loss": sum(mtp_losses) / coefficient}
    if len(of_depths) > 1:
        metrics |= {f"mtp_loss/{depth}": loss for depth, loss in enumerate(of_depths, 1)}
    return metrics


def cp_balance(recipe: Recipe, batch: Batch) -> dict[str, float]:
    """Return ``cp_balance``: the ``attention_imbalance`` of this rank's rows of a batch.

    Empty without cp, without documents, and for Ulysses, where every rank has the same work.
    """
    cp, parallel, documents_BT = recipe.mesh.cp, recipe.parallel, batch.documents_BT
    if cp == 1 or documents_BT is None or parallel.cp_method == "ulysses":
        return {}
    value = attention_imbalance(
        documents_BT,
        cp,
        balanced=parallel.is_balanced,
        windows=recipe.model.windows,
        micro_batch=recipe.data.micro_batch,
    )
    return {"cp_balance": value}
