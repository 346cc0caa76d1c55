"""Send the metrics of a run to Weights & Biases or MLflow, or serve them. No torch here.

A process beside rank 0 reads ``metrics.jsonl`` while the training appends to it, and gives each
line to the service. So a service that is slow, fails or hangs costs the training nothing. What is
known of the run at the service is in the run's folder, in ``SERVICE/run.json``: its id, and how
many bytes of ``metrics.jsonl`` it has. A training that goes on goes on with the same run there, and
sends what the service has missed. The output of the service's library is in ``SERVICE/log.txt``.

The libraries read their own environment variables: WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY and so
on, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. Without them, the project is "composer3d", and
MLflow writes to the file ``mlflow.db`` beside the folders of the runs. Prometheus asks for the
metrics itself: the process serves the last value of each on a port of this machine.
"""

import fcntl
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from composer3d.facts.files import open_plain, parse_json, read_json
from composer3d.facts.tags import tag_of
from composer3d.recipe.changes import kept_text, values_of
from composer3d.runtime.ends import describe_end
from composer3d.runtime.files import open_own, write_atomic

_METRICS = "metrics.jsonl"
_LOG = "log.txt"
_STATE = "run.json"

# Seconds that a service may take, after the training, to receive the last points.
END_S = 20.0

_PROJECT = "composer3d"
_POLL_S = 1.0
_ROUND_BYTES = 1 << 20
_END_MESSAGE = b"end"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

# What MLflow takes in one request, and as the value of a parameter.
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000


class Tracker:
    """The process that sends the metrics of a run to a service.

    Args:
        service: one of ``schema.TRACKERS``.
        run_dir: the run's folder. It has the recipe, and ``metrics.jsonl`` with the lines up to
            ``start_step``.
        start_step: the number of steps done. 0 begins a new run at the service.
        former_bytes: the size of ``metrics.jsonl`` when this start of the training began.
        tokens_per_step: tokens in a step, over all ranks.

    Raises:
        OSError: a file in the run's folder cannot be written, or the process cannot be started.
    """

    def __init__(
        self,
        service: str,
        run_dir: Path,
        *,
        start_step: int,
        former_bytes: int,
        tokens_per_step: int,
    ) -> None:
        self.service = service
        folder = run_dir / service
        folder.mkdir(exist_ok=True)
        self._log_path = folder / _LOG
        task = _Task(
            service,
            str(run_dir.absolute()),
            begins=start_step == 0,
            former_bytes=former_bytes,
            kept_bytes=(run_dir / _METRICS).stat().st_size,
            tokens_per_step=tokens_per_step,
            end_s=END_S,
        )
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from composer3d.runtime.trackers import serve; serve({json.dumps(task)!r})"
        )
        with open_own(self._log_path, append=True) as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                bufsize=0,
                # A Ctrl-C in the terminal is for the ranks.
                start_new_session=True,
            )

    def problem(self) -> str | None:
        """Return why the process has ended before ``close``, or None if it runs. Never waits."""
        if self._process.poll() is None:
            return None
        assert self._process.stdin is not None
        self._process.stdin.close()
        return f"{self._last_line()} ({self._log_path} has more)"

    def close(self) -> str | None:
        """Let the process send what is left, at most ``END_S`` seconds, and wait for its end.

        Returns:
            Why the service does not have all points; None if it has.
        """
        problem = self.problem()
        if problem is not None:
            return problem
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(_END_MESSAGE)
        self._process.stdin.close()
        try:
            # The process ends itself after END_S, unless it cannot run.
            self._process.wait(END_S + 5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        status = self._process.returncode
        if status == -signal.SIGALRM or status == -signal.SIGKILL:
            return f"it did not take the last points within {END_S:.0f} s"
        return None if status == 0 else self.problem()

    def _last_line(self) -> str:
        status = self._process.returncode
        if status < 0:
            # It was ended from outside, and had no time to say anything.
            return f"its process {describe_end(-status)}"
        try:
            with open_plain(self._log_path, follow_links=False) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 1000))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            lines = []
        last = next((line for line in reversed(lines) if line.strip()), "")
        text = "".join(letter for letter in last if letter.isprintable())
        return text or f"its process {describe_end(-status)}"


