"""Write a run for TensorBoard: its curves with descriptions, a dashboard, its recipe and layout.

TensorBoard names a run by the folder of its event files, which is the run's folder. Its charts have
one horizontal axis, the step. So the losses by tokens are curves of their own, in the run
``NAME/by_tokens``, whose step is the number of tokens. They need a folder of their own: a resume
tells TensorBoard to forget all points of a folder from some step on. They need tags of their own
too: one chart cannot show steps and tokens.

TensorBoard reads the event files of a folder in the order of their names, which begin with a time.
A machine whose clock is slow must not change this order. So a file gets a higher number than all
files before it, and its points get later times than the events of the run before it.
"""

import os
import platform
import re
import struct
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Imported only on the rank that writes: it takes a second.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary as summaries

from composer3d.facts.tags import COUNTED_TOKENS, Tag, tag_of
from composer3d.runtime.files import append_whole

TOKENS_FOLDER = "by_tokens"

_RGB = 3  # a code of TensorBoard

# Metrics that have a curve by tokens.
_BY_TOKENS = {
    "loss": Tag("loss_by_tokens/train", f"loss/train over tokens. {COUNTED_TOKENS}"),
    "validation_loss": Tag(
        "loss_by_tokens/validation", f"loss/validation over tokens. {COUNTED_TOKENS}"
    ),
}

# The dashboard "Custom scalars": category, title of a chart, and its tags as regular expressions.
_DASHBOARD = {
    "What matters": {
        "loss": ["Multiline", ["^loss/train$", "^loss/validation$"]],
        "tokens/s of all ranks": ["Multiline", ["^speed/tokens_per_s$"]],
        "gradient norm": ["Multiline", ["^optim/grad_norm$"]],
        "peak memory, GiB": ["Multiline", ["^memory/peak_gib$", "^memory/peak_reserved_gib$"]],
        "learning rate": ["Multiline", ["^optim/lr$", "^optim/matrix_lr$"]],
        "gradient norm by part": ["Multiline", ["^grad_norm/"]],
        "loss by tokens": ["Multiline", ["^loss_by_tokens/"]],
    },
    "Time": {
        "seconds of a step": ["Multiline", ["^time/step_s$", "^time/data_s$"]],
        "seconds between steps": [
            "Multiline",
            ["^time/validation_s$", "^time/checkpoint_s$", "^time/replicas_s$"],
        ],
    },
}
_DASHBOARD_OF_EXPERTS = {
    "Experts": {
        "load of the busiest expert": ["Multiline", ["^experts/load$", "^expert_load/"]],
        "router entropy": ["Multiline", ["^experts/router_entropy$", "^router_entropy/"]],
    },
}


# The names that TensorBoard looks for. The number has been a time in all programs that write such
# files.
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