class _Task(NamedTuple):
    """What the process is asked to do; the fields are those of ``Tracker``.

    Attributes:
        begins: whether the run at the service is a new one.
        kept_bytes: the size of ``metrics.jsonl`` before the first new line.
        former_bytes: that size when this start of the training began.
        end_s: seconds that the service may take to receive the last points.
    """

    service: str
    run_dir: str
    begins: bool
    kept_bytes: int
    former_bytes: int
    tokens_per_step: int
    end_s: float


class _Point(NamedTuple):
    """A line of ``metrics.jsonl``.

    Attributes:
        step: the steps done.
        tokens: the tokens of these steps.
        values: the values by tag, without those that are not finite.
        not_finite: the tags of the others.
    """

    step: int
    tokens: int
    values: dict[str, float]
    not_finite: tuple[str, ...]


class _Wandb:
    """A run at Weights & Biases. Its library sends in the background, and keeps its own files."""

    keeps_points = True

    def __init__(self, folder: Path, name: str, run_id: str | None, recipe: dict[str, Any]) -> None:
        import wandb

        self.run_id = run_id or uuid.uuid4().hex[:16]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=self.run_id,
            name=name,
            resume="allow",
            # The library makes the folder wandb in it.
            dir=folder.parent,
            config=recipe,
            allow_val_change=True,
            # This process is not the training: its program and output say nothing about it.
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True),
        )
        # The library's own step may never go back, but a training can go back to a checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, points: list[_Point]) -> None:
        for point in points:
            self._run.log({"step": point.step, "tokens": point.tokens, **point.values})

    def finish(self, *, is_whole: bool) -> None:
        import wandb

        self._run.finish(exit_code=0 if is_whole else 1)
        # Ends the library's own process.
        wandb.teardown()


class _MLflow:
    """A run at MLflow."""

    keeps_points = True

    def __init__(self, folder: Path, name: str, run_id: str | None, recipe: dict[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        runs = folder.parent.parent
        is_local = "MLFLOW_TRACKING_URI" not in os.environ
        self._client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}" if is_local else None)
        if run_id is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            found = self._client.get_experiment_by_name(experiment)
            if found is None:
                place = (runs / "mlflow-artifacts").as_uri() if is_local else None
                number = self._client.create_experiment(experiment, artifact_location=place)
            else:
                number = found.experiment_id
            run_id = self._client.create_run(number, run_name=name).info.run_id
        self.run_id = run_id
        self._client.update_run(run_id, status="RUNNING")

        # A parameter of a run can never change: what a later start has changed becomes a tag.
        former = self._client.get_run(run_id).data.params
        texts = {key: str(value)[:_LONGEST_PARAM] for key, value in recipe.items()}
        params = [Param(key, text) for key, text in texts.items() if key not in former]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        for key, text in texts.items():
            if former.get(key, text) != text:
                self._client.set_tag(run_id, f"changed.{key}", text)

    def send(self, points: list[_Point]) -> None:
        now_ms = round(time.time() * 1000)
        metrics = [
            self._metric(tag, value, now_ms, point.step)
            for point in points
            for tag, value in {"tokens": point.tokens, **point.values}.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _MOST_METRICS])

    def finish(self, *, is_whole: bool) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if is_whole else "KILLED")


class _Prometheus:
    """The last value of each metric, for Prometheus to read from 127.0.0.1 (OpenMetrics)."""

    # A process that begins anew serves nothing of what the one before it has read.
    keeps_points = False

    def __init__(self, folder: Path, name: str, run_id: str | None, recipe: dict[str, Any]) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self.run_id, self._name, self._make = run_id or uuid.uuid4().hex[:16], name, Gauge
        # Without the library's own metrics, which are of this process and not of the training.
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._say_time()
        start_http_server(recipe["metrics.prometheus"], addr="127.0.0.1", registry=self._registry)

    def send(self, points: list[_Point]) -> None:
        for point in points:
            for tag in point.not_finite:
                # A rank was slow, and none is any more. Until then, no other line says it again.
                if tag.startswith("ranks/") and tag in self._gauges:
                    self._registry.unregister(self._gauges.pop(tag))
            unknown = {tag: math.nan for tag in point.not_finite if not tag.startswith("ranks/")}
            counts = {"step": point.step, "tokens": point.tokens}
            for tag, value in {**point.values, **unknown, **counts}.items():
                self._set(tag, value)
        self._say_time()

    def _say_time(self) -> None:
        """Say when the last point came, or this process began: an alert can tell a hang."""
        self._set("last_point_timestamp_seconds", time.time())

    def _set(self, tag: str, value: float) -> None:
        """Set the gauge of a tag: "loss/train" is called composer3d_loss_train."""
        if tag not in self._gauges:
            name = "composer3d_" + re.sub(r"[^A-Za-z0-9_]", "_", tag)
            self._gauges[tag] = self._make(name, tag, ["run"], registry=self._registry)
        self._gauges[tag].labels(run=self._name).set(value)

    def finish(self, *, is_whole: bool) -> None:
        """Nothing is kept: the port closes with this process."""