class _Curves:
    """The event files of a process in a folder: one, unless it was damaged by a failed write.

    What is added is kept until ``flush``.
    """

    def __init__(self, folder: Path, purge_step: int, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        # From this step on, TensorBoard forgets what earlier processes wrote to this folder.
        self._purge_step: int | None = purge_step
        self._path: Path | None = None
        self._size = 0
        self._described: set[str] = set()
        self._pending: list[Event] = []

    def add(self, tag: str, value: float, step: int, description: str) -> None:
        metadata = None
        if description and tag not in self._described:
            # TensorBoard reads the description at the first point of a tag. Its data server ignores
            # one without a data class.
            metadata = create_summary_metadata(display_name="", description=description)
            metadata.data_class = DATA_CLASS_SCALAR
            self._described.add(tag)
        point = Summary.Value(tag=tag, simple_value=value, metadata=metadata)
        self.add_summary(Summary(value=[point]), step)

    def add_summary(self, summary: Any, step: int = 0) -> None:
        self._pending.append(Event(wall_time=self._clock(), step=step, summary=summary))

    def flush(self) -> None:
        """Write what was added, whole or not at all. Raises OSError: then it is lost."""
        pending, self._pending = self._pending, []
        try:
            if self._path is None or self._size_of(self._path) != self._size:
                self._path, self._size = self._new_path(), 0
            if self._size == 0:
                pending = [*self._head(), *pending]
            content = _Records()
            writer = RecordWriter(content)
            for event in pending:
                writer.write(event.SerializeToString())
            append_whole(self._path, bytes(content))
        except OSError:
            self._described.clear()
            raise
        self._size += len(content)
        self._purge_step = None

    def _head(self) -> list[Event]:
        head = [Event(wall_time=self._clock(), file_version="brain.Event:2")]
        if self._purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            head.append(Event(wall_time=self._clock(), step=self._purge_step, session_log=start))
        return head

    def _new_path(self) -> Path:
        self._folder.mkdir(exist_ok=True)
        numbers = [
            int(found[1]) for name in os.listdir(self._folder) if (found := _NAME.match(name))
        ]
        number = max([int(time.time()), *(each + 1 for each in numbers)])
        # A random word, so that nobody can place a file there beforehand.
        words = f"{platform.node()}.{os.getpid()}.{uuid.uuid4().hex}"
        return self._folder / f"events.out.tfevents.{number:010d}.{words}"

    @staticmethod
    def _size_of(path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def n_pending(self) -> int:
        """The number of points and texts that were added since ``flush``."""
        return len(self._pending)


class _Records(bytearray):
    """A file in memory for ``RecordWriter``."""

    def write(self, content: bytes) -> None:
        self += content


class TensorBoard:
    """The event files of a run.

    If they cannot be written for a while, what was added meanwhile is lost. Two messages say so:
    one at the first loss, and one as soon as they can be written again.

    Args:
        run_dir: the run's folder.
        start_step: the number of steps done before this process. Points beyond it are dropped; 0
            drops all.
        tokens_per_step: tokens in a step, over all ranks.
        not_before_s: no point gets a time before this one, in seconds since 1970.
        tell: is called with each message.

    Raises:
        OSError: the event file cannot be begun.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        start_step: int,
        tokens_per_step: int,
        not_before_s: float = 0.0,
        tell: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._start_step = start_step
        self._tokens_per_step = tokens_per_step
        self._tell = tell
        self._lost = 0
        self._started_unix_s = max(time.time(), not_before_s)
        self._started_s = time.monotonic()
        self._curves = _Curves(run_dir, start_step + 1 if start_step else 0, self._now)
        self._curves.flush()
        self._by_tokens: _Curves | None = None

    def _now(self) -> float:
        return self._started_unix_s + time.monotonic() - self._started_s

    def flush(self) -> None:
        """Write what was added since the last call."""
        lost_before, lost = self._lost, 0
        for curves in (self._curves, self._by_tokens):
            if curves is None:
                continue
            n_pending = curves.n_pending
            try:
                curves.flush()
            except OSError as error:
                lost += n_pending
                if not self._lost:
                    self._tell(
                        f"TensorBoard's files in {self._run_dir} cannot be written: "
                        f"{error.strerror or error}; points are lost until they can"
                    )
                self._lost += n_pending
        if lost_before and not lost:
            self._lost = 0
            self._tell(
                f"TensorBoard's files in {self._run_dir} can be written again; points lost before "
                f"this: {lost_before}"
            )

    def add_scalar(self, metric: str, value: float, step: int) -> None:
        """Add a point to the curve of a metric, and to its curve by tokens if it has one."""
        tag = tag_of(metric)
        self._curves.add(tag.name, value, step, tag.description)

        by_tokens = _BY_TOKENS.get(metric)
        if by_tokens is None:
            return
        if self._by_tokens is None:
            first_tokens = self._start_step * self._tokens_per_step + 1 if self._start_step else 0
            self._by_tokens = _Curves(self._run_dir / TOKENS_FOLDER, first_tokens, self._now)
        tokens = step * self._tokens_per_step
        self._by_tokens.add(by_tokens.name, value, tokens, by_tokens.description)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a text in Markdown."""
        self._curves.add_summary(summaries.text(tag, text), step)

    def describe(
        self,
        texts: Mapping[str, str],
        images: Mapping[str, bytes],
        hparams: Mapping[str, Any],
        *,
        has_experts: bool,
    ) -> None:
        """Write what is the same for all steps: the dashboard, texts, images and hyperparameters.

        Args:
            texts: plain texts by tag, shown in a font of fixed width.
            images: PNG files by tag.
            hparams: numbers, bools and texts by key.
            has_experts: whether the dashboard has the charts of experts.
        """
        dashboard = {**_DASHBOARD, **(_DASHBOARD_OF_EXPERTS if has_experts else {})}
        self._curves.add_summary(summaries.custom_scalars(dashboard))
        for tag, text in texts.items():
            # Indented lines are code in Markdown, whatever they contain.
            code = "\n".join(f"    {line}" for line in text.splitlines())
            self.add_text(tag, code, self._start_step)
        for tag, png in images.items():
            # The first chunk of a PNG file has its size.
            width, height = struct.unpack(">II", png[16:24])
            image = Summary.Image(
                encoded_image_string=png, width=width, height=height, colorspace=_RGB
            )
            value = Summary.Value(tag=tag, image=image)
            self._curves.add_summary(Summary(value=[value]), self._start_step)
        metrics = {"loss/train": 0.0, "loss/validation": 0.0}
        for part in summaries.hparams(dict(hparams), metrics):
            self._curves.add_summary(part)