_SERVICES: dict[str, type[_Wandb] | type[_MLflow] | type[_Prometheus]] = {
    "wandb": _Wandb,
    "mlflow": _MLflow,
    "prometheus": _Prometheus,
}


def serve(task_json: str) -> None:
    """Send the metrics of a run until standard input ends: the main function of the process.

    Ends the process with status 1 if the service fails; the last line of its output says why.
    """
    task = _Task(*json.loads(task_json))
    os.nice(10)
    # The process of an earlier start may still send its last points.
    with suppress(OSError):
        fcntl.flock(sys.stdout.fileno(), fcntl.LOCK_EX)
    try:
        _send_all(task)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        print(f"{type(error).__name__}: {text}", flush=True)
        os._exit(1)
    sys.stdout.flush()
    # The libraries would wait for their threads.
    os._exit(0)


def _send_all(task: _Task) -> None:
    run_dir = Path(task.run_dir)
    folder = run_dir / task.service
    run_id, sent_bytes = (None, 0) if task.begins else _read_state(folder)
    if _SERVICES[task.service].keeps_points:
        # Lines beyond the checkpoint that the training goes on from have been dropped.
        sent_bytes = min(sent_bytes, task.kept_bytes)
    else:
        # What was said of the ranks of an earlier start is not true of these.
        sent_bytes = task.former_bytes
    text = kept_text(run_dir)
    recipe = {key: value for key, value in values_of(text).items() if value is not None}

    service = _SERVICES[task.service](folder, run_dir.name, run_id, recipe)
    _write_state(folder, service.run_id, sent_bytes)
    with open_plain(run_dir / _METRICS, follow_links=False) as file:
        file.seek(sent_bytes)
        message: bytes | None = None
        while message is None:
            # What was written before the end of standard input is read after it.
            message = _message_within(_POLL_S)
            if message is not None:
                signal.setitimer(signal.ITIMER_REAL, task.end_s)
            for lines in _rounds(file):
                service.send(list(_points(lines, task.tokens_per_step)))
                sent_bytes += len(lines)
                _write_state(folder, service.run_id, sent_bytes)
    service.finish(is_whole=message == _END_MESSAGE)


def _message_within(seconds: float) -> bytes | None:
    """Return all of standard input, or None if it has not ended within ``seconds``."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return None
    return sys.stdin.buffer.read()


def _rounds(file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines that the file has beyond its position, about a MiB at a time."""
    while True:
        place = file.tell()
        content = file.read(_ROUND_BYTES)
        lines = content[: content.rfind(b"\n") + 1]
        file.seek(place + len(lines))
        if not lines:
            return
        yield lines


def _points(lines: bytes, tokens_per_step: int) -> Iterator[_Point]:
    for line in lines.splitlines():
        try:
            values: Mapping[str, Any] = parse_json(line)
            step = values["step"]
        except (ValueError, KeyError, TypeError):
            # A full disk may leave a line that is cut off.
            continue
        by_tag = {tag_of(name).name: value for name, value in values.items() if name != "step"}
        yield _Point(
            step,
            step * tokens_per_step,
            {tag: value for tag, value in by_tag.items() if value is not None},
            tuple(tag for tag, value in by_tag.items() if value is None),
        )


def _read_state(folder: Path) -> tuple[str | None, int]:
    """Return the id of the run at the service and the bytes it has; None and 0 if unknown."""
    try:
        state = read_json(folder / _STATE, follow_links=False)
        run_id, sent_bytes = state["id"], state["sent_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0
    is_right = isinstance(run_id, str) and _ID.fullmatch(run_id) and type(sent_bytes) is int
    return (run_id, max(0, sent_bytes)) if is_right else (None, 0)


def _write_state(folder: Path, run_id: str, sent_bytes: int) -> None:
    """Keep the state, unless the disk is full: then some points may be sent again later."""
    state = {"id": run_id, "sent_bytes": sent_bytes}
    with suppress(OSError):
        write_atomic(folder / _STATE, json.dumps(state) + "\n")
